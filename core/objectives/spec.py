"""How an objective is written: the grammar of its text, and the options of an entry, read from its signature.

    spec  = term { "+" term }
    term  = [ number "*" ] name [ "(" [ option { "," option } ] ")" ]
    option = name "=" ( number | true | false | none | name | 'quoted' | "quoted" )

`infonce(temperature=0.5) + 0.1*dp(delta_pos=0.1, delta_neg=0.5)` is such a text. `parse` reads it to terms, and
`format_terms` writes it. The text is never evaluated as code.
"""

import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from dipole.core.utils.errors import OptionError, SpecError, nearest
from dipole.core.utils.text import printable, shortened, shown

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
LARGEST_NUMBER = 1e30  # of weights and options
SHOWN = 150  # number of characters that an error shows around the error position
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Term:
    """One weighted name with its options. `str(term)` is its text.

    Args:
        name: the registered name.
        options: name and value of each given option, in order.
        weight: the written weight. None if no weight is written. `objective` refuses one below 0.
        start: position of its first character in the text.
        name_start: position of its name.
        end: position after its last character.
        option_spans: start and end of each option, as in `options`.
    """

    name: str
    options: tuple[tuple[str, Value], ...] = ()
    weight: float | None = None
    start: int = 0
    name_start: int = 0
    end: int = 0
    option_spans: tuple[tuple[int, int], ...] = ()

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
        return f"{value + 0.0:.1f}"  # without the sign of -0.0
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
                hint = ". Terms are added: infonce + 0.1*dp" if text[place] == "-" else ""
                raise self.error(f"cannot read {text[place]!r}{hint}", place)
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
        behind = self.token[1] == "*"
        self.expect("end", None, "'+' or the end" + " (a weight comes before its term: 0.1*dp)" * behind)
        return terms

    def term(self) -> Term:
        start, weight = self.token[2], None
        number = self.take("number")
        if number:
            weight = self.number(*number[1:])
            self.expect("mark", "*", f"'*' and a name after the weight {number[1]}")
        name = self.expect("name", None, "the name of an objective")
        options: dict[str, Value] = {}
        spans = []
        end = name[3]
        if self.take("mark", "("):
            while not self.take("mark", ")"):
                if options:
                    self.expect("mark", ",", "',' or ')'")
                key = self.expect("name", None, "an option's name")
                self.expect("mark", "=", f"'=' after the option {key[1]!r}")
                if key[1] in options:
                    raise self.error(f"option {key[1]!r} is given twice", key[2], key[3])
                options[key[1]] = self.value()
                spans.append((key[2], self.tokens[self.at - 1][3]))
            end = self.tokens[self.at - 1][3]
        return Term(name[1], tuple(options.items()), weight, start, name[2], end, tuple(spans))

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


# Options --------------------------------------------------------------------------------------------------------------

LARGEST_INTEGER = 2**53  # largest integer option. Larger integers are not exact as floats


def _has_room(number: float) -> bool:
    """Return whether float32 has room for what is computed from a number and from its reciprocal."""
    return number == 0 or 1 / LARGEST_NUMBER <= abs(number) <= LARGEST_NUMBER


@dataclass(frozen=True)
class Range:
    """Bounds of a numeric option, as in `Annotated[float, Range(above=0)]`. 0 and sizes of 1e-30 to 1e30 are allowed.

    You may combine bounds. None means no bound. An objective raises `OptionError` for a number outside the bounds.

    Args:
        above: the number must be greater than this.
        at_least: the number must be this or greater.
        below: the number must be less than this.
        at_most: the number must be this or less.

    Example:
        >>> from typing import Annotated
        >>> Annotated[float, dipole.Range(above=0), "softmax temperature"].__metadata__[0].above
        0
    """

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
            and _has_room(value)
        )

    def __str__(self) -> str:
        bounds = [(">", self.above), (">=", self.at_least), ("<", self.below), ("<=", self.at_most)]
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


LATER: Final = object()  # mark an option that was added later. Runs that use its default keep their names


TEMPERATURE: Final = object()
"""Mark an option as a temperature, as the name `temperature` does. The conformance checks set it."""


@dataclass(frozen=True)
class Former:
    """Mark an option that was added later, with another default than earlier runs had.

    Runs with `value` keep their names.

    Args:
        value: what earlier runs did.
    """

    value: Any


