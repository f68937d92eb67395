"""Optimizers and learning rates of [train]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dipole.core.train.config import TrainConfig
from dipole.core.utils.errors import ConfigError, OptionError


def warmup_cosine(step: int, total: int, warmup: int = 0, peak: float = 1.0) -> float:
    """Return the learning rate of a step: a linear rise to `peak`, then half a cosine to 0 at `total`.

    Loshchilov & Hutter 2017, Eq. 5, one period. The last step of the warm-up has the peak.

        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> factor = lambda step: warmup_cosine(step, total=100, warmup=10)
        >>> scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        >>> [round(warmup_cosine(step, 100, 10, peak=0.1), 4) for step in (0, 9, 10, 55, 100)]
        [0.01, 0.1, 0.1, 0.05, 0.0]

    Args:
        step: from 0.
        total: steps of the run, > warmup.
        warmup: steps of the linear rise, >= 0.
        peak: the largest rate. The default, 1, gives a factor for `torch.optim.lr_scheduler.LambdaLR`.
    """
    if max(step, 0) < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


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


def build_optimizer(config: TrainConfig, parameters: Iterable[Tensor]) -> Optimizer:
    """Build the optimizer of a [train] table. Raise ConfigError if no parameter requires a gradient."""
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not wanted:
        raise ConfigError(
            "there is nothing to train: neither the encoder nor the objective has a parameter that learns. Choose an "
            "encoder that learns, or thaw what is fixed in it."
        )
    rate, decay = config.learning_rate, config.weight_decay
    groups: Any = wanted
    if decay:
        decayed = [parameter for parameter in wanted if not getattr(parameter, "undecayed", False)]
        free = [parameter for parameter in wanted if getattr(parameter, "undecayed", False)]
        groups = [{"params": decayed}, {"params": free, "weight_decay": 0.0}]
    # One kernel for all parameters, where PyTorch has it.
    fused = all(parameter.device.type in ("cpu", "cuda") and parameter.dtype.is_floating_point for parameter in wanted)
    betas = config.betas or (0.9, 0.999)
    kinds: dict[str, Callable[..., Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if config.optimizer in kinds:
        return kinds[config.optimizer](groups, lr=rate, betas=betas, weight_decay=decay, fused=fused)
    momentum = config.momentum or 0.0
    if config.optimizer == "lars":
        return LARS(groups, lr=rate, momentum=momentum, weight_decay=decay)
    return torch.optim.SGD(groups, lr=rate, momentum=momentum, weight_decay=decay, fused=fused)


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman & Ginsburg 2017, Algorithm 1).

        g <- grad + weight_decay * w
        v <- momentum * v + lr * trust * ||w|| / ||g|| * g
        w <- w - v

    Vectors and scalars (biases, batch-norm scales) get neither weight decay nor the ratio, as in SimCLR's code. The
    paper writes the ratio's denominator as ||grad|| + weight_decay ||w||; here it is the norm of the decayed gradient.

        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = LARS(model.parameters(), lr=0.3 * 1024 / 256, weight_decay=1e-6)

    Args:
        params: tensors (...) to optimise, or groups of them.
        lr: global learning rate, >= 0.
        momentum: in [0, 1).
        weight_decay: >= 0.
        trust: trust coefficient eta, > 0.

    Raises:
        OptionError: a number is outside its range.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 1e-3
    ) -> None:
        for name, value, allowed, fits in (
            ("lr", lr, ">= 0", lr >= 0),
            ("momentum", momentum, "in [0, 1)", 0 <= momentum < 1),
            ("weight_decay", weight_decay, ">= 0", weight_decay >= 0),
            ("trust", trust, "> 0", trust > 0),
        ):
            if not fits:
                raise OptionError(f"LARS: {name} must be {allowed}, got {value}.", name)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                grad, rate = weight.grad, group["lr"]
                if weight.ndim > 1:
                    grad = grad.add(weight, alpha=group["weight_decay"])
                    w, g = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(grad)
                    # A weight or gradient of norm 0 has no direction to scale: plain step.
                    rate = rate * torch.where((w > 0) & (g > 0), group["trust"] * w / g, 1.0)
                velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                velocity.mul_(group["momentum"]).add_(grad * rate)
                weight.sub_(velocity)
        return loss
