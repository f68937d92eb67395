"""What a run says of its objective: the gradients of terms against the base's, and collapse."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from blobs_domain import BlobsAdapter
from runs import lines, quiet, weights
from torch import Tensor

from dipole.core.objectives.objective import objective
from dipole.core.train.health import Health, gradient_lengths
from dipole.core.train.recipe import load
from dipole.core.utils.seeding import Seeds

SUM = "dp(reduction=anchor_sum)"


def ratios(runs: Path, name: str = "grad/dp") -> dict[int, float | None]:
    return {line["step"]: line[name] for line in lines(runs) if name in line}


def written_out(z1: Tensor, z2: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """InfoNCE of two views in both directions (CACR Eq. 1), and the sum of LMCL Eq. 10 averaged over anchors."""
    z = torch.cat([z1, z2])
    unit, count = z / z.norm(dim=1, keepdim=True), len(z1)
    losses, inside = [], []
    for i in range(2 * count):
        partner, own = (i + count) % (2 * count), i % count
        logits = [unit[i] @ unit[j] / temperature for j in range(2 * count) if j != i]
        losses.append(torch.logsumexp(torch.stack(logits), 0) - unit[i] @ unit[partner] / temperature)
        distances = [(1 - unit[i] @ unit[j]) / 2 for j in range(2 * count) if j % count != own]
        inside.append(sum(((d - 0.1) * (0.5 - d)).clamp_min(0) for d in distances))
    return torch.stack(losses).mean(), torch.stack(inside).mean()


def length(loss: Tensor, parameters: list[Tensor]) -> float:
    grads = torch.autograd.grad(loss, parameters, retain_graph=True)
    return math.sqrt(sum(float(g.square().sum()) for g in grads))


def test_the_ratios_are_those_of_the_formulas(blobs, tmp_path):
    overrides = ("blobs.dropout=0", f"objective=infonce(temperature=0.3) + 0.7*{SUM}", "train.evaluate_every=2")
    overrides += ("train.steps=5",)
    record = quiet(blobs, *overrides, runs=tmp_path / "runs")
    settings, seeds, cpu = load(blobs, overrides).config.settings, Seeds(0), torch.device("cpu")
    torch.manual_seed(seeds.model)
    adapter = BlobsAdapter(settings, seed=seeds, device=cpu, workdir=tmp_path, batch_size=16)
    parameters = list(adapter.module.double().parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    expected = {}
    for step in range(5):
        views = list(adapter.batches(step // 4))[step % 4][0].double()
        infonce, dp = written_out(*adapter.module(views.flatten(0, 1)).chunk(2), 0.3)
        expected[step + 1] = length(0.7 * dp, parameters) / length(infonce, parameters)
        optimizer.zero_grad()
        (infonce + 0.7 * dp).backward()
        optimizer.step()
    found = ratios(tmp_path / "runs")
    assert list(found) == [1, 2, 4, 5]
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-3)
    assert record.diagnostics["grad/dp"] == pytest.approx(expected[5], rel=1e-3)


@pytest.mark.parametrize(
    "overrides",
    [
        (f"objective=infonce(temperature=learned, init=0.07) + {SUM}", "blobs.queue=24"),
        ("objective=infonce + 0.1*cllr(dim=8, solver=proximal) + swav", "train.microbatch=5"),
        (f"objective=infonce + {SUM}", "train.activation_checkpointing=true", "train.precision=16-mixed"),
        (f"objective=infonce + {SUM}", "train.schedule.dp.weight=linear(0, 1)", "train.clip=0.1"),
    ],
)
def test_measuring_changes_no_bit_of_training(blobs, tmp_path, monkeypatch, overrides):
    overrides = (*overrides, "train.evaluate_every=2")
    quiet(blobs, *overrides, runs=tmp_path / "with")
    assert any(name.startswith("grad/") for line in lines(tmp_path / "with") for name in line)
    monkeypatch.setattr(Health, "see_step", lambda *_: None)
    quiet(blobs, *overrides, runs=tmp_path / "without")
    one, other = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(one[name], other[name]) for name in one)

    def of_training(runs: Path) -> list[dict[str, Any]]:
        kept = [{name: value for name, value in line.items() if "grad/" not in name} for line in lines(runs)]
        return [line for line in kept if len(line) > 2]

    assert of_training(tmp_path / "with") == of_training(tmp_path / "without")


def test_a_regularizer_that_dominates_is_named_once(blobs, tmp_path, capsys):
    record = quiet(blobs, f"objective=infonce + 8*{SUM}", "train.evaluate_every=2", runs=tmp_path)
    largest = max(value for value in ratios(tmp_path).values() if value is not None)
    assert largest > 6
    (note,) = [note for note in record.notes if "dominates" in note]
    assert note == (
        f"the term 'dp' dominates: its gradient was {largest:.3g} times as long as that of infonce. A weight of 4 "
        "instead of 8 would halve that"
    )
    assert capsys.readouterr().err.count(f"warning: {note}.") == 1
    halved = quiet(blobs, f"objective=infonce + 4*{SUM}", runs=tmp_path / "halved")
    first = next(iter(ratios(tmp_path).values()))
    assert first is not None
    assert next(iter(ratios(tmp_path / "halved").values())) == pytest.approx(first / 2, rel=1e-5)
    assert halved.status == "done"


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        ("infonce", set()),
        ("infonce + 0.1*dp(reduction=mean)", {"dp"}),
        ("infonce + 5*dp(reduction=mean)", {"dp"}),
        ("infonce + 0.1*cllr", {"cllr"}),
        (f"5*{SUM}", set()),  # no base to compare with
        (f"infonce + triplet + 0.01*{SUM}", {"infonce", "triplet", "dp"}),
        (f"infonce + 0.01*{SUM} + 0.01*{SUM}", {"dp.0", "dp.1"}),
    ],
)
def test_what_is_compared(blobs, tmp_path, text, logged):
    record = quiet(blobs, f"objective={text}", runs=tmp_path)
    assert {name for line in lines(tmp_path) for name in line if name.startswith("grad/")} == {
        f"grad/{name}" for name in logged
    }
    assert not any("dominates" in note for note in record.notes)


def test_a_base_without_gradient_dominates_nothing(blobs, tmp_path):
    overrides = (f"objective=triplet(margin=0) + {SUM}", "blobs.noise=0", "blobs.dropout=0")  # positives coincide
    record = quiet(blobs, *overrides, runs=tmp_path)
    assert None in ratios(tmp_path).values()
    assert not any("dominates" in note for note in record.notes)


def test_a_scheduled_weight_is_the_one_of_the_step(blobs, tmp_path):
    curve = ("train.schedule.dp.weight=linear(0, 10)", "train.evaluate_every=5", f"objective=infonce + {SUM}")
    record = quiet(blobs, *curve, runs=tmp_path)
    found = ratios(tmp_path)
    assert found[1] == 0
    (note,) = [note for note in record.notes if "dominates" in note]
    assert any(f"{weight / 2:.4g} instead of {weight:.4g}" in note for weight in (40 / 9, 5, 4, 9, 10))


def test_without_trained_encoder_the_objective_is_compared(blobs, tmp_path, monkeypatch):
    plain = BlobsAdapter.__init__

    def frozen(adapter: BlobsAdapter, *args: Any, **kwargs: Any) -> None:
        plain(adapter, *args, **kwargs)
        adapter.module.requires_grad_(False)

    monkeypatch.setattr(BlobsAdapter, "__init__", frozen)
    quiet(blobs, f"objective=infonce(similarity=bilinear) + {SUM}", runs=tmp_path)
    assert set(ratios(tmp_path).values()) == {0}  # W is not seen by polarization


@pytest.mark.parametrize(("text", "collapses"), [("infonce", False), ("tuple", False), ("regression", True)])
def test_embeddings_that_collapse_are_named_once(blobs, tmp_path, capsys, text, collapses):
    overrides = ("train.steps=200", "train.evaluate_every=50", "blobs.dropout=0")
    record = quiet(blobs, f"objective={text}", *overrides, runs=tmp_path)
    notes = [note for note in record.notes if note.startswith("the embeddings have collapsed: mean distance ")]
    assert len(notes) == len(record.notes) == collapses
    assert capsys.readouterr().err.count("have collapsed") == collapses


def test_lengths_and_weighted_terms():
    a, b = (torch.nn.Parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
    weighted = {"one": (a * a).sum() / 2, "two": 2 * (b * b).sum(), "none": torch.zeros(())}
    for names, expected in ((["one"], 5), (["one", "two"], math.hypot(5, 20))):
        base, lengths = gradient_lengths(weighted, names, [a, b])
        assert base == pytest.approx(expected)
        assert lengths == {"one": 5, "two": 20, "none": 0}
    z = torch.randn(2, 6, 4, requires_grad=True)
    outcome = objective(f"infonce + 0.3*{SUM}")(z[0], z[1])
    assert list(outcome.weighted) == ["infonce", "dp"]
    torch.testing.assert_close(sum(outcome.weighted.values()), outcome.loss)
    assert outcome.weighted["dp"].requires_grad
