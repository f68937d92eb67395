"""All settings of the agents: their ranges, defaults and presets.

They are keywords of `ContrastiveSAC` and `ContrastiveDrQ`, and keys of a recipe's [rl] table. An agent stores each one
in an attribute: in SB3's own if SB3 has one (`ATTRIBUTES`), otherwise in one with the setting's name.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from dipole.core.train.config import ALLOWED_MODES, CompileMode, Settings
from dipole.core.train.recipe import describe
from dipole.core.utils.errors import ConfigError, nearest
from dipole.rl.arguments import plain

MOST = 2**62  # PyTorch counts rows in 64 bits
Rate = Annotated[float, Field(ge=0, le=10)]
Share = Annotated[float, Field(ge=0, le=1)]
Period = Annotated[int, Field(ge=1)]
Beta = Annotated[float, Field(ge=0, le=0.999999)]
AlgorithmName = Literal["sac", "drq"]
Preset = Literal["curl", "paper", "small", "sb3", "drqv2"]
Storage = Literal["auto", "host", "device", "disk"]
"""The place of replay's frames."""
Inputs = Literal["auto", "pixels", "state", "both"]
"""The part of an observation that an agent sees."""

CURL_OBJECTIVE = "infonce(similarity=bilinear, temperature=1)"
"""The loss of a CURL agent (Laskin et al. 2020). At the default temperature 0.5 its gradient is 1.9 times as long."""

# The preset of an algorithm where none is given.
DEFAULT: dict[str, Preset] = {"sac": "curl", "drq": "drqv2"}

_PRESETS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("presets.toml").read_text("utf-8"))
_WIDTHS = "a list of layer widths, integers >= 1"
# The allowed values of settings whose types are too complex for pydantic's own messages.
_IN_WORDS = {
    "hidden": _WIDTHS,
    "critic_hidden": _WIDTHS,
    "train_freq": "an integer >= 1, or (an integer >= 1, 'step' or 'episode')",
    "log_std_bounds": "(low, high) with low < high",
    "ent_coef": "'auto' or a number >= 0",
    "target_entropy": "'auto' or a number",
    "sde_sample_freq": "an integer >= 1, or -1 (one draw for each rollout)",
    "compile": ALLOWED_MODES,
    "learning_rate": "a number from 0 to 10, or a function of the remaining progress",
}
_OF_SDE = ("sde_sample_freq", "use_sde_at_warmup", "log_std_init", "use_expln", "clip_mean")

# Settings that algorithms but these have no use for.
USERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "temperature_learning_rate", "temperature_beta", "initial_temperature", "ent_coef", "target_entropy",
            "log_std_bounds", "encoder_steps", "twin_loss", "detach_encoder", "joint_backward", "use_sde", *_OF_SDE,
        ),
        ("sac",),
    ),
    **dict.fromkeys(
        ("target_views", "value_views", "noise_start", "noise_end", "noise_steps", "noise_clip"), ("drq",)
    ),
}  # fmt: skip


