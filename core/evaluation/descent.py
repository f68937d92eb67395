"""A linear softmax classifier trained by SGD or Adam, on fixed features or on random views."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

ViewFeatures = Callable[[int, Sequence[Tensor]], Iterator[Tensor]]
"""(epoch, batches of row numbers) -> features (b, d) of each batch, in order."""

# solver -> batch size, learning rate, factor at each milestone
CUSTOMARY = {"adam": (128, 1e-3, 0.2), "sgd": (256, 30.0, 0.1)}


@dataclass(frozen=True)
class Descent:
    """Training of a linear classifier. None takes the papers' value for the solver.

    solver: "adam", betas (0.5, 0.999), batch 128, rate 1e-3, times 0.2 at milestones (CACR App. C.1); "sgd", momentum
        0.9, batch 256, rate 30, times 0.1 at milestones (CACR App. C.2, after He et al. 2020).
    schedule: "step", at `milestones` in epochs, 60 % and 80 % of them by default; "cosine", to 0 from epoch to epoch.
    """

    solver: str
    epochs: int = 100
    batch_size: int | None = None
    learning_rate: float | None = None
    weight_decay: float = 0.0
    schedule: str = "step"
    milestones: tuple[int, ...] | None = None
    decay: float | None = None


def descend(rows: ViewFeatures, labels: Tensor, classes: int, width: int, how: Descent, seed: int) -> nn.Linear:
    """Train a linear layer (classes, width) by mean cross-entropy on features of batches of rows with labels (n,).

    Order and initial weights are drawn from the seed on the CPU. The layer is on the labels' device.
    """
    batch_size, rate, decay = CUSTOMARY[how.solver]
    layer = nn.Linear(width, classes, device=labels.device)
    nn.init.zeros_(layer.bias)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * 0.01)
    settings: dict[str, Any] = {"lr": how.learning_rate or rate, "weight_decay": how.weight_decay}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9, **settings)
    if how.solver == "adam":
        optimizer = torch.optim.Adam(layer.parameters(), betas=(0.5, 0.999), **settings)
    customary = round(0.6 * how.epochs), round(0.8 * how.epochs)
    milestones = customary if how.milestones is None else how.milestones
    schedule: Any = MultiStepLR(optimizer, list(milestones), gamma=how.decay or decay)
    if how.schedule == "cosine":
        schedule = CosineAnnealingLR(optimizer, how.epochs)
    for epoch in range(how.epochs):
        batches = torch.randperm(len(labels), generator=generator).split(how.batch_size or batch_size)
        for index, features in zip(batches, rows(epoch, batches), strict=True):
            optimizer.zero_grad()
            with torch.enable_grad():
                F.cross_entropy(layer(features), labels[index.to(labels.device)]).backward()
            optimizer.step()
        schedule.step()
    return layer
