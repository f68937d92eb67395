"""`dipole play`: whole episodes of a saved agent."""

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium

from dipole.core.train.launch import pick_device
from dipole.core.train.model import load_run
from dipole.core.train.run_folder import DEFAULT_RUNS, find_run
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.seeding import isolated
from dipole.core.utils.text import counted
from dipole.rl.algorithms import open_agent
from dipole.rl.arguments import check_integers, check_seed
from dipole.rl.domain import AGENT
from dipole.rl.envs.registry import find
from dipole.rl.episodes.history import summary
from dipole.rl.episodes.play import evaluate, require_format, write_video
from dipole.rl.pixel_agent import PixelAgent

_LARGEST = 4096  # pixels of a video's height and width: a frame then takes 50 MB, and all are held till the end


@dataclass(frozen=True)
class Trial:
    """Returns of the episodes that were played, in order."""

    task: str
    seed: int
    deterministic: bool
    returns: tuple[float, ...]
    video: str | Path | None = None

    def __str__(self) -> str:
        how = "deterministic" if self.deterministic else "stochastic"
        found, played = summary(self.returns), counted(len(self.returns), "episode")
        told = (
            f"{self.task}: return {found['mean']:.2f} +- {found['std']:.2f} ({played}, {how}, seed {self.seed}, "
            f"interquartile mean {found['iqm']:.2f}, {found['min']:.2f} to {found['max']:.2f})"
        )
        return told if self.video is None else f"{told}\n{self.video}"

    def as_json(self) -> str:
        """Return the same as one JSON object, with every return."""
        return json.dumps(asdict(self) | {"episodes": len(self.returns)} | summary(self.returns))


def trial(
    name: str | Path,
    task: str | None = None,
    episodes: int = 10,
    seed: int = 0,
    deterministic: bool = True,
    video: str | Path | None = None,
    device: str | None = None,
    runs: Path = DEFAULT_RUNS,
    size: int | None = None,
) -> Trial:
    """Play episodes with the agent of a run or an export. The arguments are the options of `dipole play`."""
    check_integers(episodes=episodes)
    check_seed(seed)
    if video is not None:
        require_format(video)
    if size is not None:
        check_integers(size=size)
        if size > _LARGEST:
            raise ConfigError(f"size must be at most {_LARGEST} pixels, got {size}.")
        if video is None:
            raise ConfigError("--size is that of a video: give --video FILE as well.")
    with isolated(seed):  # making an agent seeds the global generators
        agent = _open(name, runs, device)
    known = agent.task or {}
    if task is None and "name" not in known:
        raise ConfigError(f"{name} does not say what its task is: give --env TASK.")
    chosen = find(task or known["name"])
    settings = known.get("settings", {})
    if chosen.name != known.get("name"):
        settings = _fitting(agent, chosen.settings)
    if video is not None and chosen.factory is gymnasium.make:
        settings = {"render_mode": "rgb_array", **settings}
    if size is not None:
        if "render_size" not in chosen.settings:
            raise ConfigError(f"--size: the task {chosen.name!r} draws at its own size (it has no render_size).")
        settings = {**settings, "render_size": size}
    frames: list[Any] | None = None if video is None else []
    with closing(chosen.make(**settings)) as env, isolated(seed):
        returns = evaluate(agent, env, episodes, seed, frames, deterministic=deterministic)
    if video is not None and frames is not None:
        video = str(write_video(frames, video, int(env.metadata.get("render_fps") or 25)))
    return Trial(chosen.name, seed, deterministic, tuple(returns), video)


def _open(name: str | Path, runs: Path, device: str | None) -> PixelAgent:
    path = Path(name)
    if path.is_dir() and (path / AGENT).is_file() and not (path / "config.toml").is_file():
        path = path / AGENT
    if path.suffix == ".zip" or path.is_file():
        agent: PixelAgent = open_agent(path, device=str(pick_device(device or "auto")))
        return agent
    folder = find_run(str(name), runs)
    domain = folder.read_config().domain
    if domain != "rl":
        raise ConfigError(f"the run {folder.path} is of the domain {domain!r}: only agents (rl) play.")
    _, adapter, _ = load_run(folder, device)
    adapter.module.eval()
    played: PixelAgent = adapter.agent  # type: ignore[attr-defined]
    return played


def _fitting(agent: PixelAgent, settings: tuple[str, ...]) -> dict[str, Any]:
    """Size and stacking of the agent's observations, as keywords of an environment that has such."""
    channels, height, _ = agent.seen.shape
    wanted: dict[str, Any] = {"size": height, "frame_stack": channels // 3} if channels else {}
    if agent.seen.vectors and channels:
        wanted["inputs"] = "both"
    elif agent.seen.vectors:
        wanted["inputs"] = "state"
    return {key: value for key, value in wanted.items() if key in settings and value}
