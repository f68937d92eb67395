"""Where a loss or gradient that is not finite comes from, in one message."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from dipole.core.objectives.gather import Related
from dipole.core.objectives.objective import Composite, Outcome
from dipole.core.train.optimizer import can_skip
from dipole.core.utils.errors import TrainingError
from dipole.core.utils.transfer import AsyncHostCopy


def checks_late(device: torch.device, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> bool:
    """Whether the host learns of a loss that is not finite one step late, so that the device never waits for it.

    That needs an optimizer that leaves a step out by itself. Loss scaling (float16) looks at every step at once.
    """
    return device.type == "cuda" and can_skip(optimizer) and not scaler.is_enabled()


@dataclass
class Unread:
    """A step whose loss and gradient norm are on their way to the host; it has not reached the weights if bad."""

    step: int
    outcome: Outcome
    related: Related
    norm: Tensor
    bad: AsyncHostCopy

    def check(self, objective: Composite) -> None:
        """Raise TrainingError if loss or gradient norm was not finite."""
        if bool(self.bad.read()):
            raise TrainingError(explain_not_finite(self.step, self.outcome, self.related, objective, self.norm))


def explain_not_finite(step: int, outcome: Outcome, related: Related, objective: Composite, norm: Tensor) -> str:
    """Name the term and the place; this runs once, so it may compute."""
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
        "Cures: a lower train.learning_rate, train.clip, a higher temperature, train.precision = 32."
    )


def overflowed(loss: Tensor, scaler: torch.amp.GradScaler) -> bool:
    """Whether a gradient that is not finite may be so by its scale alone (float16): the step is left out then.

    The scale is halved each time. Below 1 it was not the scale.
    """
    return scaler.is_enabled() and math.isfinite(float(loss.detach())) and scaler.get_scale() >= 1


def terms_with_bad_gradient(related: Related, objective: Composite) -> Iterator[str]:
    """Names of the terms whose own gradient is not finite."""
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
