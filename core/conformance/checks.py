"""Shared parts of all checks: their table, their outcomes, comparisons with a tolerance, and the report of a run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dipole.core.conformance.layouts import Layout, Leaves, changed
from dipole.core.conformance.subjects import LossAndGradients, Subject
from dipole.core.utils.text import counted

EXACT = 1e-9  # float64 against float64
SINGLE = 1e-4  # float32 against float64, hard pairs at temperature 0.01
HALF_VALUE, HALF_GRADIENT = 0.02, 0.05  # half-precision inputs against float64 on the same rounded inputs
LOW_TEMPERATURE, MODERATE_TEMPERATURE = 0.01, 0.05
MOST_ENTRIES = 100  # of a parameter under gradcheck
ROWS, COLUMNS = 8, 16  # of the batches for low precision


class Failed(AssertionError):  # noqa: N818
    """A check found the fault that the message names. The checks in `explains` must fail for the same cause.

    `by_reference` says that the loss differs from its reference in float64. The first such check is the cause of all.
    """

    def __init__(self, message: str, explains: tuple[str, ...] = (), by_reference: bool = False) -> None:
        super().__init__(message)
        self.explains = explains
        self.by_reference = by_reference


class Skipped(Exception):  # noqa: N818
    """A check does not apply, for the reason in the message."""


@dataclass(frozen=True)
class Check:
    """A named check. The first line of the docstring of `run` is the full requirement."""

    name: str  # as `--only` takes it
    about: str  # what must hold, in a few plain words
    run: Callable[[Subject], str]  # returns the finding
    slow: bool = False  # it takes more than a few seconds


CHECKS: list[Check] = []


def check(name: str, about: str, slow: bool = False) -> Callable[[Callable[[Subject], str]], Callable[[Subject], str]]:
    """Add a function to the table of checks."""

    def add(run: Callable[[Subject], str]) -> Callable[[Subject], str]:
        CHECKS.append(Check(name, about, run, slow))
        return run

    return add


def relative(found: Tensor, true: Tensor, least: float = 1.0) -> float:
    """Norm of the difference over the norm of the truth, or over `least` if the truth is smaller."""
    return float((found - true).norm() / true.norm().clamp_min(least))


def value_error(found: LossAndGradients, true: LossAndGradients) -> float:
    return relative(found.value, true.value)


def gradient_error(found: LossAndGradients, true: LossAndGradients, least: float = 1.0) -> float:
    """Largest relative error over the leaves and parameters that have a gradient in either."""
    worst = 0.0
    for name, expected in true.gradients.items():
        got = found.gradients[name]
        if got is None:
            if expected is None:
                continue
            got = torch.zeros_like(expected)
        elif expected is None:
            expected = torch.zeros_like(got)
        worst = max(worst, relative(got, expected, least))
    return worst


def demand_equal(
    found: LossAndGradients, true: LossAndGradients, where: str, limit: float = EXACT, other: str = "expected"
) -> float:
    """Return the larger error of value and gradient. Raise Failed if it is above the limit."""
    errors = {"value": value_error(found, true), "gradient": gradient_error(found, true)}
    for what, off in errors.items():
        if not off <= limit:
            values = f"{found.value.item():.10g}, {other} {true.value.item():.10g}"
            raise Failed(f"the {what} is off by {off:.2g} {where}: {values}", by_reference=other == "reference")
    return max(errors.values())


def exactly(leaves: Leaves) -> Leaves:
    """Return the same leaves in float64 on the processor."""
    return changed(leaves, lambda x: x.cpu().double())


def demand_finite(result: LossAndGradients, where: str) -> None:
    """Raise Failed if the value or any gradient is not finite."""
    if not result.value.isfinite():
        raise Failed(f"{where}: the value is {result.value.item()}")
    bad = [name for name, g in result.gradients.items() if g is not None and not g.isfinite().all()]
    if bad:
        raise Failed(f"{where}: the gradient of {', '.join(bad)} is not finite (value {result.value.item():.4g})")


def truth_of(subject: Subject, layout: Layout, leaves: Leaves, temperature: float) -> LossAndGradients:
    """The reference in float64 if there is one, else the subject itself in float64."""
    exact = exactly(leaves)
    instance = subject.make(layout, temperature=temperature)
    if subject.truth is not None:
        loops = partial(subject.truth, temperature=temperature)
        true = subject.result(instance, layout, exact, loops)
        if true.finite:  # the loops shift no exponential
            return true
    return subject.result(instance, layout, exact)


@dataclass(frozen=True)
class CheckResult:
    """One check on one subject.

    Args:
        subject: name of what was checked.
        check: name of the check.
        outcome: "ok", "FAIL", or "-" where it does not apply.
        detail: the finding.
        seconds: duration of the check.
        cause: for a failure, the check that explains it, by default this check. Otherwise "".
        about: what the check demands, in a few words.
    """

    subject: str
    check: str
    outcome: Literal["ok", "FAIL", "-"]
    detail: str
    seconds: float
    cause: str = ""
    about: str = ""


@dataclass(frozen=True)
class CheckReport:
    """All checks on one subject.

    Args:
        subject: name of what was checked.
        rows: what each check found, in their order.
    """

    subject: str
    rows: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Return whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """Return the failed checks, in their order."""
        return tuple(row for row in self.rows if row.outcome == "FAIL")

    @property
    def causes(self) -> dict[str, list[str]]:
        """Return the failures by cause: the check that found it -> all checks that fail for it, itself first."""
        found: dict[str, list[str]] = {row.cause: [row.cause] for row in self.failures}
        for row in self.failures:
            if row.check != row.cause:
                found[row.cause].append(row.check)
        return found

    def table(self) -> str:
        """Return one line for each check: outcome, name, demand, finding. Each cause is shown once."""
        name, about = (max(len(getattr(row, part)) for row in self.rows) for part in ("check", "about"))
        lines = []
        for row in self.rows:
            told = row.detail if row.cause in ("", row.check) else f"as {row.cause!r}"
            lines.append(f"  {row.outcome:<4}  {row.check:<{name}}  {row.about:<{about}}  {told}".rstrip())
        applied = sum(row.outcome != "-" for row in self.rows)
        verdict = "passes" if self.ok else f"FAILS {len(self.failures)} of"
        verdict += f" {counted(applied, 'check')}"
        if len(self.causes) < len(self.failures):
            verdict += f", for {counted(len(self.causes), 'cause')}"
        return "\n".join([f"{self.subject}: {verdict}", *lines])

    def as_dict(self) -> dict[str, object]:
        """Return `subject`, `ok` and `checks`, as `dipole check --json` prints them."""
        rows = [{name: value for name, value in vars(row).items() if name != "subject"} for row in self.rows]
        return {"subject": self.subject, "ok": self.ok, "checks": rows}


def run(subject: Subject, checks: Sequence[Check]) -> CheckReport:
    """Run the checks one by one. Any exception of a check counts as a failure of the subject."""
    rows: list[CheckResult] = []
    explained: dict[str, str] = {}  # check -> the finding of which it is a consequence
    raised: dict[str, str] = {}  # an error that no check is about -> the check that met it first
    missed = ""  # the check that missed the reference first
    for check in checks:
        start = time.perf_counter()
        outcome: Literal["ok", "FAIL", "-"] = "ok"
        cause = ""
        try:
            detail = check.run(subject)
        except Skipped as reason:
            outcome, detail = "-", str(reason)
        except Failed as fault:
            outcome, detail, cause = "FAIL", str(fault), check.name
            if fault.by_reference:
                missed = missed or check.name
                explained.setdefault(check.name, missed)
            explained = explained | dict.fromkeys(fault.explains, check.name)
        except Exception as error:
            outcome, detail = "FAIL", f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0]
            cause = raised.setdefault(detail, check.name)
        seconds = round(time.perf_counter() - start, 3)
        rows.append(CheckResult(subject.name, check.name, outcome, detail, seconds, cause, check.about))
    failed = {row.check for row in rows if row.outcome == "FAIL"}
    explained = {name: by for name, by in explained.items() if by in failed}
    return CheckReport(subject.name, tuple(_explained(row, explained) for row in rows))


def _explained(row: CheckResult, explained: dict[str, str]) -> CheckResult:
    """Set the cause of a failure, which a later check may find, and which may have a cause itself."""
    cause, seen = row.cause, {row.check}
    while row.outcome == "FAIL" and cause in explained and explained[cause] not in seen:
        cause = explained[cause]
        seen.add(cause)
    return replace(row, cause=cause)
