"""Statistics over seeds and tasks. Every function takes plain numbers and knows nothing of runs, suites or papers.

`differences` has the tests, `aggregates` averages over several tasks, and `power` computes the seeds that a test
needs. `python -m dipole.benchmarks.coverage` measures the coverage of the intervals.
"""

from dipole.benchmarks.statistics.aggregates import Interval, iqm_interval, probability_of_improvement, relative_gain
from dipole.benchmarks.statistics.differences import LEVEL, PairedTest, Summary, difference, holm, number, summarize
from dipole.benchmarks.statistics.power import detectable, power, seeds_needed

__all__ = [
    "LEVEL", "Interval", "PairedTest", "Summary", "detectable", "difference", "holm", "iqm_interval",
    "number", "power", "probability_of_improvement", "relative_gain", "seeds_needed", "summarize",
]  # fmt: skip
