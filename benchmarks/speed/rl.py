"""Cost of reinforcement learning from pixels: updates, sampling, environment steps, memory.

    python -m dipole.benchmarks.speed.rl [--peer DIR] [--parts update parts sampling rendering memory]
        [--batches 128 512] [--rounds 5] [--threads 1] [--allocator kept] [--device cuda] [--out FILE]

One process, float32 unless the row says bf16, random frames, 84 of 100 pixels, 6 actions, MLPs of 1024. Rounds of the
subjects alternate; processor time, the median over rounds. An update is the mean of one with and one without an actor
step. `--peer DIR` is a checkout of MishaLaskin/curl. Its own agent and buffer run unchanged on the processor, with
stand-ins for two packages (gym, skimage) that they import and hardly use. SB3's SAC with CnnPolicy is measured too.
With `--device cuda` updates are measured on the GPU, in wall time.
"""

import argparse
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import gymnasium
import numpy as np
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.logger import Logger

from dipole.benchmarks.speed.timing import RESULTS, Results, interleaved, keep_freed_memory
from dipole.core.utils.machine import processor_name
from dipole.rl import ContrastiveSAC
from dipole.rl.contrast import bf16_is_native
from dipole.rl.networks import detached
from dipole.rl.replay import FrameReplayBuffer

PARTS = ("update", "parts", "sampling", "rendering", "memory")
ACTIONS, SEEN, RENDERED, STORED = 6, 84, 100, 1500

VARIANTS: dict[str, dict[str, Any]] = {
    "same mathematics, float32": {},
    "same mathematics, bf16": {"precision": "bf16"},
    "joint backward, float32": {"joint_backward": True},
    "joint backward, bf16": {"joint_backward": True, "precision": "bf16"},
    "no contrast, float32": {"objective": "none"},
}
PEER, STOCK = "peer (MishaLaskin/curl)", "SB3 SAC CnnPolicy (no crop, no contrast)"


def pixel_env(size: int = RENDERED) -> Any:
    """Return an environment whose spaces count and that is never stepped."""
    env = gymnasium.Env()
    env.observation_space = gymnasium.spaces.Box(0, 255, (9, size, size), np.uint8)
    env.action_space = gymnasium.spaces.Box(-1, 1, (ACTIONS,), np.float32)
    env.reset = lambda seed=None, options=None: (np.zeros((9, size, size), np.uint8), {})
    return env


def fill(add: Callable[[Any, Any, Any, float], None], transitions: int = STORED, size: int = RENDERED) -> None:
    rng = np.random.default_rng(0)
    frames = list(rng.integers(0, 256, (4, 3, size, size), dtype=np.uint8))
    for _ in range(transitions):
        frames = [*frames[1:], rng.integers(0, 256, (3, size, size), dtype=np.uint8)]
        observation, following = np.concatenate(frames[:3]), np.concatenate(frames[1:])
        add(observation, following, rng.uniform(-1, 1, ACTIONS).astype("f4"), rng.random())


def sb3(agent_class: Any, batch_size: int, stored: int = STORED, size: int = RENDERED, **settings: Any) -> Any:
    """Return an agent of SB3's interface with a filled buffer."""
    settings = {"buffer_size": stored, "batch_size": batch_size, "seed": 0, "device": "cpu"} | settings
    agent = agent_class("CnnPolicy", pixel_env(size), **settings)

    def add(obs: Any, following: Any, action: Any, reward: float) -> None:
        row = (obs[None], following[None], action[None], np.array([reward]), np.array([False]), [{}])
        agent.replay_buffer.add(*row)

    fill(add, stored, size)
    return agent


def sample(agent: Any, batch_size: int) -> Any:
    """Return a batch with the crops that an update needs."""
    return agent.replay_buffer.sample_views(batch_size, agent._augment, 1)


def peer(folder: Path, batch_size: int) -> tuple[Any, Any]:
    """Return the peer's agent with the settings of its run script, and its filled buffer, from its checkout."""
    for name in ("gym", "skimage", "skimage.util", "skimage.util.shape"):
        stand_in: Any = types.ModuleType(name)
        stand_in.Wrapper, stand_in.spaces = gymnasium.Wrapper, gymnasium.spaces
        stand_in.view_as_windows = np.lib.stride_tricks.sliding_window_view
        sys.modules.setdefault(name, stand_in)
    sys.path.insert(0, str(folder))
    import curl_sac
    import utils

    agent = curl_sac.CurlSacAgent(
        obs_shape=(9, SEEN, SEEN), action_shape=(ACTIONS,), device=torch.device("cpu"), hidden_dim=1024,
        init_temperature=0.1, alpha_lr=1e-4, alpha_beta=0.5, critic_tau=0.01, encoder_tau=0.05,
    )  # fmt: skip
    buffer = utils.ReplayBuffer((9, RENDERED, RENDERED), (ACTIONS,), STORED, batch_size, torch.device("cpu"), SEEN)
    fill(lambda obs, following, action, reward: buffer.add(obs, action, reward, following, False))
    return agent, buffer


