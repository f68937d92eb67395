"""An augmentation of its own for each view, and solarization."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from dipole.core.train.recipe import load, resolve
from dipole.core.utils.errors import ConfigError
from dipole.vision import augment as A
from dipole.vision import image_ops as O
from dipole.vision.config import VisionConfig
from tests.vision.made import make_adapter

OFF = {"size": 8, "crop_scale": [1.0, 1.0], "crop_ratio": [1.0, 1.0]} | dict.fromkeys(("flip", "jitter", "grey"), 0.0)


def config(**settings):
    return A.AugmentConfig.model_validate_json(json.dumps({**OFF, **settings}))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("threshold", [0, 1, 100, 127, 128, 255, 256])
def test_solarize_equals_pillow(threshold):
    """All 256 values, in three channels."""
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    pixels = np.stack([values, values[::-1], values.T], 2)
    expected = np.array(ImageOps.solarize(Image.fromarray(pixels), threshold))
    images = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    found = O.solarize(O.unit(images), torch.ones(1), threshold)[0].permute(1, 2, 0) * 255
    torch.testing.assert_close(found, torch.from_numpy(expected).float(), atol=1e-4, rtol=0)


def test_so_many_images_are_solarized():
    images = torch.randint(0, 256, (400, 3, 8, 8), dtype=torch.uint8, generator=generator())
    recipe = config(solarize=0.3)
    found = A.Augmentation(recipe)(images, generator(1))
    plain = A.Augmentation(config())(images, generator(1))
    changed = (found != plain).flatten(1).any(1)
    assert 85 < int(changed.sum()) < 155  # binomial(400, 0.3): standard deviation 9.2
    torch.testing.assert_close(found[changed], O.solarize(plain[changed], torch.ones(int(changed.sum())), 128))


def test_what_else_is_drawn_is_the_same_with_and_without_solarization():
    one, two = (A.Augmentation(A.AugmentConfig(blur=0.5, solarize=p)).draw(20, 8, 8, generator()) for p in (0.0, 0.5))
    for name in ("box", "flip", "brightness", "hue", "grey", "sigma", "order"):
        first, second = getattr(one, name), getattr(two, name)
        assert first == second if name == "order" else torch.equal(first, second)
    assert not one.solarize.any()
    assert two.solarize.any()


def test_every_view_has_its_own_settings_and_small_crops_are_views():
    table = {**OFF, "blur": 0.3, "view": {"1": {"blur": 1.0}, "3": {"solarize": 1.0, "crop_scale": [0.2, 0.5]}}}
    vision = VisionConfig.model_validate_json(json.dumps({"views": 3, "augment": table}))
    views = vision.framework.augmentations(vision)
    assert [view.blur for view in views] == [1.0, 0.3, 0.3]
    assert [view.solarize for view in views] == [0.0, 0.0, 1.0]
    assert views[2].crop_scale == (0.2, 0.5)
    assert views[1] == A.AugmentConfig.model_validate_json(json.dumps({**OFF, "blur": 0.3}))
    table = {"method": "swav", "swav": {"small_views": 2, "small_size": 4}, "augment": {"view": {"4": {"grey": 1.0}}}}
    vision = VisionConfig.model_validate_json(json.dumps(table))
    views = vision.framework.augmentations(vision)
    assert [view.grey for view in views] == [0.2, 0.2, 0.2, 1.0]
    assert [view.size for view in views] == [None, None, 4, 4]


def test_a_batch_holds_the_views_as_their_tables_say():
    """The first view is left as it is, the second solarized throughout."""
    a = make_adapter({"augment": {**OFF, "view": {"2": {"solarize": 1.0}}}, "data": {"limit": 64}})
    batch = next(iter(a.batches(0)))
    plain = O.centre(a.parts.pretrain.images[batch.rows], 8)
    torch.testing.assert_close(batch.views[0], plain, atol=1e-6, rtol=0)
    torch.testing.assert_close(batch.views[1], torch.where(plain >= 128 / 255, 1 - plain, plain), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("vision.augment.view.3.blur=1.0", "augment.view.3 has no effect: an image has 2 views"),
        ("vision.augment.view.0.blur=1.0", "views are numbered from 1"),
        ("vision.augment.view.second.blur=1.0", "views are numbered from 1"),
        ("vision.augment.view.2.blurr=1.0", "Did you mean 'blur'"),
        ("vision.augment.view.2.solarize=1.5", "vision.augment.view.2.solarize: .*less than or equal to 1"),
        ("vision.augment.view.2.crop_scale=[0.5, 0.2]", r"view.2: crop_scale must be \[low, high\]"),
        ("vision.augment.view.2.size=8", "no such setting"),
    ],
)
def test_what_is_wrong_is_said(setting, message):
    with pytest.raises(ConfigError, match=message):
        load("digits-simclr", [setting])


def test_a_run_without_such_tables_keeps_its_name():
    plain = load("digits-simclr").config
    assert load("digits-simclr", ["vision.augment.solarize=0.0"]).config.hash == plain.hash
    other = load("digits-simclr", ["vision.augment.view.2.solarize=0.2"]).config
    assert other.hash != plain.hash
    assert other.determining()["vision"]["augment"]["view"] == {"2": {"solarize": 0.2}}


def test_the_page_for_users_of_solo_learn_is_a_configuration():
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "solo-learn.md").read_text()
    config = resolve(tomllib.loads(text.split("```toml\n")[1].split("```")[0])).config
    assert config.settings.method == "byol"
    assert [view.solarize for view in config.settings.framework.augmentations(config.settings)] == [0.0, 0.2]
    assert config.settings.probe.online.learning_rate == 0.1
