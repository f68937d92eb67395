"""The grammar of objectives: `infonce(temperature=0.5) + 0.1*dp(delta_pos=0.1, delta_neg=0.5)`.

    spec  = term { "+" term }
    term  = [ number "*" ] name [ "(" [ option { "," option } ] ")" ]
    option = name "=" ( number | true | false | none | name | 'quoted' | "quoted" )

Parse text to terms and format terms as text. The text is never evaluated as code.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dipole.core.utils.errors import SpecError
from dipole.core.utils.text import printable, shortened

Value = int | float | bool | str | None

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))
    | (?P<name>[A-Za-z_]\w*(?:-[A-Za-z_]\w*)*)
    | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<mark>[+*(),=])
    )""",
    re.VERBOSE | re.ASCII,
)
LONGEST, LONGEST_TOKEN = 10_000, 2000  # largest number of characters of a text, and of one name, number or quoted value
SHOWN = 150  # number of characters that an error shows around the error position
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Term:
    """One weighted name with its options. `str(term)` is its text.

    Args:
        name: the registered name.
        options: name and value of each given option, in order.
        weight: the written weight, >= 0. None if no weight is written.
        start: position of its first character in the text.
        end: position after its last character.
    """

    name: str
    options: tuple[tuple[str, Value], ...] = ()
    weight: float | None = None
    start: int = 0
    end: int = 0

    def __str__(self) -> str:
        inner = ", ".join(f"{key}={format_value(value)}" for key, value in self.options)
        body = f"{self.name}({inner})" if inner else self.name
        if self.weight is None:
            return body
        return f"{format_value(self.weight)}*{body}"


def format_value(value: Value) -> str:
    """Write a value so that the grammar reads the same value back."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and abs(value) < 1e15 and value == int(value):
        if value:
            return f"{value:.1f}"
        return "0.0"
    if isinstance(value, (int, float)):
        return repr(value)
    if re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII) and value not in _WORDS:
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def caret(text: str, start: int, end: int | None = None) -> str:
    """Return the text, or what is around the place, and below it carets. Unprintable characters are shown as "?"."""
    shown = "".join("?" if printable(each) != each else each for each in re.sub(r"\s", " ", text))
    first = 0 if len(shown) <= SHOWN else max(0, min(start - SHOWN // 2, len(shown) - SHOWN))
    last = first + SHOWN
    before, after = "..." * (first > 0), "..." * (last < len(shown))
    marks = "^" * max(1, min(end or start + 1, last) - start)
    return f"  {before}{shown[first:last]}{after}\n  {' ' * (len(before) + start - first)}{marks}"


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int, int]] = []
        if len(text) > LONGEST:
            raise SpecError(f"an objective of {len(text)} characters is too long; at most {LONGEST} are read")
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                place = position + len(text[position:]) - len(text[position:].lstrip())
                raise self.error(f"cannot read {text[place]!r}", place)
            kind = str(match.lastgroup)
            if match.end(kind) - match.start(kind) > LONGEST_TOKEN:
                what = "quoted value" if kind == "string" else kind
                raise self.error(f"a {what} of more than {LONGEST_TOKEN} characters", match.start(kind))
            self.tokens.append((kind, match[kind], match.start(kind), match.end(kind)))
            position = match.end()
        self.tokens.append(("end", "", len(text.rstrip()), len(text.rstrip()) + 1))
        self.at = 0

    def error(self, what: str, start: int, end: int | None = None) -> SpecError:
        return SpecError(f"{what}\n{caret(self.text, start, end)}")

    @property
    def token(self) -> tuple[str, str, int, int]:
        return self.tokens[self.at]

    def take(self, kind: str, value: str | None = None) -> tuple[str, str, int, int] | None:
        token = self.token
        if token[0] != kind or (value is not None and token[1] != value):
            return None
        self.at += 1
        return token

    def expect(self, kind: str, value: str | None, what: str) -> tuple[str, str, int, int]:
        token = self.take(kind, value)
        if token is None:
            found = repr(self.token[1]) if self.token[1] else "the end"
            raise self.error(f"expected {what}, found {found}", self.token[2], self.token[3])
        return token

    def spec(self) -> list[Term]:
        terms = [self.term()]
        while self.take("mark", "+"):
            terms.append(self.term())
        self.expect("end", None, "'+' or the end")
        return terms

    def term(self) -> Term:
        start, weight = self.token[2], None
        number = self.take("number")
        if number:
            weight = self.number(*number[1:])
            self.expect("mark", "*", f"'*' and a name after the weight {number[1]}")
        name = self.expect("name", None, "the name of an objective")
        options: dict[str, Value] = {}
        end = name[3]
        if self.take("mark", "("):
            while not self.take("mark", ")"):
                if options:
                    self.expect("mark", ",", "',' or ')'")
                key = self.expect("name", None, "an option's name or ')'")
                self.expect("mark", "=", f"'=' after the option {key[1]!r}")
                if key[1] in options:
                    raise self.error(f"option {key[1]!r} is given twice", key[2], key[3])
                options[key[1]] = self.value()
            end = self.tokens[self.at - 1][3]
        return Term(name[1], tuple(options.items()), weight, start, end)

    def number(self, text: str, start: int, end: int) -> float:
        number = float(text)
        if math.isinf(number):
            raise self.error(f"the number {shortened(text)} is too large", start, end)
        return number

    def value(self) -> Value:
        kind, text, start, end = self.token
        if kind not in ("number", "name", "string"):
            raise self.error("expected a value: a number, true, false, none, a name or a quoted string", start, end)
        self.at += 1
        if kind == "number":
            if re.fullmatch(r"-?\d+", text):
                return int(text)
            return self.number(text, start, end)
        if kind == "name":
            return _WORDS.get(text, text)
        return re.sub(r"\\(.)", r"\1", text[1:-1])


def parse(text: str) -> list[Term]:
    """Parse an objective string. An invalid one raises SpecError, with a caret under the wrong character."""
    if not isinstance(text, str) or not text.strip():
        raise SpecError(f"an objective is text such as 'infonce + 0.1*dp', got {text!r}")
    return _Reader(text).spec()


def format_terms(terms: list[Term]) -> str:
    """Write terms as text that `parse` reads back to the same terms."""
    return " + ".join(str(term) for term in terms)


def numbered(names: Sequence[str]) -> list[str]:
    """Return a unique name for each term of a sum. A repeated name becomes NAME.0, NAME.1 and so on."""
    return [
        name if names.count(name) == 1 else f"{name}.{names[:place].count(name)}" for place, name in enumerate(names)
    ]


def option_span(text: str, term: Term, name: str) -> tuple[int, int]:
    """Return the start and end of a term's option in the text, for a caret."""
    match = re.search(rf"\b{re.escape(name)}\s*=\s*(?:\"[^\"]*\"|'[^']*'|[^,)]*)", text[term.start : term.end])
    if match is None:
        return term.start, term.end
    return term.start + match.start(), term.start + len(match.group().rstrip()) + match.start()
