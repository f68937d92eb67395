"""Which probes a run is judged by, and their settings."""

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from dipole.core.ground.errors import DataError
from dipole.core.measure.class_tasks import class_tasks
from dipole.core.measure.probes import few_shot_probe, kmeans_accuracy, knn_probe, linear_probe, mean_classifier
from dipole.core.train.block_losses import BlockShape, block_losses
from dipole.core.train.config import Settings
from dipole.vision.frameworks.base import MOST_VIEWS
from dipole.vision.pictures import Projection

Probe = Literal["linear", "few_shot", "kmeans", "knn", "mean", "tasks", "losses"]


class ProbeConfig(Settings):
    """The [vision.probe] table."""

    probes: tuple[Probe, ...] = Field(
        ("linear", "few_shot", "kmeans", "knn"),
        description="what is measured; tasks: Arora's classifiers on tasks of 2, 5, 10 classes and at ranks 1, 5, 10; "
        "losses: their unsupervised loss on test blocks and the supervised loss of the mean classifier",
    )
    features: Literal["encoder", "embedding"] = Field(
        "encoder", description="the encoder's tap, or the embedding after the objective's projection (CLLR: L Phi)"
    )
    solver: Literal["convex", "sgd", "adam"] = Field(
        "convex", description="of the linear probe and of the tasks' trained layer; sgd, adam: the papers'"
    )
    epochs: int = Field(100, ge=1, description="of the solvers sgd and adam")
    labels_per_class: int = Field(5, ge=1, description="of the few-shot probe and of the tasks' few-label means")
    draws: int = Field(5, ge=1, description="of the same two")
    neighbours: int = Field(20, ge=1, description="of the kNN probe")
    temperature: float = Field(0.07, gt=0, description="of the kNN probe")
    inits: int = Field(10, ge=1, description="starts of k-means; the best by inertia counts")
    picture: bool = Field(
        False, description="also write pictures/step-N.png: a query with its positives and negatives (CACR Fig. 6, 7)"
    )
    positives: int | None = Field(
        None, ge=1, le=MOST_VIEWS - 1, description="of that picture's query; default: as many as it is trained with"
    )
    projection: Projection = Field("tsne", description="of that picture's map")
    baselines: bool = Field(False, description="also probe the untrained encoder and the raw pixels")


def probe(
    config: ProbeConfig,
    train_x: Tensor,
    train_y: Tensor | None,
    test_x: Tensor,
    test_y: Tensor | None,
    seed: int,
    shape: BlockShape,
) -> dict[str, float]:
    """Numbers of the configured probes on frozen features; k-means clusters the test part, `shape` is of the losses."""
    data = (train_x, train_y, test_x, test_y)
    found: dict[str, float] = {}
    few: dict[str, Any] = {"labels_per_class": config.labels_per_class, "draws": config.draws, "seed": seed}
    for name in config.probes:
        if name == "tasks":
            tasks = class_tasks(*data, solver=config.solver, epochs=config.epochs, **few)
            found |= {f"tasks/{key}": value for key, value in tasks.items()}
            continue
        if name == "losses":
            if train_y is None or test_y is None:
                raise DataError("the probe 'losses' needs labels; use labelled splits or leave it out")
            losses = block_losses(train_x, train_y, test_x, test_y, shape, seed)
            found |= {f"losses/{key}": value for key, value in losses.items()}
            continue
        if name == "linear":
            result = linear_probe(*data, solver=config.solver, epochs=config.epochs, seed=seed)
        elif name == "few_shot":
            result = few_shot_probe(*data, **few)
        elif name == "kmeans":
            result = kmeans_accuracy(test_x, test_y, inits=config.inits, seed=seed)
        elif name == "knn":
            result = knn_probe(*data, k=config.neighbours, temperature=config.temperature)
        else:
            result = mean_classifier(*data)
        found |= result.metrics(name)
    return found
