"""How long is waited for an attempt: by processor time, as a machine with other work gives it little of that."""

import subprocess
import time
from collections import deque
from contextlib import suppress

from dipole.benchmarks.soak.processes import Place, Spent

WORK = 400.0
"""Seconds of processors; an attempt uses less than 100, so one that uses more computes without end."""
QUIET = 180.0
"""Seconds in which all processes of an attempt together have to use at least ..."""
LEAST = 1.0
"""... so many seconds of processors: one that uses less waits for what does not come."""


class BrokenError(Exception):
    """A promise was not kept."""


class Patience:
    """Watches the processes of a place from now on.

    Args:
        place: whose processes.
        work: seconds of processors that they may use.
        quiet: seconds in which they must use `LEAST`.
    """

    def __init__(self, place: Place, work: float = WORK, quiet: float = QUIET) -> None:
        self._place, self._work, self._quiet = place, work, quiet
        self._spent = Spent()
        self._looks = deque([(time.monotonic(), 0.0)])
        self.used = 0.0

    def look(self) -> None:
        """Ask how much they have used.

        Raises:
            BrokenError: they compute without end, or wait without end; their stacks are in the log then.
        """
        self.used, moment = self._spent.of(self._place.living()), time.monotonic()
        self._looks.append((moment, self.used))
        while len(self._looks) > 1 and self._looks[1][0] <= moment - self._quiet:
            self._looks.popleft()
        begin, before = self._looks[0]
        is_quiet = begin <= moment - self._quiet and self.used - before < LEAST
        if is_quiet or self.used > self._work:
            self._place.write_stacks()
            how = "waits" if is_quiet else "computes"
            raise BrokenError(
                f"an attempt does not end: it {how}, with {self.used - before:.1f} s of processors in the last "
                f"{moment - begin:.0f} s and {self.used:.0f} s in all; its stacks are in the log"
            )

    def until_end(self, *runners: "subprocess.Popen[bytes]") -> list[int]:
        """Wait for processes that end by themselves; their codes."""
        while going := [runner for runner in runners if runner.poll() is None]:
            self.look()
            with suppress(subprocess.TimeoutExpired):
                going[0].wait(1.0)
        return [runner.returncode for runner in runners]
