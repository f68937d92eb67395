"""The numbers of a run: metrics.jsonl, a line for each logged step, and trackers that get the same lines.

Trackers are TensorBoard, Weights & Biases, MLflow and trackio. accelerate's tracker classes do the logging. This module
continues the right run after a resume, logs no line twice, and reports how a run ended.
"""

import importlib.util
import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dipole.core.train.config import RunConfig
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.schedule import flat
from dipole.core.utils.errors import ConfigError, ReceivedError, TrainingError, nearest
from dipole.core.utils.extras import install_line
from dipole.core.utils.files import atomic_write, disk_refusing
from dipole.core.utils.received import parse_json, read_bytes, read_json, read_lines

Ending = Literal["done", "failed", "interrupted"]
PROGRESS_VALUES = ("train/loss", "train/return")
PROJECT = "dipole"
NAMES = ("tensorboard", "wandb", "mlflow", "trackio")


def crossed(previous: int, step: int, every: int) -> bool:
    """Return whether a multiple of `every` (0: never) lies between two steps."""
    return every > 0 and step // every > previous // every


class Metrics:
    """Write means since the last line to metrics.jsonl, the progress bar and the trackers. Sums stay on the device."""

    def __init__(self, config: RunConfig, folder: RunFolder, is_main: bool, log: Sequence[str], state: Any) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._every = config.train.log_every
        self._file: MetricsFile | None = None
        if is_main:
            seen = state or {"metrics_bytes": 0, "step": 0}
            self._trackers = Trackers(log, config, folder, seen["metrics_bytes"], seen["step"])
            self._file = MetricsFile(folder.metrics, seen["metrics_bytes"])

    def on_step(self, run: Any, previous: int, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
        if not run.is_finished and not crossed(previous, run.step, self._every):
            return
        tensors = {name: value for name, value in self._sums.items() if isinstance(value, Tensor)}
        if tensors:  # this waits for the device
            self._sums |= dict(zip(tensors, torch.stack([*tensors.values()]).tolist(), strict=True))
        means = {name: value / self._counts[name] for name, value in self._sums.items()}
        self._sums, self._counts = {}, {}
        run.log(means)

    def write(self, run: Any, values: Mapping[str, float | None]) -> None:
        """Write one line for the current step."""
        shown = {name: value for name, value in values.items() if name in PROGRESS_VALUES and value is not None}
        if shown:
            run.progress.values(shown)
        if self._file is not None:
            self._file.write({"step": run.step, "epoch": round(run.epoch, 4), "time": round(run.elapsed, 2), **values})
            self._trackers.log(run.step, values)

    def close(self, status: Ending) -> None:
        if self._file is not None:
            self._file.close()
            self._trackers.close(status)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"meter": {"sums": dict(self._sums), "counts": dict(self._counts)}}
        if self._file is not None:
            state["metrics_bytes"] = self._file.position()
        return state

    def load_state_dict(self, state: dict[str, Any], run: Any) -> None:
        self._sums, self._counts = dict(state["meter"]["sums"]), dict(state["meter"]["counts"])
        tensors = {name: value for name, value in self._sums.items() if isinstance(value, Tensor)}
        self._sums |= {name: value.to(run.device) for name, value in tensors.items()}


class MetricsFile:
    """Append JSON lines. Each line is flushed before `write` returns."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        """Open for appending after cutting the file back to `keep_bytes` (what a checkpoint had seen)."""
        self.path = path
        with self._writing():
            self._file = open(path, "ab")  # noqa: SIM115 (open as long as the run)
            self._file.truncate(min(keep_bytes, path.stat().st_size))
            self._file.seek(0, os.SEEK_END)

    def _writing(self) -> AbstractContextManager[None]:
        return disk_refusing(f"cannot write {self.path}")

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one line. Numbers that JSON cannot represent become null."""
        line = json.dumps({key: _short(value) for key, value in values.items()})
        with self._writing():
            self._file.write(f"{line}\n".encode())
            self._file.flush()

    def position(self) -> int:
        """Return the size after putting everything on the disk."""
        with self._writing():
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        with self._writing():
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl. Lines that are not JSON objects are skipped, such as a last line cut off by a crash."""
    lines = []
    for raw in read_lines(path):
        with suppress(ValueError):
            lines.append(parse_json(raw))
    return [line for line in lines if isinstance(line, dict)]


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return float(f"{value:.7g}")


# Trackers ------------------------------------------------------------------------------------------------------------


def check_trackers(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names once each. Raise ConfigError if one is unknown, or its package is not installed."""
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    if not isinstance(names, Iterable):
        raise ConfigError(f"log must be names of trackers, of {', '.join(NAMES)}, got {names!r}.")
    wanted = tuple(dict.fromkeys(map(str, names)))
    for name in wanted:
        if name not in NAMES:
            raise ConfigError(f"--log: unknown tracker {name!r}.{nearest(name, NAMES)} Allowed: {', '.join(NAMES)}.")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--log {name} needs a package that is not installed: {install_line(name)}")
    return wanted


