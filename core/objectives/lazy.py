"""Modules whose parameters get their shape from the first embeddings."""

from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter


class LazyModule(nn.Module):
    """A module that saves no lazy parameter without a shape, and takes the shape of what it loads."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        lazy = {name: p for name, p in self._parameters.items() if isinstance(p, UninitializedParameter)}
        for name in lazy:
            self._parameters[name] = None
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._parameters.update(lazy)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, parameter in self._parameters.items():
            if isinstance(parameter, UninitializedParameter) and prefix + name in state_dict:
                parameter.materialize(state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)
