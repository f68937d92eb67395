"""The record of a run and what was added to it later."""

from dipole.core.record.run_record import (
    Evaluation,
    Hardware,
    Histogram,
    Number,
    Part,
    RunRecord,
    finite,
    hardware,
    library_versions,
    now,
    read_part,
    read_record,
    schema_problem,
    write_record,
)

__all__ = [
    "Evaluation",
    "Hardware",
    "Histogram",
    "Number",
    "Part",
    "RunRecord",
    "finite",
    "hardware",
    "library_versions",
    "now",
    "read_part",
    "read_record",
    "schema_problem",
    "write_record",
]
