"""Views against a float64 loop over images, and how many operations they launch."""

import colorsys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.ndimage import correlate1d
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dipole.vision.augment import Augmentation, AugmentConfig, Parameters, random_views

META = torch.device("meta")
ALL = AugmentConfig(size=7, blur=0.7, blur_kernel=5, solarize=0.5, grey=0.3)
RECIPES = {
    "different views": (ALL, AugmentConfig(size=7, jitter=0.0, grey=0.0), AugmentConfig(size=5, jitter=0.6)),
    "one channel": (ALL,),
    "two channels": (AugmentConfig(size=7, solarize=0.5),),
    "own size": (AugmentConfig(),),
}
SHAPES = {"one channel": (3, 1, 16, 11), "two channels": (3, 2, 9, 9), "own size": (2, 3, 8, 8)}


# The operations once more, image by image -----------------------------------------------------------------------------


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


def looped(name: str) -> list[Tensor]:
    recipes, images, drawn = case(name)
    pixels = images / 255 if images.dtype == torch.uint8 else images
    return [
        torch.from_numpy(np.stack([view_of(config, pixels[i], p, i) for i in range(len(pixels))]))
        for config, p in zip(recipes, drawn, strict=True)
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_views_equal_a_loop_over_images_in_float64(name):
    recipes, images, drawn = case(name)
    for recipe, p, expected in zip(recipes, drawn, looped(name), strict=True):
        view = Augmentation(recipe).apply(images, p)
        torch.testing.assert_close(view.double(), expected, atol=2e-6, rtol=0)


# What is launched -----------------------------------------------------------------------------------------------------


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
