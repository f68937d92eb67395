"""What `published/PAPER.toml` says: statements of a paper on its experiments, and how its claims are judged.

The statements are `facts`, each with its section and sentence, the published tables it is about, and the settings that
meet it. `deviations` says how a suite differs from them. A claim has `parts`, each of a kind of kinds.toml.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from math import inf, isclose, log
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import parse
from dipole.core.train.config import RunConfig, Settings
from dipole.core.train.schedule import flat
from dipole.core.utils.plugins import shipped

# Printed numbers have at most two decimals. The rounding noise of their differences is far below this.
ROUNDING = 1e-9


class ClaimKind(Settings):
    """A kind of statement: when a comparison is as claimed, and when all comparisons together are."""

    shape: Literal["above", "below", "between", "around zero", "around amount", "factors"] = Field(
        description="of `ClaimPart.region`, where the difference of a comparison has to lie"
    )
    words: str = Field(description="what is claimed, with {parameters} of the part, and {side}: above or below")
    of_several: str = Field(", in each of {n}", description="added for several comparisons")
    needs: tuple[tuple[str, ...], ...] = Field(((),), description="sets of parameters, of which a part has one")
    may: tuple[str, ...] = Field((), description="parameters that a part can have")
    is_closed: bool = Field(False, description="the bounds belong to the region")
    of_mean: bool = Field(False, description="the mean over the comparisons has to be shown, not each comparison")
    of_each: bool = Field(True, description="each estimate has to be as claimed")
    is_counted: bool = Field(False, description="a number of the comparisons is enough")
    is_spread: bool = Field(False, description="standard deviations are compared, by an F-test")


@cache
def kinds() -> Mapping[str, ClaimKind]:
    found = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8"))
    return {name: ClaimKind.model_validate(tuples(each)) for name, each in found.items()}


class ClaimPart(Settings):
    """One thing that a claim says: the kind of statement, its parameters, and the comparisons it is about."""

    kind: str = Field(description="what is said: sign, all, most, at least, within, ratio, ... (kinds.toml)")
    tests: tuple[int, ...] = Field((), description="which of the claim's lists of comparisons, from 0. None means all")
    only: tuple[str, ...] = Field(("*",), description="labels of comparisons (`row | column` or `column`), as patterns")
    bound: float = Field(0.0, description="what each comparison is compared with, in the table's units")
    margin: float | None = Field(None, description="of `within`, or of `about` on either side")
    amount: float | None = Field(None, description="of `about`")
    low: float | None = Field(None, description="of `between`, `about` and `ratio`")
    high: float | None = Field(None, description="of `between`, `about` and `ratio`")
    share: float = Field(0.5, description="of `most`: more than this share of the comparisons")
    least: int | None = Field(None, description="of `count`: smallest number of comparisons")
    level: float = Field(0.05, description="of `significant`")
    reads: str = Field("", description="how the sentence is read if it leaves something open, and why")

    @property
    def spec(self) -> ClaimKind:
        return kinds()[self.kind]

    @property
    def region(self) -> tuple[float, float]:
        """The interval in which a comparison has to lie, in the units of first minus second."""
        low, high, margin = self.low or 0.0, self.high or 0.0, self.margin
        if margin is None:
            margin = self.bound
        if self.amount is not None:
            low = high = self.amount
        shapes = {
            "above": (self.bound, inf),
            "below": (-inf, self.bound),
            "between": (low, high),
            "around zero": (-margin, margin),
            "around amount": (low - margin, high + margin),
        }
        if self.spec.shape == "factors":
            return log(low), log(high)
        return shapes[self.spec.shape]

    def required(self, n: int) -> int:
        if not self.spec.is_counted:
            return n
        if self.least is not None:
            return self.least
        return int(self.share * n + ROUNDING) + 1

    def words(self, n: int, side: str) -> str:
        """Return the statement about `n` comparisons, with its bounds. `side` is "above", "below" or "beyond"."""
        values = {name: f"{value:g}" for name, value in self if isinstance(value, float)}
        low, high = self.region
        if self.kind == "about" and self.amount is None:
            values["amount"] = f"{self.low:g} to {self.high:g}"
        values |= {"side": side, "n": str(n), "at_least": str(self.required(n)), "from": f"{low:g}", "to": f"{high:g}"}
        text = self.spec.words
        if n > 1 or self.spec.is_counted or not self.spec.of_each:
            text += self.spec.of_several
        return text.format(**values)

    @model_validator(mode="after")
    def _is_known(self) -> "ClaimPart":
        if self.kind not in kinds():
            raise ValueError(f"unknown kind {self.kind!r}; known: {', '.join(kinds())}")
        needed = self.spec.needs
        given = self.model_fields_set - {"kind", "tests", "only", "reads"}
        if odd := sorted(given.difference(self.spec.may, *needed)):
            raise ValueError(f"kind {self.kind!r} has no parameter {', '.join(odd)}")
        if not any(given >= set(names) for names in needed):
            raise ValueError(f"kind {self.kind!r} needs {' or '.join(' and '.join(names) for names in needed)}")
        if self.amount is not None and given & {"low", "high"}:
            raise ValueError("give either an amount, or low and high")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        if self.kind == "ratio" and not (self.low or 0) > 0:
            raise ValueError("the factors of a ratio must be above 0")
        if self.margin is not None and self.margin <= 0:
            raise ValueError(f"margin ({self.margin}) must be above 0")
        return self


def default_part(index: int, test: Mapping[str, Any]) -> ClaimPart:
    """Return the part of a test without a spec: a spread, a comparison of deviations, or the sign."""
    if test["kind"] == "spread":
        return ClaimPart(tests=(index,), kind="range", bound=test["published"]["spread"])
    if test.get("field") == "std":
        return ClaimPart(tests=(index,), kind="spread")
    return ClaimPart(tests=(index,), kind="sign", bound=float(test.get("min_diff", 0.0)))


class ClaimSpec(Settings):
    """How a claim is judged, in `published/PAPER.toml`. `not_tested` says why if no numbers can show it."""

    id: str
    parts: tuple[ClaimPart, ...] = ()
    not_tested: str = ""
    not_judged: str = Field("", description="comparisons of the table that its sentence does not speak of, and why")


def fits(text: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches this text: `*` matches anything, other characters match themselves."""
    return any(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) for pattern in patterns)


