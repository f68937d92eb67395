"""Losses with one fault each that the kit must find, by the check that is about it, and their correct twins."""

import pytest
import torch
from lone_ranks import LeavesRankOne, MeanOfRank, Spread, SpreadOfAnchors
from loops import QUICK, BothWays, NTXent, failures
from runs import Steeper
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

import dipole
from dipole import Objective, SpecError
from dipole.core.cli import main
from dipole.core.conformance.kit import check_objective, chosen
from dipole.core.conformance.modes import set_back

GRADIENT = ["gradient exists", "gradcheck", "permutation", "determinism", "size"]


def changed(kept: object = None, **methods: object) -> type[NTXent]:
    """NTXent with other methods. `kept` returns the attribute `kept` of a new loss."""

    def init(self, temperature: float = 0.5) -> None:
        NTXent.__init__(self, temperature)
        self.kept = None if kept is None else kept()

    # The kit pickles what it measures, so each class is a name of this module.
    name = f"Changed{len(globals())}"
    globals()[name] = type(name, (NTXent,), {"__init__": init, **methods})
    return globals()[name]


def keeps_losses(self, a, s):
    """A running mean of losses with their graphs: the second backward pass goes through the first's."""
    self.kept = s.mean() if self.kept is None else 0.5 * self.kept + s.mean()
    return 0 * self.kept


def overflowing_norm(self, x):
    return NTXent.unit(self, x) if x.dtype.itemsize > 2 else (x / x.square().sum(1, keepdim=True).sqrt()).float()


def drops_out(self, x):
    """Only eval mode tells: nothing is drawn from a generator."""
    mask = torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype, device=x.device)
    return NTXent.unit(self, x * mask if self.training else x)


FAULTS = {
    "first maximum": ("determinism", {"extra": lambda me, a, s: s.mean() * vars(me).setdefault("m", s.max().item())}),
    "first size": ("determinism", {"targets": lambda self, a: vars(self).setdefault("first", NTXent.targets(self, a))}),
    "next is positive": ("permutation", {"targets": lambda self, a: NTXent.targets(self, a).roll(1)}),
    "no temperature": ("temperature", {"logits": lambda self, a, b: NTXent.logits(self, a, b) * self.temperature}),
    "warm": ("temperature", {"logits": lambda self, a, b: NTXent.logits(self, a, b) * min(20 * self.temperature, 1)}),
    "backward inside": (
        "determinism", {"extra": lambda self, a, s: (s.requires_grad and s.mean().backward(retain_graph=True)) or 0.0}
    ),
    "no parameter": ("gradient exists", {"kept": lambda: nn.Parameter(torch.ones(1)) * 2}),
    "keeps losses": ("memory", {"extra": keeps_losses}),
    "keeps graphs": ("memory", {"kept": list, "extra": lambda self, a, s: self.kept.append(s) or 0.0}),
    "keeps embeddings": ("memory", {"kept": list, "extra": lambda self, a, s: self.kept.append(1 * a.detach()) or 0.0}),
    "cubic memory": ("work", {"extra": lambda self, a, s: (s[:, :, None] - s[:, None, :]).tanh().square().mean()}),
    "cubic time": ("work", {"extra": lambda self, a, s: (s @ s.T).tanh().mean()}),
    # A loop over anchors whose body walks over all pairs.
    "loop over pairs": ("work", {"extra": lambda self, a, s: sum((s - row).square().mean() for row in s)}),
    "first rows": ("size", {"forward": lambda self, a, b: cross_entropy(self.logits(a, b)[:64], self.targets(a)[:64])}),
    "unguarded": ("zero rows", {"unit": lambda self, x: x / x.norm(dim=1, keepdim=True)}),
    # The value of a zero row is 0, its gradient 0/0.
    "late guard": ("zero rows", {"unit": lambda self, x: x / x.square().sum(1, keepdim=True).sqrt().clamp_min(1e-8)}),
    "overflowing norm": ("large norms", {"unit": overflowing_norm}),
    "viewed": ("strides", {"unit": lambda self, x: NTXent.unit(self, x.view(-1).view(x.shape))}),
    "on processor": ("device", {"targets": lambda self, a: torch.arange(len(a))}),
    # A tensor that is no buffer stays where it was made.
    "kept on processor": (
        "device", {"kept": lambda: torch.zeros(1), "extra": lambda self, a, s: (s * self.kept.to(s.dtype)).sum()}
    ),
    "other in eval": ("eval mode", {"extra": lambda self, a, s: 0.0 if self.training else s.mean()}),
    "drops out": ("eval mode", {"unit": drops_out}),
    "other without gradient": ("eval mode", {"extra": lambda self, a, s: 0.0 if torch.is_grad_enabled() else s.mean()}),
}  # fmt: skip
LOSSES = {name: changed(**parts) for name, (_, parts) in FAULTS.items()}


