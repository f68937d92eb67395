"""From a TOML recipe and `--set` overrides to one frozen, complete, hashed configuration.

Precedence: defaults < recipe < --set. All problems of a configuration are reported in one ConfigError.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator, model_validator

from dipole.core.ground.errors import ConfigError, nearest
from dipole.core.train.shipped import shipped_recipes


class Settings(BaseModel):
    """Base of every table of a recipe: strict types, no unknown keys, frozen, finite numbers.

    A field that may be None must have None as its default: TOML has no null, so None is written by leaving the key out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    @classmethod
    def train_defaults(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """What a domain's table, given its keys in a recipe, puts into [train] where the recipe says nothing."""
        return {}


class TrainConfig(Settings):
    """The [train] table. Lengths and periods are in epochs when `epochs` is given, in steps when `steps` is given."""

    epochs: int | None = Field(default=None, ge=1, description="length of the run in epochs")
    steps: int | None = Field(default=None, ge=1, description="length of the run in steps (give this or epochs)")
    batch_size: int = Field(default=256, ge=2, description="instances per step over all ranks")
    optimizer: Literal["adam", "adamw", "sgd", "lars"] = "adam"
    learning_rate: float = Field(default=1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] | None = Field(default=None, description="adam and adamw only; default (0.9, 0.999)")
    momentum: float | None = Field(default=None, ge=0, lt=1, description="sgd and lars only; default 0.9")
    schedule: Literal["constant", "cosine", "step"] = "constant"
    milestones: tuple[float, ...] | None = Field(
        default=None, description="step schedule only: where the rate is multiplied by decay"
    )
    decay: float | None = Field(default=None, gt=0, le=1, description="step schedule only; default 0.1")
    warmup: float = Field(default=0.0, ge=0, description="linear warm-up from 0")
    clip: float | None = Field(
        default=None, gt=0, description="largest gradient norm (over all parameters); none by default"
    )
    precision: Literal["32", "bf16-mixed"] = "32"
    evaluate_every: int | None = Field(default=None, ge=1, description="period of evaluation; default only at the end")
    checkpoint_every: int | None = Field(
        default=None, ge=1, description="period of checkpoints; default 1 epoch or 1000 steps"
    )
    log_every: int = Field(default=10, ge=1, description="steps per line of metrics.jsonl")

    @field_validator("precision", mode="before")
    @classmethod
    def _bits(cls, value: Any) -> Any:
        return "32" if value == 32 else value

    @model_validator(mode="after")
    def _complete(self) -> TrainConfig:
        """Check the settings against each other, and give those that depend on others their values."""
        problems = []
        if (self.epochs is None) == (self.steps is None):
            both = "give either epochs or steps, not both; --set train.epochs= takes the recipe's away"
            problems.append(both if self.epochs else "give epochs or steps")
        if self.optimizer in ("adam", "adamw"):
            if self.momentum is not None:
                problems.append(f"momentum has no effect with optimizer {self.optimizer!r}; use sgd or lars, or betas")
            if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
                problems.append(f"betas must lie in [0, 1), got {list(self.betas)}")
        elif self.betas is not None:
            problems.append(f"betas has no effect with optimizer {self.optimizer!r}; use momentum")
        if self.schedule == "step":
            if not self.milestones or list(self.milestones) != sorted(self.milestones) or self.milestones[0] < 0:
                problems.append("schedule 'step' needs milestones in increasing order, such as [60, 80]")
        elif self.milestones is not None or self.decay is not None:
            problems.append(f"milestones and decay have no effect with schedule {self.schedule!r}; use schedule 'step'")
        if self.length and self.warmup > self.length:
            problems.append(f"warmup ({self.warmup:g}) is longer than the run ({self.length} {self.unit})")
        if problems:
            raise ValueError("; ".join(problems))
        dependent: dict[str, Any] = {"checkpoint_every": 1000 if self.unit == "steps" else 1}
        if self.optimizer in ("adam", "adamw"):
            dependent["betas"] = (0.9, 0.999)
        else:
            dependent["momentum"] = 0.9
        if self.schedule == "step":
            dependent["decay"] = 0.1
        for key, value in dependent.items():
            if getattr(self, key) is None:
                # The model is frozen for everybody else: the stored configuration must be complete.
                self.__dict__[key] = value
        return self

    @property
    def unit(self) -> Literal["epochs", "steps"]:
        return "steps" if self.steps is not None else "epochs"

    @property
    def length(self) -> int:
        return self.steps or self.epochs or 0

    def in_steps(self, amount: float, steps_per_epoch: int) -> int:
        """Convert a length or period of this table to steps."""
        return round(amount if self.unit == "steps" else amount * steps_per_epoch)


class RunConfig(Settings):
    """A whole recipe. The table of the domain is a field of that name; `settings` returns it whatever the domain."""

    name: str = Field(default="run", description="label in tables; not part of the hash")
    description: str = Field(default="", description="one sentence; not part of the hash")
    domain: str
    objective: str = Field(default="infonce", description="text such as 'infonce(temperature=0.5) + 0.1*dp'")
    seed: int = Field(default=0, ge=0)
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto, cpu, cuda, cuda:1, mps"
    )
    deterministic: bool = Field(default=False, description="refuse operations without a deterministic implementation")
    train: TrainConfig

    @field_validator("objective")
    @classmethod
    def _canonical(cls, text: str) -> str:
        return canonical_objective(text)

    @property
    def settings(self) -> Any:
        """The domain's own table."""
        return getattr(self, self.domain)

    @property
    def hash(self) -> str:
        """Twelve hex digits that name the run: SHA-256 of every value except `name` and `description`."""
        values = self.model_dump(mode="json", exclude={"name", "description"})
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_toml(self, origins: Mapping[str, str] | None = None) -> str:
        """Write the complete configuration; `resolve` reads the text back to an equal one.

        Args:
            origins: dotted path -> where the value comes from, written as comments (`--print-config`).
        """
        text = toml_text(self.model_dump(mode="json", exclude_none=True), origins)
        again = resolve(tomllib.loads(text)).config
        if again != self:
            raise ConfigError(f"this configuration cannot be written as TOML without loss:\n{text}")
        return text


