"""Losses that need labels, scores, their own width or several temperatures, as a plug-in author writes them."""

from typing import Annotated

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize, one_hot, softplus

from dipole import TEMPERATURE, Objective, Range
from dipole.core.cli import main
from dipole.core.conformance.kit import CHECKS, check_objective
from dipole.core.utils.errors import DipoleError

QUICK = [each.name for each in CHECKS if not each.slow and each.name not in ("compile", "ranks")]


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


# Temperatures by other names.


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
    report = check_objective(
        Classes, dim=10, labels=3, only=["call", "gradient exists", "gradcheck", "size", "float16"]
    )
    assert report.ok, report.table()
    arguments = LOSSES["ProxyAnchor"][1]
    report = check_objective(WrongClass, **arguments, only=["permutation"])
    assert not report.ok


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
