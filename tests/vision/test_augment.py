"""Augmentation equals kornia and a loop over images, from given parameters and in distribution; each view's recipe."""

import colorsys
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from pydantic import ValidationError
from scipy.ndimage import correlate1d
from scipy.stats import ks_2samp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dipole.core.train.recipe import load, resolve
from dipole.core.utils.errors import ConfigError
from dipole.vision import augment as A
from dipole.vision import image_ops as O
from dipole.vision.augment import Augmentation, AugmentConfig, Parameters, random_views
from dipole.vision.config import VisionConfig
from tests.vision.made import make_adapter

SIZE = 32


def images(n=64, channels=3, size=SIZE, seed=0):
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(seed))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def neutral(n, size=SIZE):
    one, zero = torch.ones(n), torch.zeros(n)
    box = torch.tensor([0.0, 0, size, size]).expand(n, 4)
    return A.Parameters(box, zero, one, one, one, zero, zero, zero, zero, (0, 1, 2, 3))


@pytest.fixture(scope="module")
def kornia():
    return pytest.importorskip("kornia.augmentation")


def test_colour_jitter_equals_kornia(kornia):
    x = images()
    for seed in range(4):
        torch.manual_seed(seed)
        jitter = kornia.ColorJitter(0.4, 0.4, 0.4, 0.4)
        expected = jitter(x)
        p = jitter._params
        factors = {name: p[f"{name}_factor"] for name in ("brightness", "contrast", "saturation", "hue")}
        ours = replace(neutral(len(x)), **factors, order=tuple(p["order"].tolist()))
        torch.testing.assert_close(A.color_jitter_(x.clone(), ours), expected, atol=1e-5, rtol=0)


def test_crop_and_grey_equal_kornia(kornia):
    x = images()
    crop = kornia.RandomResizedCrop((SIZE, SIZE), scale=(0.2, 1.0), align_corners=False)
    expected = crop(x)
    corner = crop._params["src"]
    extent = corner[:, 2] - corner[:, 0] + 1
    box = torch.stack([corner[:, 0, 1], corner[:, 0, 0], extent[:, 1], extent[:, 0]], 1)
    torch.testing.assert_close(O.resized_crop(x, box, SIZE), expected, atol=1e-5, rtol=0)
    x = images()
    ours = A.Augmentation(A.AugmentConfig()).apply(x, replace(neutral(len(x)), grey=torch.ones(len(x))))
    torch.testing.assert_close(ours, kornia.RandomGrayscale(p=1.0)(x), atol=1e-5, rtol=0)


def test_the_centre_of_images():
    x = images(3, size=32)[:, :, :, :24]
    torch.testing.assert_close(O.centre(x, 24), x[:, :, 4:28, :])
    assert O.centre((x * 255).byte(), 12).shape == (3, 3, 12, 12)


@pytest.mark.parametrize("kernel", [3, 9])
def test_blur_equals_kornia(kornia, kernel):
    x = images()
    blur = kornia.RandomGaussianBlur((kernel, kernel), (0.1, 2.0), p=1.0)
    expected = blur(x)
    torch.testing.assert_close(O.gaussian_blur(x, blur._params["sigma"], kernel), expected, atol=1e-5, rtol=0)


def same_distribution(a, b, level=1e-3):
    return ks_2samp(a.numpy(), b.numpy()).pvalue > level


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
    corner = crop.forward_parameters((n, 3, SIZE, SIZE))["src"]
    extent = corner[:, 2] - corner[:, 0] + 1
    theirs = {"top": corner[:, 0, 1], "left": corner[:, 0, 0], "height": extent[:, 1], "width": extent[:, 0]}
    for column, (name, values) in enumerate(theirs.items()):
        assert same_distribution(ours.box[:, column], values), name
    assert abs(ours.flip.mean() - 0.5) < 0.03
    assert abs(ours.grey.mean() - 0.2) < 0.03
    assert abs((ours.sigma > 0).float().mean() - 0.5) < 0.03
    blur = kornia.RandomGaussianBlur((3, 3), (0.1, 2.0), p=1.0)
    blur(x)
    assert same_distribution(ours.sigma[ours.sigma > 0], blur._params["sigma"])


