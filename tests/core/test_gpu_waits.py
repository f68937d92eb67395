"""On a GPU, CUDA itself raises where a step would wait: every objective and every kind of pairs, and a whole run."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dipole.core.train import loop
from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.core.utils.errors import PairsError

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from device_reads import no_cuda_waits
from test_device_reads import TERMS, may_wait, outcomes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("text", TERMS.values(), ids=TERMS)
def test_an_objective_waits_for_nothing(text):
    on_cpu, with_first = (dict(outcomes(text, torch.device(kind))) for kind in ("cpu", "cuda"))
    faults, done = [], 0
    for name, run in outcomes(text, torch.device("cuda")):
        try:
            on_cpu[name]()  # what is refused there ends the process on a GPU
        except PairsError:
            continue
        with_first[name]()  # constants, workspaces and compiled kernels
        try:
            with no_cuda_waits():
                run()
            done += 1
        except RuntimeError as error:
            if not may_wait(text, name):
                faults.append(f"{name}: {error}")
    assert not faults, "\n".join(faults)
    assert done


def test_a_training_step_waits_for_nothing_before_its_check(blobs, tmp_path, monkeypatch):
    steps = 0
    forward = loop.LossModule.forward

    def counted(self: Any, batch: Any) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == 1:
            return forward(self, batch)
        with no_cuda_waits():
            return forward(self, batch)

    monkeypatch.setattr(loop.LossModule, "forward", counted)
    overrides = ("device=cuda", "train.log_every=10", "train.steps=12")
    assert train(load(blobs, overrides).config, tmp_path / "runs", quiet=True).status == "done"
    assert steps == 12
