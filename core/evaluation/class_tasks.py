"""Arora's classification tasks: accuracy over all tasks of a few classes, and over all classes."""

from typing import Any, Literal

from dipole.core.evaluation.probes import Solver, linear_probe, mean_classifier
from dipole.core.utils.errors import OptionError, nearest

Classifier = Literal["trained", "mean", "few"]
CLASSIFIERS: tuple[Classifier, ...] = ("trained", "mean", "few")
WAYS, RANKS = (2, 5, 10), (1, 5, 10)


def class_tasks(
    train_x: Any,
    train_y: Any,
    test_x: Any,
    test_y: Any,
    *,
    classifiers: tuple[Classifier, ...] = CLASSIFIERS,
    solver: Solver = "convex",
    epochs: int = 100,
    labels_per_class: int = 5,
    draws: int = 5,
    seed: int = 0,
) -> dict[str, float]:
    """Return the accuracies of Arora et al. 2019, Table 1: `CLASSIFIER/avg-K` over all K-class tasks, and top-R.

    Classifiers: "trained", a linear layer on the frozen features (Tr; for a K-class task the layer's K rows); "mean",
    rows mu_c = E_{x ~ D_c} f(x) (mu); "few", means of `labels_per_class` points, averaged over `draws` (mu-5).
    K is 2, 5, 10 and R is 1, 5, 10, as far as there are classes. Values are shares in [0, 1]. `solver` and `epochs` are
    of the trained layer (`linear_probe`), `draws` and `labels_per_class` of "few".
    """
    data = (train_x, train_y, test_x, test_y)
    found: dict[str, float] = {}
    for name in classifiers:
        if name not in CLASSIFIERS:
            raise OptionError(
                f"unknown classifier {name!r}.{nearest(name, CLASSIFIERS)} Allowed: {', '.join(CLASSIFIERS)}."
            )
        if name == "trained":
            result = linear_probe(*data, solver=solver, epochs=epochs, seed=seed)
        elif name == "few":
            result = mean_classifier(*data, labels_per_class=labels_per_class, draws=draws, seed=seed)
        else:
            result = mean_classifier(*data)
        classes = len(result.classes)
        found |= {f"{name}/avg-{k}": result.average(k) for k in WAYS if k <= classes}
        found |= {f"{name}/top-{r}": result.top(r) for r in RANKS if r < classes}
    return found
