"""Losses that need labels, scores, a width or temperatures; faults that show with close pairs or many rows alone."""

from functools import partial
from typing import Annotated

import pytest
import torch
from loops import QUICK, failures
from torch import nn
from torch.nn.functional import normalize, one_hot, softplus

from dipole import TEMPERATURE, Objective, Range
from dipole.core.cli import main
from dipole.core.conformance.kit import check_objective
from dipole.core.utils.errors import DipoleError


def full(x):
    return x.float() if x.dtype.itemsize < 4 else x


class ProxyAnchor(nn.Module):
    """Kim et al. 2020, Eq. 4: one learned proxy for each class."""

    def __init__(self, classes: int, dim: int, alpha: float = 8.0, margin: float = 0.1):
        super().__init__()
        self.alpha, self.margin = alpha, margin
        self.proxies = nn.Parameter(torch.randn(classes, dim))

    def forward(self, z, labels):
        z = full(z)
        s = normalize(z, dim=1) @ normalize(self.proxies.to(z.dtype), dim=1).T
        own = one_hot(labels, len(self.proxies)).bool()
        near = torch.where(own, (-self.alpha * (s - self.margin)).exp(), 0.0).sum(0)
        far = torch.where(own, 0.0, (self.alpha * (s + self.margin)).exp()).sum(0)
        present = own.any(0)
        return near.log1p().sum() / present.sum() + far.log1p().mean()


class SoftTriple(nn.Module):
    """Qian et al. 2019, Eqs. 6 and 7: several learned centres for each class."""

    def __init__(self, dim: int, classes: int, centres: int = 2, scale: float = 5.0, gamma: float = 0.2):
        super().__init__()
        self.centres, self.scale, self.gamma = centres, scale, gamma
        self.weight = nn.Parameter(torch.randn(dim, classes * centres))

    def forward(self, input, target):
        z = full(input)
        s = (normalize(z, dim=1) @ normalize(self.weight.to(z.dtype), dim=0)).unflatten(1, (-1, self.centres))
        relaxed = ((s / self.gamma).softmax(2) * s).sum(2)
        margin = 0.01 * one_hot(target, relaxed.shape[1])
        return nn.functional.cross_entropy(self.scale * (relaxed - margin), target)


class DINO(nn.Module):
    """Caron et al. 2021, Algorithm 1: scores over prototypes of a student and of a centred teacher."""

    detached = ("b",)
    stateful = True

    def __init__(
        self,
        prototypes: int = 12,
        student: Annotated[float, TEMPERATURE] = 0.1,
        teacher: Annotated[float, TEMPERATURE] = 0.04,
        momentum: float = 0.9,
    ):
        super().__init__()
        self.student, self.teacher, self.momentum = student, teacher, momentum
        self.register_buffer("centre", torch.zeros(prototypes))

    def forward(self, a, b):
        a, b = full(a), full(b).detach()
        target = ((b - self.centre.to(b.dtype)) / self.teacher).softmax(1)
        loss = -(target * (a / self.student).log_softmax(1)).sum(1).mean()
        with torch.no_grad():
            self.centre = self.momentum * self.centre.to(b.dtype) + (1 - self.momentum) * b.mean(0)
        return loss


class CoSENT(nn.Module):
    """Su 2022: log(1 + sum e^{scale (cos_i - cos_j)}) over pairs with score_i < score_j."""

    def __init__(self, scale: float = 20.0):
        super().__init__()
        self.scale = scale

    def forward(self, a, b, scores):
        cosine = (normalize(full(a), dim=1) * normalize(full(b), dim=1)).sum(1)
        gap = self.scale * (cosine.unsqueeze(1) - cosine.unsqueeze(0))
        gap = gap.masked_fill(scores.unsqueeze(1) >= scores.unsqueeze(0), float("-inf"))
        return torch.cat([torch.zeros_like(cosine[:1]), gap.flatten()]).logsumexp(0)


def with_labels(a, b, labels):
    """Three arguments, as a function: pairs of different classes are pushed apart."""
    s = normalize(full(a), dim=1) @ normalize(full(b), dim=1).T
    sign = torch.where(labels.unsqueeze(1) == labels.unsqueeze(0), -1.0, 1.0)
    return softplus(4 * sign.to(s.dtype) * s).mean()


LOSSES = {
    "ProxyAnchor": (ProxyAnchor, {"options": {"classes": 3, "dim": 10}, "dim": 10, "labels": 3}),
    "SoftTriple": (SoftTriple, {"options": {"classes": 4, "dim": 9}, "dim": 9, "labels": 4}),
    "DINO": (DINO, {"dim": 12}),
    "CoSENT": (CoSENT, {"scores": True}),
    "function": (with_labels, {"labels": 3}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_every_kind_can_be_checked(name):
    target, arguments = LOSSES[name]
    report = check_objective(target, **arguments, only=QUICK)
    assert report.ok, report.table()


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("ProxyAnchor", "--dim 10 --labels CLASSES"),
        ("SoftTriple", "--dim 9 --labels CLASSES"),
        ("DINO", "--dim 12"),
        ("CoSENT", "--scores"),
    ],
)
def test_one_cause_with_its_flags_is_reported_once(name, flags):
    target, arguments = LOSSES[name]
    report = check_objective(target, options=arguments.get("options"), only=QUICK)
    assert list(report.causes) == ["call"]
    assert flags in next(row.detail for row in report.rows if row.check == "call")


