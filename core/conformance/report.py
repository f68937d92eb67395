"""What the checks found, as rows and as a table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dipole.core.conformance.checks import Check, Failed, Skipped
from dipole.core.conformance.subjects import Subject
from dipole.core.utils.text import counted


@dataclass(frozen=True)
class CheckResult:
    """One check on one subject.

    Args:
        subject: name of what was checked.
        check: name of the check.
        outcome: "ok", "FAIL", or "-" where it does not apply.
        detail: what was found.
        seconds: it took.
        cause: of a failure, the check whose finding explains it, its own where none does; else "".
    """

    subject: str
    check: str
    outcome: Literal["ok", "FAIL", "-"]
    detail: str
    seconds: float
    cause: str = ""


@dataclass(frozen=True)
class Report:
    """All checks on one subject.

    Args:
        subject: name of what was checked.
        rows: what each check found, in their order.
    """

    subject: str
    rows: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether no check has failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that have failed, in their order."""
        return tuple(row for row in self.rows if row.outcome == "FAIL")

    @property
    def causes(self) -> dict[str, list[str]]:
        """The failures by what explains them: the check that found it -> all that fail for it, itself first."""
        found: dict[str, list[str]] = {row.cause: [row.cause] for row in self.failures}
        for row in self.failures:
            if row.check != row.cause:
                found[row.cause].append(row.check)
        return found

    def table(self) -> str:
        """One line for each check: outcome, name, what was found; of one cause the finding stands once."""
        width = max(len(row.check) for row in self.rows)
        lines = [f"  {row.outcome:<4}  {row.check:<{width}}  {_told(row)}".rstrip() for row in self.rows]
        applied = sum(row.outcome != "-" for row in self.rows)
        verdict = (
            f"passes {counted(applied, 'check')}"
            if self.ok
            else f"FAILS {len(self.failures)} of {counted(applied, 'check')}"
        )
        if len(self.causes) < len(self.failures):
            verdict += f", for {len(self.causes)} cause{'s' if len(self.causes) > 1 else ''}"
        return "\n".join([f"{self.subject}: {verdict}", *lines])

    def as_dict(self) -> dict[str, object]:
        """What `dipole check --json` prints: `subject`, `ok` and `checks`."""
        rows = [
            {"check": r.check, "outcome": r.outcome, "detail": r.detail, "seconds": r.seconds, "cause": r.cause}
            for r in self.rows
        ]
        return {"subject": self.subject, "ok": self.ok, "checks": rows}


def _told(row: CheckResult) -> str:
    return f"as {row.cause!r}" if row.cause not in ("", row.check) else row.detail


def run(subject: Subject, checks: Sequence[Check]) -> Report:
    """Run checks one by one; a check that raises anything is a failure of the subject, not of the report."""
    rows: list[CheckResult] = []
    explained: dict[str, str] = {}  # check -> the finding of which it is a consequence
    raised: dict[str, str] = {}  # an error that no check is about -> the check that met it first
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
            explained = dict.fromkeys(fault.explains, check.name) | explained
        except Exception as error:
            outcome, detail = "FAIL", f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0]
            cause = raised.setdefault(detail, check.name)
        rows.append(
            CheckResult(subject.name, check.name, outcome, detail, round(time.perf_counter() - start, 3), cause)
        )
    return Report(subject.name, tuple(_explained(row, explained) for row in rows))


def _explained(row: CheckResult, explained: dict[str, str]) -> CheckResult:
    """Consequences may stand before what explains them."""
    if row.outcome == "FAIL" and row.cause == row.check:
        return replace(row, cause=explained.get(row.check, row.check))
    return row
