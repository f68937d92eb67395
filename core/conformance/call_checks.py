"""Checks of how a loss is called: edge cases, order, determinism, storage, tiles, compilation, descent."""

import inspect
import logging
import pickle
import warnings
from contextlib import suppress
from dataclasses import replace
from itertools import product
from unittest import mock

import torch
from torch import Tensor, nn

from dipole.core.conformance import checks
from dipole.core.conformance.checks import Failed, Skipped, check
from dipole.core.conformance.layouts import Layout, Leaves, changed
from dipole.core.conformance.subjects import LossAndGradients, Subject, parameters_of
from dipole.core.objectives import similarity, tiles
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import DipoleError

# Checks that fail if a call changes its inputs, or depends on earlier calls.
_OF_CHANGE: tuple[str, ...] = ("reference", "gradcheck", "low temperature", "float16", "bfloat16", "large norms")
_OF_CHANGE += ("close pairs", "permutation", "state", "tiled", "compile", "inductor", "descent", "temperature", "size")
_OF_CHANGE += ("strides", "device", "eval mode", "ranks")


@check("call", "takes the kit's batches, returns a number")
def can_be_called(subject: Subject) -> str:
    """The loss returns one finite number for 4, 5 and 8 rows, of any width unless one is given."""
    said = _refusal(subject)
    if said:
        raise Failed(said + _way_out(subject), tuple(each.name for each in checks.CHECKS if each.name != "call"))
    return "one number"


def _refusal(subject: Subject) -> str:
    """Return the error of a call on small batches, or an empty string."""
    for layout in (subject.views, subject.batch(4, 3), subject.batch(checks.ROWS, checks.COLUMNS)):
        try:
            subject.result(subject.make(layout), layout, layout.leaves())
        except DipoleError:
            if not subject.takes_pairs:
                raise
            return ""  # the layouts are refused one by one
        except Exception as error:
            line = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            return f"for {layout.shapes['a'][0]} rows of width {layout.width}: {line}"
    return ""


def _way_out(subject: Subject) -> str:
    """Return the flags with which the loss can be called, as a sentence."""
    if subject.refit is None:
        return ""
    instance = subject.make()
    held, function = [], instance
    if isinstance(instance, nn.Module):
        held, function = list(instance.state_dict().values()), instance.forward
    sizes = {n for x in held for n in x.shape if 1 < n <= 4096}
    others = [replace(subject.needs, labels=2, scores=False), replace(subject.needs, labels=None, scores=True)]
    with suppress(ValueError):  # a function of C has no signature
        if any("score" in name for name in inspect.signature(function).parameters):
            others.reverse()
    for needs in (subject.needs, *others):
        for dim in (subject.needs.dim, *sorted(sizes)):
            other = subject.refit(replace(needs, dim=dim))
            if not _refusal(other):
                flags = [f"--dim {dim}"] * (dim != subject.needs.dim)
                flags += ["--labels CLASSES"] * (needs.labels != subject.needs.labels and needs.labels is not None)
                flags += ["--scores"] * (needs.scores and not subject.needs.scores)
                return f". It can be called with {' '.join(flags)}"
    return ". It is called as loss(a, b). See --dim, --labels and --scores"


@check("identical points", "finite if all points are equal")
def survives_identical_points(subject: Subject) -> str:
    """The value and gradient are finite if all points are equal, or both views are."""
    instance = subject.make(subject.views, torch.float32)
    leaves = subject.views.leaves(torch.float32)
    point, view = torch.linspace(-1.0, 1.0, subject.views.width), leaves["a"].detach()
    for where, rows in {"all points identical": point.expand_as(view), "identical views": view}.items():
        same = {name: rows.clone().requires_grad_() for name in leaves}
        checks.demand_finite(subject.result(instance, subject.views, same), where)
    return "finite"


@check("one anchor", "a batch of one is finite or refused")
def survives_one_anchor(subject: Subject) -> str:
    """A batch with a single anchor gives a finite value and gradient, or one clear error."""
    instance = subject.make(subject.views, torch.float32)
    if not subject.takes_pairs:
        layout = subject.batch(1)
        try:
            result = subject.result(instance, layout, layout.leaves(torch.float32))
        except Exception as error:
            return f"refuses n = 1: {type(error).__name__}: {error}".split("\n", 1)[0]
        checks.demand_finite(result, "n = 1")
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
    checks.demand_finite(result, "one anchor")
    return f"{result.value.item():.4g} against a queue"


