"""Image data sets of the recipes (published.toml). This module imports nothing heavy."""

from pathlib import Path

from dipole.core.train.data_sets import read_sets

SETS = read_sets(Path(__file__).with_name("published.toml"))
