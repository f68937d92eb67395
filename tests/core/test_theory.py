"""The theorems: against enumeration of every tuple, and as inequalities on whatever features."""

import argparse
import itertools
import json
import math
import pkgutil
import shlex
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from runs import refused
from scipy.optimize import linprog
from torch import nn

from dipole.core.cli.commands.theory import configure
from dipole.core.evaluation.diagnostics import class_ratio, similarity_error
from dipole.core.evaluation.theory import arora, cllr, latent, lmcl, pictures
from dipole.core.evaluation.theory.arora import _draw_tasks, trained_loss
from dipole.core.evaluation.theory.latent import Latent, collision, expected, margin_loss, some_collision
from dipole.core.evaluation.theory.report import choose, measure
from dipole.core.evaluation.theory.theorems import THEOREMS, Choices, RunFacts
from dipole.core.objectives.registry import registry
from dipole.core.train.theory import read_labels
from dipole.core.utils.errors import DataError, OptionError
from tests.runs import refused as fails

LOSSES, KINDS = ("hinge", "logistic"), {"different": False, "same": True}
LABELS, X = torch.tensor([0, 1, 2, 0, 1, 0, 2]), torch.eye(7)


def small(scale: float = 1.3) -> Latent:
    generator = torch.Generator().manual_seed(0)
    return Latent.of(scale * torch.randn(7, 3, generator=generator, dtype=torch.float64), LABELS)


def l_of(loss: str, margins: list[float]) -> float:
    """l(v) of the paper, Section 2."""
    if loss == "hinge":
        return max(0.0, 1 + max(-v for v in margins))
    return math.log2(1 + sum(math.exp(-v) for v in margins))


def tuples(points: Latent, k: int):
    """Every (x, x+, x_1^-.., their classes) with its probability."""
    rho, spans = points.prior.tolist(), [range(s.start, s.stop) for s in points.spans]
    where = [(c, i) for c, span in enumerate(spans) for i in span]
    for c, span in enumerate(spans):
        for x, p in itertools.product(span, span):
            for negatives in itertools.product(where, repeat=k):
                chance = rho[c] / len(span) ** 2
                for cn, _ in negatives:
                    chance *= rho[cn] / len(spans[cn])
                yield chance, c, x, p, negatives


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_unsupervised_loss_is_that_of_every_tuple(loss, k):
    points = small()
    s = points.scores.tolist()
    total, chances = Counter(), Counter()
    for chance, c, x, p, negatives in tuples(points, k):
        gaps = {kind: [s[x][p] - s[x][q] for cn, q in negatives if (cn == c) == same] for kind, same in KINDS.items()}
        total["whole"] += chance * l_of(loss, gaps["different"] + gaps["same"])
        for kind in [kind for kind, v in gaps.items() if v]:
            total[kind] += chance * l_of(loss, gaps[kind])
            chances[kind] += chance
    found = arora.unsupervised_loss(points, loss, k)
    assert found.whole == pytest.approx(total["whole"], abs=1e-11)
    assert found.different == pytest.approx(total["different"] / chances["different"], abs=1e-11)
    assert found.same == pytest.approx(total["same"] / chances["same"], abs=1e-11)
    assert some_collision(points.prior, k) == pytest.approx(chances["same"], abs=1e-12)
    assert latent.collision(points.prior, k) == pytest.approx(1 - chances["different"], abs=1e-12)
    assert found.same >= 1 - 1e-12  # by Jensen, Sec. 4.2
    if k == 1:
        tau = collision(points.prior)
        assert arora.block_loss(points, loss, b=1).whole == pytest.approx(found.whole)
        assert found.whole == pytest.approx(tau * found.same + (1 - tau) * found.different)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("k", "tasks"), [(1, "collision"), (3, "collision"), (1, "distinct"), (2, "distinct")])
