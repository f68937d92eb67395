"""Pairs: who is whose positive, and one clear error for everything that does not fit."""

import copy
import pickle

import numpy as np
import pytest
import torch

import dipole
from dipole import Composite, LogSumExp, Objective, Pairs, PairsError, Sum
from dipole.core.objectives.gather import source_of
from tests.core.test_engines import layouts
from tests.core.test_own_pairs import weighted_layouts
from tests.runs import refused


def relations(pairs, i):
    positives = {int(p) for p in pairs.positives[i] if p >= 0}
    dropped = {int(p) for p in pairs.ignored[i] if p >= 0}
    return positives, dropped, set(range(len(pairs.candidates))) - positives - dropped


def test_positives_and_negatives_of_views_and_keys():
    pairs = Pairs.from_views(list(torch.randn(3, 4, 2)), labels=torch.tensor([5, 6, 7, 8]))
    # Instance 1 of view 1.
    assert relations(pairs, 5) == ({1, 9}, {5}, {0, 2, 3, 4, 6, 7, 8, 10, 11})
    assert pairs.labels.tolist() == [5, 6, 7, 8] * 3
    assert (pairs.negative_counts == 9).all()
    pairs = Pairs.cross(torch.randn(2, 3), torch.randn(2, 3, 3), torch.randn(5, 3), intra_batch=True)
    # Itself is 12, among the queries behind 6 keys and 5 of the queue.
    assert relations(pairs, 1) == ({1, 3, 5}, {12}, {0, 2, 4, 6, 7, 8, 9, 10, 11})
    assert torch.equal(pairs.candidates[11:], pairs.anchors)
    assert pairs.with_intra_batch() is pairs
    q, k, queue = torch.randn(3, 4), torch.randn(3, 2, 4), torch.randn(5, 4)
    pairs = Pairs.cross(q, k)
    assert torch.equal(pairs.candidates[pairs.positives], k)
    # Keys of others are left out where the queue alone repels.
    for intra_batch, own in ((False, []), (True, [True, False, True])):
        pairs = Pairs.cross(q, k, queue, batch_negatives=False, intra_batch=intra_batch)
        assert pairs.negative_counts.tolist() == [5 + sum(own)] * 3
        assert pairs.negative_mask()[1].tolist() == [False] * 6 + [True] * 5 + own


@pytest.mark.parametrize("views", [2, 5])
def test_queries_repel_queries_alone(views):
    """CACR Sec. 3.2: M anchors, K positives and M - 1 negatives each, the other instances' queries."""
    z, labels, index = torch.randn(views, 6, 3), torch.arange(6) % 2, torch.randperm(6)
    pairs = Pairs.from_views(list(z), labels, index, negatives="queries")
    assert torch.equal(pairs.anchors, z[0])
    assert pairs.negative_counts.tolist() == [5] * 6
    assert torch.equal(pairs.candidates[pairs.positives], z[1:].transpose(0, 1))
    for i in range(6):
        assert torch.equal(pairs.candidates[pairs.negative_mask()[i]], z[0][torch.arange(6) != i])
    assert torch.equal(pairs.labels, labels)
    assert torch.equal(pairs.candidate_index[pairs.positives], index.unsqueeze(1).expand(6, views - 1))


def test_two_encoders_are_two_sides_and_one_is_one():
    document = torch.tensor([0, 0, 0, 1, 1])
    f, g, queue = torch.randn(5, 3), torch.randn(5, 3), torch.randn(4, 3)
    for mode in ("drop", "zero"):
        for side, own in zip(Pairs.from_window(f, g, document, self_logit=mode).within_sides(), (f, g), strict=True):
            assert side.negative_counts.tolist() == [4] * 5  # neighbours too
            assert torch.equal(side.candidates[side.negative_mask()[1]], own[[0, 2, 3, 4]])
    keys = torch.stack([g, 2 * g], 1)
    first, second = Pairs.cross(f, keys, ignored=torch.tensor([[2], [-1], [5], [-1], [-1]])).within_sides()
    # Key 0 of query 2 is no negative of query 0: the two are one instance, on both sides. Key 1 of query 0, of query 2.
    assert first.negative_counts.tolist() == [3, 4, 3, 4, 4]
    assert second.negative_mask()[0].nonzero().flatten().tolist() == [1, 3, 4, 6, 7, 8, 9]
    assert second.negative_counts.tolist() == [7, 8, 7, 8, 8] * 2
    (queries,) = Pairs.cross(f, g, queue).within_sides()
    assert queries.negative_counts.tolist() == [8] * 5
    assert torch.equal(queries.candidates[queries.negative_mask()[0]], torch.cat([queue, f[1:]]))
    queries, bank = Pairs.cross(
        f, g, queue, ignored=torch.tensor([[6], [-1], [3], [-1], [-1]]), queue_of="keys"
    ).within_sides()
    assert queries.negative_counts.tolist() == [4, 4, 3, 4, 4]
    assert torch.equal(queries.candidates[queries.negative_mask()[0]], f[1:])
    assert bank.negative_counts.tolist() == [7, 8, 7, 8, 8]  # the row of the bank that query 0 drops, key 3 for query 2
    assert torch.equal(bank.candidates[bank.negative_mask()[0]], torch.cat([g[1:], queue[[0, 2, 3]]]))

    for one in (
        Pairs.from_views([f, g]), Pairs.from_crops([f, g], [f], queue), Pairs.of_points(f),
        Pairs.from_blocks(torch.randn(3, 2, 4)), Pairs.from_blocks(torch.randn(3, 2, 4), "all"),
    ):  # fmt: skip
        assert one.within_sides() == (one,)


