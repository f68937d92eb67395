"""The losses that are compared: dipole, plain PyTorch, and the libraries that are installed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

import dipole
from dipole.benchmarks.speed.dense import DENSE, Loss
from dipole.core.objectives import engine

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
SHARP = "infonce(temperature=0.01)"
TEMPERATURES = {"infonce": 0.5, SHARP: 0.01}  # of the losses that other libraries have as NTXentLoss
PML_LIMIT = 256  # pytorch-metric-learning's NT-Xent is cubic in the batch


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
        rows, dtype = self.rows // self.views, DTYPES[self.dtype]
        if by == "siglip-kernel":  # it compares two encoders
            rows = self.rows
        views = [
            torch.randn(rows, self.width, generator=generator, device=device, dtype=dtype) for _ in range(self.views)
        ]
        return [view.requires_grad_() for view in views]


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
