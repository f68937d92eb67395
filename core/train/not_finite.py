"""Explain a loss or a gradient that is not finite, before the run stops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dipole.core.objectives.objective import Composite, Outcome
from dipole.core.objectives.term_values import GlobalPairs


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
