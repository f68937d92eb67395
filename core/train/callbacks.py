"""What happens between the steps of a run: metrics, notes on terms, evaluation, the record.

`Run.advance` calls `on_step` of each class after every update. Checkpoints hold the `state_dict` of each. `run` is the
`Run` in progress (run.py imports this module).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any, Literal

import torch
from torch import nn

from dipole.core.objectives.gather import all_gather_pairs
from dipole.core.record import Number, RunRecord, hardware, library_versions, now, write_record
from dipole.core.train.config import RunConfig
from dipole.core.train.evaluation import Evaluated, diagnose_pairs, evaluate_model
from dipole.core.train.metrics import crossed
from dipole.core.train.model import load_weights, save_weights
from dipole.core.train.signals import Interrupted
from dipole.core.utils.distributed import as_single_process
from dipole.core.utils.errors import ConfigError, DipoleError, nearest
from dipole.core.utils.machine import peak_memory
from dipole.core.utils.seeding import rng_state, set_rng_state
from dipole.core.utils.text import number

Status = Literal["running", "done", "failed", "interrupted"]
SHOWN_RESULTS = 4
"""Results of an evaluation that are printed. metrics.jsonl has all of them."""


class TermNotes:
    """Warn about terms of the objective that gave the same note at every step, such as "no anchor has a negative"."""

    def __init__(self) -> None:
        self._steady: dict[str, str] | None = None
        self._warned: set[str] = set()

    def see(self, terms: Mapping[str, Any]) -> None:
        """Look at the terms of one step (`Outcome.terms`). Their notes are text, so nothing waits for the device."""
        if self._steady is None:
            self._steady = {name: term.note for name, term in terms.items() if term.note}
            return
        for name, note in list(self._steady.items()):
            if name not in terms or terms[name].note != note:
                del self._steady[name]

    @property
    def lines(self) -> list[str]:
        """One sentence for each such term."""
        return [f"the term {name!r} has been {note}, at every step" for name, note in (self._steady or {}).items()]

    def on_step(self, run: Any, previous: int) -> None:
        if not run.is_finished and not crossed(previous, run.step, run.config.train.log_every):
            return
        for line in self.lines:
            if line not in self._warned and run.processes.is_main:
                self._warned.add(line)
                run.progress.warn(f"warning: {line}.")

    def state_dict(self) -> dict[str, Any]:
        return {"notes": {"steady": self._steady}}

    def load_state_dict(self, state: dict[str, Any], run: Any) -> None:
        self._steady = state["notes"]["steady"]


class Evaluations:
    """Evaluate every `evaluate_every` and at the end, and keep the best weights.

    `is_due` says that an evaluation after the current step was interrupted or postponed. `last` holds the last
    results, and the step they are of.
    """

    def __init__(self, every: int, best_by: str | None) -> None:
        self._every = every
        self._best_by = best_by
        self.best: tuple[int, float] | None = None  # step and value of the best result, the earliest of equal ones
        self.is_due = False
        self.last: tuple[int, Evaluated] | None = None
        # Diagnostics of the last batch, which no checkpoint holds, and the step they are of.
        self._pair_values: dict[str, float] | None = None
        self._pair_step = -1

    def on_step(self, run: Any, previous: int) -> None:
        if run.is_finished or not crossed(previous, run.step, self._every):
            return
        if run.stop_signal:
            self.postpone(run)  # a scheduler does not wait for an evaluation
        else:
            run.evaluate()

    def postpone(self, run: Any) -> None:
        """Mark the evaluation after this step as due and measure the pairs of its batch now."""
        self.is_due = True
        if self._pair_step == run.step:
            return
        self._pair_step, self._pair_values = run.step, None
        run.health.measure_own_loop(run)
        if run.pairs is not None and run.processes.is_main:
            with as_single_process():
                self._pair_values = diagnose_pairs(all_gather_pairs(run.pairs).local_pairs, run.objective)

    def evaluate(self, run: Any) -> Evaluated | None:
        """Evaluate on rank 0, and keep the weights if they are the best. A signal stops the run."""
        self.postpone(run)
        found, before, signum = None, rng_state(), 0
        if run.processes.is_main:
            run.progress.status("evaluating")
            try:
                with as_single_process(), run.interrupts.finishing(steps=False):
                    found = evaluate_model(run.adapter, run.objective, run.seeds, self._pair_values)
            except Interrupted as interrupted:
                set_rng_state(before)
                signum = interrupted.signum
        signum = run.interrupts.ballot.agree(signum)
        if signum:
            run.stop(signum)
        self.is_due = False
        if found is None:
            return None
        self.last = (run.step, found)
        if self._is_best(run.step, found.results):
            save_weights(run.folder.best, run.adapter.module, run.objective)
            run.health.keep()
        named = {f"eval/{name}": value for name, value in found.results.items()}
        named |= {f"diag/{name}": value for name, value in found.diagnostics.items()}
        run.log(named | run.health.metrics(run.step))
        part = "" if run.adapter.part == run.adapter.reported else f", {run.adapter.part} part"
        run.progress.note(f"step {run.step}{part}: {_first_results(found)}")
        return found

    def _is_best(self, step: int, results: Mapping[str, Number]) -> bool:
        """Remember results if they are the best so far: the largest of `train.best_by`, or smallest for "-NAME"."""
        if self._best_by is None:
            return False
        name, sign = self._best_by.removeprefix("-"), (1, -1)[self._best_by.startswith("-")]
        if name not in results:
            raise ConfigError(
                f"train.best_by: no result {name!r}.{nearest(name, results)} This run measures {', '.join(results)}."
            )
        value = results[name]
        if value is None or (self.best is not None and sign * value <= sign * self.best[1]):
            return False
        self.best = (step, value)
        return True

    def finish(self, run: Any) -> None:
        """Restore the best weights if they are older, and compute the reported results (rank 0)."""
        pair_values = self._pair_values
        goes_back = self.best is not None and self.best[0] != run.step
        if self.best is not None and goes_back:
            load_weights(run.folder.best, run.adapter.module, run.objective)
            run.pairs = pair_values = None  # they are of the last weights
            step, value = self.best
            run.progress.note(f"kept: step {step}, where {self._best_by} was best, {number(value)}")
        is_first_look = run.adapter.part != run.adapter.reported
        if not goes_back and not is_first_look:
            return
        run.adapter.part = run.adapter.reported
        with as_single_process():
            found = evaluate_model(run.adapter, run.objective, run.seeds, pair_values)
        self.last = (run.step, found)
        if is_first_look:
            run.log({f"test/{name}": value for name, value in found.results.items()})
            run.progress.note(f"test part: {_first_results(found)}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "due": self.is_due, "of_pairs": self._pair_values if self.is_due else None}

    def load_state_dict(self, state: dict[str, Any], run: Any) -> None:
        self.best = state["best"]
        if state["due"]:
            self.is_due, self._pair_step, self._pair_values = True, state["step"], state["of_pairs"]


def _first_results(found: Evaluated) -> str:
    return "  ".join(f"{name} {number(value)}" for name, value in list(found.results.items())[:SHOWN_RESULTS])


def write_run_record(run: Any, status: Status, error: str | None = None) -> RunRecord:
    """Write record.json on rank 0, and return the record."""
    config: RunConfig = run.config
    modules: list[nn.Module] = [m for m in (run.adapter.module, run.objective) if m is not None]
    fields: dict[str, Any] = {"notes": list(run.notes.lines)}
    if status == "done" and run.evaluation.last is not None:
        found: Evaluated = run.evaluation.last[1]
        fields |= {"results": found.results, "histogram": found.histogram}
        fields["diagnostics"] = found.diagnostics | run.health.metrics(run.step)
        fields["notes"] += [*found.remarks, *run.health.lines]
        if run.evaluation.best is not None:
            step, value = run.evaluation.best
            fields["chosen"] = {"by": config.train.best_by, "step": step, "value": value, "on": run.curves_on}
    if run.device.type == "cuda":
        fields["peak_device_bytes"] = torch.cuda.max_memory_allocated(run.device)
    record = RunRecord(
        hash=config.hash,
        name=config.name,
        domain=config.domain,
        objective=config.objective,
        seed=config.seed,
        status=status,
        error=error,
        started=run.started,
        updated=now(),
        config=config.model_dump(mode="json", exclude_none=True),
        identity=config.determining(),
        versions=library_versions(),
        hardware=hardware(run.device, run.processes.size),
        seeds=run.seeds.as_dict(),
        data=run.adapter.data_info(),
        parameters=sum(p.numel() for m in modules for p in m.parameters() if p.requires_grad),
        negatives_per_anchor=run.negatives,
        steps=run.step,
        epochs=run.epoch,
        wall_seconds=round(run.elapsed, 3),
        training_seconds=round(run.training_seconds, 3),
        peak_memory_bytes=peak_memory(),
        evaluated_on=config.train.evaluate_on,
        curves_on=run.curves_on,
        **fields,
    )
    if run.processes.is_main:
        # An error that cannot be recorded (a full disk) must not hide the error itself.
        with suppress(DipoleError) if status in ("failed", "interrupted") else nullcontext():
            write_record(run.folder.record, record)
    return record
