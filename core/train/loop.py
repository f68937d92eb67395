"""The one training loop, on Lightning Fabric: batch -> adapter.embed -> Pairs -> objective -> step -> metrics."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from dipole.core.contrast.gather import Related, relate
from dipole.core.contrast.objective import Composite, Outcome, objective
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.distributed import alone
from dipole.core.ground.errors import CheckpointError, ConfigError, DipoleError, TrainingError
from dipole.core.ground.progress import Progress, duration
from dipole.core.ground.seeding import Seeds, rng_state, seed_everything, set_deterministic, set_rng_state
from dipole.core.ground.text import number
from dipole.core.record import RunRecord, hardware, library_versions, now, peak_memory, write_record
from dipole.core.train.adapter import Adapter
from dipole.core.train.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from dipole.core.train.config import RunConfig
from dipole.core.train.domains import adapter_class
from dipole.core.train.evaluation import Evaluated, evaluate
from dipole.core.train.metrics import Meter, MetricsFile
from dipole.core.train.model_files import save_weights
from dipole.core.train.optimizer import build_optimizer, learning_rate
from dipole.core.train.run_folder import DEFAULT_RUNS, RunFolder

CHECKPOINT_FORMAT = 1
BESIDE = ("train/loss", "train/return")
"""Values that stand beside the progress bar."""
SHOWN = 4
"""So many results of an evaluation are shown beside the progress; all are in metrics.jsonl."""


class RunInterruptedError(TrainingError):
    """A signal ended the run after a complete step; the checkpoint is saved."""


def train(
    config: RunConfig,
    runs: Path = DEFAULT_RUNS,
    *,
    resume: Literal["auto", "never"] | Path = "auto",
    overwrite: bool = False,
    quiet: bool = False,
    tensorboard: bool = False,
) -> RunRecord:
    """Train, evaluate and record one configuration.

    A finished run of the same configuration is returned as it is. Started by `torchrun`, every rank calls this.

    Args:
        config: what to run; its hash names the folder inside `runs`.
        runs: folder of all runs.
        resume: "auto" continues from the newest readable checkpoint of this configuration, "never" starts again, a path
            continues from that checkpoint.
        overwrite: run again although a finished record exists; the old one is removed.
        quiet: no progress.
        tensorboard: write event files beside metrics.jsonl.

    Raises:
        TrainingError, CheckpointError, ConfigError, DataError, RecordError: each says what to do; the record keeps it.
    """
    folder = RunFolder(runs / config.hash)
    record = None if overwrite else folder.read_record()
    if record is not None and record.status == "done":
        return record
    set_deterministic(config.deterministic)
    fabric = _fabric(config)
    progress = Progress(quiet or not fabric.is_global_zero)
    try:
        if fabric.is_global_zero:
            folder.open(config)
        fabric.barrier()
        state = _starting_state(config, folder, resume, overwrite, progress)
        fabric.barrier()
        if state is None and fabric.is_global_zero:
            folder.clear()
        return Run(config, folder, fabric, progress, state, tensorboard).run()
    except BaseException:
        if fabric.world_size > 1:
            # A process that ends with its group open would wait for the other ranks for ever.
            torch.distributed.destroy_process_group()
        raise
    finally:
        progress.close()
        folder.close()


class Run:
    """A run in progress: what `Adapter.fit` works with.

    Attributes for a domain with its own loop: `config`, `seeds`, `device`, `folder`, `objective` (None for "none"),
    `step`, `total_steps`. Such a loop calls `advance` after every update until `step` reaches `total_steps`; logging,
    evaluation, checkpoints, progress and interruption happen there.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        fabric: Any,
        progress: Progress,
        state: dict[str, Any] | None,
        tensorboard: bool,
    ) -> None:
        self.config = config
        self.folder = folder
        self.fabric = fabric
        self.device: torch.device = fabric.device
        self.seeds = Seeds(config.seed)
        self.step = 0
        self._progress = progress
        self._began = time.monotonic()
        self._elapsed_before = 0.0
        self._meter = Meter()
        # Ranks that end after different steps would wait for each other: several ranks end at once.
        self._interrupts = _Interrupts(enabled=fabric.world_size == 1)
        self._optimizer: torch.optim.Optimizer | None = None
        self._pairs: tuple[Pairs, ...] | None = None
        self._last: tuple[int, Evaluated] | None = None
        self._negatives: float | None = None
        self._state = state
        batch_size, ranks = config.train.batch_size, fabric.world_size
        if batch_size % ranks:
            raise ConfigError(f"train.batch_size: {batch_size} cannot be divided among {ranks} ranks.")
        self.adapter, self.objective = build(config, folder, self.device, fabric.global_rank, ranks)
        spe = self.adapter.steps_per_epoch
        if spe < 1:
            raise ConfigError(f"train.batch_size: {batch_size} is more than one epoch of this data holds.")
        every = config.train.evaluate_every
        self.total_steps = config.train.in_steps(config.train.length, spe)
        self._evaluate_every = config.train.in_steps(every, spe) if every else 0
        self._checkpoint_every = config.train.in_steps(config.train.checkpoint_every or 1, spe)
        seed_everything(self.seeds.stream("model", "train", fabric.global_rank))
        self._restore(state)
        self._metrics: MetricsFile | None = None
        self._board: Any = None
        if fabric.is_global_zero:
            self._metrics = MetricsFile(folder.metrics, state["metrics_bytes"] if state else 0)
            self._board = _tensorboard(folder.tensorboard, self.step) if tensorboard else None
        self._started = now()
        earlier = folder.read_record() if state and folder.record.is_file() else None
        if earlier is not None:
            self._started = earlier.started

    # The course of a run -------------------------------------------------------------------------------------------

    def run(self) -> RunRecord:
        """Train to the end and return the record; whatever goes wrong is in the record before it is raised."""
        self._write_record("running")
        self._progress.start(self.config.name, self.total_steps, self.step)
        try:
            with self._interrupts:
                self.adapter.module.train()
                if self.step < self.total_steps:
                    self.adapter.fit(self)
                return self._finish()
        except RunInterruptedError as error:
            self._write_record("interrupted", str(error))
            raise
        except KeyboardInterrupt:
            message = f"interrupted after step {self.step}. Repeat the command to continue from the last checkpoint."
            self._write_record("interrupted", message)
            raise RunInterruptedError(message) from None
        except (torch.OutOfMemoryError, MemoryError) as error:
            message = (
                f"out of memory at step {self.step + 1}: lower train.batch_size, or use a machine with more. ({error})"
            )
            self._write_record("failed", message)
            raise TrainingError(message) from error
        except Exception as error:
            self._write_record("failed", str(error) if isinstance(error, DipoleError) else repr(error))
            raise
        finally:
            if self._metrics is not None:
                self._metrics.close()
            if self._board is not None:
                self._board.close()

    def loop(self) -> None:
        """Train `adapter.module` and the objective's parameters together: the loop of every domain without its own."""
        assert self.objective is not None
        config, adapter, objective = self.config.train, self.adapter, self.objective
        spe = adapter.steps_per_epoch
        parameters = [p for p in [*adapter.module.parameters(), *objective.parameters()] if p.requires_grad]
        optimizer = build_optimizer(config, parameters)
        if self._state is not None:
            optimizer.load_state_dict(self._state["optimizer"])
            self._state = None
        self._optimizer = optimizer
        step_module = _Step(adapter, objective, mixed=config.precision != "32")
        forward, stepper = self.fabric.setup(step_module, optimizer)
        while self.step < self.total_steps:
            epoch, start = divmod(self.step, spe)
            seen = 0
            for batch in adapter.batches(epoch, start):
                rate = learning_rate(config, self.step, self.total_steps, spe)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                loss = forward(_Opaque(batch))
                optimizer.zero_grad()
                self.fabric.backward(loss)
                grads = [p.grad for p in parameters if p.grad is not None]
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
                outcome, related = step_module.taken()
                self._pairs = related.local_pairs
                # The only wait for the device in a step: nothing may reach the weights unseen.
                if not math.isfinite(loss.detach() + norm):
                    raise TrainingError(_explain_not_finite(self.step + 1, outcome, related, objective, norm))
                if config.clip is not None:
                    clip_grads_with_norm_(parameters, config.clip, norm, foreach=True)
                stepper.step()
                objective.after_step(rate)
                adapter.after_step()
                if self._negatives is None:
                    counts = torch.cat([pairs.negative_counts for pairs in self._pairs])
                    self._negatives = float(counts.float().mean())
                    self._progress.note(f"negatives per anchor: {self._negatives:g}")
                values = {"train/loss": loss.detach(), "train/grad_norm": norm, "train/lr": rate}
                for name, term in outcome.terms.items():
                    values[f"train/loss.{name}"] = term.value
                self.advance(values)
                seen += 1
                if self.step >= self.total_steps:
                    return
            if seen != spe - start:
                raise TrainingError(
                    f"epoch {epoch} gave {seen} batches from number {start} on where {spe - start} were announced "
                    f"({type(adapter).__name__}.steps_per_epoch)."
                )

    def advance(self, values: Mapping[str, Tensor | float], steps: int = 1) -> None:
        """Count `steps` steps with their values (names like "train/loss"; scalar tensors are not waited for).

        Raises:
            RunInterruptedError: after a signal, once the checkpoint is written.
        """
        before, self.step = self.step, self.step + steps
        self._meter.add(values)
        if _crossed(before, self.step, self.config.train.log_every) or self.step >= self.total_steps:
            self.log(self._meter.take())
        self._progress.update(self.step)
        if self.step >= self.total_steps:
            return
        if self._evaluate_every and _crossed(before, self.step, self._evaluate_every):
            self.evaluate()
        if self._interrupts.requested:
            self.checkpoint()
            raise RunInterruptedError(
                f"interrupted after step {self.step} of {self.total_steps}; the checkpoint is saved. "
                "Repeat the command to continue."
            )
        if _crossed(before, self.step, self._checkpoint_every):
            self.checkpoint()

    def log(self, values: Mapping[str, float | None]) -> None:
        """Write one line of metrics.jsonl for the current step."""
        shown = {name: value for name, value in values.items() if name in BESIDE and value is not None}
        if shown:
            self._progress.values(shown)
        if self._metrics is None:
            return
        line = {"step": self.step, "epoch": round(self.epoch, 4), "time": round(self.elapsed, 2), **values}
        self._metrics.write(line)
        if self._board is not None:
            for name, value in values.items():
                if value is not None:
                    self._board.add_scalar(name, value, self.step)

    def evaluate(self) -> Evaluated | None:
        """Probe the encoder as it is, log and return the numbers (None on ranks other than 0)."""
        found = None
        if self.fabric.is_global_zero:
            self._progress.status("evaluating")
            with alone():
                found = evaluate(self.adapter, self.objective, self.seeds, self._pairs)
            self._last = (self.step, found)
            self.log(found.as_metrics())
            shown = [f"{name} {number(value)}" for name, value in list(found.results.items())[:SHOWN]]
            self._progress.note(f"step {self.step}: {'  '.join(shown)}")
        self.fabric.barrier()
        return found

    def checkpoint(self) -> None:
        """Save everything that continues this run bit for bit."""
        rank_state = {"rng": rng_state(), "adapter": self.adapter.state_dict()}
        ranks: list[Any] = [rank_state]
        if self.fabric.world_size > 1:
            ranks = [None] * self.fabric.world_size
            torch.distributed.all_gather_object(ranks, rank_state)
        if self._metrics is None:
            return
        state = {
            "format": CHECKPOINT_FORMAT,
            "hash": self.config.hash,
            "step": self.step,
            "elapsed": self.elapsed,
            "module": self.adapter.module.state_dict(),
            "objective": self.objective.state_dict() if self.objective is not None else {},
            "optimizer": self._optimizer.state_dict() if self._optimizer is not None else {},
            "meter": self._meter.state_dict(),
            "negatives": self._negatives,
            "metrics_bytes": self._metrics.position(),
            "ranks": ranks,
        }
        save_checkpoint(self.folder.checkpoints, self.step, state)

    @property
    def epoch(self) -> float:
        return self.step / self.adapter.steps_per_epoch

    @property
    def elapsed(self) -> float:
        """Seconds of this run, those before a resume included."""
        return self._elapsed_before + time.monotonic() - self._began

    # Beginning and end ---------------------------------------------------------------------------------------------

    def _restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        if len(state["ranks"]) != self.fabric.world_size:
            raise CheckpointError(
                f"the checkpoint was written by {len(state['ranks'])} ranks, this run has {self.fabric.world_size}. "
                "Start as many, or use --resume never."
            )
        try:
            self.adapter.module.load_state_dict(state["module"])
            if self.objective is not None:
                self.objective.load_state_dict(state["objective"])
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint does not fit the model: {error}. Use --resume never.") from error
        mine = state["ranks"][self.fabric.global_rank]
        self.adapter.load_state_dict(mine["adapter"])
        self._meter.load_state_dict(state["meter"], self.device)
        self.step = state["step"]
        self._elapsed_before = state["elapsed"]
        self._negatives = state["negatives"]
        set_rng_state(mine["rng"])

    def _finish(self) -> RunRecord:
        # An error in the last evaluation must not cost the training.
        self.checkpoint()
        if self._last is None or self._last[0] != self.step:
            self.evaluate()
        if not self.fabric.is_global_zero:
            return self._record("done")
        save_weights(self.folder.model, self.adapter.module, self.objective)
        record = self._write_record("done")
        self.folder.clear_checkpoints()
        self._progress.close(self.step)
        self._progress.note(f"finished {self.step} steps in {duration(self.elapsed)}: {self.folder.path}")
        return record

    def _record(
        self, status: Literal["running", "done", "failed", "interrupted"], error: str | None = None
    ) -> RunRecord:
        found = self._last[1] if self._last is not None and status == "done" else None
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
            versions=library_versions(),
            hardware=hardware(self.device, self.fabric.world_size),
            seeds=self.seeds.as_dict(),
            data=self.adapter.data_info(),
            parameters=sum(p.numel() for m in modules for p in m.parameters() if p.requires_grad),
            negatives_per_anchor=self._negatives,
            steps=self.step,
            epochs=self.epoch,
            wall_seconds=round(self.elapsed, 3),
            peak_memory_bytes=peak_memory(),
            peak_device_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
            results=found.results if found else {},
            diagnostics=found.diagnostics if found else {},
            histogram=found.histogram if found else None,
        )

    def _write_record(self, status: Any, error: str | None = None) -> RunRecord:
        record = self._record(status, error)
        if self.fabric.is_global_zero:
            try:
                write_record(self.folder.record, record)
            except DipoleError:
                # A failure that cannot be recorded (a full disk) must not hide the failure itself.
                if status not in ("failed", "interrupted"):
                    raise
        return record


