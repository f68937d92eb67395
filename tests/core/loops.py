"""The conformance checks and their reference loops, for tests."""

import torch

from dipole.core.conformance.kit import CHECKS, check_objective
from dipole.core.conformance.reference import REFERENCES, Case
from dipole.core.objectives.spec import options_of


def draw(*shape, seed=0):
    """Normal numbers in float64 that need a gradient."""
    return torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def by_loops(term, pairs):
    """The value of a term by its reference loop."""
    options = {option.name: option.default for option in options_of(type(term).__init__)} | term.given
    return REFERENCES[term.registered_name()](Case.of(pairs, dict(term.named_parameters())), **options)


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
