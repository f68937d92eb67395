"""Load and evaluate a finished run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dipole.core.record import Evaluation, Number, RunRecord, library_versions, now, write_record
from dipole.core.train.adapter import same_data
from dipole.core.train.domains import adapter_class
from dipole.core.train.evaluation import Evaluated, evaluate_model
from dipole.core.train.launch import pick_device
from dipole.core.train.model import build, keeps, load_weights
from dipole.core.train.recipe import parse_override
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.schedule import Schedules
from dipole.core.utils.errors import CheckpointError, ConfigError, DataError, DipoleError, RecordError, nearest
from dipole.core.utils.seeding import Seeds, set_deterministic

if TYPE_CHECKING:
    from dipole.core.objectives.objective import Composite
    from dipole.core.train.adapter import Adapter


def load_run(
    folder: RunFolder, device: str | None = None, settings: Sequence[str] = ()
) -> tuple[RunRecord, Adapter, Composite | None]:
    """Rebuild a finished run with its trained weights from its folder.

    Args:
        folder: the run, as `find_run` returns it.
        device: "auto", "cpu", "cuda", "cuda:1" or "mps". None: the recipe's `device`.
        settings: "table.key=value" with the new places of moved data (keys of `Adapter.data_fields`).

    Returns:
        The record, the adapter (whose `module` has the trained weights), and the objective (None for "none").

    Raises:
        RecordError: the run is not finished, or its record cannot be read.
        CheckpointError: the weights or the domain's other files are missing or damaged.
        ConfigError: a setting is not allowed, or the device is not available.

    Example:
        >>> run = dipole.train(dipole.load_recipe("lmcl-toy", ["train.steps=5"]).config, folder, quiet=True)
        >>> record, adapter, objective = dipole.load_run(dipole.find_run(run.hash, folder))
        >>> adapter.module.training
        False
    """
    if not isinstance(folder, RunFolder):
        raise ConfigError(f"folder must be a run, find_run({str(folder)!r}), got a {type(folder).__name__}.")
    record = folder.read_record()
    if record is None or record.status != "done":
        status = "has no record" if record is None else f"is {record.status}"
        raise RecordError(
            f"the run {folder.path} {status}; finish it with: dipole train {folder.config} --runs {folder.path.parent}"
        )
    config = folder.read_config()
    domain = adapter_class(config.domain)
    if settings:
        _check_settings(config.domain, domain.data_fields, settings)
        config = folder.read_config(settings)
    if config.deterministic:
        set_deterministic()
    place = pick_device(device or config.device)
    kept = folder.kept if keeps(domain) else None
    if kept is not None and not kept.is_dir():
        raise CheckpointError(f"the model is incomplete: {kept} is missing. Train again with --overwrite.")
    adapter, objective = build(config, folder, place, kept=kept)
    adapter.part = adapter.reported
    load_weights(folder.model, adapter.module, objective)
    Schedules(config.train, objective, adapter.steps_per_epoch).set(record.steps)
    for module in filter(None, (adapter.module, objective)):
        module.eval()
    return record, adapter, objective


def _check_settings(domain: str, allowed: frozenset[str], settings: Sequence[str]) -> None:
    names = [f"{domain}.{key}" for key in sorted(allowed)]
    for text in settings:
        path, _ = parse_override(text)
        if ".".join(path[:2]) not in names:
            raise ConfigError(
                f"--set {text}: a trained model keeps its settings; only where data lie can be said anew."
                f"{nearest('.'.join(path), names)} Allowed: {', '.join(names) or 'nothing in this domain'}."
            )


def evaluate_run(
    folder: RunFolder, device: str | None = None, settings: Sequence[str] = ()
) -> tuple[RunRecord, Evaluated]:
    """Evaluate the model of `load_run` and add the result to the record, unless it was measured on other data."""
    record, adapter, objective = load_run(folder, device, settings)
    try:
        found = evaluate_model(adapter, objective, Seeds(record.seed))
    except DipoleError as error:
        if adapter.kept is None or not adapter.data_fields:
            raise
        keys = ", ".join(f"{record.domain}.{key}" for key in sorted(adapter.data_fields))
        raise DataError(
            f"{error} The model itself is complete (`dipole embed` and `dipole export` need no data), but its "
            f"evaluation needs these. If they moved, say so: dipole eval {folder.path} --set KEY=PATH, of {keys}."
        ) from error
    if settings and not same_data(adapter, record):
        return record, found
    entry = Evaluation(
        time=now(),
        results=found.results,
        versions=library_versions(),
        notes=found.remarks,
        # Some numbers at the end of training come from a training batch. They are not compared.
        agrees=all(
            name in record.results and _same(value, record.results[name]) for name, value in found.results.items()
        ),
    )
    record = record.model_copy(update={"evaluations": [*record.evaluations, entry]})
    write_record(folder.record, record)
    return record, found


def _same(now: Number, then: Number) -> bool:
    return now == then or (now is not None and then is not None and math.isclose(now, then, rel_tol=0, abs_tol=1e-9))
