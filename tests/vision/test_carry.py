"""Where a framework cannot carry an objective, the error names those that can, and they do."""

import pytest
import torch

from dipole import objective
from dipole.core.ground.errors import PairsError
from dipole.core.train.loop import train
from dipole.core.train.recipe import load
from dipole.vision.carry import carriers

SHORT = ("vision.data.limit=64", "train.batch_size=32", "train.steps=1", "train.epochs=", "vision.encoder.width=4")


def run(tmp_path, *settings):
    config = load("digits-simclr", [*SHORT, "vision.probe.probes=['knn']", "vision.probe.baselines=false", *settings])
    return train(config.config, tmp_path, quiet=True)


def test_a_supervised_objective_is_sent_to_frameworks_without_a_queue(tmp_path):
    with pytest.raises(PairsError, match=r"method = 'moco' cannot carry tuple.*these can: simclr") as caught:
        run(tmp_path, "vision.method=moco", "vision.negatives=32", "objective=tuple")
    assert "moco," not in str(caught.value).partition("these can")[2]
    assert run(tmp_path, "vision.method=simclr", "objective=tuple").status == "done"


def test_the_number_of_views_is_part_of_the_cure(tmp_path):
    with pytest.raises(PairsError, match=r"simclr \(views = 5\), moco \(views = 5\)"):
        run(tmp_path, "objective=cacr(k=4)")
    assert run(tmp_path, "objective=cacr(k=4)", "vision.views=5").status == "done"
    with pytest.raises(PairsError, match=r"blocks \(blocks.size = 5\)"):
        run(tmp_path, "objective=cacr(k=4)", "vision.method=blocks", "vision.views=1")
    blocks = ("vision.method=blocks", "vision.views=1", "vision.blocks.size=5", "train.batch_size=30")
    assert run(tmp_path, "objective=cacr(k=4)", *blocks).status == "done"


def test_what_needs_nothing_is_carried_everywhere():
    found = carriers(objective("infonce + dp", dim=3), 2, 3, torch.device("cpu"))
    assert found == {"simclr": 2, "moco": 2, "swav": 2, "swav with a queue": 2, "blocks": 2, "cmc": 2}
