"""How a batch becomes an update, in every domain without a training loop of its own.

batch -> adapter.embed -> rows of all ranks -> Pairs -> objective -> loss -> gradients -> optimizer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from dipole.core.objectives.gather import all_gather_pairs
from dipole.core.objectives.objective import Composite, Outcome
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.term_values import GlobalPairs
from dipole.core.train.adapter import Adapter
from dipole.core.train.checkpoint import restoring
from dipole.core.train.config import TrainConfig
from dipole.core.train.launch import Processes
from dipole.core.train.memory_saving import PatchedEncoders, compiler_problem
from dipole.core.train.optimizer import build_optimizer, learning_rate
from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.core.utils.sync_batch_norm import synchronize

HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""The dtype of autocast around the encoder, by train.precision."""


class Update:
    """Makes the updates of a run. It owns the optimizer and the loss scale of float16.

    `state` is the `state_dict` of a checkpoint, with empty entries at the start. Raise ConfigError if a setting of
    [train] has no effect on the module.
    """

    def __init__(
        self,
        config: TrainConfig,
        adapter: Adapter,
        objective: Composite,
        processes: Processes,
        total_steps: int,
        state: dict[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._config, self._adapter, self._objective, self._total_steps = config, adapter, objective, total_steps
        parameters = [*adapter.module.parameters(), *objective.parameters()]
        self._parameters = [each for each in parameters if each.requires_grad]
        self._optimizer = build_optimizer(config, self._parameters)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=config.precision == "16-mixed")
        if state["optimizer"]:
            with restoring():
                self._optimizer.load_state_dict(state["optimizer"])
                self.scaler.load_state_dict(state["scaler"])
        if config.sync_batch_norm and not synchronize(adapter.module):
            raise ConfigError("train.sync_batch_norm: has no effect, as there is no batch norm. Leave it out.")
        compiles = bool(config.compile or adapter.compiles)
        if compiles and (problem := compiler_problem(processes.device)):
            warn(f"warning: train.compile: this machine cannot compile, so nothing is ({problem}).")
            compiles = False
        encoders = PatchedEncoders(adapter.encoders(), config, compiles)
        self._forward = processes.wrap(ForwardPass(adapter, objective, encoders, HALF.get(config.precision)))

    def __call__(
        self, batch: Any, step: int, note: Callable[[Outcome, tuple[Pairs, ...]], None]
    ) -> dict[str, Tensor | float]:
        """Make update `step` (from 0), and return its values by their names in metrics.jsonl.

        `note` gets the outcome and this rank's pairs before the backward pass. Raise TrainingError if the loss or
        gradient is not finite. It has then not reached the weights.
        """
        adapter, objective, optimizer, scaler = self._adapter, self._objective, self._optimizer, self.scaler
        rate = learning_rate(self._config, step, self._total_steps, adapter.steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = rate

        outcome, pairs = self._forward(lambda: batch)  # DistributedDataParallel would scatter and cast tensors
        loss = outcome.loss
        note(outcome, pairs.local_pairs)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        adapter.before_step()
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))

        values: dict[str, Tensor | float] = {"train/loss": loss.detach(), "train/lr": rate}
        is_finite = math.isfinite(loss.detach() + norm)  # waits for the device, once a step
        if is_finite:
            if self._config.clip is not None:
                clip_grads_with_norm_(self._parameters, self._config.clip, norm, foreach=True)
            optimizer.step()
            objective.after_step(rate, step + 1, self._total_steps)
            # The mean of squares is not the square of the mean.
            values |= {"train/grad_norm": norm, "train/grad_norm_squared": norm * norm}
        elif not overflowed(loss, scaler):
            raise TrainingError(
                f"step {step + 1}: {not_finite(outcome, pairs, objective, norm)} Stopped before the optimizer step. "
                "The last checkpoint is intact. Try a lower train.learning_rate, train.clip, a higher temperature, "
                "train.precision = 32."
            )
        scaler.update()
        adapter.after_step()  # also of a step that float16 skips: its rows are as good as others for a queue

        if scaler.is_enabled():
            values["train/skipped"] = float(not is_finite)
        values |= {f"train/{name}": value for name, value in adapter.metrics().items()}
        return values | {f"train/loss.{name}": term.value for name, term in outcome.terms.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"optimizer": self._optimizer.state_dict(), "scaler": self.scaler.state_dict()}


