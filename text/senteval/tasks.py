"""SentEval's tasks. `READERS` maps each name to the function that reads it, and the `Task` says how it is scored."""

import hashlib
import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Literal

from dipole.core.train.data_sets import how_to_get
from dipole.core.utils.errors import DataError, OptionError, nearest
from dipole.core.utils.text import counted, warn

Sentence = list[str]
Label = Callable[[str, int, list[str]], float]  # of a file, a line number and its fields
SIX_TASKS = ("MR", "CR", "SUBJ", "MPQA", "TREC", "MRPC")


@dataclass(frozen=True)
class Split:
    """Part of a task.

    Args:
        sentences: one list of sentences for classification, two for pairs, in the order SentEval encodes them.
        labels: of each sentence or pair.
    """

    sentences: list[list[Sentence]]  # one list per side
    labels: Sequence[float]

    def __len__(self) -> int:
        return len(self.labels)

    def sorted(self) -> "Split":
        """Order by sentence lengths, then label: SentEval draws its folds on this order."""
        order = sorted(range(len(self)), key=lambda i: (*(len(side[i]) for side in self.sentences), self.labels[i]))
        return take(self, order)


def take(split: Split, order: Sequence[int]) -> Split:
    return Split([[side[i] for i in order] for side in split.sentences], [split.labels[i] for i in order])


@dataclass(frozen=True)
class Task:
    """A task as read from disk.

    Args:
        name: as in SentEval.
        kind: how it is scored: "nested" (cross-validation inside cross-validation), "holdout" (cross-validation on
            train, one test), "split" (train, dev, test), "relatedness" (regression on train, dev, test) or "sts" (no
            training).
        splits: by name, in the order of the files.
        classes: number of classes, or 0 if labels are scores.
        pairs: of two sentences each.
        f1: F1 of class 1 is reported too, and under "skip-thoughts" chooses the regularisation.
        linear: SentEval allows its classifier no hidden units here, whatever `nhid` says.
        changed: what was said of files that are not the known ones.
        drops_empty: the skip-thoughts scripts leave empty sentences out.
        shuffled: these scripts shuffle "rows" of a "holdout" task before its inner folds are cut, or its "folds"; None:
            neither.
    """

    name: str
    kind: Literal["nested", "holdout", "split", "relatedness", "sts"]
    splits: dict[str, Split]
    classes: int = 0
    pairs: bool = False
    f1: bool = False
    linear: bool = False
    changed: tuple[str, ...] = ()
    drops_empty: bool = False
    shuffled: Literal["rows", "folds"] | None = None

    def samples(self) -> list[Sentence]:
        """Every sentence, in the order in which SentEval hands them to `prepare`."""
        splits = [split.sorted() if self.kind == "sts" else split for split in self.splits.values()]
        return [sentence for split in splits for side in split.sentences for sentence in side]


_READ = tomllib.loads(Path(__file__).with_name("files.toml").read_text(encoding="utf-8"))
SAMPLES, DIGESTS, STS, PROBING = (_READ[name] for name in ("samples", "sha256", "sts", "probing"))


