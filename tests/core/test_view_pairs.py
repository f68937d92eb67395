"""Pairs of views: each view repels the other images of the views after it, as in the code of CACR's authors."""

import math

import pytest
import torch
from torch import Tensor

import dipole
from dipole import Pairs
from dipole.core.conformance.reference import Case, cacr
from dipole.core.objectives.engine import using
from dipole.core.utils.errors import PairsError


def squared(x: list[float], y: list[float]) -> float:
    lengths = [math.sqrt(sum(v * v for v in z)) for z in (x, y)]
    return 2 - 2 * sum(a * b for a, b in zip(x, y, strict=True)) / (lengths[0] * lengths[1])


def weighted(distances: list[float], sharpness: float) -> float:
    weights = [math.exp(sharpness * d) for d in distances]
    return sum(w * d for w, d in zip(weights, distances, strict=True)) / sum(weights)


def described(views: list[list[list[float]]], t_pos: float, t_neg: float, of_images: list[float]) -> float:
    """Attraction over all views and images, repulsion over pairs of views x < y and images, in plain Python.

    Each image counts by its weight.
    """
    count, batch = len(views), len(views[0])
    attraction = [
        of_images[i] * weighted([squared(views[v][i], views[p][i]) for p in range(count) if p != v], t_pos)
        for v in range(count)
        for i in range(batch)
    ]
    repulsion = [
        -of_images[i] * weighted([squared(views[x][i], views[y][j]) for j in range(batch) if j != i], -t_neg)
        for x in range(count)
        for y in range(x + 1, count)
        for i in range(batch)
    ]
    pairs_of_views = count * (count - 1) / 2
    return (sum(attraction) / count + sum(repulsion) / pairs_of_views) / sum(of_images)


def views_of(count: int, batch: int = 6, width: int = 5) -> list[Tensor]:
    source = torch.Generator().manual_seed(count)
    return [torch.randn(batch, width, generator=source, dtype=torch.double).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize(
    ("positives", "t_pos", "t_neg", "engine"), [(1, 1.0, 2.0, "dense"), (2, 3.0, 0.9, "dense"), (4, 3.0, 0.9, "eager")]
)
def test_cacr_equals_the_description_of_its_authors_code(positives, t_pos, t_neg, engine):
    views = views_of(positives + 1)
    weights = torch.tensor([0.5, 0.0, 2.0, 1.0, 3.0, 0.25], dtype=torch.double)
    for given in (None, weights):
        of_images = [1.0] * 6 if given is None else given.tolist()
        expected = described([view.tolist() for view in views], t_pos, t_neg, of_images)
        pairs = Pairs.from_views(views, negatives="view_pairs", weights=given)
        for text in (f"cacr(t_pos={t_pos}, t_neg={t_neg})", f"cacr(k={positives}, t_pos={t_pos}, t_neg={t_neg})"):
            with using(engine):
                found = dipole.objective(text)(pairs)
            assert found.loss.item() == pytest.approx(expected, abs=1e-12)


OPTIONS = [
    {},
    {"cost": "rbf", "rbf_t": 1.5},
    {"positive_weights": "reversed"},
    {"positive_weights": "uniform", "negative_weights": "uniform"},
    {"detach_weights": True},
    {"intra_batch": True},
    {"k": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_cacr_equal_those_of_the_reference(options):
    views = views_of(4)
    pairs = Pairs.from_views(views, negatives="view_pairs")
    text = ", ".join(f"{name}={str(value).lower()}" for name, value in options.items())
    expected = cacr(Case.of(pairs), **{"t_pos": 1.0, "t_neg": 2.0, **options})  # type: ignore[arg-type]
    wanted = torch.autograd.grad(expected, views, retain_graph=True)
    for engine in ("dense", "eager"):
        with using(engine):
            found = dipole.objective(f"cacr({text})")(pairs).loss
            assert found.item() == pytest.approx(expected.item(), abs=1e-12)
            for mine, theirs in zip(torch.autograd.grad(found, views, retain_graph=True), wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", ["cacr", "infonce", "align_uniform", "infonce + 0.1*dp", "vicreg", "hcl"])
def test_two_views_are_one_direction_between_them(text):
    first, second = views_of(2)
    found = dipole.objective(text)(Pairs.from_views([first, second], negatives="view_pairs")).loss
    assert found.item() == pytest.approx(dipole.objective(text)(Pairs.cross(first, second)).loss.item(), abs=1e-12)


@pytest.mark.parametrize(
    "text", ["infonce", "dcl", "hcl", "triplet", "infonce + 1*dp", "siglip(temperature=1, bias=0)"]
)
def test_other_objectives_average_over_the_pairs_of_views(text):
    views = views_of(4)
    term = dipole.objective(text)
    found = term(Pairs.from_views(views, negatives="view_pairs")).loss.item()
    each = [term(Pairs.cross(views[x], views[y])).loss.item() for x in range(4) for y in range(x + 1, 4)]
    assert found == pytest.approx(sum(each) / len(each), abs=1e-12)


def test_anchors_and_negatives():
    views, labels, index = views_of(3), torch.arange(6) % 2, torch.randperm(6)
    pairs = Pairs.from_views(views, labels, index, negatives="view_pairs")
    assert pairs.negative_counts.tolist() == [5] * 18
    assert torch.equal(pairs.view, torch.tensor([0, 0, 1]).repeat_interleave(6))
    for number, (x, y) in enumerate([(0, 1), (0, 2), (1, 2)]):
        for i in range(6):
            row = 6 * number + i
            assert torch.equal(pairs.anchors[row], views[x][i])
            assert torch.equal(pairs.candidates[pairs.positives[row]], views[y][i : i + 1])
            assert torch.equal(pairs.candidates[pairs.negative_mask()[row]], views[y][torch.arange(6) != i])
            assert (pairs.labels[row], pairs.index[row]) == (labels[i], index[i])


def test_too_few_views_for_k():
    with pytest.raises(
        PairsError, match=r"cacr\(k=4\) needs 4 positives for each anchor, the pairs have 2: use 5 views"
    ):
        dipole.objective("cacr(k=4)")(Pairs.from_views(views_of(3), negatives="view_pairs"))
    with pytest.raises(PairsError, match="must be 'view_pairs', 'all' or 'queries', got 'pairs'"):
        Pairs.from_views(views_of(3), negatives="pairs")  # type: ignore[arg-type]
