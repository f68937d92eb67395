"""A trained agent as zips of stable-baselines3.

agent.zip holds all of it, for `dipole.rl.ContrastiveSAC.load`, which goes on learning as the run did. sac.zip is for
`stable_baselines3.SAC.load` and needs no dipole: it acts alike and learns on as plain soft actor-critic. The classes of
its networks are in it, and in networks.py for versions of Python that cannot read them.
"""

import shutil
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from stable_baselines3 import SAC

from dipole.core.ground.errors import TrainingError
from dipole.core.train.card import Card, write_card
from dipole.rl import networks
from dipole.rl.agent import ContrastiveSAC
from dipole.rl.exported import AGENT
from dipole.rl.policy import encoder_keywords
from dipole.rl.settings import sac_keywords

PLAIN, CODE = "sac.zip", "networks.py"
PLAIN_REPLAY = 10_000  # transitions that SB3's own replay holds twice over; `buffer_size=` of `SAC.load` changes it

_USAGE = """from stable_baselines3 import SAC

agent = SAC.load("FOLDER/sac.zip")  # plays, without dipole
action, _ = agent.predict(observation, deterministic=True)

from dipole.rl import ContrastiveSAC, make_env

agent = ContrastiveSAC.load("FOLDER/agent.zip", env={env})
agent.learn(10_000, reset_num_timesteps=False)  # goes on as it was trained, with a replay of its own"""

_NOTES = """`dipole play FOLDER/agent.zip --episodes 10 --seed 0` measures it. `agent.zip` holds the networks, the
temperature, the objective with what it has learned, and every setting; optimizers and replay begin anew. `sac.zip`
holds the networks and the temperature: it acts as `agent.zip` does, bit for bit, and `learn` goes on as plain soft
actor-critic of stable-baselines3, on images cut to their middle, without augmentation and without contrast, with a
replay of {replay:,} transitions (`SAC.load(path, env=..., buffer_size=...)` takes another number).

Both are files of stable-baselines3: loading one runs code in it, so load files of people you trust. `dipole play` reads
agent.zip without that. The networks' classes in `sac.zip` are those of Python {python}; elsewhere take them from
`networks.py` beside it:

```python
from networks import PixelPolicy

agent = SAC.load("FOLDER/sac.zip", custom_objects={{"policy_class": PixelPolicy}})
```"""


def export_sb3(agent: ContrastiveSAC, folder: Path, record: Any, data: dict[str, Any]) -> None:
    """Write agent.zip, sac.zip, networks.py and README.md into a folder.

    Raises:
        TrainingError: sac.zip would not act as the agent does.
    """
    agent.save(folder / AGENT)
    played = plain(agent)
    _require_same(agent, played)
    cloudpickle.register_pickle_by_value(networks)
    try:
        played.save(folder / PLAIN)
    finally:
        cloudpickle.unregister_pickle_by_value(networks)
    shutil.copyfile(str(networks.__file__), folder / CODE)
    write_card(folder, _card(agent), record, data)


def plain(agent: ContrastiveSAC) -> SAC:
    """The agent as SB3's own SAC, with the same networks and temperature."""
    chosen = agent.settings
    keywords = {
        "encoder": encoder_keywords(chosen, agent.policy.encoder.image_size),
        "hidden": list(chosen.hidden),
        "log_std_bounds": list(chosen.log_std_bounds),
        "beta": chosen.beta,
    }
    made = SAC(
        networks.PixelPolicy,
        None,  # type: ignore[arg-type]
        buffer_size=agent.n_envs,
        target_entropy=agent.target_entropy,
        **sac_keywords(chosen),
        policy_kwargs=keywords,
        seed=agent.seed,
        device="cpu",
        _init_setup_model=False,
    )
    made.observation_space, made.action_space = agent.observation_space, agent.action_space
    made.n_envs = agent.n_envs
    made._setup_model()
    made.buffer_size = min(PLAIN_REPLAY, chosen.buffer_size)
    own = {name: value for name, value in agent.policy.state_dict().items() if not name.startswith("contrast.")}
    made.policy.load_state_dict(own)
    assert agent.log_ent_coef is not None
    if made.log_ent_coef is not None:  # it is learned
        made.log_ent_coef.data = agent.log_ent_coef.detach().cpu().clone()
    made.num_timesteps = agent.num_timesteps
    return made


def _require_same(agent: ContrastiveSAC, other: SAC) -> None:
    shape = (4, *agent.observation_space.shape)  # type: ignore[misc]
    seen = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    with torch.no_grad():
        one, two = (each.predict(seen, deterministic=True)[0] for each in (agent, other))
    if not np.array_equal(one, two):
        raise TrainingError(f"{PLAIN} would act otherwise than the agent (by {np.abs(one - two).max():.1e}).")


def _card(agent: ContrastiveSAC) -> Card:
    import platform

    known = agent.task or {"name": "..."}
    settings = "".join(f", {name}={value!r}" for name, value in known.get("settings", {}).items())
    return Card(
        what=f"An agent for `{known['name']}` that sees pixels: soft actor-critic with a contrastive objective (CURL).",
        usage=_USAGE.format(env=f'make_env("{known["name"]}"{settings})'),
        pipeline="reinforcement-learning",
        library="stable-baselines3",
        tags=("deep-reinforcement-learning", "stable-baselines3", known["name"]),
        notes=_NOTES.format(replay=PLAIN_REPLAY, python=".".join(platform.python_version_tuple()[:2])),
    )