def test_the_mean_classifier_is_that_of_every_task(loss, k, tasks):
    points, losses, chances = small(), [], []
    mu = [points.features[span].mean(0) for span in points.spans]
    for first, *others in itertools.product(range(3), repeat=k + 1):
        if first in others or (tasks == "distinct" and len(set(others)) < k):
            continue
        rows = points.features[points.spans[first]]
        losses.append(np.mean([l_of(loss, [float(x @ (mu[first] - mu[c])) for c in set(others)]) for x in rows]))
        chances.append(float(points.prior[[first, *others]].prod()))
    expected = np.average(losses, weights=chances)
    assert arora.mean_classifier_loss(points, loss, k, tasks) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("loss", LOSSES)
def test_blocks_of_two_are_those_of_every_tuple_on_average(loss):
    points = Latent.of(torch.tensor([[1.0, 0.5], [-0.5, 1.0], [0.2, -1.0], [-1.0, 0.1]]), torch.tensor([0, 0, 1, 1]))
    s, total = points.scores.tolist(), 0.0
    for own, other in itertools.product(([0, 1], [2, 3]), repeat=2):
        for x, p, q, m, n in itertools.product(own, own, own, other, other):
            total += 0.25 / 32 * l_of(loss, [(s[x][p] + s[x][q] - s[x][m] - s[x][n]) / 2])
    found = arora.block_loss(points, loss, b=2, draws=400)
    assert found.whole == pytest.approx(total, abs=max(4 * found.error, 1e-3))


@pytest.mark.parametrize("loss", LOSSES)
def test_scores_far_apart_keep_their_digits(loss):
    """Scores of 1,500 leave the quadrature, and 1e3 off the origin must cost hinge no digits."""
    generator = torch.Generator().manual_seed(1)
    a, b = (700.0 * torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    mass = torch.full((1, 6), 1 / 6, dtype=torch.float64)
    gaps = b.unsqueeze(1) - a.unsqueeze(2)
    every = (1 + gaps).clamp_min(0) if loss == "hinge" else torch.logaddexp(torch.zeros(()), gaps) / math.log(2)
    assert expected(loss, a, b, mass)[0].tolist() == pytest.approx(every.mean((1, 2)).tolist(), rel=1e-12)
    if loss == "logistic":
        fails(OptionError, "spread", expected, loss, a, b, mass, 2)
    shifted = expected("hinge", a / 700 + 1e3, b / 700 + 1e3, mass, 3)
    assert torch.allclose(shifted, expected("hinge", a / 700, b / 700, mass, 3), atol=1e-11)


def assert_hold(points: Latent, loss: str, k: int = 3, b: int = 3) -> None:
    """The inequalities of Arora et al. as they prove them, with Gen_M = 0: (name, smaller side, larger side)."""
    tau, s = collision(points.prior), arora.deviation(points)
    un, many = arora.unsupervised_loss(points, loss), arora.unsupervised_loss(points, loss, k)
    mean, of_k = arora.mean_classifier_loss(points, loss), arora.mean_classifier_loss(points, loss, k)
    blocks = arora.block_loss(points, loss, b, draws=2)
    middle, right = (arora.lemma_4_3(loss, 1, each.whole, points.prior) for each in (blocks, un))
    sides = [
        ("4.3", mean, (un.whole - tau) / (1 - tau)), ("4.4", un.same, arora.lemma_4_4(loss, s)),
        ("4.5", mean, arora.theorem_6_1(loss, 1, un.different, s, points.prior)), ("6.2, left", mean, middle),
        ("6.2, right", middle, right), ("4.3 of k", of_k, arora.lemma_4_3(loss, k, many.whole, points.prior)),
        ("6.1", of_k, arora.theorem_6_1(loss, k, many.different, s, points.prior)),
    ]  # fmt: skip
    if loss == "hinge":
        bound = arora.lemma_5_1(points, arora.margin(arora.radius(points), arora.spread(points)))
        sides.append(("5.1", un.different, bound))
    for name, smaller, larger in sides:
        assert smaller <= larger + 1e-9 * max(1.0, abs(larger)), (name, loss, smaller, larger)


SIZES = st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000))
COUNTS = st.lists(st.integers(1, 6), min_size=2, max_size=6)