class Trackers:
    """The trackers of a run in progress. Their errors end the run with a message that names the tracker.

    trackers.json has their ids of the run and the number of logged lines. `keep_bytes` is the size of metrics.jsonl at
    the checkpoint of `step`. Trackers may have later lines too.
    """

    def __init__(self, names: Sequence[str], config: RunConfig, folder: RunFolder, keep_bytes: int, step: int) -> None:
        self._trackers: dict[str, Any] = {}
        self._lines = self._logged = 0  # of metrics.jsonl so far, and those that trackers have already
        keys: dict[str, str] = {}  # ids of the run
        if not names:
            return
        if keep_bytes:
            with suppress(ReceivedError):
                written = read_bytes(folder.metrics)
                self._lines = written[:keep_bytes].count(b"\n")
                self._logged = written.count(b"\n")
                known = read_json(folder.trackers)
                self._logged, keys = max(self._logged, known["lines"]), known["keys"]
        # TensorBoard drops the later lines by itself (purge_step).
        self._continued = {name for name in names if name in keys and name != "tensorboard"}
        values = {
            name: value if isinstance(value, str | int | float) else json.dumps(value)
            for name, value in flat(config.model_dump(mode="json", exclude_none=True))
        }
        from accelerate import PartialState

        PartialState()  # accelerate's trackers ask it whether they are the first process
        for name in names:
            key = keys.get(name) or uuid.uuid4().hex
            with _naming(name):
                tracker = _build(name, f"{config.name} {config.hash}", key, name in keys, folder, step)
                self._trackers[name] = tracker
                tracker.start()
                if name not in keys:
                    tracker.store_init_configuration(values | {"hash": config.hash})
            if name == "mlflow":
                key = tracker.tracker.info.run_id
            keys[name] = key
        with disk_refusing(f"cannot write {folder.trackers}"):
            atomic_write(folder.trackers, json.dumps({"keys": keys, "lines": self._logged}))

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Log a line of metrics.jsonl, unless an earlier attempt logged it."""
        self._lines += 1
        finite = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        for name, tracker in self._trackers.items():
            if self._lines > self._logged or name not in self._continued:
                with _naming(name):
                    tracker.log(finite, step=step)

    def close(self, ending: Ending) -> None:
        """Report how the run ended and close the trackers. Their errors must not hide an error of the run."""
        for name, tracker in self._trackers.items():
            with nullcontext() if ending == "done" else suppress(TrainingError), _naming(name):
                if name == "wandb":
                    tracker.run.finish(exit_code=int(ending != "done"))
                if name == "mlflow":
                    import mlflow

                    mlflow.end_run({"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[ending])
                tracker.finish()
        self._trackers = {}


def _build(name: str, title: str, key: str, is_known: bool, folder: RunFolder, step: int) -> Any:
    """Return accelerate's tracker. `key` is the tracker's id of the run, the same in all attempts."""
    from accelerate import tracking

    variables = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "trackio": "TRACKIO_PROJECT"}
    project = os.environ.get(variables.get(name, ""), PROJECT)
    if name == "wandb":  # it writes into the run's folder
        return tracking.WandBTracker(project, id=key, name=title, resume="allow", dir=str(folder.path))
    if name == "mlflow":
        return tracking.MLflowTracker(project, run_id=key if is_known else None, run_name=title)
    if name == "trackio":
        return tracking.TrackioTracker(project, name=f"{title} {key[:6]}", resume="allow")
    # Events after the checkpoint are dropped, from that step on.
    return tracking.TensorBoardTracker("tensorboard", folder.path, purge_step=step + 1 if step else None)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn errors of a tracker into one message."""
    try:
        yield
    except Exception as error:
        raise TrainingError(
            f"--log {name}: {type(error).__name__}: {error}. Leave the tracker out to train without it."
        ) from error
