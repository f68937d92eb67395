"""The rl domain of a recipe: an agent, its environments and its evaluation, driven by SB3's own loop.

Lengths and periods of [train] are environment steps, as the papers count: `steps = 100_000`, `evaluate_every = 10_000`.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

import gymnasium
import numpy as np
import torch
from pydantic import Field, field_validator
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from torch import Tensor, nn

from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import ConfigError
from dipole.core.train.adapter import Adapter, Context
from dipole.core.train.config import Settings
from dipole.rl import checkpoint, settings, tasks
from dipole.rl.agent import ContrastiveSAC
from dipole.rl.contrast import positives_of
from dipole.rl.environments import make_env
from dipole.rl.evaluation import Evaluation, evaluate, interquartile_mean, scores
from dipole.rl.faults import WorkerVecEnv, guarded
from dipole.rl.replay import FrameBatch

if TYPE_CHECKING:
    from dipole.core.train.loop import Run

_KEPT = 512  # observations of the last evaluation whose features go into diagnostics and pictures


class RLConfig(Settings):
    """The [rl] table. Settings of the agent that are left out come from the preset."""

    task: str = Field("dot", description='"dot", or a task of the suite: "cheetah-run", "ball_in_cup-catch", ...')
    size: int | None = Field(None, ge=12, description="rendered height and width; default 100 (dot: 28)")
    frame_stack: int = Field(3, ge=1, description="frames in an observation")
    action_repeat: int | None = Field(None, ge=1, description="control steps per action; default the papers'")
    camera: int | None = Field(None, ge=0, description="default 0 (quadruped: 2)")
    rendering: Literal["paper", "fast"] = Field("paper", description="fast: no shadows, reflections, anti-aliasing")
    envs: int = Field(1, ge=1, description="environments that are stepped together")
    workers: bool = Field(False, description="each environment in a process of its own")
    preset: Literal["curl", "paper", "small"] = Field("curl", description="where the agent's settings come from")
    augmentation: Literal["crop", "shift", "none"] = "crop"
    storage: Literal["host", "device"] = Field("host", description="where replay keeps its frames")
    episodes: int = Field(10, ge=1, description="episodes of an evaluation")
    buffer_size: int | None = Field(None, ge=2)
    learning_starts: int | None = Field(None, ge=0, description="agent steps of uniform actions")
    image_size: int | None = Field(None, ge=1, description="what the network sees; default 84 % of the rendered size")
    crop_inclusive: bool | None = None
    positives: int | None = Field(None, ge=1)
    exclude_duplicates: bool | None = None
    bilinear_init: Literal["uniform", "identity"] | None = None
    gamma: float | None = Field(None, ge=0, le=1)
    encoder_learning_rate: float | None = Field(None, gt=0)
    temperature_learning_rate: float | None = Field(None, gt=0)
    initial_temperature: float | None = Field(None, gt=0)
    actor_every: int | None = Field(None, ge=1)
    target_every: int | None = Field(None, ge=1)
    contrast_every: int | None = Field(None, ge=1)
    tau: float | None = Field(None, ge=0, le=1)
    encoder_tau: float | None = Field(None, ge=0, le=1)
    encoder_steps: Literal[1, 2] | None = None
    twin_loss: Literal["sum", "half"] | None = None
    detach_encoder: bool | None = None
    joint_backward: bool | None = None
    hidden: tuple[int, ...] | None = None
    features: int | None = Field(None, ge=1, description="width of the embedding")
    layers: int | None = Field(None, ge=1)
    filters: int | None = Field(None, ge=1)
    tanh: bool | None = None
    channels_last: bool | None = None
    chunk: int | None = Field(None, ge=0)

    @field_validator("task")
    @classmethod
    def _known(cls, task: str) -> str:
        if task == "dot":
            return task
        try:
            return "-".join(tasks.split(task))
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def agent_settings(self) -> dict[str, Any]:
        """The fields that replace the preset's."""
        names = set(settings.NAMES) & set(type(self).model_fields)
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def environment(self) -> dict[str, Any]:
        """Keywords of `make_env`."""
        given = {"frame_stack": self.frame_stack}
        optional: dict[str, Any] = {"size": self.size}
        if self.task != "dot":
            given["rendering"] = self.rendering  # type: ignore[assignment]
            optional.update(action_repeat=self.action_repeat, camera=self.camera)
        return given | {name: value for name, value in optional.items() if value is not None}


