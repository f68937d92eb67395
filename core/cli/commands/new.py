"""`dipole new`: a package of one's own that adds objectives, with tests and continuous integration."""

from __future__ import annotations

import argparse
import re
import sys
from importlib.resources import files
from keyword import iskeyword
from pathlib import Path

from dipole.core.cli import Runner
from dipole.core.cli.answer import answering
from dipole.core.ground.errors import ConfigError

# What is written, and the file of `cli/template` that it is made of; @name@ and @package@ are filled in.
FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    ".gitignore": "gitignore.in",
    ".github/workflows/ci.yml": "ci.yml.in",
    "@package@/__init__.py": "init.py.in",
    "@package@/margin.py": "margin.py.in",
    "@package@/spread.py": "spread.py.in",
    "tests/test_conformance.py": "test_conformance.py.in",
}


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Begin a package of your own: an objective, a regularizer, their tests, continuous integration."""
    parser.add_argument("name", metavar="NAME", help="of the package, such as my-objectives")
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER", help="where its folder is made (default: the current folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; what else is said is on stderr")
    return run


def run(arguments: argparse.Namespace) -> int:
    name, package = arguments.name, package_of(arguments.name)
    folder = (arguments.into or Path()) / name
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} is there already and is left as it is: give another NAME, or --into FOLDER.")
    template = files("dipole.core.cli") / "template"
    with answering(arguments.json) as answer:
        answer["package"], answer["files"] = str(folder), []
        for target, source in FILES.items():
            path = folder / filled(target, name, package)
            text = filled((template / source).read_text(encoding="utf-8"), name, package)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror}. Give --into FOLDER.") from None
            answer["files"].append(str(path))
            print(path)
        print(f"\nnext:\n  cd {folder}\n  pip install -e '.[dev]'\n  pytest\n  dipole show {package}_margin")
    return 0


def package_of(name: str) -> str:
    """The name to import of a distribution's name.

    Raises:
        ConfigError: if it is not letters, digits and single '-' or '_', or is taken by Python or dipole.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", name, re.ASCII) or len(name) > 60:
        raise ConfigError(
            f"{name!r} names no package: letters, digits and single '-' or '_' between them, a letter first, at most "
            "60, such as my-objectives."
        )
    package = name.lower().replace("-", "_")
    if iskeyword(package) or package in sys.stdlib_module_names or package in ("dipole", "test", "tests", "torch"):
        raise ConfigError(f"{name!r} would be imported as {package!r}, which is taken; such as my-objectives is free.")
    return package


def filled(text: str, name: str, package: str) -> str:
    """A file of the template for one package."""
    return text.replace("@name@", name).replace("@package@", package)
