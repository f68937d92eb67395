"""CURL agents on the DeepMind Control Suite, built on stable-baselines3, with any objective inside.

Importing this package registers the environments (`gymnasium.make("dipole/cheetah-run-v0")`) and nothing heavier: names
are resolved on first use, and dm_control is imported by the first environment that needs it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_HOME = {
    "ContrastiveCallback": "dipole.rl.callback",
    "ContrastiveSAC": "dipole.rl.agent",
    "ControlEnv": "dipole.rl.environments",
    "CheckpointCallback": "dipole.rl.checkpoint",
    "DotEnv": "dipole.rl.dot",
    "EvaluationCallback": "dipole.rl.evaluation",
    "FrameReplayBuffer": "dipole.rl.replay",
    "WorkerVecEnv": "dipole.rl.faults",
    "make_env": "dipole.rl.environments",
    "resume": "dipole.rl.checkpoint",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dipole.rl' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


if find_spec("gymnasium") is not None:
    from dipole.rl.tasks import register

    register()
