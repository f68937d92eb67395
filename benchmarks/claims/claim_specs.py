"""The kinds of statements that papers make, as data, and the parts of a claim in PAPER.toml."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, log
from typing import Any, Literal

from pydantic import Field, model_validator

from dipole.core.train.config import Settings

# Printed numbers have at most two decimals. The rounding noise of their differences is far below this.
ROUNDING = 1e-9


@dataclass(frozen=True)
class ClaimKind:
    """A kind of statement: when a comparison is as claimed, and when all comparisons together are.

    `shape` is that of `ClaimPart.region`, where the difference of a comparison has to lie. `words` say what is claimed,
    with the part's parameters in braces. `side` is "above" or "below". `of_several` is added for `n` comparisons. A
    part needs one of the sets of parameters in `needs`, and can have those in `may`.
    """

    shape: Literal["above", "below", "between", "around zero", "around amount", "factors"]
    words: str
    of_several: str = ", in each of {n}"
    needs: tuple[tuple[str, ...], ...] = ((),)
    may: tuple[str, ...] = ()
    is_closed: bool = False  # the bounds belong to the region
    of_mean: bool = False  # the mean over the comparisons has to be shown, not each comparison
    of_each: bool = True  # each estimate has to be as claimed
    is_counted: bool = False  # a number of the comparisons is enough
    is_spread: bool = False  # standard deviations are compared, by an F-test


_BOUND, _RANGE = (("bound",),), (("low", "high"),)
_SIGNS = ", {n} by their sign and in the mean"
_COUNT = " in at least {at_least} of {n}"
_MEAN = " in the mean of {n}"
KINDS: Mapping[str, ClaimKind] = {
    "sign": ClaimKind("above", "{side} {bound}", _SIGNS, may=("bound",), of_mean=True),
    "average": ClaimKind("above", "{side} {bound}", _MEAN, may=("bound",), of_mean=True, of_each=False),
    "all": ClaimKind("above", "{side} {bound}", may=("bound",)),
    "significant": ClaimKind("above", "{side} {bound}, significant at {level}", needs=(("level",),), may=("bound",)),
    "most": ClaimKind("above", "{side} {bound}", _COUNT, may=("bound", "share"), is_counted=True),
    "count": ClaimKind("above", "{side} {bound}", _COUNT, needs=(("least",),), may=("bound",), is_counted=True),
    "at least": ClaimKind("above", "at least {bound}", needs=_BOUND, is_closed=True),
    "more than": ClaimKind("above", "more than {bound}", needs=_BOUND),
    "less than": ClaimKind("below", "less than {bound}", needs=_BOUND),
    "between": ClaimKind("between", "{low} to {high}", needs=_RANGE),
    "between on average": ClaimKind("between", "{low} to {high}", _MEAN, needs=_RANGE, of_mean=True, of_each=False),
    "within": ClaimKind("around zero", "within {margin} either way", needs=(("margin",),), is_closed=True),
    "about": ClaimKind(
        "around amount", "about {amount} ({from} to {to})",
        needs=(("amount", "margin"), ("low", "high", "margin")), is_closed=True,
    ),
    "ratio": ClaimKind("factors", "{low} to {high} times", needs=_RANGE, is_closed=True),
    "range": ClaimKind("around zero", "largest less smallest below {bound}", needs=_BOUND),
    "spread": ClaimKind("below", "smaller standard deviation", is_spread=True),
}  # fmt: skip


class ClaimPart(Settings):
    """One thing that a claim says: the kind of statement, its parameters, and the comparisons it is about."""

    kind: str = Field(description="what is said: sign, all, most, at least, within, ratio, ... (`KINDS`)")
    tests: tuple[int, ...] = Field((), description="which of the claim's lists of comparisons, from 0. None means all")
    only: tuple[str, ...] = Field(("*",), description="labels of comparisons (`row | column` or `column`), as patterns")
    bound: float = Field(0.0, description="what each comparison is compared with, in the table's units")
    margin: float | None = Field(None, description="of `within`, or of `about` on either side")
    amount: float | None = Field(None, description="of `about`")
    low: float | None = Field(None, description="of `between`, `about` and `ratio`")
    high: float | None = Field(None, description="of `between`, `about` and `ratio`")
    share: float = Field(0.5, description="of `most`: more than this share of the comparisons")
    least: int | None = Field(None, description="of `count`: smallest number of comparisons")
    level: float = Field(0.05, description="of `significant`")
    reads: str = Field("", description="how the sentence is read if it leaves something open, and why")

    @property
    def spec(self) -> ClaimKind:
        return KINDS[self.kind]

    @property
    def region(self) -> tuple[float, float]:
        """The interval in which a comparison has to lie, in the units of first minus second."""
        low, high, margin = self.low or 0.0, self.high or 0.0, self.margin
        if margin is None:
            margin = self.bound
        if self.amount is not None:
            low = high = self.amount
        shapes = {
            "above": (self.bound, inf),
            "below": (-inf, self.bound),
            "between": (low, high),
            "around zero": (-margin, margin),
            "around amount": (low - margin, high + margin),
        }
        if self.spec.shape == "factors":
            return log(low), log(high)
        return shapes[self.spec.shape]

    def required(self, n: int) -> int:
        """Return how many of `n` comparisons have to be as claimed."""
        if not self.spec.is_counted:
            return n
        if self.least is not None:
            return self.least
        return int(self.share * n + ROUNDING) + 1

    def words(self, n: int, side: str) -> str:
        """Return the statement about `n` comparisons, with its bounds. `side` is "above", "below" or "beyond"."""
        values = {name: f"{value:g}" for name, value in self if isinstance(value, float)}
        low, high = self.region
        if self.kind == "about" and self.amount is None:
            values["amount"] = f"{self.low:g} to {self.high:g}"
        values |= {"side": side, "n": str(n), "at_least": str(self.required(n)), "from": f"{low:g}", "to": f"{high:g}"}
        text = self.spec.words
        if n > 1 or self.spec.of_several in (_MEAN, _COUNT):
            text += self.spec.of_several
        return text.format(**values)

    @model_validator(mode="after")
    def _is_known(self) -> "ClaimPart":
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}; known: {', '.join(KINDS)}")
        needed = self.spec.needs
        given = self.model_fields_set - {"kind", "tests", "only", "reads"}
        if odd := sorted(given.difference(self.spec.may, *needed)):
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


def default_part(index: int, test: Mapping[str, Any]) -> ClaimPart:
    """Return the part of a test without a spec: a spread, a comparison of deviations, or the sign."""
    if test["kind"] == "spread":
        return ClaimPart(tests=(index,), kind="range", bound=test["published"]["spread"])
    if test.get("field") == "std":
        return ClaimPart(tests=(index,), kind="spread")
    return ClaimPart(tests=(index,), kind="sign", bound=float(test.get("min_diff", 0.0)))


class ClaimSpec(Settings):
    """How a claim is judged, in `published/PAPER.toml`. `not_tested` says why if no numbers can show it."""

    id: str
    parts: tuple[ClaimPart, ...] = ()
    not_tested: str = ""
    not_judged: str = Field("", description="comparisons of the table that its sentence does not speak of, and why")


def fits(text: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches this text: `*` matches anything, other characters match themselves."""
    return any(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) for pattern in patterns)
