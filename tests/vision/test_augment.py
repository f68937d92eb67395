"""Augmentation equals kornia and a loop over images. Each view has its recipe, `Augment` has its presets."""

import colorsys
import json
import pickle
import re
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from scipy.ndimage import correlate1d
from scipy.stats import ks_2samp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, default_collate

from dipole import DipoleError
from dipole.core.train.recipe import load_recipe, resolve
from dipole.core.utils.errors import ConfigError
from dipole.vision import Augment
from dipole.vision import augment as A
from dipole.vision import image_ops as O
from dipole.vision.augment import Augmentation, AugmentConfig, Parameters, random_views
from dipole.vision.config import VisionConfig
from tests.device_reads import META, no_reads
from tests.runs import refused
from tests.vision.made import make_adapter

SIZE = 32


def images(n=64, channels=3, size=SIZE, seed=0):
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(seed))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def kornia():
    return pytest.importorskip("kornia.augmentation")


def boxes(corners):
    """Top, left, height and width of kornia's crops."""
    extent = corners[:, 2] - corners[:, 0] + 1
    return torch.stack([corners[:, 0, 1], corners[:, 0, 0], extent[:, 1], extent[:, 0]], 1)


def test_jitter_crop_grey_and_blur_equal_kornia(kornia):
    x, zero, one = images(), torch.zeros(64), torch.ones(64)
    box = torch.tensor([0.0, 0, SIZE, SIZE]).expand(64, 4)
    neutral = A.Parameters(box, zero, one, one, one, zero, zero, zero, zero, (0, 1, 2, 3))
    jitter = kornia.ColorJitter(0.4, 0.4, 0.4, 0.4)
    for _ in range(4):
        expected, p = jitter(x), jitter._params
        factors = {name: p[f"{name}_factor"] for name in ("brightness", "contrast", "saturation", "hue")}
        ours = replace(neutral, **factors, order=tuple(p["order"].tolist()))
        torch.testing.assert_close(A.color_jitter_(x.clone(), ours), expected, atol=1e-5, rtol=0)
    crop = kornia.RandomResizedCrop((SIZE, SIZE), scale=(0.2, 1.0), align_corners=False)
    expected = crop(x)
    torch.testing.assert_close(O.resized_crop(x, boxes(crop._params["src"]), SIZE), expected, atol=1e-5, rtol=0)
    ours = A.Augmentation(A.AugmentConfig()).apply(x, replace(neutral, grey=one))
    torch.testing.assert_close(ours, kornia.RandomGrayscale(p=1.0)(x), atol=1e-5, rtol=0)
    for kernel in (3, 9):
        blur = kornia.RandomGaussianBlur((kernel, kernel), (0.1, 2.0), p=1.0)
        expected = blur(x)
        torch.testing.assert_close(O.gaussian_blur(x, blur._params["sigma"], kernel), expected, atol=1e-5, rtol=0)


def same_distribution(a, b):
    return ks_2samp(a.numpy(), b.numpy()).pvalue > 1e-3


def test_parameters_are_distributed_as_kornias(kornia):
    n = 4000
    torch.manual_seed(0)
    x = torch.rand(n, 3, 8, 8)
    config = A.AugmentConfig(blur=0.5)
    ours = A.Augmentation(config).draw(n, SIZE, SIZE, generator())
    jitter = kornia.ColorJitter(0.4, 0.4, 0.4, 0.4)
    jitter(x)
    for name in ("brightness", "contrast", "saturation", "hue"):
        assert same_distribution(getattr(ours, name), jitter._params[f"{name}_factor"]), name
    crop = kornia.RandomResizedCrop((8, 8), scale=(0.2, 1.0))
    theirs = boxes(crop.forward_parameters((n, 3, SIZE, SIZE))["src"])
    for mine, values in zip(ours.box.T, theirs.T, strict=True):
        assert same_distribution(mine, values)
    assert abs(ours.flip.mean() - 0.5) < 0.03
    assert abs(ours.grey.mean() - 0.2) < 0.03
    assert abs((ours.sigma > 0).float().mean() - 0.5) < 0.03
    blur = kornia.RandomGaussianBlur((3, 3), (0.1, 2.0), p=1.0)
    blur(x)
    assert same_distribution(ours.sigma[ours.sigma > 0], blur._params["sigma"])
    source = generator()
    assert len({A.Augmentation(config).draw(1, 8, 8, source).order for _ in range(400)}) == 24  # orders of the jitter


