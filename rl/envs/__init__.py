"""Environments. A file of this folder that registers one (`@environment("mine")`) is found without being named."""

from dipole.core.utils.extras import lazy

_HOME = {
    "ControlEnv": "dipole.rl.envs.control",
    "DotEnv": "dipole.rl.envs.dot",
    "WorkerVecEnv": "dipole.rl.envs.running.workers",
    "environment": "dipole.rl.envs.registry",
    "make_env": "dipole.rl.envs.registry",
}

__all__ = sorted(_HOME)
__getattr__ = lazy(__name__, _HOME, "rl")
