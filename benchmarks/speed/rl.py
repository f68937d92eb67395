"""What reinforcement learning from pixels costs: updates by part, sampling, environment steps, memory.

    python -m dipole.benchmarks.speed.rl [--peer DIR] [--parts update,parts,sampling,rendering,memory]
                                         [--batches 128,512] [--rounds 5] [--threads 1] [--allocator kept] [--out FILE]

One process, float32 unless the row says bf16, random frames, 84 of 100 pixels, 6 actions, MLPs of 1024. Subjects
alternate round by round; processor time, the median over rounds. An update is one with and one without an actor step,
halved. `--peer DIR` is a checkout of MishaLaskin/curl; its own agent and buffer are imported from there and run as they
are, with stand-ins for two packages they import but whose parts they hardly use (gym, skimage). SB3's SAC with
CnnPolicy, the stock agent, runs beside. `--parts` measures some of it and keeps what the file holds of the rest.

All subjects share one allocator. `--allocator kept`, the default, lets none of them pay for pages that it gives back
and gets again; `--allocator system` is glibc as it comes, whose blocks above 32 MB cost the peer up to half of its time
at batch 512, and the agent nothing, as it goes in chunks.
"""

import argparse
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from dipole.benchmarks.speed.allocator import keep_freed_memory

RESULTS = Path(__file__).with_name("results")
ACTIONS, SEEN, RENDERED, STORED = 6, 84, 100, 1500

VARIANTS: dict[str, dict[str, Any]] = {
    "same mathematics, float32": {},
    "same mathematics, bf16": {"precision": "bf16"},
    "joint backward, float32": {"joint_backward": True},
    "joint backward, bf16": {"joint_backward": True, "precision": "bf16"},
    "no contrast, float32": {"objective": "none"},
}
PEER, STOCK = "peer (MishaLaskin/curl)", "SB3 SAC CnnPolicy (no crop, no contrast)"


