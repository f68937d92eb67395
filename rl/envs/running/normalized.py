"""Observations below SB3's VecNormalize, where other wrappers are above it."""

from typing import Any

from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from dipole.core.utils.errors import ConfigError
from dipole.rl.seen import parts

_FIX = "Make VecNormalize the outermost wrapper, of VecFrameStack(env, 3) or, for (H, W, C), VecTransposeImage(env)."


def original(normalizer: VecNormalize, seen: Any) -> Any:
    """Return observations as replay stores them: without normalisation, but as the wrappers above leave them.

    SB3 stores what VecNormalize got, which has another shape if a wrapper above stacks, transposes or selects. `seen`
    are the observations (n_envs, ...) of the outermost wrapper, an array or a dictionary.
    """
    raw, names = parts(normalizer.get_original_obs()), _normalized(normalizer)
    found = {key: raw[key] if key in names else each for key, each in parts(seen).items()}
    return found.get("", found)


def require_normalized_last(env: VecEnv) -> None:
    """Raise ConfigError if a wrapper above VecNormalize changes what it normalises."""
    normalizer = unwrap_vec_normalize(env)
    if normalizer is None:
        return
    own, seen, names = parts(normalizer.observation_space), parts(env.observation_space), _normalized(normalizer)
    changed = [key for key in seen if key in names and seen[key] != own[key]]
    if "" in seen and "" not in own:
        changed += [key for key in names if own[key] == seen[""]]
    if changed:
        raise ConfigError(
            f"a wrapper above VecNormalize changes normalised observations{_named(changed)}, which replay cannot undo. "
            f"{_FIX}"
        )


def require_stored_as_seen(model: BaseAlgorithm) -> None:
    """Raise ConfigError if SB3's own replay would get observations of another shape than the agent's.

    An agent of dipole stores them as `original` returns them.
    """
    normalizer = model.get_vec_normalize_env()
    if normalizer is None or getattr(model, "replay_buffer", None) is None or hasattr(model, "_keep_original"):
        return
    own, seen = (
        {key: each.shape for key, each in parts(space).items()}
        for space in (normalizer.observation_space, model.observation_space)
    )
    if own != seen:
        raise ConfigError(
            f"stable-baselines3 stores observations of VecNormalize, {_shapes(own)}, and the agent sees those of a "
            f"wrapper above it, {_shapes(seen)}: its replay cannot hold them. {_FIX}"
        )


def _normalized(normalizer: VecNormalize) -> set[str]:
    """Keys of the normalised observations, "" if they are no dictionary."""
    if not normalizer.norm_obs:
        return set()
    if isinstance(normalizer.observation_space, spaces.Dict):
        return set(normalizer.norm_obs_keys or ())
    return {""}


def _named(keys: list[str]) -> str:
    return "" if keys == [""] else f" ({', '.join(keys)})"


def _shapes(found: dict[str, Any]) -> str:
    return str(found[""]) if "" in found else str(found)
