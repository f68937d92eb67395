"""SwAV's multi-crop: every crop is an anchor, the large crops and a queue are the candidates."""

from typing import Any, Self

from pydantic import Field
from torch import Tensor, nn

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.spec import check_whole
from dipole.core.train.config import Settings
from dipole.vision.augment import AugmentConfig
from dipole.vision.frameworks.base import AnyObjective, Batch, Draw, OneBranch, embedded, register_framework
from dipole.vision.frameworks.branch import Setup, in_passes, placed_like
from dipole.vision.frameworks.queue import Queue
from dipole.vision.settings import VisionSettings


class SwAVConfig(Settings):
    """The [vision.swav] table."""

    small_views: int = Field(0, ge=0, description="small crops per image in addition to the large ones")
    small_size: int = Field(96, ge=4, description="their side in pixels")
    small_scale: tuple[float, float] = Field((0.05, 0.14), description="their share of the area")


@register_framework("swav")
class SwAV(OneBranch):
    """SwAV's framework (Caron et al. 2020): every crop is an anchor, the large crops (and a queue) are the candidates.

    An anchor's positives are the other large crops of its image. Made for the objective `swav`, which computes the
    codes of each large crop together with the queue. For other objectives the queue holds negatives.

        >>> backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
        >>> model = SwAV(backbone, objective="swav(prototypes=50)")
        >>> crops = [torch.rand(8, 3, 32, 32) for _ in range(2)] + [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> loss = model(crops)

    Args:
        backbone: any module that maps images (n, C, H, W) to features (n, ...), which are flattened.
        objective: its text, an Objective or a Composite.
        head: the projection head. None is the paper's (`projection_head`), `nn.Identity()` is none.
        large: large crops of an image, the first views.
        queue: past embeddings. 0 for none.
    """

    table = SwAVConfig
    head_name = "swav"
    negatives_mean = "past embeddings in the queue"

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None = "swav(prototypes=3000)",
        head: nn.Module | None = None,
        large: int = 2,
        queue: int = 0,
    ) -> None:
        super().__init__(backbone, objective, head)
        check_whole("large", large, 2)
        self.large = self.fewest_views = large
        if queue:
            self.queue = placed_like(Queue(queue, self.embedding_dim), self.backbone)

    @classmethod
    def from_config(cls, config: VisionSettings, setup: Setup) -> Self:
        return cls(setup.branch(), None, large=config.count, queue=config.negatives or 0)

    @classmethod
    def augmentations(cls, config: VisionSettings) -> list[AugmentConfig]:
        table: SwAVConfig = config.own_table
        small = config.augment.model_copy(update={"size": table.small_size, "crop_scale": table.small_scale})
        numbers = range(config.count + 1, config.count + table.small_views + 1)
        return [*super().augmentations(config), *(small.of_view(number) for number in numbers)]

    @classmethod
    def sample(cls, views: int, rows: Draw, labels: Tensor | None) -> Pairs:
        return Pairs.from_crops(rows(views).unbind(1), labels=labels)

    def embed(self, batch: Batch) -> EncodedBatch:
        large, small = (in_passes(self.branch, part) for part in (batch.views[: self.large], batch.views[self.large :]))
        if self.queue is not None:
            self._fresh.add(*large)
        return embedded({"large": large, "small": small}, batch, self._pair)

    def _pair(self, rows: dict[str, Any], seed: int) -> Pairs:
        large, small = rows["large"], rows["small"]
        queue = None if self.queue is None else self.queue.past(large[0].dtype)
        return Pairs.from_crops(large, small, queue, rows.get("labels"), rows.get("index"))