def stepped(self, a, b):
    """More numbers from 48 rows on, as a copy in another precision: the square of the batch still."""
    s = NTXent.logits(self, a, b)
    return s + 0 * NTXent.logits(self, a, b)[:, : (len(a) > 48) * len(b)].sum()


def scaled(self, a, b):
    return NTXent.logits(self, a, b) * self.kept.to(a.dtype)


# A tensor that is a buffer goes where the module goes.
Buffered = changed(lambda: nn.Buffer(torch.ones(1)), logits=scaled)
Stepped = changed(logits=stepped)
KeepsLast = changed(list, extra=lambda self, a, s: setattr(self, "kept", [a.detach().clone()]) or 0.0)


@pytest.mark.parametrize("loss", [NTXent, Buffered, Stepped, KeepsLast], ids=["plain", "buffer", "steps", "keeps"])
def test_correct_twins_pass(loss):
    assert failures(loss, only=QUICK) == set()


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found_by_the_check_about_them(name):
    (check, _), loss = FAULTS[name], LOSSES[name]
    about = {each for each, _ in FAULTS.values()}
    assert check in failures(loss, only=[check])
    assert len(failures(loss, only=about - {check, "size"})) <= 1  # a fault may show in one more


class SimSiam(nn.Module):  # -cos(a, stop(b)), and the other way round
    detached = True

    def forward(self, a, b):
        return -(cosine_similarity(a, b.detach()).mean() + cosine_similarity(b, a.detach()).mean()) / 2


class OneWay(nn.Module):  # A predictor's output against a target's: no gradient for the target
    detached = ("b",)

    def forward(self, a, b):
        return -cosine_similarity(a, b.detach()).mean()


class Codes(nn.Module):  # targets made under no_grad, in place, as Sinkhorn's algorithm makes them
    def forward(self, a, b):
        s = normalize(a, dim=1) @ normalize(b, dim=1).T
        with torch.no_grad():
            q = torch.exp(s / 0.5)
            for _ in range(3):
                q /= q.sum(0, keepdim=True)
                q /= q.sum(1, keepdim=True)
        return -(q * s.log_softmax(1)).sum(1).mean()


class WrongSlope(OneWay):  # declared, but its gradient is wrong beyond what it stops
    detached = True

    def forward(self, a, b):
        return Steeper.apply(super().forward(a, b), 2)


@pytest.mark.parametrize("loss", [SimSiam, OneWay], ids=lambda loss: loss.__name__)
def test_a_declared_stop_is_no_fault(loss):
    report = check_objective(loss, only=GRADIENT)
    assert report.ok, report.table()
    assert "as declared" in report.table()


def test_stops_that_are_declared_hide_no_other_fault():
    report = check_objective(Codes, only=GRADIENT)
    assert list(report.causes) == ["gradcheck"]
    fault = next(row for row in report.failures if row.check == "gradcheck")
    assert "declare it: detached" in fault.detail
    assert check_objective(Codes, detached=True, only=GRADIENT).ok
    for flags, code in (([], 1), (["--detached"], 0)):
        assert main(["check", f"{__name__}:Codes", "--only", "gradcheck", *flags]) == code
    assert list(check_objective(WrongSlope, only=GRADIENT).causes) == ["gradcheck"]
    leaks = type("Leaks", (OneWay,), {"forward": lambda self, a, b: -cosine_similarity(a, b).mean()})
    assert failures(leaks, only=GRADIENT) == {"gradient exists"}


class Average(nn.Module):  # pulls towards a moving mean, which is in its state
    stateful, saved = True, True

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=self.saved)

    def forward(self, a, b):
        with torch.no_grad():
            self.mean = 0.9 * self.mean.to(a.dtype) + 0.1 * a.mean(0)
        return (a - b).square().sum(1).mean() + (b @ self.mean).mean()


Unsaved = type("Unsaved", (Average,), {"saved": False})


def test_a_declared_state_is_no_fault_and_is_set_back():
    checks = ["gradient exists", "determinism", "state", "permutation", "eval mode", "strides"]
    report = check_objective(Average, only=checks, detached=True)
    assert report.ok, report.table()
    assert "as declared" in next(row.detail for row in report.rows if row.check == "determinism")
    assert failures(Unsaved, only=checks) == {"state"}
    loss = Average()
    loss.seen = [1]
    with set_back(loss):
        loss(torch.ones(2, 6), torch.ones(2, 6))
        loss.seen.append(2)
        loss.new = 3
    assert (loss.mean.any(), loss.seen, hasattr(loss, "new")) == (False, [1], False)


def counts_calls(self, a, b):
    """Undeclared state: many checks fail for it."""
    self.kept.append(1)
    return NTXent.forward(self, a, b) * len(self.kept)


def whole(self, a, b):
    return BothWays(self.temperature)(a, b)