class TaskFiles:
    """Files below SentEval's data folder, for one task. With `check`, counts are compared with the published ones."""

    def __init__(self, task: str, root: Path, check: bool) -> None:
        self.task, self.root, self.check = task, root, check
        self.changed: list[str] = []  # files whose checksum is not the known one

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
            raise DataError(f"{path} is empty. Fetch it again")
        head = raw.lstrip(b"\xef\xbb\xbf \r\n\t")[:200].lower()
        if head.startswith((b"<!doctype", b"<html", b"<?xml")) or b"404: not found" in head:
            raise DataError(f"{path} is an error page of a web server, saved by a dead download link. Fetch it again")
        if head.startswith(b"version https://git-lfs"):
            raise DataError(f"{path} is a Git LFS pointer, not the data. Run `git lfs pull` where it came from")
        known, found = DIGESTS.get(relative), hashlib.sha256(raw).hexdigest()
        said = f"{path} is not the known file: its sha256 is {found}, expected {known}. "
        said += "Results on it are not comparable with others'"
        if known not in (None, found) and said not in self.changed:
            self.changed.append(said)
            warn(f"{self.task}: {said}")
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not {encoding}: byte {error.start} is {raw[error.start]:#04x}") from None

    def error(self, relative: str, line: int, problem: str) -> DataError:
        return DataError(f"{self.root / relative}, line {line}: {problem}")

    def lines(self, relative: str, encoding: str = "utf-8") -> list[str]:
        """Lines ended by newlines, as a file object yields them."""
        text = self.text(relative, encoding).replace("\r\n", "\n").replace("\r", "\n")
        return text.removesuffix("\n").split("\n")

    def fields(self, relative: str, columns: int) -> Iterator[tuple[int, list[str]]]:
        """Tab-separated fields and line numbers. Too few columns is an error with the line number."""
        for number, line in enumerate(self.lines(relative), 1):
            found = line.strip().split("\t")
            if len(found) < columns:
                has = counted(len(found), "tab-separated column")
                raise self.error(relative, number, f"{has}, expected {columns}")
            yield number, found

    def number(self, relative: str, line: int, text: str, most: int, kind: type[int | float] = int) -> int | float:
        """Return a label, or a similarity of the kind float, from 0 to `most`."""
        try:
            found = kind(text)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise self.error(relative, line, f"{text[:60]!r} is not a number")
        if not 0 <= found <= most:
            what = {int: "label", float: "score"}[kind]
            raise self.error(relative, line, f"the {what} {text.strip()[:60]} is none of 0 to {most}")
        return found

    def numbers(self, column: int, most: int, kind: type[int | float] = int) -> Label:
        """Return how `pairs` reads labels that are numbers in a column."""
        return lambda relative, line, fields: self.number(relative, line, fields[column], most, kind)

    def pairs(self, relative: str, columns: int, left: int, label: Label, head: int = 0) -> Split:
        """Read pairs of sentences in the columns `left` and `left + 1`, below `head` lines."""
        rows = list(self.fields(relative, columns))[head:]
        sides = [[fields[column].split() for _, fields in rows] for column in (left, left + 1)]
        split = Split(sides, [label(relative, number, fields) for number, fields in rows])
        self.expect(relative, len(split))
        return split

    def expect(self, relative: str, found: int, hint: str = "") -> None:
        """Raise DataError unless a file holds as many samples as the published one."""
        expected = SAMPLES[relative]
        if self.check and found != expected:
            raise DataError(
                f"{self.root / relative}: {found:,} samples, the published file has {expected:,}.{hint} Results on "
                f"another file are not comparable. Fetch it again, or pass check=False to read it as it is."
            )


# Files, label 1 first.
BINARY = {
    "MR": ("MR/rt-polarity.pos", "MR/rt-polarity.neg"),
    "CR": ("CR/custrev.pos", "CR/custrev.neg"),
    "SUBJ": ("SUBJ/subj.objective", "SUBJ/subj.subjective"),
    "MPQA": ("MPQA/mpqa.pos", "MPQA/mpqa.neg"),
}
QUESTIONS = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
JUDGMENTS = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
PARTS = {"tr": "train", "va": "dev", "te": "test"}


def binary(name: str, files: TaskFiles) -> Task:
    """Movie and product reviews, subjectivity, opinion polarity: cross-validated, two classes."""
    sentences: list[Sentence] = []
    labels: list[float] = []
    contents = []
    for label, file in zip((1, 0), BINARY[name], strict=True):
        relative = f"downstream/{file}"
        text = files.text(relative, "latin-1")
        lines = text.splitlines()
        is_raw = len(lines) != len(files.lines(relative, "latin-1"))
        hint = (
            " It holds control characters that end a line (0x85, NEL) because it did not pass through `cat -v`, as "
            "SentEval's script does."
        )
        files.expect(relative, len(lines), hint if is_raw else "")
        contents.append(text)
        sentences += [line.split() for line in lines]
        labels += [label] * len(lines)
    if files.check and contents[0] == contents[1]:
        raise DataError(f"{name}: both files hold the same text; one is a copy of the other and must be fetched again")
    splits = {"all": Split([sentences], labels)}
    return Task(name, "nested", splits, classes=2, drops_empty=name in ("CR", "MPQA"))


def trec(name: str, files: TaskFiles) -> Task:
    """What a question asks for, six classes."""
    splits = {}
    for split, file in (("train", "train_5500.label"), ("test", "TREC_10.label")):
        relative = f"downstream/TREC/{file}"
        sentences, labels = [], []
        for number, line in enumerate(files.lines(relative, "latin-1"), 1):
            label, colon, rest = line.strip().partition(":")
            if not colon or label not in QUESTIONS or " " not in rest:
                expected_line = f"'COARSE:fine question' with COARSE one of {', '.join(QUESTIONS)}"
                raise files.error(relative, number, f"expected {expected_line}; found {line[:60]!r}")
            sentences.append(rest.split(" ", 1)[1].split())
            labels.append(QUESTIONS.index(label))
        files.expect(relative, len(labels))
        marks = sum(any(c in word for c in "`'") for sentence in sentences for word in sentence)
        if files.check and marks:
            raise DataError(
                f"{files.root / relative}: {marks} words hold back-ticks or apostrophes, which SentEval's script "
                'removes. Remove them (sed "s/[\\`\']//g"), or pass check=False to read it as it is.'
            )
        splits[split] = Split([sentences], labels)
    return Task(name, "holdout", splits, classes=6, shuffled="rows")


def sst(name: str, files: TaskFiles) -> Task:
    """Stanford Sentiment Treebank, two classes and five."""
    folder, classes = {"SST2": ("binary", 2), "SST5": ("fine", 5)}[name]
    splits = {}
    for split in ("train", "dev", "test"):
        relative = f"downstream/SST/{folder}/sentiment-{split}"
        sentences, labels = [], []
        for number, line in enumerate(files.lines(relative), 1):
            if classes == 5:
                label, _, text = line.strip().partition(" ")
            else:
                text, label, *_ = [*line.strip().split("\t"), ""]
            labels.append(files.number(relative, number, label, classes - 1))
            sentences.append(text.split())
        files.expect(relative, len(labels))
        splits[split] = Split([sentences], labels)
    return Task(name, "split", splits, classes=classes)


def mrpc(name: str, files: TaskFiles) -> Task:
    """Whether one sentence says what the other does."""
    label, splits = files.numbers(0, 1), {}
    for split in ("train", "test"):
        relative = f"downstream/MRPC/msr_paraphrase_{split}.txt"
        splits[split] = files.pairs(relative, 5, 3, label, head=1)
        if files.check and "<QUOTE>" in files.text(relative, "utf-8"):
            raise DataError(
                f"{files.root / relative}: double quotes stand as <QUOTE>; this copy was altered. Fetch the file "
                f"again, or pass check=False to read it as it is."
            )
    return Task(name, "holdout", splits, classes=2, pairs=True, f1=True, shuffled="folds")


def sick(name: str, files: TaskFiles) -> Task:
    """Relatedness (by cosine, or learned) and entailment of sentence pairs."""

    def label(relative: str, number: int, fields: list[str]) -> float:
        if name != "SICKEntailment":
            return files.number(relative, number, fields[3], 5, float)
        if fields[4] not in JUDGMENTS:
            raise files.error(relative, number, f"label {fields[4]!r} is none of {', '.join(JUDGMENTS)}")
        return JUDGMENTS.index(fields[4])

    splits = {
        split: files.pairs(f"downstream/SICK/SICK_{part}.txt", 5, 1, label, head=1)
        for split, part in (("train", "train"), ("dev", "trial"), ("test", "test_annotated"))
    }
    if name == "SICKEntailment":
        return Task(name, "split", splits, classes=3, pairs=True)
    return _similarity(name, splits)


def sts_benchmark(name: str, files: TaskFiles) -> Task:
    """Similarity of sentence pairs, by cosine as SimCSE does, or learned as SentEval does."""
    label = files.numbers(4, 5, float)
    folder = "STSBenchmark" if name != "STSBenchmark-fix" else name
    splits = {
        split: files.pairs(f"downstream/STS/{folder}/sts-{split}.csv", 7, 5, label)
        for split in ("train", "dev", "test")
    }
    return _similarity(name, splits)


def _similarity(name: str, splits: dict[str, Split]) -> Task:
    if name.endswith("-finetune"):
        return Task(name, "relatedness", splits, classes=5, pairs=True)
    return Task(name, "sts", splits, pairs=True)


def sts(name: str, files: TaskFiles) -> Task:
    """Similarity of sentence pairs of 2012 to 2016, nothing learned."""
    splits = {}
    for dataset in STS[name]:
        inputs = f"downstream/STS/{name}-en-test/STS.input.{dataset}.txt"
        golds = f"downstream/STS/{name}-en-test/STS.gs.{dataset}.txt"
        pairs = [fields for _, fields in files.fields(inputs, 2)]
        scores = files.lines(golds)
        if len(pairs) != len(scores):
            raise DataError(
                f"{files.root / golds}: {counted(len(scores), 'score')} for {counted(len(pairs), 'pair')} of {inputs}"
            )
        judged = [i for i, score in enumerate(scores) if score.strip()]  # pairs without a gold score are left out
        splits[dataset] = Split(
            [[pairs[i][side].split() for i in judged] for side in (0, 1)],
            [files.number(golds, i + 1, scores[i], 5, float) for i in judged],
        )
    return Task(name, "sts", splits, pairs=True)


def probing(name: str, files: TaskFiles) -> Task:
    """Which property of a sentence can be read from its vector."""
    relative = f"probing/{PROBING[name]}.txt"
    found: dict[str, tuple[list[Sentence], list[str]]] = {split: ([], []) for split in PARTS.values()}
    for number, (part, label, *rest) in files.fields(relative, 3):
        if part not in PARTS:
            raise files.error(relative, number, f"split {part!r} is none of {', '.join(PARTS)}")
        sentences, labels = found[PARTS[part]]
        sentences.append(rest[-1].split())
        labels.append(label)
    index = {label: i for i, label in enumerate(sorted(set(found["train"][1])))}
    splits = {}
    for split, (sentences, labels) in found.items():
        unknown = set(labels) - set(index)
        if unknown or not labels:
            raise DataError(
                f"{files.root / relative}: the {split} part is empty or has labels unseen in training: {unknown}"
            )
        splits[split] = Split([sentences], [index[label] for label in labels])
    return Task(name, "split", splits, classes=len(index), linear=name == "WordContent")


READERS: dict[str, Callable[[str, TaskFiles], Task]] = {
    **dict.fromkeys(BINARY, binary),
    "MRPC": mrpc,
    **dict.fromkeys(PROBING, probing),
    **dict.fromkeys(("SICKRelatedness", "SICKRelatedness-cosine", "SICKRelatedness-finetune", "SICKEntailment"), sick),
    **dict.fromkeys(("SST2", "SST5"), sst),
    **dict.fromkeys(STS, sts),
    **{f"STSBenchmark{kind}": sts_benchmark for kind in ("", "-cosine", "-finetune", "-fix")},
    "TREC": trec,
}


def load_task(name: str, task_path: str | Path, check: bool = True) -> Task:
    """Read a task from SentEval's data folder.

    Args:
        name: as in SimCSE's SentEval: CR, MR, MPQA, SUBJ, TREC, MRPC, SST2, SST5, SICKRelatedness, SICKEntailment,
            STSBenchmark, STS12 to STS16, and the ten probing tasks. SICKRelatedness and STSBenchmark are scored by
            cosine (with or without "-cosine"). With "-finetune" they are the regression of the first SentEval.
            STSBenchmark-fix reads the folder of this name.
        task_path: the data folder, which holds `downstream/` and `probing/`.
        check: compare counts with the published ones and look for known damage.

    Returns:
        The sentences and labels of each split.

    Raises:
        OptionError: `task_path` is no path.
        DataError: unknown name, or a file is missing, empty, or is not the file that results are compared on.
    """
    if not isinstance(task_path, str | Path):
        raise OptionError(f"task_path must be the folder that holds SentEval's downstream/, got {task_path!r:.60}")
    if not isinstance(name, str) or name not in READERS:
        raise DataError(f"unknown task {name!r}; known: {', '.join(READERS)}.{nearest(str(name), READERS)}")
    files = TaskFiles(name, Path(task_path), check)
    task = READERS[name](name, files)
    empty = [split for split, found in task.splits.items() if not len(found)]
    if empty:
        raise DataError(f"{name}: no sample in {', '.join(empty)} below {files.root}. Fetch the files again")
    return replace(task, changed=tuple(files.changed))
