"""Runs of the blobs domain for tests: train, disturb, and read what a run wrote."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blobs_domain import BlobsAdapter
from safetensors.torch import load_file

from dipole.core.cli import main
from dipole.core.record import RunRecord, read_record
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import RunInterruptedError, train


def quiet(recipe: Path | str, *overrides: str, runs: Path, **options: Any) -> Any:
    return train(load_recipe(recipe, overrides).config, runs, quiet=True, **options)


def weights(runs: Path) -> dict[str, torch.Tensor]:
    """All weights of the only run of a folder."""
    (folder,) = runs.glob("*/model")
    files = sorted(folder.glob("*.safetensors"))
    return {f"{path.stem}.{name}": tensor for path in files for name, tensor in load_file(path).items()}


def lines(runs: Path) -> list[dict[str, Any]]:
    """The metrics of the only run of a folder, without times."""
    (path,) = runs.glob("*/metrics.jsonl")
    return [{key: value for key, value in line.items() if key != "time"} for line in read_metrics(path)]


def only_record(runs: Path) -> RunRecord:
    """The record of the only run of a folder."""
    (path,) = runs.glob("*/record.json")
    return read_record(path)


def assert_same_bits(one: Path, other: Path) -> None:
    """Compare weights and metrics of the runs of two folders."""
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0, equal_nan=True)
    assert lines(one) == lines(other)


def patch_blobs(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> None:
    """Replace `on_batch` (index) or `spoil` (z) of the blobs domain."""
    monkeypatch.setattr(BlobsAdapter, name, staticmethod(function))


class Steeper(torch.autograd.Function):
    """The identity, with a gradient so many times as large."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return z.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


def at_batch(monkeypatch: pytest.MonkeyPatch, actions: dict[int, Callable[[], Any]]) -> None:
    """Do something while the loop fetches a batch of this number, counted from 1 in this process."""
    seen = 0

    def count(index: int) -> None:
        nonlocal seen
        seen += 1
        if seen in actions:
            actions[seen]()

    patch_blobs(monkeypatch, "on_batch", count)


def interrupt(
    monkeypatch: pytest.MonkeyPatch, recipe: Path, *overrides: str, runs: Path, at: int = 5, signum: int = signal.SIGINT
) -> Path:
    """Train until a signal comes while batch `at` is fetched, and return the run's folder."""
    with monkeypatch.context() as patch:
        at_batch(patch, {at: lambda: signal.raise_signal(signum)})
        with pytest.raises(RunInterruptedError, match=f"after step {at} of .*; the checkpoint is saved"):
            quiet(recipe, *overrides, runs=runs)
    torch.rand(7)  # a fresh process would stand elsewhere in its random numbers
    return runs / only_record(runs).hash


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Return the JSON of a command that ends well."""
    return json.loads(done(capsys, *arguments, "--json"))


def dipole(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command in this process: exit code, stdout, stderr."""
    code = main([str(each) for each in arguments])
    found = capsys.readouterr()
    assert "Traceback" not in found.err
    return code, found.out, found.err


def done(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return stdout of a command that ends well."""
    code, out, err = dipole(capsys, *arguments)
    assert code == 0, err
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    """Return stderr of a command that ends with this code."""
    found, _, err = dipole(capsys, *arguments)
    assert found == code, err
    return err


def change(folder: Path, **values: Any) -> None:
    """Write other values into the record of a run."""
    path = folder / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def wait_for(condition: Callable[[], Any], *processes: "subprocess.Popen[str]", seconds: float = 400) -> None:
    """Wait until something holds. A process that ends before is an error."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        assert all(each.poll() is None for each in processes), [each.communicate(timeout=10)[1] for each in processes]
        time.sleep(0.05)
