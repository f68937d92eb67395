"""The folder of a run: its files, its lock, and how a run is found.

runs/<hash>/{config.toml, metrics.jsonl, record.json, checkpoints/, model/}
"""

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dipole.core.record import CONFIG, RECORD, RunRecord, is_run, read_record
from dipole.core.train.config import RunConfig
from dipole.core.train.recipe import resolve
from dipole.core.utils.errors import ConfigError, ReceivedError, RecordError, TrainingError
from dipole.core.utils.files import NO_LOCKS, atomic_write, check_own, is_folder, remove_scratch, why
from dipole.core.utils.process import LONGEST_OWNER, OWNER, describe_self, read_owner
from dipole.core.utils.received import read_text, read_toml
from dipole.core.utils.text import shortened

DEFAULT_RUNS = Path("runs")


class RunFolder:
    """The paths of one run. `open` creates the folder.

    Args:
        path: of the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.config = path / CONFIG
        self.metrics = path / "metrics.jsonl"
        self.record = path / RECORD
        self.checkpoints = path / "checkpoints"
        self.best = self.checkpoints / "best"
        self.model = path / "model"
        self.kept = self.model / "kept"
        self.tensorboard = path / "tensorboard"
        self.trackers = path / "trackers.json"
        self._owner = path / OWNER
        self._lock: FileLock | None = None  # while open

    def open(self, config: RunConfig) -> None:
        """Create the folder, lock it for this process and write config.toml.

        Args:
            config: what is run.

        Raises:
            TrainingError: the folder cannot be written, or another process trains this run.
        """
        for path in (self.path / ".lock", self._owner, self.metrics):
            check_own(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            try:
                lock.acquire(blocking=False)
            except OSError as error:
                if error.errno not in NO_LOCKS:  # as of Timeout
                    raise
            self._lock = lock
            if lock.is_locked:  # no other process writes there
                for folder in (self.path, self.model, self.kept, self.checkpoints, self.best):
                    remove_scratch(folder)
            self._owner.write_text(describe_self())
            atomic_write(self.config, f"# run {config.hash}\n{config.to_toml()}")
        except Timeout:
            owner = {}
            with suppress(ReceivedError):
                owner = read_owner(read_text(self._owner, LONGEST_OWNER))
            raise TrainingError(
                f"another process (pid {owner.get('pid', 'unknown')}) is training this run in {self.path}. "
                "Wait for it, or choose another --runs."
            ) from None
        except OSError as error:
            self.close()
            raise TrainingError(f"cannot write the run folder {self.path}: {why(error)}") from error

    def close(self) -> None:
        """Release the lock, and remove the folder if nothing was begun: no record, metrics, checkpoints or other files.

        The system releases the lock if the process is killed.
        """
        if self._lock is None:
            return
        self._owner.unlink(missing_ok=True)
        with suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {self.config.name, ".lock"}:
                shutil.rmtree(self.path)
        self._lock.release()
        self._lock = None

    def clear(self) -> None:
        """Remove the files of an earlier attempt, and no others."""
        for path in (self.record, self.metrics, self.trackers):
            path.unlink(missing_ok=True)
        for folder in (self.checkpoints, self.model, self.tensorboard):
            shutil.rmtree(folder, ignore_errors=True)

    def read_record(self) -> RunRecord | None:
        """Return the record, or None if there is none yet.

        Raises:
            RecordError: the file cannot be read, or does not follow the schema.
        """
        if not self.record.is_file():
            return None
        try:
            return read_record(self.record)
        except RecordError as error:
            if any(self.checkpoints.glob("*")):
                raise RecordError(
                    f"{error}\nIts checkpoints are still there: remove {self.record} and repeat the command to "
                    "continue from them (--overwrite would throw them away)."
                ) from error
            raise RecordError(f"{error}\nTo train this run again: `dipole train` with --overwrite.") from error

    def read_config(self, overrides: Iterable[str] = ()) -> RunConfig:
        """Return the configuration of config.toml with overrides.

        Args:
            overrides: "table.key=value" each.

        Raises:
            RecordError: the file is missing or damaged.
            ConfigError: its configuration or an override is wrong.
        """
        try:
            written = read_toml(self.config)
        except ReceivedError as error:
            reason = error.reason
            if "cannot be read" not in reason:
                reason = f"cannot be read: it {reason}"
            raise RecordError(f"{self.config} {reason}") from error
        overrides = list(overrides)
        try:
            return resolve(written, overrides).config
        except ConfigError as error:
            if overrides:
                raise
            raise ConfigError(f"{self.config}: {error}") from error


def as_runs(runs: str | Path) -> Path:
    """Return the path of the folder of runs. Raise ConfigError for what is no path."""
    if not isinstance(runs, str | Path):
        raise ConfigError(f"runs must be the folder of all runs, got {runs!r}.")
    return Path(runs)


def find_run(text: str | Path, runs: str | Path = DEFAULT_RUNS) -> RunFolder:
    """Return the folder of a run, by its path or by the first digits of its id.

    Args:
        text: the path of a run's folder, or the first hexadecimal digits of its id, in lower case.
        runs: the folder of runs, which need not exist.

    Raises:
        ConfigError: nothing or more than one run fits, or `runs` is no path.

    Example:
        >>> run = dipole.train(dipole.load_recipe("lmcl-toy", ["train.steps=5"]).config, folder, quiet=True)
        >>> dipole.find_run(run.hash[:6], folder).path.name == run.hash
        True
    """
    if not isinstance(text, str | Path) or text == "":
        raise ConfigError(f"a run is the path of its folder or the first digits of its hash, got {text!r}.")
    path, text, runs = Path(text), str(text), as_runs(runs)
    for each in (path, runs / path):
        if is_folder(each) and is_run(each):
            return RunFolder(each)
    fits: list[Path] = []
    if re.fullmatch("[0-9a-f]{1,100}", text):
        fits = sorted(each for each in runs.glob(f"{text}*") if is_run(each))
    if len(fits) == 1:
        return RunFolder(fits[0])
    if fits:
        raise ConfigError(f"{text!r} fits {len(fits)} runs: {', '.join(each.name for each in fits)}. Give more digits.")
    if is_folder(path):
        reason = f"it has no {CONFIG} and no {RECORD}"
        if path.resolve().name.startswith("."):
            reason = "it is hidden, as what `dipole rm` left"
        raise ConfigError(f"{path} is no run folder: {reason}.")
    there = f"there is no folder {runs}/"
    if runs.is_dir():
        there = "`dipole list runs` names them"
    raise ConfigError(
        f"no run {shortened(text)!r}: it is neither the folder of a run nor the start of a hash in {runs}/; {there}."
    )
