"""Environments while they run: what happens when one fails, and processes of their own."""

from dipole.core.utils.extras import lazy

_HOME = {
    "Guard": "dipole.rl.envs.running.faults",
    "PATIENCE": "dipole.rl.envs.running.faults",
    "describe": "dipole.rl.envs.running.faults",
    "fault_message": "dipole.rl.envs.running.faults",
    "WorkerVecEnv": "dipole.rl.envs.running.workers",
    "guarded": "dipole.rl.envs.running.faults",
}

__all__ = sorted(_HOME)
__getattr__ = lazy(__name__, _HOME, "rl")
