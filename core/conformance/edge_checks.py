"""Checks of unusual inputs, of several devices and ranks, and of what a call leaves in memory."""

import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from dipole.core.conformance import checks
from dipole.core.conformance.checks import Failed, Skipped, check
from dipole.core.conformance.layouts import Layout, changed, long_queue, scaled
from dipole.core.conformance.modes import Accelerator, Elsewhere, OperationCounter, WrongDeviceError, cubic_share
from dipole.core.conformance.ranks import Case, on_two_ranks
from dipole.core.conformance.subjects import LossAndGradients, Subject
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.text import counted

SIZES = (8, 16, 32, 64, 128)
CUBIC = 0.05
STEPS = 4


class _Token:
    """An object for weak references."""


@check("temperature", "each temperature has an effect")
def temperature_counts(subject: Subject) -> str:
    """Another temperature gives another value and another gradient, each temperature on its own."""
    if not subject.temperatures:
        raise Skipped("it has no temperature")
    leaves = subject.views.leaves()
    found: list[str] = []
    for name in subject.temperatures:
        levels = (checks.LOW_TEMPERATURE, checks.MODERATE_TEMPERATURE, 0.5)
        results = [subject.result(subject.make(temperature={name: t}), subject.views, leaves) for t in levels]
        for t, low, high in zip(levels, results, results[1:], strict=False):
            if max(checks.value_error(low, high), checks.gradient_error(low, high)) <= checks.EXACT:
                same = f"{name} has no effect: {low.value.item():.8g} at {t} and above"
                raise Failed(same, ("low temperature", "float16", "bfloat16"))
        prefix = "" if name == "temperature" else f"{name}: "
        found.append(f"{prefix}{low.value.item():.4g} at 0.05, {high.value.item():.4g} at 0.5")
    return "; ".join(found)


@check("labels", "labels and scores have an effect")
def labels_count(subject: Subject) -> str:
    """Other labels or scores of the same rows have another loss. A class of one row is finite or refused."""
    layout, leaves = subject.views, subject.views.leaves()
    if subject.takes_pairs or ((subject.needs.labels or 1) == 1 and not subject.needs.scores):
        raise Skipped("it takes neither labels nor scores")
    labels, scores = tree_map_only(Tensor, lambda each: each.roll(1), (layout.labels, layout.scores))
    others = replace(layout, labels=labels, scores=scores)
    first, second = (subject.result(subject.make(), each, leaves) for each in (layout, others))
    if max(checks.value_error(second, first), checks.gradient_error(second, first)) <= checks.EXACT:
        what = "scores" if subject.needs.scores else "labels"
        raise Failed(f"the {what} have no effect: {first.value.item():.8g} for any of the same rows", ("reference",))
    for order in ([0, 4, 2, 3, 1], [2, 1, 0, 3, 4]):  # exchange two low scores, two high ones
        if layout.scores is None or not subject.needs.scores or subject.flat:
            break
        exchanged = subject.result(subject.make(), replace(layout, scores=layout.scores[order]), leaves)
        if max(checks.value_error(exchanged, first), checks.gradient_error(exchanged, first)) <= checks.EXACT:
            raise Failed("two different scores count alike: they are rounded")
    if labels is not None and not subject.needs.scores:
        lone = replace(layout, labels=torch.tensor([0, 0, 0, 0, 1] + [0] * 5))
        with suppress(Exception):  # it may refuse such a class
            first = subject.result(subject.make(), lone, leaves)
        checks.demand_finite(first, "a class of one row")
    return f"{first.value.item():.4g}, and {second.value.item():.4g} for others"


