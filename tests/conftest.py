"""Fixtures shared by every folder of tests."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# How fast examples are drawn and run says how busy a machine is, not whether the code is right.
settings.register_profile("dipole", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dipole")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data sets (CIFAR-10 subset, SentEval tasks, books); the test is skipped where it is absent."""
    folder = Path(os.environ.get("DIPOLE_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set DIPOLE_DATA")
    return folder
