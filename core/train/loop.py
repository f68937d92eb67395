"""How a batch becomes an update: the training loop of every domain without its own.

batch -> adapter.embed -> rows of all ranks -> Pairs -> objective -> loss -> gradients -> optimizer -> callbacks
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from dipole.core.objectives.gather import all_gather_pairs
from dipole.core.objectives.objective import Composite, Outcome
from dipole.core.objectives.pairs import GlobalPairs
from dipole.core.train.adapter import Adapter
from dipole.core.train.checkpoint import fitting
from dipole.core.train.config import TrainConfig
from dipole.core.train.memory_saving import Encoding, compiler_problem
from dipole.core.train.not_finite import explain_not_finite, overflowed
from dipole.core.train.optimizer import build_optimizer, warmup_cosine
from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.core.utils.sync_batch_norm import synchronize

HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""The dtype of autocast around the encoder, by train.precision."""


class TrainingLoop:
    """Trains `adapter.module` and the objective of a run together.

    Args:
        run: the `Run` in progress. It counts the steps and calls the callbacks (`Run.advance`).
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def fit(self) -> None:
        """Train to the last step.

        Raise ConfigError if a setting of [train] has no effect on this module. Raise TrainingError if a loss or
        gradient is not finite, or an epoch has another number of batches than announced.
        """
        run, adapter = self._run, self._run.adapter
        self._prepare()
        run.evaluate_if_due()
        while not run.is_finished:
            epoch, start = divmod(run.step, adapter.steps_per_epoch)
            count = 0
            for batch in adapter.batches(epoch, start):
                self.step(batch)
                count += 1
                if run.is_finished:
                    return
            announced = adapter.steps_per_epoch - start
            if count != announced:
                raise TrainingError(
                    f"epoch {epoch} gave {count} batches from number {start} on where {announced} were announced "
                    f"({type(adapter).__name__}.steps_per_epoch)."
                )

    def _prepare(self) -> None:
        """Build the optimizer and the forward pass."""
        run, adapter, config = self._run, self._run.adapter, self._run.config.train
        parameters = [*adapter.module.parameters(), *run.objective.parameters()]
        self._parameters = [each for each in parameters if each.requires_grad]
        run.optimizer = build_optimizer(config, self._parameters)
        if run.optimizer_state is not None:
            with fitting():
                run.optimizer.load_state_dict(run.optimizer_state)
            run.optimizer_state = None
        if config.sync_batch_norm and not synchronize(adapter.module):
            raise ConfigError("train.sync_batch_norm: has no effect, as there is no batch norm; leave it out.")
        compiles = bool(config.compile or adapter.compiles)
        if compiles and (problem := compiler_problem(run.device)):
            run.progress.warn(f"warning: train.compile: this machine cannot compile, so nothing is ({problem}).")
            compiles = False
        encoding = Encoding(adapter.encoders(), config, compiles)
        self._loss = LossModule(adapter, run.objective, encoding, HALF.get(config.precision))
        self._forward = run.processes.wrap(self._loss)

    def step(self, batch: Any) -> None:
        """Make one update.

        Args:
            batch: as `Adapter.batches` yields it.

        Raises:
            TrainingError: the loss or gradient is not finite. It has not reached the weights.
        """
        run, config, adapter, objective = self._run, self._run.config.train, self._run.adapter, self._run.objective
        optimizer, scaler = run.optimizer, run.scaler
        rate = learning_rate(config, run.step, run.total_steps, adapter.steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = rate

        loss = self._forward(NoScatter(batch))
        outcome, rows = self._loss.pop_outcome()
        run.pairs = rows.local_pairs
        run.note_terms(outcome)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        adapter.before_step()
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))

        values: dict[str, Tensor | float] = {"train/loss": loss.detach(), "train/lr": rate}
        is_finite = math.isfinite(loss.detach() + norm)  # waits for the device, once a step
        if is_finite:
            if config.clip is not None:
                clip_grads_with_norm_(self._parameters, config.clip, norm, foreach=True)
            optimizer.step()
            objective.after_step(rate, run.step + 1, run.total_steps)
            # The mean of squares is not the square of the mean.
            values |= {"train/grad_norm": norm, "train/grad_norm_squared": norm * norm}
        elif not overflowed(loss, scaler):
            raise TrainingError(explain_not_finite(run.step + 1, outcome, rows, objective, norm))
        scaler.update()
        adapter.after_step()

        if scaler.is_enabled():
            values["train/skipped"] = float(not is_finite)
        values |= {f"train/{name}": value for name, value in adapter.metrics().items()}
        run.advance(values | {f"train/loss.{name}": term.value for name, term in outcome.terms.items()})


def learning_rate(config: TrainConfig, step: int, total: int, steps_per_epoch: int) -> float:
    """Return the rate of update `step` (from 0) of `total`.

    Warm-up rises linearly and reaches the peak with its last update. "cosine" then falls to 0 at `total`
    (Loshchilov & Hutter 2017, Eq. 5, one period). "step" multiplies by `decay` at each milestone.
    """
    peak = config.learning_rate
    warmup = config.in_steps(config.warmup, steps_per_epoch)
    if step < warmup or config.rate_schedule == "cosine":
        return warmup_cosine(step, total, warmup, peak)
    if config.rate_schedule == "step":
        passed = sum(step >= config.in_steps(milestone, steps_per_epoch) for milestone in config.milestones or ())
        return peak * (config.decay or 0.1) ** passed
    return peak


class LossModule(nn.Module):
    """Encoder and objective in one module, so that DistributedDataParallel sees one forward pass."""

    def __init__(self, adapter: Adapter, objective: Composite, encoding: Encoding, half: torch.dtype | None) -> None:
        super().__init__()
        self.module = adapter.module
        self.objective = objective
        self._adapter = adapter
        self._encoding = encoding
        self._half = half
        self._taken: tuple[Outcome, GlobalPairs] | None = None

    def forward(self, batch: NoScatter) -> Tensor:
        device, half = self._adapter.device.type, self._half
        with torch.autocast(device, half, enabled=half is not None), self._encoding():
            rows = all_gather_pairs(self._adapter.embed(batch.value))
        # The similarity matrix is where half precision would cost accuracy; the engine widens its inputs itself.
        outcome: Outcome = self.objective(rows)
        self._taken = outcome, rows
        return outcome.loss

    def pop_outcome(self) -> tuple[Outcome, GlobalPairs]:
        """Return the last outcome and its pairs, and keep no reference to their tensors."""
        assert self._taken is not None
        taken, self._taken = self._taken, None
        return taken


class NoScatter:
    """Hide a batch from DistributedDataParallel, which would otherwise scatter and cast its tensors."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value
