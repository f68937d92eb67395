"""Pairs: who is whose positive, and one clear error for everything that does not fit."""

import pytest
import torch

import dipole
from dipole import Pairs
from dipole.core.ground.errors import PairsError


def relations(pairs, i):
    positives = {int(p) for p in pairs.positives[i] if p >= 0}
    dropped = {int(p) for p in pairs.dropped[i] if p >= 0}
    return positives, dropped, set(range(len(pairs.candidates))) - positives - dropped


def test_views():
    z = torch.randn(3, 4, 2)
    pairs = Pairs.from_views(list(z), labels=torch.tensor([5, 6, 7, 8]))
    positives, dropped, negatives = relations(pairs, 5)  # instance 1 of view 1
    assert positives == {1, 9}
    assert dropped == {5}
    assert negatives == {0, 2, 3, 4, 6, 7, 8, 10, 11}
    assert pairs.labels.tolist() == [5, 6, 7, 8] * 3
    assert (pairs.negative_counts == 9).all()


def test_cross_with_queue_several_keys_and_intra_batch():
    pairs = Pairs.cross(torch.randn(2, 3), torch.randn(2, 3, 3), torch.randn(5, 3), intra_batch=True)
    positives, dropped, negatives = relations(pairs, 1)
    assert positives == {1, 3, 5}
    assert dropped == {12}  # itself among the queries behind 6 keys and 5 of the queue
    assert negatives == {0, 2, 4, 6, 7, 8, 9, 10, 11}
    assert torch.equal(pairs.candidates[11:], pairs.anchors)
    assert pairs.with_intra_batch() is pairs


def test_keys_of_a_query_are_its_own():
    keys = torch.arange(12.0).view(2, 3, 2)
    pairs = Pairs.cross(torch.zeros(2, 2), keys)
    assert torch.equal(pairs.candidates[pairs.positives], keys)


def test_window_stays_inside_documents():
    document = torch.tensor([0, 0, 0, 1, 1, 2])
    pairs = Pairs.from_window(torch.randn(6, 3), torch.randn(6, 3), document, window=2)
    assert [relations(pairs, i)[0] for i in range(6)] == [{1, 2}, {0, 2}, {0, 1}, {4}, {3}, set()]
    assert relations(pairs, 5)[2] == {0, 1, 2, 3, 4}
    assert not pairs.views
    # Padding stands behind the real entries.
    assert (pairs.positives[:3, :2] >= 0).all()


def test_self_logit_zero_is_one_more_negative_with_logit_zero():
    f, g = torch.randn(5, 3, dtype=torch.double), torch.randn(5, 3, dtype=torch.double)
    document = torch.zeros(5, dtype=torch.long)
    loss = dipole.objective("quickthoughts")(Pairs.from_window(f, g, document, self_logit="zero")).loss
    expected = 0.0
    for i in range(5):  # the authors' code: the diagonal of the scores is set to 0 and stays in the softmax
        scores = torch.stack([f[i] @ g[j] if i != j else torch.zeros((), dtype=torch.double) for j in range(5)])
        near = [j for j in (i - 1, i + 1) if 0 <= j < 5]
        expected += -sum(torch.log_softmax(scores, 0)[j] for j in near) / len(near) / 5
    torch.testing.assert_close(loss, expected)


def test_blocks():
    x = torch.randn(3, 4, 2)
    first = Pairs.from_blocks(x)
    assert relations(first, 1)[:2] == ({5, 6, 7}, {4})
    every = Pairs.from_blocks(x, anchors="all")
    assert relations(every, 6)[:2] == ({4, 5, 7}, {6})
    means = Pairs.from_blocks(x, candidates="means")
    assert torch.allclose(means.candidates[2], x[2, 1:].mean(0))
    assert relations(means, 2) == ({2}, set(), {0, 1})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pairs.from_views([torch.randn(4, 3)]), "at least two views"),
        (lambda: Pairs.from_views([torch.randn(4, 3), torch.randn(4, 2)]), r"views\[1\] .* same width, got 2 and 3"),
        (lambda: Pairs.from_views([torch.randn(4, 3), torch.randn(5, 3)]), r"4 rows like views\[0\], got 5"),
        (lambda: Pairs.from_views([torch.randn(4, 3), torch.randn(4, 3).double()]), "same dtype"),
        (lambda: Pairs.from_views([torch.randn(4, 3), torch.randn(4, 3, device="meta")]), "same device"),
        (lambda: Pairs.from_views([torch.randn(4, 3)] * 2, labels=torch.zeros(3)), r"labels must be .* \(4,\)"),
        (lambda: Pairs.from_views([torch.ones(4, 3).long()] * 2), "floating-point"),
        (lambda: Pairs.from_views([torch.randn(0, 3)] * 2), "rows >= 1"),
        (lambda: Pairs.cross(torch.randn(4, 3), torch.randn(3, 3)), "keys must be"),
        (lambda: Pairs.cross(torch.randn(4, 3), torch.randn(4, 3), torch.randn(9, 2)), "queue and queries .* width"),
        (lambda: Pairs.from_window(torch.randn(4, 3), torch.randn(4, 3), torch.zeros(3)), "document must have 4 rows"),
        (lambda: Pairs.from_window(torch.randn(4, 3), torch.randn(4, 3), torch.zeros(4), 0), "window must be"),
        (lambda: Pairs.from_blocks(torch.randn(4, 1, 3)), "b >= 2"),
        (
            lambda: Pairs(torch.randn(2, 3), torch.randn(2, 3), torch.tensor([[0], [2]]), torch.zeros(2, 0).long()),
            "positives must index the 2 candidates",
        ),
        (
            lambda: Pairs(torch.randn(2, 3), torch.randn(2, 3), torch.tensor([[0.0], [1.0]]), torch.zeros(2, 0).long()),
            "positives must be torch.long",
        ),
        (lambda: dipole.objective("tuple")(torch.randn(4, 3), torch.randn(4, 3)), "needs labels"),
        (lambda: dipole.objective("cacr(k=4)")(torch.randn(4, 3), torch.randn(4, 3)), "use 5 views"),
        (lambda: dipole.objective("blocks(b=2)")(torch.randn(4, 3), torch.randn(4, 3)), "needs 2 positives"),
        (lambda: dipole.objective("blocks(k=9)")(torch.randn(4, 3), torch.randn(4, 3)), "needs 9 other blocks"),
        (lambda: dipole.objective("infonce+cllr(dim=4)")(torch.randn(4, 3), torch.randn(4, 3)), "width 4, got 3"),
    ],
)
def test_errors_name_the_argument(make, words):
    with pytest.raises(PairsError, match=words):
        make()


def test_terms_that_cannot_act_are_zero_and_say_why():
    z = torch.randn(1, 4, requires_grad=True)
    out = dipole.objective("infonce + dp + cacr + dcl")(z, z.clone())
    assert float(out.loss) == 0
    assert all("no anchor has a negative" in term.note for term in out.terms.values())
    out.loss.backward()
    assert (z.grad == 0).all()
