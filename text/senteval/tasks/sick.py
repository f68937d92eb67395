"""SICK: relatedness (learned, or by cosine as SimCSE does) and entailment of sentence pairs."""

from dipole.core.utils.errors import DataError
from dipole.text.senteval.files import TaskFiles
from dipole.text.senteval.task import Split, Task

NAMES = ("SICKRelatedness", "SICKEntailment", "SICKRelatedness-cosine")
LABELS = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")


def read(name: str, files: TaskFiles) -> Task:
    entailment = name == "SICKEntailment"
    splits = {}
    parts = (
        ("train", "SICK_train.txt", 4500),
        ("dev", "SICK_trial.txt", 500),
        ("test", "SICK_test_annotated.txt", 4927),
    )
    for split, file, expected in parts:
        relative = f"downstream/SICK/{file}"
        left, right = [], []
        labels: list[float] = []
        for number, fields in files.fields(relative, 5):
            if number == 1:  # the header
                continue
            left.append(fields[1].split())
            right.append(fields[2].split())
            if entailment:
                if fields[4] not in LABELS:
                    raise DataError(
                        f"{files.root / relative}, line {number}: label {fields[4]!r} is none of {', '.join(LABELS)}"
                    )
                labels.append(LABELS.index(fields[4]))
            else:
                labels.append(files.score(relative, number, fields[3]))
        files.expect(relative, len(labels), expected)
        splits[split] = Split([left, right], labels)
    if name.endswith("-cosine"):
        return Task(name, "sts", splits, pairs=True)
    if entailment:
        return Task(name, "split", splits, classes=3, pairs=True)
    return Task(name, "relatedness", splits, classes=5, pairs=True)