@check("no negatives", "finite without negatives, with a note")
def survives_without_negatives(subject: Subject) -> str:
    """Without negatives each term is finite. A term that needs them is 0, with a note."""
    if not subject.takes_pairs:
        raise Skipped("loss(a, b) has no way to say so. See one anchor")
    layout = subject.batch(1)
    instance = subject.make(layout, torch.float32)
    result = subject.result(instance, layout, layout.leaves(torch.float32))
    checks.demand_finite(result, "no negatives")
    outcome = instance(layout.build(**layout.leaves(torch.float32)))
    silent = [name for name, term in outcome.terms.items() if float(term) == 0 and not term.note]
    if silent:
        raise Failed(f"{', '.join(silent)} is 0 without a note that says why")
    return "; ".join(f"{name} {float(term):.4g} {term.note}".strip() for name, term in outcome.terms.items())


@check("permutation", "order of the batch does not matter")
def ignores_order(subject: Subject) -> str:
    """Reordering the instances does not change the value, and reorders the gradient."""
    leaves = subject.views.leaves()
    count = len(leaves["a"])
    result = subject.result(subject.make(), subject.views, leaves)
    # A rotation and an exchange generate all orders. A loss that pairs rows by place may pass one of them.
    rotated = torch.arange(count).roll(-1)
    exchanged = torch.cat([torch.tensor([1, 0]), torch.arange(2, count)])
    for order in (rotated, exchanged, torch.randperm(count, generator=torch.Generator().manual_seed(5))):
        ignores_this_order(subject, subject.views, leaves, order, result)
    return "same value, same gradient"


def ignores_this_order(
    subject: Subject, layout: Layout, leaves: Leaves, order: Tensor, result: LossAndGradients
) -> None:
    """Raise Failed if the instances of two views in another order have another value or gradient than the result."""
    reordered = changed(leaves, lambda x: x[order])
    moved = subject.result(subject.make(), subject.in_order(order, layout.width), reordered)
    if not checks.value_error(moved, result) <= checks.EXACT:
        said = f"the value changes from {result.value.item():.8g} to {moved.value.item():.8g}"
        raise Failed(said, ("reference",))
    for name in leaves:
        before, after = result.gradients[name], moved.gradients[name]
        if before is not None and after is not None and not checks.relative(after, before[order]) <= checks.EXACT:
            raise Failed(
                f"the gradient of {name} changes by {checks.relative(after, before[order]):.2g}", ("reference",)
            )


@check("determinism", "same call, same bits")
def repeats_itself(subject: Subject) -> str:
    """A second call, another instance, or one that saw another batch gives the same bits. Inputs are not changed."""
    instance = subject.make(subject.views, torch.float32)
    leaves = subject.views.leaves(torch.float32)
    states = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 0):
            torch.default_generator.manual_seed(seed)
            first = subject.result(instance, subject.views, leaves)
            states.append(torch.get_rng_state())
    if torch.equal(*states):
        raise Failed("the call seeds PyTorch's generator, and so what others draw: use a torch.Generator of its own")
    if not subject.takes_pairs:
        subject.result(subject.make(), subject.views, subject.views.leaves())  # in the scores' own precision
        for name in ("labels", "scores"):
            if not torch.equal(getattr(subject.views, name), getattr(subject.batch(len(leaves["a"])), name)):
                raise Failed(f"the call changes its {name} in place", _OF_CHANGE)
    if any(not torch.equal(leaf, subject.views.leaves(torch.float32)[name]) for name, leaf in leaves.items()):
        raise Failed("the call changes its inputs in place", _OF_CHANGE)
    if any(leaf.grad is not None for leaf in leaves.values()):
        raise Failed("the call runs a backward pass of its own", _OF_CHANGE)
    for who, other in (("called again", instance), ("built again", subject.make(subject.views, torch.float32))):
        second = subject.result(other, subject.views, leaves)
        if not _same(first, second):
            hint = "; if it is to depend on earlier calls, declare it: stateful" if who == "called again" else ""
            raise Failed(f"{who} it gives {second.value.item():.9g} after {first.value.item():.9g}{hint}", _OF_CHANGE)
    smaller = subject.batch(4)
    leaves = smaller.leaves(torch.float32, seed=2)
    alone = subject.result(subject.make(smaller, torch.float32), smaller, leaves)
    try:
        after = subject.result(instance, smaller, leaves)
    except Exception as error:
        line = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        raise Failed(f"it keeps something of its first batch, and refuses one of another size: {line}") from None
    if not _same(alone, after):
        said = f"{after.value.item():.9g} after another batch, and {alone.value.item():.9g} as its first"
        raise Failed(f"it keeps something of its first batch: {said}; if that is intended, declare it: stateful")
    if subject.stateful:
        return "same bits, its state set back, as declared"
    return "same bits"


