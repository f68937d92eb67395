"""The [vision] table as frameworks and kinds of pairs read it. config.py adds the tables and checks of frameworks."""

from typing import Any, Literal

from pydantic import Field

from dipole.core.train.config import Settings
from dipole.vision.augment import MOST_VIEWS, AugmentConfig
from dipole.vision.captions import CaptionConfig
from dipole.vision.data import DataConfig
from dipole.vision.encoders import EncoderConfig
from dipole.vision.probes import ProbeConfig

PairsName = Literal["augmented", "labels", "columns"]


class VisionSettings(Settings):
    """The [vision] table without the frameworks' own tables."""

    method: str
    pairs: PairsName = Field(
        "augmented",
        description="augmented: views of an image; labels: all views of a class as well (supervised contrast); "
        "columns: the images, or image and caption, in each row of a table (.csv, .jsonl, .parquet, hub:NAME), which "
        "is data.pretrain or else data.source",
    )
    columns: tuple[str, ...] | None = Field(
        None, description="pairs = 'columns' only: names of two or more columns of images, or of image and caption"
    )
    caption: CaptionConfig | None = Field(None, description="of pairs = 'columns': the second column has captions")
    images_per_class: int | None = Field(
        None, ge=2, description="of pairs = 'labels': groups of this many images of a class (default random)"
    )
    views: int | None = Field(None, ge=1, le=MOST_VIEWS)
    negatives: int | None = Field(None, ge=1)
    compile: bool = Field(False, description="the same as train.compile")
    data: DataConfig = DataConfig()
    encoder: EncoderConfig = EncoderConfig()
    augment: AugmentConfig = AugmentConfig()
    probe: ProbeConfig = ProbeConfig()

    @property
    def own_table(self) -> Any:
        """The method's own table, or None if it has none."""
        return getattr(self, self.method, None)

    @property
    def count(self) -> int:
        """Views per image, without the small crops."""
        return self.views or 2
