"""Which engine serves a sweep: eager tiles in PyTorch, or fused kernels in Triton.

`DIPOLE_ENGINE` decides by hand. By itself a GPU gets the kernels, after they have computed a small case as the tiles
do; everything else, float64 and a statistic that no kernel can be made of are served by the tiles.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from dipole.core.objectives.statistics import AnyStatistic, Extreme, Statistic
from dipole.core.utils.errors import EngineError

VARIABLE = "DIPOLE_ENGINE"
INTERPRET = "TRITON_INTERPRET"
ENGINES = ("eager", "triton")
ALIASES = {"tiles": "eager"}

log = logging.getLogger("dipole")

_by_hand: list[str] = []
# Why each kernel that was tried is not trusted, by what tells it from others; "" for one that is.
_verdicts: dict[tuple[object, ...], str] = {}
_warned: set[torch.device] = set()
_logged: set[str] = set()
_served = 0


def wanted() -> str | None:
    """The engine that was asked for; None if nobody asked.

    Raises:
        EngineError: if the variable names no engine.
    """
    name = _by_hand[-1] if _by_hand else os.environ.get(VARIABLE, "")
    if not name:
        return None
    name = name.strip().lower()
    name = ALIASES.get(name, name)
    if name and name not in ENGINES:
        known = f"there are {', '.join(ENGINES)} ({', '.join(f'{a} is {b}' for a, b in ALIASES.items())})"
        if _by_hand:
            raise EngineError(f"{name!r} names no engine; {known}. Leave it out to let the device decide.")
        raise EngineError(f"{VARIABLE}={name!r} names no engine; {known}. Unset it to let the device decide.")
    return name or None


@contextmanager
def using(name: str | None) -> Iterator[None]:
    """Inside, sweeps are served by this engine whatever the environment says; None leaves it at that.

    Kernels that are asked for where there is no GPU run in Triton's interpreter.

    Raises:
        EngineError: if there is no such engine, or it cannot run here.
    """
    if name is None:
        yield
        return
    before = os.environ.get(INTERPRET)
    alone = False
    _by_hand.append(name)
    try:
        alone = wanted() == "triton" and not torch.cuda.is_available() and "triton" not in sys.modules
        if alone:  # Triton reads it once, when it is imported
            os.environ[INTERPRET] = "1"
        reason_against(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        yield
    finally:
        _by_hand.pop()
        if alone and before is None:
            del os.environ[INTERPRET]


def reason_against(device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Why kernels cannot serve tensors of this device and dtype; an empty string if they can.

    Raises:
        EngineError: if kernels were asked for by hand and nothing here could run them.
    """
    name = wanted()
    if name == "eager":
        return f"{VARIABLE}=eager" if not _by_hand else "eager was asked for"
    if device.type == "cuda":
        if find_spec("triton") is None:
            if name == "triton":
                raise EngineError(f"{VARIABLE}=triton, but Triton is not installed: pip install triton, or unset it.")
            return "Triton is not installed"
        if torch.version.cuda is not None and torch.cuda.get_device_capability(device) < (8, 0):
            return "the GPU is older than compute capability 8.0"
    elif device.type != "cpu" or name != "triton":
        return "a processor is served by tiles" if device.type == "cpu" else f"no kernels for the device {device.type}"
    elif not interpreter():
        if torch.cuda.is_available():
            return "tensors on the processor are served by tiles"
        raise EngineError(cure_without_gpu())
    return "" if dtype == torch.float32 else f"kernels compute in float32, not {str(dtype).removeprefix('torch.')}"


def interpreter() -> bool:
    """Whether Triton is here and runs kernels in its interpreter, on a processor."""
    if find_spec("triton") is None:
        return False
    from dipole.core.objectives.kernels.fused import interpreted

    return interpreted()


