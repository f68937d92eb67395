"""Elementwise expressions: what a statistic does to one similarity, as data that can be differentiated and printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Node:
    """A number, the variable s or e, or an operation on nodes."""

    operation: str
    arguments: tuple[Node, ...] = ()
    number: float = 0.0


S, E = Node("s"), Node("e")


def number(value: float) -> Node:
    """A constant."""
    return Node("number", (), float(value))


ZERO, ONE = number(0.0), number(1.0)


@dataclass(frozen=True)
class Operation:
    """How an operation is written in a kernel and computed on tensors, and its partial derivatives.

    Args:
        text: the kernel's expression, with {0}, {1}, ... for the arguments.
        compute: the same on tensors.
        partials: of each argument, from the operation's own node; None for an argument without a derivative.
        boolean: it gives true or false.
    """

    text: str
    compute: Callable[..., Tensor]
    partials: Callable[[Node], tuple[Node | None, ...]]
    boolean: bool = False


def add(a: Node, b: Node) -> Node:
    if a == ZERO or b == ZERO:
        return b if a == ZERO else a
    return _made("add", a, b)


def sub(a: Node, b: Node) -> Node:
    return a if b == ZERO else _made("sub", a, b)


def mul(a: Node, b: Node) -> Node:
    if ONE in (a, b):
        return b if a == ONE else a
    return ZERO if ZERO in (a, b) else _made("mul", a, b)


def div(a: Node, b: Node) -> Node:
    return a if b == ONE else _made("div", a, b)


def apply(operation: str, *arguments: Node) -> Node:
    """An operation on nodes; `add`, `sub`, `mul` and `div` leave out what changes nothing."""
    simple = {"add": add, "sub": sub, "mul": mul, "div": div}
    return simple[operation](*arguments) if operation in simple else _made(operation, *arguments)


def _made(operation: str, *arguments: Node) -> Node:
    if all(each.operation == "number" for each in arguments) and not OPERATIONS[operation].boolean:
        values = [torch.tensor(each.number, dtype=torch.float64) for each in arguments]
        return number(float(OPERATIONS[operation].compute(*values)))
    return Node(operation, arguments)


def _unary(text: str, compute: Callable[..., Tensor], partial: Callable[[Node, Node], Node]) -> Operation:
    """An operation on one argument; `partial` takes the operation's node and its argument."""
    return Operation(text, compute, lambda node: (partial(node, node.arguments[0]),))


def _compare(sign: str, compute: Callable[..., Tensor]) -> Operation:
    return Operation(f"({{0}} {sign} {{1}})", compute, lambda node: (None, None), True)


def _chosen(condition: Node, yes: Node, no: Node) -> Node:
    return yes if yes == no else Node("where", (condition, yes, no))


def _extremum(sign: str) -> Callable[[Node], tuple[Node, Node]]:
    def partials(node: Node) -> tuple[Node, Node]:
        first = Node(sign, node.arguments)
        return _chosen(first, ONE, ZERO), _chosen(first, ZERO, ONE)

    return partials


def _square(a: Node) -> Node:
    return mul(a, a)


TWO_OVER_ROOT_PI = number(2 / math.sqrt(math.pi))

