"""Suites: recipes x objectives x seeds as data, expanded into jobs. The hash of its configuration names a job.

A suite is a TOML file of `benchmarks/suites`: one per table and figure of the papers, `cross-domain`, and `demo`. Rows
are methods with an objective each. Columns are metrics of a record, each with its own settings. A scale gives the
recipe and the seeds. Rows and columns can be written as grids (`grid.py`). Cells with equal configurations share a run.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.protocol import deviations, leaves, tuples
from dipole.benchmarks.grid import MOST, expand
from dipole.benchmarks.manifest import CellEntry, ColumnEntry, FileName, JobEntry, Manifest, RowEntry, filled
from dipole.core.train.config import RunConfig, Settings, toml_text
from dipole.core.train.domains import of_another_kind
from dipole.core.train.recipe import describe, read_recipe, resolve
from dipole.core.utils.errors import ConfigError, ReceivedError, nearest
from dipole.core.utils.files import instead_of_file, is_file
from dipole.core.utils.plugins import shipped
from dipole.core.utils.received import read_toml
from dipole.core.utils.text import shortened

ScaleName = Literal["small", "paper"]
Shown = Literal["curves", "histogram", "columns", "entropy", "rank", "scatter", "paths", "pairs"]
CHANGED = "changed by --set"  # the protocol entry for settings that the command line changed
OF_THE_MACHINE = ("device", "text.senteval", "text.cache")
"""Settings that say where something is here. They do not change what is measured."""
OWN = {"objective": "the rows give it", "seed": "use --seeds", "name": "it consists of suite and row"}
"""Settings that a suite sets itself. Overriding them would have no effect or change the meaning of the cells."""


class Column(Settings):
    """One measurement: `metric` of the record times `factor`, from a run with these settings."""

    name: str
    metric: str = Field(description="{name} in it is replaced by the row's `fill`")
    factor: float = 1.0
    higher_is_better: bool = True
    unit: str = ""
    base: str | None = Field(None, description="name of the column that rows without a base are tested against")
    recipe: str | None = Field(None, description="in place of the scale's recipe")
    set: tuple[str, ...] = ()
    fill: dict[str, str] = Field(default_factory=dict, description="values of {name} in a row's objective")

    @model_validator(mode="before")
    @classmethod
    def _of_costs(cls, given: Any) -> Any:
        is_cost = isinstance(given, dict) and str(given.get("metric")).startswith("cost/")
        return {"higher_is_better": False, **given} if is_cost else given

    def metric_of(self, row: "MethodRow") -> str:
        return filled(self.metric, row.fill)


class MethodRow(Settings):
    """One method. `method` and `group` are those of the published table if there is one."""

    method: str
    objective: str
    group: str | None = None
    columns: tuple[str, ...] | None = Field(None, description="only these columns (default all columns)")
    base: str | None = Field(None, description="label of the row this one is tested against (default the suite's base)")
    control: bool = Field(False, description="a row of ours that no paper prints: its printed numbers stay empty")
    recipe: str | None = None
    set: tuple[str, ...] = ()
    fill: dict[str, str] = Field(default_factory=dict, description="values of {name} in a column's metric")

    @property
    def label(self) -> str:
        return published.row_label(self.method, self.group)


class Change(Settings):
    """Changes of a row at one scale. `set` comes after that of the row."""

    recipe: str | None = None
    objective: str | None = None
    set: tuple[str, ...] = ()

    def of(self, row: MethodRow) -> MethodRow:
        given = self.model_dump(exclude_none=True, exclude={"set"})
        return row.model_copy(update={**given, "set": (*row.set, *self.set)})


class Scale(Settings):
    """One scale of a suite: a recipe with settings, seeds, and the differences from the paper's protocol."""

    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    recipe: str | None = None
    processes: int = Field(1, ge=1, description="processes per run, started through torchrun if more than one")
    shared_process: bool = Field(False, description="a process runs many runs: for those of seconds on a processor")
    set: tuple[str, ...] = ()
    columns: tuple[Column, ...] | None = Field(None, description="in place of the suite's columns")
    rows: tuple[MethodRow, ...] | None = Field(None, description="in place of the suite's rows")
    change: dict[str, Change] = Field(default_factory=dict, description="label of a row -> what it has at this scale")
    protocol: dict[str, str | int | float] = Field(
        default_factory=dict, description="what is done otherwise than in the paper; empty means the paper's protocol"
    )
    not_decidable: str = Field("", description="why this scale cannot decide anything: its results are counted nowhere")