class Fact(Settings):
    """A statement of a paper on some cells of its tables. Without `settings` and `by` it is a deviation everywhere."""

    key: str = Field(description="what a suite's protocol calls the deviation from it")
    section: str
    sentence: int = Field(ge=1, description="of the section, the paragraph in brackets, the caption or the algorithm")
    states: str
    tables: tuple[str, ...] = Field(min_length=1, description="ids of published tables and figures, as patterns")
    rows: tuple[str, ...] = Field(("*",), description="labels, as patterns without bracket sets")
    columns: tuple[str, ...] = ("*",)
    when: dict[str, str] = Field(default_factory=dict, description="only in cells with these settings, as patterns")
    settings: dict[str, Any] = Field(default_factory=dict, description="dotted name -> value or rule, see `differs`")
    by: str = Field("", description="what meets it if no setting does")
    why: str = Field("", description="why it is not met")

    def covers(self, row: str, column: str, found: Mapping[str, Any]) -> bool:
        return (
            fits(row, self.rows)
            and fits(column, self.columns)
            and all(key in found and fnmatchcase(str(found[key]), wanted) for key, wanted in self.when.items())
        )


class Choice(Settings):
    """Entries of protocols on what a paper leaves open."""

    keys: tuple[str, ...] = Field(min_length=1)
    why: str


class Item(Settings):
    """A line of docs/background/papers.md: a theorem, a table or a figure. `name` as the paper has it."""

    name: str
    what: str
    where: str
    differs: str = ""
    why: str = ""
    run: str = ""


