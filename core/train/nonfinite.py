"""Explain a loss or gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from dipole.core.objectives.gather import GlobalPairs
from dipole.core.objectives.objective import Composite, Outcome
from dipole.core.train.optimizer import can_skip, skip_if
from dipole.core.utils.errors import TrainingError
from dipole.core.utils.transfer import AsyncHostCopy


def checks_late(device: torch.device, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> bool:
    """Return whether the host checks the loss one step later, so that the device never waits for it.

    The optimizer must be able to skip a step by itself. Loss scaling (float16) checks every step at once.
    """
    return device.type == "cuda" and can_skip(optimizer) and not scaler.is_enabled()


class FiniteCheck:
    """Check the loss and gradient norm of every step before the step reaches the weights.

    On a GPU the host reads the result one step later, so that it never waits. A bad step then skips itself.
    """

    def __init__(
        self, device: torch.device, optimizer: Optimizer, scaler: torch.amp.GradScaler, objective: Composite
    ) -> None:
        self._late = checks_late(device, optimizer, scaler)
        self._optimizer, self._scaler, self._objective = optimizer, scaler, objective
        self._pending: tuple[int, Outcome, GlobalPairs, Tensor, AsyncHostCopy] | None = None

    def check(self, step: int, loss: Tensor, norm: Tensor, outcome: Outcome, rows: GlobalPairs) -> bool:
        """Return whether to make the step, a number from 1.

        Raises:
            TrainingError: loss or norm is not finite, and no loss scale explains it.
        """
        if self._late:
            bad = ~torch.isfinite(loss + norm)
            self._pending = (step, outcome, rows, norm, AsyncHostCopy(bad))
            skip_if(self._optimizer, bad)
            return True
        is_finite = math.isfinite(loss + norm)
        if not is_finite and not overflowed(loss, self._scaler):
            raise TrainingError(explain_not_finite(step, outcome, rows, self._objective, norm))
        return is_finite

    def bad_step(self) -> tuple[int, str] | None:
        """Read the pending check, if there is one. Return the number of a bad step and what is wrong with it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        step, outcome, rows, norm, bad = pending
        if not bool(bad.read()):
            return None
        return step, explain_not_finite(step, outcome, rows, self._objective, norm)


def explain_not_finite(step: int, outcome: Outcome, related: GlobalPairs, objective: Composite, norm: Tensor) -> str:
    """Name the term and the place. This runs once, so it may compute."""
    shown = ", ".join(f"{name} = {float(term):.6g}" for name, term in outcome.terms.items())
    bad = [name for name, term in outcome.terms.items() if not math.isfinite(float(term))]
    if bad:
        what = f"the loss is not finite in the term{'s' if len(bad) > 1 else ''} {', '.join(map(repr, bad))} ({shown})"
    elif not math.isfinite(float(outcome.loss.detach())):
        what = f"the weighted sum of the terms overflows ({shown})"
    else:
        culprits = [repr(name) for name in terms_with_bad_gradient(related, objective)]
        source = f"through the term {' and '.join(culprits)}" if culprits else "inside the encoder"
        what = f"the gradient norm is {float(norm):g} while the loss is finite ({shown}); it arises {source}"
    embeddings = list({id(x): x for pairs in related.pairs for x in (pairs.anchors, pairs.candidates)}.values())
    rows = sum(int((~torch.isfinite(each)).any(1).sum()) for each in embeddings)
    where = " The embeddings are finite."
    if rows:
        where = f" {rows} of {sum(map(len, embeddings))} embeddings are not finite: look at the encoder and the data."
    return (
        f"step {step}: {what}.{where} Stopped before the optimizer step; the last checkpoint is intact. "
        "Try a lower train.learning_rate, train.clip, a higher temperature, train.precision = 32."
    )


def overflowed(loss: Tensor, scaler: torch.amp.GradScaler) -> bool:
    """Return whether the loss scale alone can explain a nonfinite gradient (float16). The step is then skipped.

    The scale is halved each time. Below a scale of 1 there must be another cause.
    """
    return scaler.is_enabled() and math.isfinite(float(loss.detach())) and scaler.get_scale() >= 1


def terms_with_bad_gradient(related: GlobalPairs, objective: Composite) -> Iterator[str]:
    """Yield the names of the terms whose own gradient is not finite."""
    leaves: dict[int, Tensor] = {}

    def leaf(x: Tensor) -> Tensor:
        return leaves.setdefault(id(x), x.detach().requires_grad_())

    # One tensor stays one leaf: objectives recognise anchors that are the candidates by identity.
    pairs = tuple(replace(p, anchors=leaf(p.anchors), candidates=leaf(p.candidates)) for p in related.pairs)
    for name, _, term in objective:
        grads = torch.autograd.grad(
            term(replace(related, pairs=pairs)), [*leaves.values(), *term.parameters()], allow_unused=True
        )
        if any(grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads):
            yield name
