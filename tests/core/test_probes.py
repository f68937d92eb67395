"""Probes and the tasks of Arora against scikit-learn, loops and hand-made cases, and on a device apart."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from dipole.core.evaluation import logistic, probes
from dipole.core.evaluation.probes import class_tasks, mean_classifier
from dipole.core.train.class_blocks import BlockShape, block_losses
from dipole.core.train.evaluation import diagnose
from dipole.core.utils.errors import DataError, OptionError, TrainingError
from dipole.core.utils.freezing import frozen, state_hash
from dipole.text.senteval.torch_classifier import Classifier, Fit, fit_all
from dipole.vision.config import VisionConfig
from dipole.vision.evaluation import recall, zero_shot
from tests.elsewhere import elsewhere, sent


def blobs(n=300, d=6, classes=4, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    means = 2 * torch.randn(classes, d, generator=torch.Generator().manual_seed(7))
    return means[y] + spread * torch.randn(n, d, generator=generator), y


@pytest.mark.parametrize(("n", "d"), [(300, 6), (40, 100)])
def test_convex_probe_is_the_optimum_that_scikit_learn_finds(n, d):
    x, y = blobs(n, d, spread=3.0)
    weight, bias, converged = probes.fit_softmax(x, y, 4)
    there = x.double() + 1e8  # too far away for single precision
    assert probes.linear_probe(x, y, x, y).accuracy == probes.linear_probe(there, y, there, y).accuracy
    assert probes.kmeans_accuracy(x, y).accuracy == probes.kmeans_accuracy(there, y).accuracy
    reference = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(x.double().numpy(), y.numpy())
    assert converged
    np.testing.assert_allclose(weight.numpy(), reference.coef_, atol=2e-4)
    np.testing.assert_allclose((bias - bias.mean()).numpy(), reference.intercept_, atol=2e-3)


def test_convex_probe_converges_to_a_vanishing_gradient():
    x, y = blobs(400, 30, spread=3.0)
    mix = torch.randn(30, 30, generator=torch.Generator().manual_seed(1)) * torch.logspace(-1, 1, 30)
    for features in (x, x @ mix):
        assert probes.linear_probe(features, y, features, y, standardize=False, l2=1e-6).converged
    x, y = blobs(500, 20, spread=2.0)
    weight, bias = (each.requires_grad_() for each in probes.fit_softmax(x, y, 4, l2=0.01)[:2])
    loss = nn.functional.cross_entropy(x.double() @ weight.T + bias, y) + 0.005 * weight.square().sum()
    assert max(g.abs().max() for g in torch.autograd.grad(loss, (weight, bias))) < 1e-5


@pytest.mark.parametrize("solver", ["sgd", "adam"])
def test_schedules_of_the_papers_learn_and_repeat(solver):
    first, again, other = (
        probes.linear_probe(*blobs(), *blobs(seed=1), solver=solver, epochs=20, seed=seed) for seed in (3, 3, 4)
    )
    assert first.accuracy > 0.9
    assert torch.equal(first.scores, again.scores)
    assert not torch.equal(first.scores, other.scores)


def test_labels_may_be_any_integers_and_missing_ones_are_left_out():
    x, y = blobs()
    named = torch.tensor([17, 3, 99, 40])[y]
    named[::7] = -1
    result = probes.linear_probe(x, named, x, named)
    assert result.accuracy > 0.9
    assert set(result.predictions.tolist()) <= {17, 3, 99, 40}
    assert len(result.predictions) == int((named >= 0).sum())
    scores = torch.arange(6.0, 0, -1).repeat(2, 1)  # top 5 counts the class among the five best
    result = probes._result(probes.arrays.split(torch.eye(6), torch.arange(6), scores, torch.tensor([4, 5])), scores)
    assert (result.accuracy, result.top5) == (0, 0.5)


def test_mean_classifier_by_hand_and_without_a_class():
    x, y = blobs()
    assert probes.mean_classifier(x[y < 3], y[y < 3], x, y).accuracy <= 0.76
    x, y = torch.tensor([[1.0, 0], [3, 0], [0, 1], [0, 1]]), torch.tensor([0, 0, 1, 1])
    # Means (2, 0) and (0, 1): the point (1, 1.5) scores 2 against 1.5.
    result = probes.mean_classifier(x, y, torch.tensor([[1.0, 1.5]]), torch.tensor([0]))
    assert (result.scores.tolist(), result.accuracy) == ([[2.0, 1.5]], 1)


def test_few_shot_uses_so_many_labels_and_averages_draws(monkeypatch):
    x, y = blobs()
    sizes, fit = [], probes.fit_softmax
    monkeypatch.setattr(
        probes, "fit_softmax", lambda x, y, *rest: sizes.append(y.bincount().tolist()) or fit(x, y, *rest)
    )
    first, again = (probes.few_shot_probe(x, y, x, y, labels_per_class=3, draws=4, seed=1) for _ in range(2))
    assert sizes == [[3, 3, 3, 3]] * 8
    assert first.std is not None
    assert first.accuracy == again.accuracy


def test_knn_against_a_loop():
    x, y = blobs(60)
    tx, ty = blobs(20, seed=5)
    result = probes.knn_probe(x, y, tx, ty, k=7, temperature=0.1)
    hits = []
    for point, label in zip(tx.double(), ty, strict=True):
        cosine = nn.functional.cosine_similarity(point, x.double())
        nearest = cosine.argsort(descending=True)[:7]
        votes = np.bincount(y[nearest], weights=(cosine[nearest] / 0.1).exp(), minlength=4)
        hits.append(np.argmax(votes) == int(label))
    assert result.accuracy == pytest.approx(np.mean(hits))
    x, y = blobs(8)
    with pytest.warns(UserWarning, match="k = 500 is more than the 8 labelled points"):
        assert probes.knn_probe(x, y, x, y, k=500).scores.shape == (8, 4)
    for probe in (probes.few_shot_probe, probes.mean_classifier):
        with pytest.warns(UserWarning, match=r"4 of 4 classes have fewer than labels_per_class = 500 .*smallest 2"):
            assert probe(x, y, x, y, labels_per_class=500).std == 0


def test_kmeans_matches_clusters_one_to_one_and_survives_few_points():
    x, y = blobs(200, spread=0.05)
    assert probes.kmeans_accuracy(x, (y + 1) % 4, inits=5).accuracy == 1
    # Two clusters share class 0: only one of them may claim it.
    for clusters, classes, wanted in (([0, 0, 0, 0], [0, 1, 2, 3], 0.25), ([0, 0, 1, 1], [0, 0, 0, 1], 0.75)):
        assert probes.matched_accuracy(torch.tensor(clusters), torch.tensor(classes)) == wanted
    assert probes.kmeans(torch.tensor([[0.0, 0], [1, 1]]).repeat(5, 1), 4, inits=2).shape == (10,)


def on_views(x, y, labels):
    rows = lambda _, batches: (x[index] for index in batches)  # noqa: E731
    return probes.linear_probe_on_views(rows, labels, x, y, probes.Descent("sgd", 1))


@pytest.mark.parametrize(("call", "message"), [
    (lambda x, y: probes.linear_probe(x, None, x, y), "train_y is missing"),
    (lambda x, y: probes.linear_probe(x, y, x[:, :2], y), "6 features and test_x 2"),
    (lambda x, y: probes.linear_probe(x / 0, y, x, y), "NaN or infinity"),
    (lambda x, y: probes.knn_probe(x, -torch.ones_like(y), x, y), "labelled points"),
    (lambda x, y: probes.kmeans_accuracy(x, None), "labels is missing"),
    (lambda x, y: on_views(x, y, None), "train_y is missing"), (lambda x, y: on_views(x * torch.nan, y, y), "NaN"),
    (lambda x, y: probes.linear_probe(x, y, x, y, solver="convx"), "Did you mean 'convex'"),
    (lambda x, y: probes.linear_probe(x, y, x, y, solver="sgd", schedule="linear"), "one of step, cosine"),
    (lambda x, y: probes.linear_probe(x, y, x, y, learning_rate=0.1), "learning_rate has no effect with .*convex"),
    (lambda x, y: probes.linear_probe(x, np.ma.masked_equal(y.numpy(), 2), x, y), "train_y .* masked values"),
    (lambda x, y: probes.linear_probe(csr_matrix(x), y, x, y), r"train_x .* csr_matrix of object. Use x.toarray\(\)"),
    (lambda x, y: probes.linear_probe(x.numpy().astype(object), y, x, y), r"ndarray of object. Use x.astype\(float\)"),
    (lambda x, y: probes.kmeans(x, 301), "1 to 300 clusters"),
    (lambda x, y: probes.linear_probe(x, y, x, y, solver="sgd", milestones=60), r"such as \(60, 80\), got 60"),
    *((lambda x, y, n=n: probes.mean_classifier(x, y, x, y).average(n), f"2 to 4 .*, got {n}") for n in (1, 5, 2.0)),
    (lambda x, y: probes.knn_probe(x, y, x, y).top("a"), "rank must be a whole number >= 0, got 'a'"),
    (lambda x, y: class_tasks(x, y, x, y, classifiers=("trained_",)), "trained"),
    (lambda x, y: probes.kmeans_accuracy(x, y, seed=-1), "seed must be .* >= 0 and <= .*, got -1"),
])  # fmt: skip
def test_bad_data_and_options_are_named(call, message):
    with pytest.raises((DataError, OptionError), match=message):
        call(*blobs())


def test_frozen_restores_modes_and_notices_a_change():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    module.train()
    module[1].eval()
    with frozen(module) as before:
        assert not module.training
        assert not torch.is_grad_enabled()
        module(torch.randn(4, 3))
    assert state_hash(module) == before
    assert module[0].training
    assert not module[1].training
    with pytest.raises(TrainingError, match="changed while it was evaluated"), frozen(module):
        module[1].running_mean += 1
    assert module[0].training
    # The hash sees values, names and dtypes.
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.load_state_dict(a.state_dict())
    assert state_hash(a) == state_hash(b)
    assert state_hash(a) not in (state_hash(b.double()), state_hash(nn.Sequential(a)))


@pytest.mark.parametrize("solver", ["sgd", "adam"])
def test_a_probe_on_views_that_never_change_is_the_one_on_features(solver):
    (x, y), test, asked = blobs(n=90), blobs(n=50, seed=1), []
    y[::7] = -1  # unlabelled: never asked for

    def rows(epoch, batches):
        for index in batches:
            asked.append(index)
            yield x[index]

    settings = {"epochs": 5, "batch_size": 16, "milestones": (2, 4), "decay": 0.5}
    found = probes.linear_probe_on_views(rows, y, *test, probes.Descent(solver, **settings), seed=3)
    same = probes.linear_probe(x, y, *test, solver=solver, **settings, seed=3)
    assert torch.equal(found.scores, same.scores)
    assert found.accuracy == same.accuracy
    assert sorted(torch.cat(asked).tolist()) == sorted(5 * (y >= 0).nonzero().squeeze(1).tolist())


@pytest.mark.parametrize(("schedule", "milestones", "rates"), [
    ("step", (1, 3), [0.5, 0.05, 0.05, 0.005]), ("step", (), [0.5] * 4),
    ("cosine", None, [0.5, 0.4267766953, 0.25, 0.0732233047]),
])  # fmt: skip
def test_a_probe_on_views_is_descent_written_out(schedule, milestones, rates):
    """Softmax regression by SGD with momentum and weight decay, in numpy, on features that differ in every epoch."""
    (x, y), (tx, ty) = blobs(n=48), blobs(n=30, seed=1)
    seen = x + torch.randn(4, 48, 6, generator=torch.Generator().manual_seed(5))

    def rows(epoch, batches):
        return (seen[epoch][index] for index in batches)

    how = probes.Descent("sgd", 4, 48, 0.5, 0.01, schedule, milestones)
    found = probes.linear_probe_on_views(rows, y, tx, ty, how, seed=9)
    draws = torch.Generator().manual_seed(9)
    w, b = 0.01 * torch.randn(4, 6, generator=draws).double().numpy(), np.zeros(4)
    vw, vb = np.zeros_like(w), np.zeros_like(b)
    for batch, rate in zip(seen.double().numpy(), rates, strict=True):  # one of all, whose order does not matter
        error = (softmax(batch @ w.T + b, axis=1) - np.eye(4)[y.numpy()]) / len(y)
        vw, vb = 0.9 * vw + error.T @ batch + 0.01 * w, 0.9 * vb + error.sum(0) + 0.01 * b
        w, b = w - rate * vw, b - rate * vb
    np.testing.assert_allclose(found.scores.numpy(), tx.double().numpy() @ w.T + b, atol=1e-4)


def points(per_class=6, classes=6, d=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(classes).repeat(per_class)
    means = torch.randn(classes, d, generator=torch.Generator().manual_seed(9))
    return means[y] + 1.5 * torch.randn(len(y), d, generator=draw), y


def every_task(train, labels, test, test_labels, ways):
    """Accuracy of the mean classifier on each task of `ways` classes, averaged over tasks and classes by hand."""
    means = torch.stack([train[labels == c].double().mean(0) for c in range(int(labels.max()) + 1)])
    accuracies = []
    for task in combinations(range(len(means)), ways):
        hits = []
        for point, label in zip(test.double(), test_labels.tolist(), strict=True):
            if label in task:
                hits.append(task[int((means[list(task)] @ point).argmax())] == label)
        accuracies.append(np.mean(hits))
    return np.mean(accuracies)


def test_average_over_all_tasks_is_that_of_drawing_each():
    x, y = points()
    tx, ty = points(seed=1)  # as many of each class, so that the mean over tasks is the mean over points
    result = mean_classifier(x, y, tx, ty)
    for ways in (2, 3, 5, 6):
        assert result.average(ways) == pytest.approx(every_task(x, y, tx, ty, ways), abs=1e-9)
        assert 0.3 < result.average(ways) < 1
    # The task of all classes is plain accuracy, and top ranks rise.
    assert result.average(6) == pytest.approx(result.accuracy, abs=1e-6)
    assert result.top(1) == pytest.approx(result.accuracy, abs=1e-6)
    assert result.top(5) == pytest.approx(result.top5, abs=1e-6)
    assert result.top(1) < result.top(2) < result.top(6) == 1
    # A class without training points is never right, and equal scores are no help.
    result = mean_classifier(*points(classes=3), *points(classes=4, seed=1))
    assert (result.average(2) <= 0.75, result.top(3)) == (True, 0.75)
    nothing = mean_classifier(torch.zeros(6, 2), torch.arange(6) % 3, torch.zeros(3, 2), torch.arange(3))
    assert nothing.average(2) == 0


def test_every_classifier_reports_the_tasks_there_are_classes_for():
    x, y = points(per_class=20)
    tx, ty = points(per_class=20, seed=1)
    found = class_tasks(x, y, tx, ty, seed=3)
    tasks = {"avg-2", "avg-5", "top-1", "top-5"}  # six classes: no task of ten
    assert set(found) == {f"{name}/{task}" for name in ("trained", "mean", "few") for task in tasks}
    assert found["mean/avg-2"] == pytest.approx(every_task(x, y, tx, ty, 2), abs=1e-9)
    assert found["few/top-1"] < found["mean/top-1"]  # five points know the mean less well than twenty
    assert found["few/top-1"] == class_tasks(x, y, tx, ty, classifiers=("few",), seed=3)["few/top-1"]
    assert found["few/top-1"] != class_tasks(x, y, tx, ty, classifiers=("few",), seed=4)["few/top-1"]


N, M, D, C = 60, 40, 6, 4


def labelled(n: int, seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % C
    x = torch.randn(n, D, generator=source) + torch.eye(C, D)[labels] * 2
    return x, torch.where(torch.arange(n) % 11 == 10, -1, labels)


def as_numbers(found: Any) -> Any:
    if not isinstance(found, probes.ProbeResult):
        return found
    assert found.scores.device.type == "cpu"
    return found.metrics("probe") | {"converged": found.converged}


MEASURES = {
    "linear": lambda x, p, y, q: probes.linear_probe(x, p, y, q),
    "sgd": lambda x, p, y, q: probes.linear_probe(x, p, y, q, solver="sgd", epochs=2, learning_rate=0.1, batch_size=16),
    "few_shot": lambda x, p, y, q: probes.few_shot_probe(x, p, y, q, draws=2),
    "mean": lambda x, p, y, q: probes.mean_classifier(x, p, y, q),
    "knn": lambda x, p, y, q: probes.knn_probe(x, p, y, q, k=5),
    "kmeans": lambda x, p, y, q: probes.kmeans_accuracy(y, q, inits=2),
    "tasks": lambda x, p, y, q: class_tasks(x, p, y, q, classifiers=("mean", "few"), draws=2),
    "losses": lambda x, p, y, q: block_losses(x, p, y, q, BlockShape(2)),
    "diagnostics": lambda x, p, y, q: diagnose(y, q, None)[0],
    "histogram": lambda x, p, y, q: diagnose(y, q, None)[1].model_dump(),
    "retrieval": lambda x, p, y, q: recall(x[:M], y, torch.arange(M).unsqueeze(1).expand(-1, 2) // 2, True),
    "zero_shot": lambda x, p, y, q: zero_shot(y, x[:C], q),
}


@pytest.mark.parametrize("name", MEASURES)
def test_what_is_measured_on_a_device_is_what_is_measured_here(name, monkeypatch):
    (x, p), (y, q) = labelled(N, 0), labelled(M, 1)
    wanted = as_numbers(MEASURES[name](x, p, y, q))
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    # Scores come back, features do not. Arora's terms and k-means take a few hundred points on the processor.
    with elsewhere(M * D if name in ("diagnostics", "histogram", "kmeans") else M * C):
        found = as_numbers(MEASURES[name](sent(x), p, sent(y), q))
    # Singular values are those of another call.
    assert found == (pytest.approx(wanted, rel=1e-6) if name == "diagnostics" else wanted)


def test_the_run_says_where_and_other_devices_get_larger_pieces_than_the_processors_cache():
    """The run's device, unless it has no double precision or the recipe says otherwise."""
    cuda, cpu = torch.device("cuda", 1), torch.device("cpu")
    found = [probes.measuring_device(*given) for given in ((cuda,), (cuda, "cpu"), (torch.device("mps"),))]
    assert found == [cuda, cpu, cpu]
    assert VisionConfig.model_validate_json('{"probe": {"device": "cpu"}}').probe.device == "cpu"
    for device, pieces in ((cpu, 8), (torch.device("meta"), 1)):
        assert len(list(logistic.row_pieces(8 * logistic.IN_CACHE // 64, 64, device))) == pieces


@pytest.mark.parametrize("nhid", [0, 5])
def test_sentevals_classifier_on_a_device_is_that_of_the_processor(nhid):
    """With Adam of the device's own kind: one kernel for all of the update is not written for every device."""
    (x, y), settings = labelled(N, 0), Classifier(nhid=nhid, max_epoch=8, batch_size=16, optim="adam,lr=0.05")
    y = y.clamp_min(0)
    order = np.arange(N)
    fits = [Fit(order[: N // 2], order[N // 2 :], [0.0, 0.01]), Fit(order[N // 2 :], order[: N // 2], [0.0, 0.01])]
    wanted = fit_all(x, y, C, fits, settings, 1)
    with elsewhere(N * C):
        found = fit_all(sent(x), sent(y), C, fits, settings, 1)
    for near, far in zip(wanted, found, strict=True):
        assert far.accuracy == pytest.approx(near.accuracy, abs=1e-6)
