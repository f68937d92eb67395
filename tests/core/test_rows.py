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


@pytest.fixture(params=["symmetric", "rectangular", "own exclusions"])
def layout(request):
    if request.param == "symmetric":
        return Pairs.from_views([unit(9, 5, 0), unit(9, 5, 1)]), True
    if request.param == "rectangular":
        return Pairs.cross(unit(7, 5, 0), unit(7, 5, 1), unit(12, 5, 2)), False
    x = unit(10, 5, 3)
    dropped = torch.tensor([[i, (3 * i + 1) % 10, -1] for i in range(10)])
    return Pairs(x, x, torch.tensor([[(i + 1) % 10] for i in range(10)]), dropped), False


def test_extremes_and_counts(layout):
    pairs, _ = layout
    wanted = [Extreme(), Extreme(largest=False), Count(-0.2, 0.4), LogSumExp(3.0)]
    most, least, count, _ = statistics_of(layout, pairs.anchors, pairs.candidates, wanted, 4)
    s = pairs.anchors @ pairs.candidates.T
    for i, banned in enumerate(pairs.excluded.tolist()):
        allowed = [j for j in range(s.shape[1]) if j not in banned]
        assert most[i] == max(allowed, key=lambda j: s[i, j])
        assert least[i] == min(allowed, key=lambda j: s[i, j])
        assert count[i] == sum(-0.2 < s[i, j] < 0.4 for j in allowed)


def statistics_of(layout, x, y, wanted, tile):
    pairs, symmetric = layout
    more = {"counts": pairs.negative_counts, "bound": 1.0, "symmetric": symmetric, "tile": tile}
    return row_statistics(x, y, pairs.excluded, wanted, **more).values()


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


def dense(statistic_of_row, s, excluded):
    """A statistic of every row (A,), from the whole matrix."""
    rows = (s[i, [j for j in range(s.shape[1]) if j not in banned]] for i, banned in enumerate(excluded.tolist()))
    return torch.stack([statistic_of_row(row) for row in rows])


@pytest.mark.parametrize(("tile", "cached"), [(3, True), (3, False), (4, False), (64, True)])
def test_statistics_and_gradients_equal_loops(layout, tile, cached, monkeypatch):
    monkeypatch.setattr(tiles, "CACHE_BYTES", 1 << 20 if cached else 0)
    pairs, _ = layout
    x = pairs.anchors.clone().requires_grad_()
    y = x if pairs.anchors is pairs.candidates else pairs.candidates.clone().requires_grad_()
    inputs = [x] if y is x else [x, y]
    # The unit vectors of the diagonal are excluded here; the pole is theirs alone.
    alone = y is x and bool((pairs.ignored[:, :1] >= 0).all())
    wanted = [statistic for statistic in STATISTICS if alone or statistic != POLE]
    found = statistics_of(layout, x, y, wanted, tile)
    upstream = torch.randn(len(wanted), len(x), dtype=torch.double, generator=torch.Generator().manual_seed(7))
    for statistic, value, weights in zip(wanted, found, upstream, strict=True):
        expected = dense(STATISTICS[statistic], x @ y.T, pairs.excluded)
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
        ours, theirs = (
            torch.autograd.grad((weights * each).sum(), inputs, retain_graph=True) for each in (value, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("statistic", [s for s in STATISTICS if abs(s.scale or 0) < 100 and s.kernel], ids=str)
def test_slopes_given_are_those_of_autograd(statistic):
    s = torch.linspace(-0.95, 1, 20, dtype=torch.double).view(4, 5)
    e = None if statistic.scale is None else (statistic.scale * s).exp()
    given, found = statistic.slopes(s, e), Statistic.slopes(statistic, s, e)
    for one, other in zip(given if isinstance(given, tuple) else (given,), found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("own", [True, False], ids=["candidates are anchors", "candidates apart"])
@pytest.mark.parametrize("first", [1, 5, 8])
def test_columns_before_the_first_take_no_part(first, own):
    x = unit(9, 5, 0).requires_grad_()
    y = x if own else unit(11, 5, 1).requires_grad_()
    inputs = [x] if own else [x, y]
    excluded = torch.tensor([[i, (i * 5 + 2) % len(y), -1] for i in range(9)])
    if first == 8 and own:
        excluded[8] = -1  # a row keeps its only negative, itself
    counts = torch.tensor([sum(j not in set(row) for j in range(first, len(y))) for row in excluded.tolist()])
    wanted = [LogSumExp(3.0), LogSumExp(90.0), SoftmaxMean(2.0), Sum(), Plain(torch.cos), Extreme(), Extreme(False)]
    found = row_statistics(x, y, excluded, wanted, counts=counts, bound=1.0, tile=4, first=first)
    mask = torch.zeros(len(x), len(y) + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(excluded < 0, len(y), excluded), True)
    mask = mask[:, :-1]
    mask[:, :first] = True
    s = x @ y.T
    masked = s.masked_fill(mask, -math.inf)
    some = counts > 0
    expected = {
        wanted[0]: (3 * masked).logsumexp(1),
        wanted[1]: (90 * masked).logsumexp(1),
        wanted[2]: (torch.softmax(2 * masked[some], 1) * s[some]).sum(1),
        wanted[3]: s.masked_fill(mask, 0.0).sum(1),
        wanted[4]: s.cos().masked_fill(mask, 0.0).sum(1),
    }
    for stat, value in expected.items():
        ours = found[stat][some]
        theirs = value if len(value) == len(ours) else value[some]
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        ours, theirs = (torch.autograd.grad(v.square().sum(), inputs, retain_graph=True) for v in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    for stat, values in ((wanted[5], masked), (wanted[6], -s.masked_fill(mask, math.inf))):
        assert found[stat].tolist() == torch.where(some, values.argmax(1), -1).tolist()
