"""Steps of small batches that were seen before: the same terms on pairs of the same shapes are played from a tape.

A step is taken the ordinary way twice, recorded at the third time, computed both ways at the fourth, and played from
then on, as long as nothing has changed that a term or the pairs say of themselves. Whatever cannot be played, or is not
equal to the last bit, stays with the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dipole.core.objectives import engine
from dipole.core.objectives.evaluate import Outcome, TermValue, without_autocast
from dipole.core.objectives.pairs import Pairs, fill
from dipole.core.objectives.tape import Tape, UnplayableError, record

if TYPE_CHECKING:
    from dipole.core.objectives.objective import Composite

# Rows of all embeddings of a step that is played: 256 points of two views. Above it a step costs what its numbers do.
LARGEST = 512
# At this time a step is recorded, at the next one computed both ways.
RECORDED_AT = 3
# Different steps that are remembered, and how often one that changes under its tape is recorded again.
REMEMBERED, PATIENCE = 64, 3
# What every module has, and the options that a term was given, which nobody reads again.
_USUAL = frozenset((*vars(nn.Module()), "given"))
_CONTAINERS = (list, dict, set, bytearray)

Evaluate = Callable[[Sequence[Tensor]], Outcome]


@dataclass(frozen=True, eq=False)
class _Recorded:
    """How one kind of step goes.

    Args:
        tape: of the step.
        state: what the terms held when it was recorded.
        parameters: of the terms, inputs of the tape behind those of the step.
        terms: name, weight, note and whether it has `left_out`, of each.
    """

    tape: Tape
    state: Sequence[object]
    parameters: Sequence[Tensor]
    terms: Sequence[tuple[str, float, str, bool]]

    def play(self, inputs: Sequence[Tensor], evaluate: Evaluate) -> Outcome:
        """The outcome from the tape."""
        count = len(inputs)
        with without_autocast("cpu"):
            loss, *rest = self.tape.play((*inputs, *self.parameters), lambda given: evaluate(given[:count]).loss)
        found = iter(rest)
        terms = {
            name: TermValue(next(found), weight, note, next(found) if partial else None)
            for name, weight, note, partial in self.terms
        }
        return Outcome(loss, terms)

    def holds(self, composite: Composite) -> bool:
        """Whether all is as it was when the step was recorded."""
        return self.tape.current and _unchanged(self.state, composite)


@dataclass(eq=False)
class _Step:
    """What is known of one kind of step.

    Attributes:
        seen: how often it came.
        recorded: how it goes, once that is known.
        trusted: the same, once it has given what the ordinary way gives.
        left: how often it may be recorded.
        learning: held by the thread that learns; others go the ordinary way meanwhile.
    """

    seen: int = 0
    recorded: _Recorded | None = None
    trusted: _Recorded | None = None
    left: int = PATIENCE
    learning: Lock = field(default_factory=Lock)

    def learn(self, composite: Composite, inputs: Sequence[Tensor], evaluate: Evaluate) -> None:
        """Record the step if it has come often enough; hold a new tape against the ordinary way."""
        if not self.left or any(each._backward_hooks for each in composite.parameters()):
            return  # a gradient that nobody asked for would call somebody's hooks
        if not self.learning.acquire(blocking=False):
            return
        try:
            self._learn(composite, inputs, evaluate)
        finally:
            self.learning.release()

    def _learn(self, composite: Composite, inputs: Sequence[Tensor], evaluate: Evaluate) -> None:
        self.seen += 1
        if self.recorded is not None and not self.recorded.holds(composite):
            self.recorded, self.trusted, self.seen = None, None, 0
            self.left -= 1
        if self.seen < RECORDED_AT:
            return
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
        try:
            with torch.random.fork_rng([]):
                if self.recorded is None:
                    self.recorded = _record(composite, leaves, evaluate)
                else:
                    _compare(self.recorded, leaves, evaluate)
                    self.trusted = self.recorded
        except Exception:  # whatever it is: the ordinary way comes next, and goes on or says what is wrong
            self.recorded, self.left = None, 0


def _record(composite: Composite, leaves: list[Tensor], evaluate: Evaluate) -> _Recorded:
    if not _repeats(composite):
        raise UnplayableError("a term does not say that it repeats")
    state, parameters = _state(composite), list(composite.parameters())
    terms: list[tuple[str, float, str, bool]] = []

    def values(given: Sequence[Tensor]) -> list[Tensor]:
        found = evaluate(given[: len(leaves)])
        terms.extend((name, v.weight, v.note, v.left_out is not None) for name, v in found.terms.items())
        return _values(found)

    recorded = _Recorded(record(values, [*leaves, *parameters]), state, parameters, terms)
    if not recorded.holds(composite):
        raise UnplayableError("a term has changed itself")
    return recorded


def _compare(recorded: _Recorded, leaves: list[Tensor], evaluate: Evaluate) -> None:
    """Take the step both ways."""
    wanted = [each for each in [*leaves, *recorded.parameters] if each.requires_grad]
    ways = []
    for found in (evaluate(leaves), recorded.play(leaves, evaluate)):
        grads: Sequence[Tensor | None] = ()
        if found.loss.requires_grad:
            grads = torch.autograd.grad(found.loss, wanted, allow_unused=True)
        ways.append([*_values(found), *grads])
    if not all(map(_same, *ways)):
        raise UnplayableError("the tape gives something else")


class Steps:
    """The steps of one objective; a copy of it, or one that was pickled, remembers none."""

    def __init__(self) -> None:
        self._steps: dict[object, _Step] = {}

    def __reduce__(self) -> tuple[type[Steps], tuple[()]]:
        return Steps, ()

    def on_views(self, composite: Composite, views: Sequence[Tensor]) -> Outcome:
        """The outcome on two or more views (B, d)."""

        def evaluate(given: Sequence[Tensor]) -> Outcome:
            return composite.evaluate(Pairs.from_views(given))

        return self._taken(composite, views, (), evaluate, lambda: evaluate(views))

    def on_pairs(self, composite: Composite, pairs: tuple[Pairs, ...]) -> Outcome:
        """The outcome on pairs of a single process."""
        tensors: list[Tensor] = []
        places: dict[int, int] = {}
        said: list[object] = []
        # Of the pairs' tensors only their places: a loss that is kept keeps how to find it again, but no embeddings.
        held: list[tuple[Pairs | type[Pairs], dict[str, Any], dict[str, int]]] = []
        for each in pairs:
            known, values = each.filling or (type(each), vars(each))
            said.append(known)
            others: dict[str, Any] = {}
            where: dict[str, int] = {}
            for name, value in values.items():
                if isinstance(value, Tensor):
                    where[name] = places.setdefault(id(value), len(tensors))
                    if where[name] == len(tensors):
                        tensors.append(value)
                    said += name, where[name]
                elif name != "source":
                    others[name] = value
                    said += name, value
            held.append((known, others, where))

        def evaluate(given: Sequence[Tensor]) -> Outcome:
            copies = []
            for known, others, where in held:
                now = {**others, **{name: given[place] for name, place in where.items()}}
                copies.append(fill(known, now) if isinstance(known, Pairs) else _copied(known, now))
            return composite.evaluate(copies)

        return self._taken(composite, tensors, tuple(said), evaluate, lambda: composite.evaluate(pairs))

    def _taken(
        self,
        composite: Composite,
        inputs: Sequence[Tensor],
        said: tuple[object, ...],
        evaluate: Evaluate,
        ordinary: Callable[[], Outcome],
    ) -> Outcome:
        key = _key(inputs, said)
        if key is None:
            return ordinary()
        try:
            step = self._steps.get(key)
        except TypeError:  # somebody's pairs hold what cannot be told from others
            return ordinary()
        if step is None:
            if len(self._steps) >= REMEMBERED:
                self._steps.clear()
            step = self._steps[key] = _Step()
        trusted = step.trusted  # another thread may learn that it no longer holds
        if trusted is not None and trusted.holds(composite):
            return trusted.play(inputs, evaluate)
        step.learn(composite, inputs, evaluate)
        return ordinary()


def _copied(kind: type[Pairs], values: dict[str, Any]) -> Pairs:
    """Pairs that hold these values, and what was read off their indices is not checked again."""
    copy = kind.__new__(kind)
    copy.__dict__.update(values, source=None)
    return copy


def _key(inputs: Sequence[Tensor], said: tuple[object, ...]) -> object:
    """What tells a step from others; None where somebody looks on (a mode, a tracer), or numbers are the cost."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or torch.is_inference_mode_enabled()
        # Activation checkpointing counts what is saved, and a step that is taken again must save as much.
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        or engine.wanted() == "triton"
    ):
        return None
    key: list[object] = [torch.is_grad_enabled()]
    rows = 0
    for each in inputs:
        if type(each) not in (Tensor, nn.Parameter) or not each.is_cpu:
            return None
        shape = each.shape
        key += shape, each.stride(), each.dtype, each.requires_grad
        if len(shape) == 2:
            rows += shape[0]
    return (*key, *said) if rows <= LARGEST else None


def _repeats(composite: Composite) -> bool:
    """Whether every term says that it repeats, and holds nothing that can change without being another."""
    return all(
        term.repeats
        and not term._modules
        and not any(isinstance(value, _CONTAINERS) for name, value in vars(term).items() if name not in _USUAL)
        for _, _, term in composite
    )


def _state(composite: Composite) -> list[object]:
    """All that decides about a step besides its tensors."""
    terms = composite._modules["terms"]
    assert terms is not None
    state: list[object] = [terms, *composite.weights]
    for term in terms._modules.values():
        held = vars(term)
        state += term, *held.values(), *held["_buffers"].values()
        for each in held["_parameters"].values():
            state += each, each is not None and each.requires_grad, each is not None and each.dtype
    return state


def _unchanged(state: Sequence[object], composite: Composite) -> bool:
    now = _state(composite)
    return len(state) == len(now) and all(map(is_, state, now))


def _values(outcome: Outcome) -> list[Tensor]:
    """The loss, and what each term has of tensors."""
    several = [(v.value,) if v.left_out is None else (v.value, v.left_out) for v in outcome.terms.values()]
    return [outcome.loss, *(each for some in several for each in some)]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal to the last bit; NaN is NaN."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
