"""Callbacks of a run: notes on terms, evaluation, the health of the run, the record.

`Run.advance` calls `on_step` of each class after every update. Checkpoints hold the `state_dict` of each. `run` is the
`Run` in progress (run.py imports this module).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dipole.core.evaluation.diagnostics import mean_distance
from dipole.core.objectives.gather import all_gather_pairs
from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.spectrum import effective_rank
from dipole.core.objectives.term_values import Outcome
from dipole.core.record import Number, RunRecord, finite, hardware, library_versions, now, write_record
from dipole.core.train.adapter import Adapter
from dipole.core.train.config import GRAPHED, RunConfig
from dipole.core.train.evaluation import POINTS, Evaluated, diagnose_pairs, evaluate_model
from dipole.core.train.metrics import crossed
from dipole.core.train.model import load_weights, save_weights
from dipole.core.train.signals import Interrupted
from dipole.core.utils.distributed import all_sum, as_single_process, world_size
from dipole.core.utils.errors import ConfigError, DipoleError, nearest
from dipole.core.utils.machine import peak_memory
from dipole.core.utils.microbatch import RngAndBuffers
from dipole.core.utils.seeding import isolated, rng_state, set_rng_state
from dipole.core.utils.text import number

Status = Literal["running", "done", "failed", "interrupted"]
SHOWN_RESULTS = 4
"""Results of an evaluation that are printed. metrics.jsonl has all of them."""
DOMINATES = 3.0
"""A regularizer dominates if its gradient is this many times as long as that of the base objective."""
CONVERGED = 0.1
"""Share of its greatest length below which the base's gradient no longer says what dominates."""
FAR_BELOW, BELOW = 0.1, 0.25
"""Shares of the untrained encoder's mean distance and effective rank. Embeddings have collapsed if one of the two is
below the first share, or both are below the second."""


class TermNotes:
    """Warn about terms of the objective that gave the same note at every step, such as "no anchor has a negative"."""

    def __init__(self) -> None:
        self._steady: dict[str, str] | None = None
        self._warned: set[str] = set()

    def see(self, terms: Mapping[str, Any]) -> None:
        """Look at the terms of one step (`Outcome.terms`). Their notes are text, so nothing waits for the device."""
        noted = {name: term.note for name, term in terms.items() if term.note}
        if self._steady is not None:
            noted = {name: note for name, note in noted.items() if self._steady.get(name) == note}
        self._steady = noted

    @property
    def lines(self) -> list[str]:
        """One sentence for each such term."""
        return [f"the term {name!r} has been {note}, at every step" for name, note in (self._steady or {}).items()]

    def on_step(self, run: Any, previous: int) -> None:
        if not run.is_finished and not crossed(previous, run.step, run.config.train.log_every):
            return
        for line in self.lines:
            if line not in self._warned:
                self._warned.add(line)
                run.progress.warn(f"warning: {line}.")

    def state_dict(self) -> dict[str, Any]:
        return {"notes": {"steady": self._steady}}

    def load_state_dict(self, state: dict[str, Any], run: Any) -> None:
        self._steady = state["notes"]["steady"]


class Evaluations:
    """Evaluate every `evaluate_every` and at the end, and keep the best weights."""

    def __init__(self, every: int, best_by: str | None) -> None:
        self._every = every
        self._best_by = best_by
        self.best: tuple[int, float] | None = None  # step and value of the best result, the earliest of equal ones
        self.is_due = False  # an evaluation after the current step was interrupted or postponed
        self.last: tuple[int, Evaluated] | None = None  # step and results
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
        name, sign = self._best_by.removeprefix("-"), -1 if self._best_by.startswith("-") else 1
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
        **config.model_dump(include={"name", "domain", "objective", "seed"}),
        hash=config.hash,
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


def gradient_lengths(
    weighted: Mapping[str, Tensor], bases: Sequence[str], parameters: Sequence[nn.Parameter]
) -> tuple[float, dict[str, float]]:
    """Return ||d sum_b L_b / d theta|| of the base terms, and ||d L_t / d theta|| of each term, of the global batch.

    `weighted` has the weighted value of each term, (), with a graph, which is kept. All ranks call this.
    """
    first, *others = (weighted[name] for name in bases)
    base = _length(sum(others, first), parameters)
    lengths = {name: base for name in bases if not others}
    return base, lengths | {name: _length(each, parameters) for name, each in weighted.items() if name not in lengths}


