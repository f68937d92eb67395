"""Faults that show only with close pairs or in large batches, with and without a reference."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from dipole.core.conformance.kit import check_objective

CHECKS = ["close pairs", "size"]


class NTXent(nn.Module):
    """The correct twin equals infonce. A fault replaces one of its parts."""

    def __init__(self, temperature: float = 0.5, **parts):
        super().__init__()
        self.temperature = temperature
        vars(self).update(parts)

    def positive(self, p):
        return p

    def negative(self, s):
        return s

    def total(self, e):
        return e.sum(1)

    def take(self, s, target):
        return s.gather(1, target.unsqueeze(1)).squeeze(1)

    def counted(self, p):
        return torch.ones_like(p)

    def forward(self, a, b):
        z, n = torch.cat([a, b]), len(a)
        z = normalize(z.float() if z.dtype.itemsize < 4 else z, dim=1)
        s, target, shift = z @ z.T, torch.arange(2 * n).roll(n), 1 / self.temperature
        p = self.take(s, target)
        e = (self.negative(s) / self.temperature - shift).exp()
        e = e.masked_fill(torch.eye(len(s), dtype=torch.bool), 0).scatter(1, target.unsqueeze(1), 0.0)
        logit = self.positive(p) / self.temperature
        total = self.total(e) + (logit - shift).exp()
        return (total.log() + shift - logit).mean() * self.counted(p).mean()


CLOSE = {
    "positives clamped at 0.9": {"positive": lambda p: p.clamp(max=0.9)},
    "positives clamped at 0.95": {"positive": lambda p: p.clamp(max=0.95)},
    "positives clamped below": {"positive": lambda p: p.clamp(min=0.2)},
    "dead from 0.8": {"positive": lambda p: torch.where(p > 0.8, 1.0, p)},
    "detached from 0.8": {"positive": lambda p: torch.where(p > 0.8, p.detach(), p)},
    "dead below 0.2": {"positive": lambda p: torch.where(p < 0.2, 0.0, p)},
    "half the gradient from 0.8": {"positive": lambda p: torch.where(p > 0.8, (p + p.detach()) / 2, p)},
    "near anchors are not counted": {"counted": lambda p: (p <= 0.8).to(p)},
    "negatives clamped at 0.9": {"negative": lambda s: s.clamp(max=0.9)},
    "negatives clamped below": {"negative": lambda s: s.clamp(min=0.2)},
}


def flat(s, target, dtype):
    """Flat indices of an integer type that is too small for the whole matrix."""
    return s.flatten()[(torch.arange(len(s)) * len(s) + target).to(dtype).long()]


def flat_of_one_encoder(s, target, dtype):
    block = s[: len(s) // 2, len(s) // 2 :]
    rows = torch.arange(len(block))
    return block.flatten()[(rows * len(block) + rows).to(dtype).long()].repeat(2)


def targets(s, target, dtype):
    n = len(s) // 2
    return s[:n, n:][torch.arange(n), torch.arange(n).to(dtype).long()].repeat(2)


def summed(dtype, of=None):
    """Sums of large batches in another precision, of all or of one dtype."""
    return lambda e: e.to(dtype).sum(1).to(e.dtype) if len(e) > 400 and e.dtype in (of or {e.dtype}) else e.sum(1)


LARGE = {
    "sums in float16": {"total": summed(torch.float16)},
    "accumulator of float16": {
        "total": lambda e: e.sum(1, dtype=torch.float16).to(e.dtype) if len(e) > 400 else e.sum(1)
    },
    "sums in bfloat16": {"total": summed(torch.bfloat16)},
    "float16 of float32 alone": {"total": summed(torch.float16, of={torch.float32})},
    "indices of 16 bits": {"take": partial(flat, dtype=torch.int16)},
    "indices of 16 bits into one encoder's matrix": {"take": partial(flat_of_one_encoder, dtype=torch.int16)},
    "targets of uint8": {"take": partial(targets, dtype=torch.uint8)},
    "targets of int8": {"take": partial(targets, dtype=torch.int8)},
}


def failures(target, **options):
    return {row.check for row in check_objective(target, **options).failures}


@pytest.mark.parametrize("reference", [None, "infonce"])
def test_the_correct_twin_passes(reference):
    report = check_objective(NTXent, only=CHECKS, reference=reference)
    assert report.ok, report.table()


@pytest.mark.parametrize("reference", [None, "infonce"])
@pytest.mark.parametrize(
    ("fault", "check"), [*((each, "close pairs") for each in CLOSE), *((each, "size") for each in LARGE)]
)
def test_faults_are_found(fault, check, reference):
    assert failures(NTXent(**(CLOSE | LARGE)[fault]), only=[check], reference=reference) == {check}


def test_a_smooth_fault_above_256_rows_is_found_with_a_reference():
    colder = NTXent(negative=lambda s: s * (1.01 if len(s) > 512 else 1))
    assert failures(colder, only=["size"], reference="infonce") == {"size"}
