"""Results of the checks, as rows and as a table."""

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
