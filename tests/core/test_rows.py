"""The tiled engine against loops in float64: every statistic, every layout of tiles, both passes."""

import math
from dataclasses import dataclass

import pytest
import torch

from dipole.core.objectives import tiles
from dipole.core.objectives.engine import row_statistics
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.statistics import Between, Count, Extreme, LogSumExp, SoftmaxMean, Softplus, Statistic, Sum


def unit(n, d, seed):
    x = torch.randn(n, d, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(x, dim=1)


@pytest.fixture(params=["symmetric", "rectangular", "own exclusions", "first", "first of its own", "last of its own"])
def layout(request):
    """Anchors, candidates, excluded columns, whether both are one matrix, and the first column that takes part."""
    kind = request.param
    if kind == "symmetric":
        pairs = Pairs.from_views([unit(9, 5, 0), unit(9, 5, 1)])
        return pairs.anchors, pairs.candidates, pairs.excluded, True, 0
    if kind == "rectangular":
        pairs = Pairs.cross(unit(7, 5, 0), unit(7, 5, 1), unit(12, 5, 2))
        return pairs.anchors, pairs.candidates, pairs.excluded, False, 0
    x, y = unit(10, 5, 3), unit(13, 5, 4) if kind == "first" else None
    y = x if y is None else y
    excluded = torch.tensor([[i, (3 * i + 1) % len(y), -1] for i in range(10)])
    if kind == "last of its own":
        excluded[9] = -1  # a row keeps its only negative, itself; all others have none
    return x, y, excluded, False, {"own exclusions": 0, "first": 5, "first of its own": 6, "last of its own": 9}[kind]


def statistics_of(layout, x, y, wanted, tile):
    _, _, excluded, symmetric, first = layout
    counts = torch.tensor([len(columns) for columns in allowed(layout)])
    more = {"counts": counts, "bound": 1.0, "symmetric": symmetric, "tile": tile, "first": first}
    return row_statistics(x, y, excluded, wanted, **more).values()


def allowed(layout):
    """The columns of each row that take part."""
    _, y, excluded, _, first = layout
    return [[j for j in range(first, len(y)) if j not in banned] for banned in excluded.tolist()]


def test_extremes_and_counts(layout):
    x, y, *_ = layout
    wanted = [Extreme(), Extreme(largest=False), Count(-0.2, 0.4), LogSumExp(3.0)]
    most, least, count, _ = statistics_of(layout, x, y, wanted, 4)
    s = x @ y.T
    for i, columns in enumerate(allowed(layout)):
        assert most[i] == max(columns, key=lambda j: s[i, j], default=-1)
        assert least[i] == min(columns, key=lambda j: s[i, j], default=-1)
        assert count[i] == sum(-0.2 < s[i, j] < 0.4 for j in columns)


def test_unbounded_similarities_use_a_running_maximum():
    x = 30 * torch.randn(40, 6, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    own = torch.arange(40).unsqueeze(1)
    counts = torch.full((40,), 39)
    found = row_statistics(x, x, own, [LogSumExp(1.0)], counts=counts, symmetric=True, tile=16)[LogSumExp(1.0)]
    s = (x @ x.T).fill_diagonal_(-math.inf)
    torch.testing.assert_close(found, s.logsumexp(1), rtol=1e-12, atol=0)
    assert s.max() > 1000


def test_rows_without_negatives_are_empty_and_without_gradient():
    x = unit(4, 3, 0).requires_grad_()
    everything = torch.arange(4).repeat(4, 1)
    wanted = [LogSumExp(2.0), LogSumExp(200.0), SoftmaxMean(2.0), Sum(), Extreme()]
    found = row_statistics(x, x, everything, wanted, counts=torch.zeros(4, dtype=torch.long), bound=1.0, symmetric=True)
    assert (found[wanted[0]] == -math.inf).all()
    assert (found[wanted[1]] == -math.inf).all()
    assert (found[wanted[4]] == -1).all()
    (found[wanted[2]].sum() + found[wanted[3]].sum()).backward()
    assert (x.grad == 0).all()


@dataclass(frozen=True)
class Cauchy(Statistic):
    """log sum_j 1 / (1 + d2_ij) of unit vectors (t-SimCNE)."""

    def parts(self, s, e):
        return 1 / (3 - 2 * s)

    def finish(self, sums, shift, count):
        return torch.where(count > 0, torch.where(count > 0, sums[0], 1.0).log(), -math.inf)


@dataclass(frozen=True)
class Plain(Statistic):
    """sum_j of a function of s, which need not vanish anywhere."""

    function: object

    def parts(self, s, e):
        return self.function(s)


@dataclass(frozen=True)
class SoftmaxSquare(Statistic):
    """sum_j softmax_j(scale s_ij) s_ij^2."""

    scale: float

    def parts(self, s, e):
        return e, s.square() * e

    def finish(self, sums, shift, count):
        return torch.where(count > 0, sums[1] / torch.where(count > 0, sums[0], 1.0), 0.0)


def softmax_mean(scale, power=1):
    return lambda row: (torch.softmax(scale * row, 0) * row**power).sum()


def between(low, high):
    return lambda row: ((high - row) * (row - low)).clamp_min(0).sum()


# Not defined at s = 1, where each anchor meets itself, nor a number above it.
POLE = Plain(lambda s: (1 - s).log() / (1 - s))
# Each statistic of one row's negatives, written from its definition.
STATISTICS = {
    LogSumExp(2.0): lambda row: torch.logsumexp(2 * row, 0),
    LogSumExp(100.0): lambda row: torch.logsumexp(100 * row, 0),
    **{SoftmaxMean(scale): softmax_mean(scale) for scale in (4.0, -4.0, 120.0, -120.0)},
    Sum(): torch.sum,
    Between(0.0, 0.8): between(0.0, 0.8),
    Between(-0.3, 0.1): between(-0.3, 0.1),
    Softplus(10.0, -3.0): lambda row: (1 + (10 * row - 3).exp()).log().sum(),
    Cauchy(): lambda row: (1 / (3 - 2 * row)).sum().log(),
    Plain(torch.cos): lambda row: row.cos().sum(),
    Plain(torch.tanh): lambda row: row.tanh().sum(),
    POLE: lambda row: ((1 - row).log() / (1 - row)).sum(),
    SoftmaxSquare(3.0): softmax_mean(3.0, 2),
    SoftmaxSquare(-150.0): softmax_mean(-150.0, 2),
}


@pytest.mark.parametrize(("tile", "cached"), [(3, True), (3, False), (4, False), (64, True)])
def test_statistics_and_gradients_equal_loops(layout, tile, cached, monkeypatch):
    monkeypatch.setattr(tiles, "CACHE_BYTES", 1 << 20 if cached else 0)
    x = layout[0].clone().requires_grad_()
    y = x if layout[1] is layout[0] else layout[1].clone().requires_grad_()
    inputs = [x] if y is x else [x, y]
    rows = [(i, columns) for i, columns in enumerate(allowed(layout)) if columns]
    # Where unit vectors meet themselves, the pole is theirs alone.
    alone = y is x and all(i not in columns for i, columns in rows)
    wanted = [statistic for statistic in STATISTICS if alone or statistic != POLE]
    found = statistics_of(layout, x, y, wanted, tile)
    upstream = torch.randn(len(wanted), len(rows), dtype=torch.double, generator=torch.Generator().manual_seed(7))
    for statistic, values, weights in zip(wanted, found, upstream, strict=True):
        value = values[[i for i, _ in rows]]
        expected = torch.stack([STATISTICS[statistic]((x @ y.T)[i, columns]) for i, columns in rows])
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
        ours, theirs = (
            torch.autograd.grad((weights * each).sum(), inputs, retain_graph=True) for each in (value, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
