"""Read the options of a registered entry from its signature: types, defaults, ranges and help texts."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan
from numbers import Integral, Real
from typing import Annotated, Any, Final, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from dipole.core.utils.errors import OptionError, nearest
from dipole.core.utils.text import shortened

P = ParamSpec("P")
R = TypeVar("R")

LARGEST = 2**53  # largest integer option. Larger integers are not exact as floats


@dataclass(frozen=True)
class Range:
    """Bounds of a numeric option, as in `Annotated[float, Range(above=0)]`. Infinity is never allowed.

    You may combine bounds. None means no bound. An objective raises `OptionError` for a number outside the bounds.

    Args:
        above: the number must be greater than this.
        at_least: the number must be this or greater.
        below: the number must be less than this.
        at_most: the number must be this or less.
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
            and value not in (float("inf"), float("-inf"))
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
        if value is None or (value == "none" and self.optional and "none" not in self.choices):
            if self.optional:
                return None
        elif isinstance(value, bool | str):
            if type(value) in self.kinds or value in self.choices:
                return value
        elif isinstance(value, Real) and self.kinds:  # NumPy's scalars as well
            number = _as_number(value, float in self.kinds)
            exact = isinstance(number, float) or abs(number) <= LARGEST
            allowed = self.bounds is None or number in self.bounds
            if exact and allowed and type(number) in self.kinds and number == number:
                return number
        limit, hint = "", ""
        if isinstance(value, Integral) and float not in self.kinds and abs(int(value)) > LARGEST:
            limit = f", up to {LARGEST}"
        if self.choices and not self.kinds:
            hint = nearest(str(value), self.choices)
        raise OptionError(f"{owner}: {self.name} must be {self.allowed}{limit}, got {_shown(value)}.{hint}", self.name)


def _shown(value: Any) -> str:
    try:
        return shortened(repr(value))
    except ValueError:  # Python writes no integer of thousands of digits
        return "a number of thousands of digits"


def _as_number(value: Real, as_float: bool) -> float:
    """Convert to int or float. An integer too large for a float becomes nan, which no option accepts."""
    if isinstance(value, Integral) and not as_float:
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return nan


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


def options_of(function: Callable[..., Any]) -> tuple[Option, ...]:
    """Return the options of a constructor or function, read from its signature."""
    hints = get_type_hints(function, include_extras=True)
    options = (
        _option(name, hints.get(name, float), parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )
    # Arguments that no text can give (tensors of a diagnostic) are not options.
    return tuple(option for option in options if option.kinds or option.choices)


def check_whole(name: str, value: Any, low: int = 1) -> None:
    """Raise OptionError unless an argument of a function is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise OptionError(f"{name} must be a whole number >= {low}, got {_shown(value)}.")


def checked(owner: str, options: tuple[Option, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options in their types. Raise OptionError for an unknown name or a bad value."""
    by_name = {option.name: option for option in options}
    for name in given:
        if name not in by_name:
            known = ", ".join(by_name) or "none"
            raise OptionError(
                f"{owner} has no option {shortened(repr(name))}.{nearest(name, by_name)} Its options: {known}.", name
            )
    return {name: by_name[name].check(owner, value) for name, value in given.items()}


def in_range(function: Callable[P, R]) -> Callable[P, R]:
    """Check the options of a function at every call, as an objective's constructor does."""
    signature, options = inspect.signature(function), options_of(function)

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        given = {option.name: bound.arguments[option.name] for option in options if option.name in bound.arguments}
        bound.arguments.update(checked(function.__name__, options, given))
        return function(*bound.args, **bound.kwargs)

    return wrapped


def remember_options(init: Callable[..., None]) -> Callable[..., None]:
    """Check the options of a constructor against its signature and remember what was given."""

    @functools.wraps(init)
    def wrapped(self: Any, /, *args: Any, **kwargs: Any) -> None:
        owner = type(self).registered_name()
        signature = inspect.signature(init)
        options = options_of(init)
        unknown = {key: value for key, value in kwargs.items() if key == "self" or key not in signature.parameters}
        checked(owner, options, unknown)  # raises for an unknown name
        try:
            given = dict(signature.bind_partial(self, *args, **kwargs).arguments)
        except TypeError as error:
            raise OptionError(f"{owner}: {error}. Its options: {', '.join(o.name for o in options)}.") from None
        given.pop("self")
        given = checked(owner, options, given)
        for option in options:
            if option.default is inspect.Parameter.empty and option.name not in given:
                raise OptionError(f"{owner} needs the option {option.name!r}: {option.allowed}.")
        if "given" not in self.__dict__:
            object.__setattr__(self, "given", given)
        init(self, **given)

    return wrapped
