"""Which evaluation of a run was the best so far, by one of its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dipole.core.record import Number
from dipole.core.utils.errors import ConfigError, nearest


class Best:
    """The step at which a result was largest, or smallest for "-NAME"; the earlier one among equals.

    Args:
        by: name of the result; None keeps nothing.
    """

    def __init__(self, by: str | None) -> None:
        self._by = by
        self.step: int | None = None
        self._value = 0.0

    def improved(self, step: int, results: Mapping[str, Number]) -> bool:
        """Whether these results are the best so far.

        Raises:
            ConfigError: the result is none of them.
        """
        if self._by is None:
            return False
        name = self._by.removeprefix("-")
        if name not in results:
            raise ConfigError(
                f"train.best_by: no result {name!r}.{nearest(name, results)} This run measures {', '.join(results)}."
            )
        value = results[name]
        if value is None:
            return False
        sign = -1 if self._by.startswith("-") else 1
        if self.step is not None and sign * value <= sign * self._value:
            return False
        self.step, self._value = step, value
        return True

    def told(self) -> dict[str, Any] | None:
        """What the record says of it."""
        return None if self.step is None else {"by": self._by, "step": self.step, "value": self._value}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        step, value = state["step"], state["value"]
        if not (step is None or type(step) is int) or not isinstance(value, float | int):
            raise ValueError("'best' is not what a run writes")
        self.step, self._value = step, value
