"""The trials of a search: one SQLite file, shared by processes, machines and restarts, and a summary for the report."""

import hashlib
import json
import uuid
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import Field

from dipole.benchmarks.manifest import Problem, read_parts
from dipole.benchmarks.sweep.space import Dimension, Value
from dipole.core.record import Number, Part
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.extras import needing
from dipole.core.utils.process import is_locked

SWEEPS = ".sweeps"
"""Folder of the searches inside a runs folder."""


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


BUSY = 120.0
"""Seconds that a process waits for another one's write."""


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
            storage = optuna.storages.RDBStorage(
                f"sqlite:///{folder / 'study.db'}", engine_kwargs={"connect_args": {"timeout": BUSY}}
            )
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
        """The best finished trial, or None."""
        try:
            return self._study.best_trial
        except ValueError:
            return None

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