def in_place(self, a, b):
    b.data.mul_(1.5)
    return whole(self, a, b)


@pytest.mark.parametrize(("loss", "cause", "options"), [
    (changed(list, forward=counts_calls), "determinism", {}),
    (changed(forward=lambda self, a, b: NTXent.forward(self, a, b).detach()), "gradient exists", {}),
    # One direction instead of both: each comparison with the reference misses its values.
    (NTXent, "reference", {"reference": "infonce"}), (changed(forward=lambda self, a: a.sum()), "call", {}),
    (changed(forward=lambda self, a, b: NTXent.forward(self, a, b.detach())), "gradient exists", {}),
    (changed(forward=in_place), "determinism", {"reference": "infonce"}),
    (changed(forward=lambda self, a, b: 2 * whole(self, a, b) - whole(self, a, b).detach()), "gradcheck", {}),
    (changed(forward=lambda me, a, b: whole(me, a.float(), b.float()).to(a)), "gradcheck", {"reference": "infonce"}),
    (changed(forward=lambda self, a, b: whole(NTXent(), a, b)), "temperature", {"reference": "infonce"}),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_one_cause_is_reported_once(loss, cause, options):
    report = check_objective(loss, only=[*QUICK, "size"], **options)
    assert len(report.failures) >= 3
    assert list(report.causes) == [cause]
    assert report.table().splitlines()[0].endswith("for 1 cause")
    assert f"as {cause!r}" in report.table()


def test_a_second_fault_keeps_its_message():
    def noisy(a, b):  # and not a number for rows of zeros
        return -((a / a.norm(dim=1, keepdim=True)) * b).sum(1).mean() + torch.rand(())

    report = check_objective(noisy, only=["determinism", "zero rows"])
    assert list(report.causes) == ["determinism", "zero rows"]


def test_two_ranks_are_compared_with_one():
    local = type("Local", (Spread,), {})
    assert failures(Spread, only=["ranks", "eval mode"]) == set()
    assert failures(MeanOfRank, only=["ranks"]) == {"ranks"}
    assert failures("infonce + 0.1*dp", only=["ranks"]) == set()
    messages = {SpreadOfAnchors: "on one rank and", LeavesRankOne: "the two processes ended"}
    for loss, said in (messages | {local: "cannot be sent to another process"}).items():
        (fault,) = check_objective(loss, only=["ranks"]).failures
        assert said in fault.detail
    assert failures(Spread, only=["ranks"]) == set()  # after the processes ended


def test_ranks_can_be_left_out_and_declarations_stay_in_the_class(monkeypatch):
    names, every = ({check.name for check in chosen(**given)} for given in ({"ranks": False}, {}))
    assert (every - names, "eval mode" in names) == ({"ranks"}, True)
    with pytest.raises(SpecError, match="attributes of its class"):
        check_objective("infonce", detached=True)
    monkeypatch.setattr(Spread, "__module__", "__main__")  # as in a notebook
    (row,) = check_objective(Spread, only=["ranks"]).rows
    assert row.outcome == "-"
    assert all(said in row.detail for said in ("`%%writefile spread.py`", "`dipole check spread:Spread`"))


class Target(Objective):  # anchors towards stopped candidates, which the kit stops for the reference too
    needs_negatives = False
    detached = ("candidates",)

    def loss(self, positive, rows):
        stopped = normalize(rows.pairs.candidates.detach().to(rows.x.dtype), dim=1)[rows.pairs.positives]
        return -rows.over_positives((normalize(rows.x, dim=1).unsqueeze(1) * stopped).sum(2))

    @staticmethod
    def reference(case, similarity):  # an option of classes without a constructor
        from dipole.core.conformance.reference import cosine, mean

        return mean(
            [-mean([cosine(case.anchors[i], case.candidates[j]) for j in case.positives[i]]) for i in case.counted()]
        )


def test_the_reference_of_a_term_stops_what_the_term_declares():
    assert failures(Target, only=["reference", "gradcheck", "gradient exists", "determinism"]) == set()

    class Undeclared(Target):
        detached = False

    assert failures(Undeclared, only=["reference"]) == {"reference"}


def test_after_step_is_told_the_time_where_it_asks():
    told = []
    ways = [
        lambda self, learning_rate, weight: told.append((learning_rate, weight)),
        lambda self, learning_rate, weight, step=None, total=None: told.append((step, total)),
        lambda self, learning_rate, weight, *, step: told.append(step),
        lambda self, learning_rate, weight, **when: told.append(when),
    ]
    terms = [type("Asks", (Target,), {"after_step": way})() for way in ways]
    composite = dipole.Composite(terms, [1.0, 2.0, 1.0, 1.0])
    composite.after_step(0.1, 3, 10)
    assert told == [(0.1, 1.0), (3, 10), 3, {"step": 3, "total": 10}]
    composite.after_step(0.1)
    assert told[5] == (None, None)
