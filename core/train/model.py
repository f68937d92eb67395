"""The adapter and objective of a configuration: build them, save and load what was trained, evaluate it again.

model/module.safetensors and model/objective.safetensors hold the weights. model/kept/ has what a domain needs in
addition so that the model can be used without its training data (`Adapter.keep`).
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from dipole.core.objectives.objective import Composite, objective
from dipole.core.record import Evaluation, Number, RunRecord, library_versions, now, write_record
from dipole.core.train.adapter import Adapter, Sketch, same_data
from dipole.core.train.config import RunConfig
from dipole.core.train.domains import adapter_class
from dipole.core.train.evaluation import Evaluated, evaluate_model
from dipole.core.train.launch import pick_device
from dipole.core.train.recipe import parse_override
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.schedule import Schedules
from dipole.core.utils.errors import CheckpointError, ConfigError, DataError, DipoleError, RecordError, nearest
from dipole.core.utils.files import disk_refusing, instead_of_file, replacing
from dipole.core.utils.seeding import Seeds, seed_everything, set_deterministic

NARROW = 8  # width of the random rows


def build(
    config: RunConfig,
    folder: RunFolder,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    kept: Path | None = None,
) -> tuple[Adapter, Composite | None]:
    """Build the untrained adapter and objective of a configuration on a device.

    kept: the folder of a finished run's other files. The adapter is then built for use, without data.
    """
    seeds = Seeds(config.seed)
    seed_everything(seeds.model)
    domain = adapter_class(config.domain)
    validation = 0.0
    if domain.validates and config.train.part == "validation":
        validation = config.train.validation_share
    adapter = domain(
        config.settings,
        seed=seeds,
        device=device,
        workdir=folder.path,
        batch_size=config.train.batch_size,
        rank=rank,
        world_size=world_size,
        validation=validation,
        kept=kept,
    )
    adapter.reported = config.train.evaluate_on
    adapter.module.to(device)
    if config.objective == "none":
        return adapter, None
    seed_everything(seeds.stream("model", "objective"))  # its weights do not depend on the encoder's draws
    built = objective(config.objective)
    on_features = any(term.on_features for _, _, term in built)
    built.build(adapter.embedding_dim, adapter.pass_features() if on_features else None)
    return adapter, built.to(device)


def construct(config: RunConfig, world_size: int = 1) -> None:
    """Build the encoder and objective of a run without its data or memory, to find errors early.

    The objective also gets random rows, paired like the run's. For a domain without `sketch`, only the objective's text
    is checked. Results are cached. Raise DipoleError if the run cannot start.
    """
    sketch = adapter_class(config.domain).sketch(config.settings, config.train.batch_size, world_size)
    if config.objective != "none":
        _try_objective(config.objective, sketch)


@cache
def _try_objective(text: str, sketch: Sketch | None) -> None:
    with torch.device("meta"):
        objective(text, getattr(sketch, "width", None))
    if sketch is None:
        return
    # A narrow model suffices to check the pairs. At full width, L and prototypes would be slow.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        built = objective(text, NARROW)
        built(sketch.example(built, NARROW, *sketch.arguments))


def save_kept(folder: Path, adapter: Adapter) -> None:
    """Write the files that a domain needs in addition to weights, atomically. No folder if it needs none."""
    if type(adapter).keep is Adapter.keep:
        return
    with disk_refusing(f"cannot save the model {folder}", CheckpointError), replacing(folder) as temporary:
        temporary.mkdir()
        adapter.keep(temporary)


def save_weights(folder: Path, module: nn.Module, objective: Composite | None) -> None:
    """Write both files, each atomically. Tied weights are stored once and stay tied (`save_model`)."""
    for name, part in _parts(module, objective).items():
        path = folder / f"{name}.safetensors"
        with disk_refusing(f"cannot save the model {path}", CheckpointError), replacing(path) as temporary:
            save_model(part, str(temporary))


def load_weights(folder: Path, module: nn.Module, objective: Composite | None) -> None:
    """Read both files into modules of the same configuration."""
    for name, part in _parts(module, objective).items():
        path = folder / f"{name}.safetensors"
        if found := instead_of_file(path):
            raise CheckpointError(f"the model {path} cannot be loaded: it is {found}. Train again with --overwrite.")
        try:
            load_model(part, str(path))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"the model {path} is missing; was the run finished? `dipole train` continues it."
            ) from error
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(
                f"the model {path} cannot be loaded: {error}. Train again with --overwrite."
            ) from error


def _parts(module: nn.Module, objective: Composite | None) -> dict[str, nn.Module]:
    parts = {"module": module}
    if objective is not None and objective.state_dict():
        parts["objective"] = objective
    return parts


# A finished run ------------------------------------------------------------------------------------------------------


def load_run(
    folder: RunFolder, device: str | None = None, settings: Sequence[str] = ()
) -> tuple[RunRecord, Adapter, Composite | None]:
    """Return the record, the adapter and the objective of a finished run, with its trained weights.

    They are rebuilt from its folder. The adapter's `module` and the objective (None for "none") are in eval mode.

    Args:
        folder: the run, as `find_run` returns it.
        device: "auto", "cpu", "cuda", "cuda:1" or "mps". None: the recipe's `device`.
        settings: "table.key=value" with the new places of moved data (keys of `Adapter.data_fields`).

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
        names = [f"{config.domain}.{key}" for key in sorted(domain.data_fields)]
        for text in settings:
            path = ".".join(parse_override(text)[0][:2])
            if path not in names:
                raise ConfigError(
                    f"--set {text}: a trained model keeps its settings. Only where data lie can be set anew."
                    f"{nearest(path, names)} Allowed: {', '.join(names) or 'nothing in this domain'}."
                )
        config = folder.read_config(settings)
    if config.deterministic:
        set_deterministic()
    place = pick_device(device or config.device)
    kept = None if domain.keep is Adapter.keep else folder.kept
    if kept is not None and not kept.is_dir():
        raise CheckpointError(f"the model is incomplete: {kept} is missing. Train again with --overwrite.")
    adapter, objective = build(config, folder, place, kept=kept)
    adapter.part = adapter.reported
    load_weights(folder.model, adapter.module, objective)
    Schedules(config.train, objective, adapter.steps_per_epoch).set(record.steps)
    for module in filter(None, (adapter.module, objective)):
        module.eval()
    return record, adapter, objective


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
            name in record.results and _close(value, record.results[name]) for name, value in found.results.items()
        ),
    )
    record = record.model_copy(update={"evaluations": [*record.evaluations, entry]})
    write_record(folder.record, record)
    return record, found


def _close(now: Number, then: Number) -> bool:
    return now == then or (now is not None and then is not None and math.isclose(now, then, rel_tol=0, abs_tol=1e-9))
