"""The tiled engine against loops in float64: every statistic, every layout of tiles, both passes."""

import math
from dataclasses import dataclass

import pytest
import torch

from dipole.core.objectives import tiles
from dipole.core.objectives.engine import row_statistics
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.statistics import Between, Count, Extreme, LogSumExp, SoftmaxMean, Softplus, Statistic, Sum

STATISTICS = [
    LogSumExp(2.0),
    LogSumExp(100.0),
    SoftmaxMean(4.0),
    SoftmaxMean(-4.0),
    SoftmaxMean(120.0),
    SoftmaxMean(-120.0),
    Sum(),
    Between(0.0, 0.8),
    Between(-0.3, 0.1),
    Softplus(10.0, -3.0),
]


def by_loop(statistic, row):
    """One statistic of one row's negatives, written from its definition."""
    if isinstance(statistic, Softplus):
        return (1 + (statistic.slope * row + statistic.bias).exp()).log().sum(0)
    if isinstance(statistic, LogSumExp):
        return torch.logsumexp(statistic.scale * row, 0)
    if isinstance(statistic, SoftmaxMean):
        return (torch.softmax(statistic.scale * row, 0) * row).sum()
    if isinstance(statistic, Sum):
        return row.sum()
    if isinstance(statistic, Between):
        return sum((max((statistic.high - s) * (s - statistic.low), s * 0) for s in row), torch.zeros(()))
    raise AssertionError(statistic)


