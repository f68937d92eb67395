"""The four protocols against references: scikit-learn to convergence, SentEval's classifier written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from dipole.core.evaluation.logistic import solve_subsets
from dipole.core.utils.errors import OptionError
from dipole.text.encode import halves_normalised
from dipole.text.senteval.protocols import ProbeSettings, check_device, classify
from dipole.text.senteval.tasks import Split, Task
from dipole.text.senteval.torch_classifier import Classifier, Fit, fit_all
from tests.elsewhere import ELSEWHERE, elsewhere
from tests.runs import refused


def blobs(n, d, classes, seed=0, spread=2.0):
    draw = np.random.default_rng(seed)
    y = draw.integers(classes, size=n)
    return (draw.normal(size=(classes, d))[y] + spread * draw.normal(size=(n, d)) + 5.0), y


def assert_optima(x, y, subsets, grid, columns, share, every=1, **options):
    """Each fit on its rows predicts what scikit-learn's does, but for a point on the border."""
    found, centre = solve_subsets(x, y, subsets, grid, tolerance=1e-5)[0], x.mean(0)
    for i in range(0, len(grid), every):
        for p in columns:
            model = LogisticRegression(C=grid[i], **options).fit((x - centre)[subsets[:, p]], y[subsets[:, p]])
            assert np.mean(found[i, :, p] == model.predict(x - centre)) >= share


def several_blobs(classes):
    x, y = blobs(400, 12, classes)
    subsets = np.random.default_rng(1).random((400, 4)) < 0.7
    return (x, y, subsets, [4.0, 0.25, 32.0], range(4), 0.9975), {"tol": 1e-9, "max_iter": 5000}  # C is unordered


def scaled_blobs(scale, rank):
    """Starting from the mean fold and from the value of C before must not show in the result."""
    x, y = blobs(300, 12, 2, seed=3)
    draw = np.random.default_rng(4)
    x = scale * np.concatenate([x[:, :rank], x[:, :rank] @ draw.normal(size=(rank, 12 - rank))], 1)
    subsets = (np.arange(300) % 6)[:, None] != np.arange(7)  # six folds, and all rows
    grid = [2.0**t for t in range(-3, 7)]
    exactly = {"tol": 1e-10, "max_iter": 20000, "solver": "newton-cholesky", "every": 3}
    return (x, y, subsets, grid, (0, 6), 0.9966), exactly


def uninformative_features_of_many_scales():
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(400, 150)) * np.geomspace(9, 0.15, 150), draw.integers(6, size=400)
    subsets = np.arange(400)[:, None] % 5 != np.arange(6)
    exactly = {"tol": 1e-10, "max_iter": 2000, "solver": "newton-cg", "every": 2}
    return (x, y, subsets, [0.25, 4.0, 64.0], (0, 5), 0.9975), exactly


@pytest.mark.parametrize(("make", "options"), [
    *((several_blobs, (classes,)) for classes in (2, 4)),
    *((scaled_blobs, options) for options in ((0.05, 12), (1.0, 4), (30.0, 12))),
    (uninformative_features_of_many_scales, ()),
])  # fmt: skip
def test_all_problems_at_once_equal_scikit_learn_one_by_one(make, options):
    given, exactly = make(*options)
    assert_optima(*given, **exactly)


@pytest.mark.parametrize("classes", [2, 20])
def test_a_subset_that_is_given_twice_is_answered_twice(classes):
    x, y = blobs(200, 6, classes, seed=5)
    first, second = np.random.default_rng(6).random((2, 200)) < 0.8
    found, converged = solve_subsets(x, y, np.stack([second, first, second, second, first], 1), [1.0, 8.0])
    once, _ = solve_subsets(x, y, np.stack([first, second], 1), [1.0, 8.0])
    assert found.shape == (2, 200, 5)
    assert converged.shape == (2, 5)
    assert np.mean(found == once[..., [1, 0, 1, 1, 0]]) >= 0.995
    assert not np.array_equal(found[..., 0], found[..., 1])


