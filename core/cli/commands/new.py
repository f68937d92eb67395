"""`dipole new`: start a package that adds objectives or a domain, with tests and continuous integration."""

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from keyword import iskeyword
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dipole.core.cli.output import json_answer
from dipole.core.cli.parser import Runner, to_path
from dipole.core.train.config import RunConfig
from dipole.core.train.domains import domain_names
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.extras import quoted
from dipole.core.utils.files import disk_refusing, replacing

# "common", and "objectives" or "domain", have the files to write, each as NAME.in. @name@ and @package@ are filled in.
TEMPLATE = Path(__file__).parents[1] / "template"
# Device names on Windows, which no folder can have.
DEVICES = {"aux", "con", "nul", "prn", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Start your own package: objectives or a domain, with tests."""
    add = parser.add_argument
    add("name", metavar="NAME", help="name of the package, such as my-objectives")
    add("--domain", action="store_true", help="start a domain of that name, with a toy data set and a recipe")
    text = "where to make its folder (default: the current folder)"
    add("-o", "--out", "--into", type=to_path, metavar="FOLDER", help=text)
    add("--json", action="store_true", help="print one JSON object (messages go to stderr)")
    return run


def run(arguments: argparse.Namespace) -> int:
    name, package = arguments.name, package_of(arguments.name)
    kind, shown = "objectives", f"{package}_margin"
    if arguments.domain:
        check_domain(name, package)
        kind, shown = "domain", package
    folder = (arguments.out or Path()) / name
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists already. Nothing was changed: give another NAME, or --out FOLDER.")
    paths = {}
    for part in (TEMPLATE / "common", TEMPLATE / kind):
        for source in sorted(part.rglob("*.in")):
            paths[filled(str(source.relative_to(part)).removesuffix(".in"), name, package)] = source
    with json_answer(arguments.json) as answer:
        with disk_refusing(f"cannot write {folder}", ConfigError, "--out"), replacing(folder) as temporary:
            for path, source in paths.items():
                text = filled(source.read_text(encoding="utf-8"), name, package).replace("@shown@", shown)
                (temporary / path).parent.mkdir(parents=True, exist_ok=True)
                (temporary / path).write_text(text, encoding="utf-8")
        answer |= {"package": str(folder), "files": [str(folder / path) for path in paths]}
        print(*answer["files"], sep="\n")
        print(f"\nnext:\n  cd {quoted(str(folder))}\n  pip install -e {quoted('.[dev]')}\n  pytest")
        print(f"  dipole show {shown}")
        if arguments.domain:
            print(f"  dipole train {package}-toy")
    return 0


def package_of(name: str) -> str:
    """Return the import name of a distribution. Raise ConfigError if it is no possible name, or is taken."""
    package = name.lower().replace("-", "_")
    taken = {each.lower() for each in sys.stdlib_module_names} | {"dipole", "tests"}
    problem = ""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", name, re.ASCII) or len(name) > 60:
        problem = "names no package: letters, digits and single '-' or '_' between them, a letter first, at most 60"
    elif package in DEVICES:
        problem = "is a device on Windows and cannot be a folder"
    elif iskeyword(package) or package in taken:
        problem = f"would be imported as {package!r}, which is taken"
    else:
        for imported, distribution in _others():
            if package == imported.lower() or canonicalize_name(name) == canonicalize_name(distribution):
                problem = f"would take the place of {distribution}"
    if problem:
        raise ConfigError(f"{name!r} {problem}. Choose another, such as my-objectives.")
    return package


def check_domain(name: str, package: str) -> None:
    """Raise ConfigError if a domain cannot have the name: another domain or a key of recipes has it."""
    taken = {each.lower(): f"the domain {each!r}" for each in domain_names()}
    taken |= {each: f"the key {each!r} of recipes" for each in (*RunConfig.model_fields, "include", "extends")}
    if package in taken:
        raise ConfigError(
            f"{name!r} cannot be a domain: {taken[package]} has its name. Choose another, such as my-domain."
        )


@cache
def _others() -> Sequence[tuple[str, str]]:
    """What is installed, and what dipole and its extras ask for: name to import, as far as known, distribution."""
    found = [(imported, each) for imported, names in packages_distributions().items() for each in names]
    with suppress(PackageNotFoundError):  # a folder on the path
        asked = [Requirement(line).name for line in requires("dipole") or []]
        found += [(name.replace("-", "_"), name) for name in asked]
    return found


def filled(text: str, name: str, package: str) -> str:
    """A file of the template for one package."""
    return text.replace("@name@", name).replace("@package@", package)
