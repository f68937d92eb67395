"""Keywords of stable-baselines3's algorithms as settings of the agents: taken, renamed or refused."""

from collections.abc import Mapping
from typing import Any

from dipole.core.utils.errors import ConfigError

# SB3's name -> the setting that says the same.
RENAMED = {"target_update_interval": "target_every", "policy_delay": "actor_every"}
# Keywords that say nothing here, whatever they are.
_IDLE = ("optimize_memory_usage",)  # replay stores every frame once
_OTHERS = {
    "target_policy_noise": "noise_start, noise_end and noise_steps are the schedule of the noise",
    "target_noise_clip": "it is the setting noise_clip",
    "monitor_wrapper": "environments are always monitored",
}
# policy_kwargs that are settings by the same name.
_OF_POLICY = ("n_critics", "log_std_init", "use_expln", "clip_mean", "use_sde")
_NOT_OF_POLICY = {
    "features_extractor_class": (
        "the encoder is the agent's own (features, layers, filters, tanh). Your own one is trained by "
        "stable_baselines3's SAC with ContrastiveCallback"
    ),
    "features_extractor_kwargs": "the encoder's are the settings features, layers, filters and tanh",
    "share_features_extractor": "actor and critic always share the convolutions, and each has a head of its own",
    "optimizer_class": "it is Adam: learning_rate, encoder_learning_rate, beta and temperature_learning_rate set it",
    "normalize_images": "images are always divided by 255",
}


def without_sb3_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of an agent with settings' names in place of those of SB3's SAC or TD3.

    Raise ConfigError for one without a meaning here, with its replacement, or for a setting that is given twice.
    """
    rest = {name: value for name, value in given.items() if name not in (*_IDLE, "policy_kwargs")}
    for name, cure in _OTHERS.items():
        if name in rest:
            raise ConfigError(f"{name} is no setting here: {cure}.")
    found = [(new, rest.pop(old), old) for old, new in RENAMED.items() if old in rest]
    said = f"policy_kwargs={given.get('policy_kwargs')!r}"
    found += [(name, value, said) for name, value in policy_settings(given.get("policy_kwargs") or {}).items()]
    ent_coef = rest.get("ent_coef")
    if isinstance(ent_coef, str) and ent_coef.startswith("auto_"):
        found.append(("initial_temperature", initial_temperature(rest.pop("ent_coef")), f"ent_coef={ent_coef!r}"))
    for name, value, said in found:
        if name in rest:
            raise ConfigError(f"{name} and {said} are the same setting: give one of them.")
        rest[name] = value
    return rest


def initial_temperature(ent_coef: str) -> float:
    """Return 0.2 of SB3's "auto_0.2"."""
    try:
        return float(ent_coef.removeprefix("auto_"))
    except ValueError:
        raise ConfigError(f"ent_coef must be 'auto', 'auto_<number>' or a number >= 0, got {ent_coef!r}.") from None


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
        elif name == "net_arch":
            raise ConfigError(
                f"policy_kwargs: net_arch must be a list of widths or {{'pi': widths, 'qf': widths}}, got {value!r}."
            )
        elif name == "activation_fn":
            found["activation"] = getattr(value, "__name__", value)
        elif name in _OF_POLICY:
            found[name] = value
        elif name == "optimizer_kwargs":
            found |= _betas(value)
        elif name != "normalize_images" or value is not True:
            known = ", ".join(["net_arch", "activation_fn", *_OF_POLICY, "optimizer_kwargs"])
            cure = _NOT_OF_POLICY.get(str(name), f"it has {known}")
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