@dataclass(frozen=True)
class Resolved:
    """A configuration and where each of its values comes from (dotted path -> "default", "recipe" or "--set")."""

    config: RunConfig
    origins: dict[str, str]


def canonical_objective(text: str) -> str:
    """Check an objective's text and return it in the one spelling that is hashed ("none" stays)."""
    if text.strip().lower() == "none":
        return "none"
    from dipole.core.contrast.objective import objective

    return str(objective(text))


# Recipes and overrides -----------------------------------------------------------------------------------------------


def read_recipe(recipe: str | Path) -> dict[str, Any]:
    """Read a shipped recipe by name, or a TOML file by path."""
    shipped = shipped_recipes()
    path = Path(recipe)
    if str(recipe) in shipped:
        path = shipped[str(recipe)]
    elif not path.is_file():
        looks_like_path = path.suffix == ".toml" or len(path.parts) > 1
        if looks_like_path:
            raise ConfigError(f"no recipe file {str(path)!r}. Check the path, or see `dipole list recipes`.")
        raise ConfigError(
            f"unknown recipe {str(recipe)!r}.{nearest(str(recipe), shipped)} "
            f"Shipped recipes: {', '.join(shipped) or 'none'}; or give the path of a .toml file."
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


UNSET = object()


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split "a.b=value"; the value is read as TOML (3, 1e-3, true, [1, 2], "x") and as plain text where that fails.

    "a.b=" gives UNSET: the recipe's value is taken away.
    """
    path, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in path.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"--set {text!r} is not of the form key=value or table.key=value.")
    if not value.strip():
        return keys, UNSET
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return keys, value.strip()
    return keys, read["value"] if set(read) == {"value"} else value.strip()


def resolve(recipe: Mapping[str, Any], overrides: Iterable[str] = ()) -> Resolved:
    """Merge and check; every problem found is in the one ConfigError that is raised."""
    problems: list[str] = []
    values = cast(dict[str, Any], _copy(recipe))
    origins = dict.fromkeys(_paths(values), "recipe")
    for text in overrides:
        try:
            keys, value = parse_override(text)
            _assign(values, keys, value)
        except ConfigError as error:
            problems.append(str(error))
        else:
            origins = {
                path: source for path, source in origins.items() if not f"{path}.".startswith(".".join(keys) + ".")
            }
            if value is not UNSET:
                origins.update(dict.fromkeys(_paths(value, keys), "--set"))
    model: type[RunConfig] = RunConfig
    domain = values.get("domain")
    adapter = None
    if isinstance(domain, str):
        from dipole.core.train.domains import adapter_class

        try:
            adapter = adapter_class(domain)
            model = run_model(domain, adapter.config_model)
        except ConfigError as error:
            problems.append(f"domain: {error}")
    values.setdefault("train", {})
    if (
        adapter is not None
        and isinstance(values["train"], dict)
        and isinstance(table := values.get(str(domain), {}), dict)
    ):
        for key, value in adapter.config_model.train_defaults(table).items():
            if values["train"].setdefault(key, value) is value:
                origins.setdefault(f"train.{key}", "preset")
    config = None
    try:
        # JSON mode is strict about types but reads arrays as tuples, which TOML has no other way to write.
        config = model.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        skip = domain if adapter is None else None
        problems.extend(describe(error, model, skip=skip))
    if config is not None and adapter is not None:
        problems.extend(_without_effect(config.train, domain, adapter.train_fields))
        if config.objective == "none" and not adapter.objective_optional:
            problems.append(f"objective: 'none' is not possible in the domain {domain!r}.")
    if problems or config is None:
        title = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"the configuration has {title}:\n" + "\n".join(f"  - {each}" for each in problems))
    for path in _paths(config.model_dump(mode="json", exclude_none=True)):
        origins.setdefault(path, "default")
    return Resolved(config=config, origins=origins)


def _without_effect(train: TrainConfig, domain: Any, fields: frozenset[str] | None) -> list[str]:
    """Name what differs from its default although a domain with its own loop does not look at it."""
    if fields is None:
        return []
    plain = TrainConfig(steps=1) if train.unit == "steps" else TrainConfig(epochs=1)
    return [
        f"train.{key}: has no effect in the domain {domain!r}, which uses only {', '.join(sorted(fields))}."
        for key in sorted(TrainConfig.model_fields.keys() - fields)
        if getattr(train, key) != getattr(plain, key)
    ]


def load(recipe: str | Path, overrides: Iterable[str] = ()) -> Resolved:
    """Read a recipe by name or path and resolve it with overrides."""
    return resolve(read_recipe(recipe), overrides)


@cache
def run_model(domain: str, table: type[Settings]) -> type[RunConfig]:
    """Return RunConfig with the domain's table as one more field."""
    field = (table, Field(default_factory=table))
    return create_model(f"{domain.capitalize()}RunConfig", __base__=RunConfig, __module__=__name__, **{domain: field})  # type: ignore[call-overload, no-any-return]


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copy(each) for key, each in value.items()}
    return list(value) if isinstance(value, list | tuple) else value


