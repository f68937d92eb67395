"""The [rl] table of a recipe: the environment, its evaluation, and the agent's settings."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from dipole.core.utils.errors import ConfigError
from dipole.rl.envs.registry import find
from dipole.rl.sb3_names import read_zoo
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
