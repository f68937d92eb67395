"""The checks, one small function each: it returns what it found, raises Failed with what is wrong, or Skipped."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck

from dipole.core.conformance.held import Stops
from dipole.core.conformance.layouts import VIEWS, Layout, Leaves, hard_pairs, in_order, two_views
from dipole.core.conformance.subjects import Result, Subject, parameters_of
from dipole.core.objectives import dense, engine, tiles
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.text import counted

EXACT = 1e-9  # float64 against float64
SINGLE = 1e-4  # float32 against float64, hard pairs at temperature 0.01
HALF_VALUE, HALF_GRADIENT = 0.02, 0.05  # half-precision inputs against float64 on the same rounded inputs
LOW_TEMPERATURE, MODERATE_TEMPERATURE = 0.01, 0.05
MOST_ENTRIES = 100  # of a parameter under gradcheck
ROWS, COLUMNS = 8, 16  # of the batches for low precision


class Failed(AssertionError):  # noqa: N818
    """A check found a fault; the message says which.

    Args:
        message: what is wrong.
        explains: names of checks that cannot but fail for the same cause.
    """

    def __init__(self, message: str, explains: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.explains = explains


class Skipped(Exception):  # noqa: N818
    """A check does not apply; the message says why."""


@dataclass(frozen=True)
class Check:
    """A named check; its first docstring line says what it demands."""

    name: str
    run: Callable[[Subject], str]
    slow: bool = False

    @property
    def demand(self) -> str:
        return (self.run.__doc__ or "").split("\n", 1)[0]


CHECKS: list[Check] = []


def check(name: str, slow: bool = False) -> Callable[[Callable[[Subject], str]], Callable[[Subject], str]]:
    """Add a function to the table of checks."""

    def add(run: Callable[[Subject], str]) -> Callable[[Subject], str]:
        CHECKS.append(Check(name, run, slow))
        return run

    return add


def relative(found: Tensor, true: Tensor, least: float = 1.0) -> float:
    """Norm of the difference over the norm of the truth, or over `least` if the truth is smaller."""
    return float((found - true).norm() / true.norm().clamp_min(least))


def value_error(found: Result, true: Result) -> float:
    return relative(found.value, true.value)


def gradient_error(found: Result, true: Result, least: float = 1.0) -> float:
    """Largest relative error over the leaves and parameters that have a gradient in either."""
    worst = 0.0
    for name, expected in true.gradients.items():
        got = found.gradients[name]
        if got is None and expected is None:
            continue
        one = next(g for g in (got, expected) if g is not None)
        zero = torch.zeros_like(one)
        worst = max(worst, relative(zero if got is None else got, zero if expected is None else expected, least))
    return worst


def demand_finite(result: Result, where: str) -> None:
    """Raise Failed if the value or any gradient is not finite."""
    if not result.value.isfinite():
        raise Failed(f"{where}: the value is {result.value.item()}")
    bad = [name for name, g in result.gradients.items() if g is not None and not g.isfinite().all()]
    if bad:
        raise Failed(f"{where}: the gradient of {', '.join(bad)} is not finite (value {result.value.item():.4g})")


def truth_of(subject: Subject, layout: Layout, leaves: Leaves, temperature: float) -> Result:
    """The reference in float64 if there is one, else the subject itself in float64."""
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    instance = subject.make(layout, temperature=temperature)
    if subject.truth is not None:
        loops = partial(subject.truth, temperature=temperature)
        true = subject.result(instance, layout, exact, loops)
        if true.finite:  # the loops shift no exponential
            return true
    return subject.result(instance, layout, exact)


_OF_NO_GRADIENT = ("reference", "gradcheck", "low temperature", "float16", "bfloat16", "descent", "large norms")
_OF_CHANGE = (
    "reference", "gradcheck", "low temperature", "float16", "bfloat16", "permutation", "state", "tiled", "compile",
    "inductor", "descent", "temperature", "size", "large norms", "strides", "device", "eval mode", "ranks",
)  # fmt: skip


@check("reference")
def matches_reference(subject: Subject) -> str:
    """Value and gradient equal an independent float64 reference (loops from the formula) to 1e-9."""
    if subject.truth is None:
        raise Skipped("no reference is known; name one with --reference")
    worst, refused = 0.0, []
    for layout in subject.layouts:
        instance, leaves = subject.make(layout), layout.leaves()
        try:
            found = subject.result(instance, layout, leaves)
        except DipoleError as error:
            if layout is VIEWS:
                raise
            refused.append(f"{layout.name} ({error})")
            continue
        true = subject.result(instance, layout, leaves, subject.truth)
        for what, error_size in (("value", value_error(found, true)), ("gradient", gradient_error(found, true))):
            if not error_size <= EXACT:
                raise Failed(
                    f"{what} is off by {error_size:.2g} on {layout.name}: "
                    f"{found.value.item():.10g}, reference {true.value.item():.10g}"
                )
            worst = max(worst, error_size)
    note = f"; refuses {', '.join(refused)}" if refused else ""
    return f"off by at most {worst:.1g} on {counted(len(subject.layouts) - len(refused), 'layout')}{note}"


@check("gradient exists")
def gradient_reaches_inputs(subject: Subject) -> str:
    """A gradient that is not zero reaches both sets of embeddings, every row, and every parameter."""
    instance = subject.make()
    result = subject.result(instance, VIEWS, VIEWS.leaves())
    missing = [name for name, g in result.gradients.items() if g is None]
    if len(missing) == len(result.gradients):
        raise Failed("no gradient at all: the loss is detached from its inputs", _OF_NO_GRADIENT)
    still = subject.detached if isinstance(subject.detached, tuple) else ()
    if wrong := [name for name in still if name in VIEWS.shapes and name not in missing]:
        raise Failed(f"a gradient reaches {', '.join(wrong)}, which is declared detached")
    # Where the loss says that it stops something without a name, one set of embeddings may get nothing.
    spared = set(still) | (VIEWS.shapes.keys() if subject.detached is True else set())
    if lacking := [name for name in missing if name not in spared]:
        raise Failed(
            f"no gradient reaches {', '.join(lacking)}"
            + ("; if that is intended, declare it: detached" if set(lacking) <= VIEWS.shapes.keys() else ""),
            ("reference",),
        )
    for name, gradient in result.gradients.items():
        if gradient is None:
            continue
        if not gradient.any():
            raise Failed(f"the gradient of {name} is zero")
        if name in VIEWS.shapes and not gradient.any(dim=1).all():
            raise Failed(
                f"the gradient of {int((~gradient.any(dim=1)).sum())} of {len(gradient)} rows of {name} is zero"
            )
    reached = [name for name in result.gradients if name not in missing]
    return f"reaches {', '.join(reached)}" + (f"; {', '.join(missing)} detached, as declared" if missing else "")


@check("gradcheck")
def gradient_is_derivative(subject: Subject) -> str:
    """The gradient is the derivative of the value: torch.autograd.gradcheck in float64."""
    layout = two_views(4, 3)
    instance, leaves = subject.make(layout), layout.leaves()
    result = subject.result(instance, layout, leaves)
    if all(g is None for g in result.gradients.values()):
        raise Failed("there is no gradient to check")
    names = list(leaves)
    # Each entry costs two evaluations: parameters larger than this are left to the reference.
    inputs = [*leaves.values(), *(p for p in parameters_of(instance).values() if p.numel() <= MOST_ENTRIES)]

    def function(*values: Tensor) -> Tensor:
        # Parameters are perturbed in place, where the instance holds them.
        with subject.set_back(instance):
            return subject.call(instance, layout, dict(zip(names, values, strict=False)))

    if (error := _is_no_derivative(function, inputs)) is None:
        return "equals finite differences"
    if subject.truth is not None and subject.detached is not True:
        true = subject.result(instance, layout, leaves, subject.truth)
        if gradient_error(result, true) <= EXACT:
            return "not the derivative of the value, but that of the reference, which stops a gradient too"
    stops = _is_no_derivative(Stops().held(function, *inputs), inputs) is None
    if stops and subject.detached:
        return "equals finite differences with what it detaches held still, as declared"
    slope, claimed = _along_a_direction(function, inputs)
    raise Failed(
        f"not the derivative of the value, which changes by {slope:.4g} along a random direction where the "
        f"gradient says {claimed:.4g}; "
        + (
            "it is with what is detached held still: if that is intended, declare it: detached"
            if stops
            else "a detached factor does this, or a state that changes with each call"
        )
    ) from error


def _is_no_derivative(function: Callable[..., Tensor], inputs: list[Tensor]) -> GradcheckError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gradcheck(function, inputs, eps=1e-6, atol=1e-6, rtol=1e-4)
    except GradcheckError as error:
        return error
    return None


def _along_a_direction(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[float, float]:
    """Central difference of a function along one random direction, and what its gradient says about it."""
    source = torch.Generator().manual_seed(4)
    directions = [torch.randn(x.shape, generator=source, dtype=x.dtype) for x in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients = torch.autograd.grad(function(*inputs).sum(), inputs, allow_unused=True)
        ends = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                for x, direction in zip(inputs, directions, strict=True):
                    x.add_(direction, alpha=step)
                ends.append(float(function(*inputs)))
                for x, direction in zip(inputs, directions, strict=True):
                    x.sub_(direction, alpha=step)
    claimed = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    return (ends[0] - ends[1]) / 2e-6, claimed


def _against_truth(
    subject: Subject, leaves: Leaves, where: str, limits: tuple[float, float], temperature: float
) -> str:
    """Compare with the float64 truth on the same (rounded) inputs; parameters stay in float32."""
    layout = two_views(ROWS, COLUMNS)
    true = truth_of(subject, layout, leaves, temperature)
    if not true.finite:
        raise Skipped("the float64 truth itself is not finite; name a reference")
    found = subject.result(subject.make(layout, torch.float32, temperature=temperature), layout, leaves)
    demand_finite(found, where)
    off = relative(found.value, true.value, 1e-3), gradient_error(found, true, 1e-3)
    shown = f"value {found.value.item():.5g} for {true.value.item():.5g}"
    sizes = [max((float(g.norm()) for g in r.gradients.values() if g is not None), default=0.0) for r in (found, true)]
    if sizes[0] == 0 and sizes[1] > 1e-6:
        raise Failed(f"{where}: the gradient is zero, its true norm is {sizes[1]:.3g} ({shown})")
    if not off[0] <= limits[0]:
        raise Failed(f"{where}: the value is off by {off[0]:.1%} ({shown}), the gradient by {off[1]:.1%}")
    if not off[1] <= limits[1]:
        raise Failed(f"{where}: the gradient is off by {off[1]:.1%} ({shown})")
    return f"off by {off[0]:.1e} and {off[1]:.1e}"


@check("low temperature")
def survives_low_temperature(subject: Subject) -> str:
    """At temperature 0.01 with far positives and near negatives float32 is finite and close to float64."""
    leaves = hard_pairs(ROWS, COLUMNS, torch.float32)
    return _against_truth(subject, leaves, "hard pairs", (SINGLE, SINGLE), LOW_TEMPERATURE) + _untuned(subject)


def _untuned(subject: Subject) -> str:
    return "" if subject.temperature else " (as built: it has no temperature to lower)"


def _half(subject: Subject, dtype: torch.dtype) -> str:
    limits = (HALF_VALUE, HALF_GRADIENT)
    found = []
    for kind, leaves, temperature in (
        ("random", two_views(ROWS, COLUMNS).leaves(dtype, seed=2), MODERATE_TEMPERATURE),
        ("hard", hard_pairs(ROWS, COLUMNS, dtype), LOW_TEMPERATURE),
    ):
        where = f"{kind} pairs" + (f" at temperature {temperature}" if subject.temperature else "")
        found.append(f"{kind} {_against_truth(subject, leaves, where, limits, temperature)}")
    return "; ".join(found) + _untuned(subject)


@check("float16")
def survives_float16(subject: Subject) -> str:
    """With float16 inputs, random at temperature 0.05 and hard at 0.01, it is finite and close to float64."""
    return _half(subject, torch.float16)


@check("bfloat16")
def survives_bfloat16(subject: Subject) -> str:
    """With bfloat16 inputs, random at temperature 0.05 and hard at 0.01, it is finite and close to float64."""
    return _half(subject, torch.bfloat16)


@check("kernels")
def kernels_match(subject: Subject) -> str:
    """With the triton engine: float32 and bfloat16 on every layout, computed by kernels, are close to float64."""
    if engine.requested() != "triton":
        raise Skipped("tiles serve; the engine triton runs its kernels")
    if not subject.takes_pairs:
        raise Skipped("a loss of its own does not ask for row statistics")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = [each for _, _, term in subject.make() for each in term.statistics().values()]
    if all(engine.unsupported_reason(each) for each in asked):
        raise Skipped(f"served by {engine.outlook(asked)}")
    before, worst, refused = engine.served(), 0.0, []
    for layout in subject.layouts:
        for dtype, limits in ((torch.float32, (SINGLE, SINGLE)), (torch.bfloat16, (HALF_VALUE, HALF_GRADIENT))):
            leaves = {name: leaf.detach().to(device).requires_grad_() for name, leaf in layout.leaves(dtype).items()}
            try:
                with device:
                    found = subject.result(subject.make(layout, torch.float32).to(device), layout, leaves)
            except DipoleError:
                refused.append(layout.name)
                break
            exact = {name: leaf.detach().cpu().double().requires_grad_() for name, leaf in leaves.items()}
            true = subject.result(subject.make(layout), layout, exact, subject.truth)
            found = Result(found.value.cpu(), {n: None if g is None else g.cpu() for n, g in found.gradients.items()})
            demand_finite(found, f"{layout.name} in {str(dtype).removeprefix('torch.')}")
            for what, size, limit in zip(
                ("value", "gradient"), (value_error(found, true), gradient_error(found, true)), limits, strict=True
            ):
                if not size <= limit:
                    raise Failed(f"{what} is off by {size:.2g} on {layout.name} in {dtype}")
                worst = max(worst, size if dtype == torch.float32 else 0.0)
    if engine.failures() or engine.served() == before:
        raise Failed("; ".join(engine.failures()) or "kernels served no sweep")
    served = engine.served() - before
    note = f"; refuses {', '.join(refused)}" if refused else ""
    return f"{counted(served, 'sweep')}, off by at most {worst:.1g} in float32{note}"


@check("identical points")
def survives_identical_points(subject: Subject) -> str:
    """Value and gradient are finite when all points are one point and when both views are equal."""
    instance = subject.make(VIEWS, torch.float32)
    point = torch.linspace(-1.0, 1.0, VIEWS.shapes["a"][1]).repeat(VIEWS.shapes["a"][0], 1)
    demand_finite(subject.result(instance, VIEWS, _leaves(a=point, b=point)), "all points identical")
    spread = VIEWS.leaves(torch.float32)["a"].detach()
    demand_finite(subject.result(instance, VIEWS, _leaves(a=spread, b=spread)), "identical views")
    return "finite"


@check("one anchor")
def survives_one_anchor(subject: Subject) -> str:
    """One anchor (against a queue; n = 1 for loss(a, b)) gives finite value and gradient, or is refused."""
    instance = subject.make(VIEWS, torch.float32)
    if not subject.takes_pairs:
        layout = two_views(1)
        try:
            result = subject.result(instance, layout, layout.leaves(torch.float32))
        except Exception as error:
            return f"refuses n = 1: {type(error).__name__}: {error}".split("\n", 1)[0]
        demand_finite(result, "n = 1")
        return f"{result.value.item():.4g} at n = 1"
    layout = Layout(
        "one anchor",
        {"query": (1, 6), "key": (1, 6), "queue": (4, 6)},
        lambda query, key, queue: Pairs.cross(query, key, queue),
    )
    try:
        result = subject.result(instance, layout, layout.leaves(torch.float32))
    except DipoleError as error:
        return f"refused with one clear error: {error}"
    demand_finite(result, "one anchor")
    return f"{result.value.item():.4g} against a queue"


@check("no negatives")
def survives_without_negatives(subject: Subject) -> str:
    """Without negatives the term is finite, and where it needs them it is 0 and says so."""
    if not subject.takes_pairs:
        raise Skipped("loss(a, b) has no way to say so; see one anchor")
    layout = two_views(1)
    instance = subject.make(layout, torch.float32)
    result = subject.result(instance, layout, layout.leaves(torch.float32))
    demand_finite(result, "no negatives")
    outcome = instance(layout.build(**layout.leaves(torch.float32)))
    silent = [name for name, term in outcome.terms.items() if float(term) == 0 and not term.note]
    if silent:
        raise Failed(f"{', '.join(silent)} is 0 without a note that says why")
    return "; ".join(f"{name} {float(term):.4g} {term.note}".strip() for name, term in outcome.terms.items())


@check("permutation")
def ignores_order(subject: Subject) -> str:
    """Reordering the instances (by one, two of them, at random) leaves the value and reorders the gradient."""
    leaves = VIEWS.leaves()
    count = len(leaves["a"])
    result = subject.result(subject.make(), VIEWS, leaves)
    # A rotation and an exchange generate all orders; who is whose positive by place may survive either alone.
    rotated = torch.arange(count).roll(-1)
    exchanged = torch.cat([torch.tensor([1, 0]), torch.arange(2, count)])
    for order in (rotated, exchanged, torch.randperm(count, generator=torch.Generator().manual_seed(5))):
        ignores_this_order(subject, VIEWS, leaves, order, result)
    return "same value, same gradient"


def ignores_this_order(subject: Subject, layout: Layout, leaves: Leaves, order: Tensor, result: Result) -> None:
    """Raise Failed if the instances of two views in another order have another value or gradient than the result."""
    moved = subject.result(
        subject.make(),
        in_order(order, layout.width),
        _leaves(**{name: leaf.detach()[order] for name, leaf in leaves.items()}),
    )
    if not value_error(moved, result) <= EXACT:
        raise Failed(f"the value changes from {result.value.item():.8g} to {moved.value.item():.8g}")
    for name in leaves:
        before, after = result.gradients[name], moved.gradients[name]
        if before is not None and after is not None and not relative(after, before[order]) <= EXACT:
            raise Failed(f"the gradient of {name} changes by {relative(after, before[order]):.2g}")


@check("determinism")
def repeats_itself(subject: Subject) -> str:
    """Called again, and built again from the same seed, it gives the same bits and leaves its inputs alone."""
    instance = subject.make(VIEWS, torch.float32)
    leaves = VIEWS.leaves(torch.float32)
    first = subject.result(instance, VIEWS, leaves)
    if any(not torch.equal(leaf, VIEWS.leaves(torch.float32)[name]) for name, leaf in leaves.items()):
        raise Failed("the call changes its inputs in place")
    for who, other in (("called again", instance), ("built again", subject.make(VIEWS, torch.float32))):
        second = subject.result(other, VIEWS, leaves)
        if not _same(first, second):
            hint = "; if it is to depend on earlier calls, declare it: stateful" if who == "called again" else ""
            raise Failed(f"{who} it gives {second.value.item():.9g} after {first.value.item():.9g}{hint}", _OF_CHANGE)
    return "same bits" + (", its state set back, as declared" if subject.stateful else "")


def _same(first: Result, second: Result) -> bool:
    if not torch.equal(first.value, second.value):
        return False
    for name, gradient in first.gradients.items():
        other = second.gradients[name]
        if (gradient is None) != (other is None):
            return False
        if gradient is not None and other is not None and not torch.equal(gradient, other):
            return False
    return True


@check("state")
def survives_storage(subject: Subject) -> str:
    """state_dict into an instance of another seed, pickle, and the written spec all give the same loss."""
    instance = subject.make(VIEWS, torch.float32)
    leaves = VIEWS.leaves(torch.float32)
    if subject.stateful:  # in the midst of a training
        for seed in (7, 8):
            subject.call(instance, VIEWS, VIEWS.leaves(torch.float32, seed=seed))
    first = subject.result(instance, VIEWS, leaves)
    kept = ["pickle"]
    try:
        copied = pickle.loads(pickle.dumps(instance))
    except Exception as error:
        raise Failed(f"cannot be pickled: {type(error).__name__}: {error}") from None
    if not _same(first, subject.result(copied, VIEWS, leaves)):
        raise Failed("pickle does not keep it")
    if isinstance(instance, nn.Module):
        other = subject.make(VIEWS, torch.float32, seed=1)
        other.load_state_dict(instance.state_dict())
        if not _same(first, subject.result(other, VIEWS, leaves)):
            raise Failed("state_dict does not carry all that the loss depends on")
        kept.append("state_dict")
    if subject.read is not None:
        text = str(instance)
        again = subject.read(text).build(VIEWS.width)
        if str(again) != text:
            raise Failed(f"{text!r} reads back as {str(again)!r}")
        again.load_state_dict(instance.state_dict())
        if not _same(first, subject.result(again, VIEWS, leaves)):
            raise Failed(f"the spec {text!r} does not rebuild it")
        kept.append(f"spec {text}")
    return ", ".join(kept)


@check("tiled")
def tiles_equal_dense(subject: Subject) -> str:
    """Tiles of 3 rows, kept or formed anew in the backward pass, give the loss of the whole matrix."""
    if not subject.takes_pairs:
        raise Skipped("only dipole's own objectives are tiled")
    worst = 0.0
    # At the low temperature sums need a running maximum, which the next tile may raise.
    settings = [(layout, temperature) for layout in subject.layouts for temperature in (None, LOW_TEMPERATURE)]
    for layout, temperature in settings if subject.temperature else [(layout, None) for layout in subject.layouts]:
        instance, leaves = subject.make(layout, temperature=temperature), layout.leaves()
        try:
            whole = subject.result(instance, layout, leaves)
        except DipoleError:
            continue
        for cache in (0, tiles.CACHE_BYTES):
            with (
                mock.patch.object(dense, "LARGEST", 0),
                mock.patch.object(tiles, "TILE", 3),
                mock.patch.object(tiles, "CACHE_BYTES", cache),
            ):
                tiled = subject.result(instance, layout, leaves)
            off = max(value_error(tiled, whole), gradient_error(tiled, whole))
            if not off <= EXACT:
                lowered = f" at temperature {temperature}" if temperature else ""
                raise Failed(f"off by {off:.2g} on {layout.name}{lowered}")
            worst = max(worst, off)
    return f"off by at most {worst:.1g}"


def _compiled(subject: Subject, backend: str) -> str:
    torch._dynamo.reset()
    instance, leaves = subject.make(), VIEWS.leaves()
    eager = subject.result(instance, VIEWS, leaves)

    def loss(instance: Any, layout: Layout, leaves: Leaves) -> Tensor:
        return subject.call(instance, layout, leaves)

    logging.disable(logging.WARNING)  # graph breaks are announced; they are no faults
    try:
        compiled = subject.result(instance, VIEWS, leaves, torch.compile(loss, backend=backend))
    finally:
        logging.disable(logging.NOTSET)
    off = max(value_error(compiled, eager), gradient_error(compiled, eager))
    if not off <= EXACT:
        raise Failed(f"off by {off:.2g} under backend {backend}")
    return f"off by {off:.1g} under backend {backend}"


@check("compile")
def compiles(subject: Subject) -> str:
    """torch.compile (backend aot_eager: traced and differentiated ahead of time, run eagerly) equals eager."""
    return _compiled(subject, "aot_eager")


@check("inductor", slow=True)
def compiles_with_inductor(subject: Subject) -> str:
    """torch.compile with its default backend, which generates code, equals eager."""
    return _compiled(subject, "inductor")


@check("descent")
def descends(subject: Subject) -> str:
    """Twenty steps of Adam on free embeddings lower it."""
    layout = two_views(ROWS, COLUMNS)
    instance = subject.make(layout, torch.float32)
    leaves = layout.leaves(torch.float32, seed=3)
    before = subject.result(instance, layout, leaves)
    optimizer = torch.optim.Adam([*leaves.values(), *parameters_of(instance).values()], lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = subject.call(instance, layout, leaves)
        if not loss.requires_grad:
            raise Failed("there is no gradient to descend")
        loss.sum().backward()
        optimizer.step()
    after = subject.result(instance, layout, leaves)
    if not after.value < before.value:
        raise Failed(f"it goes from {before.value.item():.6g} to {after.value.item():.6g}")
    return f"{before.value.item():.4g} to {after.value.item():.4g}"


def _leaves(**values: Tensor) -> Leaves:
    return {name: value.clone().requires_grad_() for name, value in values.items()}
