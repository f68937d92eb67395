"""Cost of reinforcement learning from pixels: updates, sampling, environment steps, memory.

    python -m dipole.benchmarks.speed.rl [--peer DIR] [--parts update,parts,sampling,rendering,memory]
                                         [--batches 128,512] [--rounds 5] [--threads 1] [--allocator kept] [--out FILE]

One process, float32 unless the row says bf16, random frames, 84 of 100 pixels, 6 actions, MLPs of 1024. Rounds of the
subjects alternate; processor time, the median over rounds. An update is the mean of one with and one without an actor
step. `--peer DIR` is a checkout of MishaLaskin/curl. Its own agent and buffer run unchanged, with stand-ins for two
packages (gym, skimage) that they import and hardly use. SB3's SAC with CnnPolicy is measured too.

All subjects share one allocator. With `--allocator kept`, the default, freed memory stays with the process. The
other choice, `system`, is glibc's default: it costs the peer up to half of its time at batch 512
(`timing.keep_freed_memory`).
"""

import argparse
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dipole.benchmarks.speed.timing import RESULTS, Results, interleaved, keep_freed_memory

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
    import gymnasium
    import numpy as np

    class Blank(gymnasium.Env):  # type: ignore[type-arg]
        observation_space = gymnasium.spaces.Box(0, 255, (9, size, size), np.uint8)
        action_space = gymnasium.spaces.Box(-1, 1, (ACTIONS,), np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros((9, size, size), np.uint8), {}

    return Blank()


def fill(add: Callable[[Any, Any, Any, float], None], transitions: int = STORED) -> None:
    """Add transitions of random frames to a buffer."""
    import numpy as np

    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (3, RENDERED, RENDERED), dtype=np.uint8) for _ in range(4)]
    for _ in range(transitions):
        frames.append(rng.integers(0, 256, (3, RENDERED, RENDERED), dtype=np.uint8))
        frames.pop(0)
        add(
            np.concatenate(frames[:3]),
            np.concatenate(frames[1:]),
            rng.uniform(-1, 1, ACTIONS).astype("f4"),
            rng.random(),
        )


def fill_sb3(buffer: Any, transitions: int = STORED) -> None:
    """Fill a buffer that takes SB3's arguments."""
    import numpy as np

    fill(
        lambda obs, following, action, reward: buffer.add(
            obs[None], following[None], action[None], np.array([reward]), np.array([False]), [{}]
        ),
        transitions,
    )


def ours(batch_size: int, device: str = "cpu", stored: int = STORED, **settings: Any) -> Any:
    from dipole.rl import ContrastiveSAC

    agent = ContrastiveSAC(
        "CnnPolicy", pixel_env(), buffer_size=stored, batch_size=batch_size, device=device, seed=0, **settings
    )
    fill_sb3(agent.replay_buffer, stored)
    return agent


def sample(agent: Any, batch_size: int) -> Any:
    """Return a batch with the crops that an update needs."""
    return agent.replay_buffer.sample_views(batch_size, agent._augment, 1)


def load_peer(folder: Path) -> tuple[Any, Any]:
    """Import the peer's agent and buffer from its checkout."""
    import gymnasium
    import numpy as np

    gym: Any = types.ModuleType("gym")
    gym.Wrapper, gym.spaces = gymnasium.Wrapper, gymnasium.spaces
    shape: Any = types.ModuleType("skimage.util.shape")
    shape.view_as_windows = np.lib.stride_tricks.sliding_window_view
    stand_ins = {
        "gym": gym,
        "skimage": types.ModuleType("skimage"),
        "skimage.util": types.ModuleType("skimage.util"),
        "skimage.util.shape": shape,
    }
    for name, module in stand_ins.items():
        sys.modules.setdefault(name, module)
    sys.path.insert(0, str(folder))
    import curl_sac
    import utils

    return curl_sac.CurlSacAgent, utils.ReplayBuffer


class Silent:
    """A logger for the peer that ignores every call."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def peer(folder: Path, batch_size: int) -> tuple[Any, Any]:
    """Return the peer's agent with the settings of its run script, and its filled buffer."""
    import torch

    agent_class, buffer_class = load_peer(folder)
    agent = agent_class(
        obs_shape=(9, SEEN, SEEN), action_shape=(ACTIONS,), device=torch.device("cpu"), hidden_dim=1024,
        init_temperature=0.1, alpha_lr=1e-4, alpha_beta=0.5, critic_tau=0.01, encoder_tau=0.05,
    )  # fmt: skip
    buffer = buffer_class((9, RENDERED, RENDERED), (ACTIONS,), STORED, batch_size, torch.device("cpu"), SEEN)
    fill(lambda obs, following, action, reward: buffer.add(obs, action, reward, following, False))
    return agent, buffer


