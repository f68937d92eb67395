"""Modules that have moved are found under their old names, which docs of earlier versions gave."""

import subprocess
import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("collect", "run_records"),
        ("learning_rl", "studies.learning_rl"),
        ("published", "report.published"),
        ("results", "report.results"),
        ("statistics", "statistics"),
        ("worker", "run.worker"),
    ],
)
def test_an_old_name_is_the_very_module(old, new):
    assert import_module(f"dipole.benchmarks.{old}") is import_module(f"dipole.benchmarks.{new}")


def test_an_old_name_can_be_started():
    command = [sys.executable, "-m", "dipole.benchmarks.learning_vision", "--help"]
    assert "cifar10_train.npz" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