class AgentTable(Settings):
    """The settings of an agent in Python and in a recipe. The preset gives the missing ones."""

    algorithm: AlgorithmName = Field("sac", description="sac (CURL) or drq (DrQ-v2), which decides the presets")
    preset: Preset = Field("curl", description="gives the settings that are not named")
    inputs: Inputs = Field("auto", description="what is learned from: image, vectors, or both (auto: all)")
    bilinear_init: Literal["uniform", "identity"] = Field("uniform", description="start of W: on [0, 1), or identity")
    image_size: int | None = Field(None, ge=1, le=4096, description="what the network sees. Crops: 84 % of rendered")
    crop_inclusive: bool = Field(False, description="false never draws the last crop offset (the repository)")
    positives: int | None = Field(None, ge=1, le=64, description="views other than the anchor. Default the objective's")
    exclude_duplicates: bool = Field(False, description="keep exact duplicates in a batch out of the negatives")
    buffer_size: int = Field(100_000, ge=2, le=MOST, description="transitions in replay")
    learning_starts: int = Field(1000, ge=0, description="agent steps of uniform actions before the first update")
    train_freq: Period | tuple[Period, Literal["step", "episode"]] = Field(
        1, description="agent steps, or episodes, between updates"
    )
    gradient_steps: int = Field(-1, ge=-1, description="updates at a time (-1: one for each new transition)")
    gamma: Share = Field(0.99, description="discount")
    encoder_learning_rate: float | None = Field(None, ge=0, le=10, description="of the contrast. Default the critic's")
    beta: Beta = Field(0.9, description="Adam's first decay of actor, critic and encoder")
    temperature_learning_rate: Rate = Field(1e-4, description="of the entropy temperature's own Adam")
    temperature_beta: Beta = Field(0.5, description="first decay of the entropy temperature's own Adam")
    initial_temperature: float = Field(0.1, ge=1e-12, le=1e12, description="of the entropy bonus")
    ent_coef: Literal["auto"] | Annotated[float, Field(ge=0, le=1e12)] = Field(
        "auto", description="weight of the entropy (auto: learned)"
    )
    n_steps: int = Field(1, ge=1, le=1000, description="rewards in a return, as SB3's n-step replay counts them")
    target_entropy: Literal["auto"] | float = Field("auto", description="of the policy (auto: minus the action count)")
    actor_every: Period = Field(2, description="updates between steps of the actor")
    target_every: Period = Field(2, description="updates between steps of the targets")
    contrast_every: Period = Field(1, description="updates between steps of the contrast")
    tau: Share = Field(0.01, description="share of the online Q functions in each target step")
    encoder_tau: Share = Field(0.05, description="share of the online encoder in each target step")
    encoder_steps: Literal[1, 2] = Field(2, description="optimizers that step the encoder on the contrast's gradient")
    twin_loss: Literal["sum", "half"] = Field("sum", description="half halves each squared error (SAC's paper)")
    detach_encoder: bool = Field(False, description="the critic loss stops at the convolutions")
    joint_backward: bool = Field(False, description="one backward pass for critic and contrast (not the papers')")
    hidden: tuple[Period, ...] = Field((1024, 1024), description="widths of actor and critic")
    critic_hidden: tuple[Period, ...] | None = Field(None, description="widths of the critic. Default the actor's")
    n_critics: int = Field(2, ge=1, le=64, description="Q functions, of which the smallest counts")
    activation: Literal["ReLU", "Tanh", "ELU", "LeakyReLU", "SiLU", "GELU"] = Field(
        "ReLU", description="of the layers of actor and critic"
    )
    use_sde: bool = Field(False, description="generalised state-dependent exploration (gSDE), as SB3 has it")
    sde_sample_freq: Literal[-1] | Period = Field(-1, description="use_sde: agent steps between draws (-1: a rollout)")
    use_sde_at_warmup: bool = Field(False, description="use_sde: its noise before learning_starts as well")
    log_std_init: float = Field(-3.0, ge=-20, le=20, description="use_sde: log standard deviation at first")
    use_expln: bool = Field(False, description="use_sde: expln in place of exp, which grows more slowly")
    clip_mean: float = Field(2.0, ge=0, le=1e9, description="use_sde: largest mean before the tanh (0: not clipped)")
    features: int = Field(50, ge=1, le=65536, description="width of the embedding")
    layers: int = Field(4, ge=1, le=16, description="number of convolutions")
    filters: int = Field(32, ge=1, le=4096, description="channels of the convolutions")
    tanh: bool = Field(False, description="apply tanh to the embedding (SAC-AE does, CURL's repository never)")
    log_std_bounds: tuple[float, float] = Field((-10.0, 2.0), description="range of the actor's log standard deviation")
    target_views: int = Field(1, ge=1, le=16, description="drq: K, views of the next observation in a target")
    value_views: int = Field(1, ge=1, le=16, description="drq: M, views of an observation in the critic's loss")
    noise_start: float = Field(1.0, ge=0, le=10, description="drq: standard deviation of the actions' noise at first")
    noise_end: float = Field(0.1, ge=0, le=10, description="drq: the same at last")
    noise_steps: int = Field(500_000, ge=1, description="drq: agent steps from first to last, linearly")
    noise_clip: float = Field(0.3, ge=0, le=10, description="drq: largest noise in targets and in the actor's loss")
    channels_last: bool = Field(True, description="memory layout of the convolutions")
    compile: bool | CompileMode = Field(False, description="torch.compile the networks, in its default mode or another")
    chunk: int = Field(64, ge=0, le=MOST, description="rows that go through the encoder at once on the CPU (0: all)")

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        # Texts: pydantic refuses what is none.
        preset = given.get("preset", DEFAULT.get(str(given.get("algorithm", "sac")), "curl"))
        values = _PRESETS.get(str(preset), {})
        brought = {name: value for name, value in values.items() if name in cls.model_fields}
        return {"preset": preset, **brought, **dict(given)}

    @model_validator(mode="after")
    def _of_one_algorithm(self) -> Self:
        own = [name for name, values in _PRESETS.items() if values.get("algorithm", "sac") == self.algorithm]
        if self.preset not in own:
            raise ValueError(f"{self.preset!r} is no preset of {self.algorithm!r}. Its presets: {', '.join(own)}.")
        for name, users in USERS.items():
            if self.algorithm not in users and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} has no effect on the algorithm {self.algorithm!r}: it is a setting of {', '.join(users)}."
                )
        for name in ("log_std_bounds",) if self.use_sde else _OF_SDE:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with use_sde={self.use_sde}.")
        if self.log_std_bounds[0] >= self.log_std_bounds[1]:
            raise ValueError(f"log_std_bounds must be (low, high) with low < high, got {self.log_std_bounds!r}.")
        return self

    @field_validator(*_IN_WORDS, mode="wrap", check_fields=False)
    @classmethod
    def _in_words(cls, value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        if isinstance(value, list):  # TOML and JSON have no tuples
            value = tuple(value)
        try:
            return check(value)
        except ValidationError:
            # pydantic would say what is wrong with each alternative and each element.
            raise ValueError(f"must be {_IN_WORDS[str(info.field_name)]}, got {value!r}.") from None


class AgentSettings(AgentTable):
    """All settings of an agent. A recipe has these four in `objective` and in [train].

    Attributes:
        objective: text of the contrastive objective, or "none" (augmentation alone, the control).
        batch_size: transitions in an update.
        learning_rate: of actor and critic: a number, or a function of the remaining progress (1 to 0).
        precision: "float32" or "bf16" (autocast).
    """

    objective: str = CURL_OBJECTIVE
    batch_size: int = Field(128, ge=2, le=MOST)
    learning_rate: Rate | Callable[[float], float] = 1e-3
    precision: Literal["float32", "bf16"] = "float32"


def augmentation(preset: str) -> str:
    """Return the augmentation of a preset, which is no setting of the networks."""
    return str(_PRESETS[preset].get("augmentation", "crop"))


PRESETS = {name: AgentSettings.model_validate({"preset": name}) for name in get_args(Preset)}
NAMES = tuple(AgentSettings.model_fields)

# Settings that SB3 stores under another name.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "sac": {"target_every": "target_update_interval"},
    "drq": {"actor_every": "policy_delay", "noise_clip": "target_noise_clip"},
}

