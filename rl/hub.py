"""A trained agent as a folder in the layout of huggingface_sb3, which the Hub shows as an agent.

ALGO-ENV.zip for `load_from_hub` and SB3's `load`, config.json (what SB3 has in it, and the system), results.json,
replay.mp4 (or .gif, where imageio has no ffmpeg), and README.md with the result that the Hub's leaderboards read.
"""

import json
import platform
import re
import zipfile
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.utils import get_system_info

from dipole.core.train.card import Card, write_card
from dipole.core.utils.seeding import isolated
from dipole.rl.episodes.play import evaluate
from dipole.rl.episodes.video import write_video
from dipole.rl.export import AGENT, FORMS, save_plain
from dipole.rl.pixel_agent import PixelAgent

_USAGE = """from huggingface_sb3 import load_from_hub  # pip install huggingface_sb3
from stable_baselines3 import {base}

agent = {base}.load(load_from_hub(repo_id="OWNER/NAME", filename="{file}"))
action, _ = agent.predict(observation, deterministic=True)"""

_NOTES = """Deterministic mean return of {episodes} episodes, the first with seed {seed}: {mean:.2f} +/- {std:.2f}
(`results.json`). `{file}` is for stable-baselines3 alone, and `agent.zip` for `dipole play FOLDER/agent.zip` and
`{own}.load`, and holds the objective and every setting as well.

Loading a file with stable-baselines3 runs code in it, so only load files that you trust. The networks' classes in
`{file}` are those of Python {python}. Elsewhere take them from `networks.py` and `seen.py` beside it:
`custom_objects={{"policy_class": networks.{policy}}}`."""


def name_of(algorithm: str, task: str) -> str:
    """The model's name: `sac-cheetah-run`. Slashes and colons become dashes, as in huggingface_sb3."""
    return f"{algorithm}-{re.sub(r'[^0-9A-Za-z._-]', '-', task)}"


def export_hub(
    agent: PixelAgent,
    folder: Path,
    record: Any,
    data: dict[str, Any],
    env: gymnasium.Env[Any, Any],
    episodes: int,
    seed: int,
) -> None:
    """Write the folder. The agent plays episodes for its result, and the first one for the video.

    Args:
        agent: a trained one. folder: an empty one. record, data: of its run.
        env: where it plays. episodes, seed: of the evaluation.

    Raises:
        TrainingError: SB3's own zip would not act as the agent does.
    """
    form = FORMS[agent.algorithm]
    task = str((agent.task or {}).get("name", "unknown"))
    name = name_of(form.base.__name__.lower(), task)
    agent.save(folder / AGENT)
    save_plain(agent, folder)
    (folder / form.file).rename(folder / f"{name}.zip")
    with zipfile.ZipFile(folder / f"{name}.zip") as archive:
        archive.extractall(folder / name)
    config = json.loads((folder / name / "data").read_text(encoding="utf-8"))
    config["system_info"] = get_system_info(print_info=False)[0]
    _write(folder / "config.json", config)
    frames: list[Any] | None = [] if env.render_mode == "rgb_array" else None
    with isolated(seed):
        returns = evaluate(agent, env, episodes, seed, frames)
    mean, std = float(np.mean(returns)), float(np.std(returns))
    result = {
        "mean_reward": mean,
        "std_reward": std,
        "is_deterministic": True,
        "n_eval_episodes": episodes,
        "eval_datetime": datetime.now(UTC).isoformat(),
    }
    _write(folder / "results.json", result)
    if frames:
        suffix = "gif"
        if find_spec("imageio_ffmpeg") is not None:
            suffix = "mp4"
        write_video(frames, folder / f"replay.{suffix}", int(env.metadata.get("render_fps") or 25))
    words = {
        **result,
        "base": form.base.__name__,
        "own": type(agent).__name__,
        "file": f"{name}.zip",
        "policy": form.policy,
        "episodes": episodes,
        "seed": seed,
        "mean": mean,
        "std": std,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    card = Card(
        what=f"A {form.base.__name__} agent playing `{task}`.",
        usage=_USAGE.format(**words),
        pipeline="reinforcement-learning",
        library="stable-baselines3",
        tags=(task, "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3"),
        notes=_NOTES.format(**words),
        measured=(("mean_reward", f"{mean:.2f} +/- {std:.2f}"),),
    )
    write_card(folder, card, record, data)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
