"""Latent classes: points sorted by class, the classes' shares, and the probabilities that classes collide."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dipole.core.evaluation.arrays import finite_rows
from dipole.core.utils.errors import DataError, OptionError

LARGEST = 1e100  # features above this are refused: sums of the products of a few of them leave float64


def check_scale(features: Tensor) -> None:
    """Raises DataError where features (n, d) are not finite, or so large that their scores are not."""
    finite_rows(features, "features")
    if len(features) and float(features.abs().max()) > LARGEST:
        raise DataError(
            f"features reach {float(features.abs().max()):.3g}, and products of them overflow: take unit features, "
            f"or a scale that keeps them below {LARGEST:g}."
        )


@dataclass(frozen=True)
class Latent:
    """f of the points of each latent class; D_c is uniform over the points of class c, rho is `prior`."""

    features: Tensor  # (n, d) float64, sorted by class
    counts: Tensor  # (C,) points of each class
    prior: Tensor  # (C,) rho, sums to 1

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, prior: str | Tensor = "measured") -> Latent:
        """Sort points (n, d) by class. A negative label (n,) means none, and the point is left out.

        prior: "measured" (the classes' shares of the points), "uniform", or (C,) weights > 0 by ascending label.
        """
        if features.ndim != 2 or len(features) != len(labels):
            raise DataError(
                f"features must be (n, d) with a label each, got {tuple(features.shape)} and {len(labels)} labels."
            )
        known = labels.cpu() >= 0
        x, y = features.detach()[known.to(features.device)].double().cpu(), labels.cpu()[known]
        if not len(x):
            raise DataError("no point has a label (>= 0): the classes of these theorems are the labels.")
        check_scale(x)
        order = y.argsort(stable=True)
        counts = y.unique(return_counts=True)[1]
        if isinstance(prior, str):
            named = {"measured": counts, "uniform": torch.ones(len(counts))}
            if prior not in named:
                raise OptionError(f"unknown prior {prior!r}. Allowed: {', '.join(named)}.", "prior")
            prior = named[prior]
        weights = torch.as_tensor(prior).double().cpu()
        if weights.shape != counts.shape or not bool(((weights > 0) & weights.isfinite()).all()):
            raise OptionError(
                f"a prior has a weight above 0 for each of the {len(counts)} classes, got {tuple(weights.shape)}.",
                "prior",
            )
        return cls(x[order], counts, weights / weights.sum())

    @property
    def classes(self) -> int:
        """Number of classes C."""
        return len(self.counts)

    @cached_property
    def spans(self) -> list[slice]:
        """The rows of each class."""
        ends = self.counts.cumsum(0).tolist()
        return [slice(end - count, end) for end, count in zip(ends, self.counts.tolist(), strict=True)]

    @cached_property
    def means(self) -> Tensor:
        """mu_c = E_{x ~ D_c} f(x), (C, d)."""
        return torch.stack([self.features[span].mean(0) for span in self.spans])

    @cached_property
    def scores(self) -> Tensor:
        """f(x)^T f(x') of all points, (n, n)."""
        return self.features @ self.features.T

    @cached_property
    def point_mass(self) -> Tensor:
        """Probability of each point under D_neg = E_{c ~ rho} D_c, (n,)."""
        return (self.prior / self.counts).repeat_interleave(self.counts)

    def scaled(self, factor: float) -> Latent:
        """Return the same points with features times a factor."""
        return Latent(self.features * factor, self.counts, self.prior)


def collision(prior: Tensor) -> float:
    """Probability that two independent classes are the same: tau = sum_c rho(c)^2 (Arora et al., Sec. 4.1)."""
    return float(prior.square().sum())


def some_collision(prior: Tensor, k: int) -> float:
    """Probability that some of k negatives is of the positive's class: tau_k = 1 - sum_c rho(c) (1 - rho(c))^k."""
    return float((prior * -torch.expm1(k * torch.log1p(-prior))).sum())


def full_collision(prior: Tensor, k: int) -> float:
    """Probability that all of k negatives are of the positive's class: tau' = sum_c rho(c)^{k+1}."""
    return float(prior.pow(k + 1).sum())
