"""The spaces of a trained agent and the description of its task, in kept/agent.json.

With this file an agent is built without its environment.
"""

import json
from pathlib import Path
from typing import Any

from dipole.core.utils.errors import CheckpointError, DipoleError
from dipole.core.utils.received import read_text
from dipole.rl import description
from dipole.rl.pixel_agent import PixelAgent

_FILE = "agent.json"


def keep(folder: Path, agent: PixelAgent, info: dict[str, Any]) -> None:
    told = {**description.told_spaces(agent), "info": info}
    (folder / _FILE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """Read what `keep` wrote. Raise CheckpointError if it is damaged."""
    try:
        told: dict[str, Any] = json.loads(read_text(folder / _FILE))
        if set(told) != {"n_envs", "observation_space", "action_space", "info"}:
            raise ValueError("keys are missing")
        return told
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(folder, error) from error


def make_networks(agent: PixelAgent, told: dict[str, Any], folder: Path) -> None:
    """Make the networks of an agent that has no environment."""
    try:
        description.make_networks(agent, told)
    except DipoleError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"the model {folder} is damaged: {error!r}. Train again with --overwrite.")
