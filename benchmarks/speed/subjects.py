"""The losses that are compared: dipole, plain PyTorch, and the libraries that are installed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dipole
from dipole.benchmarks.speed.dense import DENSE
from dipole.core.objectives import engine

Loss = Callable[[Sequence[Tensor]], Tensor]

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
SHARP = "infonce(temperature=0.01)"
TEMPERATURES = {"infonce": 0.5, SHARP: 0.01}  # of the losses that other libraries have as NTXentLoss
PML_LIMIT = 256  # pytorch-metric-learning's NT-Xent is cubic in the batch


@dataclass(frozen=True)
class Case:
    """A loss of some views, forward and backward.

    Args:
        loss: text of an objective.
        rows: embeddings of all views together.
        width: of an embedding.
        dtype: of the embeddings, a name of DTYPES.
        views: number of views of each point.
    """

    loss: str
    rows: int
    width: int
    dtype: str = "float32"
    views: int = 2

    def embeddings(self, device: torch.device, generator: torch.Generator) -> list[Tensor]:
        """Return the views, (rows / views, width) each, which ask for a gradient."""
        shape, dtype = (self.rows // self.views, self.width), DTYPES[self.dtype]
        views = [torch.randn(*shape, generator=generator, device=device, dtype=dtype) for _ in range(self.views)]
        return [view.requires_grad_() for view in views]


def _dipole(case: Case, device: torch.device) -> Loss:
    objective = dipole.objective(case.loss, dim=case.width).to(device)
    return lambda views: objective(*views).loss


def _tiles(case: Case, device: torch.device) -> Loss:
    loss = _dipole(case, device)

    def run(views: Sequence[Tensor]) -> Tensor:
        with engine.using("eager"):
            return loss(views)

    return run


def _dense(case: Case, device: torch.device) -> Loss:
    return DENSE[case.loss]


def _compiled(case: Case, device: torch.device) -> Loss:
    torch._dynamo.reset()
    return torch.compile(DENSE[case.loss], dynamic=False)


def _lightly(case: Case, device: torch.device) -> Loss:
    from lightly.loss import NTXentLoss

    loss = NTXentLoss(temperature=TEMPERATURES[case.loss])
    return lambda views: loss(views[0], views[1])


def _lightly_dcl(case: Case, device: torch.device) -> Loss:
    from lightly.loss import DCLLoss

    loss = DCLLoss(temperature=0.5)
    return lambda views: loss(views[0], views[1])


def _metric_learning(case: Case, device: torch.device) -> Loss:
    from pytorch_metric_learning.losses import NTXentLoss

    loss, labels = (
        NTXentLoss(temperature=TEMPERATURES[case.loss]),
        torch.arange(case.rows // 2, device=device).repeat(2),
    )
    return lambda views: loss(torch.cat(list(views)), labels)


def _siglip(case: Case, device: torch.device) -> Loss:
    from siglip_kernel import fused_siglip_loss

    scale = torch.tensor(2.302, device=device, requires_grad=True)  # log of 10, SigLIP's initial value
    bias = torch.tensor(-10.0, device=device, requires_grad=True)
    return lambda views: fused_siglip_loss(*(F.normalize(view, dim=1) for view in views), scale, bias)


# Functions that build the loss of each library. Their errors are results.
BUILD: dict[str, Callable[[Case, torch.device], Loss]] = {
    "dipole": _dipole,
    "dense PyTorch": _dense,
    "dipole, eager tiles": _tiles,
    "siglip-kernel": _siglip,
    "dense PyTorch, compiled": _compiled,
    "lightly NTXentLoss": _lightly,
    "lightly DCLLoss": _lightly_dcl,
    "pytorch-metric-learning NTXentLoss": _metric_learning,
}


def subjects(case: Case, device: torch.device) -> list[str]:
    """Return the names in BUILD that have the loss of a case and are installed here, the most telling first."""
    plain = case.loss in DENSE
    ntxent = case.loss in TEMPERATURES and case.views == 2
    small = case.rows <= 2 * PML_LIMIT or device.type == "cuda"
    has = {
        "dipole": True,
        "dense PyTorch": plain,
        "dipole, eager tiles": True,
        "siglip-kernel": case.loss == "infonce" and case.views == 2 and _installed("siglip_kernel"),
        "dense PyTorch, compiled": plain,
        "lightly NTXentLoss": ntxent and _installed("lightly"),
        "lightly DCLLoss": case.loss == "dcl" and case.views == 2 and _installed("lightly"),
        "pytorch-metric-learning NTXentLoss": ntxent and small and _installed("pytorch_metric_learning"),
    }
    return [name for name in BUILD if has[name]]


def _installed(module: str) -> bool:
    return find_spec(module) is not None


def embeddings(name: str, case: Case, device: torch.device, generator: torch.Generator) -> list[Tensor]:
    """Return fresh inputs. siglip-kernel compares two encoders: each view has all rows of the case."""
    if name == "siglip-kernel":
        case = Case(case.loss, 2 * case.rows, case.width, case.dtype)
    return case.embeddings(device, generator)


def backward(loss: Loss, views: Sequence[Tensor]) -> Any:
    """One step: loss and gradient."""
    return loss(views).backward()
