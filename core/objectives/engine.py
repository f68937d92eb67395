"""Compute the row statistics of a similarity matrix in one of three ways: dense, tiles or kernels.

Small matrices are dense. Larger ones run in fused Triton kernels on a GPU, after a self-check, and in tiles elsewhere.
Tiles also serve float64 and statistics without kernel functions. `DIPOLE_ENGINE` overrides the choice.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.similarity import fits, paired
from dipole.core.objectives.statistics import (
    LOWEST,
    SMALLEST_EXPONENT,
    AnyStatistic,
    Extreme,
    LogSumExp,
    as_tuple,
    needs_maximum,
)
from dipole.core.objectives.tiles import Problem, mask_of, tiled
from dipole.core.utils.errors import EngineError
from dipole.core.utils.uncompiled import uncompiled

VARIABLE = "DIPOLE_ENGINE"
INTERPRET = "TRITON_INTERPRET"
ENGINES = ("dense", "eager", "triton")
ALIASES = {"tiles": "eager"}

log = logging.getLogger("dipole")

_requested: list[str] = []
# The self-check result of each kernel: an error, or "" if it passed.
_verdicts: dict[tuple[object, ...], str] = {}
_warned: set[torch.device] = set()
_logged: set[str] = set()
_served = 0


# The three ways ----------------------------------------------------------------------------------------------------


def similarities(
    x: Tensor,
    y: Tensor,
    pairs: Pairs,
    statistics: Sequence[AnyStatistic],
    bound: float | None,
    embeddings: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, dict[AnyStatistic, Tensor]]:
    """Return the similarities of the positives, (A, K), and the statistics of the rows of x y^T, (A,) each.

    A small matrix (`fits`) is formed as a whole, a larger one in kernels or tiles. `bound` is the largest |x_i . y_j|,
    if it is known. x and y, one tensor if the anchors are the candidates, may be multiples of `embeddings` in half
    precision, which kernels then multiply.
    """
    wanted = list(dict.fromkeys(statistics))
    if not wanted:
        return paired(x, y, pairs.positives), {}
    known = pairs.known
    if known.partners:
        return paired(x, y, pairs.positives), _between_views(x, y, pairs, wanted, bound, embeddings)
    if _is_dense(len(x), len(y), x.device):
        return dense(
            x,
            y,
            pairs.positives,
            pairs.excluded,
            wanted,
            counts=lambda: pairs.negative_counts,
            bound=bound,
            padded=known.padded,
            never_empty=not known.padded and pairs.has_negatives is True,
            first=known.first_negative,
        )
    return paired(x, y, pairs.positives), statistics_of(pairs, x, y, wanted, bound, embeddings)


def dense(
    x: Tensor,
    y: Tensor,
    positives: Tensor,
    excluded: Tensor,
    statistics: Sequence[AnyStatistic],
    *,
    counts: Callable[[], Tensor],
    bound: float | None,
    padded: bool,
    never_empty: bool = False,
    first: int = 0,
) -> tuple[Tensor, dict[AnyStatistic, Tensor]]:
    """Compute `similarities` with ordinary PyTorch operations and autograd. `statistics` lists each once."""
    matrix = x @ y.t()
    near = matrix.gather(1, positives.clamp_min(0) if padded else positives)
    if first:
        matrix, excluded = matrix[:, first:], excluded - first
    mask = mask_of(excluded, matrix.shape[1]) if padded or first else None

    def fill_excluded(values: Tensor, fill: float) -> Tensor:  # in place: a new matrix costs as much as its numbers
        if mask is not None:
            return values.masked_fill_(mask, fill)
        return values.scatter_(1, excluded, fill)

    zeroed: Tensor | None = None
    results: dict[AnyStatistic, Tensor] = {}
    for wanted in statistics:
        if isinstance(wanted, Extreme):
            results[wanted] = _place(fill_excluded(wanted.sign * matrix.detach(), -torch.inf), first)
            continue
        statistic = wanted.exact
        e: Tensor | None = None
        shift: Tensor | None = None
        if statistic.scale is not None:
            exponent = statistic.scale * matrix
            with torch.set_grad_enabled(not never_empty and torch.is_grad_enabled()):
                # In a row with negatives, e^-inf = 0 stops the gradient by itself.
                fill_excluded(exponent, -torch.inf)
            if needs_maximum(wanted, bound):
                exponent, shift = _below_top(exponent)
            e = exponent.exp_()
        if isinstance(statistic, LogSumExp):
            assert e is not None
            parts: tuple[Tensor, ...] = (e,)
            if never_empty:  # no sum is 0, so the logarithm needs no mask
                found = e.sum(1).log()
                results[wanted] = found
                if shift is not None:
                    results[wanted] = found + shift
                continue
        else:
            # At an excluded entry a part may be infinite, and its gradient 0 * inf. So parts see a similarity of 0.
            if zeroed is None:
                zeroed = fill_excluded(matrix.clone(), 0.0)
            parts = as_tuple(statistic.parts(zeroed, e))
            if e is None:
                parts = tuple([fill_excluded(part.clone(), 0.0) for part in parts])
        if shift is None:
            shift = x.new_zeros(())
        results[wanted] = statistic.finish(tuple([part.sum(1) for part in parts]), shift, counts())
    return near, results


def _below_top(exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract each row's maximum, (A,), a constant. Exponents of subnormal numbers, which are slow, become -inf."""
    if not exponent.shape[1]:
        return exponent, exponent.new_full((len(exponent),), LOWEST)
    top = exponent.detach().amax(1).clamp_min(LOWEST)
    below = exponent - top.unsqueeze(1)
    return torch.threshold(below, SMALLEST_EXPONENT[below.dtype], -torch.inf), top