def unit(n, d, seed):
    x = torch.randn(n, d, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(x, dim=1)


@pytest.fixture(params=["symmetric", "rectangular", "own exclusions"])
def layout(request):
    if request.param == "symmetric":
        pairs = Pairs.from_views([unit(9, 5, 0), unit(9, 5, 1)])
        return pairs, True
    if request.param == "rectangular":
        return Pairs.cross(unit(7, 5, 0), unit(7, 5, 1), unit(12, 5, 2)), False
    x = unit(10, 5, 3)
    dropped = torch.tensor([[i, (3 * i + 1) % 10, -1] for i in range(10)])
    return Pairs(x, x, torch.tensor([[(i + 1) % 10] for i in range(10)]), dropped), False


@pytest.mark.parametrize(("tile", "cached"), [(3, True), (4, False), (64, True)])
def test_statistics_and_gradients_equal_loops(layout, tile, cached, monkeypatch):
    monkeypatch.setattr(tiles, "CACHE_BYTES", 1 << 20 if cached else 0)
    pairs, symmetric = layout
    x = pairs.anchors.clone().requires_grad_()
    y = x if symmetric or pairs.anchors is pairs.candidates else pairs.candidates.clone().requires_grad_()
    inputs = [x] if y is x else [x, y]
    found = row_statistics(
        x, y, pairs.excluded, STATISTICS, counts=pairs.negative_counts, bound=1.0, symmetric=symmetric, tile=tile
    )
    s = x @ y.T
    upstream = torch.randn(len(STATISTICS), len(x), dtype=torch.double, generator=torch.Generator().manual_seed(7))
    total, expected_total = 0.0, 0.0
    for number, statistic in enumerate(STATISTICS):
        expected = []
        for i in range(len(x)):
            banned = set(pairs.excluded[i].tolist())
            expected.append(by_loop(statistic, torch.stack([s[i, j] for j in range(len(y)) if j not in banned])))
        expected = torch.stack(expected)
        torch.testing.assert_close(found[statistic], expected, rtol=1e-11, atol=1e-11)
        total = total + (upstream[number] * found[statistic]).sum()
        expected_total = expected_total + (upstream[number] * expected).sum()
    for ours, theirs in zip(
        torch.autograd.grad(total, inputs), torch.autograd.grad(expected_total, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_extremes_and_counts(layout):
    pairs, symmetric = layout
    x, y = pairs.anchors, pairs.candidates
    wanted = [Extreme(), Extreme(largest=False), Count(-0.2, 0.4), LogSumExp(3.0)]
    found = row_statistics(
        x, y, pairs.excluded, wanted, counts=pairs.negative_counts, bound=1.0, symmetric=symmetric, tile=4
    )
    s = x @ y.T
    for i in range(len(x)):
        allowed = [j for j in range(len(y)) if j not in set(pairs.excluded[i].tolist())]
        assert found[wanted[0]][i] == max(allowed, key=lambda j: s[i, j])
        assert found[wanted[1]][i] == min(allowed, key=lambda j: s[i, j])
        assert found[wanted[2]][i] == sum(-0.2 < s[i, j] < 0.4 for j in allowed)


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


def test_memory_grows_with_rows_not_with_their_square():
    """A 16 times larger matrix must not take 16 times the memory."""
    import subprocess
    import sys

    def peak(batch):
        code = (
            "import torch, dipole; from dipole.core.utils.machine import peak_memory; torch.set_num_threads(1)\n"
            "o = dipole.objective('infonce+dp')\n"
            "o(torch.randn(8, 16), torch.randn(8, 16))\n"
            "base = peak_memory()\n"
            f"z = [torch.randn({batch}, 32, requires_grad=True) for _ in range(2)]\n"
            "o(*z).loss.backward()\n"
            "print(peak_memory() - base)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return int(done.stdout) / 2**20

    # 8192 rows: the matrix alone would be 256 MB.
    assert peak(4096) < 100


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


# Not defined at s = 1, where each anchor meets itself, nor a number above it.
POLE = Plain(lambda s: (1 - s).log() / (1 - s))
PARTS_ALONE = {
    Cauchy(): lambda row: (1 / (3 - 2 * row)).sum().log(),
    Plain(torch.cos): lambda row: row.cos().sum(),
    Plain(torch.tanh): lambda row: row.tanh().sum(),
    POLE: lambda row: ((1 - row).log() / (1 - row)).sum(),
    SoftmaxSquare(3.0): lambda row: (torch.softmax(3 * row, 0) * row.square()).sum(),
    SoftmaxSquare(-150.0): lambda row: (torch.softmax(-150 * row, 0) * row.square()).sum(),
}


def dense(statistic_of_row, s, excluded, first=0):
    """A statistic of every row (A,), from the whole matrix."""
    return torch.stack(
        [
            statistic_of_row(torch.stack([s[i, j] for j in range(first, s.shape[1]) if j not in set(banned)]))
            for i, banned in enumerate(excluded.tolist())
        ]
    )


@pytest.mark.parametrize(("tile", "cached"), [(3, False), (64, True)])
def test_a_statistic_needs_its_parts_alone(layout, tile, cached, monkeypatch):
    monkeypatch.setattr(tiles, "CACHE_BYTES", 1 << 20 if cached else 0)
    pairs, symmetric = layout
    x = pairs.anchors.clone().requires_grad_()
    y = x if pairs.anchors is pairs.candidates else pairs.candidates.clone().requires_grad_()
    inputs = [x] if y is x else [x, y]
    # The unit vectors of the diagonal are excluded here; the pole is theirs alone.
    wanted = [stat for stat in PARTS_ALONE if (y is x and bool((pairs.ignored[:, :1] >= 0).all())) or stat != POLE]
    found = row_statistics(
        x, y, pairs.excluded, wanted, counts=pairs.negative_counts, bound=1.0, symmetric=symmetric, tile=tile
    )
    expected = {stat: dense(PARTS_ALONE[stat], x @ y.T, pairs.excluded) for stat in wanted}
    upstream = torch.randn(len(wanted), len(x), dtype=torch.double, generator=torch.Generator().manual_seed(3))
    for stat, weights in zip(wanted, upstream, strict=True):
        torch.testing.assert_close(found[stat], expected[stat], rtol=1e-10, atol=1e-10)
        ours = torch.autograd.grad((weights * found[stat]).sum(), inputs, retain_graph=True)
        theirs = torch.autograd.grad((weights * expected[stat]).sum(), inputs, retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("statistic", [s for s in STATISTICS if abs(s.scale or 0) < 100], ids=str)
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
