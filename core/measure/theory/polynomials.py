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

    It is k! [t^k] prod_c ( 1 + g_c (e^{p_c t} - 1) ).

    Args:
        p: (n,) probabilities.
        g: (m, n, G) factors.
        k: draws.

    Returns:
        (m, G).
    """
    sums = [torch.ones_like(g[:, 0])] + [torch.zeros_like(g[:, 0]) for _ in range(k)]
    for c, share in enumerate(p.tolist()):
        terms = [share**j / math.factorial(j) for j in range(k + 1)]
        for size in range(k, 0, -1):
            seen = terms[1] * sums[size - 1]
            for j in range(2, size + 1):
                seen = seen + terms[j] * sums[size - j]
            sums[size] = sums[size] + g[:, c] * seen
    return sums[k] * math.factorial(k)
