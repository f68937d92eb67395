"""Hyper-parameter files of RL Baselines3 Zoo: a task's entry, as settings of an agent and of [train].

The file is YAML: a task (or `default`) -> keywords of SB3's algorithm. `rl.hyperparameters = "FILE.yml"` reads it.
"""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import disk_refusing
from dipole.rl.sb3_names import RENAMED, without_sb3_names

# Keys of the zoo for an agent and its environment, and those of [train].
_AGENT = (
    "buffer_size", "learning_starts", "gamma", "tau", "train_freq", "gradient_steps", "ent_coef", "target_entropy",
    "n_steps", "frame_stack", "use_sde", "sde_sample_freq", "use_sde_at_warmup", "n_envs", "policy_kwargs", *RENAMED,
)  # fmt: skip
_TRAIN = {"batch_size": "batch_size", "n_timesteps": "steps", "learning_rate": "learning_rate"}
# Only these values fit an agent from pixels.
_FITTING = {
    "policy": ("CnnPolicy", "MlpPolicy", "MultiInputPolicy"),
    "normalize": (False, "False"),
    "optimize_memory_usage": (False, True),
}
_PRESET = {
    "env_wrapper": "the environment's own settings",
    "noise_type": "noise_start, noise_end and noise_steps (drq)",
}


def read(path: str | Path, task: str) -> tuple[dict[str, Any], dict[str, Any]]:
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
    given: dict[str, Any] = {}
    train: dict[str, Any] = {}
    for key, value in entry.items():
        if key in _FITTING:
            if value not in _FITTING[key]:
                raise ConfigError(f"{key} must be {_FITTING[key][0]!r} for an agent from pixels, got {value!r}.")
        elif key in _TRAIN:
            number = _number(key, value)
            train[_TRAIN[key]] = number if key == "learning_rate" else int(number)
        elif key in _AGENT:
            is_whole = isinstance(value, float) and value.is_integer()
            given[key] = int(value) if is_whole else value
        else:
            known = ", ".join(sorted([*_AGENT, *_TRAIN, *_FITTING]))
            cure = f"Use {_PRESET[key]} instead" if key in _PRESET else f"Known: {known}"
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
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} must be a number, got {value!r}.") from None


def _policy_kwargs(text: str) -> dict[str, Any]:
    """Return the keywords in `dict(net_arch=[256, 256], activation_fn=nn.ReLU)`. Nothing in it is run."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "dict":
            raise ValueError("no dict(...)")
        return {str(each.arg): _literal(each.value) for each in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"policy_kwargs = {text!r} cannot be read: {error}.") from error


def _literal(node: ast.expr) -> Any:
    """Return a literal, the name X of `nn.X`, or the contents of `dict(...)`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nn":
        return node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {str(each.arg): _literal(each.value) for each in node.keywords}
    return ast.literal_eval(node)