def test_every_image_has_its_own_parameters_and_the_seed_decides(monkeypatch):
    x = images(1).expand(16, -1, -1, -1).contiguous()
    augment = A.Augmentation(A.AugmentConfig(blur=0.5))
    once, again, other = (augment(x, generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert len({tuple(image.flatten().tolist()) for image in once}) == 16
    monkeypatch.setattr(A, "CACHE_FLOATS", 7 * SIZE * SIZE)  # images in one slice of the cache
    torch.testing.assert_close(augment(x, generator(3)), once, atol=1e-6, rtol=0)


def test_bytes_single_channels_single_images_and_the_centre():
    x = (images(8) * 255).byte()
    config = A.AugmentConfig()
    torch.testing.assert_close(A.Augmentation(config)(x, generator()), A.Augmentation(config)(x / 255, generator()))
    out = A.Augmentation(A.AugmentConfig(size=16, blur=1.0))(images(5, channels=1, size=8), generator())
    assert out.shape == (5, 1, 16, 16)
    assert 0 <= out.min() <= out.max() <= 1
    augment = A.Augmentation(A.AugmentConfig(size=6, blur=0.5, solarize=0.5))
    assert torch.equal(augment(x[0], generator()), augment(x[:1], generator())[0])
    wide = images(3)[:, :, :, :24]
    torch.testing.assert_close(O.centre(wide, 24), wide[:, :, 4:28, :])
    assert O.centre((wide * 255).byte(), 12).shape == (3, 3, 12, 12)


OFF = {"size": 8, "crop_scale": [1.0, 1.0], "crop_ratio": [1.0, 1.0]} | dict.fromkeys(("flip", "jitter", "grey"), 0.0)


def config(**settings):
    return A.AugmentConfig.model_validate_json(json.dumps({**OFF, **settings}))


@pytest.mark.parametrize("threshold", [0, 1, 100, 127, 128, 255, 256])
def test_solarize_equals_pillow(threshold):
    """All 256 values, in three channels."""
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    pixels = np.stack([values, values[::-1], values.T], 2)
    expected = np.array(ImageOps.solarize(Image.fromarray(pixels), threshold))
    images = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    found = O.solarize(O.unit(images), torch.ones(1), threshold)[0].permute(1, 2, 0) * 255
    torch.testing.assert_close(found, torch.from_numpy(expected).float(), atol=1e-4, rtol=0)


def test_solarization_meets_a_share_of_the_images_and_changes_no_other_draw():
    images = torch.randint(0, 256, (400, 3, 8, 8), dtype=torch.uint8, generator=generator())
    found = A.Augmentation(config(solarize=0.3))(images, generator(1))
    plain = A.Augmentation(config())(images, generator(1))
    changed = (found != plain).flatten(1).any(1)
    assert 85 < int(changed.sum()) < 155  # binomial(400, 0.3): standard deviation 9.2
    torch.testing.assert_close(found[changed], O.solarize(plain[changed], torch.ones(int(changed.sum())), 128))
    one, two = (A.Augmentation(A.AugmentConfig(blur=0.5, solarize=p)).draw(20, 8, 8, generator()) for p in (0.0, 0.5))
    assert one.order == two.order
    for name in ("box", "flip", "brightness", "hue", "grey", "sigma"):
        assert torch.equal(getattr(one, name), getattr(two, name))
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
    a = make_adapter({"augment": {**OFF, "view": {"2": {"solarize": 1.0}}}, "data": {"limit": 64}})
    batch = next(iter(a.batches(0)))
    plain = O.centre(a.parts.pretrain.images[batch.rows], 8)
    torch.testing.assert_close(batch.views[0], plain, atol=1e-6, rtol=0)
    torch.testing.assert_close(batch.views[1], torch.where(plain >= 128 / 255, 1 - plain, plain), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("setting", "message"), [
    ("crop_scale=[0.9, 0.2]", "crop_scale must be"), ("blur_kernel=4", "must be odd"),
    ("hue=0.7", "less than or equal to 0.5"), ("grey=1.5", "less than or equal to 1"),
    ("view.3.blur=1.0", "augment.view.3 has no effect: an image has 2 views"),
    ("view.0.blur=1.0", "views are numbered from 1"), ("view.second.blur=1.0", "views are numbered from 1"),
    ("view.2.blurr=1.0", "Did you mean 'blur'"),
    ("view.2.solarize=1.5", "vision.augment.view.2.solarize: .*less than or equal to 1"),
    ("view.2.crop_scale=[0.5, 0.2]", r"view.2: crop_scale must be \[low, high\]"), ("view.2.size=8", "no such setting"),
])  # fmt: skip
def test_what_is_wrong_is_said(setting, message):
    refused(ConfigError, message, load_recipe, "digits-simclr", [f"vision.augment.{setting}"])


def test_tables_of_views_change_the_name_of_a_run_and_say_what_solo_learn_does():
    plain = load_recipe("digits-simclr").config
    assert load_recipe("digits-simclr", ["vision.augment.solarize=0.0"]).config.hash == plain.hash
    other = load_recipe("digits-simclr", ["vision.augment.view.2.solarize=0.2"]).config
    assert other.hash != plain.hash
    assert other.determining()["vision"]["augment"]["view"] == {"2": {"solarize": 0.2}}
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "solo-learn.md").read_text()
    config = resolve(tomllib.loads(text.split("```toml\n")[1].split("```")[0])).config
    assert config.settings.method == "byol"
    assert [view.solarize for view in config.settings.framework.augmentations(config.settings)] == [0.0, 0.2]
    assert config.settings.probe.online.learning_rate == 0.1


ALL = AugmentConfig(size=7, blur=0.7, blur_kernel=5, solarize=0.5, grey=0.3)
RECIPES = {
    "different views": (ALL, AugmentConfig(size=7, jitter=0.0, grey=0.0), AugmentConfig(size=5, jitter=0.6)),
    "one channel": (ALL,), "two channels": (AugmentConfig(size=7, solarize=0.5),), "own size": (AugmentConfig(),),
}  # fmt: skip
SHAPES = {"one channel": (3, 1, 16, 11), "two channels": (3, 2, 9, 9), "own size": (2, 3, 8, 8)}


def luma(x: np.ndarray) -> np.ndarray:
    return x[0] if len(x) != 3 else 0.299 * x[0] + 0.587 * x[1] + 0.114 * x[2]


def hue_turned(x: np.ndarray, turns: float) -> np.ndarray:
    def one(r: float, g: float, b: float) -> tuple[float, float, float]:
        h, s, v = colorsys.rgb_to_hsv(r, g, b)
        return colorsys.hsv_to_rgb((h + turns) % 1.0, s, v)

    return np.array([one(*pixel) for pixel in x.reshape(3, -1).T]).T.reshape(x.shape)


def view_of(config: AugmentConfig, image: Tensor, p: Parameters, i: int) -> np.ndarray:
    """One view of an image (C, H, W) in [0, 1], in float64."""
    top, left, height, width = (int(each) for each in p.box[i])
    size = config.size or min(image.shape[-2:])
    part = image[None, :, top : top + height, left : left + width].double()
    x = F.interpolate(part, (size, size), mode="bilinear", align_corners=False, antialias=True)[0].numpy()
    x = x[..., ::-1] if p.flip[i] else x
    of_rgb = len(x) == 3
    for operation in p.order if config.jitter else ():
        brightness, contrast, saturation = (float(each[i]) for each in (p.brightness, p.contrast, p.saturation))
        if operation == 0:
            x = brightness * x
        elif operation == 1:
            mean = luma(x).mean() if of_rgb else x.mean((1, 2), keepdims=True)
            x = contrast * x + (1 - contrast) * mean
        elif operation == 2 and of_rgb:
            x = saturation * x + (1 - saturation) * luma(x)
        elif operation == 3 and of_rgb:
            x = hue_turned(x, float(p.hue[i]))
        x = x.clip(0, 1)
    if config.grey and of_rgb and p.grey[i]:
        x = np.repeat(luma(x)[None], 3, 0)
    if config.blur and p.sigma[i] > 0:
        taps = np.arange(config.kernel(size)) - config.kernel(size) // 2
        weights = np.exp(-0.5 * (taps / float(p.sigma[i])) ** 2)
        for axis in (1, 2):
            x = correlate1d(x, weights / weights.sum(), axis, mode="mirror")
    if config.solarize and p.solarize[i]:
        x = np.where(x >= config.solarize_threshold / 255, 1 - x, x)
    return x


def case(name: str) -> tuple[list[AugmentConfig], Tensor, list[Parameters]]:
    source = torch.Generator().manual_seed(5)
    recipes, shape = RECIPES[name], SHAPES.get(name, (3, 3, 16, 11))
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)
    given = images if name != "two channels" else images / 255
    return list(recipes), given, [Augmentation(each).draw(shape[0], *shape[2:], source) for each in recipes]


