"""Evaluations while an agent learns."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from dipole.core.evaluation import diagnostics
from dipole.core.train.evaluation import diagnose_objective, diagnose_pairs
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import check_own, disk_refusing
from dipole.rl.arguments import check_integers, check_seed
from dipole.rl.envs.running.validate import validate
from dipole.rl.episodes.history import Evaluation, read_evaluations, scores
from dipole.rl.episodes.play import evaluate, write_video
from dipole.rl.pixel_agent import PixelAgent


class EvaluationCallback(BaseCallback):
    """Evaluates every `every` environment steps and once before training.

    Writes one line of `folder/evaluations.jsonl` for each, logs eval/return, eval/return_std, eval/score_100k,
    eval/score_500k and diag/..., and keeps `history`.

        >>> agent = ContrastiveSAC("CnnPolicy", DotEnv(), preset="small", buffer_size=50, learning_starts=50)
        >>> evaluation = EvaluationCallback(DotEnv(), every=10, episodes=1)
        >>> agent = agent.learn(10, callback=evaluation)
        >>> len(evaluation.history)
        2

    Args:
        env: an environment of its own, a VecEnv of SB3, or a task's name.
        every: environment steps between evaluations, >= 1.
        episodes: of each evaluation, >= 1.
        folder: for evaluations.jsonl and videos. Nothing is written without it.
        seed: of the evaluation's episodes, from 0 to 2**32 - 1. Every evaluation has the same start states.
        video_every: evaluations between videos of a first episode, >= 0 (0: none). Each is a .gif in `folder`.
        diagnose: log embedding diagnostics as well (contrastive agents only).

    Raises:
        ConfigError: for an argument out of range, or videos without a folder. When training begins: an environment that
            is the training environment itself, or whose observations are not the agent's.
        TrainingError: from training, five episodes in a row end with a fault.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any] | VecEnv | str,
        every: int = 10_000,
        episodes: int = 10,
        folder: str | Path | None = None,
        seed: int = 10_000,
        video_every: int = 0,
        diagnose: bool = True,
    ) -> None:
        super().__init__()
        check_integers(every=every, episodes=episodes)
        check_integers(0, video_every=video_every)
        if video_every and folder is None:
            raise ConfigError("video_every needs a folder to write into.")
        self.env, self.every, self.episodes = validate(env), every, episodes
        self.video_every, self.diagnose = video_every, diagnose
        self.folder = None if folder is None else Path(folder)
        self.seed = check_seed(seed)
        self.history: list[Evaluation] = []

    @property
    def environment_steps(self) -> int:
        """Environment steps taken in training, or agent steps if the agent does not count them."""
        return int(getattr(self.model, "environment_steps", self.model.num_timesteps))

    def _on_training_start(self) -> None:
        training = self.training_env.unwrapped
        trained = [training, *(each.unwrapped for each in getattr(training, "envs", ()))]
        if any(each is self.env.unwrapped for each in trained):
            raise ConfigError("the evaluation environment is the training environment itself: make another one for it.")
        if self.folder is not None:
            # After a resume, lines that the checkpoint had not seen are written again.
            with disk_refusing(f"cannot write into {self.folder}", ConfigError, ""):
                self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "evaluations.jsonl"
            check_own(path)
            self.history = []
            if path.is_file() and self.environment_steps:
                before = read_evaluations(path)
                self.history = [each for each in before if each.environment_steps <= self.environment_steps]
            path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in self.history))
        if not self.history or self.environment_steps == 0:
            self._evaluate()

    def _on_rollout_start(self) -> None:
        if self.environment_steps // self.every > self.history[-1].environment_steps // self.every:
            self._evaluate()

    def _on_training_end(self) -> None:
        self._on_rollout_start()

    def _on_step(self) -> bool:
        return True

    def _evaluate(self) -> None:
        began = time.monotonic()
        is_shown = self.video_every and len(self.history) % self.video_every == 0
        frames: list[NDArray[np.uint8]] | None = [] if is_shown else None
        returns = evaluate(self.model, self.env, self.episodes, self.seed, frames)
        found = Evaluation(
            self.environment_steps, self.model.num_timesteps, tuple(returns), round(time.monotonic() - began, 2)
        )
        self.history.append(found)
        self.logger.record("eval/return", found.mean)
        self.logger.record("eval/return_std", float(np.std(returns)))
        for name, value in scores(self.history).items():
            self.logger.record(f"eval/score_{name}", value)
        if self.diagnose and isinstance(self.model, PixelAgent) and self.model.contrast is not None:
            for name, value in diagnose(self.model).items():
                self.logger.record(f"diag/{name}", value)
        if self.folder is not None:
            with open(self.folder / "evaluations.jsonl", "a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
            if frames:
                fps = int(self.env.metadata.get("render_fps") or 25)
                write_video(frames, self.folder / f"episode-{found.environment_steps:09d}.gif", fps)


@torch.no_grad()
def diagnose(agent: PixelAgent, batch_size: int = 256) -> dict[str, float]:
    """Return diagnostics of a replay batch's embeddings and of the objective's terms. {} if replay is too short."""
    if agent.contrast is None or len(agent.replay_buffer) < batch_size:
        return {}
    batch = agent.peek(batch_size)
    pairs = agent.make_pairs(batch, agent.anchors(batch.observations))
    return {
        "mean_distance": diagnostics.mean_distance(pairs.anchors),
        "margin_occupancy": diagnostics.margin_occupancy(pairs),
        "rank": float(diagnostics.numerical_rank(pairs.anchors)),
        **diagnose_pairs((pairs,), agent.contrast),
        **diagnose_objective(agent.contrast, pairs.anchors),
    }
