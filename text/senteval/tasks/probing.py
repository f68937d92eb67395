"""Ten probing tasks: which property of a sentence can be read from its vector."""

from dipole.core.utils.errors import DataError
from dipole.text.senteval.files import TaskFiles
from dipole.text.senteval.task import Sentence, Split, Task

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
NAMES = tuple(PROBING)


def read(name: str, files: TaskFiles) -> Task:
    relative = f"probing/{PROBING[name]}.txt"
    names = {"tr": "train", "va": "dev", "te": "test"}
    found: dict[str, tuple[list[Sentence], list[str]]] = {split: ([], []) for split in names.values()}
    for number, fields in files.fields(relative, 3):
        if fields[0] not in names:
            raise DataError(
                f"{files.root / relative}, line {number}: split {fields[0]!r} is none of {', '.join(names)}"
            )
        found[names[fields[0]]][0].append(fields[-1].split())
        found[names[fields[0]]][1].append(fields[1])
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