@settings(max_examples=60)
@given(COUNTS, SIZES, st.floats(0.01, 6), st.floats(0, 3), st.booleans(), st.sampled_from(LOSSES))
def test_every_inequality_holds_on_any_features(counts, sizes, scale, pull, uniform, loss):
    width, k, b, seed = sizes
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    centres = pull * torch.randn(len(counts), width, generator=generator)
    x = scale * (torch.randn(len(labels), width, generator=generator) + centres[labels])
    points = Latent.of(x, labels, "uniform" if uniform else "measured")
    # Wider scores are refused for this loss. Below three quarters of its limit none is.
    assume(loss == "hinge" or float(points.scores.max() - points.scores.min()) < 900)
    assert_hold(points, loss, k, b)


def test_sides_tell_wrong_sides_apart():
    """A bound that is reached, and one that would break if tau were taken for another prior."""
    points = Latent.of(torch.tensor([[1.0], [-1.0]]).double(), torch.tensor([0, 1]))
    un, tau = arora.unsupervised_loss(points), collision(points.prior)
    bound = arora.lemma_4_3("hinge", 1, un.whole, points.prior)
    assert bound == pytest.approx((un.whole - tau) / (1 - tau)) == arora.mean_classifier_loss(points)
    gained = arora.theorem_6_1("logistic", 1, 0.5, 2.0, points.prior, gen=0.25)  # Theorem 4.5
    assert gained == pytest.approx(0.5 + math.sqrt(0.5) / math.log(2) * tau / (1 - tau) * 2 + 0.25 / (1 - tau))
    skewed = Latent.of(torch.tensor([[1.0]] * 9 + [[-1.0]]).double(), torch.tensor([0] * 9 + [1]))
    assert (arora.unsupervised_loss(skewed).whole - 0.9) / 0.1 < arora.mean_classifier_loss(skewed)


def test_trained_classifier_between_the_infimum_and_the_mean():
    points = small()
    for loss in LOSSES:
        found = trained_loss(points, loss)
        assert (found.tasks, found.of, found.error) == (3, 3, 0.0)
        assert 0 <= found.loss <= arora.mean_classifier_loss(points, loss)
    apart = Latent.of(torch.tensor([[1.0, 0.0], [0.9, 0.1], [-1.0, 0.0]]).double() / 10, torch.tensor([0, 0, 1]))
    assert trained_loss(apart, "hinge").loss < 1e-6 < 0.9 < arora.mean_classifier_loss(apart)  # separable: inf is 0
    same = Latent.of(torch.ones(4, 2).double(), torch.tensor([0, 0, 1, 1]))
    assert trained_loss(same, "logistic").loss == pytest.approx(1)  # nothing to tell apart: l(0)


def test_the_hinge_optimum_is_that_of_a_linear_program():
    x, y = torch.randn(24, 2, generator=torch.Generator().manual_seed(3)).double(), torch.arange(24) % 2
    points = Latent.of(x, y)
    sign = torch.where(torch.arange(24) < 12, 1.0, -1.0).double()
    rows = torch.cat([-sign[:, None] * points.features, -torch.eye(24)], 1)  # 1 - y w^T x <= xi
    cost = torch.cat([torch.zeros(2), torch.full((24,), 1 / 24)])
    best = linprog(cost.numpy(), rows.numpy(), [-1.0] * 24, bounds=[(None, None)] * 2 + [(0, None)] * 24).fun
    assert trained_loss(points).loss == pytest.approx(best, abs=2e-3)


def test_drawn_tasks_come_as_often_as_their_classes_share():
    prior = torch.tensor([0.5, 0.3, 0.1, 0.1])
    drawn = _draw_tasks(prior, 1, 4000, seed=0)
    chances = {pair: float(prior[list(pair)].prod()) for pair in itertools.combinations(range(4), 2)}
    total = sum(chances.values())
    for pair, chance in chances.items():
        assert drawn.count(pair) / 4000 == pytest.approx(chance / total, abs=0.03)


