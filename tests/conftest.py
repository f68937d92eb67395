"""Fixtures shared by every folder of tests."""

import gc
import os
import random
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each worker and each process of a test compiles everything
gc.disable()  # until the first test, as what imports and the collection of tests make stays
os.environ.pop("COLUMNS", None)  # of pytest-xdist: with it messages are wrapped in pipes too

# How fast examples are drawn and run says how busy a machine is, not whether the code is right.
settings.register_profile("dipole", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dipole")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begins each test from generators seeded by its own name: which tests ran before it decides nothing."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` formats its stack for each kind of device
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Spare the garbage collector what imports made: half a million objects, in every full collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data sets (CIFAR-10 subset, SentEval tasks, books); the test is skipped where it is absent."""
    folder = Path(os.environ.get("DIPOLE_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set DIPOLE_DATA")
    return folder
