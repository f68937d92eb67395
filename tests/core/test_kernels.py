"""The fused kernels on a machine without a GPU: interpreted against tiles and loops, and compiled for three of them.

Triton decides when it is imported whether it interprets, so both happen in processes of their own.
"""

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product

import pytest
import torch
from torch.nn.functional import softplus

from dipole.core.conformance.kit import all_subjects
from dipole.core.objectives import engine
from dipole.core.objectives.kernels.trace import Untraceable, trace
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.statistics import Between, Count, Extreme, LogSumExp, SoftmaxMean, Softplus, Statistic, Sum
from dipole.core.objectives.sweep import row_statistics
from tests.kernel_processes import INTERPRETED, needs_triton, process, resources

EVERYTHING = [
    LogSumExp(2.0),
    LogSumExp(100.0),
    SoftmaxMean(4.0),
    SoftmaxMean(-120.0),
    Sum(),
    Between(0.0, 0.8),
    Softplus(10.0, -10.0),
    Count(-0.2, 0.4),
    Extreme(),
    Extreme(largest=False),
]


MANY = [
    LogSumExp(2.0),
    LogSumExp(100.0),
    SoftmaxMean(4.0),
    Between(0.0, 0.8),
    SoftmaxMean(-120.0),
    Sum(),
    Count(-0.2, 0.4),
]


@dataclass(frozen=True)
class Plain(Statistic):
    """sum_j of a function of s."""

    function: object

    def parts(self, s, e):
        return self.function(s)


def sigmoid_loss(s):
    return softplus(10 * s - 3)


def piecewise(s):
    return torch.where(s > 0.3, s.square(), s.abs().clamp(0.05, 0.2) / 2) + torch.tanh(s) - (1.5 + s).log()


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted():
    """Calls a function of this module where kernels are interpreted."""
    with process(INTERPRETED) as call:
        yield call


@pytest.fixture(scope="module")
def compiled():
    """Calls a function of this module where kernels are compiled."""
    with process({}) as call:
        yield call


# Interpreted ----------------------------------------------------------------------------------------------------------


def rows(count, width, seed, dtype=torch.float32):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unit(*args):
    return torch.nn.functional.normalize(rows(*args), dim=1)


def matrices(name):
    """x, y, excluded, counts, symmetric, first."""
    if name == "symmetric":  # four blocks of 16 rows, the last not full
        pairs = Pairs.from_views([unit(29, 13, 0), unit(29, 13, 1)])
        return pairs.anchors, pairs.candidates, pairs.excluded, pairs.negative_counts, True, 0
    if name == "rectangular":  # wider than a piece of a product, and two runs of candidates
        pairs = Pairs.cross(unit(17, 37, 0), unit(17, 37, 1), unit(62, 37, 2))
        return pairs.anchors, pairs.candidates, pairs.excluded, pairs.negative_counts, False, 0
    if name == "lists":  # longer lists than are compared one by one, repeated and padded; a row without a negative
        x = unit(19, 5, 3)
        excluded = torch.randint(-1, 19, (19, 12), generator=torch.Generator().manual_seed(4))
        excluded = torch.cat([excluded, torch.full((19, 10), -1)], 1)
        excluded[7, :19] = torch.arange(19)
        counts = torch.tensor([19 - len(set(row) - {-1}) for row in excluded.tolist()])
        return x, x, excluded, counts, False, 0
    if name == "none excluded":
        return unit(3, 1, 5), unit(21, 1, 6), torch.zeros(3, 0, dtype=torch.long), torch.full((3,), 21), False, 0
    if name in ("wide", "wide views"):  # dL/ds is written out, in bands: the last of 32 rows is not full
        if name == "wide views":
            pairs = Pairs.from_views([unit(35, 37, 0), unit(35, 37, 1)])
            return pairs.anchors, pairs.candidates, pairs.excluded, pairs.negative_counts, True, 0
        pairs = Pairs.cross(unit(35, 37, 0), unit(35, 37, 1), unit(6, 37, 2))
        return pairs.anchors, pairs.candidates, pairs.excluded, pairs.negative_counts, False, 0
    assert name == "first"
    excluded = torch.tensor([[i, 8 + i, -1] for i in range(9)])
    counts = torch.full((9,), 21 - 7) - torch.tensor([int(i >= 7) + 1 for i in range(9)])
    return unit(9, 7, 7), unit(21, 7, 8), excluded, counts, False, 7


