"""CURL agents on the DeepMind Control Suite, built on stable-baselines3, with any objective inside.

Importing this package registers the environments (`gymnasium.make("dipole/cheetah-run-v0")`) and nothing heavier: names
are resolved on first use, and dm_control is imported by the first environment that needs it.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dipole.core.utils.extras import lazy

if TYPE_CHECKING:  # an alias marks an export
    from dipole.rl.callbacks.contrastive import ContrastiveCallback as ContrastiveCallback
    from dipole.rl.callbacks.evaluating import EvaluationCallback as EvaluationCallback
    from dipole.rl.drq import ContrastiveDrQ as ContrastiveDrQ
    from dipole.rl.envs.control import ControlEnv as ControlEnv
    from dipole.rl.envs.dot import DotEnv as DotEnv
    from dipole.rl.envs.registry import environment as environment
    from dipole.rl.envs.registry import make_env as make_env
    from dipole.rl.envs.running.workers import WorkerVecEnv as WorkerVecEnv
    from dipole.rl.replay import FrameReplayBuffer as FrameReplayBuffer
    from dipole.rl.sac import ContrastiveSAC as ContrastiveSAC
    from dipole.rl.snapshots import CheckpointCallback as CheckpointCallback
    from dipole.rl.snapshots import resume as resume

_HOME, __getattr__, __dir__ = lazy(__name__, __file__, "rl")
__all__ = sorted(_HOME)

if find_spec("gymnasium") is not None:
    from dipole.rl.envs.registry import load

    load()