class Paper(Settings):
    facts: tuple[Fact, ...] = ()
    choices: tuple[Choice, ...] = ()
    items: tuple[Item, ...] = Field((), description="items without a suite or theorem here")
    claims: tuple[ClaimSpec, ...] = Field((), description="how its claims are judged (PAPER.json has their words)")

    def why(self, key: str) -> str:
        """The reason for an entry of a protocol, empty if none is known."""
        reasons = [fact.why for fact in self.facts if fact.key == key and fact.why]
        return next(iter([*reasons, *(choice.why for choice in self.choices if key in choice.keys)]), "")


@cache
def paper(name: str) -> Paper:
    """Return what a paper states, by its short name, empty if there is no such file."""
    path = shipped("published").get(name)
    if path is None:
        return Paper()
    return Paper.model_validate(tuples(tomllib.loads(path.read_text(encoding="utf-8"))))


def papers() -> Mapping[str, Paper]:
    return {name: paper(name) for name in shipped("published")}


def facts_of(published: str) -> tuple[Fact, ...]:
    every = (fact for paper in papers().values() for fact in paper.facts)
    return tuple(fact for fact in every if any(fnmatchcase(published, pattern) for pattern in fact.tables))


def deviations(published: str, cells: Iterable[tuple[str, str, Mapping[str, Any]]]) -> dict[str, str]:
    """Return, by the key of each statement that is not met, what is done otherwise."""
    cells = list(cells)
    found: dict[str, dict[str, None]] = {}
    for fact in facts_of(published):
        covered = [settings for row, column, settings in cells if fact.covers(row, column, settings)]
        said = [difference for key, wanted in fact.settings.items() for difference in differs(key, wanted, covered)]
        if covered and not fact.settings and not fact.by:
            said = [fact.why or "not done"]
        if covered and said:
            found.setdefault(fact.key, {}).update(dict.fromkeys(said))
    return {key: "; ".join(differences) for key, differences in found.items()}


def differs(key: str, wanted: Any, cells: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield where a setting is not what a paper states, in words.

    wanted: a value, or {each}: all of these over the cells, and no other. {per, factor}: the factor times another
    setting. {absent = true}: not set.
    """
    values = [cell.get(key) for cell in cells]
    if not isinstance(wanted, dict):
        odd = [(value, wanted) for value in values if not _equal(value, wanted)]
    elif "each" in wanted:
        odd = [(value, wanted["each"]) for value in values if not any(_equal(value, one) for one in wanted["each"])]
        missing = [one for one in wanted["each"] if not any(_equal(value, one) for value in values)]
        odd += [("nothing", one) for one in missing]
    elif "per" in wanted:
        due = [cell.get(wanted["per"], 0) * wanted["factor"] for cell in cells]
        odd = [(value, one) for value, one in zip(values, due, strict=True) if not _equal(value, one)]
    else:
        odd = [(value, "nothing") for value in values if value is not None]
    for value, stated in odd:
        yield f"{key}: {_shown(value)} in place of {_shown(stated)}"


def protocol_differences(paper: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return what our run did otherwise than the paper: a line per entry of `ours` that is not the paper's own."""
    stated = {key: value for key, value in paper.items() if value is not None}
    differing = {key: value for key, value in ours.items() if stated.get(key) != value}
    return [f"{key}: {value} (paper: {stated.get(key, 'not stated')})" for key, value in differing.items()]


def leaves(config: RunConfig) -> dict[str, Any]:
    """Return settings by dotted path, with options and weights of the objective as objective.NAME.OPTION."""
    found = dict(flat(config.model_dump(mode="json")))
    if config.objective == "none":
        return found
    for term in parse(config.objective):
        entry = registry.get(term.name)
        values = entry.defaults | {"weight": entry.weight} | dict(term.options)
        if term.weight is not None:
            values["weight"] = term.weight
        found |= {f"objective.{entry.name}.{option}": value for option, value in values.items()}
    return found


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(wanted, list | tuple):
        return len(value) == len(wanted) and all(map(_equal, value, wanted))
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return isclose(value, wanted)
    return bool(value == wanted)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def tuples(value: object) -> object:
    """Return TOML arrays as tuples: the models are strict and frozen."""
    if isinstance(value, dict):
        return {key: tuples(each) for key, each in value.items()}
    if isinstance(value, list):
        return tuple(map(tuples, value))
    return value
