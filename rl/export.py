"""A trained agent as zips of stable-baselines3.

agent.zip is for `load` of its class in dipole.rl. sac.zip (td3.zip of DrQ-v2) is for `stable_baselines3.SAC.load`,
without dipole. The classes of its networks are in it, and in networks.py for versions of Python that cannot read them.
"""

import copy
import inspect
import json
import platform
import re
import tomllib
import zipfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.utils import get_system_info

from dipole.core.train.exports import Card, write_card
from dipole.core.utils.errors import TrainingError
from dipole.core.utils.seeding import isolated
from dipole.rl import networks, seen
from dipole.rl.domain import AGENT
from dipole.rl.envs.running.validate import stack
from dipole.rl.episodes.play import evaluate, write_video
from dipole.rl.inputs import named
from dipole.rl.pixel_agent import PixelAgent
from dipole.rl.settings import attributes

PLAIN_REPLAY = 10_000  # transitions, which SB3's replay stores twice. `buffer_size=` of `SAC.load` changes it


class Form(NamedTuple):
    """An algorithm as SB3's own: the class, that of its networks, its name, with the paper, and what else is kept."""

    base: type[OffPolicyAlgorithm]
    policy: type[Any]
    name: str
    what: str
    also: str = ""

    @property
    def file(self) -> str:
        """The zip that SB3 loads."""
        return f"{self.base.__name__.lower()}.zip"


FORMS = {
    "sac": Form(SAC, networks.PixelPolicy, "soft actor-critic", "soft actor-critic (CURL)", " and the temperature"),
    "drq": Form(TD3, networks.DrQPolicy, "TD3", "DrQ-v2"),
}

_TEXTS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def export_sb3(agent: PixelAgent, folder: Path, record: Any, data: dict[str, Any]) -> None:
    """Write the folder of `dipole export --to sb3`. Raise TrainingError if SB3's own zip would act otherwise."""
    form, known = save_plain(agent, folder), agent.task or {"name": "..."}
    settings = "".join(f", {name}={value!r}" for name, value in known.get("settings", {}).items())
    env = f'make_env("{known["name"]}"{settings})'
    words = _words(agent, file=form.file, env=env, replay=PLAIN_REPLAY)
    what = f"An agent for `{known['name']}` that sees {named(agent.seen)}: {form.what} with a contrastive objective."
    tags = ("deep-reinforcement-learning", "stable-baselines3", known["name"])
    write_card(folder, _card("sb3", words, what=what, tags=tags), record, data)


def export_hub(
    agent: PixelAgent, folder: Path, record: Any, data: dict[str, Any], env: Any, episodes: int, seed: int
) -> None:
    """Write the layout of huggingface_sb3, with the result for leaderboards. Raise TrainingError as `export_sb3`."""
    form = save_plain(agent, folder)
    task = str((agent.task or {}).get("name", "unknown"))
    name = name_of(form.base.__name__.lower(), task)
    (folder / form.file).rename(folder / f"{name}.zip")
    with zipfile.ZipFile(folder / f"{name}.zip") as archive:
        archive.extractall(folder / name)
    config = json.loads((folder / name / "data").read_text(encoding="utf-8"))
    config["system_info"] = get_system_info(print_info=False)[0]
    frames: list[Any] | None = [] if env.render_mode == "rgb_array" else None
    with isolated(seed):
        returns = evaluate(agent, env, episodes, seed, frames)
    mean, std = float(np.mean(returns)), float(np.std(returns))
    result = {"mean_reward": mean, "std_reward": std, "is_deterministic": True, "n_eval_episodes": episodes}
    dated = {**result, "eval_datetime": datetime.now(UTC).isoformat()}
    for file, value in (("config.json", config), ("results.json", dated)):
        (folder / file).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    if frames:
        suffix = "gif" if find_spec("imageio_ffmpeg") is None else "mp4"
        write_video(frames, folder / f"replay.{suffix}", int(env.metadata.get("render_fps") or 25))
    words = _words(agent, file=f"{name}.zip", episodes=episodes, seed=seed, mean=mean, std=std)
    what = f"A {form.base.__name__} agent playing `{task}`."
    tags = (task, "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3")
    measured = (("mean_reward", f"{mean:.2f} +/- {std:.2f}"),)
    write_card(folder, _card("hub", words, what=what, tags=tags, measured=measured), record, data)