def _place(values: Tensor, first: int) -> Tensor:
    """Return the column of each row's largest entry, (A,), or -1 for a row without entries."""
    if not values.shape[1]:
        return torch.full((len(values),), -1, device=values.device)
    top, place = values.max(1)
    return torch.where(top > -torch.inf, place + first, -1)


def statistics_of(
    pairs: Pairs,
    x: Tensor,
    y: Tensor,
    statistics: Sequence[AnyStatistic],
    bound: float | None,
    embeddings: tuple[Tensor, Tensor] | None = None,
) -> dict[AnyStatistic, Tensor]:
    """Return the statistics of the rows of x y^T of some pairs in kernels or tiles, as in `similarities`."""
    return row_statistics(
        x,
        y,
        pairs.excluded,
        statistics,
        counts=pairs.negative_counts,
        bound=bound,
        symmetric=pairs.known.mutual and x is y,
        first=pairs.known.first_negative,
        embeddings=embeddings,
    )


def _is_dense(anchors: int, candidates: int, device: torch.device) -> bool:
    name = requested()
    return name == "dense" or (name != "triton" and fits(anchors, candidates, device))


def _between_views(
    x: Tensor,
    y: Tensor,
    pairs: Pairs,
    wanted: Sequence[AnyStatistic],
    bound: float | None,
    embeddings: tuple[Tensor, Tensor] | None,
) -> dict[AnyStatistic, Tensor]:
    """Return the statistics of pairs of views. Each run of anchors needs the columns of one view only."""
    known, counts = pairs.known, pairs.negative_counts
    batch, parts, start = known.candidate_views[0][1], [], 0
    # The rows of the other views come first among the ignored ones.
    excluded = torch.cat([pairs.positives, pairs.ignored[:, len(y) - batch :]], 1)
    for (_, length), partner in zip(known.anchor_views, known.partners, strict=True):
        mine, theirs = slice(start, start + length), slice(partner * batch, (partner + 1) * batch)
        start, outside = start + length, excluded[mine] - theirs.start
        if _is_dense(length, batch, x.device):
            of_block = partial(counts.__getitem__, mine)
            none = outside[:, :0]
            _, found = dense(x[mine], y[theirs], none, outside, wanted, counts=of_block, bound=bound, padded=True)
        else:
            both = None if embeddings is None else (embeddings[0][mine], embeddings[1][theirs])
            found = row_statistics(
                x[mine], y[theirs], outside, wanted, counts=counts[mine], bound=bound, embeddings=both
            )
        for extreme in [each for each in found if isinstance(each, Extreme)]:
            found[extreme] = torch.where(found[extreme] < 0, -1, found[extreme] + theirs.start)
        parts.append(found)
    return {each: torch.cat([part[each] for part in parts]) for each in wanted}


@uncompiled
def row_statistics(
    x: Tensor,
    y: Tensor,
    excluded: Tensor,
    statistics: Sequence[AnyStatistic],
    *,
    counts: Tensor,
    bound: float | None = None,
    symmetric: bool = False,
    tile: int | None = None,
    first: int = 0,
    embeddings: tuple[Tensor, Tensor] | None = None,
) -> dict[AnyStatistic, Tensor]:
    """Return all statistics of the rows of x y^T, (A,) each, in kernels or tiles. `Extreme` gives indices.

    Args:
        excluded: (A, E) columns to leave out of each row, padded with -1.
        counts: (A,) number of columns that take part in each row.
        symmetric: x is y, and j is excluded for i exactly if i is for j.
        tile: rows and columns of a tile. If it is given, kernels are not used.
        first: columns before it take part in no row.
    """
    if first:
        y, excluded = y[first:], excluded - first
        if embeddings is not None:
            embeddings = embeddings[0], embeddings[1][first:]
    if bound is None:
        bound = math.inf
        if x.device.type == "cpu" and len(y):
            lengths = [float(torch.linalg.vector_norm(each.detach(), dim=1).max()) for each in (x, y)]
            bound = lengths[0] * lengths[1]
    matrix = Problem(x, y, excluded, symmetric, (), (), (), embeddings)
    rest = list(dict.fromkeys(statistics))
    results: dict[AnyStatistic, Tensor] = {}
    in_kernels = supported(rest, x) if tile is None else []
    if in_kernels:
        problem = matrix.with_statistics(in_kernels, bound)
        found = _in_kernels(problem)
        if found is not None:
            results = problem.finish(found, counts)
            rest = [each for each in rest if each not in results]
    if rest:
        problem = matrix.with_statistics(rest, bound)
        results |= problem.finish(tiled(problem, tile), counts)
    if first:
        for extreme in [each for each in results if isinstance(each, Extreme)]:
            index = results[extreme]
            results[extreme] = torch.where(index < 0, index, index + first)
    return results


