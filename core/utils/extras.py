"""Extras: the command that installs one, imports that need it, and figures, which need no display."""

import ast
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dipole.core.utils.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOWS = os.name == "nt"


def install_line(extra: str = "", package: str = "dipole") -> str:
    """Return the pip command that installs an extra from the distribution's origin: a folder, a file, an index."""
    wanted = f"[{extra}]" * bool(extra)
    origin = _origin(package)
    url = str(origin.get("url", ""))
    if folder := source_folder(package):
        editable = "-e " * bool(origin["dir_info"].get("editable"))
        return f"pip install {editable}{quoted(folder + wanted)}"
    if "vcs_info" in origin:
        version = origin["vcs_info"]
        url = f"{version['vcs']}+{url}@{version['commit_id']}"
    return f"pip install {quoted(package + wanted + f' @ {url}' * bool(url))}"


def source_folder(package: str = "dipole") -> str:
    """Return the folder that the distribution was installed from, or "" if it came from elsewhere."""
    origin = _origin(package)
    if "dir_info" not in origin:
        return ""
    from urllib.request import url2pathname  # imported here, because it loads ssl

    place = urlsplit(str(origin["url"]))
    path = place.path
    if WINDOWS and place.netloc not in ("", "localhost"):
        path = f"//{place.netloc}{path}"
    return url2pathname(path)


def quoted(word: str) -> str:
    """Quote a word of a command line if needed, with double quotes, which cmd, PowerShell, bash and zsh read."""
    if re.fullmatch((r"[A-Za-z0-9_./:+-]+", r"[A-Za-z0-9_./:+\\-]+")[WINDOWS], word):
        return word
    # POSIX shells expand these characters inside double quotes.
    if not WINDOWS and re.search(r'["$`!\\]', word):
        return shlex.quote(word)
    return f'"{word}"'


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Raise ConfigError, with the command that installs the extra, if a package that `what` needs is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        # A missing module of dipole or of Python is a bug, not a package to install.
        if not error.name or error.name.partition(".")[0] in ("dipole", *sys.stdlib_module_names):
            raise
        raise ConfigError(f"{what} needs {error.name}; install it with: {install_line(extra)}") from error


def lazy(package: str, file: str, extra: str) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return the names and modules that a package hands out, its `__getattr__`, and its `__dir__`. They need an extra.

    A name is imported on first use. Its file has them for type checkers, each as `from MODULE import NAME as NAME`.
    """
    imports = [each for each in ast.walk(ast.parse(Path(file).read_text("utf-8"))) if isinstance(each, ast.ImportFrom)]
    homes = {each.names[0].name: str(each.module) for each in imports if each.names[0].asname}

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        with needing(extra, f"{package}.{name}"):
            if homes[name] == package:
                return import_module(f"{package}.{name}")
            return getattr(import_module(homes[name]), name)

    return homes, resolve, lambda: sorted(homes)


def _origin(package: str) -> dict[str, Any]:
    """Return the contents of direct_url.json, which are empty if the distribution came from an index (PEP 610)."""
    with suppress(PackageNotFoundError):
        return dict(json.loads(distribution(package).read_text("direct_url.json") or "{}"))
    return {}


def check_drawing(extra: str = "vision") -> None:
    """Raise ConfigError if matplotlib, which an extra installs, is missing. Call this before long work."""
    with needing(extra, "drawing pictures"):
        import matplotlib  # noqa: F401


def new_figure(width: float, height: float, extra: str = "vision") -> "Figure":
    """Return an empty figure. Width and height are in inches."""
    check_drawing(extra)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