@pytest.mark.parametrize("name", RECIPES)
def test_views_equal_a_loop_over_images_in_float64(name):
    recipes, images, drawn = case(name)
    pixels = images / 255 if images.dtype == torch.uint8 else images
    for recipe, p in zip(recipes, drawn, strict=True):
        expected = np.stack([view_of(recipe, pixels[i], p, i) for i in range(len(pixels))])
        view = Augmentation(recipe).apply(images, p)
        torch.testing.assert_close(view.double(), torch.from_numpy(expected), atol=2e-6, rtol=0)


class Launches(TorchDispatchMode):
    """Counts the operations that compute something."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


def test_the_number_of_launches_does_not_depend_on_the_batch():
    """Outside a processor all images go at once, and nothing is read back."""
    config, source = AugmentConfig(size=224, blur=0.5), torch.Generator().manual_seed(0)
    found = []
    for n in (2, 300):
        drawn = Augmentation(config).draw(n, 256, 256, source).to(META)
        images = torch.zeros(n, 3, 256, 256, dtype=torch.uint8, device=META)
        Augmentation(config).apply(images, drawn)  # constants go to the device once
        with Launches() as launches, no_reads():
            assert Augmentation(config).apply(images, drawn).device == META
        found.append(launches.count)
    assert found[0] == found[1] < 148


def test_views_of_a_batch_are_what_each_recipe_draws_in_turn():
    recipes, images, _ = case("different views")
    index = torch.tensor([2, 0, 1, 1])
    found = random_views(images, index, recipes, torch.Generator().manual_seed(3), torch.device("cpu"), slice(1, 3))
    source = torch.Generator().manual_seed(3)
    for config, view in zip(recipes, found, strict=True):
        drawn = Augmentation(config).draw(4, 16, 11, source)
        assert torch.equal(view, Augmentation(config).apply(images[index][1:3], drawn[1:3]))


def picture(width=52, height=40, seed=0):
    """A smooth colour image, as Pillow and a tensor (3, H, W)."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    image = small.resize((width, height), Image.Resampling.BICUBIC)
    return image, torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


