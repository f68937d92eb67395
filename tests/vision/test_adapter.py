"""The adapter's promises: evaluation leaves no trace, encoded images give the same batches, probes are loops."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dipole import objective
from dipole.core.train.model import load_weights, save_weights
from dipole.core.train.recipe import load_recipe
from dipole.core.utils.errors import ConfigError, OptionError
from dipole.core.utils.freezing import state_hash
from dipole.core.utils.seeding import Seeds
from dipole.vision.augment import Augmentation, AugmentConfig
from dipole.vision.decoding import Encoded
from tests.runs import refused
from tests.vision.made import make_adapter, png

SMALL = {"encoder": {"width": 4, "dim": 8}, "augment": {"size": 8, "flip": 0.0}, "data": {"limit": 128}}
SMALL["probe"] = {"draws": 2, "inits": 2}


def adapter(batch_size=32, seed=0, **settings):
    return make_adapter({**SMALL, **settings}, batch_size, seed, Seeds(seed).model)


def test_channels_last_is_a_matter_of_memory_alone(tmp_path):
    plain, last = (adapter(encoder={**SMALL["encoder"], "channels_last": asked}) for asked in (None, True))
    found = []
    for each, layout in ((plain, torch.contiguous_format), (last, torch.channels_last)):
        batch = next(each.batches(0))
        weight = each.module.branch.encoder.stages["conv"][3].weight
        assert all(tensor.is_contiguous(memory_format=layout) for tensor in (*batch.views, weight))
        rows = each.embed(batch).rows
        found.append(torch.stack([rows["view0"], rows["view1"]]))
        save_weights(tmp_path / str(layout), each.module, None)
        load_weights(tmp_path / str(layout), each.module, None)
        assert torch.equal(each.module.branch.encoder.stages["conv"][3].weight, weight)
    assert torch.allclose(*found, atol=1e-5)
    load_weights(tmp_path / "torch.channels_last", plain.module, None)


def test_evaluation_is_repeatable_and_leaves_the_module_alone():
    """Tasks of Arora et al. among the probes: their classifiers are those of the other probes."""
    probes = ("linear", "few_shot", "kmeans", "knn", "mean")
    a = adapter(probe={**SMALL["probe"], "baselines": True, "probes": [*probes, "tasks"]})
    before = state_hash(a.module)
    a.module.train()
    first = a.evaluate(None)
    assert a.module.training
    assert state_hash(a.module) == before
    assert a.evaluate(None) == first
    assert {f"{of}{probe}/accuracy" for of in ("", "untrained/", "raw/") for probe in probes} <= set(first)
    assert first["linear/accuracy"] == first["untrained/linear/accuracy"]
    assert all(0 <= value <= 1 for value in first.values())
    assert first["tasks/trained/top-1"] == pytest.approx(first["linear/accuracy"], abs=1e-6)
    assert first["tasks/mean/top-1"] == pytest.approx(first["mean/accuracy"], abs=1e-6)
    assert first["tasks/mean/avg-10"] == pytest.approx(first["mean/accuracy"], abs=1e-6)
    for name in ("trained", "mean", "few"):
        assert first[f"tasks/{name}/avg-2"] > first[f"tasks/{name}/avg-5"] > first[f"tasks/{name}/top-1"]


def test_embedding_features_pass_through_the_objective():
    a = adapter(probe={**SMALL["probe"], "features": "embedding", "probes": ["linear"]})
    collapsed = SimpleNamespace(transform=torch.zeros_like)
    assert a.evaluate(collapsed)["linear/accuracy"] < a.evaluate(None)["linear/accuracy"]
    a = adapter(probe={**CROPS, "epochs": 2, "baselines": True, "crops": {}, "features": "embedding"})
    found = a.evaluate(objective("infonce + 0.1*cllr", dim=8))
    assert {"linear/accuracy", "untrained/linear/accuracy", "raw/linear/accuracy"} <= set(found)


def test_all_wrong_settings_of_a_recipe_are_in_one_message():
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits-simclr", ["vision.encoder.nam=x", "vision.augment.hue=0.9", "vision.probe.solver=newton"])
    for name in ("vision.encoder.nam", "'name'", "vision.augment.hue", "vision.probe.solver", "convex"):
        assert name in str(caught.value)


@pytest.mark.parametrize(("settings", "message"), [
    ({"batch_size": 500}, r"train\.batch_size: 500 is more than the 128 images"),
    ({"data": {"only_labelled": True}}, "labelled_per_class"),
    # Pictures larger than memory are refused before they are read.
    ({"data": {"limit": 128, "size": 10**6}}, r"an image of 1000000 x 1000000 x 3 takes .* GB with a copy"),
    ({"augment": {"size": 10**6}}, r"a view of a batch of \d+ x 1 x 1000000 x 1000000 takes .* GB with a copy"),
    ({"probe": {"crops": {}}}, "crops: no effect with solver 'convex'"),
    ({"probe": {"learning_rate": 1.0}}, "learning_rate: no effect with solver 'convex'"),
    ({"probe": {"solver": "sgd", "schedule": "cosine", "decay": 0.1}}, "and decay have no effect with schedule"),
    ({"probe": {"solver": "sgd", "milestones": [80, 60]}}, "milestones must be increasing epochs"),
    ({"probe": {"solver": "sgd", "crops": {"scale": [0.5, 0.1]}}}, "crop_scale must be"),
    ({"probe": {"solver": "sgd", "crops": {"centre": 1.5}}}, "centre"),
])  # fmt: skip
def test_wrong_settings_are_refused(settings, message):
    refused((ConfigError, OptionError, ValidationError), message, adapter, **settings)
    refused(ConfigError, r"train\.batch_size", load_recipe, "digits-simclr", ["train.batch_size=1"])


def colour_folder(root, splits):
    draw = np.random.default_rng(1)
    for split, name, number in product(splits, "ab", range(8)):
        (root / split / name).mkdir(parents=True, exist_ok=True)
        (root / split / name / f"{number}.png").write_bytes(png(draw.integers(0, 256, (12, 12, 3), dtype=np.uint8)))
    return {"source": str(root), "size": 12}


def test_images_that_stay_encoded_give_the_same_batches_and_probes(tmp_path):
    plain, probe = {"size": 12, "jitter": 0.0, "grey": 0.0}, {**CROPS, "epochs": 2, "crops": {}}
    table = colour_folder(tmp_path / "a", ("",))
    lazy = adapter(data={**table, "memory": 1e-6}, batch_size=4, augment=plain)
    whole = adapter(data=table, batch_size=4, augment=plain)
    for a, b in zip(lazy.batches(0), whole.batches(0), strict=True):
        assert torch.equal(a.rows, b.rows)
        assert (a.views[1] - b.views[1]).abs().max() <= 1.01 / 255  # a crop of a file has whole levels
    assert lazy.evaluate(None) == whole.evaluate(None)
    table = colour_folder(tmp_path / "b", ("train", "test"))
    lazy = adapter(data={**table, "memory": 1e-6}, probe=probe, batch_size=4)
    assert isinstance(lazy.parts.train.images, Encoded)
    assert adapter(data=table, probe=probe, batch_size=4).evaluate(None) == lazy.evaluate(None)


def test_the_losses_of_arora_are_a_probe_on_test_images():
    settings = {"method": "blocks", "blocks": {"size": 2}, "data": {"limit": 300}, "probe": {"probes": ["losses"]}}
    a = adapter(**settings, batch_size=12)
    one, other = (a.evaluate(objective(text)) for text in ("blocks(k=4)", "blocks(b=1, k=1, loss=hinge)"))
    assert set(one) == {f"losses/{name}" for name in ("unsupervised", "unsupervised_train", "supervised")}
    assert one["losses/unsupervised"] > one["losses/supervised"] > 0  # classes collide in the first alone
    assert other["losses/unsupervised"] != one["losses/unsupervised"]
    assert one == a.evaluate(objective("blocks(k=4)"))


def test_labelled_images_can_be_few_and_all_there_is_to_train_on():
    whole = adapter(data={"limit": 300}).parts
    for alone in (False, True):
        parts = adapter(data={"limit": 300, "labelled_per_class": 3, "only_labelled": alone}, batch_size=8).parts
        assert parts.train.labels.bincount().tolist() == [3] * 10
        assert len(parts.pretrain) == (30 if alone else 300)
        assert parts.test.fingerprint == whole.test.fingerprint
        kept = {image.numpy().tobytes() for image in whole.train.images}
        assert all(image.numpy().tobytes() in kept for image in parts.train.images)


CROPS = {"probes": ["linear"], "solver": "sgd", "epochs": 6, "batch_size": 32, "learning_rate": 30.0, "decay": 0.2}


@pytest.mark.parametrize("what", ["encoder", "embedding", "raw"])
def test_the_linear_probe_on_random_crops_is_that_of_a_plain_loop(what):
    crops = {"scale": [0.3, 1.0], "flip": 0.5, "centre": 0.75}
    settings = {"features": "embedding" if what == "embedding" else "encoder", "baselines": what == "raw"}
    a = adapter(data={"limit": 100}, probe={**CROPS, **settings, "crops": crops})
    before = state_hash(a.module)
    found = a.evaluate(None)
    assert found == adapter(data={"limit": 100}, probe={**CROPS, **settings, "crops": crops}).evaluate(None)
    assert state_hash(a.module) == before
    network = {"encoder": a.module.features, "embedding": a.module.embedding, "raw": torch.nn.Identity()}[what]
    a.module.eval()
    test, train, seed = a.parts.test, a.parts.train, Seeds(0)
    drawn = AugmentConfig(size=8, crop_scale=(0.3, 1.0), flip=0.5, jitter=0, grey=0)
    cut = test.images[:, :, 1:7, 1:7].float() / 255  # 0.75 of 8 pixels
    tested = torch.nn.functional.interpolate(cut, 8, mode="bilinear", antialias=True)
    order = torch.Generator().manual_seed(seed.probe)
    with torch.no_grad():
        x = network(tested).flatten(1)
    classes = train.labels.unique()
    layer = torch.nn.Linear(x.shape[1], len(classes))
    layer.weight.data = 0.01 * torch.randn(layer.weight.shape, generator=order)
    layer.bias.data.zero_()
    optimizer = torch.optim.SGD(layer.parameters(), 30.0, momentum=0.9)
    for epoch in range(6):
        optimizer.param_groups[0]["lr"] = 30.0 * 0.2 ** ((epoch >= 4) + (epoch >= 5))
        for place, index in enumerate(torch.randperm(len(train), generator=order).split(32)):
            views = Augmentation(drawn)(train.images[index], seed.torch("probe", "crops", epoch, place))
            with torch.no_grad():
                seen = network(views).flatten(1)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(layer(seen), torch.searchsorted(classes, train.labels[index])).backward()
            optimizer.step()
    right = classes[layer(x).argmax(1)] == test.labels
    accuracy = found["raw/linear/accuracy" if what == "raw" else "linear/accuracy"]
    assert accuracy == pytest.approx(right.float().mean().item(), abs=1.5 / len(test))
    if what == "raw":
        assert accuracy > 0.3  # of ten classes


@pytest.mark.parametrize("method", ["simclr", "moco", "blocks"])
def test_features_before_the_projector_are_passed_to_objectives_that_act_on_them(method):
    settings = {"method": method, "encoder": {**SMALL["encoder"], "projector": "mlp"}}
    if method == "blocks":
        settings["data"] = {}
    each = adapter(batch_size=30, **settings)
    batch = next(each.batches(0))
    each.module.eval()  # batch norm does not change
    plain = each.embed(batch)
    assert plain.features == ()
    width = each.pass_features()
    found = each.embed(batch)
    features = [found.rows[name].flatten(0, -2) for name in found.features]
    views = batch.views[:1] if method == "moco" else batch.views
    assert [len(rows) for rows in features] == [30] * len(views)
    for rows, view in zip(features, views, strict=True):
        torch.testing.assert_close(rows, each.module.features(view))
    for name, rows in plain.rows.items():
        assert torch.equal(rows, found.rows[name])
    loss = objective("infonce + cllr(variant=released, rank=3)").build(each.embedding_dim, width)
    assert loss.terms[1].L.shape == (3, width)
    loss(found).terms["cllr"]
    loss(found).loss.backward()
    assert all(p.grad is not None for p in each.module.branch.encoder.parameters())
