"""A suite as TOML without grids: every row and column by itself, with what each has."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from dipole.benchmarks.grid import expand
from dipole.benchmarks.suite import read_suite


def written_out(path: Path) -> str:
    """What the file of a suite stands for; the text is a suite itself, with the same cells.

    Raises:
        ConfigError: the file is no suite.
    """
    read_suite(path)
    return tomli_w.dumps(_without_none(expand(tomllib.loads(path.read_text(encoding="utf-8")))))


def _without_none(value: Any) -> Any:
    """TOML has no word for what is not there: a row whose base is None has no base."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value
