"""The [vision] table of a recipe."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dipole.core.train.config import Settings
from dipole.vision.augment import AugmentConfig
from dipole.vision.data import DataConfig
from dipole.vision.encoders import EncoderConfig
from dipole.vision.evaluation import ProbeConfig


class MoCoConfig(Settings):
    """The [vision.moco] table."""

    momentum: float = Field(0.999, ge=0, lt=1, description="of the key encoder")
    intra_batch: bool = Field(False, description="the other queries are negatives too (CACR App. C.2)")
    symmetric: bool = Field(
        False, description="every view is a query in turn, and no key of the batch is a negative (CACR Algorithm 3)"
    )


class CMCConfig(Settings):
    """The [vision.cmc] table."""

    momentum: float = Field(0.5, ge=0, lt=1, description="of the memory bank")
    width: float = Field(
        0.5, gt=0, le=1, description="of each encoder's layers, as a share of the encoder's; Tian et al.: a half"
    )


class SwAVConfig(Settings):
    """The [vision.swav] table."""

    small_views: int = Field(0, ge=0, description="small crops per image besides the large ones")
    small_size: int = Field(96, ge=4, description="their side in pixels")
    small_scale: tuple[float, float] = Field((0.05, 0.14), description="their share of the area")


class BlocksConfig(Settings):
    """The [vision.blocks] table."""

    size: int = Field(2, ge=2, description="images of a block, all of one class")
    count: int | None = Field(
        None, ge=1, description="blocks of each class, drawn once; default: anew in every epoch, each image once"
    )


TABLES: dict[str, type[Settings]] = {"moco": MoCoConfig, "cmc": CMCConfig, "swav": SwAVConfig, "blocks": BlocksConfig}

# Frameworks that pair something else than the views of an image.
SINGLE = {
    "cmc": "the two halves of Lab are its two views",
    "blocks": "the images of a block are each other's positives",
}


class VisionConfig(Settings):
    """The [vision] table."""

    method: Literal["simclr", "moco", "cmc", "swav", "blocks"] = "simclr"
    views: int | None = Field(
        None, ge=1, le=16, description="views per image, K + 1; default 2, and 1 for cmc and blocks"
    )
    negatives: int | None = Field(
        None,
        ge=1,
        description="simclr: so many of the batch's per anchor; moco: keys in the queue (default 65536); "
        "cmc: drawn from a memory bank instead of the batch; swav: past embeddings in the queue; "
        "blocks: none, see the objective's k",
    )
    compile: bool = Field(False, description="compile the encoders (torch.compile)")
    data: DataConfig = DataConfig()
    encoder: EncoderConfig = EncoderConfig()
    augment: AugmentConfig = AugmentConfig()
    probe: ProbeConfig = ProbeConfig()
    moco: MoCoConfig | None = Field(None, description="only with method = 'moco'")
    cmc: CMCConfig | None = Field(None, description="only with method = 'cmc'")
    swav: SwAVConfig | None = Field(None, description="only with method = 'swav'")
    blocks: BlocksConfig | None = Field(None, description="only with method = 'blocks'")

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check the settings against the method and give it its own table: the stored configuration is complete."""
        problems = [
            f"[vision.{name}] has no effect with method {self.method!r}"
            for name in TABLES
            if name != self.method and getattr(self, name) is not None
        ]
        if self.method in SINGLE and self.views not in (None, 1):
            problems.append(f"method {self.method!r} takes views = 1: {SINGLE[self.method]}")
        if self.method not in SINGLE and self.views == 1:
            problems.append(f"method {self.method!r} needs views = 2 or more")
        if self.method == "blocks" and self.negatives is not None:
            problems.append(
                "negatives has no effect with method 'blocks'; objectives take their own, as in blocks(k=4)"
            )
        if problems:
            raise ValueError("; ".join(problems))
        if self.views is None:
            object.__setattr__(self, "views", 1 if self.method in SINGLE else 2)
        if self.negatives is None and self.method == "moco":
            object.__setattr__(self, "negatives", 65_536)
        if self.method in TABLES and getattr(self, self.method) is None:
            object.__setattr__(self, self.method, TABLES[self.method]())
        return self

    @property
    def count(self) -> int:
        """Views per image, without the small crops."""
        return self.views or 2

    def recipes(self) -> list[AugmentConfig]:
        """The augmentation of every view of an image, in order."""
        every = [self.augment] * self.count
        if self.swav is not None:
            small = {"size": self.swav.small_size, "crop_scale": self.swav.small_scale}
            every += [self.augment.model_copy(update=small)] * self.swav.small_views
        return every