@pytest.mark.parametrize("operation", ["crop", "jitter", "grey", "blur"])
def test_images_are_distributed_as_kornias(kornia, operation):
    """One image many times: means and contrasts of the results have one distribution."""
    x = images(1).expand(2000, -1, -1, -1).contiguous()
    off = {"flip": 0.0, "jitter": 0.0, "grey": 0.0, "blur": 0.0, "crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0)}
    torch.manual_seed(1)
    crop = {"crop_scale": (0.2, 1.0), "crop_ratio": (3 / 4, 4 / 3)}
    settings, theirs = {
        "crop": (crop, kornia.RandomResizedCrop((32, 32), (0.2, 1.0), align_corners=False)),
        "jitter": ({"jitter": 1.0}, None),
        "grey": ({"grey": 0.2}, kornia.RandomGrayscale(p=0.2)),
        "blur": ({"blur": 1.0, "blur_kernel": 5}, kornia.RandomGaussianBlur((5, 5), (0.1, 2.0), p=1.0)),
    }[operation]
    config = A.AugmentConfig(**{**off, **settings})
    if theirs is None:  # the order of the operations is drawn once a call: compare over calls
        parts = list(x.split(100))
        g = generator()
        ours = torch.cat([A.Augmentation(config)(part, g) for part in parts])
        jitter = kornia.ColorJitter(0.4, 0.4, 0.4, 0.4)
        other = torch.cat([jitter(part) for part in parts])
    else:
        ours, other = A.Augmentation(config)(x, generator()), theirs(x)
    for statistic in (lambda y: y.mean((1, 2, 3)), lambda y: y.std((1, 2, 3)), lambda y: y[:, 0].mean((1, 2))):
        assert same_distribution(statistic(ours), statistic(other))


def test_every_image_has_its_own_parameters_and_the_seed_decides():
    x = images(1).expand(16, -1, -1, -1).contiguous()
    config = A.AugmentConfig(blur=0.5)
    once, again, other = (A.Augmentation(config)(x, generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert len({tuple(image.flatten().tolist()) for image in once}) == 16


def test_the_slices_in_cache_do_not_change_the_result(monkeypatch):
    x = images(50)
    config = A.AugmentConfig(blur=0.5)
    parameters = A.Augmentation(config).draw(50, SIZE, SIZE, generator())
    whole = A.Augmentation(config).apply(x, parameters)
    monkeypatch.setattr(A, "CACHE_FLOATS", 7 * SIZE * SIZE)
    torch.testing.assert_close(A.Augmentation(config).apply(x, parameters), whole, atol=1e-6, rtol=0)


def test_bytes_single_channels_and_single_images():
    x = (images(8) * 255).byte()
    config = A.AugmentConfig()
    torch.testing.assert_close(A.Augmentation(config)(x, generator()), A.Augmentation(config)(x / 255, generator()))
    out = A.Augmentation(A.AugmentConfig(size=16, blur=1.0))(images(5, channels=1, size=8), generator())
    assert out.shape == (5, 1, 16, 16)
    assert out.min() >= 0
    assert out.max() <= 1
    augment = A.Augmentation(A.AugmentConfig(size=6, blur=0.5, solarize=0.5))
    batch = (images(1) * 255).to(torch.uint8)
    assert torch.equal(augment(batch[0], generator()), augment(batch, generator())[0])


def test_boxes_stay_inside_also_for_extreme_images():
    for height, width in ((32, 32), (10, 200), (200, 10), (4, 4)):
        augment = A.Augmentation(A.AugmentConfig(crop_scale=(0.9, 1.0)))
        box = augment.boxes(augment.draw_unsized(500, generator())[1], height, width)
        assert (box[:, :2] >= 0).all()
        assert (box[:, 2:] >= 1).all()
        assert (box[:, 0] + box[:, 2] <= height).all()
        assert (box[:, 1] + box[:, 3] <= width).all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"crop_scale": (0.9, 0.2)}, "crop_scale must be"),
        ({"blur_kernel": 4}, "must be odd"),
        ({"hue": 0.7}, "less than or equal to 0.5"),
        ({"grey": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(ValidationError, match=message):
        A.AugmentConfig(**setting)


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


META = torch.device("meta")
ALL = AugmentConfig(size=7, blur=0.7, blur_kernel=5, solarize=0.5, grey=0.3)
RECIPES = {
    "different views": (ALL, AugmentConfig(size=7, jitter=0.0, grey=0.0), AugmentConfig(size=5, jitter=0.6)),
    "one channel": (ALL,),
    "two channels": (AugmentConfig(size=7, solarize=0.5),),
    "own size": (AugmentConfig(),),
}
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
    """Outside a processor all images go at once."""
    config, source = AugmentConfig(size=224), torch.Generator().manual_seed(0)
    found = []
    for n in (2, 300):
        drawn = Augmentation(config).draw(n, 256, 256, source).to(META)
        images = torch.zeros(n, 3, 256, 256, dtype=torch.uint8, device=META)
        Augmentation(config).apply(images, drawn)  # constants go to the device once
        with Launches() as launches:
            Augmentation(config).apply(images, drawn)
        found.append(launches.count)
    assert found[0] == found[1] < 143


def test_views_of_a_batch_are_what_each_recipe_draws_in_turn():
    recipes, images, _ = case("different views")
    index = torch.tensor([2, 0, 1, 1])
    found = random_views(images, index, recipes, torch.Generator().manual_seed(3), torch.device("cpu"), slice(1, 3))
    source = torch.Generator().manual_seed(3)
    for config, view in zip(recipes, found, strict=True):
        drawn = Augmentation(config).draw(4, 16, 11, source)
        assert torch.equal(view, Augmentation(config).apply(images[index][1:3], drawn[1:3]))