def test_hundreds_of_classes_and_collinear_huge_and_constant_features_reach_the_optimum():
    x, y = blobs(420, 8, 210, seed=8)
    found, converged = solve_subsets(x, y, np.ones((420, 1), dtype=bool), [0.25, 4.0], tolerance=1e-4)
    assert converged.all()
    for labels, c in zip(found, [0.25, 4.0], strict=True):
        model = LogisticRegression(C=c, tol=1e-5, max_iter=2000).fit(x - x.mean(0), y)
        assert np.mean(labels[:, 0] == model.predict(x - x.mean(0))) >= 0.995
    x, y = blobs(200, 5, 2)
    x = np.concatenate([x, x, np.ones((200, 1)), 1e4 * x[:, :1], np.zeros((200, 2))], 1)
    found = solve_subsets(x, y, np.ones((200, 1), dtype=bool), [1.0])[0][0, :, 0]
    assert np.mean(found == LogisticRegression(C=1.0, tol=1e-8, max_iter=20000).fit(x, y).predict(x)) >= 0.99


def written_out(x, y, train, dev, decay, settings, seed, classes):
    """SentEval's PyTorch classifier for one fold and one weight decay, with torch's own modules and optimizer."""
    stream = np.random.RandomState(seed)
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(x.shape[1], settings.nhid or classes)]
    if settings.nhid:
        layers += [torch.nn.Dropout(settings.dropout), torch.nn.Sigmoid(), torch.nn.Linear(settings.nhid, classes)]
    model = torch.nn.Sequential(*layers)
    optimizer = settings.optimizer(list(model.parameters()))
    optimizer.param_groups[0]["weight_decay"] = decay
    if dev is None:
        order = stream.permutation(len(train))
        cut = int(0.05 * len(train))
        train, dev = train[order[cut:]], train[order[:cut]]
    best, failures, passes, kept = -1.0, 0, 0, None
    while passes <= settings.max_epoch:
        model.train()
        for _ in range(settings.epoch_size):
            order = stream.permutation(len(train))
            for start in range(0, len(order), settings.batch_size):
                rows = train[order[start : start + settings.batch_size]]
                loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        passes += settings.epoch_size
        model.eval()
        with torch.no_grad():
            accuracy = float((model(x[dev]).argmax(1) == y[dev]).sum()) / len(dev)
        if accuracy > best:
            best, kept = accuracy, {k: v.clone() for k, v in model.state_dict().items()}
        else:
            if failures >= settings.tenacity:
                break
            failures += 1
    model.load_state_dict(kept)
    model.eval()
    with torch.no_grad():
        return best, model(x).argmax(1).numpy()


@pytest.mark.parametrize(("classes", "settings"), [
    (2, Classifier(max_epoch=16)),
    (3, Classifier(optim="rmsprop", batch_size=32, tenacity=3, epoch_size=2, max_epoch=12)),
    (3, Classifier(optim="sgd,lr=0.05", max_epoch=12)), (2, Classifier(nhid=8, dropout=0.3, max_epoch=12)),
], ids=["literature", "prototyping", "sgd", "hidden-dropout"])  # fmt: skip
def test_stepping_together_equals_one_fit_after_another(settings, classes):
    x, y = blobs(123, 6, classes, spread=1.5)
    rows, labels = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    folds = StratifiedKFold(4, shuffle=True, random_state=1111)
    decays = [1e-5, 1e-2]
    fits = [Fit(train, dev, decays) for train, dev in folds.split(x, y)] + [Fit(np.arange(115), None, decays)]
    found = fit_all(rows, labels, classes, fits, settings, seed=1111)
    for fit, fitted in zip(fits, found, strict=True):
        for i, decay in enumerate(decays):
            best, predicted = written_out(rows, labels, fit.train, fit.dev, decay, settings, 1111, classes)
            assert fitted.accuracy[i] == pytest.approx(best, abs=1e-12)
            assert np.mean(fitted.predict(rows, i) == predicted) >= 0.995