class RLAdapter(Adapter):
    """Trains `ContrastiveSAC` for a number of environment steps and evaluates whole episodes."""

    domain: ClassVar[str] = "rl"
    config_model: ClassVar[type[Settings]] = RLConfig
    train_fields: ClassVar[frozenset[str]] = frozenset(
        {"steps", "batch_size", "learning_rate", "precision", "evaluate_every", "checkpoint_every", "log_every"}
    )
    objective_optional: ClassVar[bool] = True
    export_formats: ClassVar[tuple[str, ...]] = ("sb3",)

    config: RLConfig

    def __init__(self, config: RLConfig, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        if self.world_size > 1:
            raise ConfigError(
                "the rl domain trains in one process: start it without torchrun (rl.envs steps several at once)."
            )
        self.agent = ContrastiveSAC(
            "CnnPolicy",
            self._environments(),
            objective="none",  # the run's objective is attached when training starts
            preset=config.preset,
            augmentation=config.augmentation,
            storage=config.storage,
            batch_size=self.batch_size,
            seed=self.seed.env,
            device=str(self.device),
            **config.agent_settings(),
        )
        self.agent.set_logger(Logger(None, []))
        policy = self.agent.policy
        self.module = nn.ModuleDict(
            {"actor": policy.actor, "critic": policy.critic, "critic_target": policy.critic_target}
        )
        self.embedding_dim = self.agent.settings.features
        self.steps_per_epoch = 1000
        self.history: list[Evaluation] = []
        self._observations: list[np.ndarray] = []
        self._pending: Path | None = None

    def _environments(self) -> VecEnv:
        make = [partial(make_env, self.config.task, **self.config.environment()) for _ in range(self.config.envs)]
        return WorkerVecEnv(make) if self.config.workers else DummyVecEnv(make)  # type: ignore[arg-type]

    def fit(self, run: "Run") -> None:
        """SB3's loop until the environment steps of the recipe are taken."""
        agent, train = self.agent, run.config.train
        agent.settings = replace(
            agent.settings,
            objective=str(run.objective) if run.objective is not None else "none",
            learning_rate=train.learning_rate,
            precision="float32" if train.precision == "32" else "bf16",
        )
        agent.learning_rate = train.learning_rate
        agent._setup_lr_schedule()
        self._attach(run.objective)
        if self._pending is not None:
            checkpoint.restore(agent, self._pending)
            self._pending = None
        callback = _Report(run, self)
        repeat = getattr(self._evaluation_env.unwrapped, "action_repeat", 1)
        first = agent.num_timesteps == 0
        while agent.environment_steps < run.total_steps:
            rest = -(-(run.total_steps - agent.environment_steps) // repeat)
            agent.learn(rest, callback=callback, log_interval=None, reset_num_timesteps=first)  # type: ignore[arg-type]
            first = False
        callback.report()

    def _attach(self, objective: Any) -> None:
        """Give the agent the run's own objective, whose weights the run saves."""
        agent = self.agent
        agent.policy.contrast = objective
        if objective is None:
            return
        if agent.settings.bilinear_init == "uniform":
            for _, _, term in objective:
                if term.similarity == "bilinear":
                    with torch.no_grad():
                        term.W.uniform_(0, 1)
        agent._positives = positives_of(agent.settings, objective)
        agent._setup_contrast()

    @property
    def _evaluation_env(self) -> gymnasium.Env[Any, Any]:
        if not hasattr(self, "_evaluating"):
            self._evaluating = guarded(make_env(self.config.task, **self.config.environment()))
        return self._evaluating

    def batches(self, epoch: int, start: int = 0) -> Iterator[FrameBatch]:
        """Batches of what replay holds, without moving its sampler."""
        buffer = self.agent.replay_buffer
        state = buffer.rng.bit_generator.state
        buffer.rng = self.seed.numpy("data", epoch, start)
        batch = buffer.sample_views(self.batch_size, self.agent._augment, max(self.agent._positives, 1))
        buffer.rng.bit_generator.state = state
        yield batch

    def embed(self, batch: FrameBatch) -> Pairs:
        """Anchors of the encoder against keys of the momentum encoder."""
        return self.agent._pairs(batch, self.agent.policy.encoder(batch.observations))

    def evaluate(self, objective: Any) -> dict[str, float]:
        """Returns of whole episodes and the scores reached so far."""
        agent = self.agent
        observations: list[np.ndarray] = []
        returns = evaluate(
            agent, self._evaluation_env, self.config.episodes, self.seed.probe, observations=observations
        )
        picks = self.seed.numpy("probe", "observations").permutation(len(observations))[:_KEPT]
        self._observations = [observations[index] for index in np.sort(picks)]
        self.history = [each for each in self.history if each.environment_steps < agent.environment_steps]
        self.history.append(Evaluation(agent.environment_steps, agent.num_timesteps, tuple(returns)))
        return {
            "return/mean": float(np.mean(returns)),
            "return/std": float(np.std(returns)),
            "return/iqm": interquartile_mean(returns),
            "return/min": min(returns),
            "return/max": max(returns),
            **{f"score/{name}": value for name, value in scores(self.history).items()},
        }

    @torch.no_grad()
    def diagnostic_pairs(self) -> Pairs | None:
        """One batch of the replay buffer, as the objective sees it; None without one or before there is a batch."""
        if self.agent.contrast is None or len(self.agent.replay_buffer) < self.batch_size:
            return None
        return self.embed(next(self.batches(0, self.agent.num_timesteps)))

    @torch.no_grad()
    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        """Embeddings of observations of the last evaluation (of a played episode where there was none)."""
        if not self._observations:
            evaluate(self.agent, self._evaluation_env, 1, self.seed.probe, observations=self._observations)
            self._observations = self._observations[:_KEPT]
        images = torch.from_numpy(np.stack(self._observations)).to(self.device)
        encoder = self.agent.policy.encoder
        return torch.cat([encoder(part) for part in images.split(128)]).float().cpu(), None

    def data_info(self) -> dict[str, Any]:
        env = self._evaluation_env
        first, _ = env.reset(seed=0)
        described = {
            "task": self.config.task,
            "environment": self.config.environment(),
            "action_repeat": getattr(env.unwrapped, "action_repeat", 1),
        }
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode() + np.ascontiguousarray(first).tobytes())
        return {
            "name": self.config.task,
            "fingerprint": digest.hexdigest()[:16],
            "sizes": {"observation": list(first.shape), "replay_bytes": self.agent.replay_buffer.nbytes},
            "action_repeat": described["action_repeat"],
            "environment_steps": self.agent.environment_steps,
            "agent_steps": self.agent.num_timesteps,
            "faults": len(self.agent.faults),
        }

    def state_dict(self) -> dict[str, Any]:
        """Write the agent's own checkpoint beside the run's, and name it."""
        folder = self.workdir / "checkpoints" / f"agent-{self.agent.num_timesteps:09d}"
        checkpoint.save(self.agent, folder)
        for old in checkpoint.checkpoints(folder.parent)[: -checkpoint.KEEP]:
            shutil.rmtree(old, ignore_errors=True)
        history = [[each.environment_steps, each.agent_steps, list(each.returns)] for each in self.history]
        return {"agent": folder.name, "history": history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending = self.workdir / "checkpoints" / state["agent"]
        checkpoint.check(self._pending)
        self.history = [Evaluation(steps, agent, tuple(returns)) for steps, agent, returns in state["history"]]

    def export(self, to: str, folder: Path, record: Any, objective: Any = None) -> None:
        """Write agent.zip for `ContrastiveSAC.load`."""
        self.agent.save(folder / "agent.zip")


class _Report(BaseCallback):
    """Tells the run about every agent step, between rollouts, where evaluation and checkpoints are safe."""

    def __init__(self, run: "Run", adapter: RLAdapter) -> None:
        super().__init__()
        self.run = run
        self.adapter = adapter
        self.episodes = 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self.adapter.agent.environment_steps > self.run.step:
            self.report()

    def report(self) -> None:
        """Advance the run to the agent's environment steps with the values of the last update."""
        agent = self.adapter.agent
        values = {
            name: float(value)
            for name, value in agent.logger.name_to_value.items()
            if name.startswith("train/") and isinstance(value, (int, float, np.number))
        }
        if agent._episode_num != self.episodes and agent.ep_info_buffer:
            self.episodes = agent._episode_num
            values["train/return"] = float(agent.ep_info_buffer[-1]["r"])
        agent.logger.name_to_value.clear()
        steps = agent.environment_steps - self.run.step
        if steps:
            self.run.advance(values, steps)
