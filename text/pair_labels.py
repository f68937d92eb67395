"""Labels of a pair table: which rows are pairs, how much they weigh, and labels that would be ignored."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.text import warn

# Columns that tell pairs from other rows: QQP, PAWS, MRPC, STS-B, SICK, NLI sets and mined pairs. See `plain_name`.
LABELS = frozenset({
    "label", "labels", "goldlabel", "gold", "goldscore", "isduplicate", "duplicate", "isdup", "isparaphrase",
    "paraphrase", "quality", "score", "scores", "similarity", "similarityscore", "simscore", "sim", "similar",
    "issimilar", "cosinesimilarity", "relatedness", "relatednessscore", "relevance", "relevant", "entailment",
    "entailmentlabel", "entailmentjudgment", "judgment", "judgement", "match", "ismatch", "equivalent", "target",
})  # fmt: skip
MISSING = ("", "nan", "na", "n/a", "null", "none")  # of a table of text
WORDS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}


def check_columns(columns: Sequence[str]) -> None:
    """Raise ConfigError if the names cannot be those of a table of pairs."""
    if len(columns) < 2 or len(set(columns)) < len(columns) or not all(columns):
        raise ConfigError(
            f"columns must name an anchor, a positive and any negatives, each once, got {list(columns)}; for example "
            f'["anchor", "positive", "negative"]'
        )


@dataclass(frozen=True)
class PairLabel:
    """How a column of labels is used.

    "filter" keeps the rows whose label is `start` or more, or has this name; None: 1 of the labels 0 and 1. "target"
    weights rows by their label, `start` or the highest as 1.
    """

    column: str | None = None  # None: there is no such column
    use: Literal["filter", "target"] = "filter"
    start: float | str | None = None

    def weight(self, cell: Any, where: str) -> float | None:
        """Return the weight of a row, or None if the row is left out."""
        if cell is None or cell != cell:  # null, NaN
            return None
        if isinstance(self.start, str):
            return 1.0 if str(cell).strip().lower() == self.start.strip().lower() else None
        if str(cell).strip().lower() in MISSING:
            return None
        value = self._number(cell, where)
        if self.use == "target":
            if value < 0:
                raise DataError(f"{where}: the label {value:g} is negative, and weights are not.")
            return value
        if self.start is None and value not in (0, 1):
            raise DataError(
                f"{where}: the column {self.column!r} holds {value:g}, and only 0 and 1 say which rows are pairs. Set "
                f'text.label_from to the least label of a pair, or to a name ("0" in quotation marks is the label 0 '
                f"alone), or set text.label_use = 'target'."
            )
        least = 1.0 if self.start is None else self.start
        return 1.0 if value >= least else None

    def _number(self, cell: Any, where: str) -> float:
        text = str(cell).strip().lower()
        try:
            value = float(WORDS.get(text, text))
        except ValueError:
            value = np.nan
        if not np.isfinite(value):
            fix = "Set text.label_from to the label of a pair, such as 'entailment'."
            if "," in text and not text.strip("-+.,0123456789"):
                fix = "Write it with a decimal point (pandas: read_csv(FILE, decimal=','), then to_csv)."
            elif self.use == "target":
                fix = "Weights are numbers. With text.label_use = 'filter', text.label_from can be the label of a pair."
            raise DataError(f"{where}: the label {str(cell)[:40]!r} is no number. {fix}")
        return value

    def scaled(self, weights: Iterable[float]) -> np.ndarray | None:
        """Return the weights of all rows, (n,) float32 between 0 and 1. None if all rows have one weight."""
        if self.column is None or self.use != "target":
            return None
        found = np.array(weights, np.float64)
        top = self.start or found.max(initial=0)
        if not top:
            raise DataError(f"all labels in the column {self.column!r} are 0, so no row would be trained.")
        return (found / float(top)).clip(max=1).astype(np.float32)


ALL_ROWS = PairLabel()
"""There are no labels."""


def plain_name(name: Any) -> str:
    """Return the small letters and digits of a column's name: "1string" of "#1 String"."""
    return re.sub(r"[\W_]+", "", str(name)).lower()


def check_labels(labels: dict[str, str], row: dict[str, Any], where: str, are_chosen: bool) -> None:
    """Raise DataError if an unused label, by column, differs from that of the first row.

    If the user has chosen the columns, it is a warning, given once.
    """
    for name, first in labels.items():
        value = str(row.get(name))
        if value == first:
            continue
        found = f"it holds {first[:40]!r} and {value[:40]!r}"
        use = (
            f"Set text.label = {name!r} to train rows of label 1, where text.label_from sets another label and "
            f"text.label_use = 'target' weights rows."
        )
        if not are_chosen:
            raise DataError(
                f"{where}: the column {name!r} seems to say which rows belong together: {found}. {use} Or set "
                f"text.columns to train every row as a pair."
            )
        warn(f"{where}: the column {name!r} is unused: {found}. Every row is trained as a pair. {use}", stacklevel=5)
        labels.clear()
        return