class Replayed:
    """A buffer that returns the same batch each time, so that the peer's update is timed without its sampling."""

    def __init__(self, buffer: Any) -> None:
        self.batch = buffer.sample_cpc()

    def sample_cpc(self) -> Any:
        return self.batch


def stock(batch_size: int) -> Any:
    """Return SB3's SAC with CnnPolicy and default settings, on 84 pixels, with a filled buffer."""
    import numpy as np
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import Logger

    agent = SAC(
        "CnnPolicy", pixel_env(SEEN), buffer_size=300, batch_size=batch_size, device="cpu", seed=0,
        policy_kwargs={"net_arch": [1024, 1024]},
    )  # fmt: skip
    agent.set_logger(Logger(None, []))
    rng = np.random.default_rng(0)
    assert agent.replay_buffer is not None
    for _ in range(300):
        images = rng.integers(0, 256, (2, 1, 9, SEEN, SEEN), dtype=np.uint8)
        action = rng.uniform(-1, 1, (1, ACTIONS)).astype("f4")
        agent.replay_buffer.add(images[0], images[1], action, np.array([0.5]), np.array([False]), [{}])
    return agent


def updates(batch_size: int, rounds: int, folder: Path | None) -> dict[str, float]:
    """Return the milliseconds of one update without sampling. Use bf16 only if the processor supports it."""
    import torch

    from dipole.rl.contrast import bf16_is_native

    subjects: dict[str, Callable[[], None]] = {}
    if folder is not None:
        agent, buffer = peer(folder, batch_size)
        replayed, step = Replayed(buffer), iter(range(1, 1 << 30))

        def peer_pair() -> None:
            for _ in range(2):
                agent.update(replayed, Silent(), next(step) + 1)

        subjects[PEER] = peer_pair
    for name, settings in VARIANTS.items():
        if settings.get("precision") == "bf16" and not bf16_is_native(torch.device("cpu")):
            print(f"{name}: left out, this processor only emulates bfloat16", flush=True)
            continue
        mine = ours(batch_size, **settings)
        batch = sample(mine, batch_size)
        subjects[name] = lambda mine=mine, batch=batch: [mine.update(batch) for _ in range(2)]  # type: ignore[misc]
    sac = stock(batch_size)
    subjects[STOCK] = lambda: sac.train(2, batch_size)
    return {name: each / 2 for name, each in interleaved(subjects, rounds).items()}