@pytest.mark.parametrize("k", [30, 200])
def test_many_negatives_of_few_classes(k):
    p, g = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([[[0.2], [0.9]]], dtype=torch.float64)
    wanted = 0.7**k * 0.2 + 0.3**k * 0.9 + (1 - 0.7**k - 0.3**k) * 0.18
    assert float(latent.over_draws(p, g, k)) == pytest.approx(wanted, abs=1e-13)
    for loss in LOSSES:
        assert_hold(small(), loss, k=k)


def test_deviation_constants_and_orders():
    points, parts = small(), []
    for span in points.spans:
        x = points.features[span]
        covariance = torch.cov(x.T, correction=0)
        parts.append(math.sqrt(float(torch.linalg.eigvalsh(covariance)[-1])) * float(x.norm(dim=1).mean()))
    assert arora.deviation(points) == pytest.approx(np.average(parts, weights=points.prior.square()))
    assert arora.collision_constant("hinge") == pytest.approx(0.7071, abs=1e-4)
    assert arora.collision_constant("logistic") == pytest.approx(0.7071 / math.log(2), abs=1e-4)
    first, later = (arora.generalization(2.0, 0.0, m, 0.95) for m in (100, 400))
    assert first == pytest.approx(4 * math.sqrt(math.log(20) / 100))
    assert later == pytest.approx(first / 2)
    assert arora.generalization(2.0, 50.0, 100, 0.95, 3.0) == pytest.approx(3 * (1.0 + first))
    assert arora.margin(1.0, 0.5, 0.1, constant=2.0) == pytest.approx(1 + math.sqrt(math.log(10)))
    assert some_collision(torch.full((10,), 0.1, dtype=torch.float64), 8) == pytest.approx(1 - 0.9**8)
    assert lmcl.generalization(1, 10, 5.0) == pytest.approx(math.sqrt(2) * 0.5)  # log^2(1) = 0


def test_figure_1_the_unsupervised_loss_picks_the_wrong_map():
    for make, mean_is_bad in ((pictures.mean_is_bad, True), (pictures.high_variance, False)):
        f1, f0 = make(3.0), make(3.0).scaled(0.0)
        assert arora.unsupervised_loss(f0).whole == 1 < arora.unsupervised_loss(f1).whole - 1
        assert trained_loss(f1).loss < 1e-6 < trained_loss(f0).loss
        assert (arora.mean_classifier_loss(f1) > 1) == mean_is_bad
        assert (arora.deviation(f1) == 0) == mean_is_bad
        larger = arora.unsupervised_loss(make(6.0)).whole / arora.unsupervised_loss(f1).whole
        assert 3 < larger < 5  # grows with r^2


def test_lmcl_parts_against_loops():
    x, y = small().features, LABELS.sort().values
    z = nn.functional.normalize(x, dim=1)
    d = {(i, j): float((1 - z[i] @ z[j]) / 2) for i in range(7) for j in range(i + 1, 7)}
    g = [abs(min((v - 0.1) * (v - 0.5), 0)) for v in d.values()]
    assert lmcl.regularizer(x, 0.1, 0.5) == pytest.approx(sum(g) / 21)
    assert lmcl.regularizer(x, 0.1, 0.5, "anchor_sum") == pytest.approx(2 * sum(g) / 7)  # mean of sums over the others
    assert lmcl.regularizer(x, 0.1, 0.5, "sum") == pytest.approx(2 * sum(g))
    within, between = lmcl.separation(x, y)
    assert within == pytest.approx(max(v for (i, j), v in d.items() if y[i] == y[j]))
    assert between == pytest.approx(min(v for (i, j), v in d.items() if y[i] != y[j]))
    mu, nearest = lmcl.coverage(x, 11)
    assert nearest.tolist() == pytest.approx([min(abs(v - m) for v in d.values()) for m in mu.tolist()], abs=1e-7)
    assert lmcl.proof_delta_pos(x, y) == pytest.approx(sorted(d.values())[5 - 1])  # 3 + 1 + 1 pairs share a class
    assert class_ratio(y) == pytest.approx(5 / 4 / 3)
    # Theorem 2 is met by its own construction.
    assert lmcl.separation(torch.eye(4)[y], y) == (0.0, 0.5)
    assert similarity_error(torch.eye(4)[y], y)[0] == 0


