"""`Augment`: the papers' presets, and one view of a PIL image, a tensor and a batch."""

import pickle
import re
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from dipole import DipoleError
from dipole.core.train.recipe import load
from dipole.vision import Augment
from dipole.vision.augment import AugmentConfig


def picture(width=52, height=40, seed=0):
    """A smooth colour image, as Pillow and a tensor (3, H, W)."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    image = small.resize((width, height), Image.Resampling.BICUBIC)
    return image, torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("simclr", {"jitter": 0}), ("byol", {"jitter": 0}), ("swav", {"jitter": 0}), ("mocov1", {}), ("swav", {})],
)
def test_an_image_a_tensor_and_a_batch_have_the_same_views(preset, changes):
    """With one seed. Pillow rounds a resized crop to 256 levels, and jitter multiplies the difference."""
    augment = Augment(preset, size=24, **changes)
    image, pixels = picture()
    of_image = augment(image, torch.Generator().manual_seed(3))
    of_tensor = augment(pixels, torch.Generator().manual_seed(3))
    of_batch = augment(pixels[None].double() / 255, torch.Generator().manual_seed(3))
    sides = [24, 24] + [10] * 6 * (preset == "swav")
    assert [tuple(view.shape) for view in of_image] == [(3, side, side) for side in sides]
    for first, second, third in zip(of_image, of_tensor, of_batch, strict=True):
        torch.testing.assert_close(second, third[0], atol=1e-5, rtol=0)
        apart = (first - second).abs()
        assert float(apart.mean()) < 0.02
        turned = apart > 0.2  # solarization turns values about its threshold around
        assert float(turned.float().mean()) < 0.02
        assert not changes or float(apart[~turned].max()) < 1.01 / 255
    assert not torch.equal(of_image[0], of_image[1])


@pytest.mark.parametrize(("preset", "recipe"), [("byol", "imagenet-byol"), ("simsiam", "imagenet-simsiam"),
                                                ("moco", "imagenet100-moco"), ("cmc", "imagenet100-cmc")])  # fmt: skip
def test_presets_are_the_settings_of_the_recipes(preset, recipe):
    """The recipes' settings were taken from the papers, and each cites its place."""
    table = load(recipe, ["vision.data.source=digits"]).config.settings
    expected = table.framework.augmentations(table)
    assert [each.model_dump(exclude={"view", "blur_kernel"}) for each in Augment(preset).configs] == [
        each.model_dump(exclude={"view", "blur_kernel"}) for each in expected
    ]
    assert [each.kernel(224) for each in Augment(preset).configs] == [each.kernel(224) for each in expected]


def test_simclr_and_swav_are_the_papers():
    """Chen et al. 2020, App. A (strength 1.0); Caron et al. 2020, Sec. 4 and App. A."""
    for each in Augment("simclr").configs:
        assert (each.size, each.crop_scale, each.flip, each.grey, each.blur) == (224, (0.08, 1.0), 0.5, 0.2, 0.5)
        assert (each.jitter, each.brightness, each.contrast, each.saturation, each.hue) == (0.8, 0.8, 0.8, 0.8, 0.2)
        assert each.kernel(224) == 23  # a tenth of the side, odd
    swav = Augment("swav").configs
    assert [each.size for each in swav] == [224] * 2 + [96] * 6
    assert [each.crop_scale for each in swav] == [(0.14, 1.0)] * 2 + [(0.05, 0.14)] * 6


def test_settings_and_statistics_change_all_views():
    augment = Augment("byol", size=32, views=3, blur=0.25, crop_scale=(0.5, 1.0))
    assert [each.blur for each in augment.configs] == [0.25] * 3
    assert [each.solarize for each in augment.configs] == [0, 0.2, 0]  # the two settings take turns
    own = Augment([AugmentConfig(size=8), AugmentConfig()], size=12)
    assert [tuple(view.shape) for view in own(picture()[1])] == [(3, 8, 8), (3, 12, 12)]
    table = AugmentConfig.model_validate({"view": {"2": {"grey": 1.0}}})
    assert [each.grey for each in Augment(table, size=8).configs] == [0.2, 1.0]
    assert len(Augment("swav", size=32, small_views=0).configs) == 2
    plain = Augment("cmc", size=16)(picture()[1], torch.Generator().manual_seed(0))[0]
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.5)
    view = Augment("cmc", size=16, mean=mean, std=std)(picture()[1], torch.Generator().manual_seed(0))[0]
    for channel in range(3):
        torch.testing.assert_close(view[channel], (plain[channel] - mean[channel]) / std[channel])


@pytest.mark.parametrize(
    ("mode", "channels"), [("RGB", 3), ("RGBA", 3), ("P", 3), ("CMYK", 3), ("L", 1), ("I;16", 1), ("1", 3)]
)
def test_modes_of_pillow(mode, channels):
    image = picture()[0].convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    (view,) = Augment("cmc", size=16, flip=0, crop_scale=(1, 1))(image)
    assert view.shape == (channels, 16, 16)
    assert 0.1 < float(view.mean()) < 0.9


class Folder(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 6

    def __getitem__(self, row):
        return self.transform(picture(seed=row)[0])


def test_workers_of_a_loader_give_lists_of_batches():
    load_views = partial(DataLoader, Folder(pickle.loads(pickle.dumps(Augment("moco", size=8)))), batch_size=3)
    torch.manual_seed(0)
    found = list(load_views(num_workers=1))
    assert [[tuple(view.shape) for view in views] for views in found] == [[(3, 3, 8, 8)] * 2] * 2
    torch.manual_seed(0)
    again = list(load_views(num_workers=1))
    assert all(torch.equal(x, y) for one, two in zip(found, again, strict=True) for x, y in zip(one, two, strict=True))
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize(
    ("make", "images", "message"),
    [
        (lambda: Augment("simcrl"), None, "no preset 'simcrl'. Did you mean 'simclr'?"),
        (lambda: Augment("simclr", blurr=0), None, "no setting 'blurr'. Did you mean 'blur'?"),
        (lambda: Augment("simclr", blur=2), None, "blur: should be less than or equal to 1, got 2"),
        (lambda: Augment("simclr", crop_scale=(0.5, 0.1)), None, "crop_scale must be [low, high]"),
        (lambda: Augment("simclr", size=3), None, "size must be a whole number >= 4, got 3"),
        (lambda: Augment("simclr", mean=(0.5,)), None, "takes mean and std together"),
        (lambda: Augment("simclr", mean=(0.5,), std=(0,)), None, "std > 0"),
        (lambda: Augment("simclr", size=8), "cat.png", "a PIL image, or a tensor (C, H, W) or (n, C, H, W), got str"),
        (lambda: Augment("simclr", size=8), np.zeros((8, 8, 3)), "got ndarray. Make a tensor of an array"),
        (lambda: Augment("simclr", size=8), torch.zeros(8, 8), "got a tensor (8, 8)"),
        (lambda: Augment("simclr", size=8), torch.zeros(3, 8, 8).long(), "got torch.int64. Use images.byte()"),
        (lambda: Augment("simclr", size=8), torch.full((3, 8, 8), 255.0), "values from 255 to 255. Divide"),
        (
            lambda: Augment("simclr", size=8),
            torch.full((3, 8, 8), -1.0),
            "normalise afterwards: Augment(..., mean=MEAN",
        ),
    ],
)
def test_mistakes_have_one_clear_message(make, images, message):
    with pytest.raises(DipoleError, match=re.escape(message)):
        make()(images)
