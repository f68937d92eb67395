"""The two failures of the unsupervised loss in Arora et al., Figure 1, as points of two classes.

Both have uniform rho and F = {f0, f1}, with f0(x) = 0 for all points and f1 as below. Some W separates the classes
under f1 without loss, and no W does under f0. Still L_un(f0) = 1, and L_un(f1) grows with r^2, so the loss selects f0.
We chose the coordinates to have every property of the paper's caption and Section 5.1.
"""

import torch

from dipole.core.evaluation.theory.latent import Latent


def mean_is_bad(r: float) -> Latent:
    """Figure 1 (a): one point per class, (1, r) and (-1, 2r); s(f1) = 0, and L_un^!= is large.

    The first coordinate separates the classes. The inner product sees the second: the mean classifier is bad as well.
    """
    return Latent.of(torch.tensor([[1.0, r], [-1.0, 2 * r]]), torch.tensor([0, 1]))


def high_variance(r: float) -> Latent:
    """Figure 1 (b): two points per class, (1, +-r) and (-1, +-r); the mean classifier has no loss, but s(f1) ~ r^2."""
    return Latent.of(torch.tensor([[1.0, r], [1.0, -r], [-1.0, r], [-1.0, -r]]), torch.tensor([0, 0, 1, 1]))


def nothing(points: Latent) -> Latent:
    """f0: every point at 0."""
    return points.scaled(0.0)
