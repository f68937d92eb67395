"""Pairs of one's own: by class, from the columns of a table, in both directions; each against loops in float64."""

import pytest
import torch
import torch.nn.functional as F

import dipole
from dipole import Pairs
from dipole.core.conformance.reference import REFERENCES, Case
from dipole.core.objectives.spec import options_of
from dipole.core.utils.errors import PairsError

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, -1, -1, 3])


def rows(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def layouts():
    z, queue, hard = rows(9, 4), rows(5, 4, seed=1), rows(9, 2, 4, seed=2)
    near = rows(9, 4, seed=3)
    past = torch.tensor([0, 3, -1, 7, 1])
    twice = torch.tensor([[10], [-1], [3], *[[-1]] * 6])
    return {
        "labels": ((z,), Pairs.from_labels(z, LABELS)),
        "labels and a queue": ((z, queue), Pairs.from_labels(z, LABELS, queue=queue, queue_labels=past)),
        "labels of views": ((z, near), Pairs.from_labels([z, near], LABELS)),
        "columns": ((z, near, hard), Pairs.from_columns(z, near, hard)),
        "columns less doubles": ((z, near, hard), Pairs.from_columns(z, near, hard, ignored=twice)),
        "own columns": ((z, near, hard), Pairs.from_columns(z, near, hard, negatives_of="own")),
        "hard alone": ((z, near, hard), Pairs.from_columns(z, near, hard, batch_negatives=False, negatives_of="own")),
        "both": ((z, near), Pairs.both(z, near)),
    }


@pytest.mark.parametrize(
    "text",
    [
        "infonce(joint=true)", "dcl", "hcl", "align_uniform", "dp", "cacr", "cacr(intra_batch=true)",
        "triplet", "blocks", "co2", "supcon", "supcon(variant=in)", "siglip", "siglip(temperature=0.5, bias=-1)",
        "infonce(temperature=learned, init=0.3)", "hcl(temperature=learned, init=0.4)", "dcl(temperature=learned)",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", layouts())
def test_values_and_gradients_are_those_of_loops(name, text):
    inputs, pairs = layouts()[name]
    term = dipole.objective(text).terms[0].double()
    options = {option.name: option.default for option in options_of(type(term).__init__)} | term.given
    found = term(pairs)
    expected = REFERENCES[term.registered_name()](Case.of(pairs, dict(term.named_parameters())), **options)
    inputs = (*inputs, *term.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    got = torch.autograd.grad(found, inputs, materialize_grads=True)
    if not expected.requires_grad:  # loops without an entry
        assert not any(each.any() for each in got)
        return
    for one, two in zip(got, torch.autograd.grad(expected, inputs, materialize_grads=True), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


def sets(pairs, i):
    positives = {int(j) for j in pairs.positives[i] if j >= 0}
    return positives, set(pairs.negative_mask()[i].nonzero().flatten().tolist())


def test_all_of_a_class_but_itself_are_positives_and_padding_counts_nowhere():
    pairs = Pairs.from_labels(rows(9, 4), LABELS)
    assert sets(pairs, 0) == ({2, 5}, {1, 3, 4, 6, 7, 8})
    assert sets(pairs, 4) == ({1}, {0, 2, 3, 5, 6, 7, 8})
    assert sets(pairs, 6) == (set(), {0, 1, 2, 3, 4, 5, 7, 8})  # of no known class: not even another such row
    for i in range(9):
        assert int(pairs.negative_counts[i]) == len(sets(pairs, i)[1])
    assert pairs.labels.tolist() == pairs.candidate_labels.tolist() == LABELS.tolist()
    assert pairs.index.tolist() == list(range(9))


def test_a_queue_with_labels_and_views_with_labels():
    past = torch.tensor([0, 3, -1])
    pairs = Pairs.from_labels(rows(9, 4), LABELS, torch.arange(9) + 50, rows(3, 4), past)
    assert sets(pairs, 0)[0] == {2, 5, 9}
    assert sets(pairs, 8)[0] == {10}
    assert sets(pairs, 7)[0] == set()
    assert pairs.candidate_labels.tolist() == LABELS.tolist() + past.tolist()
    assert pairs.candidate_index.tolist() == [*range(50, 59), -1, -1, -1]
    views = Pairs.from_labels([rows(9, 4), rows(9, 4)], LABELS)
    assert sets(views, 0)[0] == {2, 5, 9, 11, 14}
    assert sets(views, 15)[0] == {6}  # of no known class: its own other view alone
    assert views.view.tolist() == [0] * 9 + [1] * 9


def test_anchors_without_a_partner_are_left_out_of_the_mean_and_counted():
    z, labels = rows(5, 3), torch.tensor([4, 4, 5, 6, 4])
    term = dipole.objective("infonce(temperature=0.3)")(Pairs.from_labels(z, labels)).terms["infonce"]
    assert int(term.left_out) == 2
    s = F.normalize(z, dim=1) @ F.normalize(z, dim=1).T / 0.3
    each = []
    for i, partners in ((0, (1, 4)), (1, (0, 4)), (4, (0, 1))):
        others = sum(s[i, j].exp() for j in (2, 3))
        each.append(sum(-(s[i, p].exp() / (s[i, p].exp() + others)).log() for p in partners) / 2)
    torch.testing.assert_close(term.value, (sum(each) / 3).detach())
    alone = dipole.objective("infonce")(Pairs.from_labels(z, torch.arange(5)))
    assert alone.terms["infonce"].note == "0: no anchor has a positive"
    alone.loss.backward()
    assert not z.grad.any()
    assert dipole.objective("infonce")(z, z + 1).terms["infonce"].left_out is None


@pytest.mark.parametrize("form", ["none", "matrix", "stacked", "list"])
def test_columns_are_the_scores_of_multiple_negatives_ranking(form):
    """One cross entropy of each anchor over all positives and all hard negatives of the batch, scale 20."""
    a, p, hard = rows(6, 4), rows(6, 4, seed=1), rows(6, 3, 4, seed=2)
    given, columns = {
        "none": (None, []),
        "matrix": (hard[:, 0], [hard[:, 0]]),
        "stacked": (hard, list(hard.unbind(1))),
        "list": ([hard[:, 0], hard[:, 1]], [hard[:, 0], hard[:, 1]]),
    }[form]
    candidates = torch.cat([p, *columns])
    scores = 20 * F.normalize(a, dim=1) @ F.normalize(candidates, dim=1).T
    expected = F.cross_entropy(scores, torch.arange(6))
    found = dipole.objective("infonce(temperature=0.05)")(Pairs.from_columns(a, p, given)).loss
    torch.testing.assert_close(found, expected)
    for one, two in zip(torch.autograd.grad(found, (a, p)), torch.autograd.grad(expected, (a, p)), strict=True):
        torch.testing.assert_close(one, two)
    if form == "stacked":
        grad = torch.autograd.grad(
            dipole.objective("infonce(temperature=0.05)")(Pairs.from_columns(a, p, hard)).loss, hard
        )
        scores = 20 * F.normalize(a, dim=1) @ F.normalize(torch.cat([p, *hard.unbind(1)]), dim=1).T
        torch.testing.assert_close(grad, torch.autograd.grad(F.cross_entropy(scores, torch.arange(6)), hard))


def test_which_hard_negatives_repel():
    a, p, hard = rows(3, 4), rows(3, 4), rows(3, 2, 4)
    labels, index = torch.tensor([4, 5, 6]), torch.tensor([30, 10, 20])
    whole = Pairs.from_columns(a, p, hard, labels, index)
    assert sets(whole, 1) == ({1}, {0, 2, 3, 4, 5, 6, 7, 8})
    assert whole.candidate_labels.tolist() == [4, 5, 6] + [-1] * 6
    assert whole.candidate_index.tolist() == [30, 10, 20] + [-1] * 6
    assert torch.equal(whole.candidates[[4, 7]], hard[1])
    own = Pairs.from_columns(a, p, hard, negatives_of="own")
    assert sets(own, 1) == ({1}, {0, 2, 4, 7})
    alone = Pairs.from_columns(a, p, hard, negatives_of="own", batch_negatives=False)
    assert sets(alone, 1) == ({1}, {4, 7})
    assert alone.negative_counts.tolist() == [2, 2, 2]
    doubles = Pairs.from_columns(a, p, hard, ignored=torch.tensor([[2], [-1], [7]]))
    assert sets(doubles, 0)[1] == {1, 3, 4, 5, 6, 7, 8}
    assert sets(doubles, 2)[1] == {0, 1, 3, 4, 5, 6, 8}


def test_both_directions_are_the_symmetric_cross_entropy_of_clip():
    images, captions = rows(7, 4), rows(7, 4, seed=1)
    scores = F.normalize(images, dim=1) @ F.normalize(captions, dim=1).T / 0.07
    targets = torch.arange(7)
    expected = (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2
    pairs = Pairs.both(images, captions, labels=targets % 2, index=targets + 90)
    found = dipole.objective("infonce(temperature=0.07)")(pairs).loss
    torch.testing.assert_close(found, expected)
    for one, two in zip(
        torch.autograd.grad(found, (images, captions)), torch.autograd.grad(expected, (images, captions)), strict=True
    ):
        torch.testing.assert_close(one, two)
    assert len(pairs.anchors) == 14
    assert sets(pairs, 2) == ({9}, {7, 8, 10, 11, 12, 13})
    assert sets(pairs, 9) == ({2}, {0, 1, 3, 4, 5, 6})
    assert pairs.index.tolist() == [*range(90, 97)] * 2
    assert sets(pairs.with_intra_batch(), 2) == ({9}, set(range(14)) - {2, 9})
    # A class is looked for on the other side alone.
    supervised = dipole.objective("tuple").terms[0].prepare(pairs)
    assert sets(supervised, 2) == ({7, 9, 11, 13}, {8, 10, 12})
    one, two = pairs.within_sides()
    assert one.negative_counts.tolist() == two.negative_counts.tolist() == [6] * 7


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda z: Pairs.from_labels(z, torch.zeros(4)), r"labels must be integers of shape \(4,\).*float32"),
        (lambda z: Pairs.from_labels(z, torch.zeros(3).long()), r"labels must be integers of shape \(4,\)"),
        (lambda z: Pairs.from_labels(z, None), "labels must be integers .* NoneType"),
        (lambda z: Pairs.from_labels([], torch.zeros(4).long()), "needs embeddings"),
        (lambda z: Pairs.from_labels([z, z[:2]], torch.zeros(4).long()), r"views\[1\] must have 4 rows"),
        (lambda z: Pairs.from_labels(z, torch.zeros(4).long(), queue=z), "queue_labels must be integers"),
        (lambda z: Pairs.from_labels(z, torch.zeros(4).long(), queue_labels=torch.zeros(4).long()), "give queue="),
        (lambda z: Pairs.from_columns(z, z[:2]), "positive must have 4 rows like anchor, got 2"),
        (lambda z: Pairs.from_columns(z, z, z[:2]), r"negatives\[0\] must have 4 rows like anchor, got 2"),
        (lambda z: Pairs.from_columns(z, z, [z, z[:, :2]]), r"negatives\[1\] and anchor must have the same width"),
        (lambda z: Pairs.from_columns(z, z, z, negatives_of="mine"), "'batch' or 'own', got 'mine'"),
        (lambda z: Pairs.from_columns(z, z, batch_negatives=False), "needs negatives"),
        (lambda z: Pairs.from_columns(z, z, z, ignored=torch.full((4, 1), 8)), "ignored must index the 8 candidates"),
        (lambda z: Pairs.both(z, z[:2]), "as many rows, got 4 and 2"),
        (lambda z: Pairs.both(z, z[:, :2]), "b and a must have the same width"),
    ],
)
def test_errors_name_the_argument(make, words):
    with pytest.raises(PairsError, match=words):
        make(torch.randn(4, 3))


def test_one_row_one_class_and_one_pair():
    z = rows(1, 3)
    assert float(dipole.objective("infonce")(Pairs.from_labels(z, torch.tensor([3]))).loss.detach()) == 0
    assert float(dipole.objective("infonce")(Pairs.both(z, z + 1)).loss.detach()) == 0
    same = dipole.objective("infonce")(Pairs.from_labels(rows(4, 3), torch.zeros(4, dtype=torch.long)))
    assert "no anchor has a negative" in same.terms["infonce"].note
