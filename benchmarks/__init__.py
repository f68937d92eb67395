"""Suites, statistics, published numbers and reports."""

from dipole.core.ground.moved import forward

# Names of earlier versions.
forward(
    __name__,
    {
        "bench": "run.bench",
        "charts": "report.charts",
        "claims": "report.claims",
        "cluster": "run.ray_engine",
        "collect": "run_records",
        "curves": "report.curves",
        "energy": "run.energy",
        "engines": "run.engines",
        "learning_rl": "studies.learning_rl",
        "learning_text": "studies.learning_text",
        "learning_vision": "studies.learning_vision",
        "lease": "run.claim",
        "published": "report.published",
        "rank": "run.one_rank",
        "results": "report.results",
        "sheets": "report.tables",
        "svg": "report.kinds",
        "worker": "run.worker",
    },
)
