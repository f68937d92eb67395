"""From a statistic's `parts` to expressions: the function is called on a symbol, which records what is done to it.

A symbol answers to operators, to the elementwise functions of `torch` and to the methods of a tensor of the same names.
What it does not know (a reduction, a branch on values, a tensor of the statistic's own) leaves the statistic to the
tiles; nothing has to be declared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from dipole.core.objectives.kernels import expression
from dipole.core.objectives.kernels.expression import ONE, ZERO, E, Node, S, apply, derivative, is_boolean, number
from dipole.core.objectives.statistics import Statistic


class Untraceable(Exception):  # noqa: N818
    """A statistic cannot be written as a kernel; the message says why."""


@dataclass(frozen=True)
class Traced:
    """The parts of a statistic and their slopes as expressions of s and e."""

    parts: tuple[Node, ...]
    slopes: tuple[Node, ...]


class Symbol:
    """Stands for a tensor of similarities in `parts`."""

    dtype = torch.float32

    def __init__(self, node: Node, given: bool = False) -> None:
        self.node = node
        self.given = given

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Symbol:
        return _call(function.__name__, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_") and name[:-1] in FUNCTIONS:
            return partial(self._write, name[:-1])
        return partial(_call, name, self)

    def _write(self, name: str, *args: Any, **kwargs: Any) -> Symbol:
        """In place: the symbol stands for the result from then on."""
        if self.given:
            raise Untraceable(f"it writes to its argument ({name}_)")
        self.node = _call(name, self, *args, **kwargs).node
        return self

    def __bool__(self) -> bool:
        raise Untraceable("it decides by a similarity's value")

    def __add__(self, other: Any) -> Symbol:
        return _call("add", self, other)

    def __sub__(self, other: Any) -> Symbol:
        return _call("sub", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return _call("sub", other, self)

    def __mul__(self, other: Any) -> Symbol:
        return _call("mul", self, other)

    def __truediv__(self, other: Any) -> Symbol:
        return _call("div", self, other)

    def __rtruediv__(self, other: Any) -> Symbol:
        return _call("div", other, self)

    def __pow__(self, other: Any) -> Symbol:
        return _call("pow", self, other)

    def __neg__(self) -> Symbol:
        return _call("neg", self)

    def __abs__(self) -> Symbol:
        return _call("abs", self)

    def __and__(self, other: Any) -> Symbol:
        return _call("logical_and", self, other)

    def __or__(self, other: Any) -> Symbol:
        return _call("logical_or", self, other)

    def __invert__(self) -> Symbol:
        return _call("logical_not", self)

    def __lt__(self, other: Any) -> Symbol:
        return _call("lt", self, other)

    def __le__(self, other: Any) -> Symbol:
        return _call("le", self, other)

    def __gt__(self, other: Any) -> Symbol:
        return _call("gt", self, other)

    def __ge__(self, other: Any) -> Symbol:
        return _call("ge", self, other)

    def __eq__(self, other: object) -> Symbol:  # type: ignore[override]
        return _call("eq", self, other)

    def __ne__(self, other: object) -> Symbol:  # type: ignore[override]
        return _call("ne", self, other)

    __hash__ = None  # type: ignore[assignment]
    __radd__, __rmul__ = __add__, __mul__


def _call(name: str, *args: Any, **kwargs: Any) -> Symbol:
    if name not in FUNCTIONS:
        raise Untraceable(f"{name!r} is no elementwise function that a kernel knows")
    try:
        return Symbol(FUNCTIONS[name](*args, **kwargs))
    except TypeError as error:
        raise Untraceable(f"{name}: {error}") from None


def _node(value: Any) -> Node:
    if isinstance(value, Symbol):
        return value.node
    if isinstance(value, (bool, int, float)):
        return number(float(value))
    raise Untraceable(f"it combines similarities with a {type(value).__name__}")


def _value(value: Any) -> Node:
    """As a number, where it is true or false."""
    node = _node(value)
    return apply("where", node, ONE, ZERO) if is_boolean(node) else node


def _plain(operation: str) -> Callable[..., Node]:
    """A function that is one operation on its arguments."""
    return lambda *args: apply(operation, *map(_value, args))


def _logical(operation: str) -> Callable[..., Node]:
    return lambda *args: Node(operation, tuple(map(_node, args)))


def _add(a: Any, b: Any, *, alpha: float = 1) -> Node:
    return expression.add(_value(a), expression.mul(number(alpha), _value(b)))


def _sub(a: Any, b: Any, *, alpha: float = 1) -> Node:
    return expression.sub(_value(a), expression.mul(number(alpha), _value(b)))


def _pow(a: Any, exponent: Any) -> Node:
    base = _value(a)
    if not isinstance(exponent, (int, float)):
        raise Untraceable("a power must be a number")
    if float(exponent).is_integer() and abs(exponent) <= 16:
        product = ONE
        for _ in range(abs(int(exponent))):
            product = expression.mul(product, base)
        return product if exponent >= 0 else expression.div(ONE, product)
    if float(2 * exponent).is_integer() and 0 < exponent <= 16:
        return expression.mul(_pow(a, int(exponent)), apply("sqrt", base))
    return apply("exp", expression.mul(number(exponent), apply("log", base)))


def _clamp(a: Any, min: Any = None, max: Any = None) -> Node:
    node = _value(a)
    node = node if min is None else apply("maximum", node, _value(min))
    return node if max is None else apply("minimum", node, _value(max))


def _softplus(a: Any, beta: float = 1, threshold: float = 20) -> Node:
    # log(1 + e^z) = max(z, 0) + log1p(e^-|z|), which needs no threshold.
    z = expression.mul(number(beta), _value(a))
    tail = apply("log1p", apply("exp", expression.mul(number(-1), apply("abs", z))))
    return expression.div(expression.add(apply("relu", z), tail), number(beta))


def _hardshrink(a: Any, lambd: float = 0.5) -> Node:
    node = _value(a)
    return apply("where", apply("gt", apply("abs", node), number(lambd)), node, ZERO)


def _where(condition: Any, yes: Any, no: Any) -> Node:
    return apply("where", _node(condition), _value(yes), _value(no))


def _converted(a: Any, dtype: Any = None) -> Node:
    return _value(a) if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point) else _refused(a)


def _refused(_: Any) -> Node:
    raise Untraceable("it converts similarities to what is no floating-point number")


def _negative(a: Any) -> Node:
    return expression.mul(number(-1), _value(a))


def _both(a: Any, b: Any, c: Any, value: float, combine: Callable[[Node, Node], Node]) -> Node:
    return expression.add(_value(a), expression.mul(number(value), combine(_value(b), _value(c))))


FUNCTIONS: dict[str, Callable[..., Node]] = {
    **{
        name: _plain(name)
        for name in ("exp", "log", "log1p", "expm1", "sqrt", "abs", "sin", "cos", "tanh", "sigmoid", "erf", "relu")
    },
    **{
        name: _plain(name)
        for name in ("detach", "maximum", "minimum", "mul", "div", "gt", "ge", "lt", "le", "eq", "ne")
    },
    **{name: _logical(name) for name in ("logical_and", "logical_or", "logical_not")},
    "add": _add,
    "sub": _sub,
    "subtract": _sub,
    "rsub": lambda a, b, *, alpha=1: _sub(b, a, alpha=alpha),
    "multiply": _plain("mul"),
    "divide": _plain("div"),
    "true_divide": _plain("div"),
    "neg": _negative,
    "negative": _negative,
    "square": lambda a: _pow(a, 2),
    "reciprocal": lambda a: expression.div(ONE, _value(a)),
    "rsqrt": lambda a: expression.div(ONE, apply("sqrt", _value(a))),
    "pow": _pow,
    "exp2": lambda a: apply("exp", expression.mul(number(math.log(2)), _value(a))),
    "log2": lambda a: expression.mul(number(1 / math.log(2)), apply("log", _value(a))),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda a, min: _clamp(a, min),
    "clamp_max": lambda a, max: _clamp(a, None, max),
    "softplus": _softplus,
    "log_sigmoid": lambda a: expression.mul(number(-1), _softplus(_negative_symbol(a))),
    "logsigmoid": lambda a: expression.mul(number(-1), _softplus(_negative_symbol(a))),
    "silu": lambda a: expression.mul(_value(a), apply("sigmoid", _value(a))),
    "hardshrink": _hardshrink,
    "where": _where,
    "masked_fill": lambda a, mask, value: _where(mask, value, a),
    "addcmul": lambda a, b, c, *, value=1: _both(a, b, c, value, expression.mul),
    "addcdiv": lambda a, b, c, *, value=1: _both(a, b, c, value, expression.div),
    "to": _converted,
    "type_as": lambda a, other: _value(a),
    "float": _converted,
    "double": _converted,
    "clone": _converted,
    "zeros_like": lambda a: ZERO,
    "ones_like": lambda a: ONE,
    "full_like": lambda a, fill_value: number(fill_value),
}


def _negative_symbol(a: Any) -> Symbol:
    return Symbol(_negative(a))


@lru_cache(maxsize=256)
def trace(statistic: Statistic) -> Traced:
    """The expressions of a statistic, held against its own functions on tensors.

    Raises:
        Untraceable: if `parts` or `slopes` does what a kernel cannot.
    """
    e = None if statistic.scale is None else Symbol(E, given=True)
    parts = _recorded(statistic.parts, e, "parts")
    if type(statistic).slopes is Statistic.slopes:
        slopes = tuple(derivative(part, statistic.scale) for part in parts)
    else:
        slopes = _recorded(statistic.slopes, e, "slopes")
    _compare(statistic, parts, slopes)
    return Traced(parts, slopes)


def _recorded(function: Callable[..., Any], e: Symbol | None, name: str) -> tuple[Node, ...]:
    try:
        found = function(Symbol(S, given=True), e)
        return tuple(_value(each) for each in (found if isinstance(found, tuple) else (found,)))
    except Untraceable as reason:
        raise Untraceable(f"{name}: {reason}") from None
    except Exception as error:
        raise Untraceable(f"{name}: {type(error).__name__}: {error}") from error


def _compare(statistic: Statistic, parts: tuple[Node, ...], slopes: tuple[Node, ...]) -> None:
    """Hold the expressions against the functions on tensors, off the points where a slope may jump."""
    s = torch.linspace(-1.03, 0.97, 23, dtype=torch.float64)
    e = None if statistic.scale is None else (statistic.scale * s - abs(statistic.scale)).exp()
    for name, nodes, function in (("parts", parts, statistic.parts), ("slopes", slopes, statistic.slopes)):
        theirs = function(s.clone(), None if e is None else e.clone())
        wanted: tuple[Tensor, ...] = theirs if isinstance(theirs, tuple) else (theirs,)
        found = [expression.compute(node, s, e) for node in nodes]
        same = [torch.allclose(a, b.to(a.dtype), 1e-8, 1e-10, True) for a, b in zip(found, wanted, strict=False)]
        if len(found) != len(wanted) or not all(same):
            raise Untraceable(f"{name}: on a symbol it gives something else than on tensors")
