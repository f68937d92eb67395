"""The rl domain of a recipe: its [rl] table, and an agent with environments and evaluation, driven by SB3's own loop.

Lengths and periods of [train] are environment steps, as the papers count: `steps = 100_000`, `evaluate_every = 10_000`.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, Unpack

import gymnasium
import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from torch import Tensor, nn

from dipole.core.evaluation.probes import measuring_device
from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.adapter import Adapter, Context, Sketch
from dipole.core.train.config import EvaluatedPart, Settings
from dipole.core.train.inference import Embedder
from dipole.core.train.run import Run
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import remove_scratch
from dipole.core.utils.received import read_text
from dipole.rl import algorithms, saved_agent, snapshots
from dipole.rl.contrast import start_bilinear
from dipole.rl.domain import NO_VECTORS
from dipole.rl.envs.registry import find
from dipole.rl.envs.running.faults import guarded
from dipole.rl.envs.running.validate import stack
from dipole.rl.envs.running.workers import WorkerVecEnv
from dipole.rl.episodes.history import SCORES, Evaluation, scores, summary
from dipole.rl.episodes.play import evaluate, evaluate_each
from dipole.rl.export import export_hub, export_sb3
from dipole.rl.inputs import require_size
from dipole.rl.sampling import FrameBatch, choose
from dipole.rl.sb3_names import read_zoo
from dipole.rl.seen import parts
from dipole.rl.settings import DEFAULT, PRESETS, AgentTable, Storage

# Keywords of an environment's factory, where it has them.
_OF_THE_ENVIRONMENT = (
    "size", "frame_stack", "action_repeat", "camera", "rendering", "difficulty", "backgrounds", "dynamic",
)  # fmt: skip


class RLConfig(AgentTable):
    """The [rl] table. The preset gives the agent's settings that the recipe does not name."""

    # A run's identity holds the values of a preset or file, not its name.
    incidental: ClassVar[frozenset[str]] = frozenset(
        {"preset", "hyperparameters", "storage", "workers", "evaluation_workers"}
    )

    hyperparameters: str | None = Field(None, description="a file of RL Baselines3 Zoo, for what is left out")
    task: str = Field("dot", description='"dot", one of the suite ("cheetah-run"), your own, or an id of gymnasium')
    size: int | None = Field(None, ge=12, description="rendered height and width. Default 100 (dot: 28)")
    frame_stack: int = Field(3, ge=1, description="frames in an observation")
    action_repeat: int | None = Field(None, ge=1, description="control steps per action. Default the papers'")
    camera: int | None = Field(None, ge=0, description="default 0 (quadruped: 2)")
    rendering: Literal["paper", "fast"] = Field("paper", description="fast: no shadows, reflections, anti-aliasing")
    difficulty: Literal["easy", "medium", "hard"] | None = Field(None, description="distracting: strength and videos")
    backgrounds: str | None = Field(None, description="distracting: a folder of pictures, or of videos as such folders")
    dynamic: bool = Field(False, description="distracting: whether backgrounds move")
    envs: int = Field(1, ge=1, description="environments that are stepped together")
    workers: bool = Field(False, description="each environment in a process of its own")
    augmentation: Literal["crop", "shift", "bilinear", "none"] = "crop"
    storage: Storage = Field("auto", description="of replay's frames. auto: on a GPU if they fit. disk: in TMPDIR")
    episodes: int = Field(10, ge=1, description="episodes of an evaluation")
    evaluation_seeds: Literal["first", "each"] = Field(
        "first", description="first: one seed for the first episode of an evaluation. each: every episode has its own"
    )
    evaluation_workers: int = Field(
        1, ge=1, le=1024, description="processes that play an evaluation's episodes (evaluation_seeds: each)"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_file(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(given.get("hyperparameters"), str):
            return given
        return read_zoo(given["hyperparameters"], str(given.get("task", "dot")))[0] | dict(given)

    @field_validator("task")
    @classmethod
    def _known(cls, task: str) -> str:
        return find(task).name

    @model_validator(mode="after")
    def _with_effect(self) -> Self:
        if self.evaluation_workers > 1 and self.evaluation_seeds == "first":
            raise ValueError(
                "evaluation_workers play episodes that have seeds of their own: set evaluation_seeds = 'each' (their "
                "returns are then the same for any number of workers)."
            )
        known = find(self.task).settings
        for name in ("frame_stack", "augmentation"):
            if self.inputs == "state" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with inputs='state', which has no images.")
        for name in _OF_THE_ENVIRONMENT:
            if name not in known and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} has no effect on the task {self.task!r}, whose settings are {', '.join(known) or 'none'}."
                )
        return self

    def agent_settings(self) -> dict[str, Any]:
        """The settings of the agent that replace the preset's."""
        given = {name: getattr(self, name) for name in AgentTable.model_fields if name not in ("preset", "algorithm")}
        return {name: value for name, value in given.items() if value != getattr(PRESETS[self.preset], name)}

    def named_code(self) -> Iterable[Any]:
        return [find(self.task).code]

    def environment(self) -> dict[str, Any]:
        """Keywords of `make_env`."""
        known = find(self.task).settings
        given = {name: getattr(self, name) for name in _OF_THE_ENVIRONMENT if name in known}
        if "inputs" in known and self.inputs != "auto":
            given["inputs"] = self.inputs
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def train_defaults(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The preset's own values of [train]."""
        wanted = DEFAULT.get(str(values.get("algorithm", "sac")), "curl")
        preset = PRESETS.get(str(values.get("preset", wanted)))
        if preset is None:
            return {}
        rate = _RATES.get((preset.preset, str(values.get("task"))), preset.learning_rate)
        found = {"batch_size": preset.batch_size, "learning_rate": rate}
        if values.get("hyperparameters"):
            with suppress(ConfigError):  # the table's own check says what is wrong
                found |= read_zoo(str(values["hyperparameters"]), str(values.get("task", "dot")))[1]
        return found


# Of tasks that want another rate than their preset's (Laskin et al. 2020, table 3).
_RATES = {(preset, "cheetah-run"): 2e-4 for preset in ("curl", "paper")}


_PRECISIONS = {"32": "float32", "bf16-mixed": "bf16"}  # of [train] -> of the agent, whose updates scale no loss
_FILE = "agent.json"
_KEPT = 512  # observations of the last evaluation whose features go into diagnostics and pictures


class RLAdapter(Adapter):
    """Trains an agent for a number of environment steps and evaluates whole episodes."""

    domain: ClassVar[str] = "rl"
    config_model: ClassVar[type[Settings]] = RLConfig
    validates: ClassVar[bool] = True
    sets_aside: ClassVar[bool] = False
    train_fields: ClassVar[frozenset[str]] = frozenset({
        "steps", "batch_size", "learning_rate", "precision", "curves_on", "evaluate_on", "evaluate_every",
        "checkpoint_every", "log_every",
    })  # fmt: skip
    precisions: ClassVar[tuple[str, ...]] = tuple(_PRECISIONS)
    objective_optional: ClassVar[bool] = True
    export_formats: ClassVar[tuple[str, ...]] = ("sb3", "huggingface-sb3")

    config: RLConfig

    def __init__(self, config: RLConfig, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        if self.world_size > 1:
            raise ConfigError(
                "the rl domain trains in one process: start it without torchrun (rl.envs steps several at once)."
            )
        self._make = partial(find(config.task).make, **config.environment())
        env: VecEnv | None = None
        if self.kept is None:
            kind: Any = WorkerVecEnv if config.workers else DummyVecEnv
            env = kind([self._make] * config.envs)
        self.agent = algorithms.ALGORITHMS[config.algorithm](
            "CnnPolicy",
            env,
            _init_setup_model=env is not None,
            objective="none",  # the run's objective is attached when training starts
            preset=config.preset,
            augmentation=config.augmentation,
            storage=config.storage,
            batch_size=self.batch_size,
            seed=self.seed.env,
            device=str(self.device),
            **config.agent_settings(),
        )
        self._info: dict[str, Any] | None = None
        if self.kept is not None:
            with saved_agent.readable(f"the model {self.kept} is damaged", ". Train again with --overwrite."):
                told = json.loads(read_text(self.kept / _FILE))
                saved_agent.make_networks(self.agent, told)
                self._info = dict(told["info"])
        self.agent.task = {"name": config.task, "settings": config.environment()}
        self.agent.set_logger(Logger(None, []))
        self.module = nn.ModuleDict(self.agent.parts())
        self.embedding_dim = config.features
        self.steps_per_epoch = 1000
        self.history: list[Evaluation] = []
        self._observations: list[Any] = []
        self._pending: Path | None = None
        self._players: WorkerVecEnv | None = None

    @classmethod
    def sketch(cls, config: Any, batch_size: int, world_size: int = 1) -> Sketch:
        # No environment is made: an encoder wants the size of its images alone.
        rendered = config.size or find(config.task).default("size")
        if rendered is not None and config.inputs != "state":
            channels = 3 * config.frame_stack
            seen = choose(config.augmentation, channels, rendered, config.image_size, config.crop_inclusive)
            require_size(seen.size, config.layers)
        return Sketch(config.features, _example, (batch_size, config.positives))

    def fit(self, run: Run) -> None:
        """SB3's loop until the environment steps of the recipe are taken."""
        agent, train = self.agent, run.config.train
        agent._adopt(run.objective, learning_rate=train.learning_rate, precision=_PRECISIONS[train.precision])
        if run.objective is not None:
            start_bilinear((term for _, _, term in run.objective), agent.bilinear_init)
        if self._pending is not None:
            snapshots.restore(agent, self._pending)
            self._pending = None
        remove_scratch(self.workdir / "checkpoints", "agent-*")
        run.evaluate_if_due()
        callback = _Report(run, self)
        repeat = getattr(self._evaluation_env.unwrapped, "action_repeat", 1)
        while agent.environment_steps < run.total_steps:
            rest = -(-(run.total_steps - agent.environment_steps) // repeat)
            agent.learn(rest, callback=callback, log_interval=None, reset_num_timesteps=agent.num_timesteps == 0)
        callback.report()

    @cached_property
    def _evaluation_env(self) -> gymnasium.Env[Any, Any]:
        return guarded(self._make())

    def batches(self, epoch: int, start: int = 0) -> Iterator[FrameBatch]:
        yield self.agent.peek(self.batch_size, self.seed.numpy("data", epoch, start))

    def embed(self, batch: FrameBatch) -> Pairs:
        return self.agent.make_pairs(batch, self.agent.anchors(batch.observations))

    def _played(self, part: EvaluatedPart) -> int:
        """Return the seed of evaluated episodes. Validation and test use different ones."""
        return self.seed.stream("probe", "validation") if part == "validation" else self.seed.probe

    def evaluate(self, objective: Any) -> dict[str, float]:
        agent = self.agent
        observations: list[Any] = []
        returns = self._play(self._played(self.part), observations=observations)
        picks = self.seed.numpy("probe", "observations").permutation(len(observations))[:_KEPT]
        self._observations = [observations[index] for index in np.sort(picks)]
        self.history = [each for each in self.history if each.environment_steps < agent.environment_steps]
        reached = max((each.environment_steps for each in self.history), default=0)
        is_score = any(reached < steps <= agent.environment_steps for steps in SCORES.values())
        if self.part == self.reported or is_score:
            reported = self._play(self._played(self.reported)) if self.part != self.reported else returns
            self.history.append(Evaluation(agent.environment_steps, agent.num_timesteps, tuple(reported)))
        of_papers = {f"score/{name}": value for name, value in scores(self.history).items()}
        return {f"return/{name}": value for name, value in summary(returns).items()} | of_papers

    def _play(self, seed: int, observations: list[Any] | None = None) -> list[float]:
        config = self.config
        if config.evaluation_seeds == "first":
            return evaluate(self.agent, self._evaluation_env, config.episodes, seed, observations=observations)
        if config.evaluation_workers == 1:
            return evaluate_each(self.agent, self._evaluation_env, config.episodes, seed, observations)
        if self._players is None:
            self._players = WorkerVecEnv([self._make] * min(config.evaluation_workers, config.episodes))
        return evaluate_each(self.agent, self._players, config.episodes, seed, observations)

    def diagnostic_pairs(self) -> Pairs | None:
        """Return one batch of the replay buffer as pairs, or None without an objective or a full batch."""
        if self.agent.contrast is None or len(self.agent.replay_buffer) < self.batch_size:
            return None
        batch = next(self.batches(0, self.agent.num_timesteps))
        if not self.agent.compile:
            return self.embed(batch)
        with torch.compiler.set_stance("force_eager"):  # the gradients of several terms are taken
            return self.embed(batch)

    @torch.no_grad()
    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        """Embeddings of observations of the last evaluation (of a played episode where there was none)."""
        if not self._observations:
            evaluate(self.agent, self._evaluation_env, 1, self._played(self.part), observations=self._observations)
            self._observations = self._observations[:_KEPT]
        seen, encoder = self.agent.seen, self.agent.policy.encoder
        stacked = stack(self._observations)
        if seen.image is None:
            return torch.from_numpy(seen.state(stacked)).float().to(measuring_device(self.device)), None
        images = torch.from_numpy(seen.pixels(stacked)).to(self.device)
        found = [encoder.head(encoder.convolve(encoder.centre(part))) for part in images.split(128)]
        return torch.cat(found).float().to(measuring_device(self.device)), None

    def data_info(self) -> dict[str, Any]:
        if self._info is not None:
            return self._info
        env = self._evaluation_env
        first, _ = env.reset(seed=0)
        repeat = getattr(env.unwrapped, "action_repeat", 1)
        described = {"task": self.config.task, "environment": self.config.environment(), "action_repeat": repeat}
        observed = parts(first)
        content = b"".join(np.ascontiguousarray(each).tobytes() for each in observed.values())
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode() + content)
        shapes = {f"observation/{key}".rstrip("/"): list(np.shape(each)) for key, each in observed.items()}
        return {
            "name": self.config.task,
            "fingerprint": digest.hexdigest()[:16],
            "sizes": {**shapes, "replay_bytes": self.agent.replay_buffer.nbytes},
            "action_repeat": repeat,
            "environment_steps": self.agent.environment_steps,
            "agent_steps": self.agent.num_timesteps,
            "faults": len(self.agent.faults),
        }

    def state_dict(self) -> dict[str, Any]:
        folder = snapshots.save_newest(self.agent, self.workdir / "checkpoints")
        history = [[each.environment_steps, each.agent_steps, list(each.returns)] for each in self.history]
        return {"agent": folder.name, "history": history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending = snapshots.named(self.workdir / "checkpoints", state["agent"])
        snapshots.check(self._pending)
        self.history = [Evaluation(steps, agent, tuple(returns)) for steps, agent, returns in state["history"]]

    def keep(self, folder: Path) -> None:
        # With the spaces the agent is built without its environment.
        told = {**saved_agent.told_spaces(self.agent), "info": self.data_info()}
        (folder / _FILE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    def embedder(self, features: str | None = None, objective: Any = None) -> Embedder:
        raise ConfigError(f"{self.workdir} {NO_VECTORS}")

    def export(self, to: str, folder: Path, record: Any, objective: Any = None) -> None:
        """Write the folder of a trained agent for stable-baselines3, or in the layout of huggingface_sb3."""
        agent, train = self.agent, record.config["train"]
        agent._adopt(objective, learning_rate=train["learning_rate"], precision=_PRECISIONS[train["precision"]])
        agent.num_timesteps, agent.environment_steps = record.data["agent_steps"], record.data["environment_steps"]
        if to == "sb3":
            export_sb3(agent, folder, record, self.data_info())
            return
        export_hub(agent, folder, record, self.data_info(), self._evaluation_env, self.config.episodes, self.seed.probe)


def _example(objective: Composite, dim: int, count: int, positives: int | None) -> Pairs:
    """Return random anchors and keys of a number of observations, paired as the agent pairs them."""
    keys = positives or objective.positives_wanted or 1
    return Pairs.cross(torch.randn(count, dim), torch.randn(count, keys, dim))


class _Report(BaseCallback):
    """Reports agent steps to the run between rollouts. There, evaluation and checkpoints are safe."""

    def __init__(self, run: Run, adapter: RLAdapter) -> None:
        super().__init__()
        self.run = run
        self.adapter = adapter
        self.episodes = adapter.agent._episode_num  # more than 0 after a resume: their returns are in the metrics

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
        if agent.outcome is not None:
            self.run.note_terms(agent.outcome)
        steps = agent.environment_steps - self.run.step
        if steps:
            self.run.advance(values, steps)
