"""What an extra installs: the line to type, for a checkout as well as for an index, and the imports that need it."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any
from urllib.parse import urlsplit

from dipole.core.utils.errors import ConfigError

WINDOWS = os.name == "nt"


def install_line(extra: str = "", package: str = "dipole") -> str:
    """What to type so that a distribution has the packages of one of its extras.

    Args:
        extra: name of the extra; "" for the distribution itself.
        package: the distribution that declares it.
    """
    wanted = f"[{extra}]" if extra else ""
    folder = _checkout(package)
    return f"pip install -e {quoted(folder + wanted)}" if folder else f"pip install {quoted(package + wanted)}"


def quoted(word: str) -> str:
    """A word of a command line, quoted if need be: doubly, which cmd, PowerShell, bash and zsh all understand."""
    if re.fullmatch(r"[A-Za-z0-9_./:+\\-]+" if WINDOWS else r"[A-Za-z0-9_./:+-]+", word):
        return word
    # What POSIX shells read inside of double quotes; no name of Windows can be written in a way that both of its take.
    return shlex.quote(word) if not WINDOWS and re.search(r'["$`!\\]', word) else f'"{word}"'


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Imports of the packages of an extra of dipole.

    Raises:
        ConfigError: one of them is not installed: what needs it, and the line that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # A module that should be there is a mistake of ours, and no package to install.
        if not error.name or error.name.partition(".")[0] in ("dipole", *sys.stdlib_module_names):
            raise
        raise ConfigError(f"{what} needs {error.name}; install it with: {install_line(extra)}") from error


def lazy(package: str, homes: Mapping[str, str], extra: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names stand in other modules, which are imported on first use.

    Args:
        package: the package's `__name__`.
        homes: name -> the module that defines it.
        extra: of dipole, which has what those modules need.
    """

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        with needing(extra, f"{package}.{name}"):
            return getattr(import_module(homes[name]), name)

    return resolve


def _checkout(package: str) -> str:
    """The folder that an editable installation runs from; "" for one from an index."""
    try:
        origin = json.loads(distribution(package).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return ""
    if not origin.get("dir_info", {}).get("editable"):
        return ""
    from urllib.request import url2pathname  # it loads ssl: only where it is asked

    place = urlsplit(origin["url"])
    share = f"//{place.netloc}" if WINDOWS and place.netloc not in ("", "localhost") else ""
    return url2pathname(share + place.path)
