"""The supervised (n+1)-tuple loss: InfoNCE whose pairs are told by labels."""

from dataclasses import replace

import torch

from dipole.core.errors import PairsError
from dipole.core.objectives.infonce import InfoNCE, Temperature
from dipole.core.pairs import Pairs
from dipole.core.registry import register


@register(
    "tuple",
    aliases=("supervised", "n_tuple"),
    formula="L_i = mean_{p: y_p = y_i} -log( e^{s_ip/tau} / ( e^{s_ip/tau} + sum_{j: y_j != y_i} e^{s_ij/tau} ) )",
    source="LMCL Eq. 2, Fig. 2(b); Sohn 2016",
    cost="one pass; the lists of positives take (rows x largest class) entries",
)
class Tuple(InfoNCE):
    """(n+1)-tuple loss, the supervised reference: positives share the anchor's label, negatives do not.

    Formula (LMCL Eq. 2):
        L_i = mean_{p: y_p = y_i} -log( e^{s_ip/tau} / ( e^{s_ip/tau} + sum_{j: y_j != y_i} e^{s_ij/tau} ) )

    Args:
        temperature: tau > 0.

    Raises:
        PairsError: if the pairs carry no labels, or candidates whose labels are unknown (a queue).
    """

    def __init__(self, temperature: Temperature = 0.5) -> None:
        super().__init__(temperature)

    def prepare(self, pairs: Pairs) -> Pairs:
        labels = pairs.labels
        if labels is None:
            raise PairsError("tuple is supervised and needs labels: Pairs.from_views(views, labels=labels).")
        if len(pairs.candidates) != len(labels):
            raise PairsError(
                f"tuple needs the label of every candidate, but there are {len(pairs.candidates)} candidates and "
                f"{len(labels)} labels (a queue or several keys); use Pairs.from_views(views, labels=labels)."
            )
        same = _same_label(labels)  # (A, n) indices, -1 pads
        itself = torch.arange(len(labels), device=labels.device).unsqueeze(1)
        dropped = itself if pairs.anchors is pairs.candidates else itself[:, :0]
        positives = torch.where(same == itself, -1, same) if dropped.shape[1] else same
        return replace(pairs, positives=positives, dropped=dropped, views=False, trusted=True, padded=True)


def _same_label(labels: torch.Tensor) -> torch.Tensor:
    """(A, largest class) indices of the rows that share each row's label, padded with -1."""
    _, group = labels.unique(return_inverse=True)
    sizes = group.bincount()
    order = group.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes
    offsets = torch.arange(int(sizes.max()), device=labels.device)
    place = starts[group].unsqueeze(1) + offsets  # (A, n)
    return torch.where(offsets < sizes[group].unsqueeze(1), order[place.clamp_max(len(labels) - 1)], -1)