def swept(name, dtype, statistics, kernels):
    x, y, excluded, counts, symmetric, first = matrices(name)
    own = y is x
    x = x.to(dtype).requires_grad_()
    y = x if own else y.to(dtype).requires_grad_()
    with engine.using("triton" if kernels else "eager"):
        before = engine.served()
        found = row_statistics(x, y, excluded, statistics, counts=counts, bound=1.0, symmetric=symmetric, first=first)
        assert engine.served() == before + kernels, engine.failures()
        source = torch.Generator().manual_seed(9)
        loss = 0.0
        for statistic in statistics:
            if not isinstance(statistic, Extreme | Count):
                value = torch.where(counts > 0, found[statistic], 0.0)
                loss = loss + (
                    torch.rand(len(x), generator=source).to(dtype) * value
                ).sum() / value.detach().norm().clamp_min(1)
        gradients = torch.autograd.grad(loss, [x] if y is x else [x, y])
    return [found[statistic].detach() for statistic in statistics], gradients


def compare(name, statistics, side=16):
    """A symmetric matrix is visited whole for many sums and by halves for few."""
    from dipole.core.objectives.kernels import launch

    launch.INTERPRETED = launch.Blocks(side, side, 16, 4, 1)
    for ours, theirs in zip(
        swept(name, torch.float32, statistics, True), swept(name, torch.float64, statistics, False), strict=True
    ):
        for one, other in zip(ours, theirs, strict=True):
            if one.is_floating_point():
                torch.testing.assert_close(one, other.float(), rtol=2e-4, atol=2e-5)
            else:
                assert torch.equal(one, other)


@needs_triton
@pytest.mark.parametrize("name", ["symmetric", "rectangular", "lists", "none excluded", "first", "wide", "wide views"])
def test_kernels_equal_tiles_in_float64(interpreted, name):
    interpreted(compare, name, EVERYTHING)


@needs_triton
@pytest.mark.parametrize("name", ["symmetric", "rectangular", "none excluded", "wide views"])
def test_slopes_that_are_the_same_everywhere_fill_a_tile(interpreted, name):
    interpreted(compare, name, [Sum()])


@needs_triton
@pytest.mark.parametrize("statistics", [[LogSumExp(100.0), Extreme()], [SoftmaxMean(-120.0), Sum(), LogSumExp(400.0)]])
def test_half_of_a_symmetric_matrix_is_enough(interpreted, statistics):
    interpreted(compare, "symmetric", statistics)


@needs_triton
def test_a_statistic_that_has_parts_alone_gets_kernels(interpreted):
    interpreted(compare, "symmetric", [Plain(sigmoid_loss), Plain(piecewise), LogSumExp(100.0)], 32)


def bits(name):
    first, second = (swept(name, torch.float32, EVERYTHING, True) for _ in range(2))
    return all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


@needs_triton
def test_kernels_give_the_same_bits_again(interpreted):
    assert interpreted(bits, "symmetric")


def turned(excluded, columns):
    """The lists of the candidates, of which each excludes an anchor exactly if that excludes it."""
    mask = torch.zeros(len(excluded), columns, dtype=torch.bool)
    for row, listed in enumerate(excluded.tolist()):
        mask[row, [column for column in listed if 0 <= column < columns]] = True
    return mask, torch.where(mask.T, torch.arange(len(excluded)), -1)


