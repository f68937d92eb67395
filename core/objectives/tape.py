"""A function of tensors and its gradient as two flat lists of operations: recorded once, played as often as wanted.

Below some hundred rows a step costs what its calls cost. What PyTorch was asked for while the function ran is written
down as the source of a Python function, without what depends on no input and without what nobody reads; one node of
autograd stands for all of it. The same operations come in the same order on the same numbers: results are equal to the
last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dipole.core.utils.uncompiled import uncompiled

Values = tuple[Tensor, ...]
Again = Callable[[Sequence[Tensor]], Tensor]

_aten = torch.ops.aten
# They return their argument: another name of it will do.
_SAME = frozenset((_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default))
# Indices that are numbers decide about no shape.
_INDEXED = frozenset((_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index))
_UNPLAYABLE = {
    torch.Tag.data_dependent_output: "is read",
    torch.Tag.dynamic_output_shape: "decides about shapes",
    torch.Tag.nondeterministic_seeded: "is drawn",
}
# The functions that take an operation's arguments in fewer steps than the operation itself.
_SHORTER = (torch._C._VariableFunctions, torch._C._nn, getattr(torch._C, "_linalg", None), Tensor)


class UnplayableError(Exception):
    """A function cannot be played again from a list of operations; the message says why."""


@dataclass(frozen=True, eq=False)
class Tape:
    """A recorded function.

    Args:
        forward: inputs -> (outputs, what the gradient needs).
        backward: (what was kept, the gradient of the first output) -> a gradient or None for each input; None where
            the first output has none.
        there: tensors that are no inputs and were there before (remembered indices), and their versions.
    """

    forward: Callable[..., tuple[Values, Values]]
    backward: Callable[[Sequence[Tensor], Tensor], tuple[Tensor | None, ...]] | None
    there: tuple[tuple[Tensor, int], ...] = ()

    @property
    def current(self) -> bool:
        """Whether what was there before is as it was."""
        return all(each._version == version for each, version in self.there)

    def play(self, inputs: Sequence[Tensor], again: Again) -> Values:
        """The outputs, the first with gradient and the others without.

        Args:
            inputs: tensors like those that were recorded.
            again: the recorded function's first output, in ways that can be differentiated twice.
        """
        if self.backward is None:
            return self.forward(*inputs)[0]
        rest: list[Tensor] = []
        first = _Played.apply(self, again, rest, *inputs)  # type: ignore[no-untyped-call]
        return first, *rest


class _Played(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tape: Tape, again: Again, rest: list[Tensor], *inputs: Tensor) -> Tensor:
        (first, *others), kept = tape.forward(*inputs)
        rest += others
        ctx.tape, ctx.again, ctx.count = tape, again, len(inputs)
        ctx.save_for_backward(*inputs, *kept)
        return first

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, kept = saved[: ctx.count], saved[ctx.count :]
        if not torch.is_grad_enabled():
            assert ctx.tape.backward is not None
            return None, None, None, *ctx.tape.backward(kept, grad)
        wanted = [each for each, needed in zip(inputs, ctx.needs_input_grad[3:], strict=True) if needed]
        found = iter(torch.autograd.grad(ctx.again(inputs), wanted, grad, create_graph=True, allow_unused=True))
        return None, None, None, *(next(found) if needed else None for needed in ctx.needs_input_grad[3:])


@dataclass(frozen=True, eq=False)
class _Call:
    """An operation that was asked for, what of, what came out, and whether for the gradient."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    backward: bool

    @property
    def given(self) -> list[Tensor]:
        return [each for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, Tensor)]

    @property
    def made(self) -> list[Tensor]:
        return [] if self.writes else [each for each in tree_leaves(self.out) if isinstance(each, Tensor)]

    @property
    def written(self) -> Iterator[Tensor]:
        """Arguments that it writes to."""
        schema = self.function._schema.arguments
        for place, argument in enumerate(schema):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self.args[place] if place < len(self.args) else self.kwargs.get(argument.name)
                yield from (each for each in tree_leaves(value) if isinstance(each, Tensor))

    @property
    def writes(self) -> bool:
        return bool(self.function._schema.is_mutable)


