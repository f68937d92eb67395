"""Statistics over seeds and tasks. Every function takes plain numbers and knows nothing of runs, suites or papers.

`differences` has the tests, `aggregates` averages over several tasks, and `power` computes the seeds that a test
needs. `python -m dipole.benchmarks.coverage` measures the coverage of the intervals.
"""

from dipole.benchmarks.statistics.aggregates import Interval, iqm_interval, probability_of_improvement, relative_gain
from dipole.benchmarks.statistics.differences import (
    CONFIDENCE,
    LEVEL,
    PairedTest,
    Summary,
    difference,
    holm,
    number,
    paired,
    pooled_std,
    summarize,
    wilcoxon,
)
from dipole.benchmarks.statistics.power import detectable, detectable_by, power, seeds_needed

__all__ = [
    "CONFIDENCE", "LEVEL", "Interval", "PairedTest", "Summary", "detectable", "detectable_by", "difference", "holm",
    "iqm_interval", "number", "paired", "pooled_std", "power", "probability_of_improvement", "relative_gain",
    "seeds_needed", "summarize", "wilcoxon",
]  # fmt: skip
