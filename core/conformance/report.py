"""What the checks found, as rows and as a table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dipole.core.conformance.checks import Check, Failed, Skipped
from dipole.core.conformance.subjects import Subject


@dataclass(frozen=True)
class CheckResult:
    """One check on one subject."""

    subject: str
    check: str
    outcome: Literal["ok", "FAIL", "-"]
    detail: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """All checks on one subject; `ok` if none failed."""

    subject: str
    rows: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        return tuple(row for row in self.rows if row.outcome == "FAIL")

    def table(self) -> str:
        """One line for each check: outcome, name, what was found."""
        width = max(len(row.check) for row in self.rows)
        lines = [f"  {row.outcome:<4}  {row.check:<{width}}  {row.detail}".rstrip() for row in self.rows]
        applied = sum(row.outcome != "-" for row in self.rows)
        verdict = f"passes {applied} checks" if self.ok else f"FAILS {len(self.failures)} of {applied} checks"
        return "\n".join([f"{self.subject}: {verdict}", *lines])

    def as_dict(self) -> dict[str, object]:
        """For --json."""
        rows = [{"check": r.check, "outcome": r.outcome, "detail": r.detail, "seconds": r.seconds} for r in self.rows]
        return {"subject": self.subject, "ok": self.ok, "checks": rows}


def run(subject: Subject, checks: Sequence[Check]) -> Report:
    """Run checks one by one; a check that raises anything is a failure of the subject, not of the report."""
    rows = []
    for check in checks:
        start = time.perf_counter()
        outcome: Literal["ok", "FAIL", "-"] = "ok"
        try:
            detail = check.run(subject)
        except Skipped as reason:
            outcome, detail = "-", str(reason)
        except Failed as fault:
            outcome, detail = "FAIL", str(fault)
        except Exception as error:
            outcome, detail = "FAIL", f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0]
        rows.append(CheckResult(subject.name, check.name, outcome, detail, round(time.perf_counter() - start, 3)))
    return Report(subject.name, tuple(rows))
