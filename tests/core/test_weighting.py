"""Which pairs, views and directions weigh how much: the losses as their authors ran them, in plain Python."""

import math

import pytest
import torch
from torch import Tensor

import dipole
from dipole import Pairs
from dipole.core.objectives.engine import using
from dipole.core.objectives.losses.vicreg import VICReg
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import Former
from dipole.core.train.identity import written_out

Rows = list[list[float]]


def rows_of(count: int, batch: int = 5, width: int = 4) -> list[Tensor]:
    source = torch.Generator().manual_seed(count)
    return [torch.randn(batch, width, generator=source, dtype=torch.double) for _ in range(count)]


def unit(x: list[float]) -> list[float]:
    length = math.sqrt(sum(v * v for v in x))
    return [v / length for v in x]


def dot(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def average(values: list[float]) -> float:
    return sum(values) / len(values)


def codes_of(scores: Rows, epsilon: float, iterations: int) -> Rows:
    """Sinkhorn-Knopp: columns, then rows, are scaled to equal sums."""
    q = [[math.exp(s / epsilon) for s in row] for row in scores]
    for _ in range(iterations):
        columns = [sum(row[k] for row in q) for k in range(len(q[0]))]
        q = [[v / columns[k] for k, v in enumerate(row)] for row in q]
        q = [[v / sum(row) for v in row] for row in q]
    return q


@pytest.mark.parametrize(("large", "small", "past"), [(2, 0, 0), (2, 6, 4), (3, 2, 0)])
def test_swav_weighs_every_pair_of_a_code_and_a_crop_alike(large, small, past):
    crops, queue = rows_of(large + small), rows_of(1, past)[0]
    objective = dipole.objective("swav(prototypes=6)", dim=4).double()
    prototypes = [unit(v) for v in next(objective.parameters()).tolist()]
    images = range(len(crops[0]))
    scores = [[[dot(unit(z), v) for v in prototypes] for z in crop.tolist()] for crop in crops]
    queued = [[dot(unit(z), v) for v in prototypes] for z in queue.tolist()]
    codes = [codes_of([*queued, *scores[c]], 0.05, 3)[len(queued) :] for c in range(large)]
    losses = []
    for c in range(large):
        for crop in range(large + small):
            for i in images:
                total = sum(math.exp(s / 0.1) for s in scores[crop][i])
                log_p = [s / 0.1 - math.log(total) for s in scores[crop][i]]
                if crop != c:
                    losses.append(-dot(codes[c][i], log_p))
    found = objective(Pairs.from_crops(crops[:large], crops[large:], queue)).loss
    assert len(losses) == large * (large + small - 1) * len(images)
    assert found.item() == pytest.approx(average(losses), abs=1e-9)


def potential(pairs: list[tuple[list[float], list[float]]]) -> float:
    return math.log(average([math.exp(-2 * (2 - 2 * dot(unit(x), unit(y)))) for x, y in pairs]))


@pytest.mark.parametrize(("count", "engine"), [(2, "eager"), (3, "dense")])
def test_uniformity_is_averaged_over_the_views(count, engine):
    views = [view.tolist() for view in rows_of(count)]
    images = range(5)
    near = average(
        [2 - 2 * dot(unit(views[a][i]), unit(views[b][i])) for a in range(count) for b in range(count) if a != b
         for i in images]
    )  # fmt: skip
    within = average([potential([(z[i], z[j]) for i in images for j in images if i != j]) for z in views])
    every = [(x[i], y[j]) for x in views for y in views for i in images for j in images if i != j]
    for text, uniform in (
        ("align_uniform", within),
        ("align_uniform(uniform_over=views)", within),
        ("align_uniform(uniform_over=pairs)", potential(every)),
    ):
        with using(engine):
            found = dipole.objective(text)(Pairs.from_views(rows_of(count))).loss
        assert found.item() == pytest.approx(near + uniform, abs=1e-9)


def test_uniformity_of_several_keys_is_that_of_each_view():
    query, *keys = [view.tolist() for view in rows_of(3)]
    images = range(5)
    near = average([2 - 2 * dot(unit(query[i]), unit(key[i])) for key in keys for i in images])
    uniform = average([potential([(z[i], z[j]) for i in images for j in images if i != j]) for z in (query, *keys)])
    first, *others = rows_of(3)
    found = dipole.objective("align_uniform")(Pairs.cross(first, torch.stack(others, 1))).loss
    assert found.item() == pytest.approx(near + uniform, abs=1e-9)


def test_uniformity_leaves_ignored_rows_of_a_view_out():
    views = rows_of(2)
    pairs = Pairs.from_views(views)
    ignored = torch.full((10, 1), -1)
    ignored[0], ignored[7] = 3, 6  # image 3 for image 0 in the first view, image 1 for image 2 in the second
    lists = [view.tolist() for view in views]
    near = average([2 - 2 * dot(unit(lists[0][i]), unit(lists[1][i])) for i in range(5)])
    out = {0: (0, 3), 1: (2, 1)}
    uniform = average(
        [potential([(z[i], z[j]) for i in range(5) for j in range(5) if i != j and (i, j) != out[n]])
         for n, z in enumerate(lists)]
    )  # fmt: skip
    found = dipole.objective("align_uniform")(pairs.without(ignored)).loss
    assert found.item() == pytest.approx(near + uniform, abs=1e-9)


@pytest.mark.parametrize("count", [2, 3])
def test_vicreg_takes_the_mean_of_the_variance_term(count):
    views = [[[0.5 * v for v in row] for row in view.tolist()] for view in rows_of(count)]

    def below(z: Rows) -> float:
        columns = list(zip(*z, strict=True))
        spread = [sum((v - average(c)) ** 2 for v in c) / (len(c) - 1) for c in map(list, columns)]
        return average([max(0.0, 1 - math.sqrt(v + 1e-4)) for v in spread])

    expected = average([below(z) for z in views])
    assert expected > 0.1
    scaled = [0.5 * view for view in rows_of(count)]
    for text, factor in (("", 1), (", reduction=mean", 1), (", reduction=sum", 2)):
        objective = dipole.objective(f"vicreg(invariance=0, covariance=0, variance=1{text})")
        assert objective(Pairs.from_views(scaled)).loss.item() == pytest.approx(factor * expected, abs=1e-12)


def test_marked_pairs_are_added():
    a, b = rows_of(2)
    directions = Pairs.cross(a, b), Pairs.cross(b, a)
    objective = dipole.objective("infonce + 0.1*dp")
    each = [objective(pairs).loss.item() for pairs in directions]
    assert objective(directions).loss.item() == pytest.approx(sum(each) / 2, abs=1e-12)
    found = objective(tuple(pairs.added() for pairs in directions))
    assert found.loss.item() == pytest.approx(sum(each), abs=1e-12)
    assert float(found.terms["infonce"]) == pytest.approx(2 * float(objective(directions).terms["infonce"]), abs=1e-12)


@pytest.mark.parametrize(
    ("text", "former"), [("vicreg", "vicreg(reduction=sum)"), ("align_uniform", "align_uniform(uniform_over=pairs)")]
)
def test_runs_before_an_option_keep_their_names(text, former):
    """The former meaning, written out, has the id that the text alone had before. The new default has another."""
    ((_, name, options),) = written_out(dipole.objective(former))
    (added,) = [each for each in registry.get(name).options if each.former is not None]
    assert added.name not in options
    ((_, _, changed),) = written_out(dipole.objective(text))
    assert changed == options | {added.name: added.default}
    assert isinstance(added.former, Former)
    assert VICReg().reduction == "mean"
