"""A run whose finite-check comes one step late, as on a GPU: the same weights, and nothing bad ever reaches them."""

import copy
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dipole.core.record import read_record
from dipole.core.train import nonfinite
from dipole.core.train.checkpoint import list_checkpoints, load_checkpoint
from dipole.core.train.metrics import read_metrics
from dipole.core.train.optimizer import LARS, can_skip, skip_if
from dipole.core.train.recipe import load
from dipole.core.train.run import RunInterruptedError, train
from dipole.core.utils.errors import TrainingError
from dipole.core.utils.transfer import AsyncHostCopy, constant, prefetched, tensors_in, to_device

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "lars": lambda p: LARS(p, lr=0.1, weight_decay=0.01),
}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused optimizers of a CPU can skip as well."""
    monkeypatch.setattr(nonfinite, "checks_late", lambda device, optimizer, scaler: can_skip(optimizer))


def run(recipe: Path, *overrides: str, runs: Path) -> Any:
    return train(load(recipe, overrides).config, runs, quiet=True)


def found(runs: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    (folder,) = (each for each in runs.iterdir() if each.is_dir())
    lines = [{k: v for k, v in line.items() if k != "time"} for line in read_metrics(folder / "metrics.jsonl")]
    weights = {
        f"{path.stem}.{name}": tensor
        for path in (folder / "model").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert weights
    return weights, lines


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_a_step_that_is_skipped_leaves_no_trace(make: Any, first: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    other = copy.deepcopy(module)
    grads = [[torch.randn_like(p) for p in module.parameters()] for _ in range(4)]
    with_bad, without = make(module.parameters()), make(other.parameters())
    for number, each in enumerate(grads):
        if number == (0 if first else 2):
            for p in module.parameters():
                p.grad = torch.full_like(p, torch.nan)
            skip_if(with_bad, torch.tensor(True))
            with_bad.step()
        for net, optimizer in ((module, with_bad), (other, without)):
            for p, g in zip(net.parameters(), each, strict=True):
                p.grad = g.clone()
            if optimizer is with_bad:
                skip_if(optimizer, torch.tensor(False))
            optimizer.step()
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("settings", [(), ("train.optimizer=sgd",), ("train.optimizer=lars", "train.clip=0.5")])
def test_a_run_is_the_same_bit_for_bit(
    blobs: Path, tmp_path: Path, settings: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    run(blobs, "blobs.queue=8", *settings, runs=tmp_path / "at once")
    request.getfixturevalue("late")
    run(blobs, "blobs.queue=8", *settings, runs=tmp_path / "late")
    (one, lines), (two, others) = found(tmp_path / "at once"), found(tmp_path / "late")
    assert lines == others
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_that_was_interrupted_goes_on_bit_for_bit(
    blobs: Path, tmp_path: Path, late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import blobs_domain

    run(blobs, runs=tmp_path / "whole")
    calls = 0

    def interrupt(index: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(blobs_domain.BlobsAdapter, "on_batch", staticmethod(interrupt))
    with pytest.raises(RunInterruptedError):
        run(blobs, runs=tmp_path / "parts")
    run(blobs, runs=tmp_path / "parts")
    (one, lines), (two, others) = found(tmp_path / "whole"), found(tmp_path / "parts")
    assert lines == others
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("bad", [6, 5, 10], ids=["between checkpoints", "before a checkpoint", "the last step"])
def test_nothing_bad_reaches_weights_checkpoints_or_metrics(
    blobs: Path, tmp_path: Path, late: None, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    import blobs_domain

    overrides = ("train.checkpoint_every=5", "objective=infonce(similarity=dot)+0.1*dp")
    run(blobs, *overrides, runs=tmp_path / "whole")
    calls = 0

    def spoil(z: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.where(torch.arange(len(z))[:, None] == 3, torch.nan, z) if calls == bad else z

    monkeypatch.setattr(blobs_domain.BlobsAdapter, "spoil", staticmethod(spoil))
    with pytest.raises(TrainingError, match=rf"step {bad}: the loss is not finite in the terms? .*'infonce'") as caught:
        run(blobs, *overrides, runs=tmp_path / "runs")
    assert "1 of 32 embeddings are not finite: look at the encoder" in str(caught.value)
    (path,) = (tmp_path / "runs").glob("*/record.json")
    assert read_record(path).status == "failed"
    assert read_record(path).steps == bad - 1
    steps = [load_checkpoint(each)["step"] for each in list_checkpoints(path.parent / "checkpoints")]
    assert steps == ([] if bad == 5 else [5])
    assert all(line["step"] < bad for line in read_metrics(path.parent / "metrics.jsonl"))
    # The cause removed, the run goes on as if nothing had been.
    monkeypatch.setattr(blobs_domain.BlobsAdapter, "spoil", staticmethod(lambda z: z))
    assert run(blobs, *overrides, runs=tmp_path / "runs").status == "done"
    (one, _), (two, _) = found(tmp_path / "whole"), found(tmp_path / "runs")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_one_batch_is_made_ahead_in_order_and_by_one_thread() -> None:
    made: list[tuple[int, int]] = []

    def items() -> Iterator[int]:
        for number in range(5):
            made.append((number, threading.get_ident()))
            yield number

    taken = prefetched(items())
    assert next(taken) == 0
    assert list(taken) == [1, 2, 3, 4]
    assert [number for number, _ in made] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread in made} | {threading.get_ident()}) == 2


def test_what_goes_to_a_device_arrives_unchanged() -> None:
    cpu = torch.device("cpu")
    x = torch.arange(3.0)
    assert to_device(x, cpu) is x
    fetched = AsyncHostCopy(x)
    x += 1
    assert fetched.read().tolist() == [0, 1, 2]
    assert constant((1.0, 2.0), x) is constant((1.0, 2.0), x)
    nested = {"a": [x, (x, 1)], "b": json}
    assert sum(1 for _ in tensors_in(nested)) == 2
