"""The folder of a run: what lies where, one process at a time, and how a user names it.

runs/<hash>/{config.toml, metrics.jsonl, record.json, checkpoints/, model/}
"""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path
from typing import IO

from dipole.core.ground.errors import ConfigError, RecordError, TrainingError
from dipole.core.ground.files import atomic_write, why
from dipole.core.record import RunRecord, read_record
from dipole.core.train.config import RunConfig, resolve

DEFAULT_RUNS = Path("runs")


class RunFolder:
    """Paths of one run; nothing is created before `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.record = path / "record.json"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.tensorboard = path / "tensorboard"
        self._lock: IO[str] | None = None

    def open(self, config: RunConfig) -> None:
        """Create the folder, lock it for this process and write config.toml.

        Raises:
            TrainingError: the folder cannot be written, or another process trains this run.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 (held as long as the run)
        except OSError as error:
            raise TrainingError(f"cannot write the run folder {self.path}: {why(error)}") from error
        if not _lock(self._lock):
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            self.close()
            raise TrainingError(
                f"another process (pid {owner}) is training this run in {self.path}. "
                "Wait for it, or choose another --runs."
            )
        try:
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()))
            self._lock.flush()
            atomic_write(self.config, config.to_toml())
        except OSError as error:
            self.close()
            raise TrainingError(f"cannot write the run folder {self.path}: {why(error)}") from error

    def close(self) -> None:
        """Release the lock (a killed process releases it as well)."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def clear(self) -> None:
        """Remove what an earlier attempt wrote; other files in the folder are left alone."""
        for path in (self.record, self.metrics):
            path.unlink(missing_ok=True)
        for folder in (self.checkpoints, self.model, self.tensorboard):
            shutil.rmtree(folder, ignore_errors=True)

    def clear_checkpoints(self) -> None:
        """Remove the checkpoints of a finished run: its weights are under model/, and nothing continues it."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def read_record(self) -> RunRecord | None:
        """Return the record, or None where there is none yet."""
        if not self.record.is_file():
            return None
        try:
            return read_record(self.record)
        except RecordError as error:
            raise RecordError(f"{error}\nTo train this run again: --overwrite.") from error

    def finished(self) -> bool:
        """Whether there is the record of a run that came to its end."""
        record = self.read_record()
        return record is not None and record.status == "done"

    def read_config(self) -> RunConfig:
        """Read config.toml back."""
        try:
            return resolve(tomllib.loads(self.config.read_text(encoding="utf-8"))).config
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise RecordError(f"{self.config} cannot be read: {error}") from error


def find_run(text: str, runs: Path) -> RunFolder:
    """Find a run by the path of its folder, or by the first digits of its hash inside `runs`.

    Raises:
        ConfigError: nothing or more than one run fits.
    """
    path = Path(text)
    if path.is_dir() and (path / "config.toml").is_file():
        return RunFolder(path)
    fits = sorted(each for each in runs.glob(f"{text}*") if (each / "config.toml").is_file()) if _is_hash(text) else []
    if len(fits) == 1:
        return RunFolder(fits[0])
    if fits:
        raise ConfigError(f"{text!r} fits {len(fits)} runs: {', '.join(each.name for each in fits)}. Give more digits.")
    if path.is_dir():
        raise ConfigError(f"{path} is no run folder: it has no config.toml.")
    raise ConfigError(f"no run {text!r}: it is neither the folder of a run nor the start of a hash in {runs}/.")


def _is_hash(text: str) -> bool:
    return bool(text) and all(char in "0123456789abcdef" for char in text)


def _lock(file: IO[str]) -> bool:
    """Take an exclusive lock; True as well where the platform or file system has none."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
