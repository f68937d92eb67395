"""From a TOML recipe and `--set` overrides to one frozen, complete configuration.

Precedence: defaults < recipe < --set. All problems of a configuration are reported in one ConfigError.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationError, create_model

from dipole.core.train.adapter import Adapter
from dipole.core.train.config import RATE, RunConfig, Settings, TrainConfig
from dipole.core.train.domains import adapter_class, of_another_kind
from dipole.core.train.schedule import flat
from dipole.core.utils.errors import ConfigError, ReceivedError, nearest
from dipole.core.utils.files import instead_of_file, is_file
from dipole.core.utils.plugins import shipped
from dipole.core.utils.received import parse_toml, read_toml
from dipole.core.utils.text import shortened


@dataclass(frozen=True)
class Resolved:
    """A configuration and where each of its values comes from.

    Args:
        config: the complete configuration.
        origins: dotted path -> "default", "preset", "recipe" or "--set".
    """

    config: RunConfig
    origins: dict[str, str]


def read_recipe(recipe: str | Path) -> dict[str, Any]:
    """Read a shipped recipe by name, or a TOML file by path."""
    known = shipped("recipes")
    if not isinstance(recipe, str | Path):
        raise ConfigError(f"a recipe is its name or the path of a .toml file, got a {type(recipe).__name__}.")
    path = Path(recipe)
    if str(recipe) in known:
        path = known[str(recipe)]
    elif not is_file(path):
        if is_file(path / "config.toml"):
            raise ConfigError(f"{path} is a run's folder; to go on with the run: dipole train {path / 'config.toml'}")
        if recipe != "" and (found := instead_of_file(path)):
            raise ConfigError(f"{path} is {found}: give a .toml file, or a name of `dipole list recipes`.")
        if path.suffix == ".toml" or len(path.parts) > 1:
            raise ConfigError(f"no recipe file {shortened(str(path))!r}. Check the path, or see `dipole list recipes`.")
        name = str(recipe)
        hint = of_another_kind(name) or nearest(name, known)
        if is_file(f"{name}.toml"):
            hint = f" Did you mean the file {name}.toml?"
        raise ConfigError(
            f"unknown recipe {shortened(name)!r}.{hint} Give a name of `dipole list recipes`, or a .toml file."
        )
    try:
        return read_toml(path)
    except ReceivedError as error:
        raise ConfigError(str(error)) from error


UNSET = object()
# Names of other programs.
ELSEWHERE = {"lr": "learning_rate", "wd": "weight_decay", "bs": "batch_size", "num_epochs": "epochs"}
DEEPEST = 20
LONGEST_PROBLEM = 900


def parse_override(text: str, flag: str = "--set") -> tuple[tuple[str, ...], Any]:
    """Split "a.b=value". The value is read as TOML (3, 1e-3, true, [1, 2], "x"), null or None, or else as plain text.

    "a.b=" gives UNSET, which removes the recipe's value. Other options than --set (`flag`, for messages) need a value.
    """
    if not isinstance(text, str):
        raise ConfigError(f'each of overrides is a text such as "train.steps=5", got {shortened(repr(text))}.')
    path, equals, value = text.partition("=")
    if len(path) > 1000 or path.count(".") > DEEPEST:
        raise ConfigError(f"{flag} {shortened(text)!r}: no setting has such a name.")
    keys = _keys(path)
    if not equals or not all(keys) or (flag != "--set" and not value.strip()):
        raise ConfigError(f"{flag} {shortened(text)!r} is not of the form key=value or table.key=value.")
    if not value.strip():
        return keys, UNSET
    if value.strip() in ("null", "None"):  # TOML has no word for it
        return keys, None
    try:
        read = parse_toml(f"value = {value}")
    except ValueError:
        return keys, value.strip()
    return keys, read["value"] if set(read) == {"value"} else value.strip()


def _keys(path: str) -> tuple[str, ...]:
    """Return the keys of a dotted path. Quoted keys, such as train.schedule."dp.weight", may contain dots."""
    if '"' in path or "'" in path:
        with suppress(ValueError):
            found, keys = parse_toml(f"{path} = 0"), list[str]()
            while isinstance(found, dict):
                [(key, found)] = found.items()
                keys.append(key)
            return tuple(keys)
    return tuple(key.strip() for key in path.split("."))


def resolve(recipe: Mapping[str, Any], overrides: Iterable[str] = ()) -> Resolved:
    """Merge and check a recipe. One ConfigError lists all problems."""
    problems: list[str] = []
    try:
        values: dict[str, Any] = json.loads(json.dumps(recipe, default=str))
    except RecursionError:
        raise ConfigError("the recipe is nested too deeply.") from None
    changed: list[str] = []
    for text in overrides:
        try:
            changed.append(_override(values, text))
        except ConfigError as error:
            problems.append(str(error))
    origins = dict.fromkeys(dict(flat(values)), "recipe")
    for path in changed:
        origins |= {each: "--set" for each in origins if f"{each}.".startswith(f"{path}.")}
    domain, model, adapter = values.get("domain"), RunConfig, None
    if isinstance(domain, str):
        try:
            adapter = adapter_class(domain)
            model = run_model(domain, adapter.config_model, adapter)
        except ConfigError as error:
            problems.append(f"domain: {error}")
    train, table = values.setdefault("train", {}), values.get(str(domain), {})
    if adapter is not None and isinstance(train, dict) and isinstance(table, dict):
        for key, value in adapter.config_model.train_defaults(table).items():
            if train.setdefault(key, value) is value:
                origins.setdefault(f"train.{key}", "preset")
    config = None
    try:
        # JSON mode is strict about types but reads arrays as tuples, which TOML has no other way to write.
        config = model.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        skip = domain if adapter is None else None
        problems.extend(describe(error, model, skip=skip))
    if config is not None and adapter is not None:
        problems += _domain_problems(config, adapter)
    if problems or config is None:
        title = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        shown = "\n".join(f"  - {shortened(each, LONGEST_PROBLEM)}" for each in problems)
        raise ConfigError(f"the configuration has {title}:\n" + shown)
    # Values set by neither the recipe nor --set come from the table's preset.
    brought = {f"{domain}.{name}" for name in config.settings.model_fields_set}
    for path, _ in flat(config.model_dump(mode="json", exclude_none=True)):
        origins.setdefault(path, "preset" if path in brought else "default")
    return Resolved(config=config, origins=origins)


def _override(values: dict[str, Any], text: str) -> str:
    """Set a value of `--set` among those of a recipe, and return its dotted path."""
    keys, value = parse_override(text)
    path, table = ".".join(keys), values
    for depth, key in enumerate(keys[:-1], start=1):
        inner = table.setdefault(key, {})
        if keys[:depth] == ("train", "schedule") and not isinstance(inner, dict):
            inner = table[key] = {RATE: inner}  # a value in place of the table is the learning rate's
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {path}: {'.'.join(keys[:depth])!r} is a value, not a table.")
        table = inner
    if value is UNSET:
        table.pop(keys[-1], None)
    else:
        table[keys[-1]] = value
    return path


def _domain_problems(config: RunConfig, adapter: type[Adapter]) -> list[str]:
    """Return the settings that the domain of a configuration does not have, one line each."""
    train, domain, fields = config.train, config.domain, adapter.train_fields
    problems = []
    if fields is not None:  # the domain has a training loop of its own
        plain = TrainConfig.model_validate({train.unit: 1})
        unused = TrainConfig.model_fields.keys() - fields
        changed = {key for key in unused if getattr(train, key) != getattr(plain, key)}
        if train.rate_schedule == plain.rate_schedule:
            changed.discard("schedule")  # every domain schedules weights and options of terms
        used = ", ".join(sorted(fields))
        problems += [
            f"train.{key}: has no effect in the domain {domain!r}, which uses only {used}." for key in sorted(changed)
        ]
    if adapter.precisions is not None and train.precision not in adapter.precisions:
        problems.append(
            f"train.precision: {train.precision!r} is not possible in the domain {domain!r}. "
            f"Allowed: {', '.join(adapter.precisions)}."
        )
    if train.evaluate_on == "validation" and not adapter.validates:
        problems.append(f"train.evaluate_on: the domain {domain!r} has no validation part. Allowed: test.")
    chosen_by = train.best_by
    if chosen_by is not None and adapter.validates and train.part == "test" and "/dev" not in chosen_by:
        problems.append(
            f"train.best_by: {chosen_by!r} would be chosen on the test part. Leave curves_on to 'validation', or "
            "choose by a result of a development part (.../dev...)."
        )
    if config.objective == "none" and not adapter.objective_optional:
        problems.append(f"objective: 'none' is not possible in the domain {domain!r}.")
    return problems


def load_recipe(recipe: str | Path, overrides: Iterable[str] = ()) -> Resolved:
    """Return the complete configuration of a recipe with overrides, `config`, and where each value comes from.

    Args:
        recipe: a shipped name (`dipole list recipes`), or the path of a .toml file.
        overrides: "key=value" or "table.key=value" each. They override the recipe, and later ones override earlier
            ones. A value is read as TOML, null or None, or else as text. "key=" removes the recipe's value.

    Raises:
        ConfigError: there is no such recipe, or the configuration is wrong. One message lists all problems.

    Example:
        >>> recipe = dipole.load_recipe("digits-simclr", ["objective=dcl", "train.epochs=5"])
        >>> recipe.config.objective, recipe.config.train.epochs
        ('dcl', 5)
    """
    if isinstance(overrides, str | Mapping) or not isinstance(overrides, Iterable):
        raise ConfigError(f'overrides must be a list, such as ["train.steps=5"], got {shortened(repr(overrides))}.')
    return resolve(read_recipe(recipe), overrides)


@cache
def run_model(domain: str, table: type[Settings], adapter: type | None = None) -> type[RunConfig]:
    """Return RunConfig with the domain's table as one more field."""
    if domain in RunConfig.model_fields or hasattr(RunConfig, domain):
        raise ConfigError(f"{domain!r} is taken: its table would hide what a recipe calls so. Rename the domain.")
    field = (table, Field(default_factory=table))
    model: type[RunConfig] = create_model(  # type: ignore[call-overload]
        f"{domain.capitalize()}RunConfig", __base__=RunConfig, __module__=__name__, **{domain: field}
    )
    model.domain_class = adapter
    return model