class ForwardPass(nn.Module):
    """Encoder and objective in one module, so that DistributedDataParallel sees one forward pass."""

    def __init__(
        self, adapter: Adapter, objective: Composite, encoders: PatchedEncoders, half: torch.dtype | None
    ) -> None:
        super().__init__()
        self.module = adapter.module
        self.objective = objective
        self._adapter = adapter
        self._encoders = encoders
        self._half = half

    def forward(self, batch: Callable[[], Any]) -> tuple[Outcome, GlobalPairs]:
        device, half = self._adapter.device.type, self._half
        with torch.autocast(device, half, enabled=half is not None), self._encoders():
            pairs = all_gather_pairs(self._adapter.embed(batch()))
        # In the similarity matrix half precision would cost accuracy, so the engine uses at least float32.
        return self.objective(pairs), pairs


# A loss or gradient that is not finite -------------------------------------------------------------------------------


def not_finite(outcome: Outcome, batch: GlobalPairs, objective: Composite, norm: Tensor) -> str:
    """Name the term and the place. This runs once, so it may compute."""
    shown = ", ".join(f"{name} = {float(term):.6g}" for name, term in outcome.terms.items())
    bad = [name for name, term in outcome.terms.items() if not math.isfinite(float(term))]
    if bad:
        what = f"the loss is not finite in the term{'s' if len(bad) > 1 else ''} {', '.join(map(repr, bad))} ({shown})"
    elif not math.isfinite(float(outcome.loss.detach())):
        what = f"the weighted sum of the terms overflows ({shown})"
    else:
        culprits = [repr(name) for name in terms_with_bad_gradient(batch, objective)]
        source = f"through the term {' and '.join(culprits)}" if culprits else "inside the encoder"
        what = f"the gradient norm is {float(norm):g} while the loss is finite ({shown}); it arises {source}"
    embeddings = list({id(x): x for pairs in batch.pairs for x in (pairs.anchors, pairs.candidates)}.values())
    rows = sum(int((~torch.isfinite(each)).any(1).sum()) for each in embeddings)
    where = " The embeddings are finite."
    if rows:
        where = f" {rows} of {sum(map(len, embeddings))} embeddings are not finite: look at the encoder and the data."
    return f"{what}.{where}"


def overflowed(loss: Tensor, scaler: torch.amp.GradScaler) -> bool:
    """Return whether the loss scale alone can explain a nonfinite gradient (float16). The step is then skipped.

    The scale is halved each time. Below a scale of 1 there must be another cause.
    """
    return scaler.is_enabled() and math.isfinite(float(loss.detach())) and scaler.get_scale() >= 1


def terms_with_bad_gradient(batch: GlobalPairs, objective: Composite) -> Iterator[str]:
    """Yield the names of the terms whose own gradient is not finite."""
    leaves: dict[int, Tensor] = {}

    def leaf(x: Tensor) -> Tensor:
        return leaves.setdefault(id(x), x.detach().requires_grad_())

    # One tensor stays one leaf: objectives recognise anchors that are the candidates by identity.
    pairs = tuple(replace(p, anchors=leaf(p.anchors), candidates=leaf(p.candidates)) for p in batch.pairs)
    for name, _, term in objective:
        grads = torch.autograd.grad(
            term(replace(batch, pairs=pairs)), [*leaves.values(), *term.parameters()], allow_unused=True
        )
        if any(grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads):
            yield name