class _Recorder(TorchDispatchMode):
    """Writes down every operation inside.

    Attributes:
        calls: in their order. They keep all tensors alive: what tells two apart is where they are.
        backward: whether what comes now is part of the gradient.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.backward = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: that loads the compiler, 150 MB and 2 s; it never sees these frames once it is loaded."""
        return False

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _check_playable(func, args)
        out = func(*args, **kwargs)
        call = _Call(func, args, kwargs, out, self.backward)
        if not all(isinstance(each, Tensor) for each in tree_leaves(out)):
            raise UnplayableError(f"{func} gives no tensor")
        if call.writes and {id(each) for each in tree_leaves(out)} - {id(each) for each in call.given}:
            raise UnplayableError(f"{func} writes to a tensor and gives others")
        self.calls.append(call)
        return out


def _check_playable(func: Any, args: Any) -> None:
    """Raise where the values of tensors decide about shapes, or about what comes next, or where numbers are drawn."""
    if func.namespace != "aten":
        raise UnplayableError(f"{func} is no operation of PyTorch's own")
    takes_indices = func.overloadpacket in _INDEXED
    for tag, why in _UNPLAYABLE.items():
        if tag in func.tags and not takes_indices:
            raise UnplayableError(f"a value {why}: {func}")
    if takes_indices and any(each.dtype in (torch.bool, torch.uint8) for each in args[1] if each is not None):
        raise UnplayableError(f"a mask decides about shapes: {func}")