# pydantic's errors in words ------------------------------------------------------------------------------------------


def describe(error: ValidationError, model: type[BaseModel], skip: str | None = None) -> list[str]:
    """Turn pydantic's errors into lines "path: what is wrong, what is allowed, nearest name"."""
    lines: list[str] = []
    for each in error.errors(include_url=False):
        location = [str(part) for part in each["loc"]]
        if skip is not None and location[:1] == [skip]:
            continue
        path = shortened(".".join(location)) or "the recipe"
        context, got, kind, shown = each.get("ctx", {}), each["input"], each["type"], shortened(repr(each["input"]))
        if kind == "extra_forbidden":
            said = _unknown_key(location, model)
        elif kind == "missing":
            said = "is required."
        elif kind in ("literal_error", "enum"):
            allowed = [each.strip("'") for each in re.split(r", | or ", context["expected"])]
            said = f"{shown} is not allowed.{nearest(str(got), allowed)} Allowed: {', '.join(allowed)}."
        elif kind == "model_type" and (table := _table_at(location, model)) is not None:
            said = f"is a table, not {shown}. Its settings: {', '.join(table.model_fields)}."
        elif kind == "string_pattern_mismatch" and path in model.model_fields:  # device
            said = f"{shown} is not allowed. Allowed: {model.model_fields[path].description}."
        elif kind == "value_error":
            said = str(context["error"]).replace("\n", "\n    ")
        else:
            fix = """ In a shell, write KEY='["a", "b"]'.""" * (isinstance(got, str) and got.startswith("["))
            said = f"{each['msg'].removeprefix('Input ')}, got {shortened(json.dumps(got, default=str))}.{fix}"
        lines.append(f"{path}: {said}")
    return list(dict.fromkeys(lines))


def _unknown_key(location: Sequence[str], model: type[BaseModel]) -> str:
    table = _table_at(location[:-1], model)
    allowed = list(table.model_fields) if table else []
    key = ELSEWHERE.get(location[-1], location[-1])
    if len(location) == 1:  # a key of [train] at the top level is the usual slip
        tables = {name: _table_at([name], model) for name in allowed}
        elsewhere = [f"{name}.{key}" for name, inner in tables.items() if inner and key in inner.model_fields]
        if elsewhere:
            return f"no such setting at the top level; did you mean {' or '.join(elsewhere)}?"
    return f"no such setting.{nearest(key, allowed)} Allowed: {', '.join(allowed)}."


def _table_at(location: Sequence[str], model: type[BaseModel]) -> type[BaseModel] | None:
    """Follow a path of field names to the model that holds the keys there."""
    for key in location:
        if key not in model.model_fields:
            continue  # the path through a tagged union contains the discriminator's tag, which is not a field
        field = model.model_fields[key]
        options = [field.annotation, *get_args(field.annotation)]
        tables = [each for each in options if isinstance(each, type) and issubclass(each, BaseModel)]
        if not tables:
            return None
        model = tables[0]
    return model
