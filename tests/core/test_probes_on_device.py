"""Probes and diagnostics stay where the features are: on a device apart they compute what they do on the processor."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dipole.core.evaluation import logistic, probes
from dipole.core.evaluation.class_tasks import class_tasks
from dipole.core.train.class_blocks import BlockShape, block_losses
from dipole.core.train.evaluation import diagnose
from dipole.text.senteval.torch_classifier import Classifier, Fit, fit_all
from dipole.vision.config import VisionConfig
from dipole.vision.evaluation import recall, zero_shot
from tests.elsewhere import ELSEWHERE, Far, elsewhere, sent

N, M, D, C = 60, 40, 6, 4


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % C
    x = torch.randn(n, D, generator=source) + torch.eye(C, D)[labels] * 2
    return x, torch.where(torch.arange(n) % 11 == 10, -1, labels)


def as_numbers(found: Any) -> Any:
    if not isinstance(found, probes.ProbeResult):
        return found
    assert found.scores.device.type == "cpu"
    return found.metrics("probe") | {"converged": found.converged}


MEASURES = {
    "linear": lambda x, p, y, q: probes.linear_probe(x, p, y, q),
    "sgd": lambda x, p, y, q: probes.linear_probe(x, p, y, q, solver="sgd", epochs=2, learning_rate=0.1, batch_size=16),
    "few_shot": lambda x, p, y, q: probes.few_shot_probe(x, p, y, q, draws=2),
    "mean": lambda x, p, y, q: probes.mean_classifier(x, p, y, q),
    "knn": lambda x, p, y, q: probes.knn_probe(x, p, y, q, k=5),
    "kmeans": lambda x, p, y, q: probes.kmeans_accuracy(y, q, inits=2),
    "tasks": lambda x, p, y, q: class_tasks(x, p, y, q, classifiers=("mean", "few"), draws=2),
    "losses": lambda x, p, y, q: block_losses(x, p, y, q, BlockShape(2)),
    "diagnostics": lambda x, p, y, q: diagnose(y, q, None)[0],
    "histogram": lambda x, p, y, q: diagnose(y, q, None)[1].model_dump(),
    "retrieval": lambda x, p, y, q: recall(x[:M], y, torch.arange(M).unsqueeze(1).expand(-1, 2) // 2, True),
    "zero_shot": lambda x, p, y, q: zero_shot(y, x[:C], q),
}


@pytest.mark.parametrize("name", MEASURES)
def test_what_is_measured_on_a_device_is_what_is_measured_here(name, monkeypatch):
    (x, p), (y, q) = points(N, 0), points(M, 1)
    wanted = as_numbers(MEASURES[name](x, p, y, q))
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    # Scores come back, features do not; Arora's terms and k-means take a few hundred points on the processor.
    with elsewhere(M * D if name in ("diagnostics", "histogram", "kmeans") else M * C):
        found = as_numbers(MEASURES[name](sent(x), p, sent(y), q))
    # Singular values are those of another call.
    assert found == (pytest.approx(wanted, rel=1e-6) if name == "diagnostics" else wanted)


def test_the_stand_in_notices():
    x = sent(torch.ones(3, 4))
    with elsewhere(4):
        assert isinstance(torch.zeros(3, device=ELSEWHERE), Far)
        assert (x + torch.zeros(3, 1, device=ELSEWHERE)).sum().item() == 12
        with pytest.raises(AssertionError, match="of the processor"):
            x + torch.zeros(3, 1)
        with pytest.raises(AssertionError, match="back to the processor"):
            x.cpu()


def test_the_run_says_where():
    """The run's device, unless it has no double precision or the recipe says otherwise."""
    cuda = torch.device("cuda", 1)
    assert probes.measuring_device(cuda) == cuda
    assert probes.measuring_device(cuda, "cpu") == torch.device("cpu")
    assert probes.measuring_device(torch.device("mps")) == torch.device("cpu")
    config = VisionConfig.model_validate_json(json.dumps({"probe": {"device": "cpu"}}))
    assert config.probe.device == "cpu"


@pytest.mark.parametrize("nhid", [0, 5])
def test_sentevals_classifier_on_a_device_is_that_of_the_processor(nhid):
    """With Adam of the device's own kind: one kernel for all of the update is not written for every device."""
    (x, y), settings = points(N, 0), Classifier(nhid=nhid, max_epoch=8, batch_size=16, optim="adam,lr=0.05")
    y = y.clamp_min(0)
    order = np.arange(N)
    fits = [Fit(order[: N // 2], order[N // 2 :], [0.0, 0.01]), Fit(order[N // 2 :], order[: N // 2], [0.0, 0.01])]
    wanted = fit_all(x, y, C, fits, settings, 1)
    with elsewhere(N * C):
        found = fit_all(sent(x), sent(y), C, fits, settings, 1)
    for near, far in zip(wanted, found, strict=True):
        assert far.accuracy == pytest.approx(near.accuracy, abs=1e-6)


@pytest.mark.parametrize(("device", "pieces"), [("cpu", 8), ("meta", 1)])
def test_devices_get_larger_pieces_than_the_processors_cache(device, pieces):
    columns = 64
    found = list(logistic.row_pieces(8 * logistic.IN_CACHE // columns, columns, torch.device(device)))
    assert len(found) == pieces
