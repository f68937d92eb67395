"""Find rows of the same class."""

import torch
from torch import Tensor

from dipole.core.objectives.checks import reads_at_once
from dipole.core.objectives.dense import fits


def same_label(labels: Tensor, others: Tensor) -> Tensor:
    """Return the indices (A, size of the largest class) of candidates with each anchor's label, padded with -1.

    On an accelerator the width is C if that is cheaper than waiting for the size of the largest class.

    Args:
        labels: (A,) of the anchors.
        others: (C,) of the candidates.
    """
    order = others.argsort(stable=True)
    ordered = others[order]
    first = torch.searchsorted(ordered, labels)
    count = torch.searchsorted(ordered, labels, right=True) - first
    # For large matrices, lists as wide as all candidates would cost more than waiting.
    waits = reads_at_once(count) or not fits(len(labels), len(others))
    offsets = torch.arange(int(count.max()) if waits else len(others), device=labels.device)
    place = first.unsqueeze(1) + offsets  # (A, n)
    return torch.where(offsets < count.unsqueeze(1), order[place.clamp_max(len(others) - 1)], -1)
