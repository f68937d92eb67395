"""The contrastive objective inside an agent: it is built and checked, duplicates are found, and its steps counted."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.type_aliases import TrainFrequencyUnit
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from dipole.core.objectives.objective import Composite, Objective
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import registry
from dipole.core.train.compute_loss import as_composite
from dipole.core.utils.errors import ConfigError, PairsError


def given_composite(given: str | Objective | Composite | None) -> Composite | None:
    """Return a Composite as `as_composite` does, and None for "none" and None."""
    if given is None or given == "none":
        return None
    return as_composite(given)


def unregistered(contrast: Composite | None) -> tuple[str, ...]:
    """Classes of the terms that no text can name."""
    if contrast is None:
        return ()
    kinds = [type(term) for _, _, term in contrast]
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if registry.name_of(kind) is None)


def fit(contrast: Composite, width: int, bilinear_init: str) -> Composite:
    """Create missing parameters for embeddings of the width, W as `bilinear_init` says. Existing ones stay."""
    new = [term for _, _, term in contrast if isinstance(getattr(term, "W", None), UninitializedParameter)]
    contrast.build(width)
    start_bilinear(new, bilinear_init)
    return contrast


@torch.no_grad()
def start_bilinear(terms: Iterable[Objective], bilinear_init: str) -> None:
    """Draw each W of bilinear terms from [0, 1) for "uniform". It is built as the identity."""
    for term in terms:
        if bilinear_init == "uniform" and term.similarity == "bilinear":
            term.W.uniform_(0, 1)


def largest(gradients: list[Tensor]) -> Tensor:
    """Return the largest magnitude in each of n gradients, (n,), or NaN if there is one."""
    return torch.stack(torch._foreach_max(torch._foreach_abs(gradients)))


def require_unlabelled(contrast: Composite, width: int, positives: int, batch_size: int) -> None:
    """Try a copy on a batch without labels. Raise ConfigError if the objective asks for more than an agent has."""
    trial = copy.deepcopy(contrast).cpu()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            trial(Pairs.cross(torch.randn(batch_size, width), torch.randn(batch_size, positives, width)))
        except PairsError as error:
            raise ConfigError(f"the objective {contrast} cannot run inside an agent: {error}") from error


def duplicates(stacks: Any, positives: int) -> Tensor | None:
    """Return the candidates (B, B K) that show the same observation as another anchor, or None if all rows differ.

    Equal rows of `stacks` (B, n) are the same observation. Candidate j + c B is key c of observation j.
    """
    rows, names = np.unique(stacks, axis=0, return_inverse=True)
    if len(rows) == len(stacks):
        return None
    return twins(torch.from_numpy(names.reshape(-1)), positives)


def twins(names: Tensor, positives: int) -> Tensor:
    """Return the candidates (B, B K) with the name of the anchor, names (B,), but not its own keys: -1 elsewhere."""
    size, device = len(names), names.device
    candidates = torch.arange(size * positives, device=device)
    others = candidates % size != torch.arange(size, device=device)[:, None]
    return torch.where((names[:, None] == names.repeat(positives)) & others, candidates, -1)


def bf16_is_native(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 in hardware. Others emulate it, slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def rollout_length(model: BaseAlgorithm) -> int | None:
    """Return the environment steps of a rollout over all environments. None if it ends with an episode."""
    agent: Any = model
    if not hasattr(agent, "train_freq"):
        return int(agent.n_steps * agent.n_envs)
    if agent.train_freq.unit != TrainFrequencyUnit.STEP:
        return None
    return int(agent.train_freq.frequency * agent.n_envs)


def rollouts_left(model: BaseAlgorithm) -> int | None:
    """Return the rollouts until the end of `learn`, without the current one. None if their length is unknown."""
    length = rollout_length(model)
    if length is None:
        return None
    return max(0, math.ceil((model._total_timesteps - model.num_timesteps) / length))
