"""Compute the row statistics of a similarity matrix in one of three ways: dense, tiles or kernels.

Small matrices are dense. Larger ones run in fused Triton kernels on a GPU, after a self-check, and in tiles elsewhere.
Tiles also serve float64 and statistics without kernel functions. `DIPOLE_ENGINE` overrides the choice.
"""

import logging
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

from dipole.core.objectives.indices import mask_of
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.similarity import Factors, fits, listed_similarities
from dipole.core.objectives.statistics import (
    LOWEST,
    SMALLEST_EXPONENT,
    AnyStatistic,
    Extreme,
    LogSumExp,
    as_tuple,
    finished,
    needs_maximum,
)
from dipole.core.objectives.tiles import MatrixPass, Tiling, row_sums
from dipole.core.utils.errors import EngineError

VARIABLE = "DIPOLE_ENGINE"
INTERPRET = "TRITON_INTERPRET"
ENGINES = ("dense", "eager", "triton")
ALIASES = {"tiles": "eager"}
NO_SHIFT = torch.zeros((), device="cpu")

log = logging.getLogger("dipole")

_requested: list[str] = []
# The self-check result of each kernel: an error, or "" if it passed.
_selfchecks: dict[tuple[object, ...], str] = {}
_warned: set[torch.device] = set()
_logged: set[str] = set()
_served = 0


# The three ways ----------------------------------------------------------------------------------------------------


def similarities(
    factors: Factors, pairs: Pairs, statistics: Sequence[AnyStatistic]
) -> tuple[Tensor, dict[AnyStatistic, Tensor]]:
    """Return the similarities of the positives, (A, K), and the statistics of the rows of a matrix, (A,) each.

    A small matrix (`fits`) is formed as a whole, a larger one in kernels or tiles.
    """
    wanted, facts = list(dict.fromkeys(statistics)), pairs.facts
    x, y = factors.x, factors.y
    if wanted and not facts.partners and _is_dense(len(x), len(y), x.device):
        matrix, index, excluded = x @ y.t(), pairs.positives, pairs.excluded
        if facts.padded or facts.first_negative:
            index, excluded = index.clamp_min(0), pairs.excluded_mask()
        found = dense(matrix, excluded, wanted, pairs.negative_counts, factors.bound, pairs.all_have_negatives)
        return matrix.gather(1, index), found
    positive = listed_similarities(x, y, pairs.positives)
    if not wanted:
        return positive, {}
    if facts.partners:
        return positive, _between_views(factors, pairs, wanted)
    return positive, statistics_of(factors, pairs, wanted)


def dense(
    matrix: Tensor,
    excluded: Tensor,
    statistics: Sequence[AnyStatistic],
    counts: Tensor,
    bound: float | None,
    none_empty: bool = False,
) -> dict[AnyStatistic, Tensor]:
    """Return the statistics of the rows of a whole matrix (A, C), by ordinary PyTorch operations and autograd.

    `excluded` are the columns (A, E) that take no part in each row, or a mask (A, C), True there. `counts` (A,) is the
    number of the others, and `none_empty` says that every row has one. `statistics` lists each once. No entry is larger
    than `bound`, if it is known.
    """
    seen: Tensor | None = None
    results: dict[AnyStatistic, Tensor] = {}
    for wanted in statistics:
        if isinstance(wanted, Extreme):
            values, place = _fill_(wanted.sign * matrix.detach(), excluded, -torch.inf).max(1)
            results[wanted] = torch.where(values > -torch.inf, place, -1)
            continue
        statistic, shift = wanted.exact, NO_SHIFT
        e: Tensor | None = None
        if statistic.scale is not None:
            exponent = statistic.scale * matrix
            with torch.no_grad():  # e^-inf = 0 stops the gradient by itself. The conformance kit replaces `detach`
                _fill_(exponent, excluded, -torch.inf)
            if needs_maximum(wanted, bound):
                shift = exponent.detach().amax(1).clamp_min(LOWEST)
                exponent = exponent - shift.unsqueeze(1)
                # Exponents of subnormal numbers, which are slow, become -inf.
                exponent = torch.threshold(exponent, SMALLEST_EXPONENT[exponent.dtype], -torch.inf)
            e = exponent.exp_()
        if isinstance(statistic, LogSumExp):
            sums = [exponent.sum(1)]
        else:
            if seen is None:  # a part may be infinite at an excluded entry, and its gradient 0 * inf: let it see a 0
                seen = _fill_(matrix.clone(), excluded, 0.0)
            parts = as_tuple(statistic.parts(seen, e))
            if e is None:
                parts = tuple([_fill_(part.clone(), excluded, 0.0) for part in parts])
            sums = [part.sum(1) for part in parts]
        results[wanted] = finished(statistic, sums, shift, counts, none_empty)
    return results


