"""Diagnostics against loops over pairs."""

import math

import pytest
import torch

from dipole import Pairs
from dipole.core import diagnostics, rows
from dipole.core.errors import PairsError


@pytest.fixture
def points(monkeypatch):
    monkeypatch.setattr(diagnostics, "TILE", 16)  # several tiles
    monkeypatch.setattr(rows, "TILE", 16)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(41, 4, dtype=torch.double, generator=generator), torch.arange(41) % 3


def distance(z, i, j):
    a, b = z[i] / z[i].norm(), z[j] / z[j].norm()
    return float((1 - a @ b) / 2)


def upper(z):
    return [(i, j, distance(z, i, j)) for i in range(len(z)) for j in range(i + 1, len(z))]


def test_histogram_counts_each_pair_once_and_splits_by_class(points):
    z, labels = points
    found = diagnostics.distance_histogram(z, labels, bins=10)
    same, different = [0] * 10, [0] * 10
    for i, j, d in upper(z):
        (same if labels[i] == labels[j] else different)[min(9, int(d * 10))] += 1
    assert found.same.tolist() == same
    assert found.different.tolist() == different
    assert found.all.sum() == 41 * 40 // 2
    assert diagnostics.distance_histogram(z).same is None


def test_margin_occupancy(points):
    z, _ = points
    inside = [0.1 < d < 0.5 for _, _, d in upper(z)]
    assert diagnostics.margin_occupancy(z) == pytest.approx(sum(inside) / len(inside))
    # A view and its own augmentation are no pair; neighbouring sentences are.
    f, g = z[:6], z[6:12]
    window = Pairs.from_window(f, g, torch.tensor([0, 0, 0, 1, 1, 1]))
    inside = [0.1 < distance(torch.cat([f, g]), i, 6 + j) < 0.5 for i in range(6) for j in range(6) if i != j]
    assert diagnostics.margin_occupancy(window) == pytest.approx(sum(inside) / len(inside))


def test_similarity_error_and_its_bound(points):
    z, labels = points
    wrong_apart, wrong_near = [], []
    for i, j, d in upper(z):
        if labels[i] == labels[j]:
            wrong_near.append(max(d - 0.1 - 0.05, 0))
        else:
            wrong_apart.append(max(0.5 - 0.05 - d, 0))
    expected = sum(wrong_apart) / len(wrong_apart) + sum(wrong_near) / len(wrong_near)
    error, bound = diagnostics.similarity_error(z, labels, mu=0.05, weight=0.2)
    assert error == pytest.approx(expected)
    outside = [sum(int(y != k) for y in labels) for k in range(3)]
    assert bound == pytest.approx(4 * 0.4 / 0.2 + max(outside) / min(outside) / 3)


def test_conditional_entropy_and_mutual_information(points):
    z, _ = points
    pairs = Pairs.from_views([z[:10], z[10:20]])
    u = torch.nn.functional.normalize(pairs.anchors, dim=1)
    entropies = []
    for i in range(20):
        negatives = [j for j in range(20) if j % 10 != i % 10]
        weights = torch.tensor([math.exp(-1.5 * float((u[i] - u[j]).square().sum())) for j in negatives])
        weights = weights / weights.sum()
        entropies.append(float(-(weights * weights.log()).sum()))
    entropy, maximum = diagnostics.conditional_entropy(pairs, t_neg=1.5)
    assert entropy == pytest.approx(sum(entropies) / 20, rel=1e-6)
    assert maximum == pytest.approx(math.log(18))
    assert diagnostics.mutual_information(pairs, t_neg=1.5) == pytest.approx(maximum - entropy)
    assert diagnostics.conditional_entropy(pairs, t_neg=0.0)[0] == pytest.approx(maximum)


def test_min_max_ratio(points):
    z, _ = points
    expected = []
    for i in range(len(z)):
        d = [float((z[i] - z[j]).square().sum()) for j in range(len(z)) if j != i]
        expected.append((max(d) - min(d)) / min(d))
    assert diagnostics.min_max_ratio(z) == pytest.approx(sum(expected) / len(expected))
    assert diagnostics.min_max_ratio(7 * z) == pytest.approx(diagnostics.min_max_ratio(z))  # the divisor cancels


def test_alignment_uniformity_and_mean_distance(points):
    z, _ = points
    pairs = Pairs.from_views([z[:10], z[10:20]])
    u = torch.nn.functional.normalize(z, dim=1)
    near = [float((u[i] - u[10 + i]).norm() ** 3) for i in range(10)]
    assert diagnostics.alignment(pairs, alpha=3) == pytest.approx(sum(near) / 10)
    kernel = [math.exp(-2 * 4 * d) for _, _, d in upper(z)]
    assert diagnostics.uniformity(z) == pytest.approx(math.log(sum(kernel) / len(kernel)))
    mean = sum(d for _, _, d in upper(z)) / len(kernel)
    assert diagnostics.mean_distance(z) == pytest.approx(mean)


def test_mean_distance_reaches_its_ceiling_on_a_simplex():
    simplex = torch.eye(5, dtype=torch.double) - 1 / 5
    assert diagnostics.mean_distance(simplex) == pytest.approx(diagnostics.mean_distance_ceiling(5))


def test_numerical_rank():
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(30, 3, generator=generator) @ torch.randn(3, 12, generator=generator)
    assert diagnostics.numerical_rank(low) == 3
    assert diagnostics.numerical_rank(torch.zeros(4, 4)) == 0


def test_too_few_points_is_one_clear_error():
    with pytest.raises(PairsError, match=r"n >= 2"):
        diagnostics.distance_histogram(torch.randn(1, 3))
