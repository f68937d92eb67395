"""Everything a bit-exact continuation needs, in one folder that appears whole or not at all.

agent.zip (networks and optimizers, SB3's format), replay.pkl, state.pkl (generators, environments with their physics,
frame stacks, observations, counters) and manifest.json (their sizes).
"""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.vec_env import VecEnv, VecTransposeImage

from dipole.core.contrast.objective import Composite, Objective
from dipole.core.ground.errors import CheckpointError, DipoleError
from dipole.core.ground.files import replacing, why
from dipole.core.ground.seeding import rng_state, set_rng_state
from dipole.rl.agent import ContrastiveSAC
from dipole.rl.envs.running.workers import WorkerVecEnv
from dipole.rl.names import lazy

# It stood here in earlier versions.
__getattr__ = lazy(__name__, {"CheckpointCallback": "dipole.rl.callbacks.checkpointing"})

KEEP = 2
_PARTS = ("agent.zip", "replay.pkl", "state.pkl")
_COUNTERS = (
    "num_timesteps", "_episode_num", "_n_updates", "environment_steps", "faults", "ep_info_buffer", "ep_success_buffer",
    "_last_episode_starts", "_current_progress_remaining", "_total_timesteps",
)  # fmt: skip


def save(agent: ContrastiveSAC, folder: str | Path) -> Path:
    """Write the agent, its replay and the state of its environments and generators into a folder, atomically.

    Call it between rollouts (`CheckpointCallback` does): inside `on_step` SB3 has not stored the transition yet.

    Raises:
        CheckpointError: the disk refused; a folder that was there before is untouched.
    """
    folder = Path(folder)
    try:
        with replacing(folder) as temporary:
            temporary.mkdir()
            agent.save(temporary / "agent.zip")
            agent.save_replay_buffer(temporary / "replay.pkl")
            with open(temporary / "state.pkl", "wb") as file:
                pickle.dump(_state(agent), file, protocol=pickle.HIGHEST_PROTOCOL)
            sizes = {name: (temporary / name).stat().st_size for name in _PARTS}
            (temporary / "manifest.json").write_text(json.dumps({"format": 1, "bytes": sizes}))
    except OSError as error:
        raise CheckpointError(f"cannot save the checkpoint {folder}: {why(error)}") from error
    return folder


def resume(
    folder: str | Path,
    env: Any,
    device: str = "auto",
    cls: type[ContrastiveSAC] = ContrastiveSAC,
    objective: Objective | Composite | None = None,
) -> ContrastiveSAC:
    """Return an agent that continues as if it had never stopped: `agent.learn(rest, reset_num_timesteps=False)`.

    Args:
        folder: what `save` wrote.
        env: environments made like those of the first run. Ones without get_state / set_state start a new episode
            instead (with a warning): that continues the training, but not bit for bit.
        device: where to continue.
        cls: the agent's class.
        objective: of an agent whose terms are not registered, as `ContrastiveSAC.load` takes it.

    Raises:
        CheckpointError: the folder is missing, incomplete or unreadable.
    """
    folder = Path(folder)
    check(folder)
    try:
        agent = cls.load(folder / "agent.zip", env=env, device=device, objective=objective)
    except DipoleError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read: {error}") from error
    restore(agent, folder)
    return agent


def restore(agent: ContrastiveSAC, folder: str | Path) -> None:
    """Put a checkpoint back into an agent of the same settings, in place."""
    folder = Path(folder)
    check(folder)
    try:
        _, parameters, variables = load_from_zip_file(folder / "agent.zip", load_data=False, device=agent.device)
        agent.set_parameters(parameters, exact_match=True, device=agent.device)
        assert variables is not None
        assert agent.log_ent_coef is not None
        agent.log_ent_coef.data = variables["log_ent_coef"].data
        agent.load_replay_buffer(folder / "replay.pkl")
        with open(folder / "state.pkl", "rb") as file:
            state = pickle.load(file)
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read: {error}") from error
    for name, value in state["counters"].items():
        setattr(agent, name, value)
    agent._last_obs, agent._last_original_obs = state["last_obs"], state["last_original_obs"]
    agent.action_space.np_random.bit_generator.state = state["action_space"]
    if agent.env is not None:
        _restore_environments(agent, agent.env, state)
    set_rng_state(state["rng"])


def check(folder: Path) -> None:
    """Raise CheckpointError unless every part is there at its full size."""
    try:
        sizes = json.loads((folder / "manifest.json").read_text())["bytes"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder} is no checkpoint of an agent: its manifest.json is missing or damaged."
        ) from error
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found != size:
            raise CheckpointError(
                f"the checkpoint {folder} is incomplete: {name} has {found} of {size} bytes. Use another one."
            )


def _state(agent: ContrastiveSAC) -> dict[str, Any]:
    assert agent.env is not None
    return {
        "counters": {name: getattr(agent, name) for name in _COUNTERS},
        "last_obs": agent._last_obs,
        "last_original_obs": agent._last_original_obs,
        "action_space": agent.action_space.np_random.bit_generator.state,
        "environments": agent.env.env_method("get_state") if agent.env.has_attr("get_state") else None,
        "rng": rng_state(),
    }


def _restore_environments(agent: ContrastiveSAC, env: VecEnv, state: dict[str, Any]) -> None:
    # Seeds set while loading would otherwise be used by the next reset.
    env._reset_seeds()
    states = state["environments"]
    plain = env.venv if isinstance(env, VecTransposeImage) else env
    restored = (
        states is not None
        and len(states) == env.num_envs
        and not hasattr(plain, "venv")
        and all(all(env.env_method("set_state", each, indices=index)) for index, each in enumerate(states))
    )
    if not restored:
        warnings.warn(
            "the environments cannot take their state back (no get_state / set_state, or a VecEnv wrapper with a state "
            "of its own): a new episode starts, so the continuation is not bit for bit the same.",
            RuntimeWarning,
            stacklevel=4,
        )
        agent._last_obs = None
    elif isinstance(plain, WorkerVecEnv):
        plain._last_obs = list(np.asarray(state["last_obs"]))


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints that `CheckpointCallback` wrote into a folder, oldest first."""
    return sorted(path for path in Path(folder).glob("agent-*") if path.is_dir())
