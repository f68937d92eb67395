"""Nested Python values (core/utils/plain_values.py) in two files: NAME.json for their shape, NAME.npz for arrays.

And the state of SB3's action noise as such a value. Ornstein-Uhlenbeck noise is correlated in time.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common import noise as noises

from dipole.core.utils.errors import CheckpointError, ConfigError
from dipole.core.utils.plain_values import decode, encode
from dipole.core.utils.received import read_json
from dipole.core.utils.seeding import isolated


def files(name: str) -> tuple[str, str]:
    return f"{name}.json", f"{name}.npz"


def write(folder: Path, name: str, value: Any) -> None:
    """Write a value into a folder. Raise CheckpointError with the place of anything that is not plain."""
    arrays: list[np.ndarray] = []

    def keep(array: Any) -> int:
        if isinstance(array, torch.Tensor):
            array = array.cpu().numpy()
        arrays.append(array)
        return len(arrays) - 1

    told = encode(value, keep, name)
    tree, stored = files(name)
    (folder / tree).write_text(json.dumps(told), encoding="utf-8")
    np.savez(folder / stored, **{str(index): array for index, array in enumerate(arrays)})  # type: ignore[arg-type]


def read(folder: Path, name: str) -> Any:
    """Read what `write` wrote. A damaged file raises Python's own errors."""
    tree, stored = files(name)
    told = read_json(folder / tree)
    with np.load(folder / stored, allow_pickle=False) as arrays:
        return decode(told, arrays)


def noise_state(noise: noises.ActionNoise | None) -> dict[str, Any] | None:
    """Return the class and what changes with each draw. Vectorised noise has one state per environment."""
    if noise is None:
        return None
    values = {name: copy.deepcopy(value) for name, value in vars(noise).items() if not callable(value)}
    if isinstance(noise, noises.VectorizedActionNoise):
        values = {"_noises": [noise_state(each) for each in noise.noises]}
    elif type(noise).__module__ == noises.__name__:  # the other attributes are arguments
        values = {name: value for name, value in values.items() if name == "noise_prev"}
    return {"name": type(noise).__qualname__, "values": values}


def require_width(noise: noises.ActionNoise | None, shape: tuple[int, ...]) -> None:
    """Raise ConfigError for noise that cannot be added to actions of the shape (n_envs, A)."""
    if noise is None:
        return
    with isolated(0):
        drawn = np.shape(copy.deepcopy(noise)())
    if len(drawn) > len(shape) or any(n not in (1, m) for n, m in zip(drawn[::-1], shape[::-1], strict=False)):
        raise ConfigError(f"action_noise draws numbers of the shape {drawn}, and the actions are {shape}.")


def set_noise_state(noise: noises.ActionNoise | None, state: dict[str, Any] | None) -> noises.ActionNoise | None:
    """Return noise that continues from a state, vectorised if the state is. Raise CheckpointError for another noise."""
    if state is None:
        return noise
    vectorised = noises.VectorizedActionNoise.__name__
    if noise is not None and state["name"] == vectorised and not isinstance(noise, noises.VectorizedActionNoise):
        noise = noises.VectorizedActionNoise(noise, len(state["values"]["_noises"]))  # as SB3 does when learning begins
    if noise is None or type(noise).__qualname__ != state["name"]:
        raise CheckpointError(
            f"the checkpoint was written with the action_noise {state['name']}, this agent has {noise!r}: give the "
            "same one."
        )
    for name, value in state["values"].items():
        if name == "_noises":
            for own, each in zip(noise.noises, value, strict=True):  # type: ignore[attr-defined]
                set_noise_state(own, each)
        else:
            setattr(noise, name, value)
    return noise
