"""SentEval's files: where each task lies, how it is read, and the damage these files are known to come with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dipole.core.ground.errors import DataError, nearest

Sentence = list[str]


@dataclass(frozen=True)
class Split:
    """Part of a task: one sentence list for classification, two for pairs, in the order SentEval encodes them."""

    sentences: list[list[Sentence]]  # one list per side
    labels: Sequence[float]

    def __len__(self) -> int:
        return len(self.labels)

    def sorted(self) -> "Split":
        """Order by sentence lengths, then label: SentEval draws its folds on this order."""
        order = sorted(range(len(self)), key=lambda i: (*(len(side[i]) for side in self.sentences), self.labels[i]))
        return Split([[side[i] for i in order] for side in self.sentences], [self.labels[i] for i in order])


@dataclass(frozen=True)
class Task:
    """A task as read from disk, its splits in the order of the files.

    `kind` says how it is scored: "nested" (cross-validation inside cross-validation), "holdout" (cross-validation on
    train, one test), "split" (train, dev, test), "relatedness" (regression on train, dev, test) or "sts" (no training).
    """

    name: str
    kind: str
    splits: dict[str, Split]
    classes: int = 0
    pairs: bool = False

    def samples(self) -> list[Sentence]:
        """Every sentence, in the order in which SentEval hands them to `prepare`."""
        splits = [split.sorted() if self.kind == "sts" else split for split in self.splits.values()]
        return [sentence for split in splits for side in split.sentences for sentence in side]


def load_task(name: str, task_path: str | Path, check: bool = True) -> Task:
    """Read a task below `task_path`, SentEval's data folder (the one that holds `downstream/` and `probing/`).

    Args:
        name: as in SentEval: CR, MR, MPQA, SUBJ, TREC, MRPC, SST2, SST5, SICKRelatedness, SICKEntailment, STSBenchmark,
            STS12 to STS16, and the ten probing tasks.
        check: compare counts with the published ones and look for known damage.

    Raises:
        DataError: unknown name; a file is missing, empty, or is not the file that results are compared on.
    """
    if name not in READERS:
        raise DataError(f"unknown task {name!r}; known: {', '.join(READERS)}.{nearest(name, READERS)}")
    return READERS[name](name, _Folder(name, Path(task_path), check))


class _Folder:
    """Access to the files of one task, with the errors that belong to it."""

    def __init__(self, task: str, root: Path, check: bool) -> None:
        self.task, self.root, self.check = task, root, check

    def text(self, relative: str, encoding: str) -> str:
        path = self.root / relative
        if not path.is_file():
            raise DataError(
                f"{self.task}: no file {path}. Put {path.name} into {path.parent}; SentEval's script "
                f"data/{relative.split('/')[0]}/get_transfer_data.bash makes it, and task_path must be the folder that "
                f"holds {relative.split('/')[0]}/."
            )
        raw = path.read_bytes()
        if not raw.strip():
            raise DataError(f"{path} is empty; fetch it again")
        head = raw.lstrip(b"\xef\xbb\xbf \r\n\t")[:200].lower()
        if head.startswith((b"<!doctype", b"<html", b"<?xml")) or b"404: not found" in head:
            raise DataError(f"{path} is an error page of a web server, saved by a dead download link; fetch it again")
        if head.startswith(b"version https://git-lfs"):
            raise DataError(f"{path} is a Git LFS pointer, not the data; run `git lfs pull` where it came from")
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not {encoding}: byte {error.start} is {raw[error.start]:#04x}") from None

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
                    f"{self.root / relative}, line {number}: {len(found)} tab-separated columns, expected {columns}"
                )
            yield number, found

    def number(self, relative: str, line: int, text: str, kind: Callable = float) -> float:
        try:
            return kind(text)
        except ValueError:
            raise DataError(f"{self.root / relative}, line {line}: {text!r} is not a number") from None

    def expect(self, relative: str, found: int, expected: int, hint: str = "") -> None:
        if self.check and found != expected:
            raise DataError(
                f"{self.root / relative}: {found:,} samples, the published file has {expected:,}.{hint} Results on "
                f"another file are not comparable; fetch it again, or pass check=False to read it as it is."
            )


# Files of the four cross-validated tasks, label 1 first, with the published number of lines of each.
BINARY = {
    "MR": (("MR/rt-polarity.pos", 5331), ("MR/rt-polarity.neg", 5331)),
    "CR": (("CR/custrev.pos", 2407), ("CR/custrev.neg", 1368)),
    "SUBJ": (("SUBJ/subj.objective", 5000), ("SUBJ/subj.subjective", 5000)),
    "MPQA": (("MPQA/mpqa.pos", 3312), ("MPQA/mpqa.neg", 7294)),
}


def _binary(name: str, folder: _Folder) -> Task:
    sentences: list[Sentence] = []
    labels: list[float] = []
    contents = []
    for label, (file, expected) in zip((1, 0), BINARY[name], strict=True):
        relative = f"downstream/{file}"
        text = folder.text(relative, "latin-1")
        lines = text.splitlines()
        hint = ""
        if len(lines) != len(folder.lines(relative, "latin-1")):
            hint = (
                " It holds control characters that end a line (0x85, NEL) because it did not pass through `cat -v`, as"
                " SentEval's script does."
            )
        folder.expect(relative, len(lines), expected, hint)
        contents.append(text)
        sentences += [line.split() for line in lines]
        labels += [label] * len(lines)
    if folder.check and contents[0] == contents[1]:
        raise DataError(f"{name}: both files hold the same text; one is a copy of the other and must be fetched again")
    return Task(name, "nested", {"all": Split([sentences], labels)}, classes=2)


TREC_CLASSES = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")


def _trec(name: str, folder: _Folder) -> Task:
    splits = {}
    for split, file, expected in (("train", "train_5500.label", 5452), ("test", "TREC_10.label", 500)):
        relative = f"downstream/TREC/{file}"
        sentences, labels = [], []
        for number, line in enumerate(folder.lines(relative, "latin-1"), 1):
            label, colon, rest = line.strip().partition(":")
            if not colon or label not in TREC_CLASSES or " " not in rest:
                raise DataError(
                    f"{folder.root / relative}, line {number}: expected 'COARSE:fine question' with COARSE one of "
                    f"{', '.join(TREC_CLASSES)}; found {line[:60]!r}"
                )
            sentences.append(rest.split(" ", 1)[1].split())
            labels.append(TREC_CLASSES.index(label))
        folder.expect(relative, len(labels), expected)
        marks = sum(any(c in word for c in "`'") for sentence in sentences for word in sentence)
        if folder.check and marks:
            raise DataError(
                f"{folder.root / relative}: {marks} words hold back-ticks or apostrophes, which SentEval's script "
                'removes; remove them (sed "s/[\\`\']//g"), or pass check=False to read it as it is.'
            )
        splits[split] = Split([sentences], labels)
    return Task(name, "holdout", splits, classes=6)


def _mrpc(name: str, folder: _Folder) -> Task:
    splits = {}
    for split, expected in (("train", 4076), ("test", 1725)):
        relative = f"downstream/MRPC/msr_paraphrase_{split}.txt"
        left, right, labels = [], [], []
        for number, fields in folder.fields(relative, 5):
            if number > 1:  # the header
                left.append(fields[3].split())
                right.append(fields[4].split())
                labels.append(folder.number(relative, number, fields[0], int))
        folder.expect(relative, len(labels), expected)
        if folder.check and "<QUOTE>" in folder.text(relative, "utf-8"):
            raise DataError(
                f"{folder.root / relative}: double quotes stand as <QUOTE>; this copy was altered. Fetch the file "
                f"again, or pass check=False to read it as it is."
            )
        splits[split] = Split([left, right], labels)
    return Task(name, "holdout", splits, classes=2, pairs=True)


def _sst(name: str, folder: _Folder) -> Task:
    fine = name == "SST5"
    sizes = (8544, 1101, 2210) if fine else (67349, 872, 1821)
    splits = {}
    for split, expected in zip(("train", "dev", "test"), sizes, strict=True):
        relative = f"downstream/SST/{'fine' if fine else 'binary'}/sentiment-{split}"
        sentences, labels = [], []
        for number, line in enumerate(folder.lines(relative), 1):
            label, _, text = line.strip().partition(" ") if fine else reversed_partition(line.strip())
            labels.append(folder.number(relative, number, label, int))
            sentences.append(text.split())
        folder.expect(relative, len(labels), expected)
        splits[split] = Split([sentences], labels)
    return Task(name, "split", splits, classes=5 if fine else 2)


def reversed_partition(line: str) -> tuple[str, str, str]:
    """Split 'sentence TAB label' into label, tab, sentence."""
    text, tab, label = line.partition("\t")
    return label.split("\t")[0], tab, text


SICK_LABELS = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")


def _sick(name: str, folder: _Folder) -> Task:
    entailment = name == "SICKEntailment"
    splits = {}
    files = (
        ("train", "SICK_train.txt", 4500),
        ("dev", "SICK_trial.txt", 500),
        ("test", "SICK_test_annotated.txt", 4927),
    )
    for split, file, expected in files:
        relative = f"downstream/SICK/{file}"
        left, right = [], []
        labels: list[float] = []
        for number, fields in folder.fields(relative, 5):
            if number == 1:  # the header
                continue
            left.append(fields[1].split())
            right.append(fields[2].split())
            if entailment:
                if fields[4] not in SICK_LABELS:
                    raise DataError(
                        f"{folder.root / relative}, line {number}: label {fields[4]!r} is none of "
                        f"{', '.join(SICK_LABELS)}"
                    )
                labels.append(SICK_LABELS.index(fields[4]))
            else:
                labels.append(folder.number(relative, number, fields[3]))
        folder.expect(relative, len(labels), expected)
        splits[split] = Split([left, right], labels)
    return Task(name, "split" if entailment else "relatedness", splits, classes=3 if entailment else 5, pairs=True)


def _sts_benchmark(name: str, folder: _Folder) -> Task:
    splits = {}
    for split, expected in (("train", 5749), ("dev", 1500), ("test", 1379)):
        relative = f"downstream/STS/STSBenchmark/sts-{split}.csv"
        left, right, labels = [], [], []
        for number, fields in folder.fields(relative, 7):
            left.append(fields[5].split())
            right.append(fields[6].split())
            labels.append(folder.number(relative, number, fields[4]))
        folder.expect(relative, len(labels), expected)
        splits[split] = Split([left, right], labels)
    return Task(name, "relatedness", splits, classes=5, pairs=True)


STS = {
    "STS12": ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "STS13": ("FNWN", "headlines", "OnWN"),
    "STS14": ("deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    "STS15": ("answers-forums", "answers-students", "belief", "headlines", "images"),
    "STS16": ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}


def _sts(name: str, folder: _Folder) -> Task:
    splits = {}
    for dataset in STS[name]:
        inputs = f"downstream/STS/{name}-en-test/STS.input.{dataset}.txt"
        golds = f"downstream/STS/{name}-en-test/STS.gs.{dataset}.txt"
        pairs = [fields for _, fields in folder.fields(inputs, 2)]
        scores = folder.lines(golds)
        if len(pairs) != len(scores):
            raise DataError(f"{folder.root / golds}: {len(scores)} scores for {len(pairs)} pairs of {inputs}")
        kept = [i for i, score in enumerate(scores) if score.strip()]  # pairs without a gold score are not judged
        splits[dataset] = Split(
            [[pairs[i][side].split() for i in kept] for side in (0, 1)],
            [folder.number(golds, i + 1, scores[i]) for i in kept],
        )
    return Task(name, "sts", splits, pairs=True)


PROBING = {
    "Length": "sentence_length",
    "WordContent": "word_content",
    "Depth": "tree_depth",
    "TopConstituents": "top_constituents",
    "BigramShift": "bigram_shift",
    "Tense": "past_present",
    "SubjNumber": "subj_number",
    "ObjNumber": "obj_number",
    "OddManOut": "odd_man_out",
    "CoordinationInversion": "coordination_inversion",
}


def _probing(name: str, folder: _Folder) -> Task:
    relative = f"probing/{PROBING[name]}.txt"
    names = {"tr": "train", "va": "dev", "te": "test"}
    found: dict[str, tuple[list[Sentence], list[str]]] = {split: ([], []) for split in names.values()}
    for number, fields in folder.fields(relative, 3):
        if fields[0] not in names:
            raise DataError(
                f"{folder.root / relative}, line {number}: split {fields[0]!r} is none of {', '.join(names)}"
            )
        found[names[fields[0]]][0].append(fields[-1].split())
        found[names[fields[0]]][1].append(fields[1])
    index = {label: i for i, label in enumerate(sorted(set(found["train"][1])))}
    splits = {}
    for split, (sentences, labels) in found.items():
        unknown = set(labels) - set(index)
        if unknown or not labels:
            raise DataError(
                f"{folder.root / relative}: the {split} part is empty or has labels unseen in training: {unknown}"
            )
        splits[split] = Split([sentences], [index[label] for label in labels])
    return Task(name, "split", splits, classes=len(index))


READERS: dict[str, Callable[[str, _Folder], Task]] = {
    **dict.fromkeys(("MR", "CR", "SUBJ", "MPQA"), _binary),
    "TREC": _trec,
    "MRPC": _mrpc,
    "SST2": _sst,
    "SST5": _sst,
    "SICKRelatedness": _sick,
    "SICKEntailment": _sick,
    "STSBenchmark": _sts_benchmark,
    **dict.fromkeys(STS, _sts),
    **dict.fromkeys(PROBING, _probing),
}
