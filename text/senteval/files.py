"""Access to the files of one task: what is missing or damaged is one message that names the cause."""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISREG

from dipole.core.train.data_sets import how_to_get
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted

# SHA-256 of the files that SentEval's scripts make. Results on other files are not comparable.
DIGESTS = {
    "downstream/CR/custrev.neg": "ec94532766f6f962094841ab3bee2ad6f232f996c3756825a91e78bcc294750f",
    "downstream/CR/custrev.pos": "91a20a4ffeb5d38a39a4087bb247e16538aff21e7d621ae59738379f39f21732",
    "downstream/MPQA/mpqa.neg": "8da6e035fa4cea02f0555091096b29a6b3995ff0adf41fad25008dcee066b79e",
    "downstream/MPQA/mpqa.pos": "7487dbb74c77383e60b292845495163a9e21fb70a4fdacdda933413e43163f0d",
    "downstream/MR/rt-polarity.neg": "c4ac36eaa8adc8ee31c31f69594bfbe68d83ef5b6db53f1f19b28c0be52f3999",
    "downstream/MR/rt-polarity.pos": "34e5b0da2d491e46b700b00afe735aaae0962bcfe4f7f22b2d8077e714fa370f",
    "downstream/MRPC/msr_paraphrase_test.txt": "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
    "downstream/MRPC/msr_paraphrase_train.txt": "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
    "downstream/SUBJ/subj.objective": "d8ccd43f1674f1c17e4ab717564e3561cfb719b0db4cfb19e5677427c68ff8a1",
    "downstream/SUBJ/subj.subjective": "274c2ffe59c204dc4df779848561786f59a98cc20dda3cfdd7d9f76a4f730710",
    "downstream/TREC/TREC_10.label": "86ad53c8fc9d397ab2f4be7c967d8efb470b260140557d3e57afad69d1b88b76",
    "downstream/TREC/train_5500.label": "8bd6e79493f43bbd22c364587366a1dced54e1e31259eaa92721a0f526031116",
}


class TaskFiles:
    """Files below SentEval's data folder, read for one task. With `check`, counts are compared with the published ones.

    `changed` describes files whose checksum is not the known one.
    """

    def __init__(self, task: str, root: Path, check: bool) -> None:
        self.task, self.root, self.check = task, root, check
        self.changed: list[str] = []

    def text(self, relative: str, encoding: str) -> str:
        path = self.root / relative
        raw = None
        try:
            if S_ISREG(path.stat().st_mode):
                raw = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise DataError(f"{self.task}: {path} cannot be read ({error.strerror}); look at its permissions") from None
        if raw is None:
            raise DataError(
                f"{self.task}: no file {path}.{how_to_get('senteval')} In Python, task_path is the folder that holds "
                f"{relative.split('/')[0]}/."
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
        """Tab-separated fields and line numbers. Too few columns is an error with the line number."""
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