def interleaved(subjects: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median processor milliseconds of each subject; rounds alternate, after one round of warming up."""
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds + 1):
        for name, call in subjects.items():
            began = time.process_time()
            call()
            if number:
                seconds[name].append(time.process_time() - began)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def pixel_env(size: int = RENDERED) -> Any:
    """An environment that is never stepped: only its spaces count."""
    import gymnasium
    import numpy as np

    class Blank(gymnasium.Env):  # type: ignore[type-arg]
        observation_space = gymnasium.spaces.Box(0, 255, (9, size, size), np.uint8)
        action_space = gymnasium.spaces.Box(-1, 1, (ACTIONS,), np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros((9, size, size), np.uint8), {}

    return Blank()


def fill(add: Callable[[Any, Any, Any, float], None], transitions: int = STORED) -> None:
    """Hand transitions of random frames to a buffer."""
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
    """The same for a buffer that takes SB3's arguments."""
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
    """A logger for the peer that drops everything."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def peer(folder: Path, batch_size: int) -> tuple[Any, Any]:
    """The peer's agent with the settings of its run script, and its buffer, filled."""
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
    """Gives the peer one batch again and again, so that its update is timed without its sampling."""

    def __init__(self, buffer: Any) -> None:
        self.batch = buffer.sample_cpc()

    def sample_cpc(self) -> Any:
        return self.batch


def stock(batch_size: int) -> Any:
    """SB3's SAC with CnnPolicy as it comes, on 84 pixels, with a buffer of its own."""
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
    """Milliseconds of one update without sampling; bf16 only where the processor has it."""
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
            print(f"{name}: left out, this processor only emulates it", flush=True)
            continue
        mine = ours(batch_size, **settings)
        batch = mine.replay_buffer.sample_views(batch_size, mine._augment, 1)
        subjects[name] = lambda mine=mine, batch=batch: [mine.update(batch) for _ in range(2)]  # type: ignore[misc]
    sac = stock(batch_size)
    subjects[STOCK] = lambda: sac.train(2, batch_size)
    return {name: each / 2 for name, each in interleaved(subjects, rounds).items()}


def parts(batch_size: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the parts of one update, same mathematics in float32."""
    from dipole.rl.networks import detached

    agent = ours(batch_size)
    batch = agent.replay_buffer.sample_views(batch_size, agent._augment, 1)
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
    """Milliseconds of a sample with three crops."""
    from dipole.rl.augmentation import Crop

    buffer, crop = ours(8, hidden=(8,)).replay_buffer, Crop(SEEN)
    subjects: dict[str, Callable[[], Any]] = {"ours": lambda: buffer.sample_views(batch_size, crop, 1)}
    if folder is not None:
        subjects[PEER] = peer(folder, batch_size)[1].sample_cpc
    return interleaved(subjects, rounds)


def rendering(rounds: int, frames: int = 5) -> dict[str, dict[str, float]]:
    """Milliseconds of one frame and of one agent step of the six tasks, by preset, beside physics.render."""
    from dipole.rl import ControlEnv
    from dipole.rl.envs.suite.tasks import PAPER_TASKS

    found = {}
    for task in PAPER_TASKS:
        # What a frame shows decides what it costs: all frames are of the first state, other environments are stepped.
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
    """Bytes of 100,000 transitions of 9x100x100, calculated, and resident bytes of a few of them, scaled up."""
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
        # A process of its own: memory that an earlier measurement has freed would be used again.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found[f"{name}, measured"] = int(100_000 / transitions * pool.submit(resident, name, transitions).result())
    return found


def resident(name: str, transitions: int) -> int:
    """Bytes by which filling a buffer grows this process."""
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


MEASURES = ("update", "parts", "sampling", "rendering", "memory")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dipole.benchmarks.speed.rl", description=__doc__.split("\n")[0])
    parser.add_argument("--peer", type=Path, help="a checkout of MishaLaskin/curl")
    parser.add_argument("--parts", default=",".join(MEASURES), help=f"of {', '.join(MEASURES)}; default all")
    parser.add_argument("--batches", default="128,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--allocator", choices=("kept", "system"), default="kept", help="default kept; see above")
    parser.add_argument("--out", type=Path, default=RESULTS / "rl.json")
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",")
    if unknown := set(chosen) - set(MEASURES):
        parser.error(f"--parts: no measurement {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    if arguments.peer is not None and not (arguments.peer / "curl_sac.py").is_file():
        parser.error(f"--peer {arguments.peer} holds no curl_sac.py; give a checkout of MishaLaskin/curl")
    if arguments.allocator == "kept" and not keep_freed_memory():
        parser.error("--allocator kept needs glibc; --allocator system is what there is")
    import torch

    torch.set_num_threads(arguments.threads)
    setting = {
        "processor": processor(),
        "torch": torch.__version__,
        "threads": arguments.threads,
        "allocator": arguments.allocator,
        "unit": "processor milliseconds",
    }
    report: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    if any(report.get(name) != value for name, value in setting.items()):
        report = dict(setting)  # figures of another machine do not stand beside these
    report["date"] = date.today().isoformat()
    for size in map(int, arguments.batches.split(",")):
        for name, measure in (
            ("update", lambda size=size: updates(size, arguments.rounds, arguments.peer)),
            ("parts", lambda size=size: parts(size, arguments.rounds)),
            ("sampling", lambda size=size: sampling(size, arguments.rounds, arguments.peer)),
        ):
            if name in chosen:
                report.setdefault(name, {})[str(size)] = found = measure()
                show(f"{name}, batch {size}", found)
                write(arguments.out, report)
    if "rendering" in chosen:
        report["rendering"] = rendering(arguments.rounds)
        for task, found in report["rendering"].items():
            show(task, found)
    if "memory" in chosen:
        report["memory"] = memory()
        show("bytes of 100,000 transitions", {name: float(value) for name, value in report["memory"].items()})
    write(arguments.out, report)
    return 0


def write(path: Path, report: dict[str, Any]) -> None:
    """Write what is measured so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def show(title: str, found: dict[str, float]) -> None:
    """Print a table; where the peer is in it, with the ratio to it."""
    print(f"\n{title}")
    base = found.get(PEER)
    for name, value in found.items():
        print(f"  {name:<48} {value:>16,.1f}" + (f"   {base / value:6.2f} x" if base else ""), flush=True)


def processor() -> str:
    """Model name and what it multiplies bfloat16 with."""
    from dipole.core.utils.machine import processor_facts, processor_name

    found = processor_facts()
    native = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in found.get("flags", "").split()]
    return f"{processor_name()} ({', '.join(native) or 'no bfloat16 instructions'})"


if __name__ == "__main__":
    sys.exit(main())
