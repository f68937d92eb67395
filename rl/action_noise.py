"""The state of SB3's action noise (Ornstein-Uhlenbeck noise is correlated in time), for checkpoints."""

import copy
from typing import Any

from stable_baselines3.common.noise import ActionNoise, VectorizedActionNoise

from dipole.core.utils.errors import CheckpointError


def noise_state(noise: ActionNoise | None) -> dict[str, Any] | None:
    """Return the class and the plain attributes. Vectorised noise has one state per environment."""
    if noise is None:
        return None
    values: dict[str, Any] = {}
    for name, value in vars(noise).items():
        if name == "_noises":
            values[name] = [noise_state(each) for each in value]
        elif not callable(value):  # as noise is: the base of a vectorised one has no state of its own
            values[name] = copy.deepcopy(value)
    return {"name": type(noise).__qualname__, "values": values}


def set_noise_state(noise: ActionNoise | None, state: dict[str, Any] | None) -> ActionNoise | None:
    """Return noise that continues from a state, vectorised if the state is.

    Raises:
        CheckpointError: the noise is another one than was saved.
    """
    if state is None:
        return noise
    vectorised = VectorizedActionNoise.__name__
    if noise is not None and state["name"] == vectorised and not isinstance(noise, VectorizedActionNoise):
        noise = VectorizedActionNoise(noise, len(state["values"]["_noises"]))  # as SB3 does when learning begins
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