def _fill_(values: Tensor, excluded: Tensor, fill: float) -> Tensor:
    """Write a number into the excluded entries of a matrix. Where lists have no padding, they are faster than masks."""
    if excluded.dtype == torch.bool:
        return values.masked_fill_(excluded, fill)
    return values.scatter_(1, excluded, fill)


def statistics_of(factors: Factors, pairs: Pairs, statistics: Sequence[AnyStatistic]) -> dict[AnyStatistic, Tensor]:
    """Return the statistics of the rows of the matrix of some pairs in kernels or tiles, as in `similarities`."""
    facts, counts = pairs.facts, pairs.negative_counts
    symmetric = facts.mutual and factors.x is factors.y
    return row_statistics(factors, pairs.excluded, statistics, counts, symmetric, facts.first_negative)


def _is_dense(anchors: int, candidates: int, device: torch.device) -> bool:
    name = requested()
    return name == "dense" or (name != "triton" and fits(anchors, candidates, device))


def _between_views(factors: Factors, pairs: Pairs, wanted: Sequence[AnyStatistic]) -> dict[AnyStatistic, Tensor]:
    """Return the statistics of pairs of views. Each run of anchors needs the columns of one view only."""
    facts, counts = pairs.facts, pairs.negative_counts
    batch, parts, start = facts.candidate_views[0][1], [], 0
    # The rows of the other views come first among the ignored ones.
    excluded = torch.cat([pairs.positives, pairs.ignored[:, len(factors.y) - batch :]], 1)
    for (_, length), partner in zip(facts.anchor_views, facts.partners, strict=True):
        mine, theirs = slice(start, start + length), slice(partner * batch, (partner + 1) * batch)
        start, outside, part = start + length, excluded[mine] - theirs.start, factors.part(mine, theirs)
        if _is_dense(length, batch, factors.x.device):
            found = dense(part.x @ part.y.t(), mask_of(outside, batch), wanted, counts[mine], part.bound)
        else:
            found = row_statistics(part, outside, wanted, counts[mine])
        parts.append(_moved(found, theirs.start))
    return {each: torch.cat([part[each] for part in parts]) for each in wanted}


def row_statistics(
    factors: Factors,
    excluded: Tensor,
    statistics: Sequence[AnyStatistic],
    counts: Tensor,
    symmetric: bool = False,
    first: int = 0,
) -> dict[AnyStatistic, Tensor]:
    """Return all statistics of the rows of a matrix, (A,) each, in kernels or tiles. `Extreme` gives indices.

    Args:
        excluded: (A, E) columns to leave out of each row, padded with -1.
        counts: (A,) number of columns that take part in each row.
        symmetric: x is y, and j is excluded for i exactly if i is for j.
        first: columns before it take part in no row.
    """
    if first:
        factors, excluded = factors.part(slice(None), slice(first, None)), excluded - first
    bound = factors.bound
    if bound is None:
        bound = math.inf
        if factors.x.device.type == "cpu" and len(factors.y):
            longest = [float(torch.linalg.vector_norm(each.detach(), dim=1).max()) for each in (factors.x, factors.y)]
            bound = longest[0] * longest[1]
    matrix = MatrixPass(factors, excluded, symmetric, (), (), ())
    rest = list(dict.fromkeys(statistics))
    results: dict[AnyStatistic, Tensor] = {}
    in_kernels = supported(rest, factors.x)
    if in_kernels:
        problem = matrix.with_statistics(in_kernels, bound)
        found = _in_kernels(problem)
        if found is not None:
            results = problem.finish(found, counts)
            rest = [each for each in rest if each not in results]
    if rest:
        problem = matrix.with_statistics(rest, bound)
        results |= problem.finish(row_sums(Tiling(problem)), counts)
    return _moved(results, first)


def _moved(found: dict[AnyStatistic, Tensor], start: int) -> dict[AnyStatistic, Tensor]:
    """Return statistics whose indices count from `start` as indices that count from 0."""
    for each, index in found.items():
        if isinstance(each, Extreme) and start:
            found[each] = torch.where(index < 0, index, index + start)
    return found


def _in_kernels(problem: MatrixPass) -> tuple[Tensor, ...] | None:
    """Return the result of the kernels. None if the kernels failed their self-check."""
    global _served
    from dipole.core.objectives.kernels.fused import Launcher, key_of, selfcheck_error

    key, device = key_of(problem), problem.factors.x.device
    if key not in _selfchecks:
        _selfchecks[key] = selfcheck_error(problem, dense)
        if _selfchecks[key] and device not in _warned:
            _warned.add(device)
            names = ", ".join(str(each) for each in [*problem.statistics, *problem.extremes])
            warnings.warn(
                f"the triton engine failed its self-check on {device} ({_selfchecks[key]}); eager tiles compute "
                f"{names} instead, which is slower. Later failures on this device give no warning. "
                f"{VARIABLE}=eager silences this one.",
                stacklevel=2,
            )
    if _selfchecks[key]:
        return None
    _served += 1
    return row_sums(Launcher.of(problem))


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
    return [error for error in _selfchecks.values() if error]


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