@pytest.mark.parametrize(("preset", "changes"), [
    ("simclr", {"jitter": 0}), ("byol", {"jitter": 0}), ("swav", {"jitter": 0}), ("mocov1", {}), ("swav", {}),
])  # fmt: skip
def test_an_image_a_tensor_and_a_batch_have_the_same_views(preset, changes):
    """With one seed. Pillow rounds a resized crop to 256 levels, and jitter multiplies the difference."""
    augment = Augment(preset, size=24, **changes)
    image, pixels = picture()
    of_image = augment(image, torch.Generator().manual_seed(3))
    of_tensor = augment(pixels, torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16):
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
    table = load_recipe(recipe, ["vision.data.source=digits"]).config.settings
    expected = table.framework.augmentations(table)
    free = {"view", "blur_kernel"}
    for own, theirs in zip(Augment(preset).configs, expected, strict=True):
        assert own.model_dump(exclude=free) == theirs.model_dump(exclude=free)
        assert own.kernel(224) == theirs.kernel(224)


def test_simclr_and_swav_are_the_papers():
    """Chen et al. 2020, App. A (strength 1.0), and Caron et al. 2020, Sec. 4 and App. A."""
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
    assert Augment("swav", small_size=np.int64(8), blur=1)(picture()[0])[-1].isfinite().all()  # a kernel of 23 pixels
    plain = Augment("cmc", size=16)(picture()[1], torch.Generator().manual_seed(0))[0]
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.5)
    view = Augment("cmc", size=16, mean=mean, std=std)(picture()[1], torch.Generator().manual_seed(0))[0]
    for channel in range(3):
        torch.testing.assert_close(view[channel], (plain[channel] - mean[channel]) / std[channel])


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK", "L", "I;16", "1"])
def test_modes_of_pillow(mode):
    image = picture()[0].convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    (view,) = Augment("cmc", size=16, flip=0, crop_scale=(1, 1))(image)
    assert view.shape == (1 if mode in ("L", "I;16") else 3, 16, 16)
    assert 0.1 < float(view.mean()) < 0.9


