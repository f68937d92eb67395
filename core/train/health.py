"""Watch a run: does a regularizer outweigh the base objective, and have the embeddings collapsed?

Both are measured at the first step, when the encoder is untrained, and at each evaluation. Later a regularizer and the
base balance each other: their gradients cancel at a minimum of their sum, so that one is as long as the other whatever
the weight is. The first step shows which of them decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dipole.core.evaluation.diagnostics import mean_distance
from dipole.core.objectives.gather import all_gather_pairs
from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.spectrum import effective_rank
from dipole.core.objectives.term_values import Outcome
from dipole.core.record import Number, finite
from dipole.core.train.adapter import Adapter
from dipole.core.train.config import GRAPHED
from dipole.core.train.evaluation import POINTS
from dipole.core.train.metrics import crossed
from dipole.core.utils.distributed import all_sum, as_single_process, world_size
from dipole.core.utils.microbatch import RngAndBuffers
from dipole.core.utils.seeding import isolated

DOMINATES = 3.0
"""A regularizer dominates if its gradient is this many times as long as that of the base objective."""
CONVERGED = 0.1
"""Share of its greatest length below which the base's gradient no longer says what dominates."""
FAR_BELOW, BELOW = 0.1, 0.25
"""Shares of the untrained encoder's mean distance and effective rank. Embeddings have collapsed if one of the two is
below the first share, or both are below the second."""


def gradient_lengths(
    weighted: Mapping[str, Tensor], bases: Sequence[str], parameters: Sequence[nn.Parameter]
) -> tuple[float, dict[str, float]]:
    """Return the length of the gradient of the base objective and those of the terms.

        ||d sum_b L_b / d theta||,   ||d L_t / d theta||

    `weighted` has the weighted value of each term, (), with a graph, which is kept. `bases` names the terms of the
    base. With several ranks every rank calls this. The gradients are those of the global batch.
    """
    first, *others = (weighted[name] for name in bases)
    base = _length(sum(others, first), parameters)
    lengths = {name: base for name in bases if not others}
    return base, lengths | {name: _length(each, parameters) for name, each in weighted.items() if name not in lengths}


