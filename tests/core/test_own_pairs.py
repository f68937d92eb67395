"""Pairs of the user and their weights: by class, from columns, in both directions, of views, against float64 loops."""

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from loops import check_against_loops, draw
from torch import Tensor, nn

import dipole
from dipole import AnyStatistic, Composite, LogSumExp, Objective, Pairs, PairsError, Rows
from dipole.core.objectives import similarity, tiles
from dipole.core.objectives.engine import using
from dipole.core.objectives.registry import registry
from tests.runs import refused

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, -1, -1, 3])


def layouts():
    z, queue, hard = draw(9, 4), draw(5, 4, seed=1), draw(9, 2, 4, seed=2)
    near, small = draw(9, 4, seed=3), draw(9, 4, seed=4)
    past = torch.tensor([0, 3, -1, 7, 1])
    twice = torch.full((9, 27), -1)
    twice[0, 0], twice[2, 0], twice[4] = 10, 3, torch.arange(27)  # row 4 has no negatives
    return {
        "labels": ((z,), Pairs.from_labels(z, LABELS)),
        "labels and a queue": ((z, queue), Pairs.from_labels(z, LABELS, queue=queue, queue_labels=past)),
        "labels of views": ((z, near), Pairs.from_labels([z, near], LABELS)),
        "columns": ((z, near, hard), Pairs.from_columns(z, near, hard)),
        "columns less doubles": ((z, near, hard), Pairs.from_columns(z, near, hard, ignored=twice)),
        "own columns": ((z, near, hard), Pairs.from_columns(z, near, hard, negatives_of="own")),
        "hard alone": ((z, near, hard), Pairs.from_columns(z, near, hard, batch_negatives=False, negatives_of="own")),
        "both": ((z, near), Pairs.both(z, near)),
        "first keys": ((z, hard, queue), Pairs.cross(z, hard, queue, batch_negatives=False).first_positives(1)),
        "first of all keys": ((z, hard), Pairs.cross(z, hard).first_positives(1)),
        "crops and queries": ((z, near, small), Pairs.from_crops([z, near], [small], queue).with_intra_batch()),
    }


@pytest.mark.parametrize("text", [
    "infonce(joint=true)", "dcl", "hcl", "align_uniform", "dp", "cacr(cost=rbf)", "cacr(intra_batch=true)",
    "triplet", "blocks", "co2", "supcon", "supcon(variant=in)", "siglip", "siglip(temperature=0.5, bias=-1)",
    "infonce(temperature=learned, init=0.3)", "hcl(rho=0, temperature=learned, init=0.4)", "dcl(temperature=learned)",
])  # fmt: skip
@pytest.mark.parametrize("name", layouts())
def test_values_and_gradients_are_those_of_loops(name, text):
    inputs, pairs = layouts()[name]
    check_against_loops(dipole.objective(text).terms[0].double(), pairs, inputs)


@pytest.mark.parametrize("text", ["tuple(temperature=1)", "supcon", "cross_entropy(classes=3)"])
@pytest.mark.parametrize("anchors", ["first", "all"])
def test_blocks_with_labels(text, anchors):
    x = draw(4, 3, 4)
    pairs = Pairs.from_blocks(x, anchors, labels=torch.tensor([0, 1, 0, 2]))
    check_against_loops(dipole.objective(text, dim=4).terms[0].double(), pairs, (x,))


@pytest.mark.parametrize("codes", ["crop", "all"])
@pytest.mark.parametrize(("large", "small", "past"), [(2, 0, 0), (2, 6, 4), (3, 2, 0)])
def test_swav_weighs_every_pair_of_a_code_and_a_crop_alike(large, small, past, codes):
    crops, queue = draw(large + small, 5, 4).unbind(), draw(past, 4, seed=9)
    term = dipole.objective(f"swav(prototypes=6, codes={codes})", dim=4).terms[0].double()
    check_against_loops(term, Pairs.from_crops(crops[:large], crops[large:], queue if past else None), crops)


