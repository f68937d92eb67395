"""Labels of tables: which column has them, and which class each cell means."""

import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any
from unicodedata import normalize

import torch
from torch import Tensor

from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import require_columns
from dipole.core.utils.text import warn

LABELS = ("label", "fine_label", "labels", "class", "cls", "target", "y")
"""Names of columns of labels, in order of preference."""
WHOLE = re.compile(r"-?\d{1,9}")
DECIMAL = re.compile(r"-?(\d+[.,]\d*|[.,]\d+|\d+(?=[eE]))([eE][-+]?\d+)?")
MOST = 100_000
"""Greatest number of a class. Above it numbers are identifiers, and are counted as text is."""


class NoClassesError(ValueError):
    """A column holds no classes."""


def class_labels(values: Iterable[Any]) -> tuple[Tensor | None, tuple[str, ...]]:
    """Return labels (n,), -1 where missing, and the names of the classes. Without any label None and ().

    Whole numbers up to `MOST` stay, also as floats or as text. Other text is numbered by the alphabet, and larger
    numbers in their order. Raise NoClassesError if the values are no classes, with the reason.
    """
    told = [plain_label(value) for value in values]
    known = {value for value in told if value is not None}
    if not known:
        return None, ()
    texts = [value for value in known if isinstance(value, str)]
    numbers = {value: value for value in known if not isinstance(value, str)}
    names: tuple[str, ...] = ()
    if texts and all(WHOLE.fullmatch(text) or DECIMAL.fullmatch(text) for text in texts):
        numbers |= {text: float(text.replace(",", ".")) for text in texts}
    elif texts:
        names = tuple(sorted({str(value) for value in known}))
        place = {name: number for number, name in enumerate(names)}
        numbers = {value: place[str(value)] for value in known}
    fraction = next((each for each in numbers.values() if isinstance(each, float) and not each.is_integer()), None)
    if fraction is not None:
        raise NoClassesError(f"holds numbers that are not whole, such as {fraction:g}")
    numbers = {value: int(number) for value, number in numbers.items()}
    if min(numbers.values()) < -1:
        least = str(min(numbers.values()))[:40]
        raise NoClassesError(f"holds negative numbers such as {least}, and only -1, no label, is allowed")
    if not names and max(numbers.values()) > MOST:
        distinct = sorted({number for number in numbers.values() if number >= 0})
        names = tuple(map(str, distinct))
        rank = {number: place for place, number in enumerate(distinct)}
        numbers = {value: rank.get(number, -1) for value, number in numbers.items()}
    return torch.tensor([-1 if value is None else numbers[value] for value in told]), names


def plain_label(value: Any) -> Any:
    """Return a label as a number or text, None where it is missing. A list of one label is that label."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        text = normalize("NFC", value.strip())
        return None if text.lower() in ("", "nan", "<na>") else text
    if value is None or value != value:  # NaN
        return None
    if isinstance(value, Decimal):
        return float(value)
    if not isinstance(value, bool | int | float):
        raise NoClassesError(f"holds {type(value).__name__} values such as {str(value)[:40]}, no class of each image")
    return value


def labels_of(
    name: str,
    columns: Sequence[str],
    values: Callable[[str], Iterable[Any]],
    wanted: str | None,
    others: Sequence[str] = (),
) -> tuple[Tensor | None, tuple[str, ...], str | None]:
    """Return the labels (n,), the names of the classes and the column of a table, from the first column with classes.

    Candidates are `wanted`, or those of `columns` in `LABELS` and then `others`. Columns that hold no classes (targets
    of regression, several labels an image) are left out with a warning. DataError for the column that is `wanted`.
    values: column -> its cells.
    """
    known = [key for name in LABELS for key in columns if key.strip().lower() == name]
    candidates = list(dict.fromkeys([*known, *others]))
    if wanted is not None:
        require_columns(dict.fromkeys(columns), [wanted], name, " Set vision.data.label_column.")
        candidates = [wanted]
    for column in candidates:
        try:
            labels, names = class_labels(values(column))
        except NoClassesError as error:
            problem = f"{name}: the column {column!r} {error}"
            if wanted is not None:
                raise DataError(f"{problem}. Set vision.data.label_column to one of classes, or remove it.") from error
            warn(f"{problem}. It is not read. For labels, set vision.data.label_column to a column of classes")
            continue
        if labels is not None:
            return labels, names, column
    return None, (), None
