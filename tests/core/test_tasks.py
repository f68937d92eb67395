"""Arora's tasks against the drawing of every task, one after another."""

from itertools import combinations

import pytest
import torch

from dipole.core.evaluation.class_tasks import class_tasks
from dipole.core.evaluation.probes import mean_classifier
from dipole.core.utils.errors import OptionError


def points(per_class=6, classes=6, d=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(classes).repeat(per_class)
    means = torch.randn(classes, d, generator=torch.Generator().manual_seed(9))
    return means[y] + 1.5 * torch.randn(len(y), d, generator=draw), y


def every_task(train, labels, test, test_labels, ways):
    """Accuracy of the mean classifier on each task of `ways` classes, averaged over tasks and classes by hand."""
    means = [train[labels == c].double().mean(0) for c in range(int(labels.max()) + 1)]
    accuracies = []
    for task in combinations(range(len(means)), ways):
        hits, asked = 0, 0
        for point, label in zip(test.double(), test_labels.tolist(), strict=True):
            if label in task:
                scores = {c: float(point @ means[c]) for c in task}
                hits += max(scores, key=scores.__getitem__) == label
                asked += 1
        accuracies.append(hits / asked)
    return sum(accuracies) / len(accuracies)


@pytest.mark.parametrize("ways", [2, 3, 5, 6])
def test_average_over_all_tasks_is_that_of_drawing_each(ways):
    x, y = points()
    tx, ty = points(seed=1)  # as many of each class, so that the mean over tasks is the mean over points
    result = mean_classifier(x, y, tx, ty)
    assert result.average(ways) == pytest.approx(every_task(x, y, tx, ty, ways), abs=1e-9)
    assert 0.3 < result.average(ways) < 1


def test_the_task_of_all_classes_is_plain_accuracy_and_top_ranks_rise():
    x, y = points()
    tx, ty = points(seed=1)
    result = mean_classifier(x, y, tx, ty)
    assert result.average(6) == pytest.approx(result.accuracy, abs=1e-6)
    assert result.top(1) == pytest.approx(result.accuracy, abs=1e-6)
    assert result.top(5) == pytest.approx(result.top5, abs=1e-6)
    assert result.top(1) < result.top(2) < result.top(6) == 1


def test_a_class_without_training_points_is_never_right_and_equal_scores_help_nobody():
    x, y = points(classes=3)
    tx, ty = points(classes=4, seed=1)
    result = mean_classifier(x, y, tx, ty)
    assert result.average(2) <= 0.75
    assert result.top(3) == 0.75
    nothing = mean_classifier(torch.zeros(6, 2), torch.arange(6) % 3, torch.zeros(3, 2), torch.arange(3))
    assert nothing.average(2) == 0


def test_number_of_classes_of_a_task_is_checked():
    x, y = points(classes=3)
    for ways in (1, 4):
        with pytest.raises(OptionError, match="2 to 3"):
            mean_classifier(x, y, x, y).average(ways)


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
    with pytest.raises(OptionError, match="trained"):
        class_tasks(x, y, tx, ty, classifiers=("trained_",))
