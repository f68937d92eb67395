"""STS Benchmark: similarity of sentence pairs, learned as SentEval does, or by cosine as SimCSE does."""

from dipole.text.senteval.files import TaskFiles
from dipole.text.senteval.task import Split, Task

NAMES = ("STSBenchmark", "STSBenchmark-cosine")


def read(name: str, files: TaskFiles) -> Task:
    splits = {}
    for split, expected in (("train", 5749), ("dev", 1500), ("test", 1379)):
        relative = f"downstream/STS/STSBenchmark/sts-{split}.csv"
        left, right, labels = [], [], []
        for number, fields in files.fields(relative, 7):
            left.append(fields[5].split())
            right.append(fields[6].split())
            labels.append(files.score(relative, number, fields[4]))
        files.expect(relative, len(labels), expected)
        splits[split] = Split([left, right], labels)
    if name.endswith("-cosine"):
        return Task(name, "sts", splits, pairs=True)
    return Task(name, "relatedness", splits, classes=5, pairs=True)
