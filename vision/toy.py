"""Small studies as a domain: LMCL's points in the plane (Sec. 5.1), and Gaussian classes with known factors."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self, Unpack

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from dipole.core.evaluation.probes import kmeans_accuracy, knn_probe, linear_probe
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pair_data import ViewNegatives
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.adapter import Adapter, Context, Sketch
from dipole.core.train.config import Settings
from dipole.core.train.evaluation import transformed
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import atomic_write
from dipole.core.utils.seeding import Seeds
from dipole.vision.encoders import EncoderConfig, build_encoder
from dipole.vision.encoders.base import mlp
from dipole.vision.frameworks.base import Batch, embedded
from dipole.vision.frameworks.branch import Branch, PassedFeatures

BAR_LENGTH, BAR_WIDTH, BAR_DISTANCE = 2.9, 0.5, 1.0
MOON_NOISE = 0.1
EXAMPLE = 32  # rows of a batch that checks the objective
CLASS, INSTANCE, NUISANCE = 10, 8, 24
"""Latent dimensions: shared by the views of a point and informative on its class, shared by them, and of one view."""
INPUTS, HIDDEN, FEATURES, EMBEDDING = 64, 128, 64, 32
"""Widths of the observed points, the hidden layer, the features that probes read, and the projector's output."""
NEIGHBOURS = 20
OF_PLANES = ("noise", "starts", "scale", "inits")
OF_CLASSES = ("views", "negatives", "classes", "separation", "imbalance", "label_noise", "test_points")


class ToyConfig(Settings):
    """The [toy] table. Settings of the other data have no effect and are refused."""

    data: Literal["three-bars", "nested-moons", "gaussian-classes"] = "three-bars"
    points: int = Field(900, ge=6, description="number of training points, drawn by the seed")
    noise: float = Field(0.06, gt=0, description="planes: deviation of the noise that makes a point's positive")
    starts: int = Field(300, ge=1, description="planes: random first matrices, of which the best is trained")
    scale: float = Field(0.1, gt=0, description="planes: deviation of their entries")
    inits: int = Field(10, ge=1, description="planes: starts of k-means; the best by inertia counts")
    views: int = Field(2, ge=2, description="gaussian-classes: views of a point, K + 1")
    negatives: ViewNegatives = Field("all", description="gaussian-classes: negatives, as vision.simclr.negatives")
    classes: int = Field(10, ge=2, description="gaussian-classes: number of classes")
    separation: float = Field(1.0, gt=0, description="gaussian-classes: deviation of the means over that in a class")
    imbalance: float = Field(1.0, ge=1, description="gaussian-classes: size of the largest class over the smallest")
    label_noise: float = Field(0.0, ge=0, le=1, description="gaussian-classes: share of training labels made wrong")
    test_points: int = Field(2000, ge=2, description="gaussian-classes: number of test points, of balanced classes")

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_plane = self.data != "gaussian-classes"
        others = OF_CLASSES if is_plane else OF_PLANES
        useless = [name for name in others if getattr(self, name) != type(self).model_fields[name].default]
        if useless:
            raise ValueError(f"{', '.join(useless)}: no effect with data {self.data!r}. Remove it.")
        if not is_plane and self.points < self.classes:
            raise ValueError(f"points: {self.points} for {self.classes} classes. Give each class a point or more.")
        return self


