"""Download and unpack the data sets of text for `dipole data get`."""

import os
import shutil
from pathlib import Path

from dipole.core.utils.download import RemoteFile, unpack, without_retry_messages
from dipole.core.utils.errors import DataError
from dipole.core.utils.files import scratch

BOOKCORPUS = "bookcorpus/bookcorpus"
PARQUET = "refs/convert/parquet"  # where the Hub keeps a set as parquet, whatever it was


def bookcorpus_files() -> tuple[RemoteFile, ...]:
    """BookCorpus's parquet files with the sizes and checksums that the Hub keeps of them."""
    from huggingface_hub import HfApi, hf_hub_url

    try:
        with without_retry_messages():
            info = HfApi().dataset_info(BOOKCORPUS, revision=PARQUET, files_metadata=True)
    except Exception as error:
        raise DataError(
            f"the Hub cannot be asked for the files of {BOOKCORPUS} ({type(error).__name__}). Check the connection "
            "(HF_ENDPOINT names a mirror); or fetch its parquet files by other means and give their folder as "
            "text.corpus."
        ) from error
    files = []
    for each in info.siblings or ():
        if each.rfilename.endswith(".parquet"):
            url = hf_hub_url(BOOKCORPUS, each.rfilename, repo_type="dataset", revision=PARQUET)
            checksum = f"sha256:{each.lfs.sha256}" if each.lfs is not None else None
            files.append(RemoteFile(url, each.size, checksum, each.rfilename))
    if not files:
        raise DataError(f"the Hub has no parquet files of {BOOKCORPUS} at {PARQUET}.")
    return tuple(files)


def bookcorpus(downloads: Path, folder: Path) -> None:
    """The parquet files, side by side in their order."""
    for number, file in enumerate(sorted(downloads.rglob("*.parquet"))):
        target = folder / f"train-{number:05d}.parquet"
        try:
            os.link(file, target)
        except OSError:
            shutil.copyfile(file, target)


def senteval(downloads: Path, folder: Path) -> None:
    """The tasks below downstream/, as SentEval's data folder has them."""
    archive = downloads / "senteval.tar"
    with scratch(folder / "unpacked") as inner:
        unpack(archive, inner)
        found = sorted(inner.rglob("MR/rt-polarity.pos")) or sorted(inner.rglob("STS/STS12-en-test"))
        if not found:
            raise DataError(f"{archive} holds none of SentEval's tasks (MR/rt-polarity.pos, STS/STS12-en-test).")
        shutil.move(found[0].parent.parent, folder / "downstream")
