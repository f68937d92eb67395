"""Fixtures shared by every folder of tests."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data sets (CIFAR-10 subset, SentEval tasks, books); the test is skipped where it is absent."""
    folder = Path(os.environ.get("DIPOLE_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set DIPOLE_DATA")
    return folder
