"""Statistics over seeds and tasks: every function takes plain numbers and knows nothing of runs, suites or papers.

`differences` tests one measurement, `aggregates` sums up several, `families` corrects for how many were tested, `power`
says how many seeds would show a difference. What the intervals hold is `python -m dipole.benchmarks.coverage`.
"""

from dipole.benchmarks.statistics.aggregates import (
    Interval,
    iqm,
    iqm_interval,
    probability_of_improvement,
    relative_gain,
)
from dipole.benchmarks.statistics.differences import (
    CONFIDENCE,
    PairedTest,
    Summary,
    WelchTest,
    against_single_value,
    difference,
    paired,
    standard_error,
    summarize,
    welch,
    wilcoxon,
)
from dipole.benchmarks.statistics.families import holm
from dipole.benchmarks.statistics.power import pooled_std, power, seeds_needed

__all__ = [
    "CONFIDENCE",
    "Interval",
    "PairedTest",
    "Summary",
    "WelchTest",
    "against_single_value",
    "difference",
    "holm",
    "iqm",
    "iqm_interval",
    "paired",
    "pooled_std",
    "power",
    "probability_of_improvement",
    "relative_gain",
    "seeds_needed",
    "standard_error",
    "summarize",
    "welch",
    "wilcoxon",
]
