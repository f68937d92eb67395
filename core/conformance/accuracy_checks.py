"""Checks of value and gradient: against the reference, finite differences, low precision and kernels."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.utils._pytree import tree_map_only

from dipole.core.conformance import checks
from dipole.core.conformance.checks import Failed, Skipped, check
from dipole.core.conformance.layouts import Leaves, changed, hard_pairs
from dipole.core.conformance.modes import Stops
from dipole.core.conformance.subjects import LossAndGradients, Subject, parameters_of
from dipole.core.objectives import engine
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.text import counted

_OF_A_GRADIENT = ("reference", "gradcheck", "low temperature", "float16", "bfloat16", "close pairs", "size")
_OF_NO_GRADIENT = (*_OF_A_GRADIENT, "descent", "large norms")


@check("reference", "equals loops written from its formula")
def matches_reference(subject: Subject) -> str:
    """Value and gradient equal an independent float64 reference (loops from the formula) to 1e-9."""
    if subject.truth is None:
        raise Skipped("no reference is known. Name one with --reference")
    worst, refused = 0.0, []
    for layout in subject.layouts:
        instance, leaves = subject.make(layout), layout.leaves()
        try:
            found = subject.result(instance, layout, leaves)
        except DipoleError as error:
            if layout is subject.views:
                raise
            refused.append(f"{layout.name} ({error})")
            continue
        true = subject.result(instance, layout, leaves, subject.truth)
        worst = max(worst, checks.demand_equal(found, true, f"on {layout.name}", other="reference"))
    note = f"; refuses {', '.join(refused)}" if refused else ""
    return f"off by at most {worst:.1g} on {counted(len(subject.layouts) - len(refused), 'layout')}{note}"


@check("gradient exists", "every row and parameter gets a gradient")
def gradient_reaches_inputs(subject: Subject) -> str:
    """A non-zero gradient reaches both sets of embeddings, every row, and every parameter."""
    instance = subject.make()
    if isinstance(instance, nn.Module):
        for name, kept in (each for part in instance.modules() for each in vars(part).items()):
            if isinstance(kept, Tensor) and kept.requires_grad:
                raise Failed(f"{name} is no nn.Parameter, so no optimizer finds it", ("descent", "memory"))
    result = subject.result(instance, subject.views, subject.views.leaves())
    missing = [name for name, g in result.gradients.items() if g is None]
    if len(missing) == len(result.gradients):
        raise Failed("no gradient at all: the loss is detached from its inputs", _OF_NO_GRADIENT)
    still = subject.detached if isinstance(subject.detached, tuple) else ()
    if wrong := [name for name in still if name in subject.views.shapes and name not in missing]:
        raise Failed(f"a gradient reaches {', '.join(wrong)}, which is declared detached")
    # A loss with detached = True may leave one set of embeddings without a gradient.
    spared = set(still) | (subject.views.shapes.keys() if subject.detached is True else set())
    if lacking := [name for name in missing if name not in spared]:
        said = f"no gradient reaches {', '.join(lacking)}"
        if set(lacking) <= subject.views.shapes.keys():
            said += "; if that is intended, declare it: detached"
        raise Failed(said, _OF_A_GRADIENT)
    for name, gradient in result.gradients.items():
        if gradient is None:
            continue
        if not gradient.any():
            raise Failed(f"the gradient of {name} is zero")
        if name in subject.views.shapes and not gradient.any(dim=1).all():
            raise Failed(
                f"the gradient of {int((~gradient.any(dim=1)).sum())} of {len(gradient)} rows of {name} is zero"
            )
    reached = [name for name in result.gradients if name not in missing]
    return f"reaches {', '.join(reached)}" + (f"; {', '.join(missing)} detached, as declared" if missing else "")


@check("gradcheck", "gradient is the derivative of the value")
def gradient_is_derivative(subject: Subject) -> str:
    """The gradient is the derivative of the value: torch.autograd.gradcheck in float64."""
    layout = subject.batch(4, 3)
    instance, leaves = subject.make(layout), layout.leaves()
    result = subject.result(instance, layout, leaves)
    if all(g is None for g in result.gradients.values()):
        raise Failed("there is no gradient to check")
    names = list(leaves)
    # Each entry costs two evaluations, so larger parameters are only compared with the reference.
    inputs = [*leaves.values(), *(p for p in parameters_of(instance).values() if p.numel() <= checks.MOST_ENTRIES)]

    def function(*values: Tensor) -> Tensor:
        # Parameters are perturbed in place, where the instance holds them.
        with subject.set_back(instance):
            return subject.call(instance, layout, dict(zip(names, values, strict=False)))

    if (error := _is_no_derivative(function, inputs)) is None:
        return "equals finite differences"
    explains = ["close pairs", "size"]
    if subject.truth is not None and subject.detached is not True:
        true = subject.result(instance, layout, leaves, subject.truth)
        if checks.value_error(result, true) <= checks.EXACT:
            explains.append("reference")  # only the gradient is wrong
        if checks.gradient_error(result, true) <= checks.EXACT:
            return "not the derivative of the value, but that of the reference, which stops a gradient too"
    stops = _is_no_derivative(Stops().held(function, *inputs), inputs) is None
    if stops and subject.detached:
        return "equals finite differences with what it detaches held still, as declared"
    source = torch.Generator().manual_seed(4)
    direction = [torch.randn(x.shape, generator=source, dtype=x.dtype) for x in inputs]
    gradients = torch.autograd.grad(function(*inputs).sum(), inputs, allow_unused=True)
    claimed = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True) if g is not None)
    slope = slope_along(function, inputs, direction, 1e-6)
    hint = "a detached factor does this, or a state that changes with each call"
    if stops:
        hint = "it is with what is detached held still: if that is intended, declare it: detached"
    elif result.value.float() == result.value:
        hint = "it is a float32 of float64 inputs: replace x.float() by dipole.full_precision(x)"
        explains += ["permutation", "reference"]
    raise Failed(
        f"not the derivative of the value, which changes by {slope:.4g} along a random direction where the "
        f"gradient says {claimed:.4g}; {hint}",
        tuple(explains),
    ) from error


def _is_no_derivative(function: Callable[..., Tensor], inputs: list[Tensor]) -> GradcheckError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gradcheck(function, inputs, eps=1e-6, atol=1e-6, rtol=1e-4)
    except GradcheckError as error:
        return error
    return None


def slope_along(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], direction: Sequence[Tensor], step: float
) -> float:
    """Return the central difference along a direction. Inputs are moved in place, where an instance may hold them."""
    ends = []
    kept = [x.detach().clone() for x in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for moved in (step, -step, 0.0):
            with torch.no_grad():
                for x, before, d in zip(inputs, kept, direction, strict=True):
                    x.copy_(before + moved * d)
            if moved:
                ends.append(float(function(*inputs).detach()))
    return (ends[0] - ends[1]) / (2 * step)


def _against_truth(
    subject: Subject, leaves: Leaves, where: str, limits: tuple[float, float], temperature: float
) -> str:
    """Compare with the float64 reference on the same (rounded) inputs. Parameters stay in float32."""
    layout = subject.batch(checks.ROWS, checks.COLUMNS)
    true = checks.truth_of(subject, layout, leaves, temperature)
    if not true.finite:
        raise Skipped("the float64 truth itself is not finite. Name a reference")
    dtype = leaves["a"].dtype
    if any(g is not None and not g.to(dtype).isfinite().all() for g in map(true.gradients.get, leaves)):
        return f"has a gradient too large for {str(dtype).removeprefix('torch.')}"
    found = subject.result(subject.make(layout, torch.float32, temperature=temperature), layout, leaves)
    checks.demand_finite(found, where)
    off = checks.relative(found.value, true.value, 1e-3), checks.gradient_error(found, true, 1e-3)
    shown = f"value {found.value.item():.5g} for {true.value.item():.5g}"
    sizes = [max((float(g.norm()) for g in r.gradients.values() if g is not None), default=0.0) for r in (found, true)]
    if sizes[0] == 0 and sizes[1] > 1e-6:
        raise Failed(f"{where}: the gradient is zero, its true norm is {sizes[1]:.3g} ({shown})")
    if off[0] <= limits[0] and off[1] <= limits[1]:
        return f"off by {off[0]:.1e} and {off[1]:.1e}"
    what = f"the gradient is off by {off[1]:.1%} ({shown})"
    if not off[0] <= limits[0]:
        what = f"the value is off by {off[0]:.1%} ({shown}), the gradient by {off[1]:.1%}"
    exact = subject.result(subject.make(layout, temperature=temperature), layout, checks.exactly(leaves))
    other = checks.value_error(exact, true) > checks.EXACT or checks.gradient_error(exact, true) > checks.EXACT
    raise Failed(f"{where}: {what}", by_reference=subject.truth is not None and exact.finite and other)


@check("low temperature", "accurate in float32 at temperature 0.01")
def survives_low_temperature(subject: Subject) -> str:
    """With far positives and near negatives at temperature 0.01, float32 is finite and close to float64."""
    leaves = hard_pairs(checks.ROWS, subject.needs.dim or checks.COLUMNS, torch.float32)
    try:
        return _against_truth(
            subject, leaves, "hard pairs", (checks.SINGLE, checks.SINGLE), checks.LOW_TEMPERATURE
        ) + _untuned(subject)
    except Failed as fault:
        raise Failed(str(fault), (*fault.explains, "float16", "bfloat16"), fault.by_reference) from None


def _untuned(subject: Subject) -> str:
    if subject.temperatures:
        return ""
    return " (as built: it has no temperature to lower)"


def _half(subject: Subject, dtype: torch.dtype) -> str:
    limits = (checks.HALF_VALUE, checks.HALF_GRADIENT)
    found = []
    for kind, leaves, temperature in (
        ("random", subject.batch(checks.ROWS, checks.COLUMNS).leaves(dtype, seed=2), checks.MODERATE_TEMPERATURE),
        ("hard", hard_pairs(checks.ROWS, subject.needs.dim or checks.COLUMNS, dtype), checks.LOW_TEMPERATURE),
    ):
        where = f"{kind} pairs" + (f" at temperature {temperature}" if subject.temperatures else "")
        found.append(f"{kind} {_against_truth(subject, leaves, where, limits, temperature)}")
    return "; ".join(found) + _untuned(subject)


@check("float16", "accurate with float16 inputs")
def survives_float16(subject: Subject) -> str:
    """With float16 inputs (random at temperature 0.05, hard at 0.01) the loss is finite and close to float64."""
    return _half(subject, torch.float16)


@check("bfloat16", "accurate with bfloat16 inputs")
def survives_bfloat16(subject: Subject) -> str:
    """With bfloat16 inputs (random at temperature 0.05, hard at 0.01) the loss is finite and close to float64."""
    return _half(subject, torch.bfloat16)


@check("kernels", "fused kernels give the same numbers")
def kernels_match(subject: Subject) -> str:
    """With the triton engine, kernels are close to float64 on every layout, in float32 and bfloat16."""
    if engine.requested() != "triton":
        raise Skipped("tiles serve; the engine triton runs its kernels")
    if not subject.takes_pairs:
        raise Skipped("a loss of its own does not ask for row statistics")
    device = engine.usual_device()
    asked = [each for _, _, term in subject.make() for each in term.statistics().values()]
    if all(engine.unsupported_reason(each) for each in asked):
        raise Skipped(f"served by {engine.outlook(asked)}")
    before, worst, refused = engine.served(), 0.0, []
    for layout in subject.layouts:
        for dtype, limit in ((torch.float32, checks.SINGLE), (torch.bfloat16, checks.HALF_GRADIENT)):
            leaves = changed(layout.leaves(dtype), lambda x: x.to(device))
            try:
                instance = subject.make(layout, torch.float32).to(device)
                with device:
                    found = subject.result(instance, layout, leaves)
            except DipoleError:
                refused.append(layout.name)
                break
            true = subject.result(subject.make(layout), layout, checks.exactly(leaves), subject.truth)
            found = LossAndGradients(found.value.cpu(), tree_map_only(Tensor, Tensor.cpu, found.gradients))
            where = f"on {layout.name} in {str(dtype).removeprefix('torch.')}"
            checks.demand_finite(found, where)
            off = checks.demand_equal(found, true, where, limit)
            if dtype == torch.bfloat16 and checks.value_error(found, true) > checks.HALF_VALUE:
                raise Failed(f"the value is off by {checks.value_error(found, true):.2g} {where}")
            if dtype == torch.float32:
                worst = max(worst, off)
    if engine.failures() or engine.served() == before:
        raise Failed("; ".join(engine.failures()) or "kernels served no sweep")
    served = engine.served() - before
    note = f"; refuses {', '.join(refused)}" if refused else ""
    return f"{counted(served, 'sweep')}, off by at most {worst:.1g} in float32{note}"