def _length(value: Tensor, parameters: Sequence[nn.Parameter]) -> float:
    if not value.requires_grad:
        return 0.0
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    if world_size() > 1:
        rows = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        found = (all_sum(torch.cat([row.float().flatten() for row in rows])) / world_size(),)
    norms = [torch.linalg.vector_norm(each.float()) for each in found if each is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


class Health:
    """Measure gradients and geometry, and give remarks at the end."""

    def __init__(self, objective: Composite | None, every: int) -> None:
        terms = [] if objective is None else list(objective)
        self._bases = [name for name, _, term in terms if term.is_base()]
        self._compares = bool(self._bases) and len(terms) > 1
        self._every = every
        self._step = -1  # of the last measurement
        self._is_unlogged = False
        self._ratios: dict[str, Number] = {}
        self._longest_base = 0.0
        self._largest: dict[str, tuple[float, float]] = {}  # ratio and weight by regularizer
        self._geometry: list[dict[str, float]] = []  # of the untrained encoder, and of the evaluated one
        self._kept: list[dict[str, float]] = []  # of the best weights

    def measure_step(self, run: Any, outcome: Outcome) -> None:
        """Measure a step of training if it is the first one, or an evaluation follows it. Call it before `backward`."""
        if run.pairs is None:
            self.measure_own_loop(run, first=True)
            return
        after = run.step + 1
        if not run.step or after >= run.total_steps or crossed(run.step, after, self._every):
            with run.not_training():
                self.measure(run, outcome, run.pairs, after)

    def measure(self, run: Any, outcome: Outcome, pairs: Sequence[Pairs], step: int) -> None:
        """Measure the outcome of this rank's pairs for the evaluation of `step`. Nothing of training changes."""
        if self._compares and run.config.train.compile not in GRAPHED:  # CUDA graphs overwrite what they returned
            self._compare(run, outcome)
        if self._step < 0:
            self._is_unlogged = bool(self._ratios)
        self._step = step
        if run.processes.is_main and len(pairs[0].anchors) > 1:
            anchors = pairs[0].anchors.detach()[:POINTS].float()
            found = {}
            if bool(anchors.isfinite().all()):
                found = {"mean distance": mean_distance(anchors), "effective rank": effective_rank(anchors)}
            self._geometry = [*self._geometry[:1], found]

    def measure_own_loop(self, run: Any, first: bool = False) -> None:
        """Measure a batch of `Adapter.diagnostic_pairs`, for a domain with a loop of its own. `first`: only once."""
        if first and self._step >= 0:
            return
        if run.objective is None or run.pairs is not None or self._step == run.step:
            return
        if type(run.adapter).diagnostic_pairs is Adapter.diagnostic_pairs:  # there are none
            return
        modules = [RngAndBuffers(module, run.device) for module in (run.adapter.module, run.objective)]
        with as_single_process(), isolated(run.seeds.probe), torch.enable_grad():
            seen = run.adapter.diagnostic_pairs()
            if seen is not None:
                pairs = all_gather_pairs(seen)
                self.measure(run, run.objective(pairs), pairs.local_pairs, run.step)
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
        self._ratios = finite(ratios)
        base /= scaler.get_scale()
        if not math.isfinite(base):
            return
        self._longest_base = max(self._longest_base, base)
        if base <= CONVERGED * self._longest_base:
            return
        for name, weight, _ in run.objective:
            ratio = self._ratios.get(name)
            if name not in self._bases and ratio is not None and ratio > self._largest.get(name, (0.0, 0.0))[0]:
                self._largest[name] = ratio, weight

    def metrics(self, step: int) -> dict[str, Number]:
        """Return the ratios of a step by their names in metrics.jsonl, grad/NAME. Empty if it was not measured."""
        return {f"grad/{name}": ratio for name, ratio in self._ratios.items()} if step == self._step else {}

    def on_step(self, run: Any, previous: int) -> None:
        if self._is_unlogged:  # the first step; evaluations log theirs
            self._is_unlogged = False
            if not run.is_finished and not crossed(previous, run.step, self._every):
                run.log(self.metrics(self._step))

    def keep(self) -> None:
        """Remember that the weights as measured last are the ones that the run keeps."""
        self._kept = self._geometry[-1:]

    @property
    def lines(self) -> list[str]:
        """Remarks at the end of the run."""
        found = []
        for name, (ratio, weight) in self._largest.items():
            if ratio > DOMINATES:
                found.append(
                    f"the term {name!r} dominates: its gradient was {ratio:.3g} times as long as that of "
                    f"{' + '.join(self._bases)}. A weight of {weight / 2:.4g} instead of {weight:.4g} would halve that"
                )
        if len(self._geometry) < 2:
            return found
        start, end = self._geometry[0], (self._kept or self._geometry)[-1]
        shares = {name: end[name] / start[name] for name in start if name in end and start[name] > 0}
        if shares and (min(shares.values()) < FAR_BELOW or max(shares.values()) < BELOW):
            shown = [f"{name} {end[name]:.2g} ({start[name]:.2g} before training)" for name in shares]
            found.append(f"the embeddings have collapsed: {', '.join(shown)}")
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "health": {
                "step": self._step,
                "ratios": self._ratios,
                "base": self._longest_base,
                "largest": {name: list(each) for name, each in self._largest.items()},
                "geometry": self._geometry,
                "kept": self._kept,
            }
        }

    def load_state_dict(self, state: dict[str, Any], run: Any) -> None:
        own = state["health"]
        self._step, self._ratios, self._longest_base = own["step"], own["ratios"], own["base"]
        self._largest = {name: (ratio, weight) for name, (ratio, weight) in own["largest"].items()}
        self._geometry, self._kept = own["geometry"], own["kept"]
