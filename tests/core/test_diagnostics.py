"""The diagnostics against loops over pairs, and against values known beforehand."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import dipole
from dipole import OptionError, Pairs, PairsError
from dipole.core.evaluation import diagnostics, histograms
from dipole.core.evaluation.diagnostics import alignment, conditional_entropy, mean_distance, min_max_ratio, uniformity
from dipole.core.objectives import tiles
from dipole.core.train.evaluation import diagnose_pairs
from tests.runs import refused

N, WIDTH = 11, 4
LABELS = torch.tensor([0, 1, 2, 0, 1, 0, 2, 2, 1, 0, 0])
SHARPNESS = {
    "cacr(k=1, t_neg=3)": 3.0, "infonce + 0.5*cacr(t_neg=0.9)": 0.9, "infonce": 2.0, None: 2.0,
    "cacr(k=1, t_neg=0.9, negative_weights=reversed)": -0.9,
}  # fmt: skip


@pytest.fixture(params=[512, 4], ids=["one tile", "several tiles"], autouse=True)
def tile(request, monkeypatch):
    for module in (tiles, diagnostics, histograms):
        monkeypatch.setattr(module, "TILE", request.param)


def points(seed: int = 0) -> torch.Tensor:
    return torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(x, y) -> float:
    return float(np.dot(x, y) / math.sqrt(np.dot(x, x) * np.dot(y, y)))


def distances(x: torch.Tensor) -> dict[tuple[int, int], float]:
    v = x.numpy()
    return {(i, j): (1 - cosine(v[i], v[j])) / 2 for i in range(len(v)) for j in range(i)}


def window() -> Pairs:
    f, g = points(1), points(2)
    return Pairs.from_window(f, g, torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2]), window=2)


def negatives(pairs: Pairs, i: int) -> list[int]:
    out = set(pairs.positives[i].tolist()) | set(pairs.ignored[i].tolist())
    return [j for j in range(pairs.first_negative, len(pairs.candidates)) if j not in out]


def positives(pairs: Pairs, i: int) -> list[int]:
    return [p for p in pairs.positives[i].tolist() if p >= 0]


def half_distance(pairs: Pairs, i: int, j: int) -> float:
    return (1 - cosine(pairs.anchors[i].numpy(), pairs.candidates[j].numpy())) / 2


def weights(pairs: Pairs, t: float) -> list[list[float]]:
    """pi^-_ij of the anchors that have negatives (CACR Eq. 4)."""
    raw = [[math.exp(-4 * t * half_distance(pairs, i, j)) for j in negatives(pairs, i)] for i in range(N)]
    return [[r / sum(row) for r in row] for row in raw if row]


def test_histogram_counts_each_pair_once():
    x = points()
    found = diagnostics.distance_histogram(x, LABELS, bins=8)
    assert found.edges.tolist() == pytest.approx([k / 8 for k in range(9)])
    for same, counts in ((True, found.same), (False, found.different)):
        chosen = [d for (i, j), d in distances(x).items() if bool(LABELS[i] == LABELS[j]) is same]
        assert counts.tolist() == np.histogram(chosen, bins=8, range=(0, 1))[0].tolist()
    assert found.all.tolist() == (found.same + found.different).tolist()
    assert int(found.all.sum()) == N * (N - 1) // 2
    unlabelled = diagnostics.distance_histogram(x, bins=8)
    assert (unlabelled.all.tolist(), unlabelled.same) == (found.all.tolist(), None)
    partly = diagnostics.distance_histogram(x, LABELS.where(LABELS > 0, -1), bins=8)
    labelled = diagnostics.distance_histogram(x[LABELS > 0], LABELS[LABELS > 0], bins=8)
    assert torch.equal(partly.all, found.all)
    assert torch.equal(torch.stack([partly.same, partly.different]), torch.stack([labelled.same, labelled.different]))
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]])
    assert diagnostics.distance_histogram(x, bins=4).all.tolist() == [1, 0, 0, 2]


def test_pair_histogram_counts_positives_and_negatives():
    f, g = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    pairs = Pairs.from_window(f, g, torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]))
    found = diagnostics.pair_histogram(pairs, bins=8)
    kinds = {True: [], False: []}
    for i in range(9):
        for j in range(9):
            near = abs(i - j) == 1 and (i, j) not in ((2, 3), (3, 2), (6, 7), (7, 6))
            if i != j:
                kinds[near].append((1 - cosine(f[i].numpy(), g[j].numpy())) / 2)
    for near, counts in ((True, found.correct), (False, found.incorrect)):
        assert counts.tolist() == np.histogram(kinds[near], bins=8, range=(0, 1))[0].tolist()
    right, wrong = np.array(kinds[True]), np.array(kinds[False])
    errors = [(np.mean(right >= edge) + np.mean(wrong < edge)) / 2 for edge in found.edges.tolist()]
    assert found.error == pytest.approx(min(errors))
    x = torch.eye(4)
    own = torch.arange(4)[:, None]
    found = diagnostics.pair_histogram(Pairs(x, x.clone(), positives=own, ignored=own[:, :0]), bins=4)
    assert (found.correct.tolist(), found.incorrect.tolist()) == ([4, 0, 0, 0], [0, 0, 12, 0])
    assert found.error == 0


@pytest.mark.parametrize("limits", [(0.1, 0.5), (0.3, 0.6)])
def test_margin_occupancy_counts_neighbours_but_not_views(limits):
    low, high = limits
    near, views = window(), Pairs.from_views([points(1), points(2)])
    counted = {
        points(): distances(points()).values(),
        near: [half_distance(near, i, j) for i in range(N) for j in negatives(near, i) + positives(near, i)],
        views: [half_distance(views, i, j) for i in range(2 * N) for j in negatives(views, i)],
    }
    for given, every in counted.items():
        inside = [low < d < high for d in every]
        assert diagnostics.margin_occupancy(given, *limits) == pytest.approx(sum(inside) / len(inside))


@pytest.mark.parametrize("t", [0.0, 2.0, 40.0])
@pytest.mark.parametrize("layout", ["window", "all"])
def test_entropy_and_information(layout, t):
    x = points()
    pairs = window() if layout == "window" else Pairs(x, x, torch.full((N, 1), -1), torch.arange(N).unsqueeze(1))
    pi = weights(pairs, t)
    entropy = sum(-sum(p * math.log(p) for p in row) for row in pi) / len(pi)
    information = sum(sum(p * math.log(p * len(row)) for p in row) for row in pi) / len(pi)
    given = pairs if layout == "window" else x
    found, most = conditional_entropy(given, t)
    assert found == pytest.approx(entropy, abs=1e-9)
    assert most == pytest.approx(sum(math.log(len(row)) for row in pi) / len(pi))
    assert diagnostics.mutual_information(given, t) == pytest.approx(information, abs=1e-9)
    if t == 0:
        assert found == pytest.approx(most)


def test_half_precision_and_single_points():
    assert conditional_entropy(Pairs.cross(points()[:1], points(1)[:1])) == (0.0, 0.0)
    x = points().half()
    assert mean_distance(x) == pytest.approx(mean_distance(x.double()), abs=1e-6)
    assert conditional_entropy(x)[0] == pytest.approx(conditional_entropy(x.double())[0], abs=1e-4)
    for measure in (mean_distance, min_max_ratio, diagnostics.distance_histogram, conditional_entropy):
        refused(PairsError, "n >= 2", measure, normalize(points()[:1]))


def test_similarity_error_and_bound():
    x, mu = points(), 0.15
    wrong = {True: [], False: []}
    for (i, j), d in distances(x).items():
        same = bool(LABELS[i] == LABELS[j])
        wrong[same].append(max(d - 0.1 - mu, 0) if same else max(0.5 - mu - d, 0))
    error, bound = diagnostics.similarity_error(x, LABELS, 0.1, 0.5, mu, weight=0.1)
    assert error == pytest.approx(np.mean(wrong[True]) + np.mean(wrong[False]))
    outside = N - LABELS.bincount()
    assert bound == pytest.approx(4 * 0.4 / 0.1 + float(outside.max() / outside.min()) / 3)
    assert diagnostics.similarity_error(torch.eye(3)[LABELS], LABELS)[0] == 0
    labelled = diagnostics.similarity_error(x[LABELS > 0], LABELS[LABELS > 0])
    assert diagnostics.similarity_error(x, LABELS.where(LABELS > 0, -1)) == labelled


def test_alignment_and_uniformity():
    pairs = window()
    for alpha in (1.0, 2.0):
        expected = [(4 * half_distance(pairs, i, p)) ** (alpha / 2) for i in range(N) for p in positives(pairs, i)]
        assert alignment(pairs, alpha) == pytest.approx(sum(expected) / len(expected))
        assert alignment(Pairs.from_views([points(), 3 * points()]), alpha=alpha) == pytest.approx(0, abs=1e-7)
    for given, sides in ((points(), [points()]), (pairs, [pairs.anchors, pairs.candidates])):
        kernels = [[math.exp(-2 * 4 * d) for d in distances(z).values()] for z in sides]
        expected = sum(math.log(sum(kernel) / len(kernel)) for kernel in kernels) / len(sides)
        assert uniformity(given) == pytest.approx(expected, abs=1e-6)


def test_mean_distance_contrast_and_rank():
    x, d = points(), distances(points())
    assert mean_distance(x) == pytest.approx(sum(d.values()) / len(d))
    # LMCL Eq. 5: reached by points that sum to zero, such as a simplex. Random points stay below.
    simplex = torch.eye(5) - 0.2
    assert mean_distance(simplex) == pytest.approx(diagnostics.mean_distance_ceiling(5)) == pytest.approx(5 / 8)
    assert max(mean_distance(points(seed)) for seed in range(20)) <= diagnostics.mean_distance_ceiling(N)
    squared = [[float((x[i] - x[j]).square().sum()) for j in range(N) if j != i] for i in range(N)]
    assert min_max_ratio(x) == pytest.approx(sum((max(row) - min(row)) / min(row) for row in squared) / N)
    # A regular simplex has no contrast at all. A common factor changes nothing.
    assert min_max_ratio(torch.eye(6, dtype=torch.float64)) == pytest.approx(0, abs=1e-12)
    assert min_max_ratio(7 * x) == pytest.approx(min_max_ratio(x))
    assert diagnostics.numerical_rank(x) == WIDTH
    assert diagnostics.numerical_rank(x[:, :2] @ x[:2, :].clone()) == 2
    assert diagnostics.numerical_rank(torch.zeros(3, 3)) == 0
    assert diagnostics.numerical_rank(torch.diag(torch.tensor([1.0, 0.5, 1e-4])), tolerance=1e-3) == 2


@pytest.mark.parametrize(("name", "options", "said"), [
    ("distance_histogram", {"bins": 0}, "bins must be an integer >= 1, got 0"),
    ("pair_histogram", {"bins": 0}, "bins must be"), ("alignment", {"alpha": 0}, "alpha must be a number > 0, got 0"),
    ("margin_occupancy", {"delta_neg": 5}, "delta_neg must be .* >= 0 and <= 1, got 5"),
    ("margin_occupancy", {"delta_pos": 0.5, "delta_neg": 0.1}, r"delta_pos must be < delta_neg, got 0\.5"),
    ("similarity_error", {"labels": LABELS, "delta_pos": 0.5, "delta_neg": 0.1}, "delta_pos must be < delta_neg"),
    ("similarity_error", {"labels": LABELS, "mu": 0}, "mu must be a number > 0 or none, got 0"),
    ("uniformity", {"t": -1}, "t must be a number > 0, got -1"),
    ("conditional_entropy", {"t_neg": -1}, "t_neg must be a number >= 0, got -1"),
    ("mutual_information", {"t_neg": -1}, "t_neg must be a number >= 0, got -1"),
    ("effective_rank", {"tolerance": -1}, "tolerance must be a number >= 0, got -1"),
])  # fmt: skip
def test_as_functions_they_hold_to_their_ranges(name, options, said):
    given = Pairs.from_views([points(), points(1)]) if name in ("alignment", "pair_histogram") else points()
    refused(OptionError, f"{name}: {said}", getattr(diagnostics, name), given, **options)


@pytest.mark.parametrize(("text", "t_neg"), SHARPNESS.items())
def test_the_entropy_of_a_run_is_at_its_own_sharpness(text, t_neg):
    """CACR Fig. 3-5: each row weighs its negatives by its own t_neg, else by CACR's default."""
    pairs = Pairs.from_views([points(), points(1)], negatives="queries")
    found = diagnose_pairs((pairs,), None if text is None else dipole.objective(text))
    entropies = [-sum(p * math.log(p) for p in row) for row in weights(pairs, t_neg)]
    assert found["conditional_entropy"] == pytest.approx(sum(entropies) / N, abs=1e-5)
    assert found["conditional_entropy_maximum"] == pytest.approx(math.log(N - 1))
    assert found["conditional_entropy_t_neg"] == t_neg