def name_of(algorithm: str, task: str) -> str:
    """Return the model's name: `sac-cheetah-run`. Slashes and colons become dashes, as in huggingface_sb3."""
    return f"{algorithm}-{re.sub(r'[^0-9A-Za-z._-]', '-', task)}"


def _words(agent: PixelAgent, **more: Any) -> dict[str, Any]:
    """Return what the texts of a card name."""
    form = FORMS[agent.algorithm]
    names = {"base": form.base.__name__, "own": type(agent).__name__, "policy": form.policy.__name__}
    return {**form._asdict(), **names, "python": ".".join(platform.python_version_tuple()[:2]), **more}


def _card(to: str, words: Mapping[str, Any], **parts: Any) -> Card:
    notes = "\n\n".join([_TEXTS[to]["notes"], _TEXTS["trust"]]).format(**words)
    usage = _TEXTS[to]["usage"].format(**words)
    return Card(usage=usage, notes=notes, pipeline="reinforcement-learning", library="stable-baselines3", **parts)


def save_plain(agent: PixelAgent, folder: Path) -> Form:
    """Write agent.zip, SB3's own zip, and the code of its networks. Raise TrainingError if it would act otherwise."""
    form = FORMS[agent.algorithm]
    agent.save(folder / AGENT)
    played = sb3_agent(agent)
    space = copy.deepcopy(agent.observation_space)  # whose generator is the agent's
    space.seed(0)
    shown = stack([space.sample() for _ in range(4)])
    one, two = (each.predict(shown, deterministic=True)[0] for each in (agent, played))
    if not np.array_equal(one, two):
        raise TrainingError(f"{form.file} would act otherwise than the agent (by {np.abs(one - two).max():.1e}).")
    for module in (networks, seen):
        cloudpickle.register_pickle_by_value(module)
        path = Path(str(module.__file__))
        text = path.read_text(encoding="utf-8").replace("from dipole.rl.seen import", "from seen import")
        (folder / path.name).write_text(text, encoding="utf-8")
    try:
        played.save(folder / form.file)
    finally:
        for module in (networks, seen):
            cloudpickle.unregister_pickle_by_value(module)
    return form


def sb3_agent(agent: PixelAgent) -> OffPolicyAlgorithm:
    """Return the agent as SB3's own algorithm, with the same networks and temperature."""
    form = FORMS[agent.algorithm]
    base: Any = form.base
    stored = set(attributes(agent.algorithm).values()) - {"n_steps", "target_noise_clip"}  # SB3's TD3 has another noise
    keywords = {name: getattr(agent, name) for name in inspect.signature(base).parameters if name in stored}
    keywords |= {"buffer_size": agent.n_envs, "seed": agent.seed, "device": "cpu"}
    made = base(form.policy, None, policy_kwargs=agent.policy_keywords(), _init_setup_model=False, **keywords)
    made.observation_space, made.action_space = agent.observation_space, agent.action_space
    made.n_envs = agent.n_envs
    made._setup_model()
    made.buffer_size = min(PLAIN_REPLAY, agent.buffer_size)
    own = {name: value for name, value in agent.policy.state_dict().items() if not name.startswith("contrast.")}
    made.policy.load_state_dict(own)
    if getattr(made, "log_ent_coef", None) is not None:  # it is learned
        made.log_ent_coef.data = agent.log_ent_coef.detach().cpu().clone()
    made.num_timesteps = agent.num_timesteps
    return made
