"""Checks where trained models are: with close positives and near negatives, and with hundreds of rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product

import torch
from torch import Tensor

from dipole.core.conformance import checks
from dipole.core.conformance.accuracy_checks import slope_along
from dipole.core.conformance.call_checks import ignores_order, ignores_this_order
from dipole.core.conformance.checks import Failed, check
from dipole.core.conformance.layouts import WIDTH, Layout, Leaves, long_queue, scaled
from dipole.core.conformance.modes import OperationCounter, Stops
from dipole.core.conformance.subjects import LossAndGradients, Subject
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import DipoleError

NOISE = 0.05
# No round numbers, where margins bend.
LEVELS = (-0.603, -0.297, 0.103, 0.297, 0.503, 0.703, 0.853, 0.917, 0.972, 0.9953, 0.9991, 0.99991)
MANY, MORE = 73, 307  # rows of a view: against the loops, and for what needs none. Primes, which no chunk divides
WIDE = (129, 200, 1030)  # columns
FEW_BITS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (checks.HALF_VALUE, checks.HALF_GRADIENT)}  # at many rows
MOST_NUMBERS = 40_000_000  # of the largest tensor at MORE rows
SLOPE = 1e-3  # between a central difference and the gradient
STEPS = (1e-6, 1e-5, 1e-4)  # of differences for many rows: rounding may cancel at one of them
UNCHANGED = 1e-9
KINDS: dict[str, Callable[[int, int, int], bool]] = {  # of the pairs i < j of two views of n rows
    "positives": lambda i, j, n: j - i == n,
    "negatives of the other view": lambda i, j, n: i < n <= j and j - i != n,
    "negatives of the same view": lambda i, j, n: (i < n) == (j < n),
}


@check("close pairs", "correct with close positives and near negatives")
def holds_for_close_pairs(subject: Subject) -> str:
    """With positives at noise 0.05 and cosines from -0.6 to 0.9999, at any length, values and slopes are right."""
    layout = subject.batch(8)
    batches = {"positives at noise 0.05": close_views(layout), "near negatives": close_views(layout, spread=0.3)}
    said = [_is_right(subject, layout, leaves, where) for where, leaves in batches.items()]
    for times in (1e-3, 1e2) if subject.truth is not None else ():
        said.append(_is_right(subject, layout, scaled(layout.leaves(), times), f"rows {times:g} times as long"))
    if subject.truth is not None:
        twice = {name: torch.cat([leaf[:4], leaf[:4]]) for name, leaf in layout.leaves().items()}
        _equals(subject, replace(layout, name="views, each twice"), subject.truth, twice)
    few = subject.batch(min(3, layout.width - 1))
    if len(few.leaves()["a"]) > 1:
        found = [(level, at_cosine(level, *few.shapes["a"])) for level in LEVELS]
        for level, leaves in found:
            said.append(_is_right(subject, few, leaves, f"positives at cosine {level}"))
        if subject.truth is None and not subject.flat:
            _reacts_everywhere(subject, few, dict(found))
            _counts_each_negative(subject)
    if subject.truth is None:
        _holds_for_short_rows(subject, layout)
    if not any(said):
        return f"its slope is right from cosine {LEVELS[0]} to {LEVELS[-1]}"
    return f"off by at most {max(said):.1g} from cosine {LEVELS[0]} to {LEVELS[-1]}"


def close_views(layout: Layout, spread: float | None = None) -> Leaves:
    """Return two views of rows that differ by noise of 0.05. With a spread, all rows lie around one point."""
    source = torch.Generator().manual_seed(6)
    first, noise = torch.randn((2, *layout.shapes["a"]), generator=source, dtype=torch.float64)
    if spread is not None:
        first = torch.ones(layout.width, dtype=torch.float64) + spread * first
    return {"a": first.clone().requires_grad_(), "b": (first + NOISE * noise).requires_grad_()}


def at_cosine(level: float, count: int, width: int) -> Leaves:
    """Return unit rows whose positives have about one cosine (-0.6 to 1). Negatives are nearer than positives."""
    source = torch.Generator().manual_seed(8)
    near = level + (1 - level) / 4
    jitter = (1 - level) / 20 * torch.rand((2, count, count), generator=source, dtype=torch.float64)
    gram = (near + jitter[0].triu(1) + jitter[0].triu(1).T).fill_diagonal_(1.0)
    basis = torch.linalg.qr(torch.randn((width, width), generator=source, dtype=torch.float64))[0]
    a = torch.linalg.cholesky(gram) @ basis[:count]
    wanted = near + jitter[1]
    wanted.diagonal().copy_(torch.linspace(level, level + (1 - level) / 20, count))
    inside = wanted @ torch.linalg.inv(gram) @ a
    rest = 0.6 + torch.randn((count, width - count), generator=source, dtype=torch.float64)
    rest = torch.nn.functional.normalize(rest, dim=1) @ basis[count:]
    b = inside + (1 - inside.square().sum(1, keepdim=True)).sqrt() * rest
    return {"a": a.requires_grad_(), "b": b.requires_grad_()}


def _is_right(subject: Subject, layout: Layout, leaves: Leaves, where: str) -> float:
    """Return the error against the reference. Without a reference, compare the gradient with a central difference."""
    instance = subject.make(layout)
    found = subject.result(instance, layout, leaves)
    checks.demand_finite(found, where)
    if subject.truth is None:
        _demand_slope(subject, layout, leaves, found, where)
        return 0.0
    true = subject.result(instance, layout, leaves, subject.truth)
    if true.finite:
        return checks.demand_equal(found, true, f"with {where}", other="reference")
    return 0.0


def _demand_slope(
    subject: Subject,
    layout: Layout,
    leaves: Leaves,
    found: LossAndGradients,
    where: str,
    steps: Sequence[float] = STEPS[:1],
) -> None:
    """Compare the slope along the gradient, and along a random direction, with central differences."""
    instance = subject.make(layout)
    # With a reference the gradient is compared with that, also of a loss that stops one.
    stops = bool(subject.detached) or subject.truth is not None
    names = list(leaves)

    def function(*values: Tensor) -> Tensor:
        with subject.set_back(instance):
            return subject.call(instance, layout, dict(zip(names, values, strict=True))).double().sum()

    inputs = [leaf.detach().clone() for leaf in leaves.values()]
    gradient = _gradient(found, leaves)
    length = float(torch.stack([g.norm() for g in gradient]).norm())
    if length == 0:
        return
    rounding = 1e-15 * max(1.0, abs(float(found.value)))
    source = torch.Generator().manual_seed(4)
    random = [torch.randn(x.shape, generator=source, dtype=x.dtype) for x in inputs]
    size = float(torch.stack([r.norm() for r in random]).norm())
    for direction, step in product(([g / length for g in gradient], [r / size for r in random]), steps):
        claimed = float(sum((g * d).sum() for g, d in zip(gradient, direction, strict=True)))
        slopes, calls = [], [function]
        if stops:
            calls.append(Stops().held(function, *inputs))
        for call in calls:
            slopes.append(slope_along(call, inputs, direction, step))
            if abs(slopes[-1] - claimed) <= SLOPE * length + rounding / step:
                break
        else:
            raise Failed(
                f"{where}: the value changes by {slopes[0]:.4g} where the gradient says {claimed:.4g}; something is "
                "computed in low precision, a gradient is stopped, or the value jumps"
            )


def _gradient(found: LossAndGradients, leaves: Leaves) -> list[Tensor]:
    """Return the gradient of each leaf, zeros where it has none."""
    gradients = [(leaf, found.gradients[name]) for name, leaf in leaves.items()]
    return [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in gradients]


def _reacts_everywhere(subject: Subject, layout: Layout, batches: dict[float, Leaves]) -> None:
    """Raise Failed if the loss reacts to a kind of cosine at some levels and not at others."""
    found = {level: _slopes(subject, layout, leaves) for level, leaves in batches.items()}
    for kind in KINDS:
        still: list[str] = []
        alive: list[str] = []
        for level, slopes in found.items():
            if kind not in slopes:
                continue
            shown = level if kind == "positives" else level + (1 - level) / 4
            listed = alive if abs(float(slopes[kind].sum())) > UNCHANGED else still
            listed.append(f"{shown:.5g}")
        if still and alive:
            raise Failed(
                f"the loss ignores {kind} at cosine {', '.join(still)}, but not at {', '.join(alive)}: a clamp or a "
                "dead band; if it is a margin that you want, declare it: flat"
            )


def _counts_each_negative(subject: Subject) -> None:
    """Raise Failed if the loss reacts to some negatives of the other view and not to others of about one cosine."""
    width = subject.needs.dim or checks.COLUMNS
    layout = subject.batch(min(checks.ROWS, width // 2), width)
    if layout.shapes["a"][0] < 2:
        return
    kind = "negatives of the other view"  # those of the same view have several cosines
    slopes = _slopes(subject, layout, at_cosine(LEVELS[5], *layout.shapes["a"])).get(kind, torch.zeros(0))
    ignored = int((slopes.abs() <= UNCHANGED).sum())
    if 0 < ignored < len(slopes):
        raise Failed(
            f"the loss ignores {ignored} of {len(slopes)} {kind} at about one cosine; if only hard ones are to count, "
            "declare it: flat"
        )


def _slopes(subject: Subject, layout: Layout, leaves: Leaves) -> dict[str, Tensor]:
    """Return the slope of the loss along the cosine of each pair, by kind. Kinds that cannot move alone are left out.

    Slopes are checks.relative to the lengths of the gradient and of the step.
    """
    rows = torch.cat([leaf.detach() for leaf in leaves.values()])
    gradient = torch.cat(_gradient(subject.result(subject.make(layout), layout, leaves), leaves)).flatten()
    count, width = rows.shape
    pairs = list(combinations(range(count), 2))
    # The equations of a step: lengths stay, and cosines rise as wanted.
    equations = torch.zeros(count + len(pairs), count, width, dtype=rows.dtype)
    for i in range(count):
        equations[i, i] = rows[i]
    for number, (i, j) in enumerate(pairs, start=count):
        equations[number, i], equations[number, j] = rows[j], rows[i]
    matrix = equations.flatten(1)
    steps = torch.linalg.pinv(matrix)[:, count:]  # the shortest ones, a column for each pair
    found = {}
    for kind, is_of in KINDS.items():
        chosen = torch.tensor([is_of(i, j, count // 2) for i, j in pairs])
        wanted = torch.cat([torch.zeros(count, dtype=torch.bool), chosen]).to(rows.dtype)
        if torch.allclose(matrix @ steps[:, chosen].sum(1), wanted, atol=1e-7):
            own = steps[:, chosen]
            found[kind] = gradient @ own / (gradient.norm() * own.norm()).clamp_min(1e-300)
    return found


def _holds_for_short_rows(subject: Subject, layout: Layout) -> None:
    """Raise Failed if the lengths of short rows count and those of long ones do not: an epsilon is too large."""
    values, radial = [], []
    for times in (1e-3, 1e2, 1e4):
        leaves = scaled(layout.leaves(), times)
        result = subject.result(subject.make(layout), layout, leaves)
        rows, gradient = torch.cat(list(leaves.values())).detach(), torch.cat(_gradient(result, leaves))
        values.append(result.value)
        radial.append(float((rows * gradient).sum(1).norm() / (rows.norm(dim=1) * gradient.norm(dim=1)).norm()))
    _, long, longer = radial
    is_free = max(long, longer) < 1e-12 or 90 < long / longer < 110  # x / max(|x|, epsilon), x / (|x| + epsilon)
    off = checks.relative(values[0], values[2])
    if is_free and off > 0.01:
        raise Failed(
            f"rows 0.001 times as long change the value by {off:.2g}, and long ones do not: the epsilon of the "
            "normalisation is too large"
        )


def _sparse(count: int, width: int) -> Layout:
    """Return rows of another view, each with a positive and four negatives. The others are ignored."""
    index = torch.arange(count)
    near = torch.stack([(index + step) % count for step in range(5)], 1)
    ignored = torch.stack([row[~torch.isin(row, near[i])] for i, row in enumerate(index.expand(count, count))])
    return Layout(
        "few negatives of many",
        {"a": (count, width), "b": (count, width)},
        lambda a, b: Pairs(a, b, near[:, :1], ignored, labels=(index // 2) % 5),
    )


@check("size", "correct for 307 rows and 200 columns")
def holds_for_many_rows(subject: Subject) -> str:
    """73 and 307 rows, and 129 and 200 columns, equal the reference. Each row and column has a gradient."""
    _holds_for_wide_rows(subject)
    said = []
    if subject.truth is not None:
        compared = _compared(subject)
        for layout, by in compared:
            try:
                _equals(subject, layout, by, layout.leaves())
            except DipoleError:
                if layout is compared[0][0]:
                    raise
        said.append(f"equals the reference for {MANY} and {MORE} rows")
    count = _affordable(subject)
    layout = subject.batch(count)
    leaves = layout.leaves()
    result = subject.result(subject.make(layout), layout, leaves)
    checks.demand_finite(result, f"{count} rows")
    few = subject.result(subject.make(), subject.views, subject.views.leaves())
    for name in leaves:
        gradient, before = result.gradients[name], few.gradients[name]
        if subject.truth is None and gradient is not None and before is not None and before.any(dim=1).all():
            empty = int((~gradient.any(dim=1)).sum())
            if empty:
                raise Failed(f"the gradient of {empty} of {count} rows of {name} is zero, of {len(before)} of none")
    _demand_slope(subject, layout, leaves, result, f"{count} rows", STEPS)
    _demand_accurate(subject, layout)
    try:
        ignores_order(subject)
    except Failed:
        return "; ".join([*said, "see permutation"])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(5))
    ignores_this_order(subject, layout, leaves, order, result)
    return "; ".join([*said, f"in any order for {count}"])


def _holds_for_wide_rows(subject: Subject) -> None:
    """Raise Failed if a column has no gradient, or the loss of many columns differs from the reference."""
    for width in WIDE if subject.needs.dim is None else (subject.needs.dim,):
        layout = subject.batch(5, width)
        # Rows as long as those of few columns: the loops shift no exponential, and lose digits at large dot products.
        leaves = scaled(layout.leaves(), (WIDTH / width) ** 0.5)
        try:
            found = subject.result(subject.make(layout), layout, leaves)
        except Exception:
            if width % 2:  # some losses need an even width
                continue
            raise
        for name in leaves:
            gradient = found.gradients[name]
            empty = 0 if gradient is None else int((~gradient.any(dim=0)).sum())
            if 0 < empty < width:
                raise Failed(f"the gradient of {empty} of {width} columns of {name} is zero")
        if subject.truth is not None and width < WIDE[-1]:  # loops over pairs of columns are slow
            true = subject.result(subject.make(layout), layout, leaves, subject.truth)
            checks.demand_equal(found, true, f"with {width} columns", other="reference")


def _compared(subject: Subject) -> list[tuple[Layout, Callable[..., Tensor]]]:
    """Return batches and what each is compared with. The loops are slow, so large batches have few pairs."""
    assert subject.truth is not None
    compared = [(subject.batch(MANY), subject.truth)]
    if subject.twin is not None:
        return [*compared, (subject.batch(_affordable(subject)), subject.twin)]
    width = subject.views.width
    return [*compared, (long_queue(MORE, width), subject.truth), (_sparse(MORE, width), subject.truth)]


def _equals(subject: Subject, layout: Layout, by: Callable[..., Tensor], leaves: Leaves) -> None:
    instance = subject.make(layout)
    with torch.no_grad():
        found, true = (subject.result(instance, layout, leaves, loss).value for loss in (None, by))
    count = max(shape[0] for shape in layout.shapes.values())
    if not checks.relative(found, true) <= checks.EXACT:
        said = f"{found.item():.10g} for {count} rows of {layout.name}, reference {true.item():.10g}"
        raise Failed(said, by_reference=True)


def _affordable(subject: Subject) -> int:
    """Return 307, or 153 for a loss whose largest tensor grows with the cube of the batch."""
    largest = []
    for size in (MORE // 4, MORE // 2):
        layout = subject.batch(size)
        with OperationCounter() as work, torch.no_grad():
            subject.result(subject.make(layout), layout, layout.leaves())
        largest.append(work.largest)
    if largest[1] * largest[1] / max(largest[0], 1) <= MOST_NUMBERS:
        return MORE
    return MORE // 2


def _demand_accurate(subject: Subject, layout: Layout) -> None:
    """Compare low precision with float64 on the same inputs, where a few rows say how accurate the loss is.

    Float32 may not be off by much more than float64 with and without rounding of the inputs to float32.
    """
    for dtype, least in FEW_BITS.items():
        (few, _), (many, rounding) = (_errors(subject, each, dtype) for each in (subject.views, layout))
        for what, before, off, rounded, bits in zip(("value", "gradient"), few, many, rounding, least, strict=True):
            limit = 10 * before
            if dtype == torch.float32:
                limit = min(limit, 30 * rounded)
            if not off <= max(limit, bits):
                said = f"{off:.1g} for {layout.shapes['a'][0]} rows, and by {before:.1g} for few"
                raise Failed(f"in {str(dtype).removeprefix('torch.')} the {what} is off by {said}")


def _errors(subject: Subject, layout: Layout, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Return the errors of value and gradient in low precision, and those of float64 for inputs that are rounded."""
    leaves = layout.leaves(dtype)
    low = subject.result(subject.make(layout, torch.float32), layout, leaves)
    exact, rounded = (
        subject.result(subject.make(layout), layout, each) for each in (layout.leaves(), checks.exactly(leaves))
    )
    return [
        (checks.relative(each.value, rounded.value), checks.gradient_error(each, rounded, 1e-3))
        for each in (low, exact)
    ]
