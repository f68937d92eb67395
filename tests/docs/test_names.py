"""Losses that the pages for users of other libraries call equal are equal."""

import pytest
import torch

import dipole

ROWS = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(32) % 4


def ours(text: str, *rows: torch.Tensor | dipole.Pairs) -> float:
    return float(dipole.objective(text, dim=16)(*rows).loss)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ("SupConLoss(temperature=0.1)", "supcon(temperature=0.1)"),
        ("SupConLoss(temperature=0.5)", "supcon(temperature=0.5)"),
        ("NTXentLoss(temperature=0.2)", "tuple(temperature=0.2)"),
    ],
)
def test_supervised_losses_of_pytorch_metric_learning(loss, text):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    theirs = float(eval(f"losses.{loss}", {"losses": losses})(ROWS, LABELS))
    assert ours(text, dipole.Pairs.from_labels(ROWS, LABELS)) == pytest.approx(theirs, rel=1e-5)


def test_losses_of_other_libraries_by_their_names_here():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    labels = torch.tensor([0] * 20 + [1] * 8 + [2] * 4)
    theirs = float(losses.NTXentLoss(temperature=0.2)(ROWS, labels))
    assert ours("tuple(temperature=0.2)", dipole.Pairs.from_labels(ROWS, labels)) != pytest.approx(theirs, rel=1e-3)
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    wrapped = losses.SelfSupervisedLoss(losses.NTXentLoss(temperature=0.3))
    assert ours("infonce(temperature=0.3)", ROWS, OTHER) == pytest.approx(float(wrapped(ROWS, OTHER)), rel=1e-5)
    theirs = float(losses.VICRegLoss()(ROWS, ref_emb=OTHER))
    assert ours("vicreg", ROWS, OTHER) == pytest.approx(theirs, rel=1e-3)
    cosine = torch.nn.functional.cosine_similarity(ROWS, OTHER).mean()
    assert ours("0.5*regression", dipole.Pairs.cross(ROWS, OTHER)) == pytest.approx(1 - float(cosine), rel=1e-5)
    # Its mean over anchors of -log(sum of positives / sum of all others) differs by log(number of positives).
    z = torch.nn.functional.normalize(ROWS.double(), dim=1)
    similar = (z @ z.T / 0.2).exp().fill_diagonal_(0)
    same = LABELS[:, None] == LABELS
    theirs = -(similar * same).sum(1).div(similar.sum(1)).log().mean()
    found = ours("supcon(temperature=0.2, variant=in)", dipole.Pairs.from_labels(ROWS, LABELS))
    assert found == pytest.approx(float(theirs) + torch.tensor(7.0).log().item(), rel=1e-5)