OPERATIONS: Mapping[str, Operation] = {
    "add": Operation("({0} + {1})", torch.add, lambda n: (ONE, ONE)),
    "sub": Operation("({0} - {1})", torch.sub, lambda n: (ONE, number(-1))),
    "mul": Operation("({0} * {1})", torch.mul, lambda n: (n.arguments[1], n.arguments[0])),
    "div": Operation(
        "({0} / {1})",
        torch.div,
        lambda n: (div(ONE, n.arguments[1]), mul(number(-1), div(n, n.arguments[1]))),
    ),
    "exp": _unary("tl.exp({0})", torch.exp, lambda n, a: n),
    "log": _unary("tl.log({0})", torch.log, lambda n, a: div(ONE, a)),
    "log1p": _unary("log1p({0})", torch.log1p, lambda n, a: div(ONE, add(ONE, a))),
    "expm1": _unary("expm1({0})", torch.expm1, lambda n, a: add(n, ONE)),
    "sqrt": _unary("tl.sqrt({0})", torch.sqrt, lambda n, a: div(number(0.5), n)),
    "abs": _unary(
        "tl.abs({0})", torch.abs, lambda n, a: sub(_chosen(Node("gt", (a, ZERO)), ONE, ZERO), _below_zero(a))
    ),
    "sin": _unary("tl.sin({0})", torch.sin, lambda n, a: apply("cos", a)),
    "cos": _unary("tl.cos({0})", torch.cos, lambda n, a: mul(number(-1), apply("sin", a))),
    "tanh": _unary("tanh({0})", torch.tanh, lambda n, a: sub(ONE, _square(n))),
    "sigmoid": _unary("tl.sigmoid({0})", torch.sigmoid, lambda n, a: mul(n, sub(ONE, n))),
    "erf": _unary(
        "tl.erf({0})", torch.erf, lambda n, a: mul(TWO_OVER_ROOT_PI, apply("exp", mul(number(-1), _square(a))))
    ),
    "relu": _unary("tl.maximum({0}, 0.0)", torch.relu, lambda n, a: _chosen(Node("gt", (a, ZERO)), ONE, ZERO)),
    "detach": Operation("{0}", torch.detach, lambda n: (None,)),
    "maximum": Operation("tl.maximum({0}, {1})", torch.maximum, _extremum("ge")),
    "minimum": Operation("tl.minimum({0}, {1})", torch.minimum, _extremum("le")),
    "where": Operation(
        "tl.where({0}, {1}, {2})",
        torch.where,
        lambda n: (None, _chosen(n.arguments[0], ONE, ZERO), _chosen(n.arguments[0], ZERO, ONE)),
    ),
    "gt": _compare(">", torch.gt),
    "ge": _compare(">=", torch.ge),
    "lt": _compare("<", torch.lt),
    "le": _compare("<=", torch.le),
    "eq": _compare("==", torch.eq),
    "ne": _compare("!=", torch.ne),
    "logical_and": _compare("&", torch.logical_and),
    "logical_or": _compare("|", torch.logical_or),
    "logical_not": Operation("({0} == 0)", torch.logical_not, lambda n: (None,), True),
}


def _below_zero(a: Node) -> Node:
    return _chosen(Node("lt", (a, ZERO)), ONE, ZERO)


def is_boolean(node: Node) -> bool:
    """Whether it is true or false."""
    return node.operation in OPERATIONS and OPERATIONS[node.operation].boolean


def derivative(node: Node, scale: float | None) -> Node:
    """The derivative with respect to s, where e' = scale e."""
    if node == S:
        return ONE
    if node == E:
        return mul(number(scale or 0.0), E)
    if node.operation == "number" or is_boolean(node):
        return ZERO
    total = ZERO
    for partial, argument in zip(OPERATIONS[node.operation].partials(node), node.arguments, strict=True):
        inner = ZERO if partial is None else derivative(argument, scale)
        if partial is not None and inner != ZERO:
            total = add(total, _chained(partial, inner))
    return total


def _chained(partial: Node, inner: Node) -> Node:
    """partial * inner; a branch that is not taken is left out, so that what is infinite there does no harm."""
    if partial.operation == "where" and set(partial.arguments[1:]) == {ZERO, ONE}:
        condition, yes, _ = partial.arguments
        return _chosen(condition, *((inner, ZERO) if yes == ONE else (ZERO, inner)))
    return mul(partial, inner)


def compute(node: Node, s: Tensor, e: Tensor | None) -> Tensor:
    """The expression on tensors, of the shape of s."""
    if node == S:
        return s
    if node == E:
        assert e is not None
        return e
    if node.operation == "number":
        return torch.full_like(s, node.number)
    return OPERATIONS[node.operation].compute(*(compute(each, s, e) for each in node.arguments))