def both_sides(anchors, candidates, width, listed, statistics):
    """One visit that serves the rows of both sides, and tiles in float64 that visit each side by itself."""
    from dipole.core.objectives.kernels import launch
    from dipole.core.objectives.kernels.fused import sweep_of

    launch.INTERPRETED = launch.Blocks(16, 16, 16, 4, 1)
    x, y = unit(anchors, width, 0), unit(candidates, width, 1)
    source = torch.Generator().manual_seed(2)
    excluded = torch.randint(-3, candidates + 3, (anchors, listed), generator=source)  # some lie outside
    if listed > candidates:
        excluded[2, :candidates] = torch.arange(candidates)  # a row without a negative
    mask, theirs = turned(excluded, candidates)
    counts = torch.cat([(~mask).sum(1), (~mask).sum(0)])
    sides = [each.double().requires_grad_() for each in (x, y)]
    with engine.using("eager"):
        true = [
            row_statistics(*given, lists, statistics, counts=count, bound=1.0)
            for given, lists, count in zip(
                (sides, sides[::-1]), (excluded, theirs), counts.split([anchors, candidates]), strict=True
            )
        ]
    summed = [each for each in statistics if isinstance(each, Statistic)]
    extremes = [each for each in statistics if isinstance(each, Extreme)]
    running = [abs(each.scale or 0) > 60 for each in summed]
    with engine.using("triton"):
        summands = engine.trusted(x, excluded, summed, running, extremes, False, mutual=True)
        assert summands is not None, engine.failures()
        sweep = sweep_of(x, y, excluded, summands, extremes, False, mutual=True)
        sums, shifts, where = sweep.sums()
        sums = sums.double().requires_grad_()
        loss = truth = 0.0
        for number, each in enumerate(summands):
            ours = each.statistic.finish(tuple(sums[each.first : each.stop]), shifts[number].double(), counts)
            value = torch.cat([side[each.statistic] for side in true])
            torch.testing.assert_close(ours[counts > 0], value[counts > 0], rtol=2e-4, atol=2e-5)
            if not isinstance(each.statistic, Count):
                weights = (counts > 0) * torch.rand(len(counts), generator=source).double()
                weights /= value.detach()[counts > 0].norm().clamp_min(1)
                loss = loss + (weights * torch.where(counts > 0, ours, 0.0)).sum()
                truth = truth + (weights * torch.where(counts > 0, value, 0.0)).sum()
        for extreme, index in zip(extremes, where, strict=True):
            assert torch.equal(index, torch.cat([side[extreme] for side in true]))
        (upstream,) = torch.autograd.grad(loss, sums)
        found = sweep.gradients(x, y, upstream.float(), shifts, True)
        again = sweep_of(x, y, excluded, summands, extremes, False, mutual=True)
        for one, other in zip(
            (sweep.sums()[0], *found),
            (again.sums()[0], *again.gradients(x, y, upstream.float(), shifts, True)),
            strict=True,
        ):
            assert torch.equal(one, other)
    for ours, wanted in zip(found, torch.autograd.grad(truth, sides), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=2e-4, atol=2e-5)


FEW = [LogSumExp(100.0), SoftmaxMean(4.0), Extreme()]


@needs_triton
@pytest.mark.parametrize(
    ("anchors", "candidates", "width", "listed", "statistics"),
    [
        (149, 37, 5, 2, FEW),  # two launches of eight blocks and more, none of them full
        (19, 10, 37, 12, FEW),  # gradients by bands
        (19, 70, 5, 0, [Sum(), Softplus(10.0, -10.0)]),
        (3, 41, 5, 12, EVERYTHING),  # more sums than one visit keeps for both sides
        (45, 7, 37, 9, [Between(0.0, 0.8), SoftmaxMean(-120.0), Extreme(largest=False)]),
    ],
)
def test_one_visit_serves_the_rows_of_both_sides(interpreted, anchors, candidates, width, listed, statistics):
    interpreted(both_sides, anchors, candidates, width, listed, statistics)


def told_apart():
    """Whether a verdict on kernels that serve one side says nothing of those that serve both, and what that is."""
    from dipole.core.objectives.kernels import launch, selfcheck, source

    x, lists, summands = unit(4, 5, 0), torch.zeros(4, 2, dtype=torch.long), source.summed([Sum()], [False])
    given = x, lists, summands, [Extreme()], False, None
    right = selfcheck.verdict(*given, mutual=True)
    pair = launch.Sweep._pair
    launch.Sweep._pair = lambda self: ({n: v * 1.1 for n, v in pair(self)[0].items()}, pair(self)[1])
    wrong, alone = selfcheck.verdict(*given, mutual=True), selfcheck.verdict(*given)
    launch.Sweep._pair = pair
    return selfcheck.key_of(*given) != selfcheck.key_of(*given, mutual=True), right, wrong, alone


@needs_triton
def test_kernels_for_both_sides_are_checked_by_themselves(interpreted):
    apart, right, wrong, alone = interpreted(told_apart)
    assert apart
    assert right == alone == ""
    assert "is off" in wrong


