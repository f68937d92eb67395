"""The domain of this package, for lists, `dipole doctor` and `dipole embed`. Nothing heavy is imported."""

from pathlib import Path
from typing import Any

from dipole.core.train.domains import Domain
from dipole.core.utils.errors import ConfigError

AGENT = "agent.zip"
NO_VECTORS = "is an agent, which gives actions and no vectors of inputs: play it with `dipole play`."
RL = Domain(
    name="rl",
    summary="agents that see pixels: SAC (CURL) or DrQ-v2 with a contrastive objective",
    adapter="dipole.rl.adapter:RLAdapter",
    extra="rl",
    exported="dipole.rl.domain:open_folder",
    probes={
        "drawing without a display": "dipole.rl.envs.suite.rendering:drawing",
        "simulator": "dipole.rl.envs.suite.rendering:import_suite",
    },
)


def open_folder(folder: Path, device: Any, features: str | None) -> None:
    """Refuse the folder of an agent that `dipole export` wrote, and return None for any other."""
    if (folder / AGENT).is_file():
        raise ConfigError(f"{folder} {NO_VECTORS}")
