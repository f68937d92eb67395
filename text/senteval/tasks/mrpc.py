"""MRPC: whether one sentence says what the other does."""

from dipole.core.utils.errors import DataError
from dipole.text.senteval.files import TaskFiles
from dipole.text.senteval.task import Split, Task

NAMES = ("MRPC",)


def read(name: str, files: TaskFiles) -> Task:
    splits = {}
    for split, expected in (("train", 4076), ("test", 1725)):
        relative = f"downstream/MRPC/msr_paraphrase_{split}.txt"
        left, right, labels = [], [], []
        for number, fields in files.fields(relative, 5):
            if number > 1:  # the header
                left.append(fields[3].split())
                right.append(fields[4].split())
                labels.append(files.label(relative, number, fields[0], 2))
        files.expect(relative, len(labels), expected)
        if files.check and "<QUOTE>" in files.text(relative, "utf-8"):
            raise DataError(
                f"{files.root / relative}: double quotes stand as <QUOTE>; this copy was altered. Fetch the file "
                f"again, or pass check=False to read it as it is."
            )
        splits[split] = Split([left, right], labels)
    return Task(name, "holdout", splits, classes=2, pairs=True, f1=True, shuffled="folds")
