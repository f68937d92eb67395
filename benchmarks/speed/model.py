"""What a step of a loss costs a GPU, modelled: eager tiles as they are launched, fused kernels as they are designed.

Nothing here is measured. The tiles are counted operation by operation on tensors without numbers (`eager.py`), the
kernels follow from their design (`fused.py`); both divided by a device's peak rates are times that no implementation of
the same operations undercuts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import dipole
from dipole.benchmarks.speed.devices import DEVICES
from dipole.benchmarks.speed.eager import counted
from dipole.benchmarks.speed.fused import Matrix, Summand, fused
from dipole.benchmarks.speed.work import Work, milliseconds, totals
from dipole.core.objectives.dense import fits
from dipole.core.objectives.engine import row_statistics
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.statistics import AnyStatistic, Statistic, needs_maximum, part_count
from dipole.core.utils.errors import DipoleError

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}


class ModelError(DipoleError):
    """A loss that the model does not cover."""


@dataclass(frozen=True)
class Case:
    """A loss of two views, `rows` embeddings together, forward and backward.

    Args:
        loss: text of an objective.
        rows: embeddings (2B) of a batch of B points.
        width: d.
        dtype: of the embeddings, a name of DTYPES.
    """

    loss: str
    rows: int
    width: int
    dtype: str

    def views(self, device: torch.device | str, generator: torch.Generator | None = None) -> list[Tensor]:
        """Two views (rows / 2, d) that ask for a gradient; without numbers on the device "meta"."""
        shape = self.rows // 2, self.width
        options: dict[str, Any] = {"device": device, "dtype": DTYPES[self.dtype]}
        views = [torch.randn(*shape, generator=generator, **options) for _ in range(2)]
        return [view.requires_grad_() for view in views]

    def __str__(self) -> str:
        return f"{self.loss}, {self.rows} rows, d = {self.width}, {self.dtype}"


def modelled(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """For each case and engine what it launches, computes and moves, and milliseconds on every device.

    Raises:
        ModelError: if a loss looks at more than one matrix, or at one of its own making.
    """
    for case in cases:
        kernels = with_kernels(case)  # first, as it refuses what it does not cover
        for engine, work in (("eager tiles", eager(case)), ("fused", kernels)):
            yield {
                "loss": case.loss,
                "rows": case.rows,
                "width": case.width,
                "dtype": case.dtype,
                "engine": engine,
                **totals(work),
                "milliseconds": {name: milliseconds(work, device) for name, device in DEVICES.items()},
            }


@lru_cache(maxsize=64)
def eager(case: Case) -> Work:
    """What a step launches today on a device without kernels of its own."""
    loss, views = dipole.objective(case.loss), case.views("meta")
    return counted(lambda: loss(*views).loss.backward())


def with_kernels(case: Case) -> Work:
    """The same with the sweep by fused kernels; what is around the sweep stays as it is."""
    statistics, pairs, x, bound = _asked(case)
    if fits(case.rows, case.rows):
        return eager(case)  # formed as a whole, on every device
    summands, extremes = [], 0
    for each in statistics:
        if isinstance(each, Statistic):
            summands.append(Summand(part_count(each), each.scale, needs_maximum(each, bound)))
        else:
            extremes += 1
    matrix = Matrix(
        case.rows, case.rows, case.width, case.dtype != "float32", pairs.mutual, pairs.excluded.shape[1], extremes
    )
    tiles = counted(lambda: _swept(statistics, pairs, x, bound))
    return eager(case) - tiles + counted(lambda: _finished(statistics, pairs, x)) + fused(matrix, summands)


def _asked(case: Case) -> tuple[list[AnyStatistic], Pairs, Tensor, float | None]:
    """The statistics of a loss, its pairs, the rows of its matrix and the bound of their products."""
    loss, pairs = dipole.objective(case.loss), Pairs.from_views(case.views("meta"))
    terms = [term for _, _, term in loss]
    statistics = list(dict.fromkeys(each for term in terms for each in term.statistics().values()))
    alone = len({term.projection() for term in terms}) == 1 and all(term.prepare(pairs) is pairs for term in terms)
    if not statistics or not alone or terms[0].similarity != terms[0].projection():
        raise ModelError(
            "the model covers losses whose terms ask for statistics of one matrix of cosines or dot products of two "
            f"views; {case.loss!r} is none. Such are infonce, dcl, hcl, cacr, align_uniform, triplet, sums with dp."
        )
    x, _, bound = terms[0].project(pairs)
    return statistics, pairs, x.detach().requires_grad_(), bound


def _swept(statistics: Sequence[AnyStatistic], pairs: Pairs, x: Tensor, bound: float | None) -> None:
    found = row_statistics(
        x, x, pairs.excluded, statistics, counts=pairs.negative_counts, bound=bound, symmetric=pairs.mutual
    )
    torch.autograd.backward([each for each in found.values() if each.requires_grad], _ones(found.values()))


def _finished(statistics: Sequence[AnyStatistic], pairs: Pairs, x: Tensor) -> None:
    """What makes statistics of sums, which both engines do."""
    for each in statistics:
        if isinstance(each, Statistic):
            sums = tuple(x.new_empty(len(x)).requires_grad_() for _ in range(part_count(each)))
            value = each.finish(sums, x.new_empty(len(x)), pairs.negative_counts)
            if value.grad_fn is not None:
                value.backward(torch.empty_like(value))


def _ones(values: Any) -> list[Tensor]:
    return [torch.empty_like(each) for each in values if each.requires_grad]