def sets(pairs, i):
    positives = {int(j) for j in pairs.positives[i] if j >= 0}
    return positives, set(pairs.negative_mask()[i].nonzero().flatten().tolist())


def test_all_of_a_class_but_itself_are_positives_and_padding_counts_nowhere():
    pairs = Pairs.from_labels(draw(9, 4), LABELS)
    assert sets(pairs, 0) == ({2, 5}, {1, 3, 4, 6, 7, 8})
    assert sets(pairs, 4) == ({1}, {0, 2, 3, 5, 6, 7, 8})
    assert sets(pairs, 6) == (set(), {0, 1, 2, 3, 4, 5, 7, 8})  # of no known class: not even another such row
    assert pairs.negative_counts.tolist() == [len(sets(pairs, i)[1]) for i in range(9)]
    assert pairs.labels.tolist() == pairs.candidate_labels.tolist() == LABELS.tolist()
    assert pairs.index.tolist() == list(range(9))
    past = torch.tensor([0, 3, -1])
    pairs = Pairs.from_labels(draw(9, 4), LABELS, torch.arange(9) + 50, draw(3, 4), past)
    assert [sets(pairs, i)[0] for i in (0, 8, 7)] == [{2, 5, 9}, {10}, set()]
    assert pairs.candidate_labels.tolist() == LABELS.tolist() + past.tolist()
    assert pairs.candidate_index.tolist() == [*range(50, 59), -1, -1, -1]
    views = Pairs.from_labels([draw(9, 4), draw(9, 4)], LABELS)
    assert sets(views, 0)[0] == {2, 5, 9, 11, 14}
    assert sets(views, 15)[0] == {6}  # of no known class: its own other view alone
    assert views.view.tolist() == [0] * 9 + [1] * 9


def test_anchors_without_a_partner_are_left_out_of_the_mean_and_counted():
    z, labels = draw(5, 3), torch.tensor([4, 4, 5, 6, 4])
    objective, pairs = dipole.objective("infonce(temperature=0.3)"), Pairs.from_labels(z, labels)
    term = objective(pairs).terms["infonce"]
    assert int(term.left_out) == 2
    kept = labels == 4
    torch.testing.assert_close(term.value, objective(replace(pairs, weights=kept)).terms["infonce"].value)
    assert dipole.objective("infonce")(z, z + 1).terms["infonce"].left_out is None


def test_columns_are_the_scores_of_multiple_negatives_ranking():
    """One cross entropy of each anchor over all positives and all hard negatives of the batch, scale 20."""
    inputs = a, p, hard = draw(6, 4), draw(6, 4, seed=1), draw(6, 3, 4, seed=2)
    first, second, third = hard.unbind(1)
    given = ((None, []), (first, [first]), (hard, [first, second, third]), ([first, second], [first, second]))
    for negatives, columns in given:
        scores = 20 * F.normalize(a, dim=1) @ F.normalize(torch.cat([p, *columns]), dim=1).T
        expected = F.cross_entropy(scores, torch.arange(6))
        found = dipole.objective("infonce(temperature=0.05)")(Pairs.from_columns(a, p, negatives)).loss
        torch.testing.assert_close(found, expected)
        grads = (torch.autograd.grad(each, inputs, None, True, materialize_grads=True) for each in (found, expected))
        torch.testing.assert_close(*grads)


def test_which_hard_negatives_repel():
    a, p, hard = draw(3, 4), draw(3, 4), draw(3, 2, 4)
    labels, index = torch.tensor([4, 5, 6]), torch.tensor([30, 10, 20])
    whole = Pairs.from_columns(a, p, hard, labels, index)
    assert sets(whole, 1) == ({1}, {0, 2, 3, 4, 5, 6, 7, 8})
    assert whole.candidate_labels.tolist() == [4, 5, 6] + [-1] * 6
    assert whole.candidate_index.tolist() == [30, 10, 20] + [-1] * 6
    assert torch.equal(whole.candidates[[4, 7]], hard[1])
    assert sets(Pairs.from_columns(a, p, hard, negatives_of="own"), 1) == ({1}, {0, 2, 4, 7})
    alone = Pairs.from_columns(a, p, hard, negatives_of="own", batch_negatives=False)
    assert sets(alone, 1) == ({1}, {4, 7})
    assert alone.negative_counts.tolist() == [2, 2, 2]
    doubles = Pairs.from_columns(a, p, hard, ignored=torch.tensor([[2], [-1], [7]]))
    assert (sets(doubles, 0)[1], sets(doubles, 2)[1]) == ({1, 3, 4, 5, 6, 7, 8}, {0, 1, 3, 4, 5, 6, 8})


