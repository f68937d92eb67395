"""Every setting of the agent by name, and the presets: the CURL repository's values, and the paper's."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from stable_baselines3.common.noise import ActionNoise

from dipole.core.ground.errors import ConfigError, nearest
from dipole.rl.arguments import SEED, is_number, is_seed, is_whole, plain


@dataclass(frozen=True)
class Settings:
    """Settings of `ContrastiveSAC`; the defaults are those of the CURL repository (MishaLaskin/curl, 8416d6e).

    Args:
        objective: text of the contrastive objective, or "none" (augmentation alone, the control).
        bilinear_init: how a bilinear W starts: "uniform" on [0, 1) as the repository, or "identity".
        image_size: height and width that the network sees; see `augmentation.resolve`.
        crop_inclusive: False never draws the last crop offset (the repository's off-by-one).
        positives: views of each observation besides the anchor; by default what the objective asks for
            (cacr(k=4)), or 1.
        exclude_duplicates: keep exact duplicates in a batch out of the negatives.
        batch_size, buffer_size: in transitions.
        learning_starts: agent steps of uniform actions before the first update.
        gamma: discount.
        learning_rate: of actor and critic; a number or a function of the remaining progress (1 to 0).
        encoder_learning_rate: of the contrastive steps; that of the critic if None.
        beta: Adam's first decay of actor, critic and encoder.
        temperature_learning_rate, temperature_beta: of the entropy temperature's own Adam.
        initial_temperature: of the entropy bonus.
        actor_every, target_every, contrast_every: updates between steps of the actor, the targets, the contrast.
        tau, encoder_tau: share of the online network in each target step, for the Q functions and the encoder.
        encoder_steps: optimizers that step the encoder on the contrastive gradient; 2 is the repository's oddity.
        twin_loss: "sum" adds the two squared errors, "half" halves each (SAC's paper).
        detach_encoder: the critic loss stops at the convolutions.
        joint_backward: one backward pass for critic and contrast, one encoder step for their sum (not the papers').
        hidden: widths of actor and critic.
        features, layers, filters: width of the embedding, number and channels of the convolutions.
        tanh: apply tanh to the embedding (SAC-AE's encoder does, CURL's repository never does).
        log_std_bounds: range of the actor's log standard deviation.
        precision: "float32" or "bf16" (autocast).
        channels_last: memory layout of the convolutions.
        chunk: rows that go through the encoder at once on the CPU (0: all).
    """

    objective: str = "infonce(similarity=bilinear, temperature=1)"
    bilinear_init: Literal["uniform", "identity"] = "uniform"
    image_size: int | None = None
    crop_inclusive: bool = False
    positives: int | None = None
    exclude_duplicates: bool = False
    batch_size: int = 128
    buffer_size: int = 100_000
    learning_starts: int = 1000
    gamma: float = 0.99
    learning_rate: float | Callable[[float], float] = 1e-3
    encoder_learning_rate: float | None = None
    beta: float = 0.9
    temperature_learning_rate: float = 1e-4
    temperature_beta: float = 0.5
    initial_temperature: float = 0.1
    actor_every: int = 2
    target_every: int = 2
    contrast_every: int = 1
    tau: float = 0.01
    encoder_tau: float = 0.05
    encoder_steps: Literal[1, 2] = 2
    twin_loss: Literal["sum", "half"] = "sum"
    detach_encoder: bool = False
    joint_backward: bool = False
    hidden: tuple[int, ...] = (1024, 1024)
    features: int = 50
    layers: int = 4
    filters: int = 32
    tanh: bool = False
    log_std_bounds: tuple[float, float] = (-10.0, 2.0)
    precision: Literal["float32", "bf16"] = "float32"
    channels_last: bool = True
    chunk: int = 64


PRESETS = {
    # The repository as its run script calls it.
    "curl": Settings(),
    # Laskin et al. 2020 and, for the batch, the authors' correction (512 in the final runs): one encoder step, every
    # crop offset, SAC's halved twin loss.
    "paper": Settings(batch_size=512, encoder_steps=1, crop_inclusive=True, twin_loss="half"),
    # Two cores: a quarter of the pixels and filters, one backward pass. For learning checks, not for the tables.
    "small": Settings(
        batch_size=64,
        buffer_size=20_000,
        learning_starts=500,
        hidden=(256, 256),
        filters=16,
        joint_backward=True,
        crop_inclusive=True,
    ),
}

_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "bilinear_init": ("uniform", "identity"),
    "encoder_steps": (1, 2),
    "twin_loss": ("sum", "half"),
    "precision": ("float32", "bf16"),
}
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "image_size": (1, 4096),
    "positives": (1, 64),
    "batch_size": (2, 1 << 20),
    "buffer_size": (2, 1 << 40),
    "learning_starts": (0, 1 << 40),
    "gamma": (0, 1),
    "learning_rate": (0, 10),
    "encoder_learning_rate": (0, 10),
    "beta": (0, 0.999999),
    "temperature_learning_rate": (0, 10),
    "temperature_beta": (0, 0.999999),
    "initial_temperature": (1e-12, 1e12),
    "actor_every": (1, 1 << 40),
    "target_every": (1, 1 << 40),
    "contrast_every": (1, 1 << 40),
    "tau": (0, 1),
    "encoder_tau": (0, 1),
    "features": (1, 1 << 20),
    "layers": (1, 16),
    "filters": (1, 4096),
    "chunk": (0, 1 << 40),
}
NAMES = tuple(field.name for field in fields(Settings))


def resolve(preset: str, overrides: Mapping[str, Any]) -> Settings:
    """Return a preset with settings replaced.

    Raises:
        ConfigError: for an unknown preset or setting, or a value out of range; with the nearest name.
    """
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}.{nearest(str(preset), PRESETS)} Allowed: {', '.join(PRESETS)}.")
    overrides = {name: plain(value) for name, value in overrides.items()}
    for name, value in overrides.items():
        if name not in NAMES:
            raise ConfigError(f"no setting {name!r}.{nearest(name, NAMES)} Settings: {', '.join(NAMES)}.")
        _check(name, value)
    chosen = replace(PRESETS[preset], **overrides)
    low, high = chosen.log_std_bounds
    return replace(chosen, hidden=tuple(chosen.hidden), log_std_bounds=(low, high))


def check_sb3(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a wrong value among SB3's own keywords, which SB3 would meet later and less clearly."""
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "seed": (is_seed, SEED),
        "train_freq": (_is_frequency, "an integer >= 1, or (an integer >= 1, 'step' or 'episode')"),
        "gradient_steps": (lambda v: is_whole(v) and v >= -1, "an integer >= 0, or -1 (one for each transition)"),
        "target_entropy": (lambda v: v == "auto" or (is_number(v) and math.isfinite(v)), "'auto' or a number"),
        "action_noise": (lambda v: v is None or isinstance(v, ActionNoise), "an ActionNoise of SB3, or None"),
    }
    for name, (right, wanted) in rules.items():
        if name in given and not right(given[name]):
            raise ConfigError(f"{name} must be {wanted}, got {given[name]!r}.")


def _is_frequency(value: Any) -> bool:
    count, unit = value if isinstance(value, tuple) and len(value) == 2 else (value, "step")
    return is_whole(count) and count >= 1 and unit in ("step", "episode")


def _check(name: str, value: Any) -> None:
    default = getattr(Settings, name)
    if value is None and default is not None:
        raise ConfigError(f"{name} must not be None; leave it out for the preset's value.")
    if name == "hidden" and not (isinstance(value, (tuple, list)) and all(is_whole(v) and v > 0 for v in value)):
        raise ConfigError(f"hidden must be a list of layer widths, integers >= 1, got {value!r}.")
    if name == "log_std_bounds" and not (
        isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_number, value)) and value[0] < value[1]
    ):
        raise ConfigError(f"log_std_bounds must be (low, high) with low < high, got {value!r}.")
    if name in _CHOICES and value not in _CHOICES[name]:
        allowed = ", ".join(map(repr, _CHOICES[name]))
        raise ConfigError(f"{name} must be one of {allowed}, got {value!r}.")
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}.")
    if name in _BOUNDS and value is not None and not (name == "learning_rate" and callable(value)):
        low, high = _BOUNDS[name]
        whole = isinstance(default, int) or name in ("image_size", "positives")
        kind = "an integer" if whole else "a number"
        right = is_whole(value) if whole else is_number(value)
        if not right or not low <= value <= high:
            raise ConfigError(f"{name} must be {kind} between {low:g} and {high:g}, got {value!r}.")
