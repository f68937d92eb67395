"""Recipes and suites that come with a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal


def shipped(kind: Literal["recipes", "suites"]) -> dict[str, Path]:
    """Return the files of a kind that come with the package, by name."""
    spec = importlib.util.find_spec("dipole.benchmarks")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return {path.stem: path for folder in folders for path in sorted(Path(folder, kind).glob("*.toml"))}


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    return shipped("recipes")
