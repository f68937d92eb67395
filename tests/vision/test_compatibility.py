"""Where a framework cannot carry an objective, the error names those that can, and they do."""

import numpy as np
import pytest
import torch

from dipole import objective
from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.core.utils.errors import PairsError
from dipole.vision.compatibility import carriers

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
    with pytest.raises(PairsError, match=r"simclr \(views = 5\), .*moco \(views = 5\)"):
        run(tmp_path, "objective=cacr(k=4)")
    assert run(tmp_path, "objective=cacr(k=4)", "vision.views=5").status == "done"
    with pytest.raises(PairsError, match=r"blocks \(blocks.size = 4\)"):
        run(tmp_path, "objective=cacr(k=4)", "vision.method=blocks", "vision.views=1", "train.batch_size=30")
    blocks = ("vision.method=blocks", "vision.views=1", "vision.blocks.size=4", "train.batch_size=30")
    assert run(tmp_path, "objective=cacr(k=4)", *blocks).status == "done"


def test_carriers_depend_on_needs_and_batch_size():
    found = carriers(objective("infonce + dp", dim=3), 2, 3, torch.device("cpu"))
    predicting = {"byol": 2, "mocov3": 2, "nnclr": 2, "simsiam": 2}
    assert found == {"simclr": 2, "moco": 2, "swav": 2, "blocks": 2, "cmc": 2, **predicting}
    # Twenty negative blocks are there in a batch of 32 and not in one of 6.
    blocks = objective("blocks(b=1, k=20)", dim=3)
    assert carriers(blocks, 2, 3, torch.device("cpu")) == {}
    assert "simclr" in carriers(blocks, 2, 3, torch.device("cpu"), batch_size=32)


def test_what_the_images_cannot_give_is_not_recommended(tmp_path):
    """CMC needs colours, blocks and supervised objectives need labels."""
    with pytest.raises(PairsError, match="these can") as caught:
        run(tmp_path, "objective=cacr(k=4)")
    assert "cmc" not in str(caught.value)
    np.savez(tmp_path / "u.npz", images=np.random.default_rng(0).integers(0, 256, (99, 8, 8), dtype=np.uint8))
    bare = (f"vision.data.source={tmp_path / 'u.npz'}", "vision.probe.probes=[]")
    with pytest.raises(PairsError, match=r"No vision\.method can carry tuple"):
        run(tmp_path, "objective=tuple", *bare)
    with pytest.raises(PairsError, match="these can: simclr") as caught:
        run(tmp_path, "objective=cacr(k=4)", *bare)
    assert "blocks" not in str(caught.value)


def test_two_positives_of_two_crops_are_refused_and_three_views_run(tmp_path):
    """SwAV pads a large crop's own place; padding is no positive."""
    with pytest.raises(PairsError, match=r"swav \(views = 3\)"):
        run(tmp_path, "objective=cacr(k=2)", "vision.method=swav")
    for settings in (
        ["vision.method=swav", "vision.views=3"],
        ["vision.method=swav", "vision.views=3", "vision.negatives=16"],
        ["vision.method=simclr", "vision.views=3"],
        ["vision.method=moco", "vision.views=3", "vision.negatives=16"],
        ["vision.method=blocks", "vision.views=1", "vision.blocks.size=2", "train.batch_size=30"],
    ):
        assert run(tmp_path, "objective=cacr(k=2)", *settings).status == "done"
