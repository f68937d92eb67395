"""Stanford Sentiment Treebank, two classes and five."""

from dipole.text.senteval.files import TaskFiles
from dipole.text.senteval.task import Split, Task

NAMES = ("SST2", "SST5")


def read(name: str, files: TaskFiles) -> Task:
    folder, classes, sizes = "binary", 2, (67349, 872, 1821)
    if name == "SST5":
        folder, classes, sizes = "fine", 5, (8544, 1101, 2210)
    splits = {}
    for split, expected in zip(("train", "dev", "test"), sizes, strict=True):
        relative = f"downstream/SST/{folder}/sentiment-{split}"
        sentences, labels = [], []
        for number, line in enumerate(files.lines(relative), 1):
            if classes == 5:
                label, _, text = line.strip().partition(" ")
            else:
                text, label, *_ = [*line.strip().split("\t"), ""]
            labels.append(files.label(relative, number, label, classes))
            sentences.append(text.split())
        files.expect(relative, len(labels), expected)
        splits[split] = Split([sentences], labels)
    return Task(name, "split", splits, classes=classes)
