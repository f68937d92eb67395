"""Stanford Sentiment Treebank, two classes and five."""

from dipole.text.senteval.files import TaskFiles
from dipole.text.senteval.task import Split, Task

NAMES = ("SST2", "SST5")


def read(name: str, files: TaskFiles) -> Task:
    fine = name == "SST5"
    sizes = (8544, 1101, 2210) if fine else (67349, 872, 1821)
    splits = {}
    for split, expected in zip(("train", "dev", "test"), sizes, strict=True):
        relative = f"downstream/SST/{'fine' if fine else 'binary'}/sentiment-{split}"
        sentences, labels = [], []
        for number, line in enumerate(files.lines(relative), 1):
            label, _, text = line.strip().partition(" ") if fine else reversed_partition(line.strip())
            labels.append(files.label(relative, number, label, 5 if fine else 2))
            sentences.append(text.split())
        files.expect(relative, len(labels), expected)
        splits[split] = Split([sentences], labels)
    return Task(name, "split", splits, classes=5 if fine else 2)


def reversed_partition(line: str) -> tuple[str, str, str]:
    """Split 'sentence TAB label' into label, tab, sentence."""
    text, tab, label = line.partition("\t")
    return label.split("\t")[0], tab, text