def _same(first: LossAndGradients, second: LossAndGradients) -> bool:
    """Return whether values and gradients have the same bits."""
    both = [(first.value, second.value), *((g, second.gradients[name]) for name, g in first.gradients.items())]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in both)


@check("state", "survives saving and loading")
def survives_storage(subject: Subject) -> str:
    """A copy by state_dict, by pickle or from the written spec gives the same loss."""
    instance = subject.make(subject.views, torch.float32)
    leaves = subject.views.leaves(torch.float32)
    if subject.stateful:  # in the midst of a training
        for seed in (7, 8):
            subject.call(instance, subject.views, subject.views.leaves(torch.float32, seed=seed))
    first = subject.result(instance, subject.views, leaves)
    kept = ["pickle"]
    try:
        copied = pickle.loads(pickle.dumps(instance))
    except Exception as error:
        raise Failed(f"cannot be pickled: {type(error).__name__}: {error}") from None
    if not _same(first, subject.result(copied, subject.views, leaves)):
        raise Failed("pickle does not keep it")
    if isinstance(instance, nn.Module):
        other = subject.make(subject.views, torch.float32, seed=1)
        other.load_state_dict(instance.state_dict())
        if not _same(first, subject.result(other, subject.views, leaves)):
            raise Failed("state_dict does not carry all that the loss depends on")
        kept.append("state_dict")
    if subject.read is not None:
        text = str(instance)
        again = subject.read(text).build(subject.views.width)
        if str(again) != text:
            raise Failed(f"{text!r} reads back as {str(again)!r}")
        again.load_state_dict(instance.state_dict())
        if not _same(first, subject.result(again, subject.views, leaves)):
            raise Failed(f"the spec {text!r} does not rebuild it")
        kept.append(f"spec {text}")
    return ", ".join(kept)


@check("tiled", "tiles give the loss of the whole matrix")
def tiles_equal_dense(subject: Subject) -> str:
    """Tiles of 3 rows give the loss of the whole matrix."""
    if not subject.takes_pairs:
        raise Skipped("only dipole's own objectives are tiled")
    worst = 0.0
    # At the low temperature sums need a running maximum, which the next tile may raise after a tile was kept.
    ways: list[tuple[float | None, tuple[int, ...]]] = [(None, (0, tiles.CACHE_BYTES))]
    if subject.temperatures:
        ways.append((checks.LOW_TEMPERATURE, (tiles.CACHE_BYTES,)))
    for layout, (temperature, caches) in product(subject.layouts, ways):
        instance, leaves = subject.make(layout, temperature=temperature), layout.leaves()
        try:
            whole = subject.result(instance, layout, leaves)
        except DipoleError:
            continue
        for cache in caches:
            with (
                mock.patch.object(similarity, "LARGEST", 0),
                mock.patch.object(tiles, "TILE", 3),
                mock.patch.object(tiles, "CACHE_BYTES", cache),
            ):
                tiled = subject.result(instance, layout, leaves)
            lowered = f" at temperature {temperature}" if temperature else ""
            worst = max(worst, checks.demand_equal(tiled, whole, f"on {layout.name}{lowered}"))
    return f"off by at most {worst:.1g}"


def _compiled(subject: Subject, backend: str) -> str:
    torch._dynamo.reset()
    instance, leaves = subject.make(), subject.views.leaves()
    eager = subject.result(instance, subject.views, leaves)

    logging.disable(logging.WARNING)  # graph breaks are logged, but are not faults
    try:
        compiled = subject.result(instance, subject.views, leaves, torch.compile(subject.call, backend=backend))
    finally:
        logging.disable(logging.NOTSET)
    off = checks.demand_equal(compiled, eager, f"under backend {backend}")
    return f"off by {off:.1g} under backend {backend}"


@check("compile", "torch.compile gives the same loss")
def compiles(subject: Subject) -> str:
    """torch.compile (backend aot_eager: traced and differentiated ahead of time, run eagerly) equals eager."""
    return _compiled(subject, "aot_eager")


@check("inductor", "generated code gives the same loss", slow=True)
def compiles_with_inductor(subject: Subject) -> str:
    """torch.compile with its default backend, which generates code, equals eager."""
    return _compiled(subject, "inductor")


@check("descent", "gradient steps lower the loss")
def descends(subject: Subject) -> str:
    """Twenty steps of Adam on free embeddings lower the loss."""
    layout = subject.batch(checks.ROWS, checks.COLUMNS)
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