def test_fits_leave_the_global_generators_alone(monkeypatch):
    x, y = blobs(60, 3, 2)
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("an accelerator is seeded"))
    fit_all(torch.tensor(x).float(), torch.tensor(y), 2, [Fit(np.arange(60), None, [0.0])], Classifier(max_epoch=4), 1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def toy_task(n=240, d=8, kind="nested"):
    x, y = blobs(n, d, 2, seed=3)
    sentences, cut = [["w"] * (1 + i % 7) for i in range(n)], n // 3 * 2
    parts = {"all": slice(None)} if kind == "nested" else {"train": slice(cut), "test": slice(cut, None)}
    splits = {name: Split([sentences[part]], list(y[part])) for name, part in parts.items()}
    return Task("toy", kind, splits, 2), {name: x[part] for name, part in parts.items()}


def sklearn_nested(x, y, k, grid, **options):
    """SentEval's nested cross-validation, written from its description."""
    outer = StratifiedKFold(k, shuffle=True, random_state=1111)
    inner = StratifiedKFold(k, shuffle=True, random_state=1111)
    dev, test = [], []

    def score(train, held, c):
        return LogisticRegression(C=c, **options).fit(x[train], y[train]).score(x[held], y[held])

    for train, held in outer.split(x, y):
        folds = [(train[a], train[b]) for a, b in inner.split(x[train], y[train])]
        scores = [round(100 * np.mean([score(*fold, c) for fold in folds]), 2) for c in grid]
        dev.append(max(scores))
        test.append(round(100 * score(train, held, grid[int(np.argmax(scores))]), 2))
    return round(np.mean(dev), 2), round(np.mean(test), 2)


def test_senteval_sklearn_and_fast_follow_the_nested_protocol():
    task, x = toy_task()
    y = np.array(task.splits["all"].labels)
    grid = [2.0**t for t in range(-2, 4)]
    found = classify(task, task.splits, x, ProbeSettings("senteval-sklearn", 3))
    assert (found.dev, found.test) == sklearn_nested(x["all"], y, 3, grid)
    fast = classify(task, task.splits, x, ProbeSettings("fast", 3))
    exact = sklearn_nested(x["all"], y, 3, grid, tol=1e-8, max_iter=5000)
    assert fast.test == pytest.approx(exact[1], abs=0.1)
    assert fast.dev == pytest.approx(exact[0], abs=0.1)


def test_holdout_grids_scaled_halves_and_devices():
    assert ProbeSettings("fast").grid("nested") == [0.25, 0.5, 1, 2, 4, 8]
    assert ProbeSettings("fast").grid("holdout") == [0.5, 1, 2, 4, 8, 16, 32]
    assert ProbeSettings("skip-thoughts").grid("nested") == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert ProbeSettings("senteval-torch").grid("holdout") == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2])
    x = np.array([[3.0, 4.0, 0.0, 0.0], [0.0, 2.0, 5.0, 12.0]])
    assert halves_normalised(x, 2) == pytest.approx(np.array([[0.6, 0.8, 0, 0], [0, 1, 5 / 13, 12 / 13]]))
    for shape, parts in (((1, 3), 2), ((4,), 2), ((1, 4), 0)):
        refused(OptionError, "cannot be cut", halves_normalised, np.ones(shape), parts)
    for device in ("nowhere", "cuda:99"):
        refused(OptionError, "device must be an available one", check_device, device)


@pytest.mark.parametrize("protocol", ["fast", "senteval-sklearn", "senteval-torch", "skip-thoughts"])
def test_every_protocol_learns_an_easy_task_and_guesses_a_random_one(protocol):
    task, x = toy_task(kind="holdout")
    settings = ProbeSettings(protocol, 4)
    easy = {name: np.c_[value, 30.0 * np.array(task.splits[name].labels)] for name, value in x.items()}
    assert classify(task, task.splits, easy, settings).test >= 90
    noise = {name: np.random.default_rng(0).normal(size=value.shape) for name, value in x.items()}
    assert 25 < classify(task, task.splits, noise, settings).test < 75


@pytest.mark.parametrize(("classes", "protocol", "classifier"), [
    (2, "fast", Classifier()), (3, "skip-thoughts", Classifier()),
    (2, "senteval-torch", Classifier(optim="sgd,lr=0.1", max_epoch=8)),
    (3, "senteval-torch", Classifier(optim="adam", max_epoch=8)),
    (2, "senteval-torch", Classifier(optim="rmsprop", nhid=4, dropout=0.2, max_epoch=8)),
])  # fmt: skip
def test_classifiers_on_a_device_answer_what_they_do_here(protocol, classifier, classes):
    """On a stand-in that refuses tensors of the processor: answers come back, features do not."""
    x, y = blobs(160, 200, classes, spread=1.5)
    split = Split([[("a",)] * len(x)], y.tolist())
    task = Task("toy", "nested", {"all": split}, classes)
    settings = ProbeSettings(protocol, kfold=2, classifier=classifier)
    wanted = classify(task, {"all": split}, {"all": x}, settings)
    with elsewhere(160 * 21):
        found = classify(task, {"all": split}, {"all": x}, replace(settings, device=ELSEWHERE))
    assert (found.dev, found.folds, found.chosen) == (wanted.dev, wanted.folds, wanted.chosen)
    assert np.array_equal(found.predicted, wanted.predicted)
