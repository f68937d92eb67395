"""Movie and product reviews, subjectivity, opinion polarity: cross-validated, two classes."""

from dipole.core.utils.errors import DataError
from dipole.text.senteval.files import TaskFiles
from dipole.text.senteval.task import Sentence, Split, Task

# Files, label 1 first, with the published number of lines of each.
FILES = {
    "MR": (("MR/rt-polarity.pos", 5331), ("MR/rt-polarity.neg", 5331)),
    "CR": (("CR/custrev.pos", 2407), ("CR/custrev.neg", 1368)),
    "SUBJ": (("SUBJ/subj.objective", 5000), ("SUBJ/subj.subjective", 5000)),
    "MPQA": (("MPQA/mpqa.pos", 3312), ("MPQA/mpqa.neg", 7294)),
}
NAMES = tuple(FILES)


def read(name: str, files: TaskFiles) -> Task:
    sentences: list[Sentence] = []
    labels: list[float] = []
    contents = []
    for label, (file, expected) in zip((1, 0), FILES[name], strict=True):
        relative = f"downstream/{file}"
        text = files.text(relative, "latin-1")
        lines = text.splitlines()
        hint = ""
        if len(lines) != len(files.lines(relative, "latin-1")):
            hint = (
                " It holds control characters that end a line (0x85, NEL) because it did not pass through `cat -v`, as"
                " SentEval's script does."
            )
        files.expect(relative, len(lines), expected, hint)
        contents.append(text)
        sentences += [line.split() for line in lines]
        labels += [label] * len(lines)
    if files.check and contents[0] == contents[1]:
        raise DataError(f"{name}: both files hold the same text; one is a copy of the other and must be fetched again")
    splits = {"all": Split([sentences], labels)}
    return Task(name, "nested", splits, classes=2, drops_empty=name in ("CR", "MPQA"))
