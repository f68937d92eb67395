"""Views by kernels: those of a loop over images in float64, few launches, one copy; compiled for three GPUs."""

import colorsys
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.ndimage import correlate1d
from torch import Tensor

from dipole.benchmarks.speed.eager import counted
from dipole.vision import fused_views
from dipole.vision.augment import AugmentConfig, Parameters, apply, apply_each, draw, plain
from dipole.vision.crops import random_views

sys.path.insert(0, str(Path(__file__).parents[1]))
from device_reads import META, no_reads

from tests.kernel_processes import INTERPRETED, needs_triton, process, resources

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
    return list(recipes), given, [draw(each, shape[0], *shape[2:], source) for each in recipes]


def looped(name: str) -> list[Tensor]:
    recipes, images, drawn = case(name)
    pixels = images / 255 if images.dtype == torch.uint8 else images
    return [
        torch.from_numpy(np.stack([view_of(config, pixels[i], p, i) for i in range(len(pixels))]))
        for config, p in zip(recipes, drawn, strict=True)
    ]


def by_kernels(name: str, layout: torch.memory_format) -> list[Tensor]:
    recipes, images, drawn = case(name)
    return fused_views.fused(recipes, images, drawn, layout)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    with process(INTERPRETED) as call:
        yield call


@needs_triton
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_make_the_views_of_a_loop_over_images(interpreted: Callable[..., Any], name: str) -> None:
    layout = torch.channels_last if name == "different views" else torch.contiguous_format
    for view, expected in zip(interpreted(by_kernels, name, layout), looped(name), strict=True):
        assert view.is_contiguous(memory_format=layout)
        torch.testing.assert_close(view.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", RECIPES)
def test_operations_of_pytorch_make_them_as_well(name: str) -> None:
    recipes, images, drawn = case(name)
    for view, expected in zip(apply_each(recipes, images, drawn), looped(name), strict=True):
        torch.testing.assert_close(view.double(), expected, atol=2e-6, rtol=0)


def alone() -> bool:
    """Whether an image's views are bit for bit what they are beside others."""
    recipes, images, drawn = case("different views")
    together = fused_views.fused(recipes[:2], images, drawn[:2])
    part = slice(1, 2)
    by_itself = fused_views.fused(recipes[1:2], images[part], [drawn[1][part]])
    return torch.equal(together[1][part], by_itself[0])


@needs_triton
def test_a_view_does_not_depend_on_what_is_made_beside_it(interpreted: Callable[..., Any]) -> None:
    """Ranks and steps that are resumed make other views at a time."""
    assert interpreted(alone)


def trusted() -> tuple[str, list[str]]:
    """What the self-check says here, and of kernels that mirror nothing."""
    device = torch.device("cpu")
    right = fused_views.verdict(device)
    fused_views.verdict.cache_clear()
    correct = fused_views.packed

    def wrong(configs: Any, parameters: list[Parameters], size: int) -> Tensor:
        return correct(configs, [replace(each, flip=1 - each.flip) for each in parameters], size)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fused_views.packed = wrong
        fused_views.verdict(device)
    fused_views.packed = correct
    fused_views.verdict.cache_clear()
    return right, [str(each.message) for each in seen if each.category is UserWarning]  # NumPy's are others


@needs_triton
def test_kernels_that_make_something_else_are_not_trusted(interpreted: Callable[..., Any]) -> None:
    right, (message,) = interpreted(trusted)
    assert right == ""
    assert "pixels are off by" in message
    assert "PyTorch's operations make the views instead" in message


# What is launched -----------------------------------------------------------------------------------------------------


def launches(monkeypatch: pytest.MonkeyPatch, recipes: list[AugmentConfig]) -> tuple[Counter[str], int, int]:
    """Kernels, further launches and copies to the device of a batch's views, on tensors without numbers."""
    kernels: Counter[str] = Counter()
    copies = 0

    def sent(x: Tensor, device: torch.device) -> Tensor:
        nonlocal copies
        copies += 1
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    monkeypatch.setattr(fused_views, "launch", lambda name, grid, arguments: kernels.update([name]))
    monkeypatch.setattr(fused_views, "sent", sent)
    images, source = torch.zeros(6, 3, 40, 40, dtype=torch.uint8, device=META), torch.Generator().manual_seed(0)
    drawn = [draw(each, 6, 40, 40, source) for each in recipes]
    rows = [fused_views.packed([each], [p], 8) for each, p in zip(recipes, drawn, strict=True)]
    monkeypatch.setattr(fused_views, "packed", lambda configs, parameters, size: torch.cat(rows[: len(configs)]))
    with no_reads():
        work = counted(lambda: fused_views.fused(recipes, images, drawn, torch.channels_last))
    return kernels, work.total(), copies


def test_both_views_take_two_launches_and_four_with_blur(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 x 143 by operations: both views are made together, and what was drawn for them goes over at once."""
    kernels, others, copies = launches(monkeypatch, [AugmentConfig(size=8)] * 2)
    assert (kernels.total(), copies) == (2, 1)
    assert others == 2  # on the host, where rows are joined
    kernels, _, copies = launches(monkeypatch, [AugmentConfig(size=8, blur=1.0), AugmentConfig(size=8, blur=0.1)])
    assert kernels == {"cropped": 1, "coloured": 1, "blurred": 2}
    assert copies == 1
    small = AugmentConfig(size=4)
    kernels, _, copies = launches(monkeypatch, [AugmentConfig(size=8)] * 2 + [small] * 4)
    assert (kernels.total(), copies) == (4, 1)


def test_without_kernels_a_view_takes_as_many_launches_for_any_batch() -> None:
    """Outside a processor all images go at once."""
    config, source = AugmentConfig(size=224), torch.Generator().manual_seed(0)
    found = []
    for n in (2, 300):
        drawn = draw(config, n, 256, 256, source).to(META)
        images = torch.zeros(n, 3, 256, 256, dtype=torch.uint8, device=META)
        apply(config, images, drawn)  # constants go to the device once
        found.append(counted(lambda images=images, drawn=drawn: apply(config, images, drawn)).total())
    assert found[0] == found[1] < 143


def test_views_of_a_batch_are_what_each_recipe_draws_in_turn() -> None:
    recipes, images, _ = case("different views")
    index = torch.tensor([2, 0, 1, 1])
    found = random_views(images, index, recipes, torch.Generator().manual_seed(3), torch.device("cpu"), slice(1, 3))
    source = torch.Generator().manual_seed(3)
    for config, view in zip(recipes, found, strict=True):
        drawn = draw(config, 4, 16, 11, source)
        assert torch.equal(view, plain(config, images[index][1:3], drawn[1:3]))


# Compiled -------------------------------------------------------------------------------------------------------------


def machine_code(name: str, architecture: int) -> tuple[dict[str, int], str]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dipole.vision import augment_kernels

    function = getattr(augment_kernels, name)
    every = {"CHANNELS": 3, "BYTES": True, "BLOCKS": 128, "DOWN": True, "BLOCK": fused_views.BLOCK}
    constants = {key: value for key, value in every.items() if key in function.arg_names}
    pointers = {"images": "*u8", **dict.fromkeys(("out", "source", "means", "rows"), "*fp32")}
    signature = {key: "constexpr" if key in constants else pointers.get(key, "i32") for key in function.arg_names}
    built = triton.compile(ASTSource(function, signature, constants), target=GPUTarget("cuda", architecture, 32))
    return resources(built.asm["cubin"]), built.asm["ptx"]


@pytest.fixture(scope="module")
def compiled() -> Iterator[Callable[..., Any]]:
    with process({}) as call:
        yield call


@needs_triton
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        pytest.param(name, each, marks=[] if (name, each) in (("cropped", 90), ("blurred", 80)) else [pytest.mark.slow])
        for name in ("cropped", "coloured", "blurred")
        for each in (80, 90, 100)
    ],
)
def test_kernels_compile_without_spills(compiled: Callable[..., Any], name: str, architecture: int) -> None:
    usage, ptx = compiled(machine_code, name, architecture)
    assert usage["LOCAL"] == 0
    assert usage["STACK"] <= (8 if (name, architecture) == ("cropped", 100) else 0)  # a number of the loop
    assert usage["REG"] <= 128  # four programs of 128 threads fit
    assert "atom." not in ptx
    assert ".f64" not in ptx


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", RECIPES)
def test_a_gpu_makes_them_too(name: str) -> None:
    recipes, images, drawn = case(name)
    assert fused_views.served(torch.device("cuda"))
    for view, expected in zip(apply_each(recipes, images.cuda(), drawn), looped(name), strict=True):
        torch.testing.assert_close(view.cpu().double(), expected, atol=1e-5, rtol=0)