def methods(batch_size: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds of the methods of one update, same mathematics in float32."""
    from dipole.rl.networks import detached

    agent = ours(batch_size)
    batch = sample(agent, batch_size)
    target, logs = agent.target(batch), {}
    observations = agent.policy.encoder.prepare(batch.observations)
    convolved = detached(agent.policy.encoder.convolve(observations))
    features = agent.policy.encoder.head(convolved).detach()
    return interleaved(
        {
            "target": lambda: agent.target(batch),
            "critic": lambda: agent.update_critic(batch, observations, target, logs),
            "actor and temperature (every 2nd)": lambda: agent.update_actor(convolved, features, None, logs),
            "momentum copies (every 2nd)": agent.update_targets,
            "contrast": lambda: agent.update_contrast(
                batch, agent.policy.encoder.head(agent.policy.encoder.convolve(observations)), logs
            ),
        },
        rounds,
    )


def sampling(batch_size: int, rounds: int, folder: Path | None) -> dict[str, float]:
    """Return the milliseconds of a sample with three crops."""
    agent = ours(8, hidden=(8,))
    subjects: dict[str, Callable[[], Any]] = {"ours": lambda: sample(agent, batch_size)}
    if folder is not None:
        subjects[PEER] = peer(folder, batch_size)[1].sample_cpc
    return interleaved(subjects, rounds)


def rendering(rounds: int, frames: int = 5) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a frame and of an agent step of the six tasks, by preset, and of physics.render."""
    from dipole.rl import ControlEnv
    from dipole.rl.envs.suite.tasks import PAPER_TASKS

    found = {}
    for task in PAPER_TASKS:
        # The cost of a frame depends on what it shows: all frames are of the first state, other environments step.
        envs, stepped = (
            {preset: ControlEnv(task, rendering=preset, seed=0) for preset in ("paper", "fast")}  # type: ignore[arg-type]
            for _ in range(2)
        )
        plain = ControlEnv(task, seed=0)
        for env in (*envs.values(), *stepped.values(), plain):
            env.reset(seed=0)
        camera = plain._camera._render_camera.fixedcamid
        subjects: dict[str, Callable[[], Any]] = {
            f"frame, {name}": (lambda env=env: [env._frame() for _ in range(frames)]) for name, env in envs.items()
        }
        subjects["frame, dm_control"] = lambda plain=plain, camera=camera: [
            plain._physics.render(RENDERED, RENDERED, camera_id=camera) for _ in range(frames)
        ]
        for name, env in stepped.items():
            action = env.action_space.sample()
            subjects[f"agent step, {name}"] = lambda env=env, action=action: [env.step(action) for _ in range(frames)]
        found[task] = {name: each / frames for name, each in interleaved(subjects, rounds).items()}
        found[task]["environment steps/s, paper"] = 1e3 * plain.action_repeat / found[task]["agent step, paper"]
        found[task]["environment steps/s, fast"] = 1e3 * plain.action_repeat / found[task]["agent step, fast"]
    return found


def memory(transitions: int = 2000) -> dict[str, int]:
    """Return the bytes of 100,000 transitions of 9x100x100, calculated, and measured on a few and scaled up."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    import gymnasium
    import numpy as np

    from dipole.rl.replay import FrameReplayBuffer

    whole = 9 * RENDERED * RENDERED
    images = gymnasium.spaces.Box(0, 255, (9, RENDERED, RENDERED), np.uint8)
    actions = gymnasium.spaces.Box(-1, 1, (ACTIONS,), np.float32)
    found = {
        "ours, calculated": FrameReplayBuffer(100_000, images, actions, device="cpu").nbytes,
        "SB3 default and peer, calculated": 100_000 * (2 * whole + 4 * ACTIONS + 8),
        "SB3 optimize_memory_usage, calculated": 100_000 * (whole + 4 * ACTIONS + 8),
    }
    for name in ("ours", "SB3 default"):
        # A fresh process: otherwise it would reuse memory that an earlier measurement freed.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found[f"{name}, measured"] = int(100_000 / transitions * pool.submit(resident, name, transitions).result())
    return found


def resident(name: str, transitions: int) -> int:
    """Return by how many bytes this process grows when a buffer is filled."""
    import gymnasium
    import numpy as np
    import psutil
    from stable_baselines3.common.buffers import ReplayBuffer

    from dipole.rl.replay import FrameReplayBuffer

    images = gymnasium.spaces.Box(0, 255, (9, RENDERED, RENDERED), np.uint8)
    actions = gymnasium.spaces.Box(-1, 1, (ACTIONS,), np.float32)
    before = psutil.Process().memory_info().rss
    kind = FrameReplayBuffer if name == "ours" else ReplayBuffer
    buffer = kind(transitions, images, actions, device="cpu")
    fill_sb3(buffer, transitions)
    return int(psutil.Process().memory_info().rss - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="a checkout of MishaLaskin/curl")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--batches", default="128,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--allocator", choices=("kept", "system"), default="kept", help="default kept; see above")
    parser.add_argument("--out", type=Path, default=RESULTS / "rl.json")
    options = parser.parse_args()
    parts = options.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}; allowed are {', '.join(PARTS)}")
    if options.peer is not None and not (options.peer / "curl_sac.py").is_file():
        parser.error(f"--peer {options.peer} has no curl_sac.py; give a checkout of MishaLaskin/curl")
    if options.allocator == "kept" and not keep_freed_memory():
        parser.error("--allocator kept needs glibc; use --allocator system")
    import torch

    torch.set_num_threads(options.threads)
    setting = {"processor": processor(), "torch": torch.__version__, "threads": options.threads}
    results = Results(options.out, setting | {"allocator": options.allocator, "unit": "processor milliseconds"})
    for size in map(int, options.batches.split(",")):
        if "update" in parts:
            results.add("update", str(size), against_peer(updates(size, options.rounds, options.peer)))
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


def processor() -> str:
    """Return the processor's name and its bfloat16 instructions."""
    from dipole.core.utils.machine import processor_facts, processor_name

    flags = processor_facts().get("flags", "").split()
    native = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    return f"{processor_name()} ({', '.join(native) or 'no bfloat16 instructions'})"


if __name__ == "__main__":
    main()
