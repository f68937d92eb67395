"""A controlled data set: Gaussian classes whose class, instance and nuisance dimensions are known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dipole.core.evaluation.probes import knn_probe, linear_probe
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.seeding import Seeds
from dipole.vision.encoders.base import mlp
from dipole.vision.frameworks.base import Batch, Branch, embedded
from dipole.vision.toy_config import ToyConfig

CLASS, INSTANCE, NUISANCE = 10, 8, 24
"""Latent dimensions: shared by the views of a point and informative on its class, shared by them, and of one view."""
INPUTS, HIDDEN, FEATURES, EMBEDDING = 64, 128, 64, 32
"""Widths of the observed points, the hidden layer, the features that probes read, and the projector's output."""
NEIGHBOURS = 20


class World:
    """Class means, with deviation `separation`, and the mixing matrix. Each seed is another world."""

    def __init__(self, classes: int, separation: float, seed: Seeds) -> None:
        generator = seed.torch("data", "world")
        latent = CLASS + INSTANCE + NUISANCE
        self.means = separation * torch.randn(classes, CLASS, generator=generator)
        self.mixing = torch.randn(latent, INPUTS, generator=generator) / latent**0.5

    def shared(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Draw what all views of a point share, (n, CLASS + INSTANCE)."""
        noise = torch.randn(len(labels), CLASS + INSTANCE, generator=generator)
        noise[:, :CLASS] += self.means[labels]
        return noise

    def view(self, shared: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a view of each point: x = tanh([shared, nuisance] M), (n, INPUTS)."""
        nuisance = torch.randn(len(shared), NUISANCE, generator=generator)
        return (torch.cat([shared, nuisance], 1) @ self.mixing).tanh()


def class_shares(classes: int, imbalance: float) -> Tensor:
    """Return the shares (C,) of classes whose sizes fall geometrically: the first is `imbalance` times the last."""
    shares = torch.logspace(0, -1, classes, base=imbalance, dtype=torch.float64)
    return shares / shares.sum()


def imbalanced_labels(points: int, shares: Tensor) -> Tensor:
    """Return the labels (n,) of points whose classes have these shares, rounded, each class at least once."""
    ends = (shares.cumsum(0) * points).round().long()
    one_each = torch.arange(1, len(shares) + 1)
    ends = ends.clamp(one_each, points - one_each.flip(0) + 1)
    return torch.searchsorted(ends, torch.arange(points), right=True)


def with_noise(labels: Tensor, share: float, classes: int, generator: torch.Generator) -> Tensor:
    """Replace the label of a share of the points by another class, all others equally likely."""
    wrong = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    shift = torch.randint(1, classes, (len(wrong),), generator=generator)
    found = labels.clone()
    found[wrong] = (labels[wrong] + shift) % classes
    return found


class GaussianClasses:
    """The training, validation and test points of a world, their views, and the probes.

    The test classes are balanced, also if those for training are not. Probes are trained on true labels.
    """

    width, features = EMBEDDING, FEATURES

    def __init__(self, config: ToyConfig, seed: Seeds) -> None:
        self.config, self.seed = config, seed
        self.world = World(config.classes, config.separation, seed)
        self.labels = imbalanced_labels(config.points, class_shares(config.classes, config.imbalance))
        self.shared = self.world.shared(self.labels, seed.torch("data", "train"))
        self.data, self.test_points = self.shared, config.test_points
        noise = seed.torch("data", "labels")
        self.noisy_labels = with_noise(self.labels, config.label_noise, config.classes, noise)
        encoder = mlp([INPUTS, HIDDEN, FEATURES])
        projector = nn.Sequential(nn.ReLU(), nn.Linear(FEATURES, EMBEDDING))
        self.module = Branch(encoder, projector, dim=EMBEDDING)
        self.module.returns_features = True
        self.passes_features = False

    def batch(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the labels for training, the numbers of the points and the views of each point."""
        views = [self.world.view(self.shared[index], generator) for _ in range(self.config.views)]
        return (self.noisy_labels[index], index, *views)

    def embed(self, batch: tuple[Tensor, ...]) -> EncodedBatch:
        labels, index, *views = batch
        outputs, features = zip(*map(self.module, views), strict=True)
        found = embedded({"view": outputs}, Batch(views, labels, index, 0), self._pair)
        if not self.passes_features:
            return found
        named = {f"features of view {number}": each for number, each in enumerate(features)}
        return replace(found, rows={**found.rows, **named}, features=tuple(named))

    def _pair(self, rows: dict[str, Any], seed: int) -> Pairs:
        return Pairs.from_views(rows["view"], rows["labels"], rows["index"], self.config.negatives)

    def points(self, split: str) -> tuple[Tensor, Tensor]:
        """Return one view of each point of "train", "test" or "validation", and the labels."""
        shared, labels = self.shared, self.labels
        if split != "train":
            labels = torch.arange(self.test_points) % self.config.classes
            shared = self.world.shared(labels, self.seed.torch("data", split))
        points = self.world.view(shared, self.seed.torch("data", split, "view"))
        return points.to(next(self.module.parameters()).device), labels

    def embedded(self, split: str) -> tuple[Tensor, Tensor]:
        """Return the embeddings of the points of a split, and the labels."""
        points, labels = self.points(split)
        return self.module(points)[0].cpu(), labels

    def evaluate(self, split: str, objective: Any, workdir: Path) -> dict[str, float]:
        """Return the accuracy of a linear and a 20-NN probe of the encoder's features."""
        data = []
        for part in ("train", split):
            points, labels = self.points(part)
            data += [self.module.encoder(points).cpu(), labels]
        linear = linear_probe(*data).metrics("linear")
        return linear | knn_probe(*data, k=NEIGHBOURS).metrics("knn")
