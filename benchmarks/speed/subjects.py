"""The losses that are compared: dipole, the libraries that are installed, and plain PyTorch as without dipole."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dipole
from dipole.core.objectives import engine

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
SHARP = "infonce(temperature=0.01)"
TEMPERATURES = {"infonce": 0.5, SHARP: 0.01}  # of the losses that other libraries have as NTXentLoss
PML_LIMIT = 256  # pytorch-metric-learning's NT-Xent is cubic in the batch

Loss = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class TimedLoss:
    """A loss of some views, forward and backward."""

    loss: str  # text of an objective
    rows: int  # embeddings of all views together
    width: int  # of an embedding
    dtype: str = "float32"  # of the embeddings, a name of DTYPES
    views: int = 2  # of each point

    def embeddings(self, device: torch.device, generator: torch.Generator, by: str = "dipole") -> list[Tensor]:
        """Return fresh views that ask for a gradient, (rows / views, width) each."""
        rows = self.rows // self.views
        if by == "siglip-kernel":  # it compares two encoders
            rows = self.rows
        options: Any = {"generator": generator, "device": device, "dtype": DTYPES[self.dtype], "requires_grad": True}
        return [torch.randn(rows, self.width, **options) for _ in range(self.views)]


def _matrix(views: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cosines (N, N) of all views, the indices (N, K) of positives and the mask (N, N) of negatives."""
    z = F.normalize(torch.cat(list(views)), dim=1)
    n, batch = len(z), len(views[0])
    own = torch.arange(n, device=z.device)
    positives = (own.unsqueeze(1) + torch.arange(1, len(views), device=z.device) * batch) % n
    negative = torch.ones(n, n, dtype=torch.bool, device=z.device)
    negative[own, own] = False
    negative.scatter_(1, positives, False)
    return z @ z.T, positives, negative


def infonce(views: Sequence[Tensor], temperature: float = 0.5, polarized: float = 0.0) -> Tensor:
    if len(views) == 2 and not polarized:
        z = F.normalize(torch.cat(list(views)), dim=1)
        logits = (z @ z.T / temperature).fill_diagonal_(-math.inf)
        batch = len(views[0])
        return F.cross_entropy(logits, (torch.arange(2 * batch, device=z.device) + batch) % (2 * batch))
    s, positives, negative = _matrix(views)
    log_sum = torch.where(negative, s / temperature, -math.inf).logsumexp(1, keepdim=True)
    loss = F.softplus(log_sum - s.gather(1, positives) / temperature).mean()
    if not polarized:
        return loss
    distance = (1 - s) / 2
    g = ((distance - 0.1) * (distance - 0.5)).clamp_max(0).abs()
    return loss + polarized * torch.where(negative, g, 0.0).sum(1).mean()


def dcl(views: Sequence[Tensor], beta: float = 0.0, rho: float = 0.1, temperature: float = 0.5) -> Tensor:
    s, positives, negative = _matrix(views)
    e = torch.where(negative, (s / temperature).exp(), 0.0)
    count = negative.sum(1, keepdim=True)
    if beta:
        weights = torch.where(negative, (beta * s / temperature).exp(), 0.0)
        e = e * weights / (weights.sum(1, keepdim=True) / count)
    p = (s.gather(1, positives) / temperature).exp()
    g = (e.sum(1, keepdim=True) - rho * count * p) / (1 - rho)
    g = torch.maximum(g, count * math.exp(-1 / temperature))
    return -(p / (p + g)).log().mean()


def align_uniform(views: Sequence[Tensor]) -> Tensor:
    s, positives, _ = _matrix(views)
    within = [(-2 * torch.pdist(F.normalize(view, dim=1)).square()).exp().mean().log() for view in views]
    return (2 - 2 * s.gather(1, positives)).mean() + torch.stack(within).mean()


def cacr(views: Sequence[Tensor]) -> Tensor:
    s, positives, negative = _matrix(views)
    near = 2 - 2 * s.gather(1, positives)
    far = 2 - 2 * s
    attraction = (near.softmax(1) * near).sum(1)
    weights = torch.where(negative, -2 * far, -math.inf).softmax(1)
    return (attraction - (weights * far).sum(1)).mean()


def triplet(views: Sequence[Tensor]) -> Tensor:
    s, positives, negative = _matrix(views)
    far = torch.where(negative, 2 - 2 * s, 0.0).sum(1) / negative.sum(1)
    return ((2 - 2 * s.gather(1, positives)).mean(1) - far + 1).clamp_min(0).mean()


