"""Losses that are timed beside each other on a device: ours, plain PyTorch, and libraries that are installed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

import dipole
from dipole.benchmarks.speed import dense
from dipole.benchmarks.speed.losses import PML_LIMIT, load_lightly
from dipole.benchmarks.speed.model import Case
from dipole.core.objectives import engine

Loss = Callable[[Sequence[Tensor]], Tensor]

SHARP = "infonce(temperature=0.01)"
# What plain PyTorch and other libraries know of our losses.
PLAIN: dict[str, Loss] = dense.DENSE | {SHARP: dense.sharp}
NTXENT = {"infonce": 0.5, SHARP: 0.01}


@dataclass(frozen=True)
class Subject:
    """Somebody's way to compute a loss.

    Args:
        name: of the library and its way.
        build: makes the loss of a case on a device; what it raises is a result.
        engine: of the sweep, where it is decided by hand.
        pairs: each view has all rows of the case, as a matrix of two encoders has; else the views share them.
    """

    name: str
    build: Callable[[Case, torch.device], Loss]
    engine: str | None = None
    pairs: bool = False

    def loss(self, case: Case, device: torch.device) -> Loss:
        """The loss of views, with the engine that was decided."""
        loss = self.build(case, device)

        def run(views: Sequence[Tensor]) -> Tensor:
            with engine.using(self.engine):
                return loss(views)

        return run

    def views(self, case: Case, device: torch.device, generator: torch.Generator) -> list[Tensor]:
        """Fresh inputs."""
        rows = 2 * case.rows if self.pairs else case.rows
        return Case(case.loss, rows, case.width, case.dtype).views(device, generator)


def subjects(case: Case, device: torch.device) -> list[Subject]:
    """Who computes the loss of a case here, the most telling first."""
    found = [Subject("dipole", _ours)]
    if case.loss in PLAIN:
        found.append(Subject("dense PyTorch", lambda case, _: PLAIN[case.loss]))
    found.append(Subject("dipole, eager tiles", _ours, engine="eager"))
    if case.loss == "infonce" and find_spec("siglip_kernel"):
        found.append(Subject("siglip-kernel (rows of two encoders)", _siglip, pairs=True))
    if case.loss in PLAIN:
        found.append(Subject("dense PyTorch, compiled", _compiled))
    if case.loss in NTXENT and find_spec("lightly"):
        found.append(Subject("lightly NTXentLoss", _lightly))
    # Cubic in the batch: on a GPU it soon runs out of memory, on a processor it takes minutes.
    fits = device.type == "cuda" or case.rows <= 2 * PML_LIMIT
    if case.loss in NTXENT and fits and find_spec("pytorch_metric_learning"):
        found.append(Subject("pytorch-metric-learning NTXentLoss", _metric_learning))
    return found


def _ours(case: Case, device: torch.device) -> Loss:
    objective = dipole.objective(case.loss, dim=case.width).to(device)
    return lambda views: objective(*views).loss


def _compiled(case: Case, device: torch.device) -> Loss:
    torch._dynamo.reset()
    return torch.compile(PLAIN[case.loss], dynamic=False)


def _lightly(case: Case, device: torch.device) -> Loss:
    loss = load_lightly("lightly NTXentLoss", None, {"temperature": NTXENT[case.loss]})
    return lambda views: loss(views[0], views[1])


def _metric_learning(case: Case, device: torch.device) -> Loss:
    from pytorch_metric_learning.losses import NTXentLoss

    loss, labels = NTXentLoss(temperature=NTXENT[case.loss]), torch.arange(case.rows // 2, device=device).repeat(2)
    return lambda views: loss(torch.cat(list(views)), labels)


def _siglip(case: Case, device: torch.device) -> Loss:
    from siglip_kernel import fused_siglip_loss

    scale = torch.tensor(2.302, device=device, requires_grad=True)  # log of 10, as SigLIP begins
    bias = torch.tensor(-10.0, device=device, requires_grad=True)
    return lambda views: fused_siglip_loss(*(F.normalize(view, dim=1) for view in views), scale, bias)