class Suite(Settings):
    """A table, figure or study to fill with measurements."""

    name: FileName
    title: str
    kind: Literal["table", "figure", "study"] = "table"
    published: str | None = Field(None, description="id of the published table or figure")
    base: str | None = Field(None, description="label of the row that the others are tested against")
    x_label: str = Field("", description="figures over columns: what the columns are, with its unit")
    y_label: str = ""
    show: tuple[Shown, ...] = ("curves", "histogram")
    note: str = ""
    columns: tuple[Column, ...] = ()
    rows: tuple[MethodRow, ...] = ()
    scale: dict[ScaleName, Scale]

    @model_validator(mode="after")
    def _consistent(self) -> "Suite":
        problems, table = [], published.tables().get(self.published or "")
        for name, scale in self.scale.items():
            rows, columns = scale.rows or self.rows, scale.columns or self.columns
            if len(set(scale.seeds)) < len(scale.seeds):
                problems.append(f"scale {name!r} names a seed twice")
            changing: list[Any] = [scale, *rows, *scale.change.values(), *columns]
            settings = chain.from_iterable(each.set for each in changing)
            problems += [f"set: {text!r} is not of the form key=value" for text in settings if "=" not in text]
            labels, names = Counter(row.label for row in rows), Counter(column.name for column in columns)
            if not rows or not columns:
                problems.append(f"scale {name!r} has no rows or no columns")
            if twice := [each for given in (labels, names) for each, count in given.items() if count > 1]:
                problems.append(f"scale {name!r} names a row or a column twice: {twice[0]!r}")
            if (count := len(rows) * len(columns) * len(scale.seeds)) > MOST:
                problems.append(
                    f"scale {name!r} has {count:,} cells ({len(rows)} rows x {len(columns)} columns x "
                    f"{len(scale.seeds)} seeds); at most {MOST:,}"
                )
            here = f" of scale {name!r}"
            bases = self.base, *(row.base for row in rows)
            problems += _unknown(scale.change, labels, "change: ", f" is no row{here}")
            problems += _unknown(bases, labels, "base ", f" is no row{here}")
            problems += _unknown((column.base for column in columns), names, "base ", f" is no column{here}")
            for row in rows:
                problems += _unknown(row.columns or (), names, f"row {row.label!r} asks for no column ")
            if table is not None:
                methods = (row.label for row in rows if not row.control)
                problems += _unknown(methods, {row.label for row in table.rows}, "", f" is no row of {table.id}")
                problems += _unknown(names, table.columns, "", f" is no column of {table.id}")
        if self.published is not None and table is None and self.published not in published.figures():
            problems.append(f"nothing published is called {self.published!r}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def at(self, scale: ScaleName, overrides: Sequence[str] = (), seeds: int | None = None) -> "Sized":
        """Return the suite at one scale, with `overrides` of all runs, and seeds 0 to `seeds` - 1 if they are given."""
        if scale not in self.scale:
            raise ConfigError(f"suite {self.name!r} has no scale {scale!r}. Add --scale {' or '.join(self.scale)}.")
        if odd := [text for text in overrides if "=" not in text]:
            raise ConfigError(f"--set {odd[0]!r} is not of the form key=value or table.key=value.")
        if fixed := [f"{key} ({OWN[key]})" for text in overrides if (key := _key(text)) in OWN]:
            raise ConfigError(f"--set cannot change what suite {self.name!r} sets itself: {', '.join(fixed)}.")
        wanted = self.scale[scale].seeds if seeds is None else tuple(range(seeds))
        return Sized(self, scale, tuple(overrides), wanted)


@dataclass(frozen=True)
class Job:
    """One run: the name of its folder, its configuration, the command that repeats it, and the cells it fills."""

    hash: str
    config: RunConfig
    recipe: str
    overrides: tuple[str, ...]
    cells: tuple[CellEntry, ...] = ()

    @property
    def command(self) -> list[str]:
        """Arguments of `dipole` that repeat this run alone."""
        return ["train", self.recipe, *chain.from_iterable(("--set", text) for text in self.overrides)]


@dataclass(frozen=True)
class Sized:
    suite: Suite
    name: ScaleName
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    # Recipes that were read before, and configurations by recipe and settings without the seed.
    _recipes: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _configs: dict[Any, RunConfig] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def scale(self) -> Scale:
        return self.suite.scale[self.name]

    @cached_property
    def rows(self) -> tuple[MethodRow, ...]:
        changes = self.scale.change
        return tuple(changes.get(row.label, Change()).of(row) for row in self.scale.rows or self.suite.rows)

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.scale.columns or self.suite.columns

    @cached_property
    def protocol(self) -> Mapping[str, str | int | float]:
        """The differences from the paper, also those that the suite does not name. Empty means the paper's protocol."""
        said = dict(self.scale.protocol)
        if changed := [text for text in self.overrides if _key(text) not in OF_THE_MACHINE]:
            said[CHANGED] = ", ".join(changed)
        if self.suite.published is None:
            return said
        differences = said or _deviations(self)
        if self.name != "paper":
            return differences
        return {**self.unmet, **differences}

    @property
    def not_decidable(self) -> str:
        """Why this scale cannot decide anything, or "". Settings changed by --set make another scale of it."""
        if CHANGED in self.protocol:
            return ""
        return self.scale.not_decidable.strip()

    @cached_property
    def unmet(self) -> Mapping[str, str]:
        """Differences from the paper's statements, by the key of the fact in published/PAPER.toml."""
        own = {"suite.seeds": len(self.seeds), "suite.processes": self.scale.processes}
        cells = []
        for row, column, seed in self.cells():
            if seed == self.seeds[0] and not row.control:
                config = self.configured(row, column, seed)
                known = own | {"suite.rows": row.label, "suite.metric": column.metric_of(row)}
                cells.append((row.label, column.name, leaves(config) | known))
        return deviations(self.suite.published or "", cells)

    def base_of(self, row: MethodRow) -> str | None:
        """Return the label of the row that this one is tested against. None for the base itself."""
        base = row.base or self.suite.base
        return None if base == row.label else base

    def cells(self) -> Iterator[tuple[MethodRow, Column, int]]:
        for row in self.rows:
            for column in self.columns:
                if row.columns is None or column.name in row.columns:
                    yield from ((row, column, seed) for seed in self.seeds)

    def configured(self, row: MethodRow, column: Column, seed: int) -> RunConfig:
        """Return the configuration of a cell. Cells that differ only in the seed are read once."""
        recipe, overrides = self.settings(row, column, seed)
        rest = tuple(text for text in overrides if _key(text) != "seed")
        if recipe not in self._recipes:
            self._recipes[recipe] = read_recipe(recipe)
        if (recipe, rest) not in self._configs:
            self._configs[recipe, rest] = resolve(self._recipes[recipe], overrides).config
        update = {"name": f"{self.suite.name}/{row.label}", "seed": seed}
        return self._configs[recipe, rest].model_copy(update=update)

    def settings(self, row: MethodRow, column: Column, seed: int) -> tuple[str, tuple[str, ...]]:
        """Return recipe and overrides of a cell. Later settings win: scale, column, row, --set, objective, seed."""
        recipe = row.recipe or column.recipe or self.scale.recipe
        if recipe is None:
            raise ConfigError(f"suite {self.suite.name!r} names no recipe for {row.label!r}, {column.name!r}.")
        own = (f"objective={filled(row.objective, column.fill)}", f"seed={seed}")
        return recipe, _last_wins((*self.scale.set, *column.set, *row.set, *self.overrides, *own))

    def jobs(self) -> list[Job]:
        """Return the runs of this suite, each once, in the order of the rows. Reports all bad settings together."""
        alike: dict[tuple[str, tuple[str, ...]], list[tuple[MethodRow, Column, int]]] = defaultdict(list)
        for cell in self.cells():
            alike[self.settings(*cell)].append(cell)
        jobs: dict[str, Job] = {}
        problems: dict[str, dict[str, None]] = defaultdict(dict)
        for (recipe, overrides), run in alike.items():
            cells = [CellEntry(row=row.label, column=column.name, seed=seed) for row, column, seed in run]
            try:
                config = self.configured(*run[0])
                name = config.hash
                job = jobs.get(name, Job(name, config, recipe, overrides))
                jobs[name] = replace(job, cells=(*job.cells, *cells))
            except ConfigError as error:
                problems[str(error)] |= {f"row {each.row!r}, column {each.column!r}": None for each in cells}
        lines = []
        for message, where in problems.items():
            first, *others = where
            if others:
                first += f" and {len(others)} more"
            lines.append(f"{first}: {message}")
        if lines:
            raise ConfigError(f"suite {self.suite.name!r}, scale {self.name!r}:\n" + "\n".join(lines))
        return list(jobs.values())

    def manifest(self, jobs: Sequence[Job]) -> Manifest:
        suite = self.suite
        same = {name: getattr(suite, name) for name in ("title", "kind", "published", "x_label", "y_label", "note")}
        return Manifest(
            **same,
            suite=suite.name,
            scale=self.name,
            protocol=dict(self.protocol),
            not_decidable=self.not_decidable,
            show=list(suite.show),
            rows=[RowEntry(label=r.label, objective=r.objective, base=self.base_of(r), fill=r.fill) for r in self.rows],
            columns=[ColumnEntry.model_validate(column, from_attributes=True) for column in self.columns],
            jobs=[
                JobEntry(hash=job.hash, command=job.command, processes=self.scale.processes, cells=list(job.cells))
                for job in jobs
            ],
        )


@cache
def suites() -> Mapping[str, Path]:
    return shipped("suites")


def read_suite(name: str | Path) -> Suite:
    """Read a shipped suite by name, or a suite file by path."""
    path = suites().get(str(name), Path(name))
    if not is_file(path):
        if found := instead_of_file(path):
            raise ConfigError(f"{path} is {found}: give a suite file, or a name of `dipole list suites`.")
        text = str(name)
        raise ConfigError(
            f"no suite {shortened(text)!r}.{of_another_kind(text) or nearest(text, suites())} Give the name of a "
            "shipped one (`dipole list suites`) or the path of a suite file."
        )
    try:
        return Suite.model_validate(tuples(expand(read_toml(path))))
    except ReceivedError as error:
        raise ConfigError(str(error)) from error
    except ConfigError as error:
        raise ConfigError(f"{path} is not a suite: {error}") from error
    except ValidationError as error:
        lines = [f"  - {line.replace('the recipe: ', '', 1)}" for line in describe(error, Suite)]
        raise ConfigError(f"{path} is not a suite:\n" + "\n".join(lines)) from error


def _unknown(asked: Iterable[str | None], known: Collection[str], before: str, after: str = "") -> list[str]:
    """Return a problem for each name that is asked for and not known, with the nearest one that is."""
    odd = [name for name in dict.fromkeys(asked) if name is not None and name not in known]
    return [f"{before}{name!r}{after}.{nearest(name, known)}" for name in odd]


def marked(manifest: Manifest) -> Manifest:
    """Return a manifest, also of results from before the mark, with the mark `not_decidable` of the shipped suite."""
    if manifest.not_decidable or manifest.suite not in suites() or CHANGED in manifest.protocol:
        return manifest
    return manifest.model_copy(update={"not_decidable": _shipped_mark(manifest.suite, manifest.scale)})


@cache
def _shipped_mark(name: str, scale: ScaleName) -> str:
    try:
        found = read_suite(name).scale.get(scale)
    except ConfigError:  # the suite of another package is broken: `dipole list suites` says so
        return ""
    return found.not_decidable.strip() if found else ""


def _deviations(sized: Sized) -> dict[str, str | int | float]:
    """Return how a suite that claims a published table differs from the shipped suite of that table."""
    name = sized.suite.published or ""
    if name not in suites() or "paper" not in read_suite(name).scale:
        return {"settings": "not checked, no shipped suite has the paper's"}
    paper = read_suite(name).at("paper")
    if paper == sized:
        return {}
    rows, columns = ({row.label: row for row in paper.rows}, {column.name: column for column in paper.columns})
    found: dict[str, dict[str, None]] = {}
    for row, column, seed in sized.cells():
        theirs, measured = rows.get(row.label), columns.get(column.name)
        if theirs is None or measured is None:
            if not row.control:
                found.setdefault(f"{row.label}, {column.name}", {})["not in the shipped suite"] = None
            continue
        mine, printed = column.metric_of(row), measured.metric_of(theirs)
        if (mine, column.factor) != (printed, measured.factor):
            found.setdefault("metric", {})[f"{mine} in place of {printed}"] = None
        if sized.settings(row, column, seed) != paper.settings(theirs, measured, seed):
            ours = leaves(sized.configured(row, column, seed))
            wanted = leaves(paper.configured(theirs, measured, seed))
            for key in sorted(ours.keys() | wanted.keys()):
                if ours.get(key) != wanted.get(key) and key not in (*OF_THE_MACHINE, "name", "description"):
                    found.setdefault(key, {})[f"{ours.get(key)} in place of {wanted.get(key)}"] = None
    if sized.scale.processes != paper.scale.processes:
        found["processes"] = {f"{sized.scale.processes} in place of {paper.scale.processes}": None}
    # A copy has the differences of the shipped suite, too.
    return {**paper.protocol, **{key: "; ".join(values) for key, values in found.items()}}


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _last_wins(overrides: Sequence[str]) -> tuple[str, ...]:
    """Keep the last override of every key, in the order of the keys' first mention."""
    values: dict[str, str] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        values[key.strip()] = value.strip()
    return tuple(f"{key}={value}" for key, value in values.items())


def written_out(path: Path) -> str:
    """Return the text of a suite with the same cells and no grids. ConfigError if the file is not a suite."""
    read_suite(path)
    return toml_text(expand(read_toml(path)))