def _paths(value: Any, prefix: tuple[str, ...] = ()) -> list[str]:
    """Return the dotted paths of all leaves."""
    if isinstance(value, Mapping) and (value or not prefix):
        return [path for key, each in value.items() for path in _paths(each, (*prefix, str(key)))]
    return [".".join(prefix)]


def _assign(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    table = values
    for depth, key in enumerate(keys[:-1], start=1):
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {'.'.join(keys)}: {'.'.join(keys[:depth])!r} is a value, not a table.")
        table = inner
    if value is UNSET:
        table.pop(keys[-1], None)
    else:
        table[keys[-1]] = value


# Error messages ------------------------------------------------------------------------------------------------------


def describe(error: ValidationError, model: type[BaseModel], skip: str | None = None) -> list[str]:
    """Turn pydantic's errors into lines "path: what is wrong, what is allowed, nearest name"."""
    lines: list[str] = []
    for each in error.errors(include_url=False):
        location = [str(part) for part in each["loc"]]
        if skip is not None and location[:1] == [skip]:
            continue
        path = ".".join(location) or "the recipe"
        context = each.get("ctx", {})
        got = each["input"]
        kind = each["type"]
        if kind == "extra_forbidden":
            lines.append(f"{path}: {_unknown_key(location, model)}")
        elif kind == "missing":
            lines.append(f"{path}: is required.")
        elif kind in ("literal_error", "enum"):
            allowed = _allowed_values(location, model) or [context["expected"]]
            near = nearest(got, allowed) if isinstance(got, str) else ""
            lines.append(f"{path}: {got!r} is not allowed.{near} Allowed: {', '.join(map(str, allowed))}.")
        elif kind == "value_error":
            lines.append(f"{path}: {context['error']}".replace("\n", "\n    "))
        else:
            message = each["msg"].removeprefix("Input ")
            lines.append(f"{path}: {message}, got {json.dumps(got, default=str)}.")
    return list(dict.fromkeys(lines))


def _unknown_key(location: Sequence[str], model: type[BaseModel]) -> str:
    table = _table_at(location[:-1], model)
    allowed = list(table.model_fields) if table else []
    text = f"no such setting.{nearest(location[-1], allowed)}"
    if table is not None and len(location) == 1:
        # A key of [train] at the top level is the usual slip.
        elsewhere = [
            f"{name}.{location[0]}"
            for name in table.model_fields
            if (inner := _table_at([name], model)) is not None and location[0] in inner.model_fields
        ]
        if elsewhere:
            return f"no such setting at the top level; did you mean {' or '.join(elsewhere)}?"
    return f"{text} Allowed: {', '.join(allowed)}."


def _table_at(location: Sequence[str], model: type[BaseModel]) -> type[BaseModel] | None:
    """Follow a path of field names to the model that holds the keys there."""
    for key in location:
        field = model.model_fields.get(key)
        if field is None:
            # A discriminator's tag stands in the path of a tagged union; it names no field.
            continue
        options = [field.annotation, *get_args(field.annotation)]
        tables = [each for each in options if isinstance(each, type) and issubclass(each, BaseModel)]
        if not tables:
            return None
        model = tables[0]
    return model


def _allowed_values(location: Sequence[str], model: type[BaseModel]) -> list[Any]:
    table = _table_at(location[:-1], model)
    field = table.model_fields.get(location[-1]) if table else None
    if field is None:
        return []
    values: list[Any] = []
    for each in [field.annotation, *get_args(field.annotation)]:
        if getattr(each, "__origin__", None) is Literal:
            values.extend(get_args(each))
    return values


# TOML ----------------------------------------------------------------------------------------------------------------


def toml_text(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> str:
    """Write nested mappings of strings, numbers, booleans and lists as TOML, plain values before tables."""
    lines: list[str] = []
    _write_table(values, (), origins or {}, lines)
    return "\n".join(lines).strip("\n") + "\n"


def _write_table(
    values: Mapping[str, Any], prefix: tuple[str, ...], origins: Mapping[str, str], lines: list[str]
) -> None:
    for key, value in values.items():
        if not isinstance(value, Mapping):
            origin = origins.get(".".join((*prefix, key)))
            lines.append(f"{_toml_key(key)} = {_toml_value(value)}" + (f"  # {origin}" if origin else ""))
    for key, value in values.items():
        if isinstance(value, Mapping):
            path = (*prefix, key)
            lines.extend(["", f"[{'.'.join(map(_toml_key, path))}]"])
            _write_table(value, path, origins, lines)


def _toml_key(key: str) -> str:
    plain = key and all(char.isascii() and (char.isalnum() or char in "-_") for char in key)
    return key if plain else _toml_string(key)


def _toml_string(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML also asks for DEL to be escaped and forbids surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
        return repr(value)
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    raise ConfigError(f"a value of type {type(value).__name__} cannot be written as TOML: {value!r}")
