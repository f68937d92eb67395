"""Trackers: send the lines of metrics.jsonl to TensorBoard, Weights & Biases, MLflow and trackio.

accelerate's tracker classes do the logging. This module continues the right run after a resume, logs no line twice, and
reports how a run ended.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dipole.core.train.config import RunConfig
from dipole.core.train.metrics import read_metrics
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import ConfigError, ReceivedError, TrainingError, nearest
from dipole.core.utils.extras import install_line
from dipole.core.utils.files import atomic_write, why
from dipole.core.utils.received import read_json

Ending = Literal["done", "failed", "interrupted"]
PROJECT = "dipole"
"""Default project or experiment of runs."""


@dataclass(frozen=True)
class Kind:
    """A tracker.

    Args:
        module: must be importable.
        start: builds the accelerate tracker of a run.
        end: reports how the run ended, before the tracker's `finish`.
    """

    module: str
    start: Callable[[About], Any]
    end: Callable[[Any, Ending], None] = lambda tracker, ending: None


@dataclass(frozen=True)
class About:
    """The facts of a run that a tracker needs.

    Args:
        name: the recipe's name and the run's hash.
        key: the tracker's id of the run, the same in all attempts.
        folder: the run's.
        step: the one before the first.
        continues: whether the tracker knows the run already.
    """

    name: str
    key: str
    folder: RunFolder
    step: int
    continues: bool


def _tensorboard(about: About) -> Any:
    from accelerate.tracking import TensorBoardTracker

    # Events after the checkpoint are dropped, from that step on.
    return TensorBoardTracker("tensorboard", about.folder.path, purge_step=about.step + 1 if about.step else None)


def _wandb(about: About) -> Any:
    from accelerate.tracking import WandBTracker

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    # It writes into the run's folder. WANDB_MODE=offline needs no network.
    return WandBTracker(project, id=about.key, name=about.name, resume="allow", dir=str(about.folder.path))


def _end_wandb(tracker: Any, ending: Ending) -> None:
    tracker.run.finish(exit_code=int(ending != "done"))


def _mlflow(about: About) -> Any:
    from accelerate.tracking import MLflowTracker

    run_id = about.key if about.continues else None
    return MLflowTracker(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), run_id=run_id, run_name=about.name)


def _end_mlflow(tracker: Any, ending: Ending) -> None:
    import mlflow

    mlflow.end_run({"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[ending])


def _trackio(about: About) -> Any:
    from accelerate.tracking import TrackioTracker

    return TrackioTracker(
        os.environ.get("TRACKIO_PROJECT", PROJECT), name=f"{about.name} {about.key[:6]}", resume="allow"
    )


KINDS = {
    "tensorboard": Kind("tensorboard", _tensorboard),
    "wandb": Kind("wandb", _wandb, _end_wandb),
    "mlflow": Kind("mlflow", _mlflow, _end_mlflow),
    "trackio": Kind("trackio", _trackio),
}


def check_trackers(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names once each.

    Raises:
        ConfigError: one is unknown, or its package is not installed.
    """
    wanted = tuple(dict.fromkeys(names))
    for name in wanted:
        if name not in KINDS:
            raise ConfigError(f"--log: unknown tracker {name!r}.{nearest(name, KINDS)} Allowed: {', '.join(KINDS)}.")
        if importlib.util.find_spec(KINDS[name].module) is None:
            raise ConfigError(f"--log {name} needs a package that is not installed: {install_line(name)}")
    return wanted


class Trackers:
    """The trackers of a run in progress. Their errors end the run with a message that names the tracker.

    Args:
        names: as `check_trackers` returns them.
        config: of the run, logged as `train.batch_size` and so on.
        folder: of the run. Its trackers.json has the run's keys and the last logged line.
        metrics: its metrics.jsonl before it is truncated.
        keep_bytes: size of metrics.jsonl at the checkpoint. Trackers may have later lines too.
        step: of the checkpoint.
    """

    def __init__(
        self,
        names: Sequence[str],
        config: RunConfig,
        folder: RunFolder,
        metrics: Path,
        keep_bytes: int = 0,
        step: int = 0,
    ) -> None:
        kept = _read(folder.trackers) if keep_bytes else {}
        keys: dict[str, str] = kept.get("keys", {})
        self._told = _later(kept.get("told"), _last_line(metrics) if keep_bytes else None)
        self._skips = {name for name in names if name in keys and name != "tensorboard"}
        self._trackers: dict[str, Any] = {}
        values = dict(flat(config.model_dump(mode="json", exclude_none=True)))
        values["hash"] = config.hash
        from accelerate import PartialState

        PartialState()  # accelerate's trackers ask it whether they are the first process
        for name in names:
            about = About(
                f"{config.name} {config.hash}", keys.get(name) or uuid.uuid4().hex, folder, step, name in keys
            )
            with _naming(name):
                tracker = self._trackers[name] = KINDS[name].start(about)
                tracker.start()
                if name not in keys:
                    tracker.store_init_configuration(values)
            keys[name] = tracker.tracker.info.run_id if name == "mlflow" else about.key
        try:
            atomic_write(folder.trackers, json.dumps({"keys": keys, "told": self._told}))
        except OSError as error:
            raise TrainingError(f"cannot write {folder.trackers}: {why(error)}") from error

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Log a line of metrics.jsonl, unless the previous attempt logged it."""
        finite = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        again = self._told is not None and (
            step < self._told[0] or (step == self._told[0] and values.keys() <= set(self._told[1]))
        )
        for name, tracker in self._trackers.items():
            if not (again and name in self._skips):
                with _naming(name):
                    tracker.log(finite, step=step)

    def close(self, ending: Ending) -> None:
        """Report how the run ended and close the trackers. Their errors must not hide an error of the run."""
        for name, tracker in self._trackers.items():
            with nullcontext() if ending == "done" else suppress(TrainingError), _naming(name):
                KINDS[name].end(tracker, ending)
                tracker.finish()
        self._trackers = {}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str | float | bool]]:
    """Yield pairs ("train.batch_size", 256) of nested tables, with lists as text."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str | int | float | bool) else json.dumps(value)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn errors of a tracker into one message."""
    try:
        yield
    except Exception as error:
        raise TrainingError(
            f"--log {name}: {type(error).__name__}: {error}. Leave the tracker out to train without it."
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except ReceivedError:
        return {}
    return found if isinstance(found, dict) else {}


def _last_line(metrics: Path) -> tuple[int, list[str]] | None:
    """Return the step of the last complete line, and all names logged for that step."""
    lines = read_metrics(metrics) if metrics.is_file() else []
    if not lines:
        return None
    step = lines[-1].get("step")
    if not isinstance(step, int):
        return None
    return step, sorted({name for line in lines if line.get("step") == step for name in line})


def _later(a: Sequence[Any] | None, b: Sequence[Any] | None) -> Sequence[Any] | None:
    return max((each for each in (a, b) if each is not None), key=lambda told: (told[0], len(told[1])), default=None)
