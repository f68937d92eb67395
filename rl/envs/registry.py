"""Environments by name: what the files of this folder register, and every id of gymnasium.

A task of a recipe (`rl.task`), `make_env(name)` and `gymnasium.make("dipole/<name>-v0")` look here.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, register

from dipole.core.utils.errors import ConfigError, RegistryError, nearest
from dipole.core.utils.plugins import import_all

Factory = TypeVar("Factory", bound=Callable[..., Any])
_ID = re.compile(r".+-v\d+")


@dataclass(frozen=True)
class Environment:
    """An environment by name. The factory makes it, and the name decides its `fixed` keywords."""

    name: str
    factory: Callable[..., Any]
    fixed: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> tuple[str, ...]:
        """Keywords that users can set, or () for an id of gymnasium."""
        if self.factory is gymnasium.make:
            return ()
        return tuple(name for name in _keywords(self.factory) if name not in self.fixed)

    def default(self, setting: str) -> Any:
        """Return a keyword's default, or None if the factory has no such keyword."""
        if setting in self.fixed or setting not in self.settings:
            return self.fixed.get(setting)
        return _keywords(self.factory)[setting].default

    @property
    def code(self) -> Callable[..., Any]:
        """The class or function that makes it, also of an id of gymnasium's."""
        if self.factory is not gymnasium.make:
            return self.factory
        entry: Any = _spec(self.fixed["id"]).entry_point
        if not isinstance(entry, str):
            return entry
        try:
            return load_env_creator(entry)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"the environment of the task {self.name!r} cannot be imported: {error}") from error

    def make(self, **settings: Any) -> gymnasium.Env[Any, Any]:
        """Make it. Raise ConfigError for a keyword that it does not have."""
        for name in settings:
            if name not in self.settings and self.factory is not gymnasium.make:
                raise ConfigError(
                    f"the task {self.name!r} has no setting {name!r}.{nearest(name, self.settings)} "
                    f"Settings: {', '.join(self.settings)}."
                )
        found: gymnasium.Env[Any, Any] = self.factory(**self.fixed, **settings)
        if not isinstance(found, gymnasium.Env):
            raise ConfigError(f"the task {self.name!r} made {shown(found)}, which is no gymnasium.Env.")
        return found


def _keywords(factory: Any) -> dict[str, inspect.Parameter]:
    """Return the keywords of a factory. A class that takes any passes them on to its base."""
    parameters = inspect.signature(factory).parameters
    found = {
        name: each for name, each in parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    if len(found) < len(parameters) and inspect.isclass(factory) and issubclass(factory.__mro__[1], gymnasium.Env):
        found |= _keywords(factory.__mro__[1])
    return found


_environments: dict[str, Environment] = {}


def environment(name: str, **fixed: Any) -> Callable[[Factory], Factory]:
    """Decorate a class or function that makes an environment, to make it known under a name, also to gymnasium.

    The environment shows uint8 images (C, H, W), vectors, or a dictionary of one image and vectors, and takes
    continuous or discrete actions. The factory's keywords are its settings. A recipe can set `size`, `frame_stack`,
    `action_repeat`, `camera` and `rendering` if the factory has them. `info["environment_steps"]` counts the steps of a
    repeated action (1 if it is missing). get_state and set_state make a resume bit-equal.

        >>> environment("small-dot", size=16)(DotEnv)
        <class 'dipole.rl.envs.dot.DotEnv'>
        >>> make_env("small-dot").observation_space.shape
        (9, 16, 16)

    Args:
        name: the task, such as "dot" (`dipole/dot-v0` in gymnasium).
        fixed: keywords of the factory that belong to this name.

    Returns:
        A decorator that gives back what it decorates.

    Raises:
        RegistryError: the name has other characters than letters, digits, "_", "-", "." and ":". From the decorator, if
            another factory has the name.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w:.-]+", name):
        raise RegistryError(
            f"an environment needs a name such as @environment('mine') or 'my-family:mine', got {name!r}."
        )

    def decorate(factory: Factory) -> Factory:
        if not callable(factory):
            raise RegistryError(f"@environment({name!r}) decorates a class or a function, got {factory!r}.")
        place = f"{factory.__module__}:{factory.__qualname__}"
        taken = _environments.get(key_of(name))
        if taken is not None and f"{taken.factory.__module__}:{taken.factory.__qualname__}" != place:
            raise RegistryError(
                f"the environment {name!r} is already registered by {taken.factory.__module__}: {place} needs another "
                "name."
            )
        _environments[key_of(name)] = Environment(name, factory, fixed)
        if taken is not None:
            return factory
        # Both spellings: dipole/ball_in_cup-catch-v0 as in dm_control, dipole/ball-in-cup-catch-v0 as in the papers.
        # A colon would name a module.
        for spelling in {name, name.replace("_", "-")}:
            register(f"dipole/{spelling.replace(':', '-')}-v0", entry_point=place, kwargs=fixed)
        return factory

    return decorate


@cache
def load() -> None:
    """Import every file of this folder, so that what it registers is known."""
    import_all(__name__.rpartition(".")[0])


def find(task: str) -> Environment:
    """Return the environment of a name ("cheetah-run") or id ("package:Their-v0"), or raise ConfigError."""
    load()
    known = _environments.get(key_of(task))
    if known is not None:
        return known
    if _ID.fullmatch(str(task)):
        try:
            _spec(task)
        except (gymnasium.error.Error, ImportError) as error:
            raise ConfigError(f"unknown task {task!r}: {error}") from error
        return Environment(task, gymnasium.make, {"id": task})
    families = {name.partition(":")[0] for name in names() if ":" in name}
    shown = [*(name for name in names() if ":" not in name), *(f"{family}:..." for family in sorted(families))]
    raise ConfigError(f"unknown task {task!r}.{nearest(str(task), names())} Allowed: {', '.join(shown)}.")


def _spec(task: str) -> EnvSpec:
    # gymnasium.make imports the module that an id names, gymnasium.spec does not.
    module, _, name = task.rpartition(":")
    if module:
        import_module(module)
    return gymnasium.spec(name)


def names() -> list[str]:
    load()
    return sorted(each.name for each in _environments.values())


def make_env(task: str, **settings: Any) -> gymnasium.Env[Any, Any]:
    """The environment of a task: "dot", one of the suite ("cheetah-run"), or an id of gymnasium ("CartPole-v1").

    A family stands before a colon: "distracting:walker-walk".

        >>> make_env("dot", size=36).observation_space.shape
        (9, 36, 36)

    Args:
        task: its name.
        settings: keywords of the environment, such as those of `ControlEnv` or `DotEnv`.

    Raises:
        ConfigError: for an unknown task, a keyword that the task does not have, or a value out of range.
            Errors of gymnasium and of other environments are raised unchanged.
    """
    return find(task).make(**settings)


def shown(env: Any) -> str:
    """The name of an environment in a message: its id where it has one, otherwise its class."""
    if env is None or inspect.isclass(env) or inspect.isroutine(env):
        return getattr(env, "__qualname__", repr(env))
    identity = getattr(getattr(env, "spec", None), "id", None)
    return str(identity or type(getattr(env, "unwrapped", env)).__qualname__)


def key_of(task: str) -> str:
    return str(task).replace("/", "-").replace("-", "_").lower()
