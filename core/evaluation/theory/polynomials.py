"""Expectations over sets of distinct classes, as coefficients of polynomials: all terms are positive, none cancels."""

import math

import torch
from torch import Tensor


def elementary(p: Tensor, k: int, dim: int = 0) -> Tensor:
    """e_k(p), the sum over k-subsets of the product of their entries, along a dimension."""
    parts = p.unbind(dim)
    sums = [torch.ones_like(parts[0])] + [torch.zeros_like(parts[0]) for _ in range(k)]
    for each in parts:
        for size in range(k, 0, -1):
            sums[size] = sums[size] + each * sums[size - 1]
    return sums[k]


def elementary_prefixes(p: Tensor, k: int) -> Tensor:
    """e_k of the first 1, 2, ..., n entries of each row (m, n) -> (m, n)."""
    sums = torch.ones_like(p)
    for size in range(1, k + 1):
        # e_s of the first j is e_s of the first j - 1 plus p_j times e_{s-1} of the first j - 1.
        before = torch.cat([torch.full_like(p[:, :1], float(size == 1)), sums[:, :-1]], 1)
        sums = (p * before).cumsum(1)
    return sums


def draws(p: Tensor, g: Tensor, k: int) -> Tensor:
    """E prod of g over the distinct values among k independent draws from p.

    It is k! [t^k] prod_c ( 1 + g_c (e^{p_c t} - 1) ), and the coefficient is Cauchy's mean over the circle |t| = k,
    where the product is at most e^k: k! e^k / k^k is about sqrt(2 pi k), so few digits cancel, for any k.

    Args:
        p: (n,) probabilities.
        g: (m, n, G) factors in [0, 1].
        k: draws.

    Returns:
        (m, G).
    """
    points = 2 * k + 32  # what is left out is at most prod_{j <= points} k/(k + j)
    angle = 2 * math.pi / points * torch.arange(points // 2 + 1, dtype=p.dtype)  # the other half is conjugate
    t = torch.polar(torch.full_like(angle, k), angle)
    twice = torch.full_like(angle, 2.0)
    twice[0] = twice[-1] = 1.0
    value = (twice / points * torch.polar(torch.full_like(angle, _scale(k)), -k * angle)).expand(*g[:, 0].shape, -1)
    for c, share in enumerate(p.tolist()):
        # e^{-p_c k} each, which is e^{-k} in all and keeps the product at most 1
        value = value * (math.exp(-share * k) * (1 + g[:, c].unsqueeze(-1) * torch.expm1(share * t)))
    return value.sum(-1).real


def _scale(k: int) -> float:
    """k! e^k / k^k."""
    return math.exp(math.lgamma(k + 1) + k - k * math.log(k))
