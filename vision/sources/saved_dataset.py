"""Data sets of the library `datasets` on disk."""

from pathlib import Path

from dipole.core.utils.errors import DataError
from dipole.vision.sources.base import Classes, Decoding, Source, register_source
from dipole.vision.sources.tables import from_table


def is_saved(source: str, path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


@register_source("a folder that save_to_disk wrote", matches=is_saved)
def saved_dataset(source: str, options: Decoding, wanted: Classes) -> Source:
    """What `save_to_disk` of the library `datasets` wrote: a Dataset (split 'train') or a DatasetDict."""
    from datasets import DatasetDict, load_from_disk

    path = Path(source).expanduser()
    try:
        loaded = load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"{path} cannot be read as a data set saved to disk: {error}.") from error
    tables = {str(name): table for name, table in loaded.items()} if isinstance(loaded, DatasetDict) else None
    splits = tables or {"train": loaded}
    return Source(str(path), tuple(splits), lambda split: from_table(path.name, splits[split], options, wanted))