def cure_without_gpu() -> str:
    """What to do where kernels are asked for and there is no GPU."""
    if find_spec("triton") is None:
        return f"{VARIABLE}=triton, but there is no GPU and Triton is not installed: unset it, or {VARIABLE}=eager."
    return (
        f"{VARIABLE}=triton, but torch sees no GPU: unset it, or set {VARIABLE}=eager; to run the kernels slowly on a "
        f"processor, set {INTERPRET}=1 as well before Python starts."
    )


def unsupported_reason(statistic: AnyStatistic) -> str:
    """Return why a statistic cannot run in the kernels; an empty string if it can."""
    name = type(statistic).__name__
    if isinstance(statistic, Extreme):
        return ""
    if statistic.learned:
        return f"{name}: its numbers are learned, and a kernel would wait to read them"
    if statistic.kernel is None:
        return f"{name}: it has no kernel functions"
    return ""


def supported(statistics: Sequence[AnyStatistic], x: Tensor) -> list[AnyStatistic]:
    """Return the statistics of the rows x that kernels compute here. The others, if any, run in tiles."""
    if reason_against(x.device, x.dtype) or not x.shape[1]:
        return []
    found: list[AnyStatistic] = []
    for each in statistics:
        reason = unsupported_reason(each)
        if not reason:
            found.append(each)
        elif reason not in _logged:
            _logged.add(reason)
            log.warning("On %s tiles compute %s. It is slower there, with the same result.", x.device, reason)
    return found


def sums(
    x: Tensor,
    y: Tensor,
    excluded: Tensor,
    statistics: Sequence[Statistic],
    running: Sequence[bool],
    extremes: Sequence[Extreme],
    symmetric: bool,
    embeddings: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...] | None:
    """Return (sums (N, A), shifts (S, A), indices (A,) ...) by kernels; None where tiles have to compute them.

    Args:
        x: (A, d) and
        y: (C, d).
        excluded: (A, E) columns that take no part in a row.
        statistics: those with a sum. Each can run in the kernels.
        running: for each, whether its exponent needs a running maximum.
        extremes: those with an index.
        symmetric: x is y, and exclusion is mutual.
        embeddings: rows that x and y are multiples of, in the encoder's dtype.
    """
    global _served
    from dipole.core.objectives.kernels.fused import fused
    from dipole.core.objectives.kernels.selfcheck import key_of, verdict

    key = key_of(x, excluded, statistics, running, extremes, symmetric, embeddings)
    if key not in _verdicts:
        _verdicts[key] = verdict(x, excluded, statistics, running, extremes, symmetric, embeddings)
        if _verdicts[key] and x.device not in _warned:
            _warned.add(x.device)
            names = ", ".join(str(each) for each in [*statistics, *extremes])
            warnings.warn(
                f"the triton engine failed its self-check on {x.device} ({_verdicts[key]}); eager tiles compute "
                f"{names} instead, which is slower. Later failures on this device give no warning. "
                f"{VARIABLE}=eager silences this one.",
                stacklevel=2,
            )
    if _verdicts[key]:
        return None
    _served += 1
    return fused(x, y, excluded, statistics, running, extremes, symmetric, embeddings)


def served() -> int:
    """How many sweeps kernels have served in this process."""
    return _served


def failures() -> list[str]:
    """What was wrong with the kernels that are not trusted."""
    return [verdict for verdict in _verdicts.values() if verdict]


def outlook(statistics: Iterable[AnyStatistic]) -> str:
    """Return in a few words which engine computes some statistics where, and why."""
    asked = list(statistics)
    if not asked:
        return "none: no row statistics"
    reasons = [reason for reason in map(unsupported_reason, asked) if reason]
    if not reasons:
        return "kernels on a GPU, tiles on a processor"
    if len(reasons) == len(asked):
        return f"tiles everywhere: {'; '.join(reasons)}"
    return f"kernels on a GPU, tiles on a processor; tiles everywhere for {'; '.join(reasons)}"


def triton_version() -> str:
    """The version of Triton; an empty string where it is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
