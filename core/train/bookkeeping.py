"""What happens between the steps of a run: counting, logging, evaluating, saving, recording."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from dipole.core.objectives.gather import relate
from dipole.core.objectives.objective import Outcome
from dipole.core.record import RunRecord, write_record
from dipole.core.train.checkpoint import save_checkpoint
from dipole.core.train.config import RunConfig
from dipole.core.train.evaluation import Evaluated, diagnose_pairs, evaluate
from dipole.core.train.launch import Processes
from dipole.core.train.model_files import load_weights, save_kept, save_weights
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.run_state import RunState, Status
from dipole.core.train.signals import Interrupted, Interrupts, RunInterruptedError
from dipole.core.train.trackers import MetricsLog, Trackers
from dipole.core.utils.distributed import alone
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.progress import Progress, duration
from dipole.core.utils.seeding import rng_state, set_rng_state
from dipole.core.utils.text import counted, number

BESIDE = ("train/loss", "train/return")
"""Values that stand beside the progress bar."""
SHOWN = 4
"""So many results of an evaluation are shown beside the progress; all are in metrics.jsonl."""


class Bookkeeping(RunState):
    """A run and everything that is done with it but the steps themselves."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        processes: Processes,
        progress: Progress,
        state: dict[str, Any] | None,
        interrupts: Interrupts,
        log: Sequence[str],
    ) -> None:
        super().__init__(config, folder, processes, state)
        self._progress = progress
        self._interrupts = interrupts
        train, spe = config.train, self.adapter.steps_per_epoch
        self.total_steps = train.in_steps(train.length, spe)
        self._evaluate_every = train.in_steps(train.evaluate_every, spe) if train.evaluate_every else 0
        self._checkpoint_every = train.in_steps(train.checkpoint_every or 1, spe)
        self._metrics: MetricsLog | None = None
        if processes.is_main:
            kept = state["metrics_bytes"] if state else 0
            trackers = Trackers(log, config, folder, folder.metrics, kept, self.step) if log else None
            self._metrics = MetricsLog(folder.metrics, kept, trackers)

    def note_terms(self, outcome: Outcome) -> None:
        """Remember what the terms of one step note about themselves; call it before `advance`.

        A term that was 0 for the same reason at every step so far is named on the terminal and in the record.

        Args:
            outcome: what the objective returned.
        """
        self._notes.see(outcome.terms)

    def advance(self, values: Mapping[str, Tensor | float], steps: int = 1) -> None:
        """Count steps with their values.

        Args:
            values: by name, such as "train/loss"; numbers, or tensors, (), which are not waited for.
            steps: how many, >= 1.

        Raises:
            RunInterruptedError: after a signal, once the checkpoint is written.
        """
        before, self.step = self.step, self.step + steps
        self._meter.add({**values, **self._scheduled})
        self._scheduled = self._schedules.set(self.step)
        is_last = self.step >= self.total_steps
        if is_last or self._crossed(before, self.config.train.log_every):
            self.log(self._meter.take())
            self._tell_notes()
        self._training_seconds = self.elapsed - self._aside  # a last step was waited for: its values have been read
        self._progress.update(self.step)
        if is_last:
            return
        signum = self._interrupts.agreed()
        if self._evaluate_every and self._crossed(before, self._evaluate_every):
            if signum:
                self._put_off()  # a scheduler does not wait for an evaluation
            else:
                self.evaluate()
        if signum:
            self._stop(signum)
        if self._crossed(before, self._checkpoint_every):
            self.checkpoint()

    def catch_up(self) -> None:
        """Make the evaluation that an interruption has put off; a loop of one's own calls it once all is restored."""
        if self._is_due and self.step < self.total_steps:
            self.evaluate()

    def settle(self) -> None:
        """Read what a loop has left to be read of its last step, and raise what is wrong with it."""

    def log(self, values: Mapping[str, float | None]) -> None:
        """Write one line of metrics.jsonl for the current step.

        Args:
            values: by name.
        """
        self.settle()
        shown = {name: value for name, value in values.items() if name in BESIDE and value is not None}
        if shown:
            self._progress.values(shown)
        if self._metrics is not None:
            self._metrics.write(self.step, self.epoch, self.elapsed, values)

    def evaluate(self) -> Evaluated | None:
        """Probe the encoder as it is, and log the numbers.

        Returns:
            The numbers; None on ranks other than 0.
        """
        with self._not_training():
            return self._evaluate()

    @contextmanager
    def _not_training(self) -> Iterator[None]:
        before = self.elapsed
        try:
            yield
        finally:
            self._aside += self.elapsed - before

    def _evaluate(self) -> Evaluated | None:
        self.settle()
        self._put_off()
        found, before, signum = None, rng_state(), 0
        if self.processes.is_main:
            assert self._of_pairs is not None
            self._progress.status("evaluating")
            try:
                with alone(), self._interrupts.at_once():
                    found = evaluate(self.adapter, self.objective, self.seeds, self._of_pairs[1])
            except Interrupted as interrupted:
                set_rng_state(before)
                signum = interrupted.signum
        if signum := self._interrupts.settled(signum):
            self._stop(signum)
        self._is_due = False
        if found is not None:
            self._evaluated = (self.step, found)
            if self._best.improved(self.step, found.results):
                save_weights(self._best_weights, self.adapter.module, self.objective)
            self.log(found.as_metrics())
            on = "" if self.adapter.part == self.adapter.reported else f", {self.adapter.part} part"
            self._progress.note(f"step {self.step}{on}: {_some(found)}")
        return found

    def _put_off(self) -> None:
        """Note that the evaluation after this step is to be made, and measure its batch, which no checkpoint holds."""
        self._is_due = True
        if self._of_pairs is not None and self._of_pairs[0] == self.step:
            return
        values = None
        if self._pairs is not None and self.processes.is_main:
            with alone():
                values = diagnose_pairs(relate(self._pairs).local_pairs, self.objective)
        self._of_pairs = (self.step, values)

    def _stop(self, signum: int) -> NoReturn:
        self.checkpoint()
        raise RunInterruptedError(
            f"interrupted after step {self.step} of {self.total_steps}; the checkpoint is saved. "
            "Repeat the command to continue.",
            signum,
        )

    def checkpoint(self) -> None:
        """Save everything that continues this run bit for bit.

        Raises:
            CheckpointError: the disk refused.
            TrainingError: the last step has left a loss or gradient that is not finite.
        """
        self.settle()
        with self._not_training():
            state = self._snapshot()
            if self._metrics is not None:
                state["metrics_bytes"] = self._metrics.position()
                save_checkpoint(self.folder.checkpoints, self.step, state)

    def finish(self) -> RunRecord:
        """Evaluate and save what was trained.

        Returns:
            The record.

        Raises:
            CheckpointError: the disk refused.
        """
        # An error in the last evaluation must not cost the training.
        if self._evaluated is None or self._evaluated[0] != self.step:
            self._put_off()
        self.checkpoint()
        if self._is_due:
            self.evaluate()
        if not self.processes.is_main:
            return self._record("done")
        is_other = self._take_best()
        if is_other or self.adapter.part != self.adapter.reported:
            self._report(None if is_other or self._of_pairs is None else self._of_pairs[1])
        save_weights(self.folder.model, self.adapter.module, self.objective)
        save_kept(self.folder.kept, self.adapter)
        record = self._write_record("done")
        for line in self._evaluated[1].remarks if self._evaluated is not None else []:
            self._progress.warn(f"warning: {line}.")
        self.folder.clear_checkpoints()
        if self._metrics is not None:
            self._metrics.close("done")
        self._progress.close(self.step)
        self._progress.note(f"finished {counted(self.step, 'step')} in {duration(self.elapsed)}: {self.folder.path}")
        return record

    @property
    def _best_weights(self) -> Path:
        """They go when the checkpoints go, which know of them."""
        return self.folder.checkpoints / "best"

    def _take_best(self) -> bool:
        """Go back to the weights of the best evaluation, where that is asked for and they are others."""
        told = self._best.told()
        if told is None or told["step"] == self.step:
            return False
        load_weights(self._best_weights, self.adapter.module, self.objective)
        self._pairs = None  # of the last weights
        self._progress.note(f"kept: step {told['step']}, where {told['by']} was best, {number(told['value'])}")
        return True

    def _report(self, of_pairs: dict[str, float] | None) -> None:
        """Measure what is kept on the part that results are of; the only look that a run with curves takes at it."""
        is_first = self.adapter.part != self.adapter.reported
        self.adapter.part = self.adapter.reported
        with alone():
            found = evaluate(self.adapter, self.objective, self.seeds, of_pairs)
        self._evaluated = (self.step, found)
        if is_first:
            self.log({f"test/{name}": value for name, value in found.results.items()})
            self._progress.note(f"test part: {_some(found)}")

    def _write_record(self, status: Status, error: str | None = None) -> RunRecord:
        record = self._record(status, error)
        if self.processes.is_main:
            try:
                write_record(self.folder.record, record)
            except DipoleError:
                # A failure that cannot be recorded (a full disk) must not hide the failure itself.
                if status not in ("failed", "interrupted"):
                    raise
        return record

    def _count_negatives(self) -> None:
        assert self._pairs is not None
        self._negatives = float(torch.cat([pairs.negative_counts for pairs in self._pairs]).float().mean())
        self._progress.note(f"negatives per anchor: {self._negatives:g}")

    def _tell_notes(self) -> None:
        if self.processes.is_main:
            for line in self._notes.unsaid():
                self._progress.warn(f"warning: {line}.")

    def _crossed(self, before: int, every: int) -> bool:
        return self.step // every > before // every


def _some(found: Evaluated) -> str:
    """The first results, for a line beside the progress."""
    return "  ".join(f"{name} {number(value)}" for name, value in list(found.results.items())[:SHOWN])