def outcome(text):
    """The worst error of an objective by kernels on every layout of pairs, as `dipole check` finds it."""
    from dipole.core.conformance.kit import check_objective

    row = check_objective(text, only=["kernels"]).rows[0]
    return row.outcome, row.detail


NO_STATISTICS = {"swav", "cllr"}
QUICK = {"triplet", *NO_STATISTICS}  # infonce is part of the sum


@needs_triton
@pytest.mark.parametrize(
    "text",
    [
        *(
            pytest.param(name, marks=[] if name in QUICK | NO_STATISTICS else [pytest.mark.slow])
            for name in all_subjects()
        ),
        "infonce(temperature=0.01) + 0.1*dp + dcl(similarity=dot)",
    ],
)
def test_objectives_by_kernels_equal_their_loops_on_every_layout(interpreted, text):
    outcome_of, detail = interpreted(outcome, text)
    assert outcome_of == ("-" if text in NO_STATISTICS else "ok"), detail


def empty():
    x = unit(4, 3, 0).requires_grad_()
    everything = torch.arange(4).repeat(4, 1)
    wanted = [LogSumExp(2.0), LogSumExp(200.0), SoftmaxMean(2.0), Sum(), Extreme()]
    none = torch.zeros(4, dtype=torch.long)
    found = row_statistics(x, x, everything, wanted, counts=none, bound=1.0, symmetric=True)
    assert (found[wanted[0]] == -torch.inf).all()
    assert (found[wanted[1]] == -torch.inf).all()
    assert (found[wanted[4]] == -1).all()
    (found[wanted[2]].sum() + found[wanted[3]].sum()).backward()
    assert (x.grad == 0).all()
    # Nobody is a negative of anybody, and no column is left.
    gone = row_statistics(x, x, everything[:, :0], [Sum(), Extreme()], counts=none, bound=1.0, first=4)
    assert (gone[Sum()] == 0).all()
    assert (gone[Extreme()] == -1).all()
    assert not engine.failures()


@needs_triton
def test_rows_without_negatives(interpreted):
    interpreted(empty)


def penalty(text, dtype, layout):
    """The derivative of a loss plus a penalty on its gradient, as WGAN-GP and Hessian products need it."""
    import dipole

    x, y, queue = (rows(7, 5, seed).to(dtype).requires_grad_() for seed in (1, 2, 3))
    before = engine.served()
    loss = dipole.objective(text).to(dtype)
    value = loss(x, y).loss if layout == "views" else loss(Pairs.cross(x, y, queue=queue, dropped=DROPPED)).loss
    assert (engine.served() > before) == (dtype == torch.float32)
    leaves = [x, y] if layout == "views" else [x, y, queue]
    first = torch.autograd.grad(value, leaves, create_graph=True)
    return torch.autograd.grad(value + sum(each.square().sum() for each in first), leaves)


DROPPED = torch.tensor([[0, 1, -1]] * 7)


