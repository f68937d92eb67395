"""Losses that need labels, scores, a width or temperatures. Faults that show with close pairs or many rows alone."""

from typing import Annotated

import pytest
import torch
from loops import QUICK, failures
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy, normalize, softplus

from dipole import TEMPERATURE, DipoleError, Objective, Range, check_objective
from dipole import full_precision as full
from dipole.core.cli import main
from dipole.core.utils.distributed import all_sum

Temperature = Annotated[float, TEMPERATURE]
FLAGS = {"Proxies": "--dim 9 --labels CLASSES", "DINO": "--dim 12", "Scored": "--scores"}
Ranged = Annotated[float, Range(above=0), TEMPERATURE, "a temperature"]
CLOSE = {
    "positives clamped at 0.95": {"positive": lambda p: p.clamp(max=0.95)},
    "positives clamped below": {"positive": lambda p: p.clamp(min=0.2)},
    "half the gradient from 0.8": {"positive": lambda p: torch.where(p > 0.8, (p + p.detach()) / 2, p)},
    "near anchors are not counted": {"counted": lambda p: (p <= 0.8).to(p)},
    "negatives clamped at 0.9": {"negative": lambda s: s.clamp(max=0.9)},
    "near copies are left out": {"negative": lambda s: s.masked_fill(s > 0.999, -torch.inf)},
    "clamped at 0.9995": {"positive": lambda p: p.clamp(max=0.9995)},
    "three hardest negatives": {"total": lambda e: e.topk(3, 1).values.sum(1)},
    "large epsilon": {"unit": lambda x: normalize(x, dim=1, eps=0.05)},
    "large epsilon added": {"unit": lambda x: x / (x.norm(dim=1, keepdim=True) + 0.05)},
}


class Proxies(nn.Module):  # one vector for each class (normalized softmax), and other names of the arguments
    def __init__(self, dim: int, classes: int, scale: float = 5.0):
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.randn(dim, classes))

    def forward(self, input, target):
        z = full(input)
        return cross_entropy(self.scale * normalize(z, dim=1) @ normalize(self.weight.to(z.dtype), dim=0), target)


class DINO(nn.Module):
    """Caron et al. 2021, Algorithm 1: scores over prototypes of a student and of a centred teacher."""

    detached, stateful = ("b",), True

    def __init__(self, prototypes: int = 12, student: Temperature = 0.1, teacher: Temperature = 0.04):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.register_buffer("centre", torch.zeros(prototypes))

    def forward(self, a, b):
        a, b = full(a), full(b).detach()
        target = ((b - self.centre.to(b.dtype)) / self.teacher).softmax(1)
        loss = -(target * (a / self.student).log_softmax(1)).sum(1).mean()
        with torch.no_grad():
            self.centre = 0.9 * self.centre.to(b.dtype) + 0.1 * b.mean(0)
        return loss


def with_labels(a, b, labels):
    """Three arguments, as a function: pairs of different classes are pushed apart."""
    s = normalize(full(a), dim=1) @ normalize(full(b), dim=1).T
    sign = torch.where(labels.unsqueeze(1) == labels.unsqueeze(0), -1.0, 1.0)
    return softplus(4 * sign.to(s.dtype) * s).mean()


class Scored(nn.Module):  # CosineSimilarityLoss of sentence-transformers, with a parameter called as an input
    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.tensor(0.9))

    def forward(self, a, b, scores):
        return (cosine_similarity(full(a), full(b)) - self.b.to(full(a).dtype) * scores).square().mean()


class NTXent(nn.Module):  # the correct twin equals infonce. A fault replaces one of its parts
    def __init__(self, temperature: float = 0.5, **parts):
        super().__init__()
        self.temperature = temperature
        vars(self).update(parts)

    unit = staticmethod(lambda x: normalize(x, dim=1))
    positive = negative = staticmethod(lambda s: s)
    total = staticmethod(lambda e: e.sum(1))
    take = staticmethod(lambda s, target: s.gather(1, target.unsqueeze(1)).squeeze(1))
    counted = staticmethod(torch.ones_like)

    def forward(self, a, b):
        z, n = self.unit(full(torch.cat([a, b]))), len(a)
        s, target, shift = z @ z.T, torch.arange(2 * n, device=a.device).roll(n), 1 / self.temperature
        p = self.take(s, target)
        e = (self.negative(s) / self.temperature - shift).exp()
        e = e.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=a.device), 0).scatter(1, target.unsqueeze(1), 0.0)
        logit = self.positive(p) / self.temperature
        total = self.total(e) + (logit - shift).exp()
        return (total.log() + shift - logit).mean() * self.counted(p).mean()


