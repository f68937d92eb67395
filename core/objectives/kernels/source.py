"""The text of the kernels of a set of statistics, made from their expressions.

The kernels share one shape: a program owns BM rows of one side, visits the rows of the other side BN at a time and
keeps what it adds up in registers.

    forward   owns anchors, visits candidates; keeps the sums of all statistics
    half      the same where anchors are the candidates: a tile serves the rows of both its sides, and only the tiles
              to the right of the diagonal are formed; what it adds to its other side is written out
    pair      owns some anchors, visits candidates, which are anchors of their own: a tile serves the rows of both its
              sides; what it adds to its other side is written out
    rows      owns anchors, visits candidates; keeps the gradient of its anchors
    columns   owns candidates, visits anchors; keeps the gradient of its candidates
    both      rows and columns at once where anchors are the candidates: dL/ds_ij + dL/ds_ji times x_j
    band      owns some anchors, visits candidates; writes dL/ds of a band of the matrix, or dL/ds_ij + dL/ds_ji, for
              embeddings too wide for a gradient to stay in registers: a product of matrices makes it of the band

Where candidates are anchors of their own, rows, columns and band take what both sides ask of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dipole.core.objectives.kernels.expression import OPERATIONS, E, Node, S, is_boolean
from dipole.core.objectives.kernels.trace import trace
from dipole.core.objectives.statistics import Extreme, Statistic

Side = Literal["rows", "columns", "both"]
Visit = Literal["forward", "half", "pair"]

# Numbers that are part of an expression's shape; all others are arguments of a kernel, so that a temperature that
# changes needs no new one.
LITERAL = (0.0, 1.0, -1.0, 2.0, 0.5)
RESULTS = ("sums", "shifts", "best", "where")
INPUTS = "x, y, x_scale, y_scale, lists"
# The last two only tell sizes apart for which blocks are chosen anew.
COUNTS = "own_size, other_size, width, steps, chunk, start, end, own_kind, other_kind"
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


def forward(
    summands: Sequence[Summand], extremes: Sequence[Extreme], kind: Visit = "forward", side: Side = "rows"
) -> tuple[str, list[float]]:
    """The kernel `forward`, `half` or `pair` of some statistics, and the numbers k0, k1, ... that it takes.

    `side` says whose rows `forward` owns, which may be the candidates; lists of exclusions are those of the anchors.
    """
    out, turning = Writer(), kind != "forward"
    exponents = _exponents(summands)
    rows = summands[-1].stop if summands else 0
    before, after = [f"sum{row} = tl.zeros((BM,), tl.float32)" for row in range(rows)], []
    for (scale, running), name in exponents.items():
        power = f"{out.number(scale)} * s"
        if not running:
            out.lines.append(f"{name} = tl.exp({power})")
            continue
        before.append(f"top_{name} = tl.full((BM,), LOWEST, tl.float32)")
        out.lines += [
            f"p_{name} = tl.where(allowed, {power}, -float('inf'))",
            f"new_{name} = tl.maximum(top_{name}, tl.max(p_{name}, 1))",
            f"shrink_{name} = tl.exp(top_{name} - new_{name})",
            f"top_{name} = new_{name}",
            f"{name} = tl.exp(p_{name} - new_{name}[:, None])",
        ]
        if turning:
            out.lines += _turned(name)
    for number, each in enumerate(summands):
        name = exponents.get((each.statistic.scale or 0.0, each.running), "")
        for row, part in enumerate(trace(each.statistic).parts, each.first):
            kept = f"sum{row} * shrink_{name}" if each.running else f"sum{row}"
            out.lines.append(f"m{row} = tl.where(allowed, {out.tile(part, name)}, 0.0)")
            out.lines.append(f"sum{row} = {kept} + tl.sum(m{row}, 1)")
            if turning:
                turned = f"tl.where(allowed, {out.tile(part, f'f_{name}')}, 0.0)" if each.running else f"m{row}"
                out.lines.append(_store_turned(kind, "sums", row, f"tl.sum({turned}, 0)", rows))
        if each.running:
            after.append(_store("shifts", number, f"top_{name}", len(summands)))
            if turning:
                out.lines.append(_store_turned(kind, "shifts", number, f"shift_{name}", len(summands)))
    after += [_store("sums", row, f"sum{row}", rows) for row in range(rows)]
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
            # Half of a matrix is not visited in the order of its columns: of equal ones the first is taken.
            f"u{number} = (t{number} > best{number}) | ((t{number} == best{number}) & (w{number} < where{number}))",
            f"where{number} = tl.where(u{number}, w{number}, where{number})",
            f"best{number} = tl.maximum(best{number}, t{number})",
        ]
        after += [_store(each, number, f"{each}{number}", len(extremes)) for each in ("best", "where")]
        if turning:
            begin = "start + tl.program_id(0) * BM" if kind == "pair" else "tl.program_id(0) * BM"
            nothing = f"tl.where(tl.max(c{number}, 0) > -float('inf'), {begin} + tl.argmax(c{number}, 0), -1)"
            out.lines.append(_store_turned(kind, "best", number, f"tl.max(c{number}, 0)", len(extremes)))
            out.lines.append(_store_turned(kind, "where", number, nothing, len(extremes)))
    results = ", ".join([*RESULTS, *(f"{each}_other" for each in RESULTS if kind == "pair")])
    head = f"def {kind}({INPUTS}, {results}, {COUNTS}{{}}, {SIZES}, {FLAGS}):"
    visit, own = {"forward": (WHOLE, OWN), "half": (HALF, OWN), "pair": (PAIR, f"start + {OWN}")}[kind]
    anchors = "other" if side == "columns" else "own"
    body = ["split = tl.program_id(1)", *_visit(before, anchors, [], out.lines, visit, own), *after]
    return _function(head, body, out), out.numbers


def _turned(name: str) -> list[str]:
    """The exponential of a tile for the rows of its other side, f, and the shift of each.

    Where the maxima lie close enough, f is e but for a factor for each row; elsewhere it is formed anew.
    """
    return [
        f"shift_{name} = tl.maximum(tl.max(p_{name}, 0), LOWEST)",
        f"high_{name} = tl.max(new_{name}, 0)",
        f"low_{name} = tl.min(tl.where(shift_{name} > LOWEST, shift_{name}, high_{name}), 0)",
        f"if high_{name} - low_{name} < NEAR:",
        f"    f_{name} = tl.where(allowed, {name} * tl.exp(new_{name} - high_{name})[:, None], 0.0)",
        f"    shift_{name} = tl.where(shift_{name} > LOWEST, high_{name}, LOWEST)",
        "else:",
        f"    f_{name} = tl.exp(p_{name} - shift_{name}[None, :])",
    ]


def backward(summands: Sequence[Summand], side: Side, mutual: bool = False) -> tuple[str, list[float]]:
    """One of the kernels of the backward pass, and the numbers that it takes.

    Args:
        summands: the statistics.
        side: whose gradient.
        mutual: candidates are anchors of their own, with gradients and shifts of their own.
    """
    out = Writer()
    loads = _slopes(out, summands, _served("both" if mutual else side), mutual)
    out.lines += [
        "if SCALED:",
        "    total = total * r_other[None, :]",
        "if D <= BK and BD == BK:",
        "    weighed = b",
        "else:",
        "    weighed = load_rows(y, other, other_size, 0, D, BD)",
        # Half precision holds the similarities' factors exactly; dL/ds has bf16's range in either half precision.
        "if SCALED:",
        "    acc = product(total.to(tl.bfloat16), weighed.to(tl.bfloat16), acc, PRECISION)",
        "else:",
        "    acc = product(total, weighed, acc, PRECISION)",
    ]
    before = ["acc = tl.zeros((BM, BD), tl.float32)", *loads["own"]]
    head = f"def {side}({INPUTS}, {_given(mutual)}, out, {COUNTS}{{}}, {SIZES}, BD: tl.constexpr, {FLAGS}):"
    body = [
        "split = tl.program_id(1)",
        *_visit(before, "other" if side == "columns" else "own", loads["other"], out.lines),
        "columns = tl.arange(0, BD)",
        "place = (split.to(tl.int64) * own_size + own)[:, None] * D + columns[None, :]",
        "tl.store(out + place, acc, mask=(own < own_size)[:, None] & (columns < D)[None, :])",
    ]
    return _function(head, body, out), out.numbers


def band(summands: Sequence[Summand], symmetric: bool, mutual: bool = False) -> tuple[str, list[float]]:
    """The kernel `band`, and the numbers that it takes; its anchors are those from `start` to `end`."""
    out = Writer()
    loads = _slopes(out, summands, _served("both" if symmetric or mutual else "rows"), mutual)
    out.lines += [
        "place = (own - start).to(tl.int64)[:, None] * stride + other[None, :]",
        "tl.store(out + place, total, mask=(own < end)[:, None] & (other < other_size)[None, :])",
    ]
    head = f"def band({INPUTS}, {_given(mutual)}, out, stride, {COUNTS}{{}}, {SIZES}, {FLAGS}):"
    body = ["split = tl.program_id(1)", *_visit(loads["own"], "own", loads["other"], out.lines, own=f"start + {OWN}")]
    return _function(head, body, out), out.numbers


def _served(side: Side) -> list[str]:
    """The sides of a tile whose rows a kernel of the backward pass serves."""
    return {"rows": ["own"], "columns": ["other"], "both": ["own", "other"]}[side]


def _given(mutual: bool) -> str:
    return "grad, shifts, grad_other, shifts_other" if mutual else "grad, shifts"


def _slopes(out: Writer, summands: Sequence[Summand], served: Sequence[str], mutual: bool) -> dict[str, list[str]]:
    """Write `total`, dL/ds of a tile for the rows of the sides served; gives what is loaded for each side before."""
    total, wide = "", False
    loads: dict[str, list[str]] = {"own": [], "other": []}
    for which in served:
        suffix = "_other" if mutual and which == "other" else ""
        for row in range(summands[-1].stop):
            loads[which].append(_load(f"g{row}_{which}", f"grad{suffix}", row, which))
        for number, each in enumerate(summands):
            if each.running:
                loads[which].append(_load(f"h{number}_{which}", f"shifts{suffix}", number, which))
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
                wide = wide or slope.operation != "number"
                total = f"{total} + {term}" if total else term
                out.lines.append(f"total = {total}")
                total = "total"
    if not wide:  # slopes that are the same for all similarities do not have the shape of a tile
        out.lines.append(f"total = tl.zeros_like(s) + {total or '0.0'}")
    out.lines.append("total = tl.where(allowed, total, 0.0)")
    return loads


def _exponents(summands: Sequence[Summand]) -> dict[tuple[float, bool], str]:
    """A name for each exponential that is formed."""
    found: dict[tuple[float, bool], str] = {}
    for each in summands:
        if each.statistic.scale is not None:
            found.setdefault((each.statistic.scale, each.running), f"e{len(found)}")
    return found


def _store_turned(kind: Visit, target: str, row: int, value: str, rows: int) -> str:
    """What a tile adds to the rows of its other side has a slot of its own, behind those of the runs if it is half."""
    if kind == "pair":
        place = f"(tl.program_id(0).to(tl.int64) * {rows} + {row}) * other_size"
        return f"tl.store({target}_other + {place} + other, {value}, mask=other < stop)"
    place = f"((tl.num_programs(1) + k - start).to(tl.int64) * {rows} + {row}) * own_size"
    return f"tl.store({target} + {place} + other, {value}, mask=(other < reach) & (k > 0))"


def _store(target: str, row: int, value: str, rows: int) -> str:
    place = f"(split.to(tl.int64) * {rows} + {row}) * own_size"  # slots times rows pass 2^31 where anchors are millions
    return f"tl.store({target} + {place} + own, {value}, mask=own < own_size)"


def _load(name: str, source: str, row: int, which: str) -> str:
    # What is loaded has a column for each anchor, whichever side the anchors are.
    return f"{name} = tl.load({source} + {row} * {which}_size + {which}, mask={which} < {which}_size, other=0.0)"


def _spread(vector: str, which: str) -> str:
    return f"{vector}[:, None]" if which == "own" else f"{vector}[None, :]"


# The rows that a program owns.
OWN = "tl.program_id(0) * BM + tl.arange(0, BM)"
# The runs of a side that is visited: from its beginning to its end, or the tiles to the right of the diagonal, around
# a circle of blocks, so that every program has as many. In an even circle the tiles opposite are met from both ends.
WHOLE = (
    "stop = tl.minimum(other_size, (split + 1) * chunk)",
    "for first in range(split * chunk, stop, BN):",
    "    other = first + tl.arange(0, BN)",
    "    allowed = (other < other_size)[None, :]",
)
PAIR = (
    *WHOLE[:3],
    "    allowed = (own < end)[:, None] & (other < stop)[None, :]",
)
HALF = (
    "blocks = tl.cdiv(own_size, BM)",
    "stop = tl.minimum(end, start + (split + 1) * chunk)",
    "for k in range(start + split * chunk, stop):",
    "    first = (tl.program_id(0) + k) % blocks * BM",
    "    other = first + tl.arange(0, BN)",
    # A bound, since the interpreter makes integers of a vector that meets one truth, and refuses those as a mask.
    "    reach = tl.where((k * 2 != blocks) | (tl.program_id(0) * 2 < blocks), other_size, 0)",
    "    allowed = (own < own_size)[:, None] & (other < reach)[None, :]",
)


def _visit(
    before: list[str], anchors: str, loads: list[str], tile: list[str], visit: Sequence[str] = WHOLE, own: str = OWN
) -> list[str]:
    """The loop over the other side; `tile` is what is done with the similarities s of a tile."""
    lists, window, first, size, blocks = (
        ("own", "other", "first", "own_size", "BM, BN, True")
        if anchors == "own"
        else ("other", "own", "tl.program_id(0) * BM", "other_size", "BN, BM, False")
    )
    where = f"lists, {lists}, {window}, {first}, {size}"
    return [
        f"own = {own}",
        *before,
        "if SCALED:",
        "    r_own = tl.load(x_scale + own, mask=own < own_size, other=0.0)",
        "if D <= BK:",
        "    a = load_rows(x, own, own_size, 0, D, BK)",
        *visit,
        "    if D <= BK:",
        "        b = load_rows(y, other, other_size, 0, D, BK)",
        "        s = product(a, tl.trans(b), tl.zeros((BM, BN), tl.float32), PRECISION)",
        "    else:",
        "        s = products(x, y, own, other, own_size, other_size, D, BM, BN, BK, PRECISION)",
        "    if SCALED:",
        "        r_other = tl.load(y_scale + other, mask=other < other_size, other=0.0)",
        "        s = s * r_own[:, None] * r_other[None, :]",
        "    if FEW > 0:",
        f"        allowed = allowed & (listed_few({where}, FEW, {blocks}) == 0)",
        "    elif FEW < 0:",
        f"        allowed = allowed & (listed({where}, width, steps, {blocks}) == 0)",
        *(f"    {line}" for line in [*loads, *tile]),
    ]


def _function(head: str, body: list[str], out: Writer) -> str:
    arguments = "".join(f", k{number}" for number in range(len(out.numbers)))
    return "\n".join([head.format(arguments), *(f"    {line}" for line in body)]) + "\n"