@check("weights", "rows count by their weights, or weights are refused")
def weights_count(subject: Subject) -> str:
    """Weights of 1 change nothing, other weights do, a row of weight 0 gets no gradient. A term may refuse weights."""
    if not subject.takes_pairs:
        raise Skipped("loss(a, b) takes no weights")
    if any(term.weighting == "own" for term in subject.make().terms):
        raise Skipped("a term uses weights in its own way")
    plain = long_queue(5, subject.views.width)

    def result(layout: Layout, weights: Tensor | None) -> LossAndGradients:
        def build(**leaves: Tensor) -> Pairs:
            return replace(layout.build(**leaves), weights=None if weights is None else weights.to(leaves["queries"]))

        weighted = replace(layout, build=build)
        return subject.result(subject.make(layout), weighted, layout.leaves())

    try:
        of_rows = None, torch.ones(4), torch.tensor([1.0, 0.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
        results = [result(plain, weights) for weights in of_rows]
    except DipoleError as error:
        return f"refused with one clear error: {error}"
    checks.demand_equal(results[1], results[0], "with weights of 1", other="without weights")
    if all(term.weighting == "pairs" for term in subject.make().terms):
        keys = next(each for each in subject.layouts if each.name == "several keys")
        of_pairs = torch.ones(4, 3), torch.tensor([0.0, 1.0, 2.0]).repeat(4, 1)
        if checks.value_error(*(result(keys, weights) for weights in of_pairs)) <= checks.EXACT:
            raise Failed("weights of pairs, (A, K), have no effect: average over positives with rows.over_positives")
    gradient, of_ones = (results[number].gradients["queries"] for number in (2, 3))
    pairs = plain.build(**plain.leaves())  # a term may have the other queries as candidates too
    grows = any(len(each.prepare(pairs).candidates) > len(pairs.candidates) for each in subject.make(plain).terms)
    if gradient is not None and gradient[1].any() and not grows:
        raise Failed(f"a row of weight 0 has a gradient of length {gradient[1].norm():.4g}: the weights are ignored")
    if gradient is not None and of_ones is not None and gradient.any() and torch.equal(gradient, of_ones):
        raise Failed("weights of 2 and 3 have the gradient of weights of 1")
    return f"{results[0].value.item():.4g}, and {results[2].value.item():.4g} with weights"


@check("padding", "entries of -1 count nowhere")
def ignores_padding(subject: Subject) -> str:
    """One more entry of -1 in each row of positives and ignored rows changes nothing."""
    if not subject.takes_pairs:
        raise Skipped("loss(a, b) has no indices")
    for layout in subject.layouts:
        if layout.name in ("window", "listed"):
            with suppress(DipoleError):  # it may refuse the layout
                plain = subject.result(subject.make(layout), layout, layout.leaves())
                wider = replace(layout, build=partial(_padded, layout))
                found = subject.result(subject.make(layout), wider, layout.leaves())
                checks.demand_equal(found, plain, f"with more padding on {layout.name}: use rows.over_positives")
    return "same value, same gradient"


def _padded(layout: Layout, **leaves: Tensor) -> Pairs:
    pairs = layout.build(**leaves)
    positives, ignored = (pad(each, (0, 1), value=-1) for each in (pairs.positives, pairs.ignored))
    return replace(pairs, positives=positives, ignored=ignored)


@check("work", "cost grows at most with the square of the batch")
def is_not_cubic(subject: Subject) -> str:
    """Work and memory grow at most with the square of the batch size."""
    totals, largest = [], []
    for size in SIZES:
        layout = subject.batch(size)
        instance, leaves = subject.make(layout, torch.float32), layout.leaves(torch.float32)
        with OperationCounter() as work:
            subject.result(instance, layout, leaves)
        totals.append(work.total)
        largest.append(work.largest)
    for what, counts in (("its largest tensor", largest), ("its work", totals)):
        # A step between two sizes, as of a branch for large batches, gives only one of the two windows a cube.
        if cubic_share(SIZES[1:], counts[1:]) > CUBIC and cubic_share(SIZES[:-1], counts[:-1]) > CUBIC / 2:
            raise Failed(
                f"{what} grows with the cube of the batch: {counts[-2]:,} numbers for {SIZES[-2]} rows, {counts[-1]:,} "
                f"for {SIZES[-1]}"
            )
    return f"{totals[-1] / totals[-2]:.2g} times the work for twice the batch"


@check("memory", "keeps no graph from step to step")
def keeps_no_graph(subject: Subject) -> str:
    """No graph of a step stays alive after its backward pass, and memory does not grow from step to step."""
    instance = subject.make(subject.views, torch.float32)
    tokens, sizes = [], []
    for step in range(STEPS):
        leaves = subject.views.leaves(torch.float32, seed=step)
        inputs = {name: leaf * 1 for name, leaf in leaves.items()}  # as an encoder gives them
        token = _Token()
        tokens.append(weakref.ref(token))
        for each in inputs.values():
            each.register_hook(lambda gradient, token=token: None)  # which lives as long as the graph
        del token
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = subject.call(instance, subject.views, inputs)
        if not loss.requires_grad:
            raise Skipped("there is no graph")
        try:
            loss.sum().backward()
        except RuntimeError as error:
            if step and "second time" in str(error):
                raise Failed(
                    f"step {step + 1} goes back through the graph of an earlier step: detach what is kept"
                ) from None
            raise
        del leaves, inputs, each, loss
        sizes.append(_size(instance))
    alive = sum(token() is not None for token in tokens)
    if alive > 1:  # cycles may keep them
        gc.collect()
        alive = sum(token() is not None for token in tokens)
    if alive > 1:
        raise Failed(f"after {STEPS} steps the graphs of {alive} are alive: detach what is kept")
    if sizes[-1] - sizes[1] >= subject.views.leaves(torch.float32)["a"].nbytes:
        raise Failed(f"what it keeps grows: {sizes[1]:,} bytes after step 2, {sizes[-1]:,} after step {STEPS}")
    if alive:
        return "the graph of the last step lives until the next"
    return "no graph stays"


def _size(instance: Any) -> int:
    try:
        return len(pickle.dumps(instance))
    except Exception:  # the check "state" reports it
        return 0


@check("zero rows", "finite if an embedding is zero")
def survives_zero_rows(subject: Subject) -> str:
    """The value and gradient are finite if an embedding is zero, in one view or in both."""
    instance = subject.make(subject.views, torch.float32)
    for names in (("a",), ("a", "b")):
        leaves = subject.views.leaves(torch.float32)
        with torch.no_grad():
            for name in names:
                leaves[name][1] = 0
        result = subject.result(instance, subject.views, leaves)
        checks.demand_finite(result, f"a row of zeros in {' and '.join(names)}")
    return "finite"


@check("large norms", "squared norms do not overflow in float16")
def survives_large_norms(subject: Subject) -> str:
    """In float16, embeddings whose squared norm overflows give the value of shorter ones."""
    layout = subject.batch(checks.ROWS, 128)
    plain = layout.leaves(torch.float16, seed=2)
    large = scaled(plain, 32 * (128 / layout.width) ** 0.5)
    exact = [
        subject.result(subject.make(layout, temperature=0.5), layout, checks.exactly(leaves))
        for leaves in (plain, large)
    ]
    if not checks.relative(exact[1].value, exact[0].value, 1e-3) <= 1e-6:
        raise Skipped("its value depends on the norms")
    found = subject.result(subject.make(layout, torch.float32, temperature=0.5), layout, large)
    checks.demand_finite(found, "norms around 360")
    off = checks.relative(found.value, exact[1].value, 1e-3), checks.gradient_error(found, exact[1], 1e-3)
    if not (off[0] <= checks.HALF_VALUE and off[1] <= checks.HALF_GRADIENT):
        raise Failed(
            f"norms around 360: the value is off by {off[0]:.1%} ({found.value.item():.5g} for "
            f"{exact[1].value.item():.5g}), the gradient by {off[1]:.1%}: squares overflow in float16"
        )
    return f"off by {off[0]:.1e} and {off[1]:.1e} at norms around 360"


@check("strides", "works on inputs that are not contiguous")
def ignores_strides(subject: Subject) -> str:
    """Embeddings that are not contiguous (transposed, every second row) give the value and gradient of a copy."""
    leaves = subject.views.leaves()
    result = subject.result(subject.make(), subject.views, leaves)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda x: x.t().contiguous().t(),
        "every second row": lambda x: torch.stack([x, -x], 1).flatten(0, 1)[::2],
    }
    for way, arrange in ways.items():
        try:
            found = subject.result(subject.make(), subject.views, changed(leaves, arrange))
        except Exception as error:
            raise Failed(f"{way}: {type(error).__name__}: {error}".split("\n", 1)[0]) from None
        checks.demand_equal(found, result, f"if they are arranged otherwise ({way})")
    return "same value, same gradient"


@check("device", "makes its tensors on the inputs' device")
def makes_its_tensors_there(subject: Subject) -> str:
    """The loss creates all its tensors on the device of its inputs (tested with a simulated accelerator)."""
    leaves = subject.views.leaves()
    instance = subject.make()
    plain = subject.result(instance, subject.views, leaves)
    if isinstance(instance, nn.Module):
        instance._apply(lambda tensor: Elsewhere(tensor.detach()))  # as `to` does: parameters and buffers
    try:
        with Accelerator():
            away = changed(leaves, Elsewhere)
            value = subject.call(instance, subject.views, away)
            if value.requires_grad:
                torch.autograd.grad(value.sum(), list(away.values()), allow_unused=True)
    except WrongDeviceError as error:
        raise Failed(f"{error}, which is not the inputs' device: make it with device=a.device") from None
    except Exception as error:
        raise Skipped(f"the stand-in cannot tell: {type(error).__name__}: {error}".split("\n", 1)[0]) from None
    found = value.held if isinstance(value, Elsewhere) else value
    off = checks.relative(found.detach().double().reshape(()), plain.value)
    if not off <= checks.EXACT:
        raise Failed(f"the value is off by {off:.2g} where the inputs lie on another device")
    return "no tensor of the processor among them"


@check("eval mode", "same value in eval mode and without gradients")
def is_the_same_in_eval_mode(subject: Subject) -> str:
    """The loss has the same value in training, in eval mode and under no_grad."""
    instance, leaves = subject.make(), subject.views.leaves()
    trained = subject.result(instance, subject.views, leaves).value
    with torch.no_grad():
        plain = subject.result(instance, subject.views, leaves).value
    if not checks.relative(plain, trained) <= checks.EXACT:
        raise Failed(f"{plain.item():.8g} under no_grad, {trained.item():.8g} with gradients", ("size",))
    if not isinstance(instance, nn.Module):
        return "same under no_grad; it has no modes"
    if subject.stateful:
        return "same under no_grad; what it has seen counts in eval mode, as declared"
    found = subject.result(subject.make().eval(), subject.views, leaves).value
    if not checks.relative(found, trained) <= checks.EXACT:
        raise Failed(f"{found.item():.8g} in eval mode, {trained.item():.8g} in training")
    return "same value"


@check("ranks", "two processes give the loss of one")
def ranks_equal_one_process(subject: Subject) -> str:
    """Two processes with unequal parts of a batch give the loss and gradients of one process with the whole batch."""
    if not subject.takes_pairs:
        raise Skipped("a loss(a, b) knows nothing of other ranks; an Objective's rows are gathered for it")
    for part in subject.make().modules():
        if type(part).__module__ == "__main__":
            name = type(part).__qualname__
            file = name.lower()
            raise Skipped(
                f"{name} is defined in a notebook, or in the script that runs, where two further processes cannot find "
                f"it. Put it into a file (in a notebook: `%%writefile {file}.py` as the first line of its cell) and "
                f"run `dipole check {file}:{name}`"
            )
    cases: list[Case] = []
    expected: list[LossAndGradients] = []
    for number, layout in enumerate(subject.layouts):
        if layout.of_rows:
            instance, leaves = subject.make(layout), layout.leaves()
            try:
                expected.append(subject.result(instance, layout, leaves))
            except DipoleError:
                continue
            cases.append((number, subject.needs.labels, subject.make(layout), leaves))
    found = on_two_ranks(cases)
    worst = 0.0
    for (number, *_), true, got in zip(cases, expected, found, strict=True):
        if isinstance(got, str):
            raise Failed(f"on {subject.layouts[number].name}: {got}")
        where = f"on {subject.layouts[number].name} on two ranks"
        worst = max(worst, checks.demand_equal(got, true, where, other="in one process"))
    return f"off by at most {worst:.1g} on {counted(len(cases), 'layout')}"