def three_bars(points: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw points uniformly in three parallel bars: (n, 2) float32 with mean 0, labels (n,) in 0..2.

    Bars of 2.9 x 0.5 with centre lines 1 apart: as wide as high, so that no direction has more variance. The paper
    shows them in Figure 3 without coordinates.
    """
    labels = np.arange(points) % 3
    along = rng.uniform(-BAR_LENGTH / 2, BAR_LENGTH / 2, points)
    across = (labels - 1) * BAR_DISTANCE + rng.uniform(-BAR_WIDTH / 2, BAR_WIDTH / 2, points)
    return _centred(np.stack([along, across], 1), labels)


def nested_moons(points: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw two interleaved half circles (scikit-learn's moons) with noise: as `three_bars`, labels 0..1."""
    labels = np.arange(points) % 2
    angle = rng.uniform(0, np.pi, points)
    upper = np.stack([np.cos(angle), np.sin(angle)], 1)
    lower = np.stack([1 - np.cos(angle), 0.5 - np.sin(angle)], 1)
    moons = np.where(labels[:, None] == 0, upper, lower) + MOON_NOISE * rng.normal(size=(points, 2))
    return _centred(moons, labels)


SETS = {"three-bars": three_bars, "nested-moons": nested_moons}


def _centred(points: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    # Centred, because a linear map without bias rotates and stretches about the origin.
    return torch.from_numpy((points - points.mean(0)).astype(np.float32)), torch.from_numpy(labels)


class ToyAdapter(Adapter):
    """Trains a small network on points that are drawn by the seed: a `Plane` or `GaussianClasses`, by toy.data."""

    domain: ClassVar[str] = "toy"
    config_model: ClassVar[type[Settings]] = ToyConfig
    validates: ClassVar[bool] = True
    sets_aside: ClassVar[bool] = False
    objective_optional: ClassVar[bool] = True

    config: ToyConfig
    points: Tensor  # for training, as they are drawn
    labels: Tensor
    test_points: int

    def __new__(cls, config: ToyConfig, **context: Unpack[Context]) -> "ToyAdapter":
        return super().__new__(Plane if config.data in SETS else GaussianClasses)

    def __init__(self, config: ToyConfig, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        if self.world_size > 1:
            raise ConfigError("the toy domain trains a small network in one process: start it without torchrun.")
        if self.batch_size > config.points:
            raise ConfigError(f"train.batch_size: {self.batch_size} is more than toy.points = {config.points}.")
        self.steps_per_epoch = config.points // self.batch_size

    @classmethod
    def sketch(cls, config: Any, batch_size: int, world_size: int = 1) -> Sketch:
        if config.data in SETS:
            return Sketch(Plane.embedding_dim, _example, (batch_size,))
        example = config.views, min(batch_size, EXAMPLE), config.negatives
        return Sketch(GaussianClasses.embedding_dim, _example_views, example)

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        order = torch.randperm(self.config.points, generator=self.seed.torch("data", "order", epoch))
        for step in range(start, self.steps_per_epoch):
            index = order[step * self.batch_size : (step + 1) * self.batch_size]
            batch = self.batch(index, self.seed.torch("augment", epoch, step))
            yield tuple(each.to(self.device) for each in batch)

    def batch(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the tensors of some points, for `embed`."""
        raise NotImplementedError

    def fit(self, run: Any) -> None:
        if run.objective is not None:
            run.fit()

    def data_info(self) -> dict[str, Any]:
        content = self.points.numpy().tobytes() + self.labels.numpy().tobytes()
        sizes = {"train": self.config.points, "test": self.test_points}
        if self.validation:
            sizes["validation"] = self.test_points
        return {"name": self.config.data, "fingerprint": hashlib.sha256(content).hexdigest(), "sizes": sizes}


class Plane(ToyAdapter):
    """Points in the plane, a linear map of four numbers, and k-means (LMCL's study).

    A point and its noisy copy are a positive pair, the copies of the batch's other points are negatives. The paper
    starts P at 0, where the loss has no gradient. We train the best of `starts` small random matrices, since the loss
    has several minima and the paper's claim is about its minimiser. Without an objective P is the identity.
    """

    embedding_dim = 2

    def __init__(self, config: ToyConfig, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        self.points, self.labels = SETS[config.data](config.points, self.seed.numpy("data"))
        self.test_points = config.points
        self.module = build_encoder(EncoderConfig(name="linear", width=2, projector="none"), channels=2, size=1)
        (self._matrix,) = self.module.parameters()  # (2, 2)

    def batch(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        points = self.points[index]
        return points, points + self.config.noise * torch.randn(points.shape, generator=generator)

    def embed(self, batch: tuple[Tensor, ...]) -> EncodedBatch:
        points, copies = batch
        rows = {"points": self._map(points), "copies": self._map(copies)}
        return EncodedBatch(rows, lambda rows: Pairs.cross(rows["points"], rows["copies"]))

    def _map(self, points: Tensor) -> Tensor:
        return self.module(points[:, :, None, None])

    def fit(self, run: Any) -> None:
        if run.step == 0:
            self._start(run.objective)
        super().fit(run)

    @torch.no_grad()
    def _start(self, objective: Any) -> None:
        if objective is None:
            torch.nn.init.eye_(self._matrix)
            return
        first = list(self.batches(0))
        draws = torch.randn(self.config.starts, 2, 2, generator=self.seed.torch("model", "starts")) * self.config.scale
        losses = []
        for draw in draws:
            self._matrix.copy_(draw)
            losses.append(sum(float(objective(self.embed(batch)).loss) for batch in first))
        self._matrix.copy_(draws[torch.tensor(losses).argmin()])

    @torch.no_grad()
    def features(self, split: str) -> tuple[Tensor, Tensor]:
        """Return P x of all points for any split. The validation part is as many new points of the same shape."""
        points, labels = self.points, self.labels
        if split != "train" and self.part == "validation":
            points, labels = SETS[self.config.data](self.config.points, self.seed.numpy("data", "validation"))
        return self._map(points.to(self._matrix.device)).cpu(), labels

    @torch.no_grad()
    def evaluate(self, objective: Any) -> dict[str, float]:
        embedded, labels = self.features("test")
        embedded = transformed(embedded, objective)
        if self.part == "test":  # for LMCL Figure 3
            x, y = ([float(f"{value:.5g}") for value in axis.tolist()] for axis in embedded.T)
            text = json.dumps({"x": x, "y": y, "label": self.labels.tolist()})
            atomic_write(self.workdir / "points.json", text + "\n")
        return kmeans_accuracy(embedded, labels, inits=self.config.inits, seed=self.seed.probe).metrics("kmeans")


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


def imbalanced_labels(points: int, classes: int, imbalance: float) -> Tensor:
    """Return labels (n,) of classes whose sizes fall geometrically, the first `imbalance` times the last, each >= 1."""
    shares = torch.logspace(0, -1, classes, base=imbalance, dtype=torch.float64)
    shares /= shares.sum()
    ends = (shares.cumsum(0) * points).round().long()
    one_each = torch.arange(1, classes + 1)
    ends = ends.clamp(one_each, points - one_each.flip(0) + 1)
    return torch.searchsorted(ends, torch.arange(points), right=True)


def with_noise(labels: Tensor, share: float, classes: int, generator: torch.Generator) -> Tensor:
    """Replace the label of a share of the points by another class, all others equally likely."""
    wrong = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    shift = torch.randint(1, classes, (len(wrong),), generator=generator)
    found = labels.clone()
    found[wrong] = (labels[wrong] + shift) % classes
    return found


class GaussianClasses(ToyAdapter):
    """The training, validation and test points of a world, their views, and the probes.

    The test classes are balanced, also if those for training are not. Probes are trained on true labels.
    """

    embedding_dim = EMBEDDING
    module: Branch

    def __init__(self, config: ToyConfig, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        self.world = World(config.classes, config.separation, self.seed)
        self.labels = imbalanced_labels(config.points, config.classes, config.imbalance)
        self.points = self.world.shared(self.labels, self.seed.torch("data", "train"))
        self.test_points = config.test_points
        noise = self.seed.torch("data", "labels")
        self.noisy_labels = with_noise(self.labels, config.label_noise, config.classes, noise)
        encoder = mlp([INPUTS, HIDDEN, FEATURES])  # drawn before the projector
        projector = nn.Sequential(nn.ReLU(), nn.Linear(FEATURES, EMBEDDING))
        self.module = Branch(encoder, projector, dim=EMBEDDING)
        self.module.width = FEATURES
        self._features: PassedFeatures | None = None

    def batch(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the labels for training, the numbers of the points and the views of each point."""
        views = [self.world.view(self.points[index], generator) for _ in range(self.config.views)]
        return (self.noisy_labels[index], index, *views)

    def embed(self, batch: tuple[Tensor, ...]) -> EncodedBatch:
        if self._features is None:
            return self._embed(batch)
        return self._features.embed(lambda: self._embed(batch), len(batch[0]))

    def pass_features(self) -> int:
        self._features = PassedFeatures([self.module])
        return self._features.width

    def _embed(self, batch: tuple[Tensor, ...]) -> EncodedBatch:
        labels, index, *views = batch
        return embedded({"view": list(map(self.module, views))}, Batch(views, labels, index, 0), self._pair)

    def _pair(self, rows: dict[str, Any], seed: int) -> Pairs:
        return Pairs.from_views(rows["view"], rows["labels"], rows["index"], self.config.negatives)

    def view(self, split: str) -> tuple[Tensor, Tensor]:
        """Return one view of each point of "train" or "test", and the labels."""
        shared, labels = self.points, self.labels
        if split != "train":
            split, labels = self.part, torch.arange(self.test_points) % self.config.classes
            shared = self.world.shared(labels, self.seed.torch("data", split))
        points = self.world.view(shared, self.seed.torch("data", split, "view"))
        return points.to(next(self.module.parameters()).device), labels

    @torch.no_grad()
    def features(self, split: str) -> tuple[Tensor, Tensor]:
        points, labels = self.view(split)
        return self.module(points).cpu(), labels

    @torch.no_grad()
    def evaluate(self, objective: Any) -> dict[str, float]:
        """Return the accuracy of a linear and a 20-NN probe of the encoder's features."""
        data = []
        for split in ("train", "test"):
            points, labels = self.view(split)
            data += [self.module.encoder(points).cpu(), labels]
        linear = linear_probe(*data).metrics("linear")
        return linear | knn_probe(*data, k=NEIGHBOURS).metrics("knn")


def _example(objective: Any, dim: int, count: int) -> Pairs:
    return Pairs.cross(torch.randn(count, dim), torch.randn(count, dim))


def _example_views(objective: Any, dim: int, views: int, count: int, negatives: ViewNegatives) -> Pairs:
    labels = torch.arange(count) % 2
    return Pairs.from_views([torch.randn(count, dim) for _ in range(views)], labels, negatives=negatives)
