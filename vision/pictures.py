"""Pictures of a query: its positives and negatives with their weights, and a map of the mini-batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dipole.core.utils.extras import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 4  # negatives of greatest weight, and of least weight (CACR Fig. 6)
# The colours, the range and the circle of radius t_neg are CACR's (Fig. 7).
QUERY, POSITIVE, NEGATIVES = "#2a9d3a", "#2f5fd0", "Reds"
REACH = 10.0  # range of the t-SNE map in each direction from the query

Projection = Literal["tsne", "pca"]


@dataclass(frozen=True)
class Neighbourhood:
    """A query with its positives and negatives: rows of `points` (1 + K + M, d) of unit length, in this order.

    positives (K,), negatives (M,): the weights pi+ and pi-, each with sum 1. t_neg: the sharpness of pi-.
    """

    points: Tensor
    positives: Tensor
    negatives: Tensor
    t_neg: float


def neighbourhood(views: Sequence[Tensor], t_pos: float, t_neg: float) -> Neighbourhood:
    """Return the weights of the positives and negatives of the first image.

    Formula (CACR Eqs. 3, 5), d2 = ||x - y||^2 on the unit sphere: pi+_p ~ e^{t_pos d2_p}, pi-_j ~ e^{-t_neg d2_j}.
    Positives are its rows in views 2, 3, ... (B, d), negatives the other rows of view 2.
    """
    unit = [F.normalize(view.detach().float(), dim=1) for view in views]
    anchor = unit[0][0]
    positives = torch.stack([view[0] for view in unit[1:]])
    negatives = unit[1][1:]
    pull = torch.softmax(t_pos * (2 - 2 * positives @ anchor), 0)
    push = torch.softmax(-t_neg * (2 - 2 * negatives @ anchor), 0)
    return Neighbourhood(torch.cat([anchor[None], positives, negatives]), pull, push, t_neg)


def flat(points: Tensor, projection: Projection, seed: int = 0) -> Tensor:
    """Project points (n, d) to (n, 2): their first two principal components, or t-SNE that starts from these."""
    if projection == "pca" or len(points) < 5:
        centred = points - points.mean(0)
        _, _, axes = torch.linalg.svd(centred, full_matrices=False)
        return F.pad(centred @ axes[:2].T, (0, max(0, 2 - len(axes))))
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(points) - 1) / 3)
    tsne = TSNE(init="pca", perplexity=perplexity, random_state=seed)
    return torch.from_numpy(tsne.fit_transform(points.cpu().numpy()))


def around(points: Tensor, projection: Projection) -> tuple[Tensor, float]:
    """Return coordinates (n, 2) relative to the query, the first point, and the range of the map."""
    points = points - points[:1]
    if projection == "tsne":
        return points, REACH
    return points, 1.05 * float(points.abs().max()) or 1.0


def draw_query(
    images: Sequence[Tensor], found: Neighbourhood, path: Path, *, title: str, projection: Projection, seed: int
) -> None:
    """Draw K + 1 views (B, C, H, W) with their weights (CACR Fig. 6) above the map of the batch (CACR Fig. 7)."""
    order = found.negatives.argsort(descending=True)
    count = min(SHOWN, len(order) // 2) or len(order)
    strip: list[tuple[Tensor, str]] = [(images[0][0], "query")]
    for view, weight in zip(images[1:], found.positives, strict=True):
        strip.append((view[0], f"positive\n{float(weight):.3f}"))
    for name, places in (("near", order[:count]), ("far", order[len(order) - count :])):
        for place in places.tolist():
            strip.append((images[1][1 + place], f"negative, {name}\n{float(found.negatives[place]):.2g}"))
    columns = min(len(strip), 7)
    rows = -(-len(strip) // columns)
    figure = new_figure(7.4, 4.6 + 1.25 * rows)
    figure.suptitle(title, fontsize=9, family="monospace")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.25 * rows, 4.4))[:, 0]
    axis = above.subplots()  # one for all images: each one takes a share of a second to lay out
    for place, (image, text) in enumerate(strip):
        left, top = place % columns, 1.2 * (place // columns)
        channels = 3 if len(image) >= 3 else 1
        picture = image[:channels].detach().cpu().clamp(0, 1).permute(1, 2, 0).squeeze(2)
        extent = (left, left + 0.85, top + 0.85, top)
        axis.imshow(picture.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=extent)
        axis.text(left + 0.42, top - 0.04, text, fontsize=7, ha="center", va="bottom")
    axis.set(xlim=(0, columns - 0.15), ylim=(1.2 * rows - 0.35, -0.3), aspect="equal")
    axis.axis("off")
    axis = below.subplots()
    points, reach = around(flat(found.points, projection, seed), projection)
    _scatter(axis, points, found, reach)
    inside = int((points[1:].abs() <= reach).all(1).sum())
    name = {"tsne": "t-SNE", "pca": "principal component"}[projection]
    axis.set_xlabel(f"{name} 1, from the query (no unit); {inside} of {len(points) - 1} samples are in this range")
    axis.set_ylabel(f"{name} 2 (no unit)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _scatter(axis: "Axes", points: Tensor, found: Neighbourhood, reach: float) -> None:
    count = len(found.positives)
    x, y = points.T.numpy()
    # Relative to the mean weight, so that sizes and colours mean the same in every picture.
    relative = (found.negatives * len(found.negatives)).cpu().numpy()
    near, far = slice(1, 1 + count), slice(1 + count, None)
    cloud = axis.scatter(x[far], y[far], c=relative, s=14, cmap=NEGATIVES, vmin=-1, vmax=4, label="negatives")
    size = 60 * count * found.positives.cpu().numpy()
    axis.scatter(x[near], y[near], s=size, marker="^", color=POSITIVE, edgecolor="white", label="positives")
    axis.scatter(x[:1], y[:1], s=150, marker="*", color=QUERY, edgecolor="white", label="query")
    turn = torch.linspace(0, 2 * torch.pi, 181)
    circle = found.t_neg * torch.stack([turn.cos(), turn.sin()])
    axis.plot(*circle.numpy(), color="black", linestyle="--", linewidth=0.8, label=f"radius t_neg = {found.t_neg:g}")
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    assert axis.figure is not None
    axis.figure.colorbar(cloud, ax=axis, extend="max", label="weight of a negative, times their number")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(0, 1.12), ncols=4, frameon=False, fontsize=8)
