"""The one training loop: batch -> adapter.embed -> rows of all ranks -> Pairs -> objective -> step -> metrics."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from dipole.core.record import RunRecord
from dipole.core.train.bookkeeping import Bookkeeping
from dipole.core.train.build import build
from dipole.core.train.checkpoint import fitting, starting_state
from dipole.core.train.config import RunConfig
from dipole.core.train.launch import fewer_than_asked, launch, pick_device
from dipole.core.train.memory_saving import Encoding, compiler_problem
from dipole.core.train.nonfinite import Unread, checks_late, explain_not_finite, overflowed
from dipole.core.train.optimizer import build_optimizer, learning_rate, skip_if, take_over
from dipole.core.train.run_folder import DEFAULT_RUNS, RunFolder
from dipole.core.train.signals import Interrupted, Interrupts, RunInterruptedError
from dipole.core.train.step import NoScatter, Step
from dipole.core.train.trackers import check_trackers
from dipole.core.utils.errors import ConfigError, DipoleError, TrainingError
from dipole.core.utils.first_error import first_message
from dipole.core.utils.memory import is_out_of_memory
from dipole.core.utils.progress import Progress, quietly
from dipole.core.utils.seeding import set_deterministic
from dipole.core.utils.sync_batch_norm import synchronize
from dipole.core.utils.transfer import AsyncHostCopy

__all__ = ["Run", "RunInterruptedError", "build", "pick_device", "train"]


def train(
    config: RunConfig,
    runs: Path = DEFAULT_RUNS,
    *,
    resume: Literal["auto", "never"] | Path = "auto",
    overwrite: bool = False,
    quiet: bool = False,
    log: Sequence[str] = (),
    tensorboard: bool = False,
) -> RunRecord:
    """Train, evaluate and record one configuration.

    A finished run of the same configuration is returned as it is. Started by torchrun, accelerate or srun, every
    rank calls this.

    Args:
        config: what to run (`load(...).config`); its hash names the folder inside `runs`.
        runs: folder of all runs.
        resume: "auto" continues from the newest readable checkpoint of this configuration, "never" starts again, a
            `Path` (no text) continues from that checkpoint.
        overwrite: run again although a finished record exists; the old one is removed.
        quiet: no progress.
        log: trackers that get the numbers besides metrics.jsonl: "tensorboard", "wandb", "mlflow", "trackio".
        tensorboard: the same as log=["tensorboard"].

    Returns:
        The record of the finished run.

    Raises:
        TrainingError: training cannot go on, or another process trains this run; the record keeps why.
        RunInterruptedError: a signal ended it; the checkpoint is saved, and the same call continues.
        CheckpointError: a checkpoint is missing, damaged or of another run.
        ConfigError: a device, a tracker, a setting or `resume` is not possible here.
        DataError: the data set is missing or damaged.
        RecordError: the record that is there cannot be read.
    """
    if not isinstance(resume, Path) and resume not in ("auto", "never"):
        raise ConfigError(f"resume must be 'auto', 'never' or the Path of a checkpoint (no text), got {resume!r}.")
    folder = RunFolder(runs / config.hash)
    record = None if overwrite else folder.read_record()
    if record is not None and record.status == "done":
        return record
    trackers = check_trackers([*log, *(["tensorboard"] if tensorboard else [])])
    set_deterministic(config.deterministic)
    with Interrupts() as interrupts, quietly(quiet):
        try:
            begin = resume if isinstance(resume, Path) or not overwrite else "never"
            return _train(config, folder, begin, quiet, trackers, interrupts)
        except Interrupted as interrupted:
            raise RunInterruptedError(
                "interrupted before the first step. Repeat the command to continue.", interrupted.signum
            ) from None


def _train(
    config: RunConfig,
    folder: RunFolder,
    resume: Literal["auto", "never"] | Path,
    quiet: bool,
    trackers: Sequence[str],
    interrupts: Interrupts,
) -> RunRecord:
    processes = launch(config)
    progress = Progress(quiet, mute=not processes.is_main)
    if fewer := fewer_than_asked():
        progress.warn(f"warning: {fewer}.")
    try:
        if processes.is_main:
            folder.open(config)
        processes.wait()
        state = starting_state(folder.checkpoints, config.hash, resume, progress.warn)
        if state is not None:
            progress.note(f"continuing at step {state['step']}")
        processes.wait()
        if state is None and processes.is_main:
            folder.clear()
        return Run(config, folder, processes, progress, state, interrupts, trackers).run()
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            first_message(str(error))  # what ends this process ends the others: theirs is not the reason
        processes.close()
        raise
    finally:
        progress.close()
        folder.close()


class Run(Bookkeeping):
    """A run in progress: what `Adapter.fit` works with.

    A loop of one's own calls `advance` after every update until `step` reaches `total_steps`; logging, evaluation,
    checkpoints, progress and interruption happen there. Before that it calls `note_terms` with what its objective
    returned, and once its state is restored `catch_up`.

    Attributes:
        config: what is run.
        seeds: of the run.
        device: of this rank.
        folder: of the run.
        objective: the `Composite`; None for "none".
        step: updates done.
        total_steps: of the whole run.
    """

    _unread: Unread | None = None

    def run(self) -> RunRecord:
        """Train to the end; whatever goes wrong is in the record before it is raised.

        Returns:
            The record.

        Raises:
            RunInterruptedError: a signal or a key ended it.
            TrainingError: memory is too small, or a loss or gradient is not finite.
        """
        try:
            self._write_record("running")
            self._progress.start(self.config.name, self.total_steps, self.step)
            for line in self.adapter.remarks():
                self._progress.note(line)
            with self._interrupts.finishing():
                self.adapter.module.train()
                if self.step < self.total_steps or self._is_due:
                    self.adapter.fit(self)
                return self.finish()
        except RunInterruptedError as error:
            self._end("interrupted", str(error))
            raise
        except KeyboardInterrupt as error:
            message = f"interrupted after step {self.step}. Repeat the command to continue from the last checkpoint."
            self._end("interrupted", message)
            signum = error.signum if isinstance(error, Interrupted) else signal.SIGINT
            raise RunInterruptedError(message, signum) from None
        except Exception as error:
            if is_out_of_memory(error):
                message = (
                    f"out of memory at step {self.step + 1}: set train.microbatch or train.activation_checkpointing, "
                    f"lower train.batch_size, or use a machine with more. ({error})"
                )
                self._end("failed", message)
                raise TrainingError(message) from error
            self._end("failed", str(error) if isinstance(error, DipoleError) else repr(error))
            raise

    def _end(self, status: Literal["failed", "interrupted"], message: str) -> None:
        """Put an early end on record; where another rank failed first, that is why this one did."""
        self._write_record(status, first_message(message) or message)
        if self._metrics is not None:
            self._metrics.close(status)

    def loop(self) -> None:
        """Train `adapter.module` and the objective's parameters together: the loop of every domain without its own.

        Raises:
            ConfigError: a setting of [train] has no effect on this module.
            CheckpointError: the optimizer's state does not fit the module.
            TrainingError: a loss or gradient is not finite, or an epoch has another number of batches than was
                announced.
        """
        assert self.objective is not None
        config, adapter, objective = self.config.train, self.adapter, self.objective
        spe = adapter.steps_per_epoch
        parameters = [p for p in [*adapter.module.parameters(), *objective.parameters()] if p.requires_grad]
        optimizer = self._optimizer = build_optimizer(config, parameters)
        if self._optimizer_state is not None:
            with fitting():
                take_over(optimizer, self._optimizer_state)
            self._optimizer_state = None
        scaler = self._scaler
        if config.sync_batch_norm and not synchronize(adapter.module):
            raise ConfigError("train.sync_batch_norm: has no effect, as there is no batch norm; leave it out.")
        step = Step(adapter, objective, Encoding(adapter.encoders(), config, self._compiles()), config.precision)
        forward = self.processes.wrap(step)
        late = checks_late(self.device, optimizer, scaler)
        self.catch_up()
        while self.step < self.total_steps:
            epoch, start = divmod(self.step, spe)
            seen = 0
            for batch in adapter.batches(epoch, start):
                rate = learning_rate(config, self.step, self.total_steps, spe)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                loss = forward(NoScatter(batch))
                optimizer.zero_grad()
                self.processes.backward(scaler.scale(loss))
                scaler.unscale_(optimizer)
                adapter.before_step()
                grads = [p.grad for p in parameters if p.grad is not None]
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
                outcome, related = step.taken()
                self._pairs = related.local_pairs
                # The one thing that is read back in every step: nothing may reach the weights unseen. What is read
                # late is of the step before; a bad step leaves itself out, and this one ends the run.
                self.settle()
                if late:
                    is_finite, bad = True, ~torch.isfinite(loss.detach() + norm)
                    self._unread = Unread(self.step + 1, outcome, related, norm, AsyncHostCopy(bad))
                    skip_if(optimizer, bad)
                else:
                    is_finite = math.isfinite(loss.detach() + norm)
                if not is_finite and not overflowed(loss, scaler):
                    raise TrainingError(explain_not_finite(self.step + 1, outcome, related, objective, norm))
                if config.clip is not None:
                    clip_grads_with_norm_(parameters, config.clip, norm, foreach=True)
                # An optimizer that is told to skip by itself (fused SGD) would begin its next step with empty momenta.
                if is_finite:
                    optimizer.step()
                    objective.after_step(rate, self.step + 1, self.total_steps)
                scaler.update()
                adapter.after_step()
                if self._negatives is None:
                    self._count_negatives()
                self.note_terms(outcome)
                values: dict[str, Tensor | float] = {"train/loss": loss.detach(), "train/lr": rate}
                if is_finite:
                    # The mean of squares is not the square of the mean.
                    values |= {"train/grad_norm": norm, "train/grad_norm_squared": norm * norm}
                if scaler.is_enabled():
                    values["train/skipped"] = float(not is_finite)
                values |= {f"train/{name}": value for name, value in adapter.metrics().items()}
                self.advance(values | {f"train/loss.{name}": term.value for name, term in outcome.terms.items()})
                seen += 1
                if self.step >= self.total_steps:
                    return
            if seen != spe - start:
                raise TrainingError(
                    f"epoch {epoch} gave {seen} batches from number {start} on where {spe - start} were announced "
                    f"({type(adapter).__name__}.steps_per_epoch)."
                )

    def settle(self) -> None:
        """Read what has been left to be read of the last step.

        Raises:
            TrainingError: its loss or gradient was not finite.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return
        assert self.objective is not None
        try:
            unread.check(self.objective)
        except TrainingError:
            self.step = unread.step - 1  # so many reached the weights
            raise

    def _compiles(self) -> bool:
        """Whether encoders are compiled: where it is asked for and can be done."""
        if not (self.config.train.compile or self.adapter.compiles):
            return False
        problem = compiler_problem(self.device)
        if problem:
            self._progress.warn(f"warning: train.compile: this machine cannot compile, so nothing is ({problem}).")
        return not problem