@dataclass(frozen=True)
class Option:
    """One keyword of an entry.

    Args:
        name: the keyword.
        type: the type in words, such as "float or name".
        default: the default value. `inspect.Parameter.empty` if the option is required.
        range: bounds and choices in words.
        help: the help text.
        kinds: allowed types among bool, int, float and str.
        choices: allowed names.
        bounds: bounds of numbers, or None.
        optional: whether None is allowed.
        later: the option was added later. It is part of a run's name only if it is given.
        former: what runs did before the option was added, if its default is another. See `Former`.
        temperature: the option is a temperature.
    """

    name: str
    type: str
    default: Any
    range: str
    help: str
    kinds: tuple[Any, ...]
    choices: tuple[str, ...]
    bounds: Range | None
    optional: bool
    later: bool
    former: Former | None = None
    temperature: bool = False

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.choices:
            words = "one of " + ", ".join(self.choices)
        if self.kinds:
            names = {float: "a number", int: "an integer", bool: "true or false", str: "a name or quoted string"}
            numbers = " or ".join(names[kind] for kind in self.kinds)
            if self.bounds:
                numbers += f" {self.bounds}"
            words = " or ".join([numbers, *self.choices])
        return words + (" or none" if self.optional else "")

    def check(self, owner: str, value: Any) -> Any:
        """Return the value converted to the option's type.

        Args:
            owner: name of the entry, for messages.
            value: the given value.

        Raises:
            OptionError: the type is wrong or the value is out of range. The message names the owner, the option and
                the allowed values.
        """
        none = isinstance(value, str) and value == "none"  # an array is compared by element
        if value is None or (none and self.optional and "none" not in self.choices):
            if self.optional:
                return None
        elif isinstance(value, bool | str):
            if type(value) in self.kinds or value in self.choices:
                return value
        elif isinstance(value, Real) and self.kinds:  # NumPy's scalars as well
            number = _as_number(value, float in self.kinds)
            exact = isinstance(number, float) or abs(number) <= LARGEST_INTEGER
            allowed = self.bounds is None or number in self.bounds
            if exact and allowed and type(number) in self.kinds and number == number:
                return number
        limit, hint = "", ""
        if isinstance(value, float) and float in self.kinds and not _has_room(value):
            limit = ", of a size from 1e-30 to 1e30"
        if isinstance(value, Integral) and float not in self.kinds and abs(int(value)) > LARGEST_INTEGER:
            limit = f", up to {LARGEST_INTEGER}"
        if self.choices and not self.kinds:
            hint = nearest(str(value), self.choices)
        raise OptionError(f"{owner}: {self.name} must be {self.allowed}{limit}, got {shown(value)}.{hint}", self.name)


def _as_number(value: Real, as_float: bool) -> float:
    """Convert to int or float. An integer too large for a float becomes nan, which no option accepts."""
    if isinstance(value, Integral) and not as_float:
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _option(name: str, hint: Any, default: Any) -> Option:
    extras: list[Any] = []
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
    bounds = next((extra for extra in extras if isinstance(extra, Range)), None)
    help_text = next((extra for extra in extras if isinstance(extra, str)), "")
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    choices = tuple(str(c) for part in parts if get_origin(part) is Literal for c in get_args(part))
    kinds = tuple(part for part in parts if part in (bool, int, float, str))
    kind = " or ".join([kind.__name__ for kind in kinds] + ["name"] * bool(choices))
    text = " | ".join([str(bounds)] * (bounds is not None) + list(choices))
    optional, later = type(None) in parts, LATER in extras
    former = next((extra for extra in extras if isinstance(extra, Former)), None)
    warm = name == "temperature" or TEMPERATURE in extras
    return Option(name, kind, default, text, help_text, kinds, choices, bounds, optional, later, former, warm)


@functools.cache
def options_of(target: Callable[..., Any], bound: int = 0) -> tuple[Option, ...]:
    """Return the options of a class or function, read from its signature without the first `bound` arguments."""
    if inspect.isclass(target):
        return options_of(target.__init__, 1)
    hints = get_type_hints(target, include_extras=True)
    options = (
        _option(name, hints.get(name, float), parameter.default)
        for name, parameter in list(inspect.signature(target).parameters.items())[bound:]
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )
    # Arguments that no text can give (tensors of a diagnostic) are not options.
    return tuple(option for option in options if option.kinds or option.choices)


def check_whole(name: str, value: Any, low: int = 1) -> None:
    """Raise OptionError unless an argument of a function is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise OptionError(f"{name} must be a whole number >= {low}, got {shown(value)}.")


def checked(owner: str, options: tuple[Option, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options in their types. Raise OptionError for an unknown name or a bad value."""
    by_name = {option.name: option for option in options}
    for name in given:
        if name not in by_name:
            known = ", ".join(by_name) or "none"
            raise OptionError(
                f"{owner} has no option {shown(name)}.{nearest(name, by_name)} Its options: {known}.", name
            )
    return {name: by_name[name].check(owner, value) for name, value in given.items()}


def remember_options(init: Callable[..., None]) -> Callable[..., None]:
    """Check the options of a constructor against its signature and remember what was given."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, /, *args: Any, **kwargs: Any) -> None:
        owner, options = type(self).registered_name(), options_of(init, 1)
        checked(owner, options, kwargs)  # an unknown name is better told than `bind_partial` does
        try:
            _, *arguments = signature.bind_partial(self, *args, **kwargs).arguments.items()
        except TypeError as error:
            raise OptionError(f"{owner}: {error}. Its options: {', '.join(o.name for o in options)}.") from None
        given = checked(owner, options, dict(arguments))
        for option in options:
            if option.default is inspect.Parameter.empty and option.name not in given:
                raise OptionError(f"{owner} needs the option {option.name!r}: {option.allowed}.")
        if "given" not in self.__dict__:
            object.__setattr__(self, "given", given)
        init(self, **given)

    return wrapped
