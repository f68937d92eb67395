"""The conformance checks and their reference loops, for tests."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from dipole.core.conformance.kit import CHECKS, check_objective
from dipole.core.conformance.subjects import term_by_loops as by_loops


def draw(*shape, seed=0):
    """Normal numbers in float64 that need a gradient."""
    return torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def check_against_loops(term, pairs, inputs):
    inputs = (*inputs, *term.parameters())
    found, expected = term(pairs), by_loops(term, pairs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    got = torch.autograd.grad(found, inputs, materialize_grads=True)
    if expected.requires_grad:
        wanted = torch.autograd.grad(expected, inputs, materialize_grads=True)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    else:  # loops without an entry
        assert not any(each.any() for each in got)


QUICK = [each.name for each in CHECKS if not each.slow and each.name not in ("compile", "ranks")]


def failures(target, **options):
    """Names of the checks that fail."""
    return {row.check for row in check_objective(target, **options).failures}


class NTXent(nn.Module):  # the correct twin: one direction, a's rows against b's
    def __init__(self, temperature: float = 0.5):
        super().__init__()
        self.temperature = temperature

    def unit(self, x: Tensor) -> Tensor:
        return normalize(x.float() if x.dtype.itemsize < 4 else x, dim=1)

    def logits(self, a: Tensor, b: Tensor) -> Tensor:
        return self.unit(a) @ self.unit(b).T / self.temperature

    def targets(self, a: Tensor) -> Tensor:
        return torch.arange(len(a), device=a.device)

    def extra(self, a: Tensor, s: Tensor) -> Tensor | float:
        return 0.0

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        s = self.logits(a, b)
        return cross_entropy(s, self.targets(a)) + self.extra(a, s)


class BothWays(NTXent):  # SimCLR's: anchors and negatives of both views
    def logits(self, a, b):
        return super().logits(*[torch.cat([a, b])] * 2).fill_diagonal_(-torch.inf)

    def targets(self, a):
        return torch.arange(2 * len(a), device=a.device).roll(len(a))
