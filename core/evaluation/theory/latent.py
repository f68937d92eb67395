"""Latent classes: points sorted by class, the probabilities that classes collide, and expectations of losses.

Expectations of the hinge and logistic losses against k independent draws are exact, without enumerating tuples. A row
has scores a_p of positives, all alike, and scores b_q of negatives with masses m_q; a draw is b_q with probability m_q
and nothing with what is left of 1. Wanted is E[ l({a - b_i}_i over the draws that are something) 1{some draw is} ].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from dipole.core.evaluation.arrays import Array, as_classes, as_matrix, finite_rows
from dipole.core.objectives.spec import Range
from dipole.core.utils.errors import DataError, OptionError

LARGEST = 1e100  # features above this are refused: sums of the products of a few of them leave float64
Loss = Annotated[Literal["hinge", "logistic"], "loss of the margins"]
Negatives = Annotated[int, Range(at_least=1), "negatives k"]

STEP = 0.3  # spacing of the quadrature: its error is about e^{-pi^2 / STEP}, 5e-15
TAIL = 38.0  # the quadrature leaves out what is below e^{-TAIL}
NODES = 4096  # scores that spread wider than these nodes reach (1,190) are not integrated
CHUNK = 1 << 21  # entries of an (m, n, G) block


def check_scale(features: Tensor) -> None:
    """Raises DataError where features (n, d) are not finite, or so large that their scores are not."""
    finite_rows(features, "features")
    largest = float(features.abs().max())
    if largest > LARGEST:
        raise DataError(
            f"features reach {largest:.3g}, and their products overflow. Scale them below {LARGEST:g}, or to length 1."
        )


@dataclass(frozen=True)
class Latent:
    """f of the points of each latent class. D_c is uniform over the points of class c, and rho is `prior`."""

    features: Tensor  # (n, d) float64, sorted by class
    counts: Tensor  # (C,) points of each class
    prior: Tensor  # (C,) rho, sums to 1

    @classmethod
    def of(cls, features: Array, labels: Array, prior: Literal["measured", "uniform"] = "measured") -> Latent:
        """Sort points (n, d) by class. A negative label (n,) means none, and the point is left out.

        prior: "measured" are the classes' shares of the points.
        """
        x = as_matrix("features", features, 1, DataError).cpu().double()
        y = as_classes("labels", labels, len(x), DataError).cpu()
        x, y = x[y >= 0], y[y >= 0]
        if not len(x):
            raise DataError("no point has a label (>= 0): the classes of these theorems are the labels.")
        check_scale(x)
        order = y.argsort(stable=True)
        counts = y.unique(return_counts=True)[1]
        weights = counts.double()
        if prior == "uniform":
            weights = torch.ones_like(weights)
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


def some_collision(prior: Tensor, k: int) -> float:
    """Probability that some of k negatives is of the positive's class: tau_k = 1 - sum_c rho(c) (1 - rho(c))^k."""
    return float((prior * -torch.expm1(k * torch.log1p(-prior))).sum())


def collision(prior: Tensor, k: int = 1) -> float:
    """Probability that all of k negatives are of the positive's class: tau' = sum_c rho(c)^{k+1}, or tau for k = 1."""
    return float(prior.pow(k + 1).sum())


def expected_hinge(a: Tensor, b: Tensor, mass: Tensor, k: int = 1) -> Tensor:
    """E[ max(0, 1 + max_i b_i - a) ], (V, m): the largest of k draws is at most b with probability F(b)^k.

    `a` (m, p) and `b` (m, n) are scores of positives and negatives. `mass` (V, n) are probabilities of the negatives,
    in V ways at once. A row may sum to less than 1.
    """
    values, order = b.sort(dim=1)
    below = (a - 1).contiguous()  # a draw counts above it
    place = torch.searchsorted(values, below, right=True)  # (m, p)
    centre = values.mean(1, keepdim=True)  # sums start from it, so that large scores cost no digits
    zero = values.new_zeros(len(values), 1)
    found = []
    for each in mass:
        weight = each[order]  # (m, n)
        nothing = (1 - each.sum()).clamp_min(0)
        reached = nothing + weight.cumsum(1)
        largest = reached.pow(k) - (reached - weight).clamp_min(0).pow(k)  # P(the largest is this one)
        count = torch.cat([largest.flip(1).cumsum(1).flip(1), zero], 1)
        total = torch.cat([(largest * (values - centre)).flip(1).cumsum(1).flip(1), zero], 1)
        # The sum over values above the threshold of largest (value - threshold), (m, p).
        above = total.gather(1, place) - (below - centre) * count.gather(1, place)
        found.append(above.clamp_min(0).mean(1))
    return torch.stack(found)


