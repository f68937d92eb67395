"""TREC: what a question asks for, six classes."""

from dipole.core.utils.errors import DataError
from dipole.text.senteval.files import TaskFiles
from dipole.text.senteval.task import Split, Task

NAMES = ("TREC",)
CLASSES = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")


def read(name: str, files: TaskFiles) -> Task:
    splits = {}
    for split, file, expected in (("train", "train_5500.label", 5452), ("test", "TREC_10.label", 500)):
        relative = f"downstream/TREC/{file}"
        sentences, labels = [], []
        for number, line in enumerate(files.lines(relative, "latin-1"), 1):
            label, colon, rest = line.strip().partition(":")
            if not colon or label not in CLASSES or " " not in rest:
                raise DataError(
                    f"{files.root / relative}, line {number}: expected 'COARSE:fine question' with COARSE one of "
                    f"{', '.join(CLASSES)}; found {line[:60]!r}"
                )
            sentences.append(rest.split(" ", 1)[1].split())
            labels.append(CLASSES.index(label))
        files.expect(relative, len(labels), expected)
        marks = sum(any(c in word for c in "`'") for sentence in sentences for word in sentence)
        if files.check and marks:
            raise DataError(
                f"{files.root / relative}: {marks} words hold back-ticks or apostrophes, which SentEval's script "
                'removes; remove them (sed "s/[\\`\']//g"), or pass check=False to read it as it is.'
            )
        splits[split] = Split([sentences], labels)
    return Task(name, "holdout", splits, classes=6, shuffled="rows")
