"""The temperature of an objective: a number, or CLIP's logit scale, which is learned."""

import math
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from dipole.core.objectives.objective import Objective
from dipole.core.objectives.options import LATER, Range
from dipole.core.objectives.similarity import Similarity
from dipole.core.utils.errors import OptionError

LARGEST_SCALE = 100.0
"""The upper limit of CLIP's scale 1/tau. It is a temperature of 0.01."""

Temperature = Annotated[
    float | Literal["learned"], Range(above=0), "softmax temperature tau; learned: CLIP's logit scale log(1/tau)"
]
Init = Annotated[
    float | None, Range(at_least=1 / LARGEST_SCALE), "start of a learned temperature; 0.07 when none", LATER
]


def learnable(
    owner: str, name: str, value: float | str, init: float | None, default: float, init_name: str = "init"
) -> float | None:
    """Return the start value of a learned number, or None if the number is fixed.

    Raises:
        OptionError: a start value is given for a fixed number.
    """
    if value == "learned":
        return default if init is None else init
    if init is not None:
        raise OptionError(
            f"{owner}: {init_name}={init:g} is where a learned {name} starts, but {name} is {value:g}; write "
            f"{name}=learned, {init_name}={init:g}, or {name}={init:g} alone.",
            init_name,
        )
    return None


class Tempered(Objective):
    """An objective whose similarities are divided by a temperature, which may be learned.

    Formula (Radford et al. 2021, Sec. 2.4): tau = e^{-u} with u = `logit_scale`. Each step clamps u to at most log 100.

    Args:
        similarity: as in `Objective`.
        temperature: tau > 0, or "learned".
        init: start value of a learned tau, >= 0.01. The default is 0.07.

    Raises:
        OptionError: `init` is given without a learned temperature, an option is out of its range, or you set
            `temperature` although it is learned.
    """

    first_temperature: ClassVar[float] = 0.07
    largest_scale: ClassVar[float | None] = LARGEST_SCALE

    def __init__(self, similarity: Similarity, temperature: Temperature, init: Init = None) -> None:
        super().__init__(similarity)
        start = learnable(self.registered_name(), "temperature", temperature, init, self.first_temperature)
        self._temperature = 0.0 if temperature == "learned" else float(temperature)
        self.logit_scale = None if start is None else undecayed(-math.log(start))

    @property
    def temperature(self) -> float | Tensor:
        """Temperature tau. A learned temperature is a tensor, (), with gradient."""
        return self._temperature if self.logit_scale is None else (-self.logit_scale).exp()

    @temperature.setter
    def temperature(self, value: float) -> None:
        if self.logit_scale is not None:
            raise OptionError(
                f"{self.registered_name()}: the temperature is learned and cannot be set; give a number instead of "
                "temperature=learned.",
                "temperature",
            )
        self._temperature = value

    def after_step(
        self, learning_rate: float, weight: float, step: int | None = None, total: int | None = None
    ) -> None:
        super().after_step(learning_rate, weight, step, total)
        if self.logit_scale is not None and self.largest_scale is not None:
            with torch.no_grad():
                self.logit_scale.clamp_(max=math.log(self.largest_scale))

    def summary(self) -> dict[str, float]:
        tau = self.temperature
        return super().summary() | ({"temperature": float(tau.detach())} if isinstance(tau, Tensor) else {})


def undecayed(value: float) -> nn.Parameter:
    """Return a learned number, (), without weight decay."""
    parameter = nn.Parameter(torch.tensor(value))
    parameter.undecayed = True  # type: ignore[attr-defined]
    return parameter
