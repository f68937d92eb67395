"""One table of a report, and its text as CSV, JSON, Markdown and LaTeX."""

import csv
import io
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from math import isfinite

from dipole.benchmarks.statistics import number
from dipole.core.utils.text import printable


def template(name: str) -> str:
    return files("dipole.benchmarks").joinpath("templates", name).read_text(encoding="utf-8")


NOTES: dict[str, str] = tomllib.loads(template("notes.toml"))


@dataclass(frozen=True)
class Cell:
    """One cell: text, the value it sorts by, a note below it, its emphasis, and the section that it links to.

    Control characters of received records are escapes in it: no format of a report can hold them.
    """

    text: str
    sort: float | str | None = None
    sub: str = ""
    mark: str = ""
    link: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "sub", "sort"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, printable(value))


EMPTY = Cell("")


def number_cell(value: float | None, note: str = "") -> Cell:
    """Return a number with about four digits, or an empty cell if it is missing or not finite."""
    return EMPTY if value is None or not isfinite(value) else Cell(number(value), value, note)


def detectable_cell(least: float, unit: str) -> Cell:
    """Return the smallest difference that seeds show as a cell. No percentage can show one above 100."""
    if unit == "%" and least > 100:
        return Cell("none below 100", least)
    return number_cell(least)


def count_cell(value: int | None) -> Cell:
    return EMPTY if value is None else Cell(str(value), value)


@dataclass(frozen=True)
class ReportTable:
    """One table: `name` is its file name, `head` its columns. The first column names the row."""

    name: str
    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    note: str = ""
    code: frozenset[str] = field(default=frozenset())
    is_folded: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", printable(self.title))
        object.__setattr__(self, "head", tuple(map(printable, self.head)))
        object.__setattr__(self, "note", printable(self.note))

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold only numbers, apart from missing and failed cells."""
        columns = [[row[i] for row in self.rows if row[i].text] for i in range(len(self.head))]
        kinds = [[type(cell.sort) for cell in column if cell.mark not in ("open", "bad")] for column in columns]
        return tuple(bool(column) and all(kind in (int, float) for kind in column) for column in kinds)

    def only(self, *names: str) -> "ReportTable":
        places = [self.head.index(name) for name in names]
        return replace(self, head=names, rows=[tuple(row[i] for i in places) for row in self.rows])

    def without_empty_columns(self) -> "ReportTable":
        columns = zip(self.head, zip(*self.rows, strict=True), strict=True)
        kept = [name for name, cells in columns if any(cell.text or cell.sub for cell in cells)]
        return self.only(*kept) if self.rows else self


def to_csv(table: ReportTable) -> str:
    """Return comma-separated values. Texts that a spreadsheet would run as a formula start with an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    has_note = [any(row[i].sub for row in table.rows) for i in range(len(table.head))]
    head = [Cell(name, sub=f"{name}: note") for name in table.head]
    for row in (head, *table.rows):
        texts = []
        for cell, is_noted in zip(row, has_note, strict=True):
            texts.append(_inert(cell.text))
            if is_noted:
                texts.append(_inert(cell.sub))
        writer.writerow(texts)
    return out.getvalue()


def to_json(table: ReportTable) -> str:
    """A table as a list of objects: numbers as numbers, the smaller second line of a cell under `NAME: note`."""
    rows = []
    for row in table.rows:
        found: dict[str, str | float | None] = {}
        for name, cell in zip(table.head, row, strict=True):
            found[name] = cell.text
            if isinstance(cell.sort, int | float) and is_number(cell.text):
                found[name] = cell.sort
            if cell.sub:
                found[f"{name}: note"] = cell.sub
        rows.append(found)
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def to_markdown(table: ReportTable) -> str:
    """Return a table for GitHub. Markup inside texts is escaped."""
    lines = [f"### {escaped(table.title)}", ""]
    if table.note:
        lines += [escaped(table.note), ""]
    lines.append("| " + " | ".join(map(escaped, table.head)) + " |")
    lines.append("|" + " --- |" * len(table.head))
    for row in table.rows:
        lines.append("| " + " | ".join(_marked(cell, escaped, "**{}**") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of cells that need no escapes."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def to_latex(table: ReportTable) -> str:
    """A `tabular` of booktabs, to be put into a table of a paper. Markup inside texts is escaped, the best bold."""
    kinds = "".join("r" if is_number else "l" for is_number in table.numeric)
    said = [" ".join(text.split()) for text in (table.title, table.note) if text]
    lines = [*(f"% {text}" for text in said), rf"\begin{{tabular}}{{{kinds}}}", r"\toprule"]
    lines += [" & ".join(map(_latex, table.head)) + r" \\", r"\midrule"]
    for row in table.rows:
        lines.append(" & ".join(_marked(cell, _latex, r"\textbf{{{}}}") for cell in row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _marked(cell: Cell, escaped: Callable[[str], str], best: str) -> str:
    """Return text and note of a cell, with the format `best` if it is the best of its column."""
    text = escaped(cell.text)
    if cell.sub:
        text += f" ({escaped(cell.sub)})"
    if cell.mark == "best":
        return best.format(text)
    return text


LATEX = str.maketrans(
    {char: f"\\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "\N{PLUS-MINUS SIGN}": r"$\pm$"}
)


def _latex(text: str) -> str:
    return " ".join(text.split()).translate(LATEX)


def is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _inert(text: str) -> str:
    is_formula = text[:1] in ("\t", "\r", "\n") or text.lstrip()[:1] in ("=", "+", "-", "@")
    # Python's writer does not quote a lone carriage return, and readers take it for the end of a row.
    plain = text.replace("\r", " ")
    if is_formula and not NUMBERS.fullmatch(text):
        return f"'{plain}"
    return plain


# "-1.5", "-1.5 to 2e-05", "-1.5 \N{PLUS-MINUS SIGN} 0.2": a sign, but no formula.
NUMBER = r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?"
NUMBERS = re.compile(f"{NUMBER}(?: (?:to|\N{PLUS-MINUS SIGN}) {NUMBER})?")


MARKUP = str.maketrans({char: f"&#{ord(char)};" if char in "<>&|" else f"\\{char}" for char in "\\`*_{}[]<>|&#!"})


def escaped(text: str) -> str:
    """Escape a text for Markdown and put it on one line."""
    return printable(" ".join(text.split())).translate(MARKUP)
