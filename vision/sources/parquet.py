"""Parquet files in the layout of the Hugging Face Hub."""

from pathlib import Path

from dipole.core.utils.errors import DataError
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Classes, Decoding, Source, register_source
from dipole.vision.sources.tables import from_table


def _matches(source: str, path: Path) -> bool:
    return path.suffix == ".parquet" or (path.is_dir() and next(path.rglob("*.parquet"), None) is not None)


@register_source("a parquet file or a folder of them", matches=_matches)
def parquet(source: str, options: Decoding, wanted: Classes) -> Source:
    """Parquet files as the Hub stores image sets; file names tell the splits (train-00000-of-00001.parquet)."""
    path = Path(source).expanduser()
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    if not files or not all(file.is_file() for file in files):
        raise DataError(f"no parquet file at {path}.")
    groups: dict[str, list[str]] = {}
    for file in files:
        stem = file.name.partition("-")[0] if "-" in file.name else ("train" if path.is_file() else file.stem)
        groups.setdefault(stem, []).append(str(file))

    def read(split: str) -> ImageSet:
        from datasets import Dataset, DatasetDict, load_dataset

        try:
            loaded = load_dataset("parquet", data_files={"train": groups[split]}, split="train")
        except Exception as error:
            raise DataError(f"{path} cannot be read as parquet: {error}.") from error
        assert isinstance(loaded, Dataset | DatasetDict)
        return from_table(path.stem, loaded, options, wanted)

    return Source(str(path), tuple(groups), read)
