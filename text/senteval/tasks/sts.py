"""STS 2012 to 2016: similarity of sentence pairs, nothing learned."""

from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted
from dipole.text.senteval.files import TaskFiles
from dipole.text.senteval.task import Split, Task

STS = {
    "STS12": ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "STS13": ("FNWN", "headlines", "OnWN"),
    "STS14": ("deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    "STS15": ("answers-forums", "answers-students", "belief", "headlines", "images"),
    "STS16": ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
NAMES = tuple(STS)


def read(name: str, files: TaskFiles) -> Task:
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
        kept = [i for i, score in enumerate(scores) if score.strip()]  # pairs without a gold score are not judged
        splits[dataset] = Split(
            [[pairs[i][side].split() for i in kept] for side in (0, 1)],
            [files.score(golds, i + 1, scores[i]) for i in kept],
        )
    return Task(name, "sts", splits, pairs=True)
