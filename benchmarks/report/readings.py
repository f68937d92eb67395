"""What is written down of a paper's claim: its kind, with the parameters that its sentence names."""

import re
from collections.abc import Iterable, Mapping

from pydantic import Field, model_validator

from dipole.core.train.config import Settings

LEVEL = 0.05

# Kind -> the parameters it needs, one of these sets, and those that it may have.
PARAMETERS: Mapping[str, tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "sign": (((),), ("bound",)),
    "average": (((),), ("bound",)),
    "all": (((),), ("bound",)),
    "significant": ((("level",),), ("bound",)),
    "most": (((),), ("bound", "share")),
    "count": ((("least",),), ("bound",)),
    "at least": ((("bound",),), ()),
    "more than": ((("bound",),), ()),
    "less than": ((("bound",),), ()),
    "between": ((("low", "high"),), ()),
    "between on average": ((("low", "high"),), ()),
    "within": ((("margin",),), ()),
    "about": ((("amount", "margin"), ("low", "high", "margin")), ()),
    "ratio": ((("low", "high"),), ()),
    "range": ((("bound",),), ()),
    "spread": (((),), ()),
}


class Part(Settings):
    """One thing that a claim says: the kind of statement, its parameters, and the comparisons it is about."""

    kind: str = Field(description="what is said: sign, all, most, at least, within, ratio, ... (`PARAMETERS`)")
    tests: tuple[int, ...] = Field((), description="which of the claim's lists of comparisons, from 0; none: all")
    only: tuple[str, ...] = Field(("*",), description="labels of comparisons (`row | column` or `column`); patterns")
    bound: float = Field(0.0, description="what each comparison is held against, in the table's units")
    margin: float | None = Field(None, description="of `within`; of `about`, on either side")
    amount: float | None = Field(None, description="of `about`")
    low: float | None = Field(None, description="of `between`, `about` and `ratio`")
    high: float | None = Field(None, description="of `between`, `about` and `ratio`")
    share: float = Field(0.5, description="of `most`: more than this share of the comparisons")
    least: int | None = Field(None, description="of `count`: at least so many of the comparisons")
    level: float = Field(LEVEL, description="of `significant`")
    reads: str = Field("", description="how the sentence is read where it leaves something open, and why")

    def is_about(self, label: str) -> bool:
        """Whether it speaks of a comparison.

        Args:
            label: of the comparison.
        """
        return fits(label, self.only)

    @model_validator(mode="after")
    def _is_known(self) -> "Part":
        if self.kind not in PARAMETERS:
            raise ValueError(f"unknown kind {self.kind!r}; known: {', '.join(PARAMETERS)}")
        needed, optional = PARAMETERS[self.kind]
        given = self.model_fields_set - {"kind", "tests", "only", "reads"}
        if odd := sorted(given.difference(optional, *needed)):
            raise ValueError(f"kind {self.kind!r} has no parameter {', '.join(odd)}")
        if not any(given >= set(names) for names in needed):
            raise ValueError(f"kind {self.kind!r} needs {' or '.join(' and '.join(names) for names in needed)}")
        if self.amount is not None and given & {"low", "high"}:
            raise ValueError("give either an amount, or low and high")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        if self.kind == "ratio" and not (self.low or 0) > 0:
            raise ValueError("the factors of a ratio must be above 0")
        if self.margin is not None and self.margin <= 0:
            raise ValueError(f"margin ({self.margin}) must be above 0")
        return self


class Reading(Settings):
    """How a claim is judged, in `published/PAPER.toml`; `not_tested` says why where no numbers can show it."""

    id: str
    parts: tuple[Part, ...] = ()
    not_tested: str = ""
    not_judged: str = Field("", description="comparisons of the table that its sentence does not speak of, and why")


def fits(text: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is this text; `*` stands for anything, and nothing else for anything but itself."""
    return any(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) for pattern in patterns)
