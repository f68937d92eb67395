"""The text of the kernels of a set of statistics, made from their expressions.

Three kernels share one shape: a program owns BM rows of one side, visits the rows of the other side BN at a time and
keeps what it adds up in registers.

    forward   owns anchors, visits candidates; keeps the sums of all statistics
    rows      owns anchors, visits candidates; keeps the gradient of its anchors
    columns   owns candidates, visits anchors; keeps the gradient of its candidates
    both      rows and columns at once where anchors are the candidates: dL/ds_ij + dL/ds_ji times x_j
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dipole.core.contrast.kernels.expression import OPERATIONS, E, Node, S, is_boolean
from dipole.core.contrast.kernels.trace import trace
from dipole.core.contrast.statistics import Extreme, Statistic

Side = Literal["rows", "columns", "both"]

# Numbers that are part of an expression's shape; all others are arguments of a kernel, so that a temperature that
# changes needs no new one.
LITERAL = (0.0, 1.0, -1.0, 2.0, 0.5)
INPUTS = "x, y, x_scale, y_scale, lists"
# The last two only tell sizes apart for which blocks are chosen anew.
COUNTS = "own_size, other_size, width, steps, chunk, own_kind, other_kind"
SIZES = "D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr"
FLAGS = "SCALED: tl.constexpr, FEW: tl.constexpr, PRECISION: tl.constexpr"


@dataclass(frozen=True)
class Summand:
    """A statistic in a kernel: the first row of its sums, and whether its exponent needs a running maximum."""

    statistic: Statistic
    first: int
    running: bool

    @property
    def stop(self) -> int:
        """The row after its last."""
        return self.first + len(trace(self.statistic).parts)


def summed(statistics: Sequence[Statistic], running: Sequence[bool]) -> tuple[Summand, ...]:
    """Statistics with the rows of their sums, one after the other."""
    found: list[Summand] = []
    for statistic, high in zip(statistics, running, strict=True):
        found.append(Summand(statistic, found[-1].stop if found else 0, high))
    return tuple(found)


@dataclass
class Writer:
    """Collects the lines of one kernel, and the numbers that it takes as arguments."""

    numbers: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    names: dict[object, str] = field(default_factory=dict)

    def number(self, value: float) -> str:
        if value in LITERAL:
            return repr(value)
        if value not in self.numbers:
            self.numbers.append(value)
        return f"k{self.numbers.index(value)}"

    def write(self, node: Node, e: str) -> str:
        """The name of a variable that holds the expression; equal ones are computed once."""
        if node == S:
            return "s"
        if node == E:
            return e
        if node.operation == "number":
            return self.number(node.number)
        key = (node, e if _contains(node, E) else "")
        if key not in self.names:
            arguments = [self.write(each, e) for each in node.arguments]
            self.names[key] = f"v{len(self.names)}"
            self.lines.append(f"{self.names[key]} = {OPERATIONS[node.operation].text.format(*arguments)}")
        return self.names[key]

    def tile(self, node: Node, e: str) -> str:
        """The same, of the shape of a tile whatever the expression is made of."""
        assert not is_boolean(node)
        return f"(s * 0.0 + {self.write(node, e)})" if node.operation == "number" else self.write(node, e)


def _contains(node: Node, variable: Node) -> bool:
    return node == variable or any(_contains(each, variable) for each in node.arguments)


def forward(summands: Sequence[Summand], extremes: Sequence[Extreme]) -> tuple[str, list[float]]:
    """The kernel `forward` of some statistics, and the numbers k0, k1, ... that it takes."""
    out = Writer()
    exponents = _exponents(summands)
    before, after = [], []
    sums = [row for each in summands for row in range(each.first, each.stop)]
    before += [f"sum{row} = tl.zeros((BM,), tl.float32)" for row in sums]
    for (scale, running), name in exponents.items():
        power = f"{out.number(scale)} * s"
        if not running:
            out.lines.append(f"{name} = tl.exp({power})")
            continue
        before.append(f"top_{name} = tl.full((BM,), LOWEST, tl.float32)")
        out.lines += [
            f"p_{name} = {power}",
            f"new_{name} = tl.maximum(top_{name}, tl.max(tl.where(allowed, p_{name}, -float('inf')), 1))",
            f"shrink_{name} = tl.exp(top_{name} - new_{name})",
            f"top_{name} = new_{name}",
            f"{name} = tl.exp(p_{name} - new_{name}[:, None])",
        ]
    for each in summands:
        name = exponents.get((each.statistic.scale or 0.0, each.running), "")
        for row, part in enumerate(trace(each.statistic).parts, each.first):
            added = f"tl.sum(tl.where(allowed, {out.tile(part, name)}, 0.0), 1)"
            kept = f"sum{row} * shrink_{name}" if each.running else f"sum{row}"
            out.lines.append(f"sum{row} = {kept} + {added}")
    for number, extreme in enumerate(extremes):
        before += [
            f"best{number} = tl.full((BM,), -float('inf'), tl.float32)",
            f"where{number} = tl.full((BM,), -1, tl.int32)",
        ]
        sign = "" if extreme.largest else "-"
        out.lines += [
            f"c{number} = tl.where(allowed, {sign}s, -float('inf'))",
            f"t{number} = tl.max(c{number}, 1)",
            f"w{number} = first + tl.argmax(c{number}, 1)",
            f"where{number} = tl.where(t{number} > best{number}, w{number}, where{number})",
            f"best{number} = tl.maximum(best{number}, t{number})",
        ]
        after.append(_store("best", number, f"best{number}", len(extremes)))
        after.append(_store("where", number, f"where{number}", len(extremes)))
    after += [_store("sums", row, f"sum{row}", len(sums)) for row in sums]
    for number, each in enumerate(summands):
        if each.running:
            name = exponents[each.statistic.scale or 0.0, True]
            after.append(_store("shifts", number, f"top_{name}", len(summands)))
    head = f"def forward({INPUTS}, sums, shifts, best, where, {COUNTS}{{}}, {SIZES}, {FLAGS}):"
    body = ["split = tl.program_id(1)", *_visit(before, "own", [], out.lines), *after]
    return _function(head, body, out), out.numbers


def backward(summands: Sequence[Summand], side: Side) -> tuple[str, list[float]]:
    """One of the kernels of the backward pass, and the numbers that it takes."""
    out = Writer()
    total = ""
    loads: dict[str, list[str]] = {"own": [], "other": []}
    served = {"rows": ["own"], "columns": ["other"], "both": ["own", "other"]}[side]
    parts = summands[-1].stop
    for which in served:
        for row in range(parts):
            loads[which].append(_load(f"g{row}_{which}", "grad", row, which))
        for number, each in enumerate(summands):
            if each.running:
                loads[which].append(_load(f"h{number}_{which}", "shifts", number, which))
    plain: dict[float, str] = {}
    for number, each in enumerate(summands):
        scale, slopes = each.statistic.scale, trace(each.statistic).slopes
        # Both sides share an exponential that subtracts no maximum of one of them.
        for sides in [[which] for which in served] if each.running else [served]:
            name = ""
            if each.running:
                name = f"e{number}_{sides[0]}"
                out.lines.append(
                    f"{name} = tl.exp({out.number(scale or 0.0)} * s - {_spread(f'h{number}_{sides[0]}', sides[0])})"
                )
            elif scale is not None:
                name = plain.setdefault(scale, f"e{number}")
                if name == f"e{number}":
                    out.lines.append(f"{name} = tl.exp({out.number(scale)} * s)")
            for row, slope in enumerate(slopes, each.first):
                if slope.operation == "number" and slope.number == 0:
                    continue
                weight = " + ".join(_spread(f"g{row}_{which}", which) for which in sides)
                term = f"({weight}) * {out.write(slope, name)}"
                total = f"{total} + {term}" if total else term
                out.lines.append(f"total = {total}")
                total = "total"
    if not total:
        out.lines.append("total = s * 0.0")
    out.lines += [
        "total = tl.where(allowed, total, 0.0)",
        "if SCALED:",
        "    total = total * r_other[None, :]",
        "if D <= BK and BD == BK:",
        "    weighed = b",
        "else:",
        "    weighed = load_rows(y, other, other_size, part * BD, D, BD)",
        # Half precision holds the similarities' factors exactly; dL/ds has bf16's range in either half precision.
        "if SCALED:",
        "    acc = product(total.to(tl.bfloat16), weighed.to(tl.bfloat16), acc, PRECISION)",
        "else:",
        "    acc = product(total, weighed, acc, PRECISION)",
    ]
    before = ["acc = tl.zeros((BM, BD), tl.float32)", *loads["own"]]
    head = f"def {side}({INPUTS}, grad, shifts, out, {COUNTS}{{}}, {SIZES}, BD: tl.constexpr, {FLAGS}):"
    body = [
        "part = tl.program_id(1)",
        "split = tl.program_id(2)",
        *_visit(before, "other" if side == "columns" else "own", loads["other"], out.lines),
        "columns = part * BD + tl.arange(0, BD)",
        "place = (split.to(tl.int64) * own_size + own)[:, None] * D + columns[None, :]",
        "tl.store(out + place, acc, mask=(own < own_size)[:, None] & (columns < D)[None, :])",
    ]
    return _function(head, body, out), out.numbers


def _exponents(summands: Sequence[Summand]) -> dict[tuple[float, bool], str]:
    """A name for each exponential that is formed."""
    found: dict[tuple[float, bool], str] = {}
    for each in summands:
        if each.statistic.scale is not None:
            found.setdefault((each.statistic.scale, each.running), f"e{len(found)}")
    return found


def _store(target: str, row: int, value: str, rows: int) -> str:
    return f"tl.store({target} + (split * {rows} + {row}) * own_size + own, {value}, mask=own < own_size)"


def _load(name: str, source: str, row: int, which: str) -> str:
    # What is loaded has a column for each anchor, whichever side the anchors are.
    return f"{name} = tl.load({source} + {row} * {which}_size + {which}, mask={which} < {which}_size, other=0.0)"


def _spread(vector: str, which: str) -> str:
    return f"{vector}[:, None]" if which == "own" else f"{vector}[None, :]"


def _visit(before: list[str], anchors: str, loads: list[str], tile: list[str]) -> list[str]:
    """The loop over the other side; `tile` is what is done with the similarities s of a tile."""
    lists, window, first, size, blocks = (
        ("own", "other", "first", "own_size", "BM, BN, True")
        if anchors == "own"
        else ("other", "own", "tl.program_id(0) * BM", "other_size", "BN, BM, False")
    )
    where = f"lists, {lists}, {window}, {first}, {size}"
    return [
        "own = tl.program_id(0) * BM + tl.arange(0, BM)",
        *before,
        "if SCALED:",
        "    r_own = tl.load(x_scale + own, mask=own < own_size, other=0.0)",
        "if D <= BK:",
        "    a = load_rows(x, own, own_size, 0, D, BK)",
        "stop = tl.minimum(other_size, (split + 1) * chunk)",
        "for first in range(split * chunk, stop, BN):",
        "    other = first + tl.arange(0, BN)",
        "    if D <= BK:",
        "        b = load_rows(y, other, other_size, 0, D, BK)",
        "        s = product(a, tl.trans(b), tl.zeros((BM, BN), tl.float32), PRECISION)",
        "    else:",
        "        s = products(x, y, own, other, own_size, other_size, D, BM, BN, BK, PRECISION)",
        "    if SCALED:",
        "        r_other = tl.load(y_scale + other, mask=other < other_size, other=0.0)",
        "        s = s * r_own[:, None] * r_other[None, :]",
        "    allowed = (other < other_size)[None, :]",
        "    if FEW > 0:",
        f"        allowed = allowed & (listed_few({where}, FEW, {blocks}) == 0)",
        "    elif FEW < 0:",
        f"        allowed = allowed & (listed({where}, width, steps, {blocks}) == 0)",
        *(f"    {line}" for line in [*loads, *tile]),
    ]


def _function(head: str, body: list[str], out: Writer) -> str:
    arguments = "".join(f", k{number}" for number in range(len(out.numbers)))
    return "\n".join([head.format(arguments), *(f"    {line}" for line in body)]) + "\n"
