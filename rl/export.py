"""A trained agent as zips of stable-baselines3.

agent.zip holds all of it, for `load` of its class in dipole.rl, which goes on learning as the run did. sac.zip (td3.zip
of DrQ-v2) is for `stable_baselines3.SAC.load` and needs no dipole: it acts alike and learns on as
SB3's own algorithm. The classes of its networks are in it, and in networks.py for versions of Python that cannot read
them.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from dipole.core.train.card import Card, write_card
from dipole.core.utils.errors import TrainingError
from dipole.rl import networks, seen
from dipole.rl.envs.running.validate import stack
from dipole.rl.exported import AGENT
from dipole.rl.inputs import named
from dipole.rl.pixel_agent import PixelAgent

CODE, SEEN = "networks.py", "seen.py"
PLAIN_REPLAY = 10_000  # transitions, which SB3's replay stores twice. `buffer_size=` of `SAC.load` changes it


@dataclass(frozen=True)
class Form:
    """An algorithm as SB3's own.

    Args:
        base: SB3's class. policy: that of its networks, in `code`.
        name: of the algorithm, in words. what: likewise, with its paper.
        also, and_also: what the zips hold beside the networks, in words.
    """

    base: type[OffPolicyAlgorithm]
    policy: str
    code: ModuleType
    name: str
    what: str
    also: str = ""
    and_also: str = ""

    @property
    def file(self) -> str:
        """The zip that SB3 loads."""
        return f"{self.base.__name__.lower()}.zip"


FORMS = {
    "sac": Form(
        SAC,
        "PixelPolicy",
        networks,
        "soft actor-critic",
        "soft actor-critic (CURL)",
        also="the temperature, ",
        and_also=" and the temperature",
    ),
    "drq": Form(TD3, "DrQPolicy", networks, "TD3", "DrQ-v2"),
}

_USAGE = """from stable_baselines3 import {base}

agent = {base}.load("FOLDER/{file}")  # plays, without dipole
action, _ = agent.predict(observation, deterministic=True)

from dipole.rl import {own}, make_env

agent = {own}.load("FOLDER/agent.zip", env={env})
agent.learn(10_000, reset_num_timesteps=False)  # goes on as it was trained, with a replay of its own"""

_NOTES = """`dipole play FOLDER/agent.zip --episodes 10 --seed 0` measures it. `agent.zip` holds the networks, {also}the
objective with what it has learned, and every setting. Optimizers and replay start anew. `{file}` holds the
networks{and_also}: its deterministic actions are those of `agent.zip`, bit for bit, and `learn` goes on as plain
{name} of stable-baselines3, on images cut to their middle, without augmentation and without contrast, with a replay of
{replay:,} transitions (`{base}.load(path, env=..., buffer_size=...)` takes another number).

Both are files of stable-baselines3: loading one runs code in it, so only load files that you trust. `dipole play` reads
agent.zip without that. The networks' classes in `{file}` are those of Python {python}. Elsewhere take them from
`networks.py` and `seen.py` beside it:

```python
from networks import {policy}

agent = {base}.load("FOLDER/{file}", custom_objects={{"policy_class": {policy}}})
```"""


def export_sb3(agent: PixelAgent, folder: Path, record: Any, data: dict[str, Any]) -> None:
    """Write agent.zip, SB3's own zip (sac.zip or td3.zip), networks.py, seen.py and README.md into a folder.

    Raises:
        TrainingError: SB3's own zip would not act as the agent does.
    """
    agent.save(folder / AGENT)
    save_plain(agent, folder)
    write_card(folder, _card(agent), record, data)


def save_plain(agent: PixelAgent, folder: Path) -> None:
    """Write SB3's own zip and the code of its networks into a folder. Raise TrainingError if it would act otherwise."""
    form = FORMS[agent.algorithm]
    played = plain(agent)
    _require_same(agent, played)
    code = {CODE: form.code, SEEN: seen}
    for module in code.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        played.save(folder / form.file)
    finally:
        for module in code.values():
            cloudpickle.unregister_pickle_by_value(module)
    for name, module in code.items():
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace("from dipole.rl.seen import", "from seen import"), encoding="utf-8")


def plain(agent: PixelAgent) -> OffPolicyAlgorithm:
    """The agent as SB3's own algorithm, with the same networks and temperature."""
    form = FORMS[agent.algorithm]
    policy, keywords = _keywords(agent)
    base: Any = form.base
    made = base(
        getattr(form.code, form.policy),
        None,
        buffer_size=agent.n_envs,
        policy_kwargs=policy,
        seed=agent.seed,
        device="cpu",
        _init_setup_model=False,
        **keywords,
    )
    made.observation_space, made.action_space = agent.observation_space, agent.action_space
    made.n_envs = agent.n_envs
    made._setup_model()
    made.buffer_size = min(PLAIN_REPLAY, agent.buffer_size)
    own = {name: value for name, value in agent.policy.state_dict().items() if not name.startswith("contrast.")}
    made.policy.load_state_dict(own)
    learned = getattr(agent, "log_ent_coef", None)
    if learned is not None and made.log_ent_coef is not None:  # it is learned
        made.log_ent_coef.data = learned.detach().cpu().clone()
    made.num_timesteps = agent.num_timesteps
    return made


def _keywords(agent: PixelAgent) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what SB3's policy and its algorithm are made with."""
    keywords = agent.sb3_keywords(agent.settings)
    keywords.pop("buffer_size")
    keywords.pop("target_noise_clip", None)  # SB3's TD3 has another noise
    policy = agent.policy_keywords()
    if "log_std_bounds" in policy:
        policy["log_std_bounds"] = list(policy["log_std_bounds"])
    return policy, keywords


def _require_same(agent: PixelAgent, other: OffPolicyAlgorithm) -> None:
    space = copy.deepcopy(agent.observation_space)  # whose generator is the agent's
    space.seed(0)
    shown = stack([space.sample() for _ in range(4)])
    with torch.no_grad():
        one, two = (each.predict(shown, deterministic=True)[0] for each in (agent, other))
    if not np.array_equal(one, two):
        raise TrainingError(
            f"{FORMS[agent.algorithm].file} would act otherwise than the agent (by {np.abs(one - two).max():.1e})."
        )


def _card(agent: PixelAgent) -> Card:
    import platform

    form, known = FORMS[agent.algorithm], agent.task or {"name": "..."}
    settings = "".join(f", {name}={value!r}" for name, value in known.get("settings", {}).items())
    words = {
        "base": form.base.__name__,
        "own": type(agent).__name__,
        "file": form.file,
        "name": form.name,
        "policy": form.policy,
        "env": f'make_env("{known["name"]}"{settings})',
        "also": form.also,
        "and_also": form.and_also,
        "replay": PLAIN_REPLAY,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    return Card(
        what=(
            f"An agent for `{known['name']}` that sees {named(agent.seen)}: {form.what} with a contrastive objective."
        ),
        usage=_USAGE.format(**words),
        pipeline="reinforcement-learning",
        library="stable-baselines3",
        tags=("deep-reinforcement-learning", "stable-baselines3", known["name"]),
        notes=_NOTES.format(**words),
    )
