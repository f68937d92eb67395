"""Pairs of one's own: by class, from the columns of a table, in both directions, of views; against loops in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from loops import check_against_loops
from loops import draw as rows

import dipole
from dipole import Pairs
from dipole.core.objectives.engine import using
from dipole.core.utils.errors import PairsError

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, -1, -1, 3])


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
    check_against_loops(dipole.objective(text).terms[0].double(), pairs, inputs)


@pytest.mark.parametrize("text", ["tuple(temperature=1)", "supcon", "cross_entropy(classes=3)"])
@pytest.mark.parametrize("anchors", ["first", "all"])
def test_blocks_with_labels(text, anchors):
    x = rows(4, 3, 4)
    pairs = Pairs.from_blocks(x, anchors, labels=torch.tensor([0, 1, 0, 2]))
    check_against_loops(dipole.objective(text, dim=4).terms[0].double(), pairs, (x,))


@pytest.mark.parametrize("codes", ["crop", "all"])
@pytest.mark.parametrize(("large", "small", "past"), [(2, 0, 0), (2, 6, 4), (3, 2, 0)])
def test_swav_weighs_every_pair_of_a_code_and_a_crop_alike(large, small, past, codes):
    crops, queue = [rows(5, 4, seed=seed) for seed in range(large + small)], rows(past, 4, seed=9)
    term = dipole.objective(f"swav(prototypes=6, codes={codes})", dim=4).terms[0].double()
    check_against_loops(term, Pairs.from_crops(crops[:large], crops[large:], queue if past else None), crops)


def sets(pairs, i):
    positives = {int(j) for j in pairs.positives[i] if j >= 0}
    return positives, set(pairs.negative_mask()[i].nonzero().flatten().tolist())


def test_all_of_a_class_but_itself_are_positives_and_padding_counts_nowhere():
    pairs = Pairs.from_labels(rows(9, 4), LABELS)
    assert sets(pairs, 0) == ({2, 5}, {1, 3, 4, 6, 7, 8})
    assert sets(pairs, 4) == ({1}, {0, 2, 3, 5, 6, 7, 8})
    assert sets(pairs, 6) == (set(), {0, 1, 2, 3, 4, 5, 7, 8})  # of no known class: not even another such row
    assert pairs.negative_counts.tolist() == [len(sets(pairs, i)[1]) for i in range(9)]
    assert pairs.labels.tolist() == pairs.candidate_labels.tolist() == LABELS.tolist()
    assert pairs.index.tolist() == list(range(9))
    past = torch.tensor([0, 3, -1])
    pairs = Pairs.from_labels(rows(9, 4), LABELS, torch.arange(9) + 50, rows(3, 4), past)
    assert [sets(pairs, i)[0] for i in (0, 8, 7)] == [{2, 5, 9}, {10}, set()]
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
    scores = 20 * F.normalize(a, dim=1) @ F.normalize(torch.cat([p, *columns]), dim=1).T
    expected = F.cross_entropy(scores, torch.arange(6))
    found = dipole.objective("infonce(temperature=0.05)")(Pairs.from_columns(a, p, given)).loss
    torch.testing.assert_close(found, expected)
    inputs = (a, p) if given is None else (a, p, hard)
    torch.testing.assert_close(*(torch.autograd.grad(each, inputs) for each in (found, expected)))


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
    assert (sets(doubles, 0)[1], sets(doubles, 2)[1]) == ({1, 3, 4, 5, 6, 7, 8}, {0, 1, 3, 4, 5, 6, 8})


def test_both_directions_are_the_symmetric_cross_entropy_of_clip():
    images, captions = rows(7, 4), rows(7, 4, seed=1)
    scores = F.normalize(images, dim=1) @ F.normalize(captions, dim=1).T / 0.07
    targets = torch.arange(7)
    expected = (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2
    pairs = Pairs.both(images, captions, labels=targets % 2, index=targets + 90)
    found = dipole.objective("infonce(temperature=0.07)")(pairs).loss
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, (images, captions)) for each in (found, expected)))
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


def test_marked_pairs_are_added():
    a, b = rows(5, 4), rows(5, 4, seed=1)
    directions = Pairs.cross(a, b), Pairs.cross(b, a)
    objective = dipole.objective("infonce + 0.1*dp")
    each = [objective(pairs).loss.item() for pairs in directions]
    assert objective(directions).loss.item() == pytest.approx(sum(each) / 2, abs=1e-12)
    found = objective(tuple(pairs.added() for pairs in directions))
    assert found.loss.item() == pytest.approx(sum(each), abs=1e-12)
    assert float(found.terms["infonce"]) == pytest.approx(2 * float(objective(directions).terms["infonce"]), abs=1e-12)


ZEROS = torch.zeros(4).long()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda z: Pairs.from_labels(z, torch.zeros(4)), r"labels must be integers of shape \(4,\).*float32"),
        (lambda z: Pairs.from_labels(z, ZEROS[:3]), r"labels must be integers of shape \(4,\)"),
        (lambda z: Pairs.from_labels(z, None), "labels must be integers .* NoneType"),
        (lambda z: Pairs.from_labels([], ZEROS), "needs embeddings"),
        (lambda z: Pairs.from_labels([z, z[:2]], ZEROS), r"views\[1\] must have 4 rows"),
        (lambda z: Pairs.from_labels(z, ZEROS, queue=z), "queue_labels must be integers"),
        (lambda z: Pairs.from_labels(z, ZEROS, queue_labels=ZEROS), "give queue="),
        (lambda z: Pairs.from_columns(z, z[:2]), "positive must have 4 rows like anchor, got 2"),
        (lambda z: Pairs.from_columns(z, z, z[:2]), r"negatives\[0\] must have 4 rows like anchor, got 2"),
        (lambda z: Pairs.from_columns(z, z, [z, z[:, :2]]), r"negatives\[1\] and anchor must have the same width"),
        (lambda z: Pairs.from_columns(z, z, z, negatives_of="mine"), "'batch' or 'own', got 'mine'"),
        (lambda z: Pairs.from_columns(z, z, batch_negatives=False), "needs negatives"),
        (lambda z: Pairs.from_columns(z, z, z, ignored=torch.full((4, 1), 8)), "ignored must index the 8 candidates"),
        (lambda z: Pairs.from_blocks(z.view(2, 2, 3), labels=ZEROS), "labels"),
        (lambda z: Pairs.both(z, z[:2]), "as many rows, got 4 and 2"),
        (lambda z: Pairs.both(z, z[:, :2]), "b and a must have the same width"),
        (lambda z: dipole.objective("cross_entropy(classes=5)")(Pairs.from_views([z, z])), "needs labels"),
        (
            lambda z: dipole.objective("cross_entropy(classes=5)")(Pairs.from_views([z, z], ZEROS + 7)),
            "takes labels 0 to 4, got .*; set classes=8",
        ),
        (
            lambda z: dipole.objective("cross_entropy(classes=5)")(Pairs.from_views([z, z], ZEROS - 1)),
            "leave unlabelled rows out",
        ),
        (
            lambda z: dipole.objective("cacr(k=4)")(Pairs.from_views([z, z, z], negatives="view_pairs")),
            r"cacr\(k=4\) needs 4 positives for each anchor, the pairs have 2: use 5 views",
        ),
        (
            lambda z: Pairs.from_views([z, z], negatives="pairs"),
            "must be 'view_pairs', 'all' or 'queries', got 'pairs'",
        ),
    ],
)
def test_errors_name_the_argument(make, words):
    with pytest.raises(PairsError, match=words):
        make(torch.randn(4, 3))


def weighted(distances, sharpness):
    weights = [math.exp(sharpness * d) for d in distances]
    return sum(w * d for w, d in zip(weights, distances, strict=True)) / sum(weights)


def described(views, t_pos, t_neg, of_images):
    """Attraction over all views and images, repulsion over pairs of views x < y and images, in plain Python.

    Each image counts by its weight.
    """
    unit = F.normalize(torch.stack(views).detach(), dim=2)
    count, batch, _ = unit.shape
    squared = (2 - 2 * torch.einsum("xid,yjd->xiyj", unit, unit)).tolist()
    attraction = [
        of_images[i] * weighted([squared[v][i][p][i] for p in range(count) if p != v], t_pos)
        for v in range(count)
        for i in range(batch)
    ]
    repulsion = [
        -of_images[i] * weighted([squared[x][i][y][j] for j in range(batch) if j != i], -t_neg)
        for x in range(count)
        for y in range(x + 1, count)
        for i in range(batch)
    ]
    return (sum(attraction) / count + sum(repulsion) / math.comb(count, 2)) / sum(of_images)


def views_of(count):
    return [rows(6, 5, seed=seed) for seed in range(count)]


@pytest.mark.parametrize(
    ("positives", "t_pos", "t_neg", "engine"), [(1, 1.0, 2.0, "dense"), (2, 3.0, 0.9, "dense"), (4, 3.0, 0.9, "eager")]
)
@pytest.mark.parametrize("weights", [None, [0.5, 0.0, 2.0, 1.0, 3.0, 0.25]])
def test_cacr_equals_the_description_of_its_authors_code(positives, t_pos, t_neg, engine, weights):
    views, given = views_of(positives + 1), None if weights is None else torch.tensor(weights, dtype=torch.double)
    expected = described(views, t_pos, t_neg, weights or [1.0] * 6)
    with using(engine):
        for text in (f"cacr(t_pos={t_pos}, t_neg={t_neg})", f"cacr(k={positives}, t_pos={t_pos}, t_neg={t_neg})"):
            found = dipole.objective(text)(Pairs.from_views(views, negatives="view_pairs", weights=given))
            assert found.loss.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *((text, 2) for text in ("cacr", "infonce", "align_uniform", "infonce + 0.1*dp", "vicreg", "hcl")),
        *((text, 4) for text in ("infonce", "dcl", "hcl", "triplet", "infonce + dp", "siglip(temperature=1, bias=0)")),
    ],
)
def test_pairs_of_views_are_averaged_over_the_directions(text, count):
    views, term = views_of(count), dipole.objective(text)
    found = term(Pairs.from_views(views, negatives="view_pairs")).loss.item()
    each = [term(Pairs.cross(views[x], views[y])).loss.item() for x in range(count) for y in range(x + 1, count)]
    assert found == pytest.approx(sum(each) / len(each), abs=1e-12)


def test_anchors_and_negatives_of_pairs_of_views():
    views, labels, index = views_of(3), torch.arange(6) % 2, torch.randperm(6)
    pairs = Pairs.from_views(views, labels, index, negatives="view_pairs")
    assert pairs.negative_counts.tolist() == [5] * 18
    assert torch.equal(pairs.view, torch.tensor([0, 0, 1]).repeat_interleave(6))
    for number, (x, y) in enumerate([(0, 1), (0, 2), (1, 2)]):
        for i in range(6):
            row = 6 * number + i
            assert torch.equal(pairs.anchors[row], views[x][i])
            assert torch.equal(pairs.candidates[pairs.positives[row]], views[y][i : i + 1])
            assert torch.equal(pairs.candidates[pairs.negative_mask()[row]], views[y][torch.arange(6) != i])
            assert (pairs.labels[row], pairs.index[row]) == (labels[i], index[i])
