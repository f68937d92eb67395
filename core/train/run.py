"""One run: build it, train it (by `update.py` or the domain's own loop), log, evaluate, save and record it."""

import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from dipole.core.objectives.objective import Outcome
from dipole.core.objectives.pairs import Pairs
from dipole.core.record import RunRecord, now
from dipole.core.train.callbacks import Evaluations, Health, TermNotes, write_run_record
from dipole.core.train.checkpoint import capture, restore, restoring, save_checkpoint, starting_state
from dipole.core.train.config import RunConfig
from dipole.core.train.domains import adapter_class
from dipole.core.train.evaluation import Evaluated
from dipole.core.train.launch import Processes, fewer_than_asked, launch, pick_device
from dipole.core.train.metrics import Metrics, check_trackers, crossed
from dipole.core.train.model import build, save_kept, save_weights
from dipole.core.train.run_folder import DEFAULT_RUNS, RunFolder, as_runs
from dipole.core.train.schedule import Schedules
from dipole.core.train.signals import Interrupts, RunInterruptedError
from dipole.core.train.update import Update
from dipole.core.utils.errors import ConfigError, DataError, DipoleError, PairsError, TrainingError
from dipole.core.utils.launched import first_message
from dipole.core.utils.memory import is_out_of_memory
from dipole.core.utils.progress import Progress, duration, quietly
from dipole.core.utils.seeding import Seeds, deterministic, rng_state, seed_everything
from dipole.core.utils.text import counted, warn

__all__ = ["Run", "RunInterruptedError", "build", "pick_device", "train"]


def train(
    config: RunConfig,
    runs: str | Path = DEFAULT_RUNS,
    *,
    resume: Literal["auto", "never"] | Path = "auto",
    overwrite: bool = False,
    quiet: bool = False,
    log: str | Sequence[str] = (),
) -> RunRecord:
    """Train, evaluate and record one configuration.

    A finished run of the same configuration is returned as it is. Started by torchrun, accelerate or srun, every
    rank calls this.

    Args:
        config: what to run (`load_recipe(...).config`). Its hash names the folder inside `runs`.
        runs: folder of all runs.
        resume: "auto" continues from the newest readable checkpoint, "never" starts again. A `Path` (no text) is a
            checkpoint, or a run's folder, whose newest one counts.
        overwrite: run again although a finished record exists, and remove the old one.
        quiet: no progress.
        log: trackers that also get the numbers of metrics.jsonl: "tensorboard", "wandb", "mlflow", "trackio". In a
            text, commas separate them.

    Returns:
        The record of the finished run.

    Raises:
        TrainingError: training cannot go on, or another process trains this run. The record has the reason.
        RunInterruptedError: a signal ended it. The checkpoint is saved, and the same call continues.
        CheckpointError: a checkpoint is missing, damaged or of another run.
        ConfigError: a device, a tracker, a setting or `resume` is not possible here.
        DataError: the data set is missing or damaged.
        RecordError: the existing record cannot be read.

    Example:
        >>> recipe = dipole.load_recipe("lmcl-toy", ["train.steps=5", "objective=dcl"])
        >>> dipole.train(recipe.config, folder, quiet=True).status
        'done'
    """
    if not isinstance(resume, Path) and resume not in ("auto", "never"):
        raise ConfigError(f"resume must be 'auto', 'never' or the Path of a checkpoint (no text), got {resume!r}.")
    if not isinstance(config, RunConfig):
        raise ConfigError(f"config must be a configuration, load_recipe(...).config, got a {type(config).__name__}.")
    trackers = check_trackers(log)
    folder = RunFolder(as_runs(runs) / config.hash)
    record = None if overwrite else folder.read_record()
    if record is not None and record.status == "done":
        # A finished run has no checkpoints of its own any more. What is elsewhere must be one.
        if isinstance(resume, Path) and not resume.resolve().is_relative_to(folder.path.resolve()):
            starting_state(folder.checkpoints, config.hash, resume, warn)
        return record
    if overwrite and resume == "auto":
        resume = "never"
    with Interrupts() as interrupts, quietly(quiet), deterministic(config.deterministic):
        processes = launch(config)
        progress = Progress(quiet, mute=not processes.is_main)
        if fewer := fewer_than_asked():
            progress.warn(f"warning: {fewer}.")
        try:
            if missing := adapter_class(config.domain).missing_data(config.settings):
                raise DataError("\n".join(missing))
            if processes.is_main:
                folder.open(config)
            processes.wait()
            state = starting_state(folder.checkpoints, config.hash, resume, progress.warn)
            if state is not None:
                progress.note(f"continuing at step {state['step']}")
            processes.wait()
            if state is None and processes.is_main:
                folder.clear()
            return Run(config, folder, processes, progress, state, interrupts, trackers).execute()
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                first_message(str(error))  # what ends this process ends the others: theirs is not the reason
            processes.close()
            raise
        finally:
            progress.close()
            folder.close()


