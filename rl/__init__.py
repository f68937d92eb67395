"""CURL agents on the DeepMind Control Suite, built on stable-baselines3, with any objective inside.

Importing this package registers the environments (`gymnasium.make("dipole/cheetah-run-v0")`) and nothing heavier: names
are resolved on first use, and dm_control is imported by the first environment that needs it.
"""

from importlib.util import find_spec

from dipole.core.utils.extras import lazy

_HOME = {
    "CheckpointCallback": "dipole.rl.snapshots",
    "ContrastiveCallback": "dipole.rl.callbacks.contrastive",
    "ContrastiveDrQ": "dipole.rl.drq",
    "ContrastiveSAC": "dipole.rl.sac",
    "ControlEnv": "dipole.rl.envs.control",
    "DotEnv": "dipole.rl.envs.dot",
    "EvaluationCallback": "dipole.rl.callbacks.evaluating",
    "FrameReplayBuffer": "dipole.rl.replay",
    "WorkerVecEnv": "dipole.rl.envs.running.workers",
    "environment": "dipole.rl.envs.registry",
    "make_env": "dipole.rl.envs.registry",
    "resume": "dipole.rl.snapshots",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy(__name__, _HOME, "rl")

if find_spec("gymnasium") is not None:
    from dipole.rl.envs.registry import load

    load()