def second_derivatives(text, layout):
    for ours, theirs in zip(penalty(text, torch.float32, layout), penalty(text, torch.float64, layout), strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


@needs_triton
@pytest.mark.parametrize("layout", ["views", "queue"])
@pytest.mark.parametrize("text", ["dp", "infonce(temperature=0.05) + 0.1*dp", "triplet"])
def test_second_derivatives_are_those_of_tiles(interpreted, text, layout):
    interpreted(second_derivatives, text, layout)


def half_inputs(dtype, width):
    import dipole

    leaves = [rows(7, width, seed, dtype).requires_grad_() for seed in (0, 1)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    objective = dipole.objective("infonce(temperature=0.02) + 0.1*dp")
    before = engine.served()
    ours, theirs = objective(*leaves).loss, objective(*exact).loss
    assert engine.served() == before + 1
    ours.backward()
    theirs.backward()
    gradient = max(float((a.grad.double() - b.grad).norm() / b.grad.norm()) for a, b in zip(leaves, exact, strict=True))
    return float(abs(ours - theirs) / theirs), gradient


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [24, 40])
def test_half_precision_is_multiplied_as_it_came(interpreted, dtype, width):
    value, gradient = interpreted(half_inputs, dtype, width)
    assert value < 1e-5  # the products of half-precision numbers are exact: rounded rows would be 1e-3 off
    assert gradient < 0.01


def broken():
    from dipole.core.objectives.kernels import launch

    correct = launch.Sweep.sums
    launch.Sweep.sums = lambda self: (correct(self)[0] * 1.01, *correct(self)[1:])
    x, own = unit(6, 9, 0), torch.arange(6).unsqueeze(1)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for wanted in ([SoftmaxMean(3.0), Sum()], [SoftmaxMean(3.0), Sum()], [Sum()]):
                found = row_statistics(x, x, own, wanted, counts=torch.full((6,), 5), bound=1.0, symmetric=True)[Sum()]
    finally:
        launch.Sweep.sums = correct
    assert len(engine.failures()) == 2
    torch.testing.assert_close(found, (x @ x.T).fill_diagonal_(0).sum(1))
    return [str(each.message) for each in seen if each.category is UserWarning]  # NumPy has words for the interpreter


@needs_triton
def test_kernels_that_compute_something_else_are_not_trusted(interpreted):
    (message,) = interpreted(broken)
    assert "self-check" in message
    assert "Sum() is off" in message
    assert "eager tiles" in message


# What has no kernel ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda s: s - s.mean(), "'mean'"),
        (lambda s: torch.softmax(s, 1), "'softmax'"),
        (lambda s: s if s > 0 else -s, "value"),
        (lambda s: s + torch.ones(3), "Tensor"),
        (lambda s: s.mul_(2), "writes"),
        (lambda s: s * float(torch.rand(())), "something else"),
    ],
)
def test_what_a_kernel_cannot_say_is_left_to_tiles(function, reason):
    with pytest.raises(Untraceable, match=reason):
        trace(Plain(function))
    assert reason in engine.outlook([Sum(), Plain(function)])


@pytest.mark.parametrize(
    "statistic",
    [*EVERYTHING[:7], Plain(sigmoid_loss), Plain(piecewise)],
    ids=lambda each: getattr(getattr(each, "function", each), "__name__", str(each)),
)
def test_an_expression_is_the_function_it_was_made_of(statistic):
    from dipole.core.objectives.kernels.expression import compute

    s = torch.linspace(-0.99, 0.98, 40, dtype=torch.float64).requires_grad_()
    e = None if statistic.scale is None else (statistic.scale * (s - 1)).exp()
    parts = statistic.parts(s, e)
    for part, made, slope in zip(
        parts if isinstance(parts, tuple) else (parts,), trace(statistic).parts, trace(statistic).slopes, strict=True
    ):
        torch.testing.assert_close(compute(made, s, e), part)
        (true,) = torch.autograd.grad(part.sum(), s, retain_graph=True) if part.requires_grad else (torch.zeros(40),)
        torch.testing.assert_close(compute(slope, s, e).detach(), true.double())


# Compiled -------------------------------------------------------------------------------------------------------------


