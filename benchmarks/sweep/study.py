"""A search: the settings that vary, and its trials in one SQLite file, shared by processes, machines and restarts.

The space is written such as `train.learning_rate=log(1e-4, 1e-2)`. A summary of the search is a file for the report.
"""

import hashlib
import json
import re
import sqlite3
import tomllib
import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import Field

from dipole.benchmarks.grid import changed
from dipole.benchmarks.manifest import Problem, read_parts
from dipole.core.objectives.spec import Term, format_terms, numbered, parse
from dipole.core.record import Number, Part
from dipole.core.utils.errors import ConfigError, SpecError, nearest
from dipole.core.utils.extras import needing
from dipole.core.utils.files import atomic_write
from dipole.core.utils.process import is_locked

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
    if kind == "choice" and not values:
        raise ConfigError(f"--space {key.strip()}: choice() needs at least one value.")
    if kind != "choice":
        _check_bounds(key.strip(), kind, values)
        values = tuple(map(int if kind.endswith("int") else float, values))
    return Dimension(key.strip(), kind, values)


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


SWEEPS = ".sweeps"  # folder of the searches inside a runs folder


class TrialLine(Part):
    """One trial: its values, its run, how it ended, and its metric on the validation part."""

    number: int
    state: Literal["complete", "pruned", "fail", "running"]
    values: dict[str, float | int | bool | str]
    value: Number
    run: str


class SearchSummary(Part):
    """A search: its space, its trials, the importance of keys, and the winner's runs on the test part."""

    name: str
    recipe: str
    metric: str
    maximize: bool
    space: list[str]
    trials: list[TrialLine]
    importance: dict[str, float] = Field(default_factory=dict)
    best: int | None = None
    winner: list[str] = Field(default_factory=list)


def path_of(runs: Path, name: str) -> Path:
    return runs / SWEEPS / f"{name}.json"


def read_summaries(runs: Path) -> tuple[list[SearchSummary], list[Problem]]:
    """Return the searches of a runs folder, and a problem for each unreadable file."""
    found, problems = read_parts(runs / SWEEPS, SearchSummary, "the search")
    return list(found.values()), problems


BUSY = 120.0  # seconds that a process waits for another one's write


class Study:
    """The trials of a search in its folder, which is created. A folder with another description is refused."""

    def __init__(
        self, folder: Path, space: Sequence[Dimension], described: dict[str, Any], maximize: bool, seed: int
    ) -> None:
        with needing("sweep", "a search"):
            import optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, self.space, self._optuna = folder, tuple(space), optuna
        folder.mkdir(parents=True, exist_ok=True)
        self._id = uuid.uuid4().hex
        with FileLock(folder / "ask.lock", timeout=BUSY):
            # In an address, characters such as ?, % and { of a folder's name would have a meaning.
            connect = partial(sqlite3.connect, folder / "study.db", timeout=BUSY, check_same_thread=False)
            storage = optuna.storages.RDBStorage("sqlite:///study.db", engine_kwargs={"creator": connect})
            study = optuna.create_study(
                storage=storage,
                study_name=folder.name,
                direction="maximize" if maximize else "minimize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(),
            )
            earlier = study.user_attrs.get("described")
            if earlier is None:
                study.set_user_attr("described", described)
            elif json.loads(json.dumps(described)) != earlier:
                differs = sorted(key for key in {*earlier, *described} if earlier.get(key) != described.get(key))
                raise ConfigError(
                    f"the search {folder.name!r} in {folder.parent} is another one: {', '.join(differs)} differ. "
                    "Give another --name, or the earlier settings to go on with it."
                )
            # With the same seed, a restart would repeat the first proposals.
            mixed = hashlib.sha256(f"{seed}/{len(study.trials)}".encode()).digest()
            study.sampler = optuna.samplers.TPESampler(seed=int.from_bytes(mixed[:4]), multivariate=True)
            self._study = study
            self._alive = FileLock(self._lock_of(self._id))
            self._alive.acquire()
            self._take_back()

    def close(self) -> None:
        self._alive.release()
        with suppress(OSError):
            self._lock_of(self._id).unlink(missing_ok=True)

    def _lock_of(self, driver: str) -> Path:
        folder = self.folder / "processes"
        folder.mkdir(exist_ok=True)
        return folder / f"{driver}.lock"

    def _take_back(self) -> None:
        """Propose the unfinished trials of dead processes again. Their runs resume from checkpoints."""
        states = self._optuna.trial.TrialState
        for trial in self._study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            driver = trial.user_attrs.get("process")
            if not driver or not is_locked(self._lock_of(driver)):
                self._study._storage.set_trial_user_attr(trial._trial_id, "lost", True)
                self._study.tell(trial.number, state=states.FAIL)
                self._study.enqueue_trial(trial.params)

    def ask(self, trials: int) -> tuple[Any, dict[str, Value]] | None:
        """Return the next trial and its values, or None if enough trials are started."""
        with FileLock(self.folder / "ask.lock", timeout=BUSY):
            if len(self.spent()) >= trials:
                return None
            trial = self._study.ask()
            trial.set_user_attr("process", self._id)
            return trial, {each.key: each.suggest(trial) for each in self.space}

    def spent(self) -> list[Any]:
        """Return the started trials, without those lost with their process."""
        waiting = self._optuna.trial.TrialState.WAITING
        return [each for each in self._study.trials if each.state != waiting and not each.user_attrs.get("lost")]

    def finish(self, trial: Any, value: float | None, pruned: bool = False) -> None:
        """Record how a trial ended. Without a value it failed or was pruned."""
        if value is not None:
            self._study.tell(trial, value)
        else:
            state = "PRUNED" if pruned else "FAIL"
            self._study.tell(trial, state=self._optuna.trial.TrialState[state])

    @property
    def best(self) -> Any:
        try:
            return self._study.best_trial
        except ValueError:
            return None

    def write(self, recipe: str, metric: str, maximize: bool, winner: list[str]) -> None:
        """Write the `SearchSummary`."""
        lines = [
            TrialLine(
                number=trial.number, state=trial.state.name.lower(), values=trial.params, value=trial.value,
                run=trial.user_attrs.get("run", ""),
            )
            for trial in self.spent()
        ]  # fmt: skip
        summary = SearchSummary(
            name=self.folder.name, recipe=recipe, metric=metric, maximize=maximize, space=list(map(str, self.space)),
            trials=lines, importance=self.importance(), best=self.best and self.best.number, winner=winner,
        )  # fmt: skip
        atomic_write(path_of(self.folder.parents[1], self.folder.name), summary.model_dump_json(indent=1))

    def importance(self) -> dict[str, float]:
        """Return the importance of each key (Optuna's PED-ANOVA), which sum to 1. Empty with too few trials."""
        with warnings.catch_warnings():
            # With too few trials Optuna warns and calls all keys equally important.
            warnings.simplefilter("error", UserWarning)
            try:
                found = self._optuna.importance.get_param_importances(self._study)
            except (ValueError, RuntimeError, UserWarning):
                return {}
        return {key: float(share) for key, share in found.items()}
