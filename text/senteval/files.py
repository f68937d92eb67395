"""Access to the files of one task: what is missing or damaged is one message that names the cause."""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISREG

from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted
from dipole.text.senteval.digests import DIGESTS


class TaskFiles:
    """Files below SentEval's data folder, read for one task; `check`: counts are compared with the published ones.

    `changed`: what was said of files whose checksum is not the known one.
    """

    def __init__(self, task: str, root: Path, check: bool) -> None:
        self.task, self.root, self.check = task, root, check
        self.changed: list[str] = []

    def text(self, relative: str, encoding: str) -> str:
        path = self.root / relative
        try:
            raw = path.read_bytes() if S_ISREG(path.stat().st_mode) else None
        except (FileNotFoundError, NotADirectoryError):
            raw = None
        except OSError as error:
            raise DataError(f"{self.task}: {path} cannot be read ({error.strerror}); look at its permissions") from None
        if raw is None:
            raise DataError(
                f"{self.task}: no file {path}. Put {path.name} into {path.parent}; SentEval's script "
                f"data/{relative.split('/')[0]}/get_transfer_data.bash makes it, and task_path must be the folder that "
                f"holds {relative.split('/')[0]}/."
            )
        if not raw.strip():
            raise DataError(f"{path} is empty; fetch it again")
        head = raw.lstrip(b"\xef\xbb\xbf \r\n\t")[:200].lower()
        if head.startswith((b"<!doctype", b"<html", b"<?xml")) or b"404: not found" in head:
            raise DataError(f"{path} is an error page of a web server, saved by a dead download link; fetch it again")
        if head.startswith(b"version https://git-lfs"):
            raise DataError(f"{path} is a Git LFS pointer, not the data; run `git lfs pull` where it came from")
        self._compare(relative, raw)
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not {encoding}: byte {error.start} is {raw[error.start]:#04x}") from None

    def _compare(self, relative: str, raw: bytes) -> None:
        """Say once that a known file is another one."""
        known, found = DIGESTS.get(relative), hashlib.sha256(raw).hexdigest()
        said = (
            f"{self.root / relative} is not the known file: its sha256 is {found}, expected {known}. "
            "Results on it are not comparable with others'"
        )
        if known not in (None, found) and said not in self.changed:
            self.changed.append(said)
            warnings.warn(f"{self.task}: {said}", UserWarning, stacklevel=2)

    def lines(self, relative: str, encoding: str = "utf-8") -> list[str]:
        """Lines ended by newlines, as a file object yields them."""
        text = self.text(relative, encoding).replace("\r\n", "\n").replace("\r", "\n")
        return text.removesuffix("\n").split("\n")

    def fields(self, relative: str, columns: int) -> Iterator[tuple[int, list[str]]]:
        """Tab-separated fields and line numbers; too few columns is an error with the line's number."""
        for number, line in enumerate(self.lines(relative), 1):
            found = line.strip().split("\t")
            if len(found) < columns:
                raise DataError(
                    f"{self.root / relative}, line {number}: {counted(len(found), 'tab-separated column')}, expected "
                    f"{columns}"
                )
            yield number, found

    def number(self, relative: str, line: int, text: str, kind: Callable = float) -> float:
        try:
            found = kind(text)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise DataError(f"{self.root / relative}, line {line}: {text[:60]!r} is not a number")
        return found

    def score(self, relative: str, line: int, text: str) -> float:
        """A similarity from 0 to 5."""
        found = self.number(relative, line, text)
        if not 0 <= found <= 5:
            raise DataError(f"{self.root / relative}, line {line}: the score {text.strip()[:60]} is none of 0 to 5")
        return found

    def label(self, relative: str, line: int, text: str, classes: int) -> int:
        """A label 0..classes-1."""
        found = self.number(relative, line, text, int)
        if not 0 <= found < classes:
            raise DataError(f"{self.root / relative}, line {line}: label {text[:60]} is none of 0 to {classes - 1}")
        return int(found)

    def expect(self, relative: str, found: int, expected: int, hint: str = "") -> None:
        if self.check and found != expected:
            raise DataError(
                f"{self.root / relative}: {found:,} samples, the published file has {expected:,}.{hint} Results on "
                f"another file are not comparable; fetch it again, or pass check=False to read it as it is."
            )