def _in_kernels(problem: Problem) -> tuple[Tensor, ...] | None:
    """Return the result of `fused`. None if the kernels failed their self-check."""
    global _served
    from dipole.core.objectives.kernels.fused import fused
    from dipole.core.objectives.kernels.selfcheck import key_of, verdict

    key, device = key_of(problem), problem.x.device
    if key not in _verdicts:
        _verdicts[key] = verdict(problem, dense)
        if _verdicts[key] and device not in _warned:
            _warned.add(device)
            names = ", ".join(str(each) for each in [*problem.statistics, *problem.extremes])
            warnings.warn(
                f"the triton engine failed its self-check on {device} ({_verdicts[key]}); eager tiles compute "
                f"{names} instead, which is slower. Later failures on this device give no warning. "
                f"{VARIABLE}=eager silences this one.",
                stacklevel=2,
            )
    if _verdicts[key]:
        return None
    _served += 1
    return fused(problem)


# The choice --------------------------------------------------------------------------------------------------------


def requested() -> str | None:
    """Return the engine that `using` or the environment asks for, or None to let dipole choose."""
    given = _requested[-1] if _requested else os.environ.get(VARIABLE, "")
    if not given:
        return None
    name = given.strip().lower()
    name = ALIASES.get(name, name)
    if name in ("", *ENGINES):
        return name or None
    known = f"{given!r} names no engine; there are {', '.join(ENGINES)}, and tiles is eager"
    if _requested:
        raise EngineError(f"{known}. Leave it out to let dipole choose.")
    raise EngineError(f"{VARIABLE}={known}. Unset it to let dipole choose.")


@contextmanager
def using(name: str | None) -> Iterator[None]:
    """Use this engine inside the block, whatever the environment says. None changes nothing.

    Without a GPU the kernels run in Triton's interpreter. Raises EngineError for an engine that cannot run here.
    """
    if name is None:
        yield
        return
    before = os.environ.get(INTERPRET)
    alone = False
    _requested.append(name)
    try:
        alone = requested() == "triton" and not torch.cuda.is_available() and "triton" not in sys.modules
        if alone:  # Triton reads it once, when it is imported
            os.environ[INTERPRET] = "1"
        reason_against(usual_device())
        yield
    finally:
        _requested.pop()
        if alone and before is None:
            del os.environ[INTERPRET]


def usual_device() -> torch.device:
    """Return the device on which kernels would run: the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")


def reason_against(device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Return why kernels cannot compute on tensors of this device and dtype, or an empty string.

    Raises EngineError if kernels were asked for, and nothing here can run them.
    """
    name = requested()
    if name in ("eager", "dense"):
        if _requested:
            return f"{name} was asked for"
        return f"{VARIABLE}={name}"
    if device.type == "cuda":
        if find_spec("triton") is None:
            if name == "triton":
                raise EngineError(f"{VARIABLE}=triton, but Triton is not installed: pip install triton, or unset it.")
            return "Triton is not installed"
        if torch.version.cuda is not None and torch.cuda.get_device_capability(device) < (8, 0):
            return "the GPU is older than compute capability 8.0"
    elif device.type != "cpu":
        return f"no kernels for the device {device.type}"
    elif name != "triton":
        return "a processor runs tiles"
    elif not interpreter():
        if torch.cuda.is_available():
            return "tensors on the processor run in tiles"
        unset = f"unset it, or set {VARIABLE}=eager"
        if find_spec("triton") is None:
            raise EngineError(f"{VARIABLE}=triton, but there is no GPU and Triton is not installed: {unset}.")
        raise EngineError(
            f"{VARIABLE}=triton, but torch sees no GPU: {unset}; to run the kernels slowly on a processor, set "
            f"{INTERPRET}=1 as well before Python starts."
        )
    if dtype != torch.float32:
        return f"kernels compute in float32, not {str(dtype).removeprefix('torch.')}"
    return ""


def interpreter() -> bool:
    """Return whether Triton is installed and runs kernels in its interpreter, on a processor."""
    if find_spec("triton") is None:
        return False
    from dipole.core.objectives.kernels.fused import interpreted

    return interpreted()


def unsupported_reason(statistic: AnyStatistic) -> str:
    """Return why a statistic cannot run in the kernels, or an empty string."""
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


def served() -> int:
    """Return how many matrices kernels have computed in this process."""
    return _served


def failures() -> list[str]:
    """Return what was wrong with the kernels that failed their self-check."""
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
