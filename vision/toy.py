"""LMCL's toy study as a domain: points in the plane, a linear embedding of 2 x 2, k-means accuracy (Sec. 5.1)."""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dipole.core.evaluation.probes import kmeans_accuracy
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.adapter import Adapter, Context, Sketch
from dipole.core.train.config import Settings
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import atomic_write
from dipole.vision.encoders import EncoderConfig, build_encoder

BAR_LENGTH, BAR_WIDTH, BAR_DISTANCE = 2.9, 0.5, 1.0
MOON_NOISE = 0.1


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


SETS: dict[str, Callable[[int, np.random.Generator], tuple[Tensor, Tensor]]] = {
    "three-bars": three_bars,
    "nested-moons": nested_moons,
}


def _centred(points: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    # Centred, because a linear map without bias rotates and stretches about the origin.
    return torch.from_numpy((points - points.mean(0)).astype(np.float32)), torch.from_numpy(labels)


class ToyConfig(Settings):
    """The [toy] table."""

    data: Literal["three-bars", "nested-moons"] = "three-bars"
    points: int = Field(900, ge=6, description="number of points, drawn by the seed")
    noise: float = Field(0.06, gt=0, description="deviation of the Gaussian noise that makes a point's positive")
    starts: int = Field(300, ge=1, description="random first matrices; the one with the smallest loss is trained")
    scale: float = Field(0.1, gt=0, description="deviation of their entries")
    inits: int = Field(10, ge=1, description="starts of k-means; the best by inertia counts")


class ToyAdapter(Adapter):
    """A point and its noisy copy are a positive pair, the copies of the batch's other points are negatives.

    The paper starts P at 0, where the loss has no gradient. We draw `starts` small matrices and train the one with the
    smallest loss over the first epoch. The loss has several minima (one per axis along which it stretches the plane).
    The paper's claim is about its minimiser. With `objective = "none"` P is the identity: Euclidean space.
    """

    domain: ClassVar[str] = "toy"
    config_model: ClassVar[type[Settings]] = ToyConfig
    validates: ClassVar[bool] = True
    sets_aside: ClassVar[bool] = False
    objective_optional: ClassVar[bool] = True

    config: ToyConfig

    def __init__(self, config: ToyConfig, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        if self.world_size > 1:
            raise ConfigError("the toy domain trains four numbers in one process: start it without torchrun.")
        if self.batch_size > config.points:
            raise ConfigError(f"train.batch_size: {self.batch_size} is more than toy.points = {config.points}.")
        self.points, self.labels = SETS[config.data](config.points, self.seed.numpy("data"))
        self.steps_per_epoch = config.points // self.batch_size
        self.embedding_dim = 2
        self.module = build_encoder(EncoderConfig(name="linear", width=2, projector="none"), channels=2, size=1)

    @classmethod
    def sketch(cls, config: Any, batch_size: int, world_size: int = 1) -> Sketch:
        return Sketch(2, _example, (batch_size,))

    @property
    def _matrix(self) -> Tensor:
        (weight,) = self.module.parameters()  # (2, 2)
        return weight

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.points), generator=self.seed.torch("data", "order", epoch))
        for step in range(start, self.steps_per_epoch):
            points = self.points[order[step * self.batch_size : (step + 1) * self.batch_size]]
            noise = torch.randn(points.shape, generator=self.seed.torch("augment", epoch, step))
            yield points.to(self.device), (points + self.config.noise * noise).to(self.device)

    def embed(self, batch: tuple[Tensor, Tensor]) -> EncodedBatch:
        points, copies = batch
        rows = {"points": self._map(points), "copies": self._map(copies)}
        return EncodedBatch(rows, lambda rows: Pairs.cross(rows["points"], rows["copies"]))

    def _map(self, points: Tensor) -> Tensor:
        return self.module(points[:, :, None, None])

    def fit(self, run: Any) -> None:
        if run.objective is None:
            torch.nn.init.eye_(self._matrix)
            return
        if run.step == 0:
            self._choose_start(run.objective)
        run.train()

    @torch.no_grad()
    def _choose_start(self, objective: Any) -> None:
        batches = list(self.batches(0))
        draws = torch.randn(self.config.starts, 2, 2, generator=self.seed.torch("model", "starts")) * self.config.scale
        losses = []
        for draw in draws:
            self._matrix.copy_(draw)
            losses.append(sum(float(objective(self.embed(batch)).loss) for batch in batches))
        self._matrix.copy_(draws[torch.tensor(losses).argmin()])

    @torch.no_grad()
    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        """Return P x of all points for any split. The validation part is as many new points of the same shape."""
        points, labels = self.points, self.labels
        if split == "test" and self.part == "validation":
            points, labels = SETS[self.config.data](self.config.points, self.seed.numpy("data", "validation"))
        return self._map(points.to(self.device)).cpu(), labels

    def evaluate(self, objective: Any) -> dict[str, float]:
        embedded, labels = self.features("test")
        if objective is not None:
            embedded = objective.transform(embedded.to(self.device)).cpu()
        if self.part == "test":  # for LMCL Figure 3
            x, y = ([float(f"{value:.5g}") for value in axis.tolist()] for axis in embedded.T)
            text = json.dumps({"x": x, "y": y, "label": self.labels.tolist()})
            atomic_write(self.workdir / "points.json", text + "\n")
        return kmeans_accuracy(embedded, labels, inits=self.config.inits, seed=self.seed.probe).metrics("kmeans")

    def data_info(self) -> dict[str, Any]:
        content = self.points.numpy().tobytes() + self.labels.numpy().tobytes()
        parts = ["train", "test"] + ["validation"] * bool(self.validation)
        return {
            "name": self.config.data,
            "fingerprint": hashlib.sha256(content).hexdigest(),
            "sizes": dict.fromkeys(parts, len(self.points)),
        }


def _example(objective: Any, dim: int, count: int) -> Pairs:
    return Pairs.cross(torch.randn(count, dim), torch.randn(count, dim))
