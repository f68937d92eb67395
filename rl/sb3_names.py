"""Keywords of stable-baselines3's algorithms as settings of the agents: taken, renamed or refused.

Also from hyper-parameter files of RL Baselines3 Zoo (`rl.hyperparameters = "FILE.yml"`): YAML, a task (or `default`) ->
keywords of SB3's algorithm.
"""

import ast
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import disk_refusing
from dipole.rl.settings import ATTRIBUTES

# SB3's name -> the setting that says the same.
RENAMED = {new: old for stored in ATTRIBUTES.values() for old, new in stored.items()}
_NAMES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
# policy_kwargs that are settings by the same name.
_OF_POLICY = ("n_critics", "log_std_init", "use_expln", "clip_mean", "use_sde")
_DEFAULT_OF_POLICY = [("normalize_images", True), ("net_arch", None)]


def without_sb3_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of an agent with settings' names in place of those of SB3's SAC or TD3.

    Raise ConfigError for one without a meaning here, with its replacement, or for a setting that is given twice.
    """
    # Replay stores every frame once, whatever is given.
    rest = {name: value for name, value in given.items() if name not in ("optimize_memory_usage", "policy_kwargs")}
    for name, cure in _NAMES["refused"].items():
        if name in rest:
            raise ConfigError(f"{name} is no setting here: {cure}.")
    found = [(new, rest.pop(old), old) for old, new in RENAMED.items() if old in rest]
    said = f"policy_kwargs={given.get('policy_kwargs')!r}"
    found += [(name, value, said) for name, value in policy_settings(given.get("policy_kwargs") or {}).items()]
    ent_coef = rest.get("ent_coef")
    if isinstance(ent_coef, str) and ent_coef.startswith("auto_"):
        try:
            start = float(rest.pop("ent_coef").removeprefix("auto_"))
        except ValueError:
            raise ConfigError(f"ent_coef must be 'auto', 'auto_<number>' or a number >= 0, got {ent_coef!r}.") from None
        found.append(("initial_temperature", start, f"ent_coef={ent_coef!r}"))
    for name, value, said in found:
        if name in rest:
            raise ConfigError(f"{name} and {said} are the same setting: give one of them.")
        rest[name] = value
    return rest


def policy_settings(given: Any) -> dict[str, Any]:
    """Return SB3's policy_kwargs as settings. Raise ConfigError for unknown ones, with what takes their place."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"policy_kwargs must be a dictionary, got {given!r}.")
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == "net_arch" and isinstance(value, list | tuple):
            found["hidden"] = tuple(value)
        elif name == "net_arch" and isinstance(value, Mapping) and set(value) == {"pi", "qf"}:
            found |= {"hidden": tuple(value["pi"]), "critic_hidden": tuple(value["qf"])}
        elif name == "net_arch" and value is not None:
            raise ConfigError(
                f"policy_kwargs: net_arch must be a list of widths or {{'pi': widths, 'qf': widths}}, got {value!r}."
            )
        elif name == "activation_fn":
            found["activation"] = getattr(value, "__name__", value)
        elif name in _OF_POLICY:
            found[name] = value
        elif name == "optimizer_kwargs":
            found |= _betas(value)
        elif (name, value) not in _DEFAULT_OF_POLICY:
            known = ", ".join(["net_arch", "activation_fn", *_OF_POLICY, "optimizer_kwargs"])
            cure = _NAMES["refused_of_policy"].get(str(name), f"it has {known}")
            raise ConfigError(f"policy_kwargs has no {name!r} here: {cure}.")
    return found


def _betas(value: Any) -> dict[str, Any]:
    if not value:
        return {}
    betas = value.get("betas") if isinstance(value, Mapping) and set(value) == {"betas"} else None
    if not isinstance(betas, list | tuple) or len(betas) != 2 or betas[1] != 0.999:
        raise ConfigError(
            "policy_kwargs: of optimizer_kwargs only betas=(beta, 0.999) has a meaning here (the setting beta), got "
            f"{value!r}."
        )
    return {"beta": betas[0]}


def read_zoo(path: str | Path, task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a task's entry (or `default`): of the agent and its environment, and of [train].

    Raise ConfigError if the file cannot be read, has no such entry, or an entry has a key without a meaning here.
    """
    import yaml

    try:
        with disk_refusing(f"the hyper-parameters {path} cannot be read", ConfigError):
            found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the hyper-parameters {path} are no YAML: {error}") from error
    if not isinstance(found, Mapping) or not all(isinstance(each, Mapping) for each in found.values()):
        raise ConfigError(f"{path} must map tasks to hyper-parameters, as the files of RL Baselines3 Zoo do.")
    entry = found.get(task, found.get("default"))
    if entry is None:
        raise ConfigError(f"{path} has no entry {task!r} and no 'default'. Entries: {', '.join(map(str, found))}.")
    try:
        return _translated(entry)
    except ConfigError as error:
        raise ConfigError(f"{path}, {task}: {error}") from error


def _translated(entry: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    zoo = _NAMES["zoo"]
    own, of_train, fitting, instead = (*zoo["agent"], *RENAMED), zoo["train"], zoo["fitting"], zoo["instead"]
    given: dict[str, Any] = {}
    train: dict[str, Any] = {}
    for key, value in entry.items():
        if key in fitting:
            if value not in fitting[key]:
                raise ConfigError(f"{key} must be {fitting[key][0]!r} for an agent from pixels, got {value!r}.")
        elif key in of_train:
            train[of_train[key]] = _number(key, value)
        elif key in own:
            is_whole = isinstance(value, float) and value.is_integer()
            given[key] = int(value) if is_whole else value
        else:
            cure = f"Known: {', '.join(sorted([*own, *of_train, *fitting]))}"
            if key in instead:
                cure = f"Use {instead[key]} instead"
            raise ConfigError(f"{key} has no meaning here. {cure}.")
    if isinstance(given.get("policy_kwargs"), str):
        given["policy_kwargs"] = _policy_kwargs(given["policy_kwargs"])
    if "n_envs" in given:
        given["envs"] = given.pop("n_envs")
    return without_sb3_names(given), train


def _number(key: str, value: Any) -> float:
    if isinstance(value, str) and value.startswith("lin_"):
        raise ConfigError(
            f"{key} = {value!r} is a schedule, and a recipe has a constant rate: give the number. In Python, "
            "learning_rate takes a function of the remaining progress."
        )
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} must be a number, got {value!r}.") from None
    if key == "learning_rate":
        return number
    if not number.is_integer():
        raise ConfigError(f"{key} must be a whole number, got {value!r}.")
    return int(number)


def _policy_kwargs(text: str) -> dict[str, Any]:
    """Return the keywords in `dict(net_arch=[256, 256], activation_fn=nn.ReLU)`. Nothing in it is run."""
    try:
        found = _literal(ast.parse(text, mode="eval").body)
        if not isinstance(found, dict):
            raise ValueError("no dict(...)")
        return found
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"policy_kwargs = {text!r} cannot be read: {error}.") from error


def _literal(node: ast.expr) -> Any:
    """Return a literal, the name X of `nn.X`, or the contents of `dict(...)`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nn":
        return node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {str(each.arg): _literal(each.value) for each in node.keywords}
    return ast.literal_eval(node)