def _length(value: Tensor, parameters: Sequence[nn.Parameter]) -> float:
    if not value.requires_grad:
        return 0.0
    several = world_size() > 1
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True, materialize_grads=several)
    if several:
        found = (all_sum(torch.cat([each.float().flatten() for each in found])) / world_size(),)
    norms = [torch.linalg.vector_norm(each.float()) for each in found if each is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


@dataclass
class _Measured:
    """The state of `Health`, as in checkpoints."""

    step: int = -1  # of the last measurement
    ratios: dict[str, Number] = field(default_factory=dict)
    base: float = 0.0  # the longest gradient of the base objective
    largest: dict[str, tuple[float, float]] = field(default_factory=dict)  # ratio and weight by regularizer
    geometry: list[dict[str, float]] = field(default_factory=list)  # of the untrained encoder, and of the evaluated one
    kept: list[dict[str, float]] = field(default_factory=list)  # of the best weights


class Health:
    """Watch whether a regularizer outweighs the base objective, and whether the embeddings collapse.

    Both are measured at the first step, when the encoder is untrained, and at each evaluation. At a minimum of the sum
    the gradients cancel, so they are equally long for any weight. The first step shows which of them dominates.
    """

    def __init__(self, objective: Composite | None, every: int) -> None:
        terms = list(objective or ())
        self._bases = [name for name, _, term in terms if term.is_base()]
        self._compares = bool(self._bases) and len(terms) > 1
        self._every = every
        self._is_unlogged = False
        self._seen = _Measured()

    def measure_step(self, run: Any, outcome: Outcome) -> None:
        """Measure a step of training if it is the first one, or an evaluation follows it. Call it before `backward`."""
        if run.pairs is None:
            self.measure_own_loop(run, first=True)
            return
        after = run.step + 1
        if not run.step or after >= run.total_steps or crossed(run.step, after, self._every):
            with run.not_training():
                self._measure(run, outcome, run.pairs, after)

    def _measure(self, run: Any, outcome: Outcome, pairs: Sequence[Pairs], step: int) -> None:
        """Measure the outcome of this rank's pairs for the evaluation of `step`. Nothing of training changes."""
        if self._compares and run.config.train.compile not in GRAPHED:  # CUDA graphs overwrite what they returned
            self._compare(run, outcome)
        seen = self._seen
        if seen.step < 0:
            self._is_unlogged = bool(seen.ratios)
        seen.step = step
        if run.processes.is_main and len(pairs[0].anchors) > 1:
            anchors = pairs[0].anchors.detach()[:POINTS].float()
            found = {}
            if bool(anchors.isfinite().all()):
                found = {"mean distance": mean_distance(anchors), "effective rank": effective_rank(anchors)}
            seen.geometry = [*seen.geometry[:1], found]

    def measure_own_loop(self, run: Any, first: bool = False) -> None:
        """Measure a batch of `Adapter.diagnostic_pairs`, for a domain with a loop of its own. `first`: only once."""
        if (first and self._seen.step >= 0) or self._seen.step == run.step:
            return
        has_none = type(run.adapter).diagnostic_pairs is Adapter.diagnostic_pairs
        if run.objective is None or run.pairs is not None or has_none:
            return
        modules = [RngAndBuffers(module, run.device) for module in (run.adapter.module, run.objective)]
        with as_single_process(), isolated(run.seeds.probe), torch.enable_grad():
            seen = run.adapter.diagnostic_pairs()
            if seen is not None:
                pairs = all_gather_pairs(seen)
                self._measure(run, run.objective(pairs), pairs.local_pairs, run.step)
        for each in modules:
            each.restore()

    def _compare(self, run: Any, outcome: Outcome) -> None:
        scaler = torch.amp.GradScaler(enabled=False) if run.update is None else run.update.scaler
        scaled = {name: scaler.scale(value) for name, value in outcome.weighted.items()}
        parameters = [p for p in run.adapter.module.parameters() if p.requires_grad]
        if not parameters:
            parameters = [p for p in run.objective.parameters() if p.requires_grad]
        base, lengths = gradient_lengths(scaled, self._bases, parameters)
        ratios = {name: each / base if base else math.inf for name, each in lengths.items() if [name] != self._bases}
        seen = self._seen
        seen.ratios = finite(ratios)
        base /= scaler.get_scale()
        if not math.isfinite(base):
            return
        seen.base = max(seen.base, base)
        if base <= CONVERGED * seen.base:
            return
        for name, weight, _ in run.objective:
            ratio = seen.ratios.get(name)
            if name not in self._bases and ratio is not None and ratio > seen.largest.get(name, (0.0, 0.0))[0]:
                seen.largest[name] = ratio, weight

    def metrics(self, step: int) -> dict[str, Number]:
        """Return the ratios of a step by their names in metrics.jsonl, grad/NAME. Empty if it was not measured."""
        if step != self._seen.step:
            return {}
        return {f"grad/{name}": ratio for name, ratio in self._seen.ratios.items()}

    def on_step(self, run: Any, previous: int) -> None:
        if self._is_unlogged:  # the first step; evaluations log theirs
            self._is_unlogged = False
            if not run.is_finished and not crossed(previous, run.step, self._every):
                run.log(self.metrics(self._seen.step))

    def keep(self) -> None:
        """Remember that the weights as measured last are the ones that the run keeps."""
        self._seen.kept = self._seen.geometry[-1:]

    @property
    def lines(self) -> list[str]:
        """Remarks at the end of the run."""
        found, seen = [], self._seen
        for name, (ratio, weight) in seen.largest.items():
            if ratio > DOMINATES:
                found.append(
                    f"the term {name!r} dominates: its gradient was {ratio:.3g} times as long as that of "
                    f"{' + '.join(self._bases)}. A weight of {weight / 2:.4g} instead of {weight:.4g} would halve that"
                )
        if len(seen.geometry) < 2:
            return found
        start, end = seen.geometry[0], (seen.kept or seen.geometry)[-1]
        shares = {name: end[name] / start[name] for name in start if name in end and start[name] > 0}
        if shares and (min(shares.values()) < FAR_BELOW or max(shares.values()) < BELOW):
            shown = [f"{name} {end[name]:.2g} ({start[name]:.2g} before training)" for name in shares]
            found.append(f"the embeddings have collapsed: {', '.join(shown)}")
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"health": asdict(self._seen)}

    def load_state_dict(self, state: dict[str, Any], run: Any) -> None:
        self._seen = _Measured(**state["health"])
