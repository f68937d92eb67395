"""Optimizers and learning-rate schedules of [train]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dipole.core.train.config import TrainConfig
from dipole.core.utils.errors import ConfigError


def learning_rate(config: TrainConfig, step: int, total: int, steps_per_epoch: int) -> float:
    """Return the rate of update `step` (from 0) of `total`.

    Warm-up rises linearly and reaches the peak with its last update. "cosine" then falls to 0 at `total`
    (Loshchilov & Hutter 2017, Eq. 5, one period). "step" multiplies by `decay` at each milestone.
    """
    peak = config.learning_rate
    warmup = config.in_steps(config.warmup, steps_per_epoch)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.rate_schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    if config.rate_schedule == "step":
        assert config.milestones is not None
        assert config.decay is not None
        passed = sum(step >= config.in_steps(milestone, steps_per_epoch) for milestone in config.milestones)
        return peak * config.decay**passed
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
    free = [parameter for parameter in wanted if getattr(parameter, "undecayed", False)]
    groups: Any = wanted
    if decay and free:
        decayed = [parameter for parameter in wanted if not getattr(parameter, "undecayed", False)]
        groups = [*([{"params": decayed}] if decayed else []), {"params": free, "weight_decay": 0.0}]
    # One kernel for all parameters, where PyTorch has it.
    fused = all(parameter.device.type in ("cpu", "cuda") and parameter.dtype.is_floating_point for parameter in wanted)
    if config.optimizer in ("adam", "adamw"):
        assert config.betas is not None
        adam = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        return adam(groups, lr=rate, betas=config.betas, weight_decay=decay, fused=fused)
    assert config.momentum is not None
    if config.optimizer == "lars":
        return LARS(groups, lr=rate, momentum=config.momentum, weight_decay=decay)
    return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, weight_decay=decay, fused=fused)


def take_over(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer of the same parameters and settings. It must be complete.

    Raises:
        ValueError, RuntimeError, or whatever PyTorch meets: it is not that.
    """
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)  # the configuration's, whatever is written
    names = next(names for kind, names in KEPT.items() if isinstance(optimizer, kind))
    known = {weight for group in optimizer.param_groups for weight in group["params"]}
    for weight, kept in optimizer.state.items():
        if weight not in known or set(kept) != names:
            raise ValueError(f"the optimizer's state holds {', '.join(map(str, kept))} in place of {', '.join(names)}")
        for name, value in kept.items():
            shape = torch.Size([]) if name == "step" else weight.shape
            if not (value is None and name == "momentum_buffer") and (
                not isinstance(value, Tensor) or value.shape != shape or value.is_complex()
            ):
                raise ValueError(f"the optimizer's {name} is not of shape {list(shape)}")


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman & Ginsburg 2017, Algorithm 1).

        g <- grad + weight_decay * w
        v <- momentum * v + lr * trust * ||w|| / ||g|| * g
        w <- w - v

    Vectors and scalars (biases, batch-norm scales) get neither weight decay nor the ratio, as in SimCLR's code. The
    paper writes the ratio's denominator as ||grad|| + weight_decay ||w||; here it is the norm of the decayed gradient.

    Args:
        parameters: tensors to optimise.
        lr: global learning rate, > 0.
        momentum: in [0, 1).
        weight_decay: >= 0.
        trust: trust coefficient eta, > 0.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            grads = [weight.grad for weight in weights]
            matrix = [weight.ndim > 1 for weight in weights]
            grads = [
                torch.add(grad, weight, alpha=group["weight_decay"]) if is_matrix else grad
                for weight, grad, is_matrix in zip(weights, grads, matrix, strict=True)
            ]
            weight_norms, grad_norms = torch._foreach_norm(weights), torch._foreach_norm(grads)
            for weight, grad, is_matrix, w, g in zip(weights, grads, matrix, weight_norms, grad_norms, strict=True):
                velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                velocity.mul_(group["momentum"])
                if is_matrix:
                    # A weight or gradient of norm 0 has no direction to scale: plain step.
                    ratio = torch.where((w > 0) & (g > 0), group["trust"] * w / g, 1.0)
                    velocity.add_(grad * (ratio * group["lr"]))
                else:
                    velocity.add_(grad, alpha=group["lr"])
            torch._foreach_sub_(weights, [self.state[weight]["velocity"] for weight in weights])
        return loss


_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}
KEPT: Mapping[type[Optimizer], set[str]] = {
    torch.optim.Adam: _MOMENTS,
    torch.optim.AdamW: _MOMENTS,
    torch.optim.SGD: {"momentum_buffer"},
    LARS: {"velocity"},
}
"""State of each parameter by optimizer."""