def machine_code(kind, many, half, width, architecture, candidate=0):
    """What the compiler says of a kernel: stack and local memory of the machine code, and its PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dipole.core.objectives.kernels import launch, source

    # Of `many`, True is as many as the kernel serves; a number is that many.
    statistics = (
        MANY[: many if many is not True else 4 if kind in ("half", "pair") else None] if many else [LogSumExp(2.0)]
    )
    summands = source.summed(statistics, [abs(each.scale or 0) > 60 for each in statistics])
    name, mutual = kind.removeprefix("mutual "), kind.startswith("mutual ")
    if name in ("forward", "half", "pair"):
        text, _ = source.forward(summands, [], name)
    elif name == "band":
        text, _ = source.band(summands, symmetric=not mutual, mutual=mutual)
    else:
        text, _ = source.backward(summands, name, mutual)
    sweep = launch.Sweep(*[launch.Factors(torch.zeros(1, width))] * 2, torch.zeros(1, 2), True, summands, ())
    shapes = {"forward": launch.FORWARD, "band": launch.BANDED, "half": launch.SQUARE, "pair": launch.SQUARE}
    blocks = shapes.get(name, launch.BACKWARD)[half]
    chosen = [each for each in blocks if each.sums >= sweep.kept][candidate]
    assert kind not in ("half", "pair") or sweep.kept <= launch.MOST_SUMS
    function, element = launch.built(text), "*bf16" if half else "*fp32"
    constants = launch.shape(chosen, width, width <= launch.WHOLE[half])
    constants |= {"D": width, "SCALED": half, "FEW": 2, "PRECISION": "ieee"}
    if "BD" in function.arg_names:
        constants["BD"] = width
    pointers = {"x": element, "y": element, "lists": "*i32", "where": "*i32"}
    for each in ("x_scale", "y_scale", "sums", "shifts", "best", "grad", "out"):
        pointers[each] = pointers[f"{each}_other"] = "*fp32"
    pointers["where_other"] = "*i32"
    if name == "band":
        pointers["out"] = element
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name[0] == "k" else "i32")
        for name in function.arg_names
    }
    vectors = {*pointers, "stride"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name in vectors}
    built = triton.compile(
        ASTSource(function, signature, constants, aligned),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": chosen.warps, "num_stages": chosen.stages},
    )
    return resources(built.asm["cubin"]), built.metadata.shared, built.asm["ptx"]


TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
KINDS = ("forward", "half", "pair", "rows", "columns", "both", "band", "mutual rows", "mutual columns", "mutual band")
# The width of embeddings whose gradient stays in registers, and one whose does not.
WIDTHS = {
    128: ("forward", "half", "pair", "rows", "columns", "both", "mutual rows", "mutual columns"),
    768: ("forward", "half", "pair", "band", "mutual band"),
}
REPRESENTATIVE = [
    ("half", True, 80, 128),
    ("forward", False, 90, 128),
    ("columns", False, 100, 128),
    ("band", True, 90, 768),
    ("pair", True, 90, 128),
    ("mutual columns", True, 80, 128),
    ("mutual band", True, 100, 768),
]


# Where Triton 3.7, which PyTorch 2.13 asks for, is behind 3.8, by the case: bytes of stack that its ptxas takes, and
# kernels for sm_100 that its compiler fails on. Such a matrix is served by tiles (`selfcheck.verdict`).
STACK_OF_3_7 = {
    ("forward", True, 100, 128): 24,
    ("band", True, 100, 768): 16,
    ("mutual band", True, 100, 768): 16,
    ("both", True, True, 1, 90): 200,
    ("forward", False, False, 1, 100): 24,
    ("band", True, 2, 0, 100): 8,
    ("band", True, False, 2, 100): 40,
    ("rows", False, 100): 32,
    ("both", False, 100): 32,
    ("mutual rows", False, 100): 32,
    ("mutual columns", True, 100): 24,
}
FAILS_IN_3_7 = {(kind, True, 100, width) for kind in ("half", "pair") for width in (128, 768)}


def is_3_7():
    return version("triton").startswith("3.7.")


def stack_of(*case):
    return STACK_OF_3_7.get(case, 0) if is_3_7() else 0


@needs_triton
@pytest.mark.parametrize(
    ("kind", "many", "architecture", "width"),
    [
        pytest.param(*case, marks=[] if case in REPRESENTATIVE else [pytest.mark.slow])
        for width, kinds in WIDTHS.items()
        for case in product(kinds, (False, True), TENSOR_CORES, (width,))
    ],
)
def test_bf16_kernels_use_tensor_cores_and_do_not_spill(compiled, kind, many, architecture, width):
    if is_3_7() and (kind, many, architecture, width) in FAILS_IN_3_7:
        with pytest.raises(RuntimeError, match="PassManager"):
            compiled(machine_code, kind, many, True, width, architecture)
        return
    usage, shared, ptx = compiled(machine_code, kind, many, True, width, architecture)
    assert usage["LOCAL"] == 0
    assert usage["STACK"] <= stack_of(kind, many, architecture, width)
    assert TENSOR_CORES[architecture] in ptx
    assert not re.search(r"\batom\.", ptx)
    assert not re.search(r"\bred\.", ptx)
    assert shared <= {80: 163, 90: 227, 100: 227}[architecture] * 1024


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "half", "many", "candidate"),
    [
        *[("forward", True, many, 1) for many in (False, True)],
        ("forward", True, False, 2),
        *[("forward", False, many, 1) for many in (False, True)],
        *[(kind, True, many, 1) for kind in ("rows", "columns", "both") for many in (False, True)],
        ("band", True, 2, 0),
        ("band", True, 2, 1),
        ("band", True, False, 2),
        ("band", False, 2, 1),
    ],
)
@pytest.mark.parametrize("architecture", TENSOR_CORES)
def test_blocks_that_tuning_may_choose_do_not_spill(compiled, kind, half, many, candidate, architecture):
    width = 768 if kind == "band" else 128
    usage, shared, _ = compiled(machine_code, kind, many, half, width, architecture, candidate)
    assert usage["LOCAL"] == 0
    assert usage["STACK"] <= stack_of(kind, half, many, candidate, architecture)
    assert shared <= {80: 163, 90: 227, 100: 227}[architecture] * 1024


LOOP_POINTERS = {
    ("columns", False, 100),
    ("mutual columns", False, 80),
    ("mutual columns", False, 100),
    ("pair", True, 100),
}


@needs_triton
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("architecture", TENSOR_CORES)
def test_float32_kernels_multiply_in_full_and_do_not_spill(compiled, kind, many, architecture):
    usage, _, ptx = compiled(machine_code, kind, many, False, 768 if kind.endswith("band") else 128, architecture)
    assert usage["LOCAL"] == 0
    # A pointer or two of the loop.
    pointers = 16 if (kind, many, architecture) in LOOP_POINTERS else 0
    assert usage["STACK"] <= max(pointers, stack_of(kind, many, architecture))
    assert "tf32" not in ptx


# The choice -----------------------------------------------------------------------------------------------------------


def run(*arguments, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in ("DIPOLE_ENGINE", "TRITON_INTERPRET")}
    return subprocess.run(
        [sys.executable, "-m", "dipole.core.cli", *arguments],
        capture_output=True,
        text=True,
        env=clean | environment,
    )


@needs_triton
def test_check_runs_with_kernels():
    done = run("check", "--engine", "triton", "dp", "--only", "kernels", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads(done.stdout)
    (row,) = report["checks"]
    assert row["outcome"] == "ok"
    assert "sweeps" in row["detail"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_without_a_gpu_are_refused_in_one_message(monkeypatch):
    monkeypatch.setenv("DIPOLE_ENGINE", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, own = unit(4, 3, 0), torch.arange(4).unsqueeze(1)
    with pytest.raises(engine.EngineError, match=r"no GPU.*DIPOLE_ENGINE=eager"):
        row_statistics(x, x, own, [Sum()], counts=torch.full((4,), 3), symmetric=True)


def test_an_engine_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("DIPOLE_ENGINE", "tritn")
    with pytest.raises(engine.EngineError, match="'tritn' names no engine; there are eager, triton"):
        engine.wanted()
    for name in ("eager", "tiles", "EAGER"):
        monkeypatch.setenv("DIPOLE_ENGINE", name)
        assert engine.wanted() == "eager"


def test_an_engine_that_is_refused_is_not_asked_for_afterwards(monkeypatch):
    monkeypatch.delenv("DIPOLE_ENGINE", raising=False)
    with pytest.raises(engine.EngineError, match="'tritn' names no engine"), engine.using("tritn"):
        raise AssertionError("nothing runs under an engine that there is not")
    assert engine.wanted() is None
    with engine.using("eager"):
        assert engine.wanted() == "eager"
    assert engine.wanted() is None


def test_rounding_to_tf32_follows_every_switch_of_pytorch():
    from dipole.core.objectives.kernels.launch import tf32_allowed

    matmul, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    try:
        for allow, forbid in [
            (lambda: torch.set_float32_matmul_precision("high"), lambda: torch.set_float32_matmul_precision("highest")),
            (lambda: setattr(matmul, "allow_tf32", True), lambda: setattr(matmul, "allow_tf32", False)),
            (lambda: setattr(matmul, "fp32_precision", "tf32"), lambda: setattr(matmul, "fp32_precision", "ieee")),
            (lambda: torch.set_float32_matmul_precision("high"), lambda: setattr(matmul, "fp32_precision", "ieee")),
        ]:
            allow()
            assert tf32_allowed()
            forbid()
            assert not tf32_allowed()
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_processor_and_float64_are_served_by_tiles(monkeypatch):
    monkeypatch.delenv("DIPOLE_ENGINE", raising=False)
    assert "processor" in engine.reason_against(torch.device("cpu"))
    assert engine.reason_against(torch.device("meta"))