def test_stationarity_from_lines():
    names = "step", "train/loss", "train/grad_norm", "train/grad_norm_squared"
    numbers = (1, 3.0, 2.0, 5.0), (4, 1.0, 1.0, 1.5), (9, 2.0, 2.0, 4.5)
    lines = [dict(zip(names, each, strict=True)) for each in numbers]
    lines.insert(1, {"step": 1, "eval/x": 1.0})
    way = cllr.stationarity(lines, smoothness=2.0)
    assert (way.steps, way.least, way.descent, way.gradient) == ([1, 4, 9], [5.0, 1.5, 1.5], 2.0, math.sqrt(5))
    assert way.bound == pytest.approx([math.sqrt(5) * math.sqrt(8 / t) for t in (1, 4, 9)])
    # With the smallest S that it says, the bound is met everywhere and once exactly.
    tight = cllr.stationarity(lines, way.implied_smoothness)
    rooms = [bound - least for bound, least in zip(tight.bound, tight.least, strict=True)]
    assert min(rooms) == pytest.approx(0, abs=1e-12)
    assert cllr.stationarity([{"step": 1, "train/loss": 1.0}]) is None


def test_report_has_every_theorem_or_says_why_not():
    x, y = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 5
    found = measure(x, y, Choices(k=2, tasks=5), facts=RunFacts(nce=2.0, negatives=10, cllr_weight=0.1, alpha=10))
    keys = {each.key for each in found.inequalities} | found.missing.keys()
    assert {each.key for each in THEOREMS} - keys <= {"figure_1", "lmcl_theorem_1", "cllr_theorem_1"}  # no two sides
    assert min(found.value("coverage"), found.value("var[D/E D]")) > 0
    assert not found.broken
    json.dumps(found.as_dict(), allow_nan=False)
    without = measure(x, None)
    assert {each.key for each in THEOREMS if "labels" in each.needs} <= without.missing.keys()
    assert {"lmcl_eq_5", "lmcl_theorem_3"} == {each.key for each in without.inequalities}
    assert "two classes" in measure(x, torch.zeros(60).long()).missing["lemma_4_3"]
    wide = measure(100 * x, y, Choices(losses=("logistic",), k=2))
    assert "spread" in wide.missing["theorem_6_1 (logistic)"]
    assert "smaller k" in measure(x, torch.arange(60) % 2, Choices(k=1029)).missing["theorem_6_1 (hinge)"]
    assert any(each.key == "lemma_4_3" for each in wide.inequalities)
    labels = torch.arange(900) % 300  # where classes are many, points are chosen by class
    rows = choose(labels, 900, Choices(points=60))
    assert (len(labels[rows].unique()), len(rows)) == (6, 18)
    assert torch.equal(choose(labels, 900, Choices(points=1000)), torch.arange(900))
    assert torch.equal(choose(torch.tensor([0, -1, 1]), 3, Choices()), torch.tensor([0, 2]))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Choices(k=0), "k must be an integer >= 1"), (lambda: Choices(seed=10**20), "seed must be an integer >= 0"),
    (lambda: Choices(tasks=1), "tasks must be an integer >= 2"), (lambda: arora.block_loss(small(), b=0), "b >= 1"),
    (lambda: Choices(confidence=1.0), "confidence must be a number > 0 and < 1"),
    (lambda: Choices(losses=("softmax",)), "hinge, logistic"), (lambda: Choices(prior="flat"), "measured, uniform"),
    (lambda: Latent.of(torch.zeros(2, 2), torch.tensor([-1, -1])), "no point has a label"),
    (lambda: Latent.of(torch.full((2, 2), torch.nan), torch.tensor([0, 1])), "not finite"),
    (lambda: measure([[0.0, 0.0]], None), "n >= 2"), (lambda: measure(X, ["a"] * len(X)), "Number the names"),
    (lambda: measure(torch.ones(4, 2), [0, 1]), "labels must be 4 integers"), (lambda: Choices(k=3000), "<= 1029"),
    (lambda: measure(torch.full((4, 2), 1e160, dtype=torch.double), torch.arange(4) % 2), "overflow"),
    (lambda: arora.mean_classifier_loss(small(), "hinge", 3, "distinct"), "needs as many"),
    (lambda: arora.unsupervised(X, LABELS, k=0), "unsupervised: k must be an integer >= 1, got 0"),
    (lambda: arora.mean_classifier(X, LABELS, loss="foo"), "mean_classifier: loss must be one of hinge, logistic"),
    (lambda: arora.class_collision(LABELS, k=0), "class_collision: k must be an integer >= 1, got 0"),
])  # fmt: skip
def test_mistakes_are_one_message(make, message):
    fails((OptionError, DataError), message, make)