def halves(a, b):  # AnglE's columns are complex numbers. Odd widths are refused, but for 3
    (x, y), (u, v) = full(a).chunk(2, 1), full(b).chunk(2, 1)
    return ((x * u + y * v).sum(1) - 1).square().mean()


def correlation(a, b, scores):
    s, y = (x - x.mean() for x in (cosine_similarity(full(a), full(b)), scores.to(full(a))))
    return -(s * y).sum() / (s.square().sum() * y.square().sum() + 1e-12).sqrt()


LOSSES = {
    "Proxies": (Proxies, {"options": {"classes": 4, "dim": 9}, "dim": 9, "labels": 4}), "DINO": (DINO, {"dim": 12}),
    "Scored": (Scored, {"scores": True}), "labels": (with_labels, {"labels": 3}), "correct twin": (NTXent, {}),
    "halves": (halves, {}), "correlation": (correlation, {"scores": True}),
    "correct twin beside its reference": (NTXent, {"reference": "infonce"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_every_kind_can_be_checked(name):
    target, arguments = LOSSES[name]
    assert failures(target, **arguments, only=QUICK) == set()


@pytest.mark.parametrize(("name", "flags"), FLAGS.items())
def test_one_cause_with_its_flags_is_reported_once(name, flags):
    target, arguments = LOSSES[name]
    report = check_objective(target, options=arguments.get("options"), only=QUICK)
    assert list(report.causes) == ["call"]
    assert flags in next(row.detail for row in report.rows if row.check == "call")


def test_the_command_takes_the_flags(capsys):
    here = f"{__name__}:"
    options = ["--option", "classes=3", "--option", "dim=10", "--dim", "10", "--labels", "3"]
    assert main(["check", f"{here}Proxies", *options, "--only", "call", "gradcheck", "descent"]) == 0
    assert main(["check", f"{here}Scored", "--scores", "--only", "call", "gradcheck"]) == 0
    assert main(["check", f"{here}DINO", "--dim", "12", "--only", "call", "temperature"]) == 0
    assert "student: " in capsys.readouterr().out


class WrongClass(Proxies):  # A fault that only labels show: each row gets its neighbour's class
    def forward(self, input, target):
        return super().forward(input, target.roll(1))


class IgnoresTeacher(DINO):
    def __init__(self, student: Temperature = 0.1, teacher: Temperature = 0.04):
        super().__init__(12, student, 0.04)


class PlainNames(DINO):  # not marked, as in another library
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


class Both(Objective):  # An Objective with a temperature of each side, of which one is without effect
    needs_negatives = False

    def __init__(self, student: Ranged = 0.1, teacher: Ranged = 0.04) -> None:
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
        return cross_entropy(logits, labels.to(anchors.device), reduction="none")


class Unweighted(Objective):  # applies weights itself, and forgets to, or rounds them
    needs_negatives, weighting = False, "own"

    def __init__(self, says: str | None = "own", rounds: bool = False) -> None:
        super().__init__("cosine")
        self.weighting, self.rounds = says, rounds

    def loss(self, positive, rows):
        pulls = rows.only_positives(1 - positive, 0.0)
        if self.rounds and (weights := rows.pairs.weights) is not None:
            return all_sum((pulls * (weights > 0)[:, None]).sum()) / all_sum((weights > 0).sum())
        return all_sum(pulls.sum()) / all_sum(rows.positive_count.sum()).clamp_min(1)


def lone_class(z, labels):  # a mean over the others of a class, also of one row
    z, same = normalize(full(z), dim=1), (labels.unsqueeze(1) == labels).fill_diagonal_(False)
    return -((z @ z.T * same).sum(1) / same.sum(1)).mean()


def test_labels_and_width_reach_objectives_and_faults_with_labels_are_found():
    checks = ["call", "gradient exists", "gradcheck", "size", "float16"]
    assert failures(Classes, dim=10, labels=3, only=checks) == set()
    assert failures(WrongClass, **LOSSES["Proxies"][1], only=["permutation"])
    assert failures(lone_class, labels=3, only=["labels", "call", "descent"]) == {"labels"}
    assert failures(lambda a, b, labels: with_labels(a, b, 0 * labels), labels=3, only=["labels"]) == {"labels"}
    for change in (lambda scores: 0.5, torch.round, lambda scores: (scores > 0.2).to(scores)):
        assert failures(lambda a, b, y, f=change: Scored()(a, b, f(y)), scores=True, only=["labels"]) == {"labels"}
    in_place = ["determinism", "strides"]
    assert failures(lambda a, b, y: with_labels(a, b, y.clamp_(min=1)), labels=3, only=in_place) == {"determinism"}
    assert failures(lambda a, b, y: Scored()(a, b, y.mul_(0.9)), scores=True, only=in_place) >= {"determinism"}


def test_weights_that_are_ignored_are_found():
    rows = ("rows", False, "FAIL", "a row o"), ("rows", True, "FAIL", "weights")
    for says, rounds, *found in (*rows, ("own", False, "-", "a term "), (None, False, "ok", "refused")):
        (row,) = check_objective(Unweighted, options={"says": says, "rounds": rounds}, only=["weights"]).rows
        assert [row.outcome, row.detail[:7]] == found
    assert failures("cacr(intra_batch=true)", only=["weights"]) == set()  # the other queries are candidates


@pytest.mark.parametrize(("target", "arguments", "message"), [
    ("infonze", {}, "infonce"), ("nowhere:Loss", {}, "cannot import 'nowhere'"),
    ("torch:Tensr", {}, "Did you mean 'Tensor'"), (3, {}, "cannot be called"),
    ("infonce", {"options": {"temperature": 1}}, r"infonce\(temperature=1\)"),
    ("infonce", {"reference": "dcl"}, "its own reference"), ("infonce", {"scores": True}, "it gets Pairs"),
    (DINO, {"options": {"temprature": 1}}, "temprature"), (DINO, {"reference": "infonze"}, "infonce"),
    (DINO, {"only": ["gradchek"]}, "Did you mean 'gradcheck'"),
    (DINO, {"dim": 0}, "dim must be a whole number >= 1"), (DINO, {"labels": 2, "scores": True}, "not both"),
    (DINO, {"temperatures": ["studnt"]}, "Did you mean 'student'"), (DINO, {"only": []}, "there is no check ''"),
    (lambda z: z.sum(), {}, "cannot be built from the options"), ("alignment", {}, "'alignment' is a diagnostic"),
], ids=lambda value: getattr(value, "__name__", str(value)))  # fmt: skip
def test_mistakes_get_one_error(target, arguments, message):
    with pytest.raises(DipoleError, match=message):
        check_objective(target, **{"only": ["call"]} | arguments)


def flat_of_one_encoder(s, target):
    """Flat indices of an integer type that is too small for the matrix of one encoder."""
    block = s[: len(s) // 2, len(s) // 2 :]
    rows = torch.arange(len(block))
    return block.flatten()[(rows * len(block) + rows).to(torch.int16).long()].repeat(2)


LARGE = {
    "first columns": {"forward": lambda a, b: NTXent()(a[:, :512], b[:, :512])},
    "accumulator of float16": {"total": lambda e: e.sum(1, dtype=torch.float16 if len(e) > 400 else None).to(e.dtype)},
    "float16 of float32": {"total": lambda e: (e.half() if len(e) > 400 and e.itemsize == 4 else e).sum(1).to(e)},
    "indices of 16 bits": {"take": flat_of_one_encoder},
    "always float16": {"total": lambda e: e.to(torch.half if e.dtype == torch.float32 else e.dtype).sum(1).to(e)},
    # bfloat16 has no 257.
    "places in bfloat16": {"forward": lambda a, b: NTXent()(a, b[torch.arange(len(b)).to(b.dtype).long() % len(b)])},
    "groups of four": {"forward": lambda a, b: NTXent()(a[: max(9, len(a) // 4 * 4)], b[: max(9, len(b) // 4 * 4)])},
}  # fmt: skip


@pytest.mark.parametrize(("fault", "check", "references"), [
    *((each, "close pairs", [None, "infonce"]) for each in CLOSE.values()),
    *((each, "size", [None, "infonce"]) for each in LARGE.values()),
    ({"negative": lambda s: s * (1.01 if len(s) > 512 else 1)}, "size", ["infonce"]),  # a smooth one
    ({"negative": lambda s: s.where(s < 1 - 1e-9, -torch.inf)}, "close pairs", ["infonce"]),  # its own row by value
], ids=[*CLOSE, *LARGE, "colder above 256 rows", "copies ignored"])  # fmt: skip
def test_faults_are_found(fault, check, references):
    for reference in references:
        assert failures(NTXent(**fault), only=[check], reference=reference) == {check}
