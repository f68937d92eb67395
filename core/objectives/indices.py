"""The index tensors of the constructors of pairs. Only `same_label` may wait for the device."""

import torch
from torch import Tensor

from dipole.core.objectives.checks import reads_at_once
from dipole.core.objectives.similarity import LARGEST


def partners_of_views(count: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positives (A, 1) and ignored rows (A, (count - 1) batch) of the anchors of all pairs of views x < y.

    The positive is the row of view y. All other views are ignored: first the anchor's own view, itself first.
    """
    first, second = torch.triu_indices(count, count, 1, device=device).unsqueeze(2)  # (pairs, 1) each
    row = torch.arange(batch, device=device)
    steps = torch.arange(count - 1, device=device)
    others = (first + steps + (steps >= second - first)) % count  # (pairs, count - 1), without view y
    rows = (row.unsqueeze(1) + row) % batch  # (batch, batch)
    ignored = others.view(-1, 1, count - 1, 1) * batch + rows.unsqueeze(1)
    return (second * batch + row).view(-1, 1), ignored.flatten(2).flatten(0, 1)


def neighbours(document: Tensor, window: int) -> Tensor:
    """Return (B, 2 window), the rows of the same document at most `window` away, padded with -1 at the end."""
    batch = len(document)
    own = torch.arange(batch, device=document.device).unsqueeze(1)
    steps = torch.arange(1, window + 1, device=document.device)
    near = own + torch.cat([-steps.flip(0), steps])
    inside = (near >= 0) & (near < batch)
    inside &= document[near.clamp(0, batch - 1)] == document.unsqueeze(1)
    return pads_last(torch.where(inside, near, -1))


def other_crops(big: int, every: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positives (every * batch, big) and own candidate (every * batch, 1) of SwAV's crops, padded with -1.

    The first `big` crops are candidates. A large crop's positives are the next large crops in cyclic order, with
    padding in its own place. A small crop's positives are all large crops.
    """
    crop = torch.arange(every, device=device).view(every, 1, 1)
    image = torch.arange(batch, device=device).view(1, batch, 1)
    place = torch.arange(big, device=device)
    next_ones = torch.where(place < big - 1, (crop + 1 + place) % big, -1)
    other = torch.where(crop < big, next_ones, place)  # (every, 1, big)
    positives = torch.where(other < 0, -1, other * batch + image).flatten(0, 1)
    return positives, torch.where(crop < big, crop * batch + image, -1).flatten(0, 1)


def relative(ignored: Tensor, batch: int, count: int) -> dict[str, Tensor]:
    """Convert indices (B, E) into `count` keys and a queue to relative ones, which remain valid after gathering."""
    in_keys = ignored < count * batch
    row = torch.arange(batch, device=ignored.device).unsqueeze(1)
    number = torch.where(in_keys, torch.where(ignored < 0, -1, ignored // batch), count)
    return {
        "ignored_key": number,
        "ignored_ahead": torch.where(in_keys, ignored % batch - row, ignored - count * batch),
    }


def absolute(number: Tensor, ahead: Tensor, count: int) -> Tensor:
    """Convert the result of `relative` to indices in the batch of all ranks."""
    batch = len(number)
    row = torch.arange(batch, device=number.device).unsqueeze(1)
    return torch.where(number < 0, -1, number * batch + torch.where(number < count, row + ahead, ahead))


def pads_last(index: Tensor) -> Tensor:
    """Return the same rows with -1 after the real entries."""
    return index.gather(1, real_first(index))


def real_first(index: Tensor) -> Tensor:
    """Return the order of each row's entries with padding (-1) last."""
    return (index < 0).long().argsort(dim=1, stable=True)


def is_listed(index: Tensor, lists: Tensor) -> Tensor:
    """Return (A, n), whether each of the indices (A, n) is in its row of the lists (A, E)."""
    if not lists.shape[1]:
        return torch.zeros_like(index, dtype=torch.bool)
    ordered = lists.sort(1).values
    place = torch.searchsorted(ordered, index.contiguous()).clamp_max(lists.shape[1] - 1)
    return ordered.gather(1, place) == index


def joined(first: Tensor, *others: Tensor | None) -> Tensor:
    """Return the rows of all tensors. Without others this is the first tensor itself."""
    present = [each for each in others if each is not None and len(each)]
    if not present:
        return first
    return torch.cat([first, *present])


def same_label(labels: Tensor, others: Tensor) -> Tensor:
    """Return the indices (A, size of the largest class) of candidates with each anchor's label, padded with -1.

    On an accelerator the width is C if that is cheaper than waiting for the size of the largest class.
    """
    if labels.dtype == torch.bool:  # searchsorted does not take it
        labels, others = labels.long(), others.long()
    order = others.argsort(stable=True)
    ordered = others[order]
    first = torch.searchsorted(ordered, labels)
    count = torch.searchsorted(ordered, labels, right=True) - first
    # For large matrices, lists as wide as all candidates would cost more than waiting.
    waits = reads_at_once(count) or len(labels) * len(others) >= LARGEST
    offsets = torch.arange(int(count.max()) if waits else len(others), device=labels.device)
    place = first.unsqueeze(1) + offsets  # (A, n)
    return torch.where(offsets < count.unsqueeze(1), order[place.clamp_max(len(others) - 1)], -1)


def mask_of(index: Tensor, width: int) -> Tensor:
    """Return (R, T), True at the listed columns (R, E) of T columns. Indices outside of 0 to T - 1 are ignored."""
    inside = (index >= 0) & (index < width)
    mask = torch.zeros(len(index), width + 1, dtype=torch.bool, device=index.device)
    return mask.scatter_(1, torch.where(inside, index, width), True)[:, :width]  # the last column takes the rest
