"""Everything of a run that changes while it trains: how it is kept, continued bit for bit, and put on record."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from torch import nn

from dipole.core.objectives.pairs import Pairs
from dipole.core.record import RunRecord, hardware, library_versions, now
from dipole.core.train.adapter import same_data
from dipole.core.train.best import Best
from dipole.core.train.build import build, scheduled
from dipole.core.train.checkpoint import FORMAT, fitting
from dipole.core.train.config import RunConfig
from dipole.core.train.evaluation import Evaluated
from dipole.core.train.launch import Processes
from dipole.core.train.metrics import Meter
from dipole.core.train.notes import TermNotes
from dipole.core.train.other_ranks import same, unsupported_reason
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import CheckpointError, ConfigError
from dipole.core.utils.machine import peak_memory
from dipole.core.utils.seeding import Seeds, rng_state, seed_everything, set_rng_state
from dipole.core.utils.text import counted

Status = Literal["running", "done", "failed", "interrupted"]


class RunState:
    """A run between two steps.

    Args:
        config: what is run.
        folder: its folder, open.
        processes: those that train it.
        state: the checkpoint to continue from.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, processes: Processes, state: dict[str, Any] | None
    ) -> None:
        self.config = config
        self.folder = folder
        self.processes = processes
        self.device = processes.device
        self.seeds = Seeds(config.seed)
        self.step = 0
        self._meter = Meter()
        self._notes = TermNotes()
        self._best = Best(config.train.best_by)
        self._negatives: float | None = None
        self._pairs: tuple[Pairs, ...] | None = None
        self._evaluated: tuple[int, Evaluated] | None = None
        self._of_pairs: tuple[int, dict[str, float] | None] | None = None  # of the batch of that step
        self._is_due = False  # the evaluation after this step was not made, or not to its end
        self._optimizer: torch.optim.Optimizer | None = None
        self._optimizer_state: dict[str, Any] | None = None
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=config.train.precision == "16-mixed")
        self._began, self._seconds_before = time.monotonic(), 0.0
        self._training_seconds = 0.0
        batch_size, ranks = config.train.batch_size, processes.size
        if batch_size % ranks:
            raise ConfigError(f"train.batch_size: {batch_size} cannot be divided among {counted(ranks, 'rank')}.")
        self.adapter, self.objective = build(config, folder, self.device, processes.rank, ranks)
        self._curves_on = self.adapter.part
        if self.adapter.steps_per_epoch < 1:
            raise ConfigError(f"train.batch_size: {batch_size} is more than one epoch of this data holds.")
        seed_everything(self.seeds.stream("model", "train", processes.rank))
        self._undrawn = rng_state()
        if state is not None:
            self._restore(state)
        self._schedules = scheduled(config.train, self.objective, self.adapter.steps_per_epoch)
        self._scheduled = self._schedules.set(self.step)
        earlier = folder.read_record() if state and folder.record.is_file() else None
        if earlier is not None and self.adapter.built_from_data and not same_data(self.adapter, earlier):
            raise CheckpointError(
                f"the data of the run {folder.path} have changed since its checkpoint was written, and its model is "
                "built from them. Put the old data back, or start again with --resume never."
            )
        self._started = earlier.started if earlier else now()
        self._aside = self.elapsed - self._training_seconds  # building it now and before, evaluating and saving before

    @property
    def epoch(self) -> float:
        """Passes through the data, a part of one included."""
        return self.step / self.adapter.steps_per_epoch

    @property
    def elapsed(self) -> float:
        """Seconds of this run, those before a resume included."""
        return self._seconds_before + time.monotonic() - self._began

    def _snapshot(self) -> dict[str, Any]:
        """Everything that continues this run bit for bit, of all ranks; every rank calls it."""
        rng = rng_state()
        mine = {"rng": rng, "drew": not same(rng, self._undrawn), "adapter": self.adapter.state_dict()}
        ranks: list[Any] = [mine]
        if self.processes.size > 1:
            ranks = [None] * self.processes.size
            torch.distributed.all_gather_object(ranks, mine)
        return {
            "format": FORMAT,
            "hash": self.config.hash,
            "step": self.step,
            "elapsed": self.elapsed,
            "training_seconds": self._training_seconds,
            "module": self.adapter.module.state_dict(),
            "objective": self.objective.state_dict() if self.objective is not None else {},
            "optimizer": self._optimizer.state_dict() if self._optimizer is not None else {},
            "scaler": self._scaler.state_dict(),
            "meter": self._meter.state_dict(),
            "notes": self._notes.state_dict(),
            "best": self._best.state_dict(),
            "negatives": self._negatives,
            "of_pairs": self._of_pairs[1] if self._of_pairs and self._of_pairs[0] == self.step else None,
            "due": self._is_due,
            "ranks": ranks,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        with fitting():
            self._take_over(state)

    def _take_over(self, state: dict[str, Any]) -> None:
        ranks, size = state["ranks"], self.processes.size
        synchronized = bool(getattr(self.config.train, "sync_batch_norm", False))
        if len(ranks) != size and (why := unsupported_reason(ranks, self.adapter.module, synchronized)):
            raise CheckpointError(
                f"the checkpoint was written by {counted(len(ranks), 'rank')}, this run has {size}, and {why}. "
                "Start as many, or use --resume never."
            )
        try:
            self.adapter.module.load_state_dict(state["module"])
            if self.objective is not None:
                self.objective.load_state_dict(state["objective"])
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint does not fit the model: {error}. Use --resume never.") from error
        # Where the number may differ, the ranks have no state of their own.
        mine = ranks[self.processes.rank if len(ranks) == size else 0]
        self.adapter.load_state_dict(mine["adapter"])
        self._optimizer_state = state["optimizer"]
        if state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        self._meter.load_state_dict(state["meter"], self.device)
        self._notes.load_state_dict(state["notes"])
        self._best.load_state_dict(state["best"])
        self.step = state["step"]
        self._seconds_before = state["elapsed"]
        self._training_seconds = state["training_seconds"]
        self._negatives = state["negatives"]
        if state["due"]:
            self._is_due, self._of_pairs = True, (self.step, state["of_pairs"])
        if len(ranks) == size:
            set_rng_state(mine["rng"])

    def _record(self, status: Status, error: str | None = None) -> RunRecord:
        """Put the run as it is now on record; results only where it is done."""
        found = self._evaluated[1] if self._evaluated is not None and status == "done" else None
        modules: list[nn.Module] = [m for m in (self.adapter.module, self.objective) if m is not None]
        config = self.config
        return RunRecord(
            hash=config.hash,
            name=config.name,
            domain=config.domain,
            objective=config.objective,
            seed=config.seed,
            status=status,
            error=error,
            started=self._started,
            updated=now(),
            config=config.model_dump(mode="json", exclude_none=True),
            identity=config.determining(),
            versions=library_versions(),
            hardware=hardware(self.device, self.processes.size),
            seeds=self.seeds.as_dict(),
            data=self.adapter.data_info(),
            parameters=sum(p.numel() for m in modules for p in m.parameters() if p.requires_grad),
            negatives_per_anchor=self._negatives,
            notes=[*self._notes.lines, *(found.remarks if found else [])],
            steps=self.step,
            epochs=self.epoch,
            wall_seconds=round(self.elapsed, 3),
            training_seconds=round(self._training_seconds, 3),
            peak_memory_bytes=peak_memory(),
            peak_device_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
            evaluated_on=config.train.evaluate_on,
            curves_on=self._curves_on,
            results=found.results if found else {},
            chosen=None if not found or (chosen := self._best.told()) is None else {**chosen, "on": self._curves_on},
            diagnostics=found.diagnostics if found else {},
            histogram=found.histogram if found else None,
        )