def test_two_opposite_points_are_no_solution_of_uniformity():
    """It is taken within each encoder: f = -g, all at one point, is the worst. So is a bank of the other half (CMC)."""
    point, apart = torch.ones(6, 4, dtype=torch.double), torch.randn(6, 4, dtype=torch.double)
    term = dipole.objective("align_uniform(align_weight=0)")
    for make in (
        Pairs.cross,
        lambda x, y: Pairs.from_window(x, y, torch.arange(6) // 2),
        lambda x, y: Pairs.cross(x, y, y[:3], batch_negatives=False, queue_of="keys"),
    ):
        found = [float(term(make(x, -x)).loss) for x in (point, apart)]
        assert found[0] == pytest.approx(0)
        assert found[1] < -0.5


def test_window_stays_inside_documents_and_blocks_together():
    document = torch.tensor([0, 0, 0, 1, 1, 2])
    pairs = Pairs.from_window(torch.randn(6, 3), torch.randn(6, 3), document, window=2)
    assert [relations(pairs, i)[0] for i in range(6)] == [{1, 2}, {0, 2}, {0, 1}, {4}, {3}, set()]
    assert relations(pairs, 5)[2] == {0, 1, 2, 3, 4}
    assert not pairs.views
    assert (pairs.positives[:3, :2] >= 0).all()  # padding stands behind the real entries
    x = torch.randn(3, 4, 2)
    assert relations(Pairs.from_blocks(x), 1)[:2] == ({5, 6, 7}, {4})
    assert relations(Pairs.from_blocks(x, anchors="all"), 6)[:2] == ({4, 5, 7}, {6})
    means = Pairs.from_blocks(x, candidates="means")
    assert torch.allclose(means.candidates[2], x[2, 1:].mean(0))
    assert relations(means, 2) == ({2}, set(), {0, 1})


def test_crops_find_the_other_large_crops_of_their_image():
    a, b, c, d = torch.randn(4, 2, 3)
    pairs = Pairs.from_crops([a, b, c], [d], torch.randn(5, 3), labels=torch.tensor([7, 8]))
    assert relations(pairs, 1)[:2] == ({3, 5}, {1})  # image 1 of the first crop
    assert relations(pairs, 4)[:2] == ({0, 2}, {4})
    assert relations(pairs, 7) == ({1, 3, 5}, set(), {0, 2, 4, 6, 7, 8, 9, 10})  # a small crop is no candidate
    assert torch.equal(pairs.candidates[:6], pairs.anchors[:6])
    assert (pairs.fewest, pairs.view.tolist()) == (2, [0, 0, 1, 1, 2, 2, 3, 3])
    assert pairs.candidate_view.tolist() == [0, 0, 1, 1, 2, 2, -1, -1, -1, -1, -1]
    assert pairs.labels.tolist() == [7, 8] * 4
    for text in ("cacr(k=2)", "blocks(b=2)"):
        objective = dipole.objective(text)
        assert objective.positives_wanted == 2
        assert float(objective(Pairs.from_crops([a, b, c])).loss) > -10


def test_labels_views_and_indices_go_with_keys_queues_and_windows():
    labels, index = torch.tensor([3, 4]), torch.tensor([90, 70])
    pairs = Pairs.cross(
        torch.randn(2, 3), torch.randn(2, 2, 3), torch.randn(3, 3), True, labels,
        queue_labels=torch.tensor([5, 6, 7]), index=index,
    )  # fmt: skip
    assert pairs.candidate_labels.tolist() == [3, 4, 3, 4, 5, 6, 7, 3, 4]
    assert pairs.candidate_index.tolist() == [90, 70, 90, 70, -1, -1, -1, 90, 70]
    assert pairs.candidate_view.tolist() == [1, 1, 2, 2, -1, -1, -1, 0, 0]
    assert pairs.index.tolist() == [90, 70]
    window = Pairs.from_window(torch.randn(2, 3), torch.randn(2, 3), torch.zeros(2), 1, "zero", labels, index)
    assert window.candidate_labels.tolist() == [3, 4, -1]
    assert window.candidate_index.tolist() == [90, 70, -1]
    views = Pairs.from_views([torch.randn(2, 3)] * 2, labels)
    assert (views.index.tolist(), views.candidate_view.tolist()) == ([0, 1, 0, 1], [0, 0, 1, 1])


def test_classes_may_be_booleans():
    a, b, labels = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    for text in ("supcon", "tuple"):
        wanted, found = (dipole.objective(text)(Pairs.both(a, b, each)).loss for each in (labels, labels.bool()))
        assert torch.equal(found, wanted)


def test_as_many_candidates_as_anchors_are_not_the_anchors():
    """Small crops and a queue, or one rank's anchors: a class of the one is none of the other."""
    a, b, c, queue = torch.randn(4, 4, 3)
    labels = torch.tensor([0, 0, 1, 1])
    crops = Pairs.from_crops([a, b], [c], queue, labels)
    assert len(crops.anchors) == len(crops.candidates)
    assert crops.candidate_labels is None
    refused(PairsError, "label of every candidate", dipole.objective("tuple"), crops)
    own, nothing = torch.tensor([[0], [1], [0], [1]]), torch.zeros(4, 0, dtype=torch.long)
    assert Pairs(a, b[:2], own, nothing, labels).narrow(slice(0, 2), 4).candidate_labels is None
    assert Pairs(a, b, own, nothing, labels).candidate_labels is labels  # by hand they are, unless said otherwise


@pytest.mark.parametrize("make", [
    lambda: Pairs.from_crops(list(torch.randn(2, 4, 5)), [torch.randn(4, 5)]),
    lambda: Pairs.from_views(list(torch.randn(3, 4, 5))),
    lambda: Pairs.cross(torch.randn(4, 5), torch.randn(4, 2, 5), torch.randn(3, 5)),
    lambda: Pairs.cross(torch.randn(4, 5), torch.randn(4, 5), torch.randn(3, 5), batch_negatives=False),
    lambda: Pairs.from_blocks(torch.randn(4, 3, 5)), lambda: Pairs.from_blocks(torch.randn(4, 3, 5), "all"),
    lambda: Pairs.from_blocks(torch.randn(4, 3, 5), "first", "means"),
])  # fmt: skip
def test_queries_repel_each_other_once_and_never_their_own_instance(make):
    pairs = make().with_intra_batch()
    mask = pairs.negative_mask()
    assert torch.equal(mask.sum(1), pairs.negative_counts)
    for own, repelling in zip(pairs.index, mask, strict=True):
        negatives = pairs.candidates[repelling]
        assert len(negatives.unique(dim=0)) == len(negatives)
        found = (negatives.unsqueeze(0) == pairs.anchors.unsqueeze(1)).all(2).any(1)
        assert torch.equal(found, pairs.index != own)


class Scaled(Objective):
    """InfoNCE with a learnt scale, as CLIP's: it projects by itself."""

    def __init__(self, scale: float) -> None:
        super().__init__("cosine")
        self.scale = torch.nn.Parameter(torch.tensor(scale, dtype=torch.double))

    def statistics(self):
        return {"negatives": LogSumExp(1.0)}

    def project(self, pairs):
        x, y, _ = super().project(pairs)
        return self.scale * x, y, None

    def loss(self, positive, rows):
        return rows.over_positives(torch.nn.functional.softplus(rows.negatives.unsqueeze(1) - positive))


def test_sums_look_at_their_own_numbers_and_several_pairs_are_averaged():
    a, b, c = torch.randn(3, 6, 4, dtype=torch.double)
    learned = [dipole.objective(f"infonce(temperature=learned, init={init})").terms[0] for init in (0.5, 0.1)]
    terms = [Scaled(3.0), Scaled(0.5), *dipole.objective("dp + dcl").terms, *learned]
    alone = [float(term(a, b).detach()) for term in terms]
    summed = Composite(terms, np.ones(len(terms)))(a, b)
    assert [float(term) for term in summed.terms.values()] == pytest.approx(alone)
    assert len({round(value, 6) for value in alone}) == len(terms)
    objective = dipole.objective("infonce + dp")
    both = objective((Pairs.cross(a, b), Pairs.cross(b, c)))
    each = [objective(Pairs.cross(a, b)), objective(Pairs.cross(b, c))]
    torch.testing.assert_close(both.loss, (each[0].loss + each[1].loss) / 2)
    assert float(both.terms["dp"]) == pytest.approx(sum(float(one.terms["dp"]) for one in each) / 2)
    term = dipole.objective("infonce(similarity=bilinear)").terms[0]
    term.build_for(torch.empty(2, 3, device="meta"))  # parameters are made where the embeddings are
    assert (term.W.device.type, term.W.shape) == ("meta", (3, 3))


def test_an_outcome_says_where_its_loss_is_and_a_term_what_a_loss_must_be():
    for said, hook in (
        (r"loss must return one value .* \(8,\), .*, got \(3, 1\)", {"loss": lambda self, positive, _: positive[:3]}),
        ("statistics must return row statistics by name, .*, got list", {"statistics": lambda self: [Sum()]}),
        ("statistics must return .*, got dict", {"statistics": lambda self: {"total": 2.0}}),
        ("rows.count is no statistic. Give .* another name", {"statistics": lambda self: {"count": Sum()}}),
        ("prepare must return Pairs, got NoneType", {"prepare": lambda self, pairs: None}),
        ("extra_pairs must return a tuple of Pairs, got Pairs", {"extra_pairs": lambda self, pairs: pairs}),
        (r"project must return x \(A, h\), .*, got tuple", {"project": lambda self, pairs: (pairs.anchors, None)}),
    ):
        refused(PairsError, f"Odd: {said}", type("Odd", (Objective,), hook)("cosine"), *torch.randn(2, 4, 3))
    hooks = {"project": lambda self, pairs: [pairs.anchors, pairs.candidates, None], "loss": lambda self, *_: self.W}
    assert type("Listed", (Objective,), {**hooks, "W": torch.ones(())})("cosine")(*torch.randn(2, 4, 3)) == 1
    outcome = dipole.objective("infonce")(*torch.randn(2, 4, 3))
    refused(AttributeError, r"no 'backward'.* objective\(z1, z2\)\.loss", getattr, outcome, "backward")
    torch.testing.assert_close(copy.deepcopy(outcome).loss, pickle.loads(pickle.dumps(outcome)).loss)


NO_PAIRS = [
    *(
        (spec, lambda z: Pairs.from_window(z, z + 1, torch.arange(4)), "0: ")  # a batch without neighbours
        for spec in ("blocks", "blocks(loss=hinge)", "blocks(k=1)", "infonce", "cacr")
    ),
    ("infonce + dp + cacr + dcl", lambda z: Pairs.from_views([z[:1], z[:1] + 1]), "0: no anchor has a negative"),
    ("infonce", lambda z: Pairs.both(z[:1], z[:1] + 1), "0: no anchor has a negative"),
    ("infonce", lambda z: Pairs.from_labels(z[:1], torch.tensor([3])), "0: no anchor has a "),
    ("infonce", lambda z: Pairs.from_labels(z, torch.arange(4)), "0: no anchor has a positive"),
    ("infonce", lambda z: Pairs.from_labels(z, torch.zeros(4).long()), "0: no anchor has a negative"),
]


@pytest.mark.parametrize(("spec", "make", "said"), NO_PAIRS)
def test_terms_that_cannot_act_are_zero_and_say_why(spec, make, said):
    z = torch.randn(4, 3, requires_grad=True)
    out = dipole.objective(spec)(make(z))
    assert float(out.loss.detach()) == 0
    assert all(term.note.startswith(said) for term in out.terms.values())
    assert not torch.autograd.grad(out.loss, z)[0].any()


class Far(Objective):
    needs_negatives = False

    def statistics(self):
        return {"total": Sum()}

    def loss(self, positive, rows):
        return rows.total - rows.over_positives(positive)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_a_term_that_needs_no_negatives_has_its_statistics_without_any(similarity):
    x, y = torch.randn(2, 4, 3)
    x.requires_grad_()
    loss = Far(similarity)(Pairs.cross(x, y, batch_negatives=False))
    a, b = (x, y) if similarity == "dot" else (torch.nn.functional.normalize(each, dim=1) for each in (x, y))
    torch.testing.assert_close(loss, -(a * b).sum(1).mean())
    assert bool(torch.autograd.grad(loss, x)[0].isfinite().all())


@pytest.mark.parametrize("make", [
    lambda a, b: Pairs.from_views([a, b]), Pairs.cross, Pairs.both, Pairs.from_columns,
    lambda a, b: Pairs.from_labels(a, torch.tensor([0, 0, 1, 1, 2, 2])),
    lambda a, b: Pairs.from_blocks(torch.stack([a, b], 1)), lambda a, b: Pairs.from_crops([a, b], [a]),
])  # fmt: skip
def test_writing_into_one_pairs_changes_no_other(make):
    a, b = torch.randn(2, 6, 4, dtype=torch.float64)
    objective = dipole.objective("infonce + 0.1*dp")
    before, spoiled = objective(make(a, b)).loss, make(a, b)
    for written in (spoiled.positives, spoiled.ignored, spoiled.index, spoiled.negative_counts):
        if written is not None:
            written.fill_(3)
    torch.testing.assert_close(objective(make(a, b)).loss, before, rtol=0, atol=0)


class TeacherCodes(Objective):
    """Reads its rows without gradient first, as a teacher does."""

    def __init__(self):
        super().__init__("cosine")

    def loss(self, positive, rows):
        with torch.no_grad():
            codes = rows.y @ rows.y.T
            weights = rows.similarity(rows.pairs.positives) + codes.mean()
        return (1 - positive[:, 0]) + (rows.x * rows.y[rows.pairs.positives[:, 0]]).sum(1) * weights[:, 0].detach()


@pytest.mark.parametrize("alone", [True, False])
def test_a_term_that_reads_rows_without_gradient_removes_none(alone):
    a, b = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    term, other = TeacherCodes(), dipole.objective("regression").terms[0]
    terms = [term] if alone else [term, other]
    found = torch.autograd.grad(Composite(terms, [1.0] * len(terms))(a, b).loss, (a, b))
    z = torch.nn.functional.normalize(torch.cat([a, b]), dim=1)
    s = (z * z.roll(6, 0)).sum(1)
    weights = (s + (z @ z.T).mean()).detach()
    expected = ((1 - s) + s * weights).mean() + (0 if alone else (2 - 2 * s).mean())
    torch.testing.assert_close(found, torch.autograd.grad(expected, (a, b)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("spec", "make"), [
    ("blocks", Pairs.from_blocks), ("blocks", lambda x: Pairs.cross(x[:, 0], x[:, 1:])),
    ("infonce", lambda x: Pairs.from_blocks(x, candidates="means")),
])  # fmt: skip
def test_means_of_blocks_are_formed_in_full_precision(spec, make, dtype):
    half = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    wide = half.detach().double().requires_grad_()
    found, expected = (torch.autograd.grad(dipole.objective(spec)(make(x)).loss, x)[0] for x in (half, wide))
    # The rest is the rounding of the gradient itself.
    torch.testing.assert_close(found, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_positives_of_a_single_class_are_pairs():
    z = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = Pairs.from_labels(z, torch.zeros(6, dtype=torch.long))
    unit = torch.nn.functional.normalize(z, dim=1)
    squared = (2 - 2 * unit @ unit.T)[~torch.eye(6, dtype=torch.bool)].view(6, 5)
    distance = squared / 4
    inside = ((distance - 0.1) * (0.5 - distance)).clamp_min(0)
    assert float(inside.sum()) > 0
    torch.testing.assert_close(dipole.objective("dp")(pairs).terms["dp"].value, inside.mean())
    expected = squared.mean() + (-2 * squared).exp().mean().log()
    torch.testing.assert_close(dipole.objective("align_uniform")(pairs).loss, expected)


def test_pickled_pairs_give_the_same_loss():
    """From each constructor, changed copies and own indices. Copies also find their rows again for several ranks."""
    z = torch.randn(3, 6, 4, dtype=torch.double)
    own = Pairs(z[0], z[1], torch.arange(6).unsqueeze(1), torch.full((6, 1), -1))
    made = [*weighted_layouts(z).values(), *dict(layouts(z)).values(), own, own.with_intra_batch()]
    made += [Pairs.from_views(list(z), negatives="view_pairs"), Pairs.from_columns(z[0], z[1], [z[2]])]
    made += [Pairs.both(z[0], z[1]).without(torch.zeros(12, 1).long())]
    term = dipole.objective("infonce")
    for pairs in made:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            again = pickle.loads(pickle.dumps(pairs, protocol))
            assert float(term(again).loss) == float(term(pairs).loss)
        source, same = source_of(pairs), source_of(again)
        assert (source is None) == (same is None)
        if source is not None:
            assert same.rows.keys() == source.rows.keys()
            assert float(term(same).loss) == float(term(pairs).loss)
        again = copy.deepcopy(pairs)
        again.positives.fill_(0)  # what was written is kept, and the original is not touched
        assert (pickle.loads(pickle.dumps(again)).positives == 0).all()
        assert pairs.positives.max() > 0