def co2(views: Sequence[Tensor]) -> Tensor:
    s, positives, negative = _matrix(views)
    logits = torch.where(negative, s / 0.5, -math.inf)
    base = F.softplus(logits.logsumexp(1) - s.gather(1, positives)[:, 0] / 0.5)
    log_p = logits.log_softmax(1)
    log_q = torch.where(negative, s[positives[:, 0]] / 0.5, -math.inf).log_softmax(1)
    gap = torch.where(negative, log_p - log_q, 0.0)
    return (base + 0.3 * 0.5 * ((log_p.exp() - log_q.exp()) * gap).sum(1)).mean()


def blocks(views: Sequence[Tensor]) -> Tensor:
    x = torch.cat(list(views))
    n, batch = len(x), len(views[0])
    own = torch.arange(n, device=x.device)
    positives = (own + batch) % n
    v = x @ x[positives].T  # column m is the block of anchor m
    related = torch.zeros(n, n, dtype=torch.bool, device=x.device)
    related[own, own] = related[own, positives] = True
    log_sum = torch.where(related, -math.inf, v).logsumexp(1)
    return F.softplus(log_sum - v.diagonal()).mean() / math.log(2)


DENSE: dict[str, Loss] = {
    "infonce": infonce,
    "infonce(temperature=0.01)": partial(infonce, temperature=0.01),
    "infonce+dp(reduction=anchor_sum)": partial(infonce, polarized=0.1),
    "dcl": dcl,
    "hcl": partial(dcl, beta=1.0),
    "align_uniform": align_uniform,
    "cacr": cacr,
    "triplet": triplet,
    "co2": co2,
    "blocks": blocks,
}


def _dipole(case: TimedLoss, device: torch.device) -> Loss:
    objective = dipole.objective(case.loss, dim=case.width).to(device)
    return lambda views: objective(*views).loss


def _tiles(case: TimedLoss, device: torch.device) -> Loss:
    loss = _dipole(case, device)

    def run(views: Sequence[Tensor]) -> Tensor:
        with engine.using("eager"):
            return loss(views)

    return run


def _compiled(case: TimedLoss, device: torch.device) -> Loss:
    torch._dynamo.reset()
    return torch.compile(DENSE[case.loss], dynamic=False)


def _lightly(case: TimedLoss, device: torch.device) -> Loss:
    from lightly.loss import NTXentLoss

    loss = NTXentLoss(temperature=TEMPERATURES[case.loss])
    return lambda views: loss(*views)


def _metric_learning(case: TimedLoss, device: torch.device) -> Loss:
    from pytorch_metric_learning.losses import NTXentLoss

    loss = NTXentLoss(temperature=TEMPERATURES[case.loss])
    labels = torch.arange(case.rows // 2, device=device).repeat(2)
    return lambda views: loss(torch.cat(list(views)), labels)


def _siglip(case: TimedLoss, device: torch.device) -> Loss:
    from siglip_kernel import fused_siglip_loss

    scale = torch.tensor(2.302, device=device, requires_grad=True)  # log of 10, SigLIP's initial value
    bias = torch.tensor(-10.0, device=device, requires_grad=True)
    return lambda views: fused_siglip_loss(*(F.normalize(view, dim=1) for view in views), scale, bias)


# Functions that build the loss of each library. Their errors are results.
BUILD: dict[str, Callable[[TimedLoss, torch.device], Loss]] = {
    "dipole": _dipole,
    "dense PyTorch": lambda case, device: DENSE[case.loss],
    "dipole, eager tiles": _tiles,
    "siglip-kernel": _siglip,
    "dense PyTorch, compiled": _compiled,
    "lightly NTXentLoss": _lightly,
    "pytorch-metric-learning NTXentLoss": _metric_learning,
}


def subjects(case: TimedLoss, device: torch.device) -> list[str]:
    """Return the names in BUILD that have the loss of a case and are installed here, the most telling first."""
    is_plain = case.loss in DENSE
    ntxent = case.loss in TEMPERATURES and case.views == 2
    is_small = case.rows <= 2 * PML_LIMIT or device.type == "cuda"
    has = {
        "dipole": True,
        "dense PyTorch": is_plain,
        "dipole, eager tiles": True,
        "siglip-kernel": case.loss == "infonce" and case.views == 2 and find_spec("siglip_kernel"),
        "dense PyTorch, compiled": is_plain,
        "lightly NTXentLoss": ntxent and find_spec("lightly"),
        "pytorch-metric-learning NTXentLoss": ntxent and is_small and find_spec("pytorch_metric_learning"),
    }
    return [name for name in BUILD if has[name]]
