"""Rows of past batches, and momentum copies, for frameworks that contrast with more than a batch."""

from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dipole.core.objectives.checks import shape_of
from dipole.core.objectives.spec import check_whole
from dipole.core.train.schedule import SHAPES
from dipole.core.utils.distributed import gather_rows, row_counts, world_size
from dipole.core.utils.errors import CheckpointError, OptionError, PairsError


class Queue(nn.Module):
    """The last `size` rows of unit length. New rows overwrite the oldest. It starts with random unit vectors.

        >>> queue = Queue(4, 2)
        >>> queue.push(torch.tensor([[3.0, 4.0]]))
        >>> queue.past()
        tensor([[0.6000, 0.8000]])
        >>> queue.all().shape
        torch.Size([4, 2])

    Args:
        size: rows, >= 1.
        dim: width of a row, >= 1.

    Raises:
        OptionError: a number is no integer >= 1.
    """

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        check_whole("size", size)
        check_whole("dim", dim)
        self.register_buffer("rows", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))
        self._filled: int | None = 0  # the value of `filled`, known without reading the device; None: read it

    def all(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return all rows, (size, dim).

        Args:
            dtype: of the result. None is that of the buffer.
        """
        return self.get_buffer("rows").to(dtype)

    def past(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the rows that have been pushed, (n, dim).

        Args:
            dtype: as in `all`.
        """
        if self._filled is None:
            self._filled = int(self.get_buffer("filled"))
        return self.all(dtype)[: self._filled]

    @torch.no_grad()
    def push(self, rows: Tensor) -> None:
        """Add rows. Of more than fit the last ones stay.

        Args:
            rows: (n, dim). With several ranks, the same on each.

        Raises:
            PairsError: rows have another shape.
        """
        store, place, filled = (self.get_buffer(name) for name in ("rows", "place", "filled"))
        if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != store.shape[1]:
            raise PairsError(f"a queue takes rows of shape (n, {store.shape[1]}), got {shape_of(rows)}.")
        rows = F.normalize(rows.to(store.dtype), dim=1)[-len(store) :]
        store[(place + torch.arange(len(rows), device=store.device)) % len(store)] = rows
        place.copy_((place + len(rows)) % len(store))
        filled.copy_((filled + len(rows)).clamp_max(len(store)))
        if self._filled is not None:
            self._filled = min(self._filled + len(rows), len(store))

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *args: Any) -> None:
        check_rows(state.get(f"{prefix}rows"), len(self.all()), "queue", "queue (NNCLR: support)")
        super()._load_from_state_dict(state, prefix, *args)
        self._filled = None


def check_rows(saved: Any, size: int, what: str, setting: str) -> None:
    """Raise CheckpointError if a saved queue or bank (..., rows, dim) has not `size` rows."""
    if isinstance(saved, Tensor) and saved.ndim >= 2 and saved.shape[-2] != size:
        raise CheckpointError(
            f"the state has a {what} of {saved.shape[-2]} rows, and this model one of {size}. Build the model with "
            f"{setting} = {saved.shape[-2]}."
        )


class Fresh:
    """Rows of this rank since the optimizer's last step, of each batch over which gradients were accumulated."""

    def __init__(self) -> None:
        self._rows: deque[tuple[Tensor, ...]] = deque(maxlen=1000)  # for a loop that never takes them

    def add(self, *rows: Tensor) -> None:
        """Add tensors with one first dimension, unless the batch is not trained on."""
        if torch.is_grad_enabled():
            self._rows.append(tuple(each.detach().clone() for each in rows))

    def take(self) -> list[tuple[Tensor, ...]]:
        """Return those of all ranks in rank order, in the order of the batches, and forget them."""
        found = []
        for rows in self._rows:
            if world_size() > 1:  # queues and banks are equal on all ranks
                sizes = row_counts(rows[0])
                rows = tuple(gather_rows(each, sizes) for each in rows)
            found.append(rows)
        self._rows.clear()
        return found


@torch.no_grad()
def momentum_update(copy: nn.Module, module: nn.Module, momentum: float) -> None:
    """Move the parameters of a copy towards a module: momentum * copy + (1 - momentum) * module.

        >>> model, slow = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> momentum_update(slow, model, momentum=0.99)

    Args:
        copy: a module of the same structure, such as `copy.deepcopy(module).requires_grad_(False)`.
        module: the one that is trained.
        momentum: from 0, which copies the module, to 1, which changes nothing.

    Raises:
        OptionError: `momentum` is outside this range, the modules' parameters differ in number or shape, or the second
            module is the one without gradients.
    """
    check_momentum(momentum)
    slow: list[Tensor] = list(copy.parameters())
    fast: list[Tensor] = list(module.parameters())
    if any(each.requires_grad for each in slow) and not any(each.requires_grad for each in fast):
        raise OptionError("momentum_update takes the copy first, then the module that is trained.")
    if [each.shape for each in slow] != [each.shape for each in fast]:
        raise OptionError("momentum_update needs modules with the same parameters: make one by copy.deepcopy(module).")
    torch._foreach_lerp_(slow, fast, 1 - momentum)


@torch.no_grad()  # else parameters of a scripted module's copy are results of a computation
def momentum_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module without gradients."""
    return deepcopy(module).requires_grad_(False)


def check_momentum(momentum: float) -> None:
    """Raise OptionError unless a momentum is in [0, 1]."""
    if not isinstance(momentum, Real | Tensor) or not 0 <= momentum <= 1:
        raise OptionError(f"momentum must be in [0, 1], got {momentum!r}.")


def cosine_schedule(step: float, total: float, start: float, end: float) -> float:
    """Return the value at a step on a half cosine from `start` to `end`.

    With end = 1 it is the momentum of BYOL: 1 - (1 - start) (cos(pi k/K) + 1) / 2 at step k of K (Grill et al. 2020,
    Sec. 3.3).

        >>> [round(cosine_schedule(step, 100, 0.996, 1.0), 4) for step in (0, 50, 100)]
        [0.996, 0.998, 1.0]

    Args:
        step: from 0. After `total` the value is `end`.
        total: number of steps, > 0.
        start: value at step 0.
        end: value at step `total`.

    Raises:
        OptionError: `total` is not above 0.
    """
    if total <= 0:
        raise OptionError(f"total must be > 0, got {total}.")
    return SHAPES["cosine"](start, end, min(step / total, 1.0))
