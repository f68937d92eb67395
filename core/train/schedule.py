"""Schedule weights and options of terms: all entries of [train.schedule] but the learning rate.

    [train.schedule]
    learning_rate = "cosine"                         # same as `schedule = "cosine"`
    "dp.weight" = "linear(0, 0.1, end=10)"           # from 0 to 0.1 over the first ten epochs, then 0.1
    "infonce.temperature" = "cosine(0.5, 0.07)"      # over the whole run
    "dp.delta_pos" = [[0, 0.1], [20, 0.1], [40, 0.3]]  # straight lines between points [when, value]

Times are in the unit of [train]: epochs, or steps. An option can be scheduled if its objective stores it as an
attribute of the same name and precomputes nothing from it.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dipole.core.utils.errors import OptionError, nearest

if TYPE_CHECKING:
    from dipole.core.objectives.objective import Composite

WEIGHT = "weight"
POINTS = "points"


def _linear(first: float, last: float, part: float) -> float:
    return first + (last - first) * part


SHAPES: Mapping[str, Callable[[float, float, float], float]] = {
    "linear": _linear,
    "cosine": lambda first, last, part: last + (first - last) * 0.5 * (1 + math.cos(math.pi * part)),
    "exponential": lambda first, last, part: first * (last / first) ** part,
}
"""Interpolation between two values at a fraction in [0, 1]."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_TEXT = re.compile(
    rf"\s*(?P<shape>\w+)\s*\(\s*(?P<first>{_NUMBER})\s*,\s*(?P<last>{_NUMBER})\s*"
    rf"(?P<times>(?:,\s*(?:start|end)\s*=\s*{_NUMBER}\s*){{0,2}})\)\s*"
)
ALLOWED = (
    "linear(FROM, TO), cosine(FROM, TO), exponential(FROM, TO), each with start= and end= if it is not the whole run, "
    "or points [[when, value], ...]"
)


@dataclass(frozen=True)
class Interpolation:
    """Interpolation between points (when, value), constant outside. `when` is None for the end of the run."""

    shape: str
    points: tuple[tuple[float | None, float], ...]

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(value for _, value in self.points)

    def times(self, length: float) -> list[float]:
        return [length if when is None else when for when, _ in self.points]

    def at(self, when: float, length: float) -> float:
        shape = SHAPES.get(self.shape, _linear)
        for (start, end), (first, last) in zip(pairwise(self.times(length)), pairwise(self.values), strict=True):
            if when < end:
                return shape(first, last, max(0.0, (when - start) / (end - start)))
        return self.values[-1]

    def check(self, length: float) -> None:
        if self.shape == "exponential" and not self.values[0] * self.values[1] > 0:
            raise ValueError("exponential goes between two numbers above 0. Use linear")
        times = self.times(length)
        if any(b <= a for a, b in pairwise(times)) or not 0 <= times[0] <= times[-1] <= length:
            raise ValueError(f"times must rise and lie in the run, 0 <= start < end <= {length:g}")

    def plain(self) -> Any:
        if self.shape == POINTS:
            return [list(point) for point in self.points]
        (start, first), (end, last) = self.points
        times = ""
        if start:
            times += f", start={start:g}"
        if end is not None:
            times += f", end={end:g}"
        return f"{self.shape}({first!r}, {last!r}{times})"


