"""A finished run, loaded back: its record, its adapter with the trained weights, its objective."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dipole.core.ground.errors import RecordError
from dipole.core.ground.seeding import Seeds, set_deterministic
from dipole.core.record import Evaluation, Number, RunRecord, library_versions, now, write_record
from dipole.core.train.build import build, scheduled
from dipole.core.train.evaluation import Evaluated, evaluate
from dipole.core.train.launch import pick_device
from dipole.core.train.model_files import load_weights
from dipole.core.train.run_folder import RunFolder

if TYPE_CHECKING:
    from dipole.core.contrast.objective import Composite
    from dipole.core.train.adapter import Adapter


def load_run(folder: RunFolder, device: str | None = None) -> tuple[RunRecord, Adapter, Composite | None]:
    """Rebuild a finished run with its trained weights.

    Args:
        folder: the run.
        device: where to; the recipe's `device` if None.

    Raises:
        RecordError: the run is not finished. CheckpointError: the weights are missing or damaged.
    """
    record = folder.read_record()
    if record is None or record.status != "done":
        status = "has no record" if record is None else f"is {record.status}"
        raise RecordError(
            f"the run {folder.path} {status}; finish it with: dipole train {folder.config} --runs {folder.path.parent}"
        )
    config = folder.read_config()
    set_deterministic(config.deterministic)
    adapter, objective = build(config, folder, pick_device(device or config.device))
    load_weights(folder.model, adapter.module, objective)
    scheduled(config.train, objective, adapter.steps_per_epoch).set(record.steps)
    return record, adapter, objective


def evaluate_run(folder: RunFolder, device: str | None = None) -> tuple[RunRecord, Evaluated]:
    """Evaluate the saved model and add the result to the record."""
    record, adapter, objective = load_run(folder, device)
    found = evaluate(adapter, objective, Seeds(record.seed))
    entry = Evaluation(
        time=now(),
        results=found.results,
        versions=library_versions(),
        # A domain may report numbers at the end of training that only a training batch gives; those are not compared.
        agrees=all(
            name in record.results and _same(value, record.results[name]) for name, value in found.results.items()
        ),
    )
    record = record.model_copy(update={"evaluations": [*record.evaluations, entry]})
    write_record(folder.record, record)
    return record, found


def _same(now: Number, then: Number) -> bool:
    return now == then or (now is not None and then is not None and math.isclose(now, then, rel_tol=0, abs_tol=1e-9))
