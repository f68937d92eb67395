"""The space of a search, such as `train.learning_rate=log(1e-4, 1e-2)`, and the settings of chosen values."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dipole.benchmarks.grid import changed
from dipole.core.objectives.spec import Term, format_terms, numbered, parse
from dipole.core.utils.errors import ConfigError, SpecError, nearest

Value = float | int | bool | str
KINDS: Mapping[str, str] = {
    "log": "log(LOW, HIGH): a number, evenly in its logarithm",
    "uniform": "uniform(LOW, HIGH): a number, evenly",
    "int": "int(LOW, HIGH): a whole number, evenly",
    "logint": "logint(LOW, HIGH): a whole number, evenly in its logarithm",
    "choice": "choice(A, B, ...): one of several values",
}
_TEXT = re.compile(r"\s*(?P<kind>\w+)\s*\((?P<inside>.*)\)\s*", re.DOTALL)
OBJECTIVE = "objective"


@dataclass(frozen=True)
class Dimension:
    """One setting that varies: its key, its kind, and the bounds or values."""

    key: str
    kind: str
    values: tuple[Value, ...]

    def suggest(self, trial: Any) -> Value:
        if self.kind == "choice":
            value: Value = trial.suggest_categorical(self.key, list(self.values))
            return value
        low, high = self.values
        is_log = self.kind.startswith("log")
        if self.kind.endswith("int"):
            return int(trial.suggest_int(self.key, low, high, log=is_log))
        return float(trial.suggest_float(self.key, low, high, log=is_log))

    def __str__(self) -> str:
        return f"{self.key}={self.kind}({', '.join(map(_written, self.values))})"


def read_space(texts: Sequence[str]) -> tuple[Dimension, ...]:
    """Parse the dimensions of `--space`. ConfigError if one is wrong."""
    space = tuple(_dimension(text) for text in texts)
    keys = [each.key for each in space]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise ConfigError(f"--space: {', '.join(sorted(twice))} is given twice.")
    return space


def _dimension(text: str) -> Dimension:
    key, equals, rest = text.partition("=")
    found = _TEXT.fullmatch(rest)
    allowed = f"Allowed: KEY={'; KEY='.join(KINDS.values())}."
    if not equals or not key.strip() or found is None:
        raise ConfigError(f"--space {text[:200]!r} is not of the form KEY=KIND(...). {allowed}")
    kind = found["kind"]
    if kind not in KINDS:
        raise ConfigError(f"--space {key.strip()}: unknown kind {kind!r}.{nearest(kind, KINDS)} {allowed}")
    values = tuple(_value(each) for each in _split(found["inside"]))
    if kind == "choice":
        if not values:
            raise ConfigError(f"--space {key.strip()}: choice() needs at least one value.")
        return Dimension(key.strip(), kind, values)
    _check_bounds(key.strip(), kind, values)
    if kind.endswith("int"):
        return Dimension(key.strip(), kind, tuple(int(each) for each in values))
    return Dimension(key.strip(), kind, tuple(float(each) for each in values))


def _check_bounds(key: str, kind: str, values: tuple[Value, ...]) -> None:
    numbers = [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(values) != 2 or len(numbers) != 2 or not all(abs(each) <= 1e300 for each in numbers):
        raise ConfigError(f"--space {key}: {kind} needs two numbers, {KINDS[kind].partition(':')[0]}.")
    low, high = numbers
    if low >= high:
        raise ConfigError(f"--space {key}: the first number must be below the second, got {low} and {high}.")
    if kind.startswith("log") and low <= 0:
        raise ConfigError(f"--space {key}: {kind} needs numbers above 0, got {low}. Use {kind[3:] or 'uniform'}.")
    if kind.endswith("int") and not all(float(each).is_integer() for each in numbers):
        raise ConfigError(f"--space {key}: {kind} needs whole numbers, got {low} and {high}.")


def _split(inside: str) -> list[str]:
    """Split at commas outside of brackets and quotes: `dcl(rho=0.1, temperature=1), infonce`."""
    parts, depth, quote, start = [], 0, "", 0
    for place, char in enumerate(inside):
        if quote:
            if char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and not depth:
            parts.append(inside[start:place])
            start = place + 1
    return [each.strip() for each in [*parts, inside[start:]] if each.strip()]


def _value(text: str) -> Value:
    try:
        read = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    if isinstance(read, float | int | bool | str):
        return read
    return text


def _written(value: Value) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower()


def settings(values: Mapping[str, Value], objective: str) -> list[str]:
    """Return the overrides (`--set`) for chosen values.

    A key `objective.TERM.OPTION` or `objective.TERM.weight` changes the objective's text, which a value for the key
    "objective" replaces first. If a term occurs twice, the two are TERM.0 and TERM.1. Raise ConfigError if the
    objective has no such term.
    """
    text = str(values.get(OBJECTIVE, objective))
    inside = {key: value for key, value in values.items() if key.startswith(f"{OBJECTIVE}.")}
    found = [f"{key}={_written(value)}" for key, value in values.items() if key not in inside and key != OBJECTIVE]
    if OBJECTIVE in values or inside:
        try:
            terms = parse(text)
        except SpecError as error:
            raise ConfigError(f"objective: {error}") from error
        for key, value in inside.items():
            terms = _changed(terms, key, value)
        found.append(f"{OBJECTIVE}={json.dumps(format_terms(terms))}")
    return found


def _changed(terms: list[Term], key: str, value: Value) -> list[Term]:
    owner, _, option = key.removeprefix(f"{OBJECTIVE}.").rpartition(".")
    known = numbered([term.name for term in terms])
    if owner not in known:
        raise ConfigError(
            f"--space {key}: the objective has no term {owner!r}.{nearest(owner, known)} Its terms: "
            f"{', '.join(known)}; a key is objective.TERM.OPTION or objective.TERM.weight."
        )
    place = known.index(owner)
    return [*terms[:place], changed(terms[place], option, value), *terms[place + 1 :]]


def corners(space: Sequence[Dimension]) -> list[dict[str, Value]]:
    """Return choices that contain every bound and value once, for a check before the first training."""
    count = max((len(each.values) for each in space), default=0)
    return [{each.key: each.values[number % len(each.values)] for each in space} for number in range(count)]