def test_diagnostics_are_listed_and_agree():
    points = small()
    given = points.features, torch.repeat_interleave(torch.arange(3), points.counts)
    for name, function in (
        ("unsupervised_loss", lambda *more: arora.unsupervised_loss(*more).whole),
        ("mean_classifier_loss", arora.mean_classifier_loss),
    ):
        entry = registry.get(name)
        assert entry.kind == "diagnostic"
        assert entry.target(*given, loss="logistic", k=2) == pytest.approx(function(points, "logistic", 2))
    assert registry.get("class_collision").target(given[1]) == pytest.approx(collision(points.prior))
    assert registry.get("intraclass_deviation").target(*given) == arora.deviation(points)


def test_theorems_name_what_exists():
    for theorem in THEOREMS:
        assert asdict(theorem)["assumption"] or theorem.always, theorem.name
        for function in theorem.functions:
            assert callable(pkgutil.resolve_name(f"dipole.core.evaluation.{function}")), function
        words = shlex.split(theorem.run)
        assert words[:2] == ["dipole", "theory"]
        parser = argparse.ArgumentParser(allow_abbrev=False)
        configure(parser)
        parser.parse_args(words[2:])  # exits on an option that there is not
        for free in theorem.free:
            assert free in Choices.__dataclass_fields__, free
    assert margin_loss("hinge", torch.zeros(3, 2)).tolist() == [1.0] * 3


@pytest.mark.parametrize(("name", "content", "wanted"), [
    ("names.txt", "New York\nParis\nNew York\n", [0, 1, 0]),
    *(("one_line.txt", "3 1 3", [3, 1, 3]), ("unknown.txt", "-1\n5\n5\n", [-1, 5, 5])),
    *(("hashes.txt", f"{2**64 - 1}\n1\n1\n", [1, 0, 0]), ("float.npy", [1.5, 1.7, math.nan], [0, 1, -1])),
    ("unsigned.npy", np.array([2**64 - 1, 1, 1], dtype=np.uint64), [1, 0, 0]),
    ("names.npy", ["a", "b", "a"], [0, 1, 0]),
])  # fmt: skip
def test_labels_of_any_kind_keep_their_classes_apart(tmp_path, name, content, wanted):
    path = tmp_path / name
    if path.suffix == ".npy":
        np.save(path, np.asarray(content))
    else:
        path.write_text(content)
    assert read_labels(str(path), None, 3).tolist() == wanted
    path.write_bytes(b"")
    fails(DataError, "label", read_labels, str(path), None, 3)


def test_options_are_checked_before_the_run_is_looked_up(capsys):
    wrong = {f"--delta={x}": f"--delta: must be between 0 and 1, got '{x}'" for x in ("2", "0", "-1", "nan", "x")}
    wrong["--picture=x.bmp"] = "a picture ends in .svg, .png, .pdf, got 'x.bmp'"
    for words, said in wrong.items():
        assert said in refused(capsys, "theory", "no such run", words)