def views_of(transform, rows):
    return default_collate([transform(picture(seed=row)[0]) for row in rows])


def test_workers_of_a_loader_give_lists_of_batches():
    collate = partial(views_of, pickle.loads(pickle.dumps(Augment("moco", size=8))))
    load_views = partial(DataLoader, range(6), batch_size=3, collate_fn=collate)
    torch.manual_seed(0)
    found = list(load_views(num_workers=1))
    assert [[tuple(view.shape) for view in views] for views in found] == [[(3, 3, 8, 8)] * 2] * 2
    torch.manual_seed(0)
    again = list(load_views(num_workers=1))
    assert all(torch.equal(x, y) for one, two in zip(found, again, strict=True) for x, y in zip(one, two, strict=True))
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize(("make", "images", "message"), [
    (lambda: Augment("simcrl"), None, "no preset 'simcrl'. Did you mean 'simclr'?"),
    (lambda: Augment("mocov2", size=8), (Image.new("L", (8, 8)), 3), "must be a torch.Generator or None, got 3"),
    (lambda: Augment("simclr", siz=0), None, "no setting 'siz'. Did you mean 'size'?"),
    (lambda: Augment("simclr", blur=2), None, "blur: should be less than or equal to 1, got 2"),
    (lambda: Augment("simclr", crop_scale=(0.5, 0.1)), None, "Augment: crop_scale must be [low, high]"),
    (lambda: Augment("simclr", size=3), None, "size must be a whole number >= 4, got 3"),
    (lambda: Augment([]), None, "a list of them, not []"),
    (lambda: Augment(AugmentConfig(), small_views=2), None, "Numbers of views are a preset"),
    (lambda: Augment("simclr", mean=(0.5,)), None, "takes mean and std together"),
    (lambda: Augment("simclr", mean=(0.5,), std=(0,)), None, "std > 0"),
    (lambda: Augment("simclr", size=8), Image.new("I", (8, 8)), "do not say which value is white"),
    (lambda: Augment("simclr", size=8), "cat.png", "a PIL image, or a tensor (C, H, W) or (n, C, H, W), got str"),
    (lambda: Augment("simclr", size=8), np.zeros((8, 8, 3)), "got ndarray. Make a tensor of an array"),
    (lambda: Augment("simclr", size=8), torch.zeros(8, 8), "(8, 8). An image (H, W) needs image[None]"),
    (lambda: Augment("simclr", size=8), torch.zeros(3, 8, 8).long(), "got torch.int64. Divide them by"),
    (lambda: Augment("simclr", size=8), torch.zeros(2, 9, 8, 4), "Use images.permute(0, 3, 1, 2)"),
    (lambda: Augment("simclr", size=8), torch.full((3, 8, 8), 255.0), "values from 255 to 255. Divide"),
    (lambda: Augment("simclr", size=8), -torch.ones(3, 8, 8), "normalise afterwards: Augment(..., mean=MEAN"),
])  # fmt: skip
def test_mistakes_of_augment_have_one_clear_message(make, images, message):
    refused(DipoleError, re.escape(message), lambda: make()(*(images if isinstance(images, tuple) else (images,))))
