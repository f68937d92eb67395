"""One table of a report, and its text as CSV and Markdown."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Cell:
    """One cell of a table: text, a smaller second line, the value it sorts by, its emphasis.

    `link` is the section of the report that it leads to.
    """

    text: str
    sort: float | str | None = None
    sub: str = ""
    mark: str = ""
    link: str = ""


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

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers: those that have a number somewhere and, if none is missing, no other text."""
        columns = [[row[i] for row in self.rows if row[i].text] for i in range(len(self.head))]
        kinds = [[type(cell.sort) for cell in column if cell.mark not in ("open", "bad")] for column in columns]
        return tuple(bool(column) and all(kind in (int, float) for kind in column) for column in kinds)

    def without_empty_columns(self) -> "ReportTable":
        """This table less the columns that say nothing."""
        kept = [i for i in range(len(self.head)) if any(row[i].text or row[i].sub for row in self.rows)]
        rows = [tuple(row[i] for i in kept) for row in self.rows]
        return replace(self, head=tuple(self.head[i] for i in kept), rows=rows) if rows else self


def to_csv(table: ReportTable) -> str:
    """Comma-separated values. A text that a spreadsheet would run as a formula gets an apostrophe before it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    subs = [any(row[i].sub for row in table.rows) for i in range(len(table.head))]
    head = [[name, f"{name}: note"] if has else [name] for name, has in zip(table.head, subs, strict=True)]
    writer.writerow([_inert(name) for pair in head for name in pair])
    for row in table.rows:
        cells = [[c.text, c.sub] if has else [c.text] for c, has in zip(row, subs, strict=True)]
        writer.writerow([_inert(text) for pair in cells for text in pair])
    return out.getvalue()


def to_markdown(table: ReportTable) -> str:
    """A table that GitHub renders. Markup inside texts is escaped."""
    lines = [f"### {plain(table.title)}", ""]
    if table.note:
        lines += [plain(table.note), ""]
    lines.append("| " + " | ".join(map(plain, table.head)) + " |")
    lines.append("|" + " --- |" * len(table.head))
    for row in table.rows:
        texts = [f"{plain(c.text)} ({plain(c.sub)})" if c.sub else plain(c.text) for c in row]
        shown = [f"**{text}**" if cell.mark == "best" else text for text, cell in zip(texts, row, strict=True)]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def to_latex(table: ReportTable) -> str:
    """A `tabular` of booktabs, to be put into a table of a paper. Markup inside texts is escaped, the best bold."""
    kinds = "".join("r" if is_number else "l" for is_number in table.numeric)
    said = [" ".join(text.split()) for text in (table.title, table.note) if text]
    lines = [*(f"% {text}" for text in said), rf"\begin{{tabular}}{{{kinds}}}", r"\toprule"]
    lines += [" & ".join(map(_latex, table.head)) + r" \\", r"\midrule"]
    for row in table.rows:
        texts = [f"{_latex(c.text)} ({_latex(c.sub)})" if c.sub else _latex(c.text) for c in row]
        shown = [rf"\textbf{{{text}}}" if cell.mark == "best" else text for text, cell in zip(texts, row, strict=True)]
        lines.append(" & ".join(shown) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


LATEX = str.maketrans(
    {char: f"\\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "\N{PLUS-MINUS SIGN}": r"$\pm$"}
)


def _latex(text: str) -> str:
    return " ".join(text.split()).translate(LATEX)


def number(value: float) -> str:
    """A number for people: about four digits."""
    size = abs(value)
    if size >= 1e6:
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.001 or value == 0 else f"{value:.2g}"


def _inert(text: str) -> str:
    is_formula = text[:1] in ("\t", "\r", "\n") or text.lstrip()[:1] in ("=", "+", "-", "@")
    # Python's writer does not quote a lone carriage return, and readers take it for the end of a row.
    plain = text.replace("\r", " ")
    return f"'{plain}" if is_formula and text and not NUMBERS.fullmatch(text) else plain


# "-1.5", "-1.5 to 2e-05", "-1.5 \N{PLUS-MINUS SIGN} 0.2": a sign, but no formula.
NUMBER = r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?"
NUMBERS = re.compile(f"{NUMBER}(?: (?:to|\N{PLUS-MINUS SIGN}) {NUMBER})?")


MARKUP = str.maketrans({char: f"&#{ord(char)};" if char in "<>&|" else f"\\{char}" for char in "\\`*_{}[]<>|&#!"})


def plain(text: str) -> str:
    """A text for Markdown, without markup of its own and on one line."""
    return " ".join(text.split()).translate(MARKUP)