class _Opaque:
    """Carries a batch through Fabric and DDP, which would otherwise walk over it and cast its tensors."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Step(nn.Module):
    """Encoder and objective as one module, so that DDP sees one forward pass and all parameters."""

    def __init__(self, adapter: Adapter, objective: Composite, mixed: bool) -> None:
        super().__init__()
        self.module = adapter.module
        self.objective = objective
        self._adapter = adapter
        self._mixed = mixed
        self._taken: tuple[Outcome, Related] | None = None

    def forward(self, batch: _Opaque) -> Tensor:
        related = relate(self._adapter.embed(batch.value))
        # The similarity matrix is where half precision would cost accuracy; the engine widens its inputs itself.
        with torch.autocast(related.pairs[0].anchors.device.type, enabled=False) if self._mixed else nullcontext():
            outcome: Outcome = self.objective(related)
        self._taken = outcome, related
        return outcome.loss

    def taken(self) -> tuple[Outcome, Related]:
        """Hand over the last outcome, keeping no reference to its tensors."""
        assert self._taken is not None
        taken, self._taken = self._taken, None
        return taken


class _Interrupts:
    """The first SIGINT or SIGTERM asks for an end after the step; the second ends at once."""

    def __init__(self, enabled: bool) -> None:
        self.requested = False
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if self._enabled:
            for which in (signal.SIGINT, signal.SIGTERM):
                self._before[which] = signal.signal(which, self._handle)

    def __exit__(self, *_: object) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)
        self._before = {}

    def _handle(self, which: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def build(
    config: RunConfig, folder: RunFolder, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[Adapter, Composite | None]:
    """Build the untrained adapter and objective of a configuration on a device.

    The objective has its own stream of the seed: its weights do not depend on how many numbers the encoder drew.
    """
    seeds = Seeds(config.seed)
    seed_everything(seeds.model)
    adapter = adapter_class(config.domain)(
        config.settings,
        seed=seeds,
        device=device,
        workdir=folder.path,
        batch_size=config.train.batch_size,
        rank=rank,
        world_size=world_size,
    )
    adapter.module.to(device)
    if config.objective == "none":
        return adapter, None
    seed_everything(seeds.stream("model", "objective"))
    return adapter, objective(config.objective, dim=adapter.embedding_dim).to(device)


def pick_device(text: str) -> torch.device:
    """Turn "auto", "cpu", "cuda", "cuda:1" or "mps" into a device that is there.

    Raises:
        ConfigError: it is not.
    """
    if text == "auto":
        return torch.device(
            "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        )
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: {text!r} is not here ({torch.cuda.device_count()} CUDA devices found). "
            'Use device = "auto" or "cpu"; `dipole doctor` says more.'
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError('device: "mps" is not here. Use device = "auto" or "cpu".')
    return device


def _crossed(before: int, after: int, every: int) -> bool:
    return after // every > before // every


def _starting_state(
    config: RunConfig, folder: RunFolder, resume: str | Path, overwrite: bool, progress: Progress
) -> dict[str, Any] | None:
    """Return the checkpoint to continue from, or None to begin."""
    if isinstance(resume, Path):
        state = load_checkpoint(resume)
    elif resume == "never" or overwrite:
        return None
    else:
        found, problems = newest_checkpoint(folder.checkpoints)
        for problem in problems:
            progress.warn(f"warning: {problem}")
        if found is None:
            if problems:
                progress.warn("warning: no checkpoint is left to continue from; starting at step 0.")
            return None
        state = found
    if state.get("format") != CHECKPOINT_FORMAT or state.get("hash") != config.hash:
        raise CheckpointError(
            f"the checkpoint belongs to another run ({state.get('hash')}), this configuration is {config.hash}. "
            "Use the configuration it was written with, or --resume never."
        )
    progress.note(f"continuing at step {state['step']}")
    return state


def _fabric(config: RunConfig) -> Any:
    """Make and launch Fabric for one process, or for the ranks that torchrun started."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    device = pick_device(config.device)
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    settings: dict[str, Any] = {"devices": 1 if device.index is None else [device.index]}
    if ranks > 1:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        # Evaluation runs on rank 0 while the others wait.
        settings = {
            "devices": local,
            "num_nodes": ranks // local,
            "strategy": DDPStrategy(timeout=timedelta(hours=12)),
        }
    precision = "32-true" if config.train.precision == "32" else "bf16-mixed"
    fabric = Fabric(accelerator=device.type, precision=cast(Any, precision), **settings)
    fabric.launch()
    return fabric


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError("--tensorboard needs a package: pip install 'dipole[tensorboard]'") from error
    return SummaryWriter(str(folder), purge_step=step or None)