# Settings that never change: an agent's weights or optimizers depend on them, or they only matter at the start.
FIXED = (
    "algorithm", "preset", "inputs", "objective", "image_size", "features", "layers", "filters", "hidden",
    "critic_hidden", "n_critics", "use_sde", "log_std_init", "bilinear_init", "ent_coef", "initial_temperature",
    "encoder_steps", "joint_backward",
)  # fmt: skip
# What can change when an agent is loaded, but not by an assignment: networks and replay are made with it.
WHEN_LOADED = (
    "crop_inclusive", "positives", "activation", "tanh", "log_std_bounds", "use_expln", "clip_mean", "channels_last",
    "compile", "chunk", "augmentation", "storage", "device",
)  # fmt: skip


@cache
def attributes(algorithm: str) -> dict[str, str]:
    """Return the settings that an algorithm has, and the agent's attribute that stores each."""
    used = [name for name in NAMES if name != "algorithm" and algorithm in USERS.get(name, (algorithm,))]
    return {name: ATTRIBUTES[algorithm].get(name, name) for name in used}


@cache
def by_attribute(algorithm: str) -> dict[str, str]:
    """Return the agent's attributes that store settings, or what it is made with, and the keyword of each."""
    found = {attribute: name for name, attribute in attributes(algorithm).items()}
    return found | {name: name for name in ("augmentation", "storage", "device")}


def require_changeable(names: Iterable[str]) -> None:
    """Raise ConfigError for a setting that cannot change any more."""
    for name in names:
        if name in FIXED:
            raise ConfigError(
                f"{name} cannot change, because the agent's weights and optimizers depend on it. Make a new agent with "
                "this setting."
            )


def from_preset(preset: str, overrides: Mapping[str, Any], besides: Iterable[str] = ()) -> AgentSettings:
    """Return a preset with settings replaced. NumPy's numbers count as Python's.

    Raise ConfigError for an unknown name (with the nearest, of `besides` too) or a value out of range.
    """
    try:
        return AgentSettings.model_validate(
            {"preset": preset, **{name: plain(each) for name, each in overrides.items()}}
        )
    except ValidationError as error:
        problem = error.errors()[0]
        if not problem["loc"]:  # what settings are together
            raise ConfigError(str(problem["ctx"]["error"])) from None
        if problem["type"] == "extra_forbidden":
            name, names = str(problem["loc"][0]), sorted({*NAMES, *besides})
            raise ConfigError(
                f"there is no setting {name!r}.{nearest(name, names)} Settings: {', '.join(names)}."
            ) from None
        raise ConfigError(describe(error, AgentSettings)[0]) from None
