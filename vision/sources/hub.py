"""The Hugging Face Hub, or its cache when offline."""

from pathlib import Path

from dipole.core.utils.errors import DataError
from dipole.core.utils.hub import without_retry_messages
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import HUB, Classes, Decoding, Known, Source, register_source
from dipole.vision.sources.tables import from_table

IDS = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100", "stl10": "jxie/stl10"}
SIZES = {
    "cifar10": Known(3, 32, 10, {"train": 50_000, "test": 10_000}),
    "cifar100": Known(3, 32, 100, {"train": 50_000, "test": 10_000}),
    "stl10": Known(3, 96, 10, {"train": 5000, "test": 8000, "unlabeled": 100_000}, frozenset({"unlabeled"})),
}


def hub_name(source: str) -> str:
    """What the library `datasets` is asked for."""
    return IDS.get(source.removeprefix(HUB), source.removeprefix(HUB))


def is_hub_id(source: str, path: Path) -> bool:
    if source.startswith(HUB):
        return True
    named = source.count("/") == 1 and not path.is_absolute() and not source.startswith(".")
    return (source in IDS or named) and not path.exists()


@register_source("a Hub id owner/name or hub:NAME", names=tuple(IDS), matches=is_hub_id, general=True, known=SIZES)
def hub(source: str, options: Decoding, wanted: Classes) -> Source:
    """A data set of the Hugging Face Hub, or of its cache when offline."""
    from datasets import get_dataset_split_names, load_dataset

    name = hub_name(source)
    try:
        with without_retry_messages():
            splits = tuple(get_dataset_split_names(name))
    except Exception as error:
        raise DataError(
            f"the data set {name!r} cannot be found on the Hub or in its cache ({type(error).__name__}). "
            "Check the name and the connection, or give a local folder, .npz or parquet file as vision.data.source."
        ) from error

    def read(split: str) -> ImageSet:
        try:
            with without_retry_messages():
                table = load_dataset(name, split=split)
        except Exception as error:
            raise DataError(f"split {split!r} of the data set {name!r} cannot be loaded: {error}.") from error
        return from_table(name, table, options, wanted)

    return Source(name, splits, read)