def _explain_not_finite(step: int, outcome: Outcome, related: Related, objective: Composite, norm: Tensor) -> str:
    """Name the term and the place; this runs once, so it may compute."""
    shown = ", ".join(f"{name} = {float(term):.6g}" for name, term in outcome.terms.items())
    bad = [name for name, term in outcome.terms.items() if not math.isfinite(float(term))]
    if bad:
        what = f"the loss is not finite in the term{'s' if len(bad) > 1 else ''} {', '.join(map(repr, bad))} ({shown})"
    elif not math.isfinite(float(outcome.loss.detach())):
        what = f"the weighted sum of the terms overflows ({shown})"
    else:
        culprits = [repr(name) for name in _terms_with_bad_gradient(related, objective)]
        source = f"through the term {' and '.join(culprits)}" if culprits else "inside the encoder"
        what = f"the gradient norm is {float(norm):g} while the loss is finite ({shown}); it arises {source}"
    embeddings = list({id(x): x for pairs in related.pairs for x in (pairs.anchors, pairs.candidates)}.values())
    rows = sum(int((~torch.isfinite(each)).any(1).sum()) for each in embeddings)
    where = " The embeddings are finite."
    if rows:
        where = f" {rows} of {sum(map(len, embeddings))} embeddings are not finite: look at the encoder and the data."
    return (
        f"step {step}: {what}.{where} Stopped before the optimizer step; the last checkpoint is intact. "
        "Cures: a lower train.learning_rate, train.clip, a higher temperature, train.precision = 32."
    )


def _terms_with_bad_gradient(related: Related, objective: Composite) -> Iterator[str]:
    leaves: dict[int, Tensor] = {}

    def leaf(x: Tensor) -> Tensor:
        return leaves.setdefault(id(x), x.detach().requires_grad_())

    # The same tensor stays the same leaf: anchors that are the candidates are told by that.
    pairs = tuple(replace(p, anchors=leaf(p.anchors), candidates=leaf(p.candidates)) for p in related.pairs)
    for name, _, term in objective:
        grads = torch.autograd.grad(
            term(replace(related, pairs=pairs)), [*leaves.values(), *term.parameters()], allow_unused=True
        )
        if any(grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads):
            yield name