class Run:
    """A run in progress: what `Adapter.fit` works with.

    In your own loop, call `advance` after every update until `step` is `total_steps`. It logs, evaluates and saves.
    Call `evaluate_if_due` once before the first update, and `note_terms` with the outcome before each `advance`.

    Args:
        config: what is run.
        folder: its folder, open.
        processes: those that train it.
        progress: the progress bar.
        state: the checkpoint to continue from.
        interrupts: signals.
        log: trackers.

    Attributes:
        objective: the `Composite`, or None for "none".
        update: makes the updates of `fit`, which builds it. None before, and in a domain with a loop of its own.
        step: updates done.
        total_steps: of the whole run.

    Raises:
        ConfigError: if a batch cannot be divided among the ranks, or is larger than an epoch.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        processes: Processes,
        progress: Progress,
        state: dict[str, Any] | None,
        interrupts: Interrupts,
        log: Sequence[str] = (),
    ) -> None:
        self.began = time.monotonic()
        self.config, self.folder, self.processes, self.progress = config, folder, processes, progress
        self.interrupts = interrupts
        self.device = processes.device
        self.seeds = Seeds(config.seed)
        train, ranks = config.train, processes.size
        if train.batch_size % ranks:
            raise ConfigError(f"train.batch_size: {train.batch_size} cannot be divided among {counted(ranks, 'rank')}.")
        self.adapter, self.objective = build(config, folder, self.device, processes.rank, ranks)
        steps_per_epoch = self.adapter.steps_per_epoch
        if steps_per_epoch < 1:
            raise ConfigError(f"train.batch_size: {train.batch_size} is more than one epoch of this data holds.")
        seed_everything(self.seeds.stream("model", "train", processes.rank))
        self.initial_rng = rng_state()

        self.step = 0
        self.total_steps = train.in_steps(train.length, steps_per_epoch)
        self.negatives: float | None = None
        self.pairs: tuple[Pairs, ...] | None = None  # of the last batch
        self.stop_signal = 0
        self.training_seconds = 0.0
        self.adapter.total_steps = self.total_steps
        self.update: Update | None = None
        self.update_state: dict[str, Any] = {"optimizer": {}, "scaler": {}}  # of a checkpoint, for `fit`

        self.metrics = Metrics(config, folder, processes.is_main, log, state)
        self.notes = TermNotes()
        every = train.in_steps(train.evaluate_every or 0, steps_per_epoch)
        self.evaluation = Evaluations(every, train.best_by)
        self.health = Health(self.objective, every)
        self.parts = (self.metrics, self.notes, self.health, self.evaluation)  # with a state of their own
        self._checkpoint_every = train.in_steps(train.checkpoint_every or 1, steps_per_epoch)
        self.started, self.curves_on = now(), self.adapter.part
        if state is not None:
            with restoring():
                restore(self, state)
        self._schedules = Schedules(train, self.objective, steps_per_epoch)
        self._scheduled = self._schedules.set(self.step)
        # Seconds that are not training: building now and before, evaluating and saving before.
        self._other_seconds = self.elapsed - self.training_seconds

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> float:
        """Passes through the data, including a part of one."""
        return self.step / self.adapter.steps_per_epoch

    @property
    def elapsed(self) -> float:
        """Seconds of this run, including those before a resume."""
        return time.monotonic() - self.began

    @property
    def is_finished(self) -> bool:
        """Return whether all updates are done."""
        return self.step >= self.total_steps

    def execute(self) -> RunRecord:
        """Return the record after training to the end. Any error is in the record before it is raised.

        Raises:
            RunInterruptedError: a signal or a key ended it.
            TrainingError: memory is too small, or a loss or gradient is not finite.
        """
        try:
            write_run_record(self, "running")
            self.progress.start(self.config.name, self.total_steps, self.step)
            for line in self.adapter.remarks():
                self.progress.note(line)
            with self.interrupts.finishing(steps=True):
                self.adapter.module.train()
                if not self.is_finished or self.evaluation.is_due:
                    self.adapter.fit(self)
                return self.finish()
        except RunInterruptedError as error:
            self._end("interrupted", str(error))
            raise
        except KeyboardInterrupt as error:
            message = f"interrupted after step {self.step}. Repeat the command to continue from the last checkpoint."
            self._end("interrupted", message)
            raise RunInterruptedError(message, getattr(error, "signum", signal.SIGINT)) from None
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

    def fit(self) -> None:
        """Train batch by batch to the last step. This is the default of `Adapter.fit`.

        Raises:
            ConfigError: a setting of [train] has no effect on this module.
            PairsError: the objective cannot use the pairs.
            TrainingError: a loss or gradient is not finite, or an epoch has another number of batches than announced.
        """
        self.update, self.update_state = Update(self), {}
        self.evaluate_if_due()
        for batch in self._batches():
            try:
                values = self.update(batch)
            except PairsError as error:
                if alternatives := self.adapter.instead_of(self.objective):
                    raise PairsError(f"{error} {alternatives}") from error
                raise
            self.advance(values)

    def _batches(self) -> Iterator[Any]:
        """Yield the batches of all steps that are left."""
        adapter = self.adapter
        while not self.is_finished:
            epoch, start = divmod(self.step, adapter.steps_per_epoch)
            for batch in adapter.batches(epoch, start):
                yield batch
                if self.is_finished:
                    return
            given, announced = self.step - epoch * adapter.steps_per_epoch - start, adapter.steps_per_epoch - start
            if given != announced:
                raise TrainingError(
                    f"epoch {epoch} gave {given} batches from number {start} on where {announced} were announced "
                    f"({type(adapter).__name__}.steps_per_epoch)."
                )

    def _end(self, status: Literal["failed", "interrupted"], message: str) -> None:
        # If another rank failed first, its message is the reason.
        write_run_record(self, status, first_message(message) or message)
        self.metrics.close(status)

    def note_terms(self, outcome: Outcome, pairs: tuple[Pairs, ...] | None = None) -> None:
        """Remember the notes of the terms of one step. Call it before `advance`.

        A term with the same note at every step so far is named on the terminal and in the record.

        Args:
            outcome: what the objective returned.
            pairs: this rank's pairs of the step, if the graph of the outcome is still there. The run measures
                gradients and geometry on them.
        """
        self.pairs = pairs
        self.notes.see(outcome.terms)
        self.health.measure_step(self, outcome)
        if self.negatives is None and self.pairs is not None:
            self.negatives = float(torch.cat([pairs.negative_counts for pairs in self.pairs]).float().mean())
            self.progress.note(f"negatives per anchor: {self.negatives:g}")

    def advance(self, values: Mapping[str, Tensor | float], steps: int = 1) -> None:
        """Count steps, and log, evaluate and save where that is due.

        Args:
            values: by name, such as "train/loss": numbers, or tensors, (). Nothing waits for the tensors.
            steps: how many, >= 1.

        Raises:
            RunInterruptedError: after a signal, once the checkpoint is written.
        """
        previous, self.step = self.step, self.step + steps
        values = {**values, **self._scheduled}
        self._scheduled = self._schedules.set(self.step)
        self.stop_signal = 0 if self.is_finished else self.interrupts.ballot.cast(self.interrupts.received)
        self.progress.update(self.step)
        self.metrics.on_step(self, previous, values)
        self.training_seconds = self.elapsed - self._other_seconds  # the values of a last step were waited for
        self.notes.on_step(self, previous)
        self.health.on_step(self, previous)
        self.evaluation.on_step(self, previous)
        if self.is_finished:
            return
        if self.stop_signal:
            self.stop(self.stop_signal)
        if crossed(previous, self.step, self._checkpoint_every):
            self.checkpoint()

    def evaluate_if_due(self) -> None:
        """Make the evaluation that an interruption postponed. Call it once all state is restored."""
        if self.evaluation.is_due and not self.is_finished:
            self.evaluate()

    def log(self, values: Mapping[str, float | None]) -> None:
        """Write one line of metrics.jsonl for the current step.

        Args:
            values: by name.
        """
        self.metrics.write(self, values)

    def evaluate(self) -> Evaluated | None:
        """Return the results of the encoder as it is, which are also logged. None on ranks other than 0."""
        with self.not_training():
            return self.evaluation.evaluate(self)

    @contextmanager
    def not_training(self) -> Iterator[None]:
        """Leave the time of a `with` block out of `training_seconds`."""
        before = self.elapsed
        try:
            yield
        finally:
            self._other_seconds += self.elapsed - before

    def stop(self, signum: int) -> NoReturn:
        """Save a checkpoint and end the run.

        Args:
            signum: the signal.

        Raises:
            RunInterruptedError: always.
        """
        self.checkpoint()
        raise RunInterruptedError(
            f"interrupted after step {self.step} of {self.total_steps}; the checkpoint is saved. "
            "Repeat the command to continue.",
            signum,
        )

    def checkpoint(self) -> None:
        """Save everything that continues this run bit for bit. Raise CheckpointError if the disk refuses."""
        with self.not_training():
            state = capture(self)
            if self.processes.is_main:
                save_checkpoint(self.folder.checkpoints, self.step, state)

    def finish(self) -> RunRecord:
        """Return the record, after what was trained is evaluated and saved."""
        evaluation = self.evaluation
        if evaluation.last is None or evaluation.last[0] != self.step:
            evaluation.postpone(self)
        self.checkpoint()  # an error in the last evaluation must not cost the training
        if evaluation.is_due:
            self.evaluate()
        if self.processes.is_main:
            evaluation.finish(self)
            save_weights(self.folder.model, self.adapter.module, self.objective)
            save_kept(self.folder.kept, self.adapter)
        record = write_run_record(self, "done")
        if not self.processes.is_main:
            return record
        remarks = [] if evaluation.last is None else evaluation.last[1].remarks
        for line in [*remarks, *self.health.lines]:
            self.progress.warn(f"warning: {line}.")
        shutil.rmtree(self.folder.checkpoints, ignore_errors=True)  # the weights are in model/
        self.metrics.close("done")
        self.progress.close(self.step)
        self.progress.note(f"finished {counted(self.step, 'step')} in {duration(self.elapsed)}: {self.folder.path}")
        return record
