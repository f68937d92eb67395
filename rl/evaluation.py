"""How good an agent is: returns of whole episodes on an environment of their own, and what is computed from them."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import DummyVecEnv, VecTransposeImage

from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import ConfigError, DataError, TrainingError
from dipole.core.measure import diagnostics
from dipole.rl.agent import ContrastiveSAC
from dipole.rl.arguments import check_whole
from dipole.rl.faults import PATIENCE, fault_message, guarded

# The papers' scores: the return after this many environment steps.
SCORES = {"100k": 100_000, "500k": 500_000}


@dataclass(frozen=True)
class Evaluation:
    """Returns of the episodes of one evaluation, and when it was made."""

    environment_steps: int
    agent_steps: int
    returns: tuple[float, ...]
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))


def evaluate(
    agent: BaseAlgorithm,
    env: gymnasium.Env[Any, Any],
    episodes: int = 10,
    seed: int | None = None,
    frames: list[NDArray[np.uint8]] | None = None,
    observations: list[NDArray[np.uint8]] | None = None,
) -> list[float]:
    """Play whole episodes with the deterministic action and return their returns; no generator of training is touched.

    An episode that a fault of the environment ends does not count and is played again; five of them in a row stop.

    Args:
        agent: any SB3 agent.
        env: not the training environment.
        episodes: how many.
        seed: of the first episode.
        frames: collects the rendered frames of the first episode, for a video.
        observations: collects every observation.

    Raises:
        ConfigError: if `env` is no single environment with the agent's observations, or `episodes` below 1.
        TrainingError: if every episode ends in a fault.
    """
    check_environment(env)
    check_whole(episodes=episodes)
    if agent.observation_space not in (env.observation_space, transposed(env.observation_space)):
        raise ConfigError(
            f"the agent was made for observations {agent.observation_space}, but this environment has "
            f"{env.observation_space}."
        )
    env = guarded(env)
    returns: list[float] = []
    observation, _ = env.reset(seed=seed)
    total, in_a_row = 0.0, 0
    while len(returns) < episodes:
        if frames is not None and not returns:
            frames.append(np.asarray(env.render()))
        if observations is not None:
            observations.append(np.asarray(observation))
        action, _ = agent.predict(observation, deterministic=True)
        observation, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        if terminated or truncated:
            in_a_row = in_a_row + 1 if "fault" in info else 0
            if in_a_row == 0:
                returns.append(total)
            elif in_a_row == PATIENCE:
                raise TrainingError(f"{PATIENCE} episodes in a row failed: {fault_message(0, info['fault'])}")
            total = 0.0
            observation, _ = env.reset()
    return returns


def check_environment(env: Any) -> None:
    """Raise ConfigError for what is not one gymnasium environment."""
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"evaluation needs one gymnasium environment (make_env(...)), got {type(env).__name__}.")


def transposed(space: Any) -> Any:
    """The channel-first space that SB3 makes of images with their channels last; other spaces as they are."""
    if is_image_space(space) and not is_image_space_channels_first(space):
        return VecTransposeImage.transpose_space(space)
    return space


class EvaluationCallback(BaseCallback):
    """Evaluates every `every` environment steps and once before training.

    Writes one line of `folder/evaluations.jsonl` for each, logs eval/return and eval/score_100k, eval/score_500k, and
    keeps `history`.

    Args:
        env: an environment of its own.
        every: environment steps between evaluations.
        episodes: of each evaluation.
        folder: for evaluations.jsonl and videos; nothing is written without it.
        seed: of the evaluation's episodes; the same start states at every evaluation.
        video_every: evaluations between videos of a first episode (0: none); .gif, one for each.
        diagnose: log embedding diagnostics as well (contrastive agents only).
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        every: int = 10_000,
        episodes: int = 10,
        folder: str | Path | None = None,
        seed: int = 10_000,
        video_every: int = 0,
        diagnose: bool = True,
    ) -> None:
        super().__init__()
        check_environment(env)
        check_whole(every=every, episodes=episodes)
        if video_every and folder is None:
            raise ConfigError("video_every needs a folder to write into.")
        self.env = env
        self.every = every
        self.episodes = episodes
        self.folder = Path(folder) if folder is not None else None
        self.seed = seed
        self.video_every = video_every
        self.diagnose = diagnose
        self.history: list[Evaluation] = []

    @property
    def environment_steps(self) -> int:
        """Environment steps taken in training; agent steps where the agent does not count them."""
        return int(getattr(self.model, "environment_steps", self.model.num_timesteps))

    def _on_training_start(self) -> None:
        training = self.training_env.unwrapped
        if isinstance(training, DummyVecEnv) and any(each.unwrapped is self.env.unwrapped for each in training.envs):
            raise ConfigError("the evaluation environment is the training environment itself: make another one for it.")
        if self.folder is not None:
            # After a resume, lines that the checkpoint had not seen are written again.
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "evaluations.jsonl"
            before = read_evaluations(path) if path.is_file() and self.environment_steps else []
            self.history = [each for each in before if each.environment_steps <= self.environment_steps]
            path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in self.history))
        if not self.history or self.environment_steps == 0:
            self._evaluate()

    def _on_rollout_start(self) -> None:
        if self.environment_steps // self.every > self.history[-1].environment_steps // self.every:
            self._evaluate()

    def _on_training_end(self) -> None:
        if self.environment_steps // self.every > self.history[-1].environment_steps // self.every:
            self._evaluate()

    def _on_step(self) -> bool:
        return True

    def _evaluate(self) -> None:
        began = time.monotonic()
        frames: list[NDArray[np.uint8]] | None = None
        if self.video_every and len(self.history) % self.video_every == 0:
            frames = []
        returns = evaluate(self.model, self.env, self.episodes, self.seed, frames)
        found = Evaluation(
            self.environment_steps, self.model.num_timesteps, tuple(returns), round(time.monotonic() - began, 2)
        )
        self.history.append(found)
        self.logger.record("eval/return", found.mean)
        self.logger.record("eval/return_std", float(np.std(returns)))
        for name, value in scores(self.history).items():
            self.logger.record(f"eval/score_{name}", value)
        if self.diagnose and isinstance(self.model, ContrastiveSAC) and self.model.contrast is not None:
            for name, value in diagnose(self.model).items():
                self.logger.record(f"diag/{name}", value)
        if self.folder is not None:
            with open(self.folder / "evaluations.jsonl", "a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
            if frames:
                write_video(frames, self.folder / f"episode-{found.environment_steps:09d}.gif", _fps(self.env))


def _fps(env: gymnasium.Env[Any, Any]) -> int:
    return int(env.metadata.get("render_fps") or 25)


def read_evaluations(path: str | Path) -> list[Evaluation]:
    """Read evaluations.jsonl; DataError where it is damaged."""
    try:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        return [Evaluation(**{**line, "returns": tuple(line["returns"])}) for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} holds no evaluations: {error}") from error


def score_at(history: Sequence[Evaluation], environment_steps: int) -> float | None:
    """Mean return of the first evaluation at or after so many environment steps; None if training was shorter."""
    later = [each for each in history if each.environment_steps >= environment_steps]
    return min(later, key=lambda each: each.environment_steps).mean if later else None


def scores(history: Sequence[Evaluation]) -> dict[str, float]:
    """The papers' scores that this history has reached: "100k", "500k"."""
    found = {name: score_at(history, steps) for name, steps in SCORES.items()}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Aggregate:
    """Scores over seeds: mean, interquartile mean, and a bootstrap interval of the latter."""

    n: int
    mean: float
    iqm: float
    low: float
    high: float


def interquartile_mean(values: Any) -> float:
    """Mean of the middle half (Agarwal et al. 2021): a quarter of the values is cut at each end."""
    return float(stats.trim_mean(np.ravel(values), 0.25))


def aggregate(values: Sequence[float], confidence: float = 0.95, draws: int = 10_000, seed: int = 0) -> Aggregate:
    """Mean, interquartile mean and percentile bootstrap interval over seeds.

    Args:
        values: one score for each seed.
        confidence: of the interval.
        draws: bootstrap samples.
        seed: of the bootstrap.
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must lie between 0 and 1, got {confidence!r}.")
    try:
        array = np.asarray(values, float)
    except (TypeError, ValueError) as error:
        raise DataError(f"scores must be a list of finite numbers, got {values!r}.") from error
    if array.ndim != 1 or len(array) == 0 or not np.isfinite(array).all():
        raise DataError(f"scores must be a list of finite numbers, got {values!r}.")
    picks = np.random.default_rng(seed).integers(0, len(array), (draws, len(array)))
    means = stats.trim_mean(array[picks], 0.25, axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Aggregate(len(array), float(array.mean()), interquartile_mean(array), float(low), float(high))


@torch.no_grad()
def diagnose(agent: ContrastiveSAC, batch_size: int = 256) -> dict[str, float]:
    """Embedding diagnostics of one replay batch, as in the other domains; {} while replay is too small.

    The batch comes from a copy of the sampler's generator, and torch's is put back: training is not disturbed.
    """
    buffer = agent.replay_buffer
    if agent.contrast is None or len(buffer) < batch_size:
        return {}
    state, generator = buffer.rng.bit_generator.state, torch.get_rng_state()
    batch = buffer.sample_views(batch_size, agent._augment, max(agent._positives, 1))
    buffer.rng.bit_generator.state = state
    torch.set_rng_state(generator)
    pairs = agent._pairs(batch, agent.policy.encoder(batch.observations))
    return diagnose_pairs(pairs)


def diagnose_pairs(pairs: Pairs) -> dict[str, float]:
    """Alignment, uniformity, mean distance, margin occupancy, rank and conditional entropy of anchors and keys."""
    entropy, maximum = diagnostics.conditional_entropy(pairs)
    return {
        "alignment": diagnostics.alignment(pairs),
        "uniformity": diagnostics.uniformity(pairs),
        "mean_distance": diagnostics.mean_distance(pairs.anchors),
        "margin_occupancy": diagnostics.margin_occupancy(pairs),
        "rank": float(diagnostics.numerical_rank(pairs.anchors)),
        "conditional_entropy": float(entropy),
        "conditional_entropy_maximum": float(maximum),
    }


def write_video(frames: Sequence[NDArray[np.uint8]], path: str | Path, fps: int = 25) -> Path:
    """Write frames (H, W, 3) as .gif, or as .mp4 where imageio has ffmpeg.

    Raises:
        ConfigError: for another suffix, or .mp4 without ffmpeg.
        DataError: if there are no frames, or an environment without a render mode made them.
    """
    if not len(frames) or any(np.ndim(frame) != 3 for frame in frames):
        raise DataError("a video needs frames (H, W, 3): make the environment with render_mode='rgb_array'.")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        from PIL import Image

        images = [Image.fromarray(frame) for frame in frames]
        images[0].save(path, save_all=True, append_images=images[1:], duration=max(round(1000 / fps), 20), loop=0)
    elif path.suffix == ".mp4":
        try:
            import imageio.v3
            import imageio_ffmpeg  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"{path} needs ffmpeg: pip install 'imageio[ffmpeg]', or write a .gif instead."
            ) from error
        imageio.v3.imwrite(path, np.stack(frames), fps=fps)
    else:
        raise ConfigError(f"videos are written as .gif or .mp4, not {path.suffix or path.name!r}.")
    return path


def plot_curves(runs: Mapping[str, Sequence[Sequence[Evaluation]]], path: str | Path, title: str = "") -> Path:
    """Draw return over environment steps, one line for each method: mean over seeds, and their range.

    Of a method with one seed the range is that of the episodes.

    Args:
        runs: method -> the history of each seed.
        path: .png, .svg or .pdf.
        title: above the picture.

    Raises:
        ConfigError: for another suffix.
        DataError: if there is nothing to draw: no method, or one whose seeds have no evaluation in common.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"curves are drawn as .png, .svg or .pdf, not {path.suffix or path.name!r}.")
    if not runs:
        raise DataError("there are no runs to draw.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for method, histories in runs.items():
        seen = [{each.environment_steps for each in history} for history in histories]
        steps = sorted(set.intersection(*seen)) if seen else []
        if not steps:
            raise DataError(
                f"the seeds of {method!r} have no evaluation at the same environment steps: nothing to draw."
            )
        common = [[each for each in history if each.environment_steps in steps] for history in histories]
        values = np.array([[each.mean for each in history] for history in common])
        seeds, spread = f"{len(values)} seeds", list(values.T)
        if len(values) == 1:
            seeds, spread = "1 seed", [np.array(each.returns) for each in common[0]]
        (line,) = axes.plot(steps, values.mean(0), label=f"{method} ({seeds})")
        low, high = [each.min() for each in spread], [each.max() for each in spread]
        axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
    axes.set(xlabel="environment steps", ylabel="return of an episode", title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