def record(function: Callable[[Sequence[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Tape:
    """Run a function of tensors and its gradient once, and write down how.

    Args:
        function: of the inputs, which must be leaves where they require a gradient; its first output is the one that
            has a gradient, (). It reads no value of a tensor, draws nothing and writes to nothing that it has not made.
        inputs: all that may be other numbers at the next time, parameters among them.

    Raises:
        UnplayableError: if what was done cannot be repeated from a list of operations.
    """
    recorder = _Recorder()
    with recorder:
        outputs = list(function(inputs))
    first = outputs[0]
    upstream = None
    found: Iterator[Tensor | None] = iter(())
    if first.requires_grad:
        recorder.backward = True
        forward = len(recorder.calls)
        with recorder:
            wanted = [each for each in inputs if each.requires_grad]
            found = iter(torch.autograd.grad(first, wanted, allow_unused=True))
        # PyTorch makes the 1 that it begins with itself: to be given one, it loads sympy, 35 MB.
        ones = recorder.calls.pop(forward)
        if ones.function is not _aten.ones_like.default or ones.args[0] is not first:
            raise UnplayableError(f"the gradient begins with {ones.function}")
        upstream = ones.out
    grads = [next(found, None) if each.requires_grad else None for each in inputs]
    return _Writer(inputs, recorder.calls, outputs, upstream, grads).tape(first.requires_grad)


class _Writer:
    """Writes recorded operations as the source of two functions."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        calls: list[_Call],
        outputs: Sequence[Tensor],
        upstream: Tensor | None,
        grads: Sequence[Tensor | None],
    ) -> None:
        self.inputs, self.calls, self.outputs, self.upstream, self.grads = inputs, calls, outputs, upstream, grads
        self.names = {id(each): f"x{number}" for number, each in enumerate(inputs)}
        if upstream is not None:
            self.names[id(upstream)] = "g"
        self.constants: dict[str, Any] = {}
        self.constant_names: dict[object, str] = {}
        self.there = self._there()
        self.written = {_place(each) for call in calls for each in call.written}
        self._check_writes()
        self._drop_fixed()

    def _there(self) -> list[Tensor]:
        """Tensors that take part and are no inputs: who repeats reads them again and finds the same."""
        made = {id(each) for call in self.calls for each in call.made}
        given = {id(each): each for call in self.calls for each in call.given if id(each) not in made}
        return [each for key, each in given.items() if key not in self.names]

    def _check_writes(self) -> None:
        """Raise where something is written to that was there before, or that a second backward pass needs again."""
        made: dict[int, bool] = {}  # memory that an operation has made, and whether for the gradient
        for call in self.calls:
            for each in call.written:
                if _place(each) not in made:
                    raise UnplayableError(f"{call.function} writes to a tensor that was there before")
                if call.backward and not made[_place(each)]:
                    raise UnplayableError(f"{call.function} writes to a tensor that a second backward pass reads")
            of_others = set(map(_place, call.given))  # a view of it is no memory of its own
            made |= {_place(each): call.backward for each in call.made if _place(each) not in {*made, *of_others}}

    def _drop_fixed(self) -> None:
        """What no input decides is made once: indices of fixed shapes and masks made of them, say."""
        loose = {_place(each) for each in (*self.inputs, self.upstream) if each is not None}
        before = -1
        while len(loose) > before:
            before = len(loose)
            last_write: dict[int, int] = {}
            for number, call in enumerate(self.calls):
                places = {_place(each) for each in (*call.made, *call.written)}
                if any(_place(each) in loose for each in call.given):
                    loose |= places
                last_write.update((_place(each), number) for each in call.written)
            for number, call in enumerate(self.calls):
                if any(_place(each) in loose for each in call.given):  # it reads what is written to only later
                    loose |= {place for each in call.given if last_write.get(place := _place(each), -1) > number}
        self.calls = [call for call in self.calls if any(_place(each) in loose for each in (*call.given, *call.made))]

    def tape(self, differentiable: bool) -> Tape:
        """The two functions."""
        lines: list[tuple[bool, str, list[str], list[str], bool]] = []  # backward, source, made, read, writes
        known: dict[str, list[Tensor]] = {}  # what an expression has given that nobody writes to
        for number, call in enumerate(self.calls):
            same = self._same(call)
            if same is not None:
                self.names[id(call.out)] = self._name(same)
                continue
            read = [self._name(each) for each in call.given]
            source = self._source(call)
            tensors = call.made
            if not self.written & {_place(each) for each in (*call.given, *tensors)}:
                before = known.setdefault(source, tensors)
                if before is not tensors:
                    self.names.update((id(n), self._name(b)) for n, b in zip(tensors, before, strict=True))
                    continue
            made = []
            if not call.writes:
                for place, each in enumerate(tensors):
                    made.append(self.names.setdefault(id(each), f"t{number}_{place}"))
                    if made[-1] != f"t{number}_{place}":
                        raise UnplayableError(f"{call.function} returns what it was given")
                target = made[0] if isinstance(call.out, Tensor) else f"{', '.join(made)},"
                source = f"{target} = {source}"
            lines.append((call.backward, source, made, read, call.writes))
        results = [self._name(each) for each in self.outputs]
        grads = [None if each is None else self._name(each) for each in self.grads]
        needed = {*results, *(each for each in grads if each is not None)}
        useful = []
        for line in reversed(lines):
            if line[4] or needed.intersection(line[2]):
                needed.update(line[3])
                useful.append(line)
        useful.reverse()
        return self._compiled(useful, results, grads if differentiable else None)

    def _compiled(
        self,
        lines: list[tuple[bool, str, list[str], list[str], bool]],
        results: list[str],
        grads: list[str | None] | None,
    ) -> Tape:
        local = {name for line in lines if not line[0] for name in line[2]} | {f"x{n}" for n in range(len(self.inputs))}
        asked = [name for line in lines if line[0] for name in line[3]] + [each for each in grads or () if each]
        kept = sorted({name for name in asked if name in local})
        header = ", ".join(f"x{number}" for number in range(len(self.inputs)))
        source = [f"def forward({header}):"]
        source += [f"    {line[1]}" for line in _without_leftovers(lines, False, {*results, *kept})]
        first, *rest = results
        # Autograd makes the first output its own: another that is the same number must not get its graph.
        rest = [f"{first}.detach()" if each == first else each for each in rest]
        source += [f"    return ({', '.join([first, *rest])},), ({''.join(name + ', ' for name in kept)})"]
        if grads is not None:
            source += ["def backward(kept, g):"]
            source += [f"    {''.join(name + ', ' for name in kept)}= kept"] if kept else []
            source += [f"    {line[1]}" for line in _without_leftovers(lines, True, {each for each in grads if each})]
            source += [f"    return ({', '.join(map(str, grads))},)"]
        space = dict(self.constants)
        exec(compile("\n".join(source), "<tape>", "exec"), space)
        return Tape(space["forward"], space.get("backward"), tuple((each, each._version) for each in self.there))

    def _name(self, tensor: Tensor) -> str:
        """The variable that holds a tensor; one that nothing here has made is a constant."""
        name = self.names.get(id(tensor))
        if not name:
            if tensor.requires_grad:
                raise UnplayableError("a tensor with gradient that is no input takes part")
            name = self.names[id(tensor)] = self._constant(tensor)
        return name

    def _constant(self, value: Any) -> str:
        """The variable that holds a value; the same one for the same value."""
        key = id(value) if isinstance(value, Tensor) else (type(value), repr(value) if type(value) is float else value)
        name = self.constant_names.setdefault(key, f"k{len(self.constants)}")
        self.constants[name] = value
        return name

    def _same(self, call: _Call) -> Tensor | None:
        """The argument that a call returns unchanged, if it does and nobody writes to it afterwards."""
        function, args = call.function, call.args
        same: Tensor | None = args[0] if args and isinstance(args[0], Tensor) else None
        if function in _SAME:
            return same
        packet, once = function.overloadpacket, len(args) > 1 and type(args[1]) in (int, float) and args[1] == 1
        if packet in (_aten.masked_fill, _aten.masked_fill_):
            same = same if self._is(args[1], False) else None
        elif packet == _aten.where and len(args) == 3:
            same = args[1] if self._is(args[0], True) else None
        elif packet not in (_aten.mul, _aten.div, _aten.expand) or not (once or packet == _aten.expand):
            return None
        if same is None or same.shape != call.out.shape or same.dtype != call.out.dtype:
            return None
        return same if call.writes or not self.written & {_place(same), _place(call.out)} else None

    def _is(self, mask: Tensor, value: bool) -> bool:
        """Whether a mask that no input decides is everywhere the same."""
        return self.names.get(id(mask), "k")[0] == "k" and not bool((mask != value).any())

    def _source(self, call: _Call) -> str:
        """The call as an expression."""
        function, args = _shortest(call), call.args
        if call.function is _aten.slice.Tensor and args[4:] in ((), (1,)):
            dim, start = args[1], args[2] or 0
            start = min(start if start >= 0 else start + args[0].shape[dim], args[0].shape[dim])
            function, args = torch.narrow, (args[0], dim, start, call.out.shape[dim])
        written = [*map(self._written, args), *(f"{key}={self._written(value)}" for key, value in call.kwargs.items())]
        return f"{self._constant(function)}({', '.join(written)})"

    def _written(self, value: Any) -> str:
        """An argument as source."""
        if isinstance(value, Tensor):
            return self._name(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._written, value))}]"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self._constant(value)


def _without_leftovers(
    lines: list[tuple[bool, str, list[str], list[str], bool]], backward: bool, wanted: set[str]
) -> list[tuple[bool, str]]:
    """The lines of one function, each followed by a line that lets go of what no later one reads."""
    mine = [line for line in lines if line[0] == backward]
    found: list[tuple[bool, str]] = []
    seen = set(wanted)
    for line in reversed(mine):
        last = [name for name in dict.fromkeys([*line[2], *line[3]]) if name not in seen and name[0] == "t"]
        seen.update(last)
        if last:
            found.append((backward, f"del {', '.join(last)}"))
        found.append((backward, line[1]))
    found.reverse()
    return found


def _place(tensor: Tensor) -> int:
    """What tells memory from other memory while both are alive."""
    return int(tensor.untyped_storage()._cdata)


def _shortest(call: _Call) -> Any:
    """A function that does the same with the same arguments in fewer steps, if PyTorch has one; else the operation."""
    name = call.function._schema.name.removeprefix("aten::")
    for home in _SHORTER:
        found = getattr(home, name, None)
        if found is not None and (call.writes or _agrees(found, call)):
            return found
    return call.function


def _agrees(function: Callable[..., Any], call: _Call) -> bool:
    try:
        with torch.no_grad():
            out = function(*call.args, **call.kwargs)
    except (TypeError, ValueError, RuntimeError):
        return False
    mine, theirs = tree_leaves(out), tree_leaves(call.out)
    return len(mine) == len(theirs) and all(
        isinstance(a, Tensor) and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
        for a, b in zip(mine, theirs, strict=True)
    )