def expected_logistic(a: Tensor, b: Tensor, mass: Tensor, k: int = 1) -> Tensor:
    """E[ log2(1 + sum_i e^{b_i - a}) ] as in `expected_hinge`, by one integral per row, for any k.

    log(1 + S) = int_0^inf e^{-u} (1 - e^{-uS}) du/u (Frullani), and with u = w e^a the expectation factors over
    independent draws: int_0^inf E_p[e^{-w e^{a_p}}] (1 - E_q[e^{-w e^{b_q}}]^k) dw/w. Over log w the integrand is
    analytic in a strip of half-width pi/2, where the trapezoidal rule converges geometrically. Scores that are spread
    too wide for that are taken pair by pair, which k = 1 alone allows (else OptionError).
    """
    if _width(a, b) > NODES * STEP:
        if k > 1:
            raise too_wide(a, b)
        losses = [softplus(b_i.unsqueeze(1) - a_i, threshold=50).mean(1) for a_i, b_i in zip(a, b, strict=True)]
        return torch.stack([mass @ each / math.log(2) for each in losses], 1)
    step = max(1, int(CHUNK / (max(a.shape[1], b.shape[1]) * max(16.0, _width(a, b) / STEP))))
    parts = []
    for positive, negative in zip(a.split(step), b.split(step), strict=True):
        nodes = quadrature(positive, negative, k)  # (m, G)
        absorbed = (negative.unsqueeze(2) + nodes.unsqueeze(1)).exp_().neg_().expm1_().neg_()  # 1 - e^{-w e^b}
        risen = torch.einsum("vq,mqg->vmg", mass, absorbed).clamp_max(1)
        parts.append(integrate(transform(positive, nodes).mean(1), -torch.expm1(k * torch.log1p(-risen))))
    return torch.cat(parts, 1)


def _width(a: Tensor, b: Tensor) -> float:
    return float((b.amax(1) - a.amin(1)).amax()) + TAIL + math.log(TAIL)


def too_wide(a: Tensor, b: Tensor) -> OptionError:
    """Return the error for scores that would need too many quadrature nodes."""
    return OptionError(
        f"the scores f(x)^T f(x') are spread over {_width(a, b) - TAIL:.4g}, and the logistic loss with k > 1 is "
        f"integrated up to {NODES * STEP - TAIL:.4g}: take loss hinge, k = 1, unit features or a smaller scale.",
        "k",
    )


def quadrature(a: Tensor, b: Tensor, k: int) -> Tensor:
    """Nodes log w of each row, (m, G): from where k draws count for nothing to where no positive is left."""
    low = -b.amax(1) - TAIL - math.log(k)
    high = torch.maximum(-a.amin(1) + math.log(TAIL), low)
    count = int(float((high - low).amax()) / STEP) + 2
    if count > 2 * NODES:
        raise too_wide(a, b)
    return low.unsqueeze(1) + STEP * torch.arange(count, dtype=a.dtype, device=a.device)


def transform(scores: Tensor, nodes: Tensor) -> Tensor:
    """e^{-w e^s}, (m, n, G)."""
    return (scores.unsqueeze(2) + nodes.unsqueeze(1)).exp_().neg_().exp_()


def integrate(own: Tensor, risen: Tensor) -> Tensor:
    """Trapezoidal rule in log2 of the product of both factors, over the last dimension."""
    return (own * risen).sum(-1) * (STEP / math.log(2))


def expected(loss: str, a: Tensor, b: Tensor, mass: Tensor, k: int = 1) -> Tensor:
    """The expectation of the loss of that name, see `expected_hinge`."""
    return (expected_hinge if loss == "hinge" else expected_logistic)(a, b, mass, k)


def margin_loss(loss: str, v: Tensor) -> Tensor:
    """l(v) over the last dimension (Arora et al., Sec. 2): max(0, 1 + max_i -v_i), or log2(1 + sum_i e^{-v_i})."""
    if loss == "hinge":
        return (1 + (-v).amax(-1)).clamp_min(0)
    return torch.logsumexp(torch.cat([torch.zeros_like(v[..., :1]), -v], -1), -1) / math.log(2)


# Expectations over sets of distinct classes: all terms are positive, none cancels.


def elementary(p: Tensor, k: int, dim: int = -1) -> Tensor:
    """e_k of the first 1, 2, ... entries along a dimension: the sum over k-subsets of the product of their entries."""
    sums = torch.ones_like(p)
    for size in range(1, k + 1):
        # e_s of the first j is e_s of the first j - 1 plus p_j times e_{s-1} of the first j - 1.
        before = sums.roll(1, dim)
        before.select(dim, 0).fill_(float(size == 1))
        sums = (p * before).cumsum(dim)
    return sums


def over_draws(p: Tensor, g: Tensor, k: int) -> Tensor:
    """E prod of g (m, n, G) over the distinct values among k independent draws from p (n,), as (m, G).

    Values are added one after the other. Of s draws from the values so far, a binomial number are the last one.
    """
    from scipy.stats import binom

    draws = np.arange(k + 1)
    found = g.new_zeros(k + 1, *g[:, 0].shape)  # of 0, ..., k draws
    found[0] = 1
    for share, so_far, factor in zip(p.tolist(), p.cumsum(0).tolist(), g.unbind(1), strict=True):
        chance = torch.from_numpy(binom.pmf(draws[:, None] - draws, draws[:, None], min(1.0, share / so_far)))
        without = chance.diagonal()[:, None, None] * found
        found = without + factor * (torch.tensordot(chance, found, 1) - without)
    return found[k]
