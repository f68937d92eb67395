"""The papers' statements about their experiments, and how a suite differs from them.

The statements are data: `facts` in `published/PAPER.toml`, each with its section and sentence, the published tables it
is about, and the settings that meet it.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from math import isclose
from typing import Any

from pydantic import Field

from dipole.benchmarks.claims.claim_specs import ClaimSpec, fits
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import parse
from dipole.core.train.config import RunConfig, Settings
from dipole.core.train.schedule import flat
from dipole.core.utils.plugins import shipped


class Fact(Settings):
    """A statement of a paper on some cells of its tables.

    Without `settings`, `by` says how it is met. A fact with neither is a deviation wherever it applies.
    """

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
        """Return whether the fact is about a cell with these settings."""
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
    """The contents of a paper's TOML file."""

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
    """Return the statements on a published table or figure."""
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
