"""Data sets that recipes need: their files, licence and preparation, as packages declare them.

An entry point of the group `dipole.data` names a mapping: name -> `DataSet` (fetched by `dipole data get NAME`) or
`Built` (made from the user's own files by `dipole data NAME`). The module of that mapping imports nothing heavy.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from dipole.core.utils.download import Progress, RemoteFile, fetch, file_lock
from dipole.core.utils.errors import ConfigError, DataError, nearest
from dipole.core.utils.files import atomic_write, disk_refusing, replacing
from dipole.core.utils.plugins import PluginError, load, points
from dipole.core.utils.text import warn

MARK = ".dipole-data"  # in a folder that was prepared, with the name of its data set


@dataclass(frozen=True)
class DataSet:
    """A data set that can be fetched."""

    summary: str
    licence: str  # in the authors' words
    page: str  # that has the licence
    files: tuple[RemoteFile, ...] | str  # or "package.module:function", which returns them
    prepare: str  # "package.module:function" of the download folder and a folder to fill
    use: str  # recipe settings that use it, with {folder} as a placeholder

    def remote(self) -> tuple[RemoteFile, ...]:
        """Return the files to fetch."""
        if not isinstance(self.files, str):
            return self.files
        return tuple(resolve_name(self.files)())


@dataclass(frozen=True)
class Built:
    """A data set that is built from the user's own files. `configure` is a function as of a command, in cli/app.py."""

    summary: str
    configure: str


def read_sets(path: Path) -> dict[str, DataSet | Built]:
    """Read data sets from a TOML file: a table of each, with a list of its files or the function that returns them."""
    found: dict[str, DataSet | Built] = {}
    for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        if "configure" in table:
            found[name] = Built(**table)
        elif isinstance(table["files"], str):
            found[name] = DataSet(**table)
        else:
            found[name] = DataSet(**table | {"files": tuple(RemoteFile(**each) for each in table["files"])})
    return found


def data_sets() -> dict[str, DataSet | Built]:
    """Return every data set by name. The first of a name wins."""
    found: dict[str, DataSet | Built] = {}
    for point in points("data"):
        try:
            found = dict(load(point)) | found
        except (PluginError, TypeError, ValueError) as error:
            warn(f"the data sets {error}")
    return dict(sorted(found.items()))


def fetched() -> dict[str, DataSet]:
    """Return the data sets that can be fetched."""
    return {name: each for name, each in data_sets().items() if isinstance(each, DataSet)}


def find(name: str) -> DataSet:
    """Return the data set of a name. Raise ConfigError if it cannot be fetched."""
    known = fetched()
    if name in known:
        return known[name]
    if name in data_sets():
        raise ConfigError(f"{name!r} is built, not fetched: `dipole data {name}` (--help says from what).")
    raise ConfigError(
        f"unknown data set {name!r}.{nearest(name.lower(), known)} Known: {', '.join(known)}. Get others from their "
        "authors (ImageNet: registered users of https://image-net.org)."
    )


def how_to_get(name: str) -> str:
    """Return a sentence with the command that fetches or builds a data set, or "" if it is unknown."""
    data = data_sets().get(name)
    if data is None:
        return ""
    if isinstance(data, Built):
        return f" `dipole data {name} --help` says how to build it."
    return f" `dipole data get {name}` fetches it; then add --set {data.use.format(folder=f'data/{name}')}."


def fetched_folder(folder: Path) -> Path:
    """Return the download folder of a data folder. You can also put files there yourself."""
    return folder.with_name(f"{folder.name}.download")


def is_prepared(name: str, folder: Path) -> bool:
    """Return whether a folder holds the data set. Raise DataError if it holds something else, or has no name."""
    if folder.name in ("", ".."):  # the download folder is next to it
        raise DataError(f"{folder} is no new folder. Give a folder with a name, as in --out data/{name}.")
    if not folder.exists():
        return False
    mark = folder / MARK
    try:
        if mark.is_file() and mark.read_text(encoding="utf-8").split()[:1] == [name]:
            return True
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{mark} cannot be read: {error}.") from error
    if folder.is_dir() and not any(folder.iterdir()):
        return False
    raise DataError(f"{folder} is there and was not made by `dipole data get {name}`. Give another folder with --out.")


def get(
    name: str, data: DataSet, files: tuple[RemoteFile, ...], folder: Path,
    progress: Callable[[RemoteFile], Progress], waits: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Fetch the files of a data set and prepare its folder atomically. A second process calls `waits`, and waits."""
    downloads = fetched_folder(folder)
    for file in files:
        fetch(file, downloads, progress(file), waits)
    with disk_refusing(f"cannot prepare {folder}", DataError, "--out"):
        downloads.mkdir(parents=True, exist_ok=True)
        with file_lock(downloads / ".prepare.lock", folder.exists, waits):
            if is_prepared(name, folder):  # by another process
                return
            if folder.is_dir():
                folder.rmdir()  # an empty one
            with replacing(folder) as temporary:
                temporary.mkdir()
                resolve_name(data.prepare)(downloads, temporary)
                atomic_write(temporary / MARK, f"{name}\n")
