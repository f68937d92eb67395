"""A task as it is read from disk: sentences, labels, and how it is scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Sentence = list[str]


@dataclass(frozen=True)
class Split:
    """Part of a task.

    Args:
        sentences: one list of sentences for classification, two for pairs, in the order SentEval encodes them.
        labels: of each sentence or pair.
    """

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
    """A task as read from disk.

    Args:
        name: as in SentEval.
        kind: how it is scored: "nested" (cross-validation inside cross-validation), "holdout" (cross-validation on
            train, one test), "split" (train, dev, test), "relatedness" (regression on train, dev, test) or "sts" (no
            training).
        splits: by name, in the order of the files.
        classes: number of classes, or 0 if labels are scores.
        pairs: of two sentences each.
        f1: F1 of class 1 is reported too, and under "skip-thoughts" chooses the regularisation.
        linear: SentEval allows its classifier no hidden units here, whatever `nhid` says.
        changed: what was said of files that are not the known ones.
        drops_empty: the skip-thoughts scripts leave empty sentences out.
        shuffled: these scripts shuffle "rows" of a "holdout" task before its inner folds are cut, or its "folds"; None:
            neither.
    """

    name: str
    kind: Literal["nested", "holdout", "split", "relatedness", "sts"]
    splits: dict[str, Split]
    classes: int = 0
    pairs: bool = False
    f1: bool = False
    linear: bool = False
    changed: tuple[str, ...] = ()
    drops_empty: bool = False
    shuffled: Literal["rows", "folds"] | None = None

    def samples(self) -> list[Sentence]:
        """Every sentence, in the order in which SentEval hands them to `prepare`."""
        splits = list(self.splits.values())
        if self.kind == "sts":
            splits = [split.sorted() for split in splits]
        return [sentence for split in splits for side in split.sentences for sentence in side]
