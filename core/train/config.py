"""The tables of a recipe as strict, frozen models: the base of every table, [train], and the recipe itself."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from dipole.core.train import identity
from dipole.core.train import schedule as schedules
from dipole.core.utils.errors import ConfigError, nearest


class Settings(BaseModel):
    """Base of every table of a recipe: strict types, no unknown keys, frozen, finite numbers.

        >>> class RingsConfig(Settings):
        ...     points: int = 64
        >>> RingsConfig(points=32).determining()
        {'points': 32}

    A field that may be None must have None as its default: TOML has no null, so None is written by leaving the key out.

    Attributes:
        incidental: fields that do not change a run's result, such as a cache folder. They do not identify a run.
        defaults_version: raise it when the default of a field changes, so that new runs get other ids. A new field
            with a default needs nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)
    incidental: ClassVar[frozenset[str]] = frozenset()
    defaults_version: ClassVar[int] = 1

    def determining(self) -> dict[str, Any]:
        """Return the values that determine the result of a run: those that differ from the defaults, as JSON values.

        A table with a preset extends this and returns the values of the preset.
        """
        found: dict[str, Any] = {}
        if self.defaults_version > 1:
            found["defaults_version"] = self.defaults_version
        for name, (default, usual) in _defaults(type(self)).items():
            value = getattr(self, name)
            values = _determining(value, default)
            # A nested table may add values of its own (defaults_version, a preset).
            if values != usual or (values and isinstance(value, Settings)):
                found[name] = values
        return found

    def named_code(self) -> Iterable[Any]:
        """Return the classes and functions named in this table, for `identity.foreign_sources`."""
        return ()

    @classmethod
    def train_defaults(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a domain's defaults for [train].

        Args:
            values: the table's keys in a recipe.
        """
        return {}


@cache
def _defaults(table: type[Settings]) -> dict[str, tuple[Any, Any]]:
    """Return the default of each field that identifies a run, as it is and as `determining` has it."""
    fields = {name: field for name, field in table.model_fields.items() if name not in table.incidental}
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    return {name: (default, _determining(default, default)) for name, default in defaults.items()}


def _determining(value: Any, default: Any = None) -> Any:
    if isinstance(value, Settings):
        fields = type(value).model_fields.items() if type(value) is not type(default) else ()
        # A field with one allowed value is the tag of a union of tables.
        tags = {
            name: getattr(value, name)
            for name, field in fields
            if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        }
        return tags | value.determining()
    if isinstance(value, Mapping):
        return {str(key): _determining(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_determining(each) for each in value]
    return value


CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# Modes that replay CUDA graphs. The next step overwrites the outputs of a graph.
GRAPHED: tuple[CompileMode, ...] = ("reduce-overhead", "max-autotune")
ALLOWED_MODES = f"True, False or one of {', '.join(map(repr, get_args(CompileMode)))}"
RateSchedule = Literal["constant", "cosine", "step"]
DEVICES = r"^(auto|cpu|mps|cuda(:\d+)?)$"
RATE = "learning_rate"
"""The entry of [train.schedule] that `schedule = "..."` sets."""


EvaluatedPart = Literal["test", "validation"]


class TrainConfig(Settings):
    """The [train] table. Lengths and periods are in epochs when `epochs` is given, in steps when `steps` is given."""

    epochs: int | None = Field(None, ge=1, description="length of the run in epochs")
    steps: int | None = Field(None, ge=1, description="length of the run in steps (give this or epochs)")
    batch_size: int = Field(256, ge=2, description="instances per step over all ranks")
    optimizer: Literal["adam", "adamw", "sgd", "lars"] = Field("adam", description="what takes the steps")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0, description="of the optimizer, not of learned temperatures")
    betas: tuple[float, float] | None = Field(None, description="adam and adamw only (default (0.9, 0.999))")
    momentum: float | None = Field(None, ge=0, lt=1, description="sgd and lars only (default 0.9)")
    schedule: RateSchedule | dict[str, Any] = Field(
        "constant",
        description="of the learning rate: constant, cosine or step; as a table [train.schedule] also of weights and "
        'options of terms, such as "dp.weight" = "linear(0, 0.1)"',
    )
    milestones: tuple[float, ...] | None = Field(None, description="step schedule only: when decay multiplies the rate")
    decay: float | None = Field(None, gt=0, le=1, description="step schedule only (default 0.1)")
    warmup: float = Field(0.0, ge=0, description="linear warm-up from 0")
    clip: float | None = Field(None, gt=0, description="largest gradient norm over all parameters (default none)")
    precision: Annotated[Literal["32", "bf16-mixed", "16-mixed"], BeforeValidator(str)] = Field(
        "32", description="of the encoder (16-mixed: float16 with loss scaling, for GPUs without bf16)"
    )
    microbatch: int | None = Field(None, ge=1, description="rows per encoder call on each rank (the loss sees all)")
    activation_checkpointing: bool = Field(False, description="save memory: compute activations again in backward")
    compile: bool | CompileMode = Field(False, description="compile the encoders: true, or a mode of torch.compile")
    sync_batch_norm: bool = Field(False, description="batch norm takes its statistics from the rows of all ranks")
    evaluate_on: EvaluatedPart = Field(
        "test", description="validation: evaluate a share of the training data instead, to choose settings"
    )
    validation_share: float = Field(0.2, gt=0, lt=1, description="of the training data, set aside for validation")
    curves_on: EvaluatedPart = Field(
        "validation", description="part for evaluations before the end. The one at the end is of evaluate_on"
    )
    evaluate_every: int | None = Field(None, ge=1, description="period of evaluation (default: only at the end)")
    best_by: str | None = Field(
        None, description="keep the weights where this result was largest (smallest: -NAME), not the last"
    )
    checkpoint_every: int | None = Field(None, ge=1, description="period of checkpoints (default 1 epoch, 1000 steps)")
    log_every: int = Field(10, ge=1, description="steps per line of metrics.jsonl")

    # RunConfig adds `curves_on` to the identity, depending on the domain.
    incidental: ClassVar[frozenset[str]] = frozenset(
        {"checkpoint_every", "log_every", "activation_checkpointing", "curves_on"}
    )

    @field_validator("schedule", mode="before")
    @classmethod
    def _one_spelling(cls, value: Any) -> Any:
        """Normalise to dotted names. The learning rate's entry alone becomes plain text."""
        entries = dict(schedules.flat(value)) if isinstance(value, Mapping) else {RATE: value}
        rate, allowed = entries.pop(RATE, "constant"), get_args(RateSchedule)
        if rate not in allowed:
            near = nearest(str(rate), allowed)
            raise ValueError(f"{str(rate)[:80]!r} is not allowed.{near} Allowed: {', '.join(allowed)}, or a table")
        problems, curves = [], {}
        for name, each in entries.items():
            try:
                curves[name] = schedules.read(each).plain()
            except ValueError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        if not curves:
            return rate
        if rate != "constant":
            curves = {RATE: rate} | curves
        return curves

    @field_validator("compile", mode="before")
    @classmethod
    def _one_mode(cls, value: Any) -> Any:
        modes = get_args(CompileMode)
        if not isinstance(value, bool) and value not in modes:
            raise ValueError(f"must be {ALLOWED_MODES}, got {str(value)[:80]!r}.{nearest(str(value), modes)}")
        return value

    @model_validator(mode="after")
    def _complete(self) -> "TrainConfig":
        """Check that the settings fit together, and fill in defaults that depend on others."""
        problems = []
        is_adam, is_stepped = self.optimizer in ("adam", "adamw"), self.rate_schedule == "step"
        if self.epochs is None and self.steps is None:
            problems.append("give epochs or steps")
        if self.epochs is not None and self.steps is not None:
            problems.append("give either epochs or steps, not both; --set train.epochs= takes the recipe's away")
        if is_adam and self.momentum is not None:
            problems.append(f"momentum has no effect with optimizer {self.optimizer!r}. Use sgd or lars, or betas")
        if not is_adam and self.betas is not None:
            problems.append(f"betas has no effect with optimizer {self.optimizer!r}. Use momentum")
        if not all(0 <= beta < 1 for beta in self.betas or ()):
            problems.append(f"betas must lie in [0, 1), got {list(self.betas or ())}")
        if is_stepped:
            if not self.milestones or list(self.milestones) != sorted(self.milestones) or self.milestones[0] < 0:
                problems.append("schedule 'step' needs milestones in increasing order, such as [60, 80]")
        elif self.milestones is not None or self.decay is not None:
            problems.append(f"milestones and decay have no effect with schedule {self.rate_schedule!r}. Use 'step'")
        if self.best_by is not None and self.evaluate_every is None:
            problems.append("best_by chooses among the evaluations of a run. Set evaluate_every")
        if self.part == "test" and self.validation_share != type(self).model_fields["validation_share"].default:
            problems.append(
                "validation_share has no effect with evaluate_on 'test'. Use evaluate_on 'validation', or "
                "evaluate_every with curves_on 'validation'"
            )
        if self.curves_on == "test" and (self.evaluate_on == "validation" or self.evaluate_every is None):
            problems.append("curves_on 'test' has an effect with evaluate_on 'test' and evaluate_every alone")
        if 0 < self.length < self.warmup:
            problems.append(f"warmup ({self.warmup:g}) is longer than the run ({self.length} {self.unit})")
        if problems:
            raise ValueError("; ".join(problems))
        for key, value, applies in (
            ("checkpoint_every", {"epochs": 1, "steps": 1000}[self.unit], True),
            ("betas", (0.9, 0.999), is_adam),
            ("momentum", 0.9, not is_adam),
            ("decay", 0.1, is_stepped),
        ):
            if applies and getattr(self, key) is None:
                self.__dict__[key] = value  # the model is frozen, and the stored configuration must be complete
        return self

    @property
    def rate_schedule(self) -> str:
        """Return the schedule of the learning rate."""
        return str(self._scheduled.get(RATE, "constant"))

    @property
    def _scheduled(self) -> dict[str, Any]:
        return {RATE: self.schedule} if isinstance(self.schedule, str) else self.schedule

    @property
    def part(self) -> EvaluatedPart:
        """Return the part of the data for evaluations during training, if the domain has a validation part."""
        if "validation" in (self.evaluate_on, self.evaluate_every and self.curves_on):
            return "validation"
        return "test"

    @property
    def curves(self) -> "dict[str, schedules.Interpolation]":
        """Return the curves of weights and options by "TERM.weight" or "TERM.OPTION"."""
        return {name: schedules.read(value) for name, value in self._scheduled.items() if name != RATE}

    @property
    def unit(self) -> Literal["epochs", "steps"]:
        """Return the unit of lengths and periods in this table."""
        return "steps" if self.steps is not None else "epochs"

    @property
    def length(self) -> int:
        """Length of the run, in `unit`."""
        return self.steps or self.epochs or 0

    def in_steps(self, amount: float, steps_per_epoch: int) -> int:
        """Convert a length or period of this table to steps.

        Args:
            amount: in epochs or steps, >= 0.
            steps_per_epoch: >= 1.
        """
        if self.unit == "epochs":
            amount *= steps_per_epoch
        return round(amount)


class RunConfig(Settings):
    """A complete recipe. The domain's table is a field with the domain's name. `settings` returns it."""

    name: str = Field("run", description="label in tables (not part of the hash)")
    description: str = Field("", description="one sentence (not part of the hash)")
    domain: str = Field(description="what is trained, and the name of its table")
    objective: str = Field("infonce", description="text such as 'infonce(temperature=0.5) + 0.1*dp'")
    seed: int = Field(0, ge=0, description="that everything random is drawn from")
    device: str = Field("auto", pattern=DEVICES, description="auto, cpu, cuda, cuda:1, mps")
    deterministic: bool = Field(False, description="refuse operations without a deterministic implementation")
    train: TrainConfig = Field(description="the [train] table")

    incidental: ClassVar[frozenset[str]] = frozenset({"name", "description", "device"})
    domain_class: ClassVar[type | None] = None
    """The domain's adapter. Its source may be part of the run's identity."""

    @field_validator("objective")
    @classmethod
    def _canonical(cls, text: str) -> str:
        """Check an objective's text and return its canonical spelling ("none" stays)."""
        return "none" if text.strip().lower() == "none" else str(_build(text))

    @model_validator(mode="after")
    def _schedules_fit(self) -> "RunConfig":
        if curves := self.train.curves:
            built = None if self.objective == "none" else _build(self.objective)
            if problems := schedules.check(curves, built, self.train.length):
                raise ValueError("; ".join(problems))
        return self

    @property
    def settings(self) -> Any:
        """The domain's own table."""
        return getattr(self, self.domain)

    def determining(self) -> dict[str, Any]:
        """Return the identity of the run (`core/train/identity.py`)."""
        found = super().determining()
        code: list[Any] = [type(self.settings), *self.settings.named_code()]
        if self.domain_class is not None:
            code.append(self.domain_class)
        terms: Any = "none"
        if self.objective != "none":
            objective = _build(self.objective)
            code += [type(term) for _, _, term in objective]
            terms = identity.written_out(objective)
        if self.train.part != self.train.evaluate_on and getattr(self.domain_class, "sets_aside", False):
            found["train"]["curves_on"] = "validation"
        return found | {"schema": identity.SCHEMA, "objective": terms, "sources": identity.foreign_sources(code)}

    @property
    def hash(self) -> str:
        """Twelve hex digits that name the run."""
        return identity.values_hash(self.determining())

    def to_toml(self, origins: Mapping[str, str] | None = None) -> str:
        """Return the complete configuration as TOML. `recipe.resolve` reads it back to an equal one.

        Args:
            origins: dotted path -> where the value comes from, written as comments (`--print-config`).

        Raises:
            ConfigError: a value has no TOML that reads back to it.
        """
        text = toml_text(self.model_dump(mode="json", exclude_none=True), origins)
        if type(self).model_validate_json(json.dumps(tomllib.loads(text))) != self:
            raise ConfigError(f"this configuration cannot be written as TOML without loss:\n{text}")
        return text


def _build(text: str) -> Any:
    from dipole.core.objectives.objective import objective  # late: it loads torch

    return objective(text)


# TOML, which the standard library only reads --------------------------------------------------------------------------


def toml_text(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> str:
    """Write nested mappings of strings, numbers, booleans and lists as TOML, plain values before tables."""
    return "\n".join(_lines(values, (), origins or {})).strip("\n") + "\n"


def _lines(values: Mapping[str, Any], prefix: tuple[str, ...], origins: Mapping[str, str]) -> Iterator[str]:
    for key, value in sorted(values.items(), key=lambda item: isinstance(item[1], Mapping)):
        path = (*prefix, key)
        if isinstance(value, Mapping):
            yield f"\n[{'.'.join(map(_key, path))}]"
            yield from _lines(value, path, origins)
        else:
            origin = origins.get(".".join(path), "")
            yield f"{_key(key)} = {_value(value)}" + f"  # {origin}" * bool(origin)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)  # also nan and inf
    if isinstance(value, bool | int | str):
        # JSON's escapes are TOML's, except that TOML also asks for DEL to be escaped and forbids surrogate pairs.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence) and value and all(isinstance(each, Mapping) for each in value):
        return "[\n" + "".join(f"    {_value(each)},\n" for each in value) + "]"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    raise ConfigError(f"a value of type {type(value).__name__} cannot be written as TOML: {value!r}")
