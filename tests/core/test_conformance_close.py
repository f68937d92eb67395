"""Faults that show only with close pairs or in large batches, with and without a reference."""

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from dipole.core.conformance.kit import check_objective

CHECKS = ["close pairs", "size"]


class NTXent(nn.Module):
    """The correct twin: equals infonce."""

    def __init__(self, temperature: float = 0.5):
        super().__init__()
        self.temperature = temperature

    def cosines(self, a, b):
        z = torch.cat([a, b])
        z = normalize(z.float() if z.dtype.itemsize < 4 else z, dim=1)
        return z @ z.T

    def positive(self, p):
        return p

    def negative(self, s):
        return s

    def total(self, e):
        return e.sum(1)

    def target(self, n):
        return torch.arange(2 * n).roll(n)

    def take(self, s, target):
        return s.gather(1, target.unsqueeze(1)).squeeze(1)

    def forward(self, a, b):
        s = self.cosines(a, b)
        target = self.target(len(a))
        p = self.positive(self.take(s, target)) / self.temperature
        shift = 1 / self.temperature
        e = (self.negative(s) / self.temperature - shift).exp()
        e = e.masked_fill(torch.eye(len(s), dtype=torch.bool), 0).scatter(1, target.unsqueeze(1), 0.0)
        total = self.total(e) + (p - shift).exp()
        return (total.log() + shift - p).mean()


class Clamped90(NTXent):
    def positive(self, p):
        return p.clamp(max=0.9)


class Clamped95(NTXent):
    def positive(self, p):
        return p.clamp(max=0.95)


class ClampedBelow(NTXent):
    def positive(self, p):
        return p.clamp(min=0.2)


class DeadFrom80(NTXent):
    def positive(self, p):
        return torch.where(p > 0.8, 1.0, p)


class StoppedFrom80(NTXent):
    def positive(self, p):
        return torch.where(p > 0.8, p.detach(), p)


class DeadBelow20(NTXent):
    def positive(self, p):
        return torch.where(p < 0.2, 0.0, p)


class NoLossFrom80(NTXent):
    """Counts no anchor whose positive is near."""

    def forward(self, a, b):
        near = (normalize(a, dim=1) * normalize(b, dim=1)).sum(1) > 0.8
        return super().forward(a, b) * (~near).to(a.dtype).mean()


class SteeperFrom80(NTXent):
    """Its gradient is half of what it should be for near positives."""

    def positive(self, p):
        return torch.where(p > 0.8, (p + p.detach()) / 2, p)


class NegativesClamped90(NTXent):
    def negative(self, s):
        return s.clamp(max=0.9)


class NegativesDeadBelow20(NTXent):
    def negative(self, s):
        return s.clamp(min=0.2)


CLOSE = [
    Clamped90, Clamped95, ClampedBelow, DeadFrom80, StoppedFrom80, DeadBelow20, NoLossFrom80, SteeperFrom80,
    NegativesClamped90, NegativesDeadBelow20,
]  # fmt: skip


class HalfSums(NTXent):
    def total(self, e):
        return e.half().sum(1).to(e.dtype) if len(e) > 400 else e.sum(1)


class HalfAccumulator(NTXent):
    def total(self, e):
        return e.sum(1, dtype=torch.float16).to(e.dtype) if len(e) > 400 else e.sum(1)


class BrainSums(NTXent):
    def total(self, e):
        return e.bfloat16().sum(1).to(e.dtype) if len(e) > 400 else e.sum(1)


class HalfOfSingle(NTXent):
    """Right in float64."""

    def total(self, e):
        return e.half().sum(1).float() if len(e) > 400 and e.dtype == torch.float32 else e.sum(1)


class ShortIndices(NTXent):
    """Flat indices of 16 bits, which overflow above 90 rows of a view."""

    def take(self, s, target):
        flat = (torch.arange(len(s)) * len(s) + target).to(torch.int16)
        return s.flatten()[flat.long()]


class ShortFromMany(NTXent):
    """One encoder's matrix: 150 rows still fit into 16 bits."""

    def take(self, s, target):
        n = len(s) // 2
        block = s[:n, n:]
        flat = (torch.arange(n) * n + torch.arange(n)).to(torch.int16).long()
        return block.flatten()[flat].repeat(2)


class ByteTargets(NTXent):
    def take(self, s, target):
        n = len(s) // 2
        rows = torch.arange(n).to(torch.uint8).long()
        return s[:n, n:][torch.arange(n), rows].repeat(2)


class SignedByteTargets(NTXent):
    def take(self, s, target):
        n = len(s) // 2
        rows = torch.arange(n).to(torch.int8).long()
        return s[:n, n:][torch.arange(n), rows].repeat(2)


LARGE = [
    HalfSums,
    HalfAccumulator,
    BrainSums,
    HalfOfSingle,
    ShortIndices,
    ShortFromMany,
    ByteTargets,
    SignedByteTargets,
]


def failures(target, **options):
    return {row.check for row in check_objective(target, **options).failures}


@pytest.mark.parametrize("reference", [None, "infonce"])
def test_the_correct_twin_passes(reference):
    report = check_objective(NTXent, only=CHECKS, reference=reference)
    assert report.ok, report.table()


@pytest.mark.parametrize("reference", [None, "infonce"])
@pytest.mark.parametrize("loss", CLOSE, ids=lambda loss: loss.__name__)
def test_faults_with_close_pairs_are_found(loss, reference):
    assert failures(loss, only=["close pairs"], reference=reference) == {"close pairs"}


@pytest.mark.parametrize("reference", [None, "infonce"])
@pytest.mark.parametrize("loss", LARGE, ids=lambda loss: loss.__name__)
def test_faults_in_large_batches_are_found(loss, reference):
    assert failures(loss, only=["size"], reference=reference) == {"size"}


class Colder(NTXent):
    """Another loss above 256 rows, smooth and in any order: only a reference tells."""

    def negative(self, s):
        return s * (1.01 if len(s) > 512 else 1)


def test_a_smooth_fault_above_256_rows_is_found_with_a_reference():
    assert failures(Colder, only=["size"], reference="infonce") == {"size"}