def updates(batch_size: int, rounds: int, folder: Path | None, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of one update without sampling. Use bf16 only if the device supports it."""
    subjects: dict[str, Callable[[], Any]] = {}
    if folder is not None:
        agent, buffer = peer(folder, batch_size)
        batch = buffer.sample_cpc()
        replayed, silent = types.SimpleNamespace(sample_cpc=lambda: batch), MagicMock()
        subjects[PEER] = lambda: [agent.update(replayed, silent, step) for step in (2, 3)]
    for name, settings in VARIANTS.items():
        if settings.get("precision") == "bf16" and not bf16_is_native(device):
            print(f"{name}: left out, this device only emulates bfloat16", flush=True)
            continue
        mine = sb3(ContrastiveSAC, batch_size, device=str(device), **settings)
        views = sample(mine, batch_size)
        subjects[name] = lambda mine=mine, views=views: [mine.update(views) for _ in range(2)]
    sac = sb3(SAC, batch_size, 300, SEEN, policy_kwargs={"net_arch": [1024, 1024]}, device=str(device))
    sac.set_logger(Logger(None, []))
    subjects[STOCK] = lambda: sac.train(2, batch_size)
    return {name: each / 2 for name, each in interleaved(subjects, rounds, device).items()}


def methods(batch_size: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds of the methods of one update, same mathematics in float32."""
    agent = sb3(ContrastiveSAC, batch_size)
    batch = sample(agent, batch_size)
    target, logs = agent.target(batch), {}
    observations = agent.policy.encoder.prepare(batch.observations)
    convolved = detached(agent.policy.encoder.convolve(observations))
    features = agent.policy.encoder.head(convolved).detach()
    return interleaved(
        {
            "target": lambda: agent.target(batch),
            "critic": lambda: agent._update_critic(batch, observations, target, False, logs),
            "actor and temperature (every 2nd)": lambda: agent._update_actor(convolved, features, None, logs),
            "momentum copies (every 2nd)": agent._update_targets,
            "contrast": lambda: agent._update_contrast(
                batch, agent.policy.encoder.head(agent.policy.encoder.convolve(observations)), logs
            ),
        },
        rounds,
    )


def sampling(batch_size: int, rounds: int, folder: Path | None) -> dict[str, float]:
    """Return the milliseconds of a sample with three crops."""
    agent = sb3(ContrastiveSAC, 8, hidden=(8,))
    subjects: dict[str, Callable[[], Any]] = {"ours": lambda: sample(agent, batch_size)}
    if folder is not None:
        subjects[PEER] = peer(folder, batch_size)[1].sample_cpc
    return interleaved(subjects, rounds)


def rendering(rounds: int, frames: int = 5) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a frame and of an agent step of the six tasks, by preset."""
    from dipole.rl import ControlEnv
    from dipole.rl.envs.control import PAPER_TASKS

    found = {}
    for task in PAPER_TASKS:
        subjects: dict[str, Callable[[], Any]] = {}
        for preset in ("paper", "fast"):
            # The cost of a frame depends on what it shows: all frames are of the first state, another one steps.
            still, moving = (ControlEnv(task, rendering=preset, seed=0) for _ in range(2))
            still.reset(seed=0)
            moving.reset(seed=0)
            step = partial(moving.step, moving.action_space.sample())
            subjects[f"frame, {preset}"] = lambda env=still: [env._frame(RENDERED) for _ in range(frames)]
            subjects[f"agent step, {preset}"] = lambda step=step: [step() for _ in range(frames)]
        found[task] = {name: each / frames for name, each in interleaved(subjects, rounds).items()}
        for preset in ("paper", "fast"):
            rate = 1e3 * moving.action_repeat / found[task][f"agent step, {preset}"]
            found[task][f"environment steps/s, {preset}"] = rate
    return found


def memory() -> dict[str, int]:
    """Return the calculated bytes of 100,000 transitions of 9x100x100."""
    env = pixel_env()
    whole, other = 9 * RENDERED * RENDERED, 4 * ACTIONS + 8
    mine = FrameReplayBuffer(100_000, env.observation_space, env.action_space, device="cpu")
    return {
        "ours": mine.nbytes,
        "SB3 default and peer": 100_000 * (2 * whole + other),
        "SB3 optimize_memory_usage": 100_000 * (whole + other),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="a checkout of MishaLaskin/curl")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default all)")
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    allocator = "of all subjects. kept (default): freed memory stays with the process; system: as glibc does"
    parser.add_argument("--allocator", choices=("kept", "system"), default="kept", help=allocator)
    parser.add_argument("--device", type=torch.device, default="cpu", help="of the updates")
    parser.add_argument("--out", type=Path, default=RESULTS / "rl.json")
    options = parser.parse_args()
    parts, device = options.parts, options.device
    if options.peer is not None and not (options.peer / "curl_sac.py").is_file():
        parser.error(f"--peer {options.peer} has no curl_sac.py. Give a checkout of MishaLaskin/curl")
    if options.allocator == "kept" and not keep_freed_memory():
        parser.error("--allocator kept needs glibc. Use --allocator system")
    torch.set_num_threads(options.threads)
    name, unit = f"{processor_name()} ({torch.backends.cpu.get_cpu_capability()})", "processor milliseconds"
    if device.type == "cuda":
        name, unit = torch.cuda.get_device_name(device), "milliseconds"
    setting = {"processor": name, "torch": torch.__version__, "threads": options.threads}
    results = Results(options.out, setting | {"allocator": options.allocator, "unit": unit})
    for size in options.batches:
        if "update" in parts:
            results.add("update", str(size), against_peer(updates(size, options.rounds, options.peer, device)))
        if "parts" in parts:
            results.add("parts", str(size), methods(size, options.rounds))
        if "sampling" in parts:
            results.add("sampling", str(size), against_peer(sampling(size, options.rounds, options.peer)))
    if "rendering" in parts:
        for task, row in rendering(options.rounds).items():
            results.add("rendering", task, row)
    if "memory" in parts:
        results.add("memory", "bytes of 100,000 transitions", memory())


def against_peer(row: dict[str, float]) -> dict[str, float]:
    """Add to the milliseconds of each subject how many times as fast as the peer it is."""
    if PEER not in row:
        return row
    return row | {f"{name}, times as fast": row[PEER] / value for name, value in row.items()}


if __name__ == "__main__":
    main()