def read(value: Any) -> Interpolation:
    """Return the curve of a value in [train.schedule]. Raise ValueError with what is allowed."""
    curve = None
    if isinstance(value, str) and (found := _TEXT.fullmatch(value)) and found["shape"] in SHAPES:
        times = re.findall(rf"(start|end)\s*=\s*({_NUMBER})", found["times"])
        given = {name: float(number) for name, number in times}
        if len(given) == len(times):
            points = (given.get("start", 0.0), float(found["first"])), (given.get("end"), float(found["last"]))
            curve = Interpolation(found["shape"], points)
    elif isinstance(value, list | tuple) and value:
        with suppress(TypeError, ValueError):
            curve = Interpolation(POINTS, tuple((float(when), float(number)) for when, number in value))
    if curve is None or not all(math.isfinite(each) for point in curve.points for each in point if each is not None):
        raise ValueError(f"{str(value)[:80]!r} is no schedule. Allowed: {ALLOWED}")
    return curve


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("dp.weight", value) of every entry, also where the name was written as tables, [train.schedule.dp] weight."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def target(name: str, objective: "Composite | None") -> tuple[int, str]:
    """Return the place of the term and the option of a name such as "dp.weight", or raise ValueError."""
    if objective is None:
        raise ValueError("there is no objective (it is 'none')")
    owner, _, option = name.rpartition(".")
    if owner not in objective.names:
        near = nearest(owner, objective.names)
        raise ValueError(
            f"no term {owner!r} in the objective.{near} Give TERM.weight or TERM.OPTION of {', '.join(objective.names)}"
        )
    place = objective.names.index(owner)
    names = [WEIGHT, *_options(objective.terms[place])]
    if option not in names:
        raise ValueError(
            f"{owner} has nothing {option!r} to schedule.{nearest(option, names)} It has: {', '.join(names)}"
        )
    return place, option


def _options(term: Any) -> list[str]:
    """Return the options of a term that are numbers and attributes of the same name."""
    from dipole.core.objectives.spec import options_of  # late: the package loads torch

    floats = [each.name for each in options_of(term.__class__) if float in each.kinds]
    return [name for name in floats if type(getattr(term, name, None)) in (float, int)]


def check(curves: Mapping[str, Interpolation], objective: "Composite | None", length: float) -> list[str]:
    """Return the problems of [train.schedule] for an objective, one line each."""
    problems = []
    for name, curve in curves.items():
        try:
            curve.check(length)
            place, option = target(name, objective)
            assert objective is not None
            # Between their ends all curves are monotone, so that ranges hold if they hold at the ends.
            if option != WEIGHT:
                _check_option(objective.terms[place], option, sorted(set(curve.values)))
            elif min(curve.values) < 0:
                raise ValueError("a weight must be >= 0")
        except (ValueError, OptionError) as error:
            problems.append(f"train.schedule.{name}: {error}")
    return problems


def _check_option(term: Any, option: str, values: list[float]) -> None:
    """Raise an error if an option cannot have the values, or if a term computes something from it when it is built."""
    import torch  # late: a configuration without schedules does not need it

    with torch.random.fork_rng(devices=[]):  # constructors may draw parameters
        moved, *others = [type(term)(**{**term.__dict__["given"], option: value}) for value in values]
    derived = set()
    for value, built in zip(values[1:], others, strict=True):
        setattr(moved, option, value)
        derived |= {key for key, wanted in _plain(built).items() if _plain(moved).get(key) != wanted}
    if derived:
        names = ", ".join(sorted(derived))
        raise ValueError(
            f"{term.registered_name()} computes {names} from it when it is built, so it cannot "
            "change afterwards. Keep the option alone as an attribute and compute the rest where it is used"
        )


def _plain(term: Any) -> dict[str, Any]:
    """Return the numbers and strings that an objective stores."""
    return {key: value for key, value in vars(term).items() if isinstance(value, int | float | str | tuple)}


class Schedules:
    """Sets weights and options of an objective to their values at a step."""

    def __init__(self, train: Any, objective: Any, steps_per_epoch: int) -> None:
        self._objective = objective
        self._curves = [(name, *target(name, objective), curve) for name, curve in train.curves.items()]
        self._length, self._unit = train.length, train.in_steps(1, steps_per_epoch)

    def set(self, step: int) -> dict[str, float]:
        """Set the values of update `step` (from 0). Return them by "train/schedule.NAME"."""
        values = {}
        for name, place, option, curve in self._curves:
            value = curve.at(step / self._unit, self._length)
            if option == WEIGHT:
                self._objective.weights[place] = value
            else:
                setattr(self._objective.terms[place], option, value)
            values[f"train/schedule.{name}"] = value
        return values