def test_both_directions_are_the_symmetric_cross_entropy_of_clip():
    images, captions, targets = draw(7, 4), draw(7, 4, seed=1), torch.arange(7)
    scores = F.normalize(images, dim=1) @ F.normalize(captions, dim=1).T / 0.07
    expected = (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2
    pairs = Pairs.both(images, captions, labels=targets % 2, index=targets + 90)
    torch.testing.assert_close(dipole.objective("infonce(temperature=0.07)")(pairs).loss, expected)
    assert len(pairs.anchors) == 14
    assert sets(pairs, 2) == ({9}, {7, 8, 10, 11, 12, 13})
    assert sets(pairs, 9) == ({2}, {0, 1, 3, 4, 5, 6})
    assert pairs.index.tolist() == [*range(90, 97)] * 2
    assert sets(pairs.with_intra_batch(), 2) == ({9}, set(range(14)) - {2, 9})
    # A class is looked for on the other side alone.
    assert sets(dipole.objective("tuple").terms[0].prepare(pairs), 2) == ({7, 9, 11, 13}, {8, 10, 12})
    one, two = pairs.within_sides()
    assert one.negative_counts.tolist() == two.negative_counts.tolist() == [6] * 7


def test_marked_pairs_are_added():
    a, b = draw(5, 4), draw(5, 4, seed=1)
    directions = Pairs.cross(a, b), Pairs.cross(b, a)
    objective = dipole.objective("infonce + 0.1*dp")
    each = [objective(pairs).loss.item() for pairs in directions]
    assert objective(directions).loss.item() == pytest.approx(sum(each) / 2, abs=1e-12)
    found = objective(tuple(pairs.added() for pairs in directions))
    assert found.loss.item() == pytest.approx(sum(each), abs=1e-12)
    assert float(found.terms["infonce"]) == pytest.approx(2 * float(objective(directions).terms["infonce"]), abs=1e-12)


def weighted(distances, sharpness):
    return float((distances * (sharpness * distances).softmax(0)).sum())


def described(views, t_pos, t_neg, of_images):
    """Attraction over views and images, repulsion over views x < y and images. An image counts by its weight."""
    unit = F.normalize(torch.stack(views).detach(), dim=2)
    count, batch, _ = unit.shape
    squared = 2 - 2 * torch.einsum("xid,yjd->xiyj", unit, unit)
    attraction = repulsion = 0.0
    for i, weight in enumerate(of_images):
        for v in range(count):
            attraction += weight * weighted(squared[v, i, torch.arange(count) != v, i], t_pos)
        for x, y in combinations(range(count), 2):
            repulsion -= weight * weighted(squared[x, i, y, torch.arange(batch) != i], -t_neg)
    return (attraction / count + repulsion / math.comb(count, 2)) / sum(of_images)


@pytest.mark.parametrize(
    ("positives", "t_pos", "t_neg", "engine"), [(1, 1.0, 2.0, "dense"), (2, 3.0, 0.9, "dense"), (4, 3.0, 0.9, "eager")]
)
@pytest.mark.parametrize("weights", [None, [0.5, 0.0, 2.0, 1.0, 3.0, 0.25]])
def test_cacr_equals_the_description_of_its_authors_code(positives, t_pos, t_neg, engine, weights):
    views, given = draw(positives + 1, 6, 5).unbind(), weights and torch.tensor(weights, dtype=torch.double)
    expected = described(views, t_pos, t_neg, weights or [1.0] * 6)
    with using(engine):
        for text in (f"cacr(t_pos={t_pos}, t_neg={t_neg})", f"cacr(k={positives}, t_pos={t_pos}, t_neg={t_neg})"):
            found = dipole.objective(text)(Pairs.from_views(views, negatives="view_pairs", weights=given))
            assert found.loss.item() == pytest.approx(expected, abs=1e-12)


def test_anchors_and_negatives_of_pairs_of_views():
    views, others = draw(3, 6, 5), ~torch.eye(6, dtype=torch.bool)
    labels, index = torch.arange(6) % 2, torch.randperm(6)
    pairs = Pairs.from_views(list(views), labels, index, negatives="view_pairs")
    assert pairs.negative_counts.tolist() == [5] * 18
    assert torch.equal(pairs.view, torch.tensor([0, 0, 1]).repeat_interleave(6))
    assert (pairs.labels.tolist(), pairs.index.tolist()) == (labels.tolist() * 3, index.tolist() * 3)
    for number, (x, y) in enumerate(combinations(views, 2)):
        mine = slice(6 * number, 6 * number + 6)
        assert torch.equal(pairs.anchors[mine], x)
        assert torch.equal(pairs.candidates[pairs.positives[mine]], y.unsqueeze(1))
        for negatives, other in zip(pairs.negative_mask()[mine], others, strict=True):
            assert torch.equal(pairs.candidates[negatives], y[other])


NAMES = [entry.name for entry in registry.entries() if entry.kind != "diagnostic"]
PER_PAIR = {"infonce", "quickthoughts", "dcl", "hcl", "regression", "swav"}
NO_MEAN = {"align_uniform", "barlow_twins", "vicreg"}
B = 6


def some_weights(*shape: int) -> Tensor:
    return draw(*shape, seed=9).detach().abs() * (draw(*shape, seed=8) > -1)  # some are 0


def weighted_layouts(z: Tensor) -> dict[str, Pairs]:
    """Pairs with weights, by the name of the layout. z is (3, B, 4)."""
    a, b, c = z
    two, three = [a, b], [a, b, c]
    of_rows, of_pairs, alone = some_weights(B), some_weights(B, 2), some_weights(B, 1)
    own = torch.arange(B).unsqueeze(1)
    listed = torch.tensor([[-1, 0], [1, -1], [2, 3], [-1, -1], [4, 5], [5, -1]])
    return {
        "rows of views": Pairs.from_views(three, weights=of_rows),
        "anchors of views": Pairs.from_views(two, weights=some_weights(2 * B)),
        "pairs of two views": Pairs.from_views(two, weights=alone),
        "pairs of three views": Pairs.from_views(three, weights=some_weights(3 * B, 2)),
        "queries": Pairs.from_views(three, negatives="queries", weights=of_pairs),
        "keys and queue": Pairs.cross(a, torch.stack([b, c], 1), draw(3, 4).detach(), True, weights=of_pairs),
        "sides": Pairs.both(a, b, weights=of_rows),
        "pairs of sides": Pairs.both(a, b, weights=some_weights(2 * B, 1)),
        "columns": Pairs.from_columns(a, b, c, weights=alone),
        "crops": Pairs.from_crops(two, [c], weights=some_weights(3 * B, 2)),
        "labels": Pairs.from_labels(a, torch.tensor([0, 0, 0, 1, 1, 2]), weights=of_rows),
        "window": Pairs.from_window(a, b, torch.tensor([0, 0, 0, 1, 1, 1]), weights=of_rows),
        "blocks": Pairs.from_blocks(z.transpose(0, 1), "all", weights=of_pairs),
        "own indices": Pairs(a, b, listed, own[:, :0], weights=of_pairs),
    }


def weighted_mean(pairs: Pairs, temperature: float, joint: bool) -> Tensor:
    """sum w L / sum w over rows or over pairs, from the formula of InfoNCE."""
    s = nn.functional.normalize(pairs.anchors) @ nn.functional.normalize(pairs.candidates).T / temperature
    assert pairs.weights is not None
    top = bottom = torch.zeros((), dtype=torch.double)
    for i in range(len(s)):
        positives = [int(p) for p in pairs.positives[i] if p >= 0]
        out = {*positives, *pairs.ignored[i].tolist()}
        negatives = sum(s[i, j].exp() for j in range(pairs.first_negative, s.shape[1]) if j not in out)
        of_pairs = pairs.weights.ndim == 2
        for number, p in enumerate(positives):
            against = sum(s[i, q].exp() for q in positives) if joint else s[i, p].exp()
            weight = pairs.weights[i, number] if of_pairs else pairs.weights[i] / len(positives)
            top, bottom = top + weight * ((against + negatives).log() - s[i, p]), bottom + weight
    return top / bottom


@pytest.mark.parametrize(("way", "joint"), [("dense", False), ("tiles", True)])
@pytest.mark.parametrize("name", weighted_layouts(draw(3, B, 4)))
def test_infonce_is_a_weighted_mean(name, way, joint, monkeypatch):
    if way == "tiles":
        monkeypatch.setattr(similarity, "LARGEST", 0)
        monkeypatch.setattr(tiles, "TILE", 4)
    z = draw(3, B, 4)
    pairs = weighted_layouts(z)[name]
    text = f"infonce(temperature=0.5, joint={str(joint).lower()})"
    found, wanted = dipole.objective(text)(pairs).loss, weighted_mean(pairs, 0.5, joint)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=0)
    grads = [torch.autograd.grad(each, z)[0] for each in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
    nothing = dipole.objective(text)(replace(pairs, weights=torch.zeros_like(pairs.weights))).loss
    assert nothing == torch.autograd.grad(nothing, z)[0].abs().max() == 0


def test_weights_of_an_instance_go_to_its_anchors_and_changed_copies_keep_them():
    z = draw(3, B, 4)
    w, of_pairs = some_weights(B), some_weights(B, 2)
    assert torch.equal(weighted_layouts(z)["rows of views"].weights, w.repeat(3))
    assert torch.equal(weighted_layouts(z)["pairs of three views"].weights, some_weights(3 * B, 2))
    assert torch.equal(weighted_layouts(z)["blocks"].weights, of_pairs.repeat_interleave(3, 0))
    assert torch.equal(Pairs.both(z[0], z[1], weights=w).weights, w.repeat(2))
    # Padding moves behind the real positives, and the weights with it.
    pairs = weighted_layouts(z)["own indices"]
    assert (pairs.positives[0].tolist(), pairs.weights[0, 0]) == ([0, -1], of_pairs[0, 1])
    assert Pairs.cross(z[0].half(), z[1].half(), weights=w > 0).weights.dtype == torch.float32
    assert Pairs.cross(z[0], z[1], weights=torch.ones(B, dtype=torch.long)).weights.dtype == torch.double
    pairs = weighted_layouts(z)["queries"]
    assert torch.equal(pairs.first_positives(1).weights, pairs.weights[:, :1])
    assert torch.equal(pairs.with_intra_batch().weights, pairs.weights)
    assert torch.equal(pairs.narrow(slice(2, 4), B).weights, pairs.weights[2:4])
    of_views = weighted_layouts(z)["rows of views"]
    assert torch.equal(of_views.narrow(slice(2, 4), B).weights, some_weights(B)[2:4].repeat(3))
    first, second = Pairs.both(z[0], z[1], weights=some_weights(B)).within_sides()
    assert torch.equal(first.weights, second.weights)


def repeated(weights: Tensor) -> tuple[Pairs, Pairs]:
    """Pairs with whole weights of rows, and pairs whose anchors occur as often instead."""
    a, c = draw(B, 4, seed=1), draw(9, 4, seed=2)
    positives = torch.arange(B).unsqueeze(1) + torch.tensor([0, 1])
    ignored, labels = positives[:, :0], torch.arange(B) % 3
    more = {"candidate_labels": torch.arange(9) % 3}
    often = torch.arange(B).repeat_interleave(weights)
    return (
        Pairs(a, c, positives, ignored, labels, weights=weights, **more),
        Pairs(a[often], c, positives[often], ignored[often], labels[often], **more),
    )


@pytest.mark.parametrize(
    "name", [*sorted(set(NAMES) - NO_MEAN - {"blocks"}), "dp(reduction=mean)", "dp(reduction=sum)", "cacr(cost=rbf)"]
)
def test_a_weight_of_two_is_an_anchor_that_occurs_twice(name):
    """In `blocks` the anchors define the negatives, so one that occurs twice is another batch."""
    counts = torch.tensor([2, 1, 0, 3, 1, 2])
    weighed, often = repeated(counts)
    torch.manual_seed(0)
    term = dipole.objective(name, dim=4).double()
    for parameter in term.parameters():
        nn.init.normal_(parameter)
    torch.testing.assert_close(term(weighed).loss, term(often).loss, rtol=1e-11, atol=1e-12)
    if name != "dp(reduction=sum)":  # only ratios matter
        torch.testing.assert_close(term(repeated(3 * counts)[0]).loss, term(weighed).loss)


@pytest.mark.parametrize("name", NAMES)
def test_a_term_that_cannot_use_weights_says_so(name):
    z, labels = list(draw(3, B, 4)), torch.arange(B) % 3
    term = dipole.objective(f"infonce + {name}", dim=4).double()
    for weights, fine in ((some_weights(B), name not in NO_MEAN), (some_weights(B, 2), name in PER_PAIR)):
        pairs = Pairs.from_views(z, labels, weights=weights)
        with nullcontext() if fine else pytest.raises(PairsError, match=rf"^{name} cannot use weights"):
            assert term(pairs).loss.isfinite()


@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_cached_encoders_keep_the_weights(shape):
    torch.manual_seed(0)
    encoder, views, weights = nn.Linear(4, 3).double(), draw(2, 8, 4), some_weights(*shape)

    def related(a: Tensor, b: Tensor, weights: Tensor) -> Pairs:
        return Pairs.from_views([a, b], weights=weights)

    loss = dipole.cached(encoder, "infonce", microbatch=3, pairs=related)(*views, weights=weights)
    wanted = dipole.objective("infonce")(related(*map(encoder, views), weights)).loss
    torch.testing.assert_close(loss, wanted)
    grads = [torch.autograd.grad(each, encoder.weight)[0] for each in (loss, wanted)]
    torch.testing.assert_close(*grads)


class SoftTargets(Objective):
    """Cross entropy of soft targets over the positives, which it reads itself."""

    weighting = "own"

    def __init__(self) -> None:
        super().__init__("cosine")

    def statistics(self) -> dict[str, AnyStatistic]:
        return {"negatives": LogSumExp(2.0)}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        target = rows.pairs.weights
        assert target is not None
        logits = torch.cat([2 * positive, rows.negatives.unsqueeze(1)], 1)
        return -(target * logits.log_softmax(1)[:, :-1]).sum(1)  # not divided by the sum of targets


def test_a_term_of_your_own_reads_the_weights():
    z, target = draw(3, B, 4), some_weights(B, 2)
    pairs = Pairs.cross(z[0], z[1:].transpose(0, 1), weights=target)
    unit = nn.functional.normalize(z, dim=2)
    scores = 2 * torch.einsum("id,kjd->ikj", unit[0], unit[1:])  # of query i, key k of instance j
    own = scores.diagonal(dim1=0, dim2=2).T
    wanted = (target * (scores.flatten(1).logsumexp(1, keepdim=True) - own)).sum(1).mean()
    torch.testing.assert_close(Composite([SoftTargets()], [1.0])(pairs).loss, wanted)

    class LosesThem(SoftTargets):
        weighting = None

        def prepare(self, pairs: Pairs) -> Pairs:
            return Pairs(pairs.anchors, pairs.candidates, pairs.positives, pairs.ignored)

    said, pairs = (
        "LosesThem cannot use weights: its own pairs have none",
        Pairs.cross(z[0], z[1], weights=some_weights(B)),
    )
    refused(PairsError, said, Composite([LosesThem()], [1.0]), pairs)