def test_the_command_takes_the_flags(capsys):
    here = f"{__name__}:"
    options = ["--option", "classes=3", "--option", "dim=10", "--dim", "10", "--labels", "3"]
    assert main(["check", f"{here}ProxyAnchor", *options, "--only", "call", "gradcheck", "descent"]) == 0
    assert main(["check", f"{here}CoSENT", "--scores", "--only", "call", "gradcheck"]) == 0
    assert main(["check", f"{here}DINO", "--dim", "12", "--only", "call", "temperature"]) == 0
    assert "student: " in capsys.readouterr().out


class WrongClass(ProxyAnchor):
    """A fault that only labels show: each row gets its neighbour's class."""

    def forward(self, z, labels):
        return super().forward(z, labels.roll(1))


class IgnoresTeacher(DINO):
    def __init__(self, student: Annotated[float, TEMPERATURE] = 0.1, teacher: Annotated[float, TEMPERATURE] = 0.04):
        super().__init__(12, student, 0.04)


class PlainNames(DINO):
    """Not marked, as in another library."""

    def __init__(self, student_temp: float = 0.1, teacher_temp: float = 0.04):
        super().__init__(12, student_temp, teacher_temp)


class Overflows(DINO):
    def forward(self, a, b):
        shares = (full(a) / self.student).exp()
        return super().forward(a, b) + 0 * (shares / shares.sum(1, keepdim=True)).log().mean()


def test_each_declared_temperature_is_tested():
    (fault,) = check_objective(IgnoresTeacher, dim=12, only=["temperature"]).failures
    assert fault.detail.startswith("teacher has no effect")
    assert check_objective(PlainNames, dim=12, only=["temperature"]).rows[0].outcome == "-"
    named = {"temperatures": ("student_temp", "teacher_temp"), "dim": 12, "only": ["temperature"]}
    assert check_objective(PlainNames, **named).rows[0].outcome == "ok"
    assert not check_objective(Overflows, dim=12, only=["low temperature"]).ok
    (fault,) = check_objective(Both, only=["temperature"]).failures
    assert fault.detail.startswith("teacher has no effect")


class Both(Objective):
    """An Objective with a temperature of each side, of which one is without effect."""

    needs_negatives = False

    def __init__(
        self,
        student: Annotated[float, Range(above=0), TEMPERATURE, "tau_s"] = 0.1,
        teacher: Annotated[float, Range(above=0), TEMPERATURE, "tau_t"] = 0.04,
    ) -> None:
        super().__init__("cosine")
        self.student, self.teacher = student, teacher

    def loss(self, positive, rows):
        return softplus(-rows.over_positives(positive) / self.student)


class Classes(Objective):
    """An Objective with a learned vector for each of three classes, for embeddings of width 10."""

    needs_negatives = False

    def __init__(self, classes: int = 3) -> None:
        super().__init__(None)
        self.vectors = nn.Parameter(torch.randn(classes, 10))

    def loss(self, anchors, rows):
        labels = rows.pairs.labels if rows.pairs.labels is not None else torch.zeros(len(anchors), dtype=torch.long)
        logits = full(anchors) @ self.vectors.to(full(anchors).dtype).T
        return nn.functional.cross_entropy(logits, labels.to(anchors.device), reduction="none")


def test_labels_and_width_reach_objectives_and_faults_with_labels_are_found():
    checks = ["call", "gradient exists", "gradcheck", "size", "float16"]
    report = check_objective(Classes, dim=10, labels=3, only=checks)
    assert report.ok, report.table()
    assert failures(WrongClass, **LOSSES["ProxyAnchor"][1], only=["permutation"])


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        (DINO, {"dim": 0}, "dim must be a whole number >= 1"),
        (DINO, {"labels": 2, "scores": True}, "not both"),
        (DINO, {"temperatures": ["studnt"]}, "Did you mean 'student'"),
        ("infonce", {"scores": True}, "it gets Pairs"),
    ],
    ids=str,
)
def test_mistakes_get_one_error(target, arguments, message):
    with pytest.raises(DipoleError, match=message):
        check_objective(target, **arguments, only=["call"])


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


@pytest.mark.parametrize("reference", [None, "infonce"])
def test_the_correct_twin_passes(reference):
    report = check_objective(NTXent, only=["close pairs", "size"], reference=reference)
    assert report.ok, report.table()


@pytest.mark.parametrize(
    ("fault", "check", "references"),
    [
        *((each, "close pairs", [None, "infonce"]) for each in CLOSE.values()),
        *((each, "size", [None, "infonce"]) for each in LARGE.values()),
        ({"negative": lambda s: s * (1.01 if len(s) > 512 else 1)}, "size", ["infonce"]),  # a smooth one
    ],
    ids=[*CLOSE, *LARGE, "colder above 256 rows"],
)
def test_faults_are_found(fault, check, references):
    for reference in references:
        assert failures(NTXent(**fault), only=[check], reference=reference) == {check}
