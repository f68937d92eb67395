"""What SimSiam, BYOL, MoCo v3 and NNCLR share: a predictor behind the projector, and a gradient that is stopped."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dipole.core.objectives.embedded import Embedded
from dipole.core.train.config import Settings
from dipole.vision.frameworks.base import Batch, Build, OneBranch, Related, Setup, instances
from dipole.vision.frameworks.moco import every_view_in_turn
from dipole.vision.heads import Norm, mlp

if TYPE_CHECKING:
    from dipole.vision.config import VisionConfig

Schedule = Literal["cosine", "constant"]


class PredictorConfig(Settings):
    """What the tables of frameworks with a predictor have in common."""

    predictor_hidden: int | None = Field(
        None, ge=1, description="hidden units of the predictor; default encoder.hidden, or encoder.dim"
    )
    predictor_norm: Norm = Field("hidden", description="batch norm in the predictor: behind no layer, the hidden, all")


class Predicting(OneBranch):
    """Every view in turn is set beside the image's other views; one of the two sides gets no gradient.

    The projections go through one pass of the branch per view, as in the references, and from there through the
    predictor, which sees the whole batch of a rank whatever the microbatch is.
    """

    table = PredictorConfig
    without_negatives = "the other images of the batch repel where the objective has negatives"
    called: ClassVar[str]

    def __init__(self, build: Build, channels: int, tap: str | None, hidden: int, norm: Norm, **settings: Any) -> None:
        super().__init__(build, channels, tap)
        self.predictor: nn.Module = mlp([self.embedding_dim, hidden, self.embedding_dim], norm)
        self._spread: Tensor | None = None

    @classmethod
    def from_config(cls, config: VisionConfig, setup: Setup) -> Self:
        table: PredictorConfig = config.own_table
        hidden = table.predictor_hidden or cls.default_hidden(config)
        # What a framework has beside its predictor it is given by the names of its table.
        others = {name: getattr(table, name) for name in type(table).model_fields if not name.startswith("predictor_")}
        return cls(setup.build, setup.images.channels, config.encoder.tap, hidden, table.predictor_norm, **others)

    @classmethod
    def default_hidden(cls, config: VisionConfig) -> int:
        """Hidden units of the predictor where its table says nothing."""
        return config.encoder.hidden or config.encoder.dim

    @classmethod
    def samples(
        cls, views: int, images: int, rows: Callable[..., Tensor], labels: Tensor | None
    ) -> Iterator[tuple[str, Related]]:
        if views > 1:
            anchors, keys = ([rows(images) for _ in range(views)] for _ in range(2))
            yield cls.called, every_view_in_turn(anchors, keys, None, False, labels, batch_negatives=True)

    def sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Anchors and keys (B, d) of every view, from the projections (B, d) of every view."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Embedded:
        projected = [self.branch(view) for view in batch.views]
        self._spread = spread(projected[0].detach())
        anchors, keys = self.sides(batch, projected)
        count = len(projected)

        def relate(rows: dict[str, Tensor]) -> Related:
            anchors, keys = ([rows[f"{side}{number}"] for number in range(count)] for side in ("anchor", "key"))
            return every_view_in_turn(
                anchors, keys, None, False, rows.get("labels"), rows["index"], batch_negatives=True
            )

        rows = {f"anchor{number}": anchor for number, anchor in enumerate(anchors)}
        rows |= {f"key{number}": key for number, key in enumerate(keys)}
        return Embedded({**rows, **instances(batch, projected[0])}, relate)

    def metrics(self) -> dict[str, Tensor | float]:
        return {} if self._spread is None else {"spread": self._spread}


class Following(Predicting):
    """Keys from a copy of the branch that follows it, its momentum rising to 1 along a cosine."""

    def __init__(
        self,
        build: Build,
        channels: int,
        tap: str | None,
        hidden: int,
        norm: Norm,
        momentum: float,
        momentum_schedule: Schedule = "cosine",
    ) -> None:
        super().__init__(build, channels, tap, hidden, norm)
        self.target = copy.deepcopy(self.branch).requires_grad_(False)
        self.momentum = momentum
        self.schedule: Schedule = momentum_schedule

    def sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        with torch.no_grad():
            keys = [self.target(view).to(projected[0].dtype) for view in batch.views]
        return [self.predictor(z) for z in projected], keys

    @property
    def momentum_now(self) -> float:
        """The momentum of this step."""
        return momentum_at(self.progress, self.momentum) if self.schedule == "cosine" else self.momentum

    @torch.no_grad()
    def after_step(self) -> None:
        torch._foreach_lerp_(list(self.target.parameters()), list(self.branch.parameters()), 1 - self.momentum_now)

    def metrics(self) -> dict[str, Tensor | float]:
        return {**super().metrics(), "momentum": self.momentum_now}


def momentum_at(progress: float, base: float) -> float:
    """1 - (1 - base) (cos(pi k/K) + 1) / 2 at step k of K, `progress` being k/K (Grill et al. 2020, Sec. 3.3)."""
    return 1 - (1 - base) * (math.cos(math.pi * progress) + 1) / 2


def spread(z: Tensor) -> Tensor:
    """Standard deviation of each coordinate of z / |z| over (n, d), their mean times sqrt(d) (Chen & He 2021, Fig. 2).

    About 1 where directions are spread over the sphere, 0 where all rows are one point.
    """
    deviation: Tensor = F.normalize(z.float(), dim=1).std(0, correction=0).mean()
    return deviation * math.sqrt(z.shape[1])
