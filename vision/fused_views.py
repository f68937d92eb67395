"""All views of a batch by a few kernels on a GPU: up to two for a view's size, four where something is blurred.

The eager operations of `augment` launch more than a hundred for each view. Both make the same views up to rounding;
before the kernels are trusted on a device they have to show it there.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dipole.core.objectives import engine
from dipole.core.utils.transfer import sent
from dipole.vision.augment import AugmentConfig, Parameters, draw, plain

BLOCK = 512  # pixels of a program
TOLERANCE = 1e-4


def served(device: torch.device) -> bool:
    """Whether kernels make the views on a device; by DIPOLE_ENGINE as for losses."""
    return device.type == "cuda" and not engine.reason_against(device) and not verdict(device)


@lru_cache(maxsize=64)
def verdict(device: torch.device) -> str:
    """What is wrong with the kernels on a device, and a warning of it; an empty string if nothing is."""
    try:
        found = _difference(device)
        reason = "" if found <= TOLERANCE else f"pixels are off by {found:.2g}"
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0][:300]
    if reason:
        warnings.warn(
            f"the augmentation kernels failed their self-check on {device} ({reason}); PyTorch's operations make the "
            f"views instead, with more launches but right. {engine.VARIABLE}=eager silences this.",
            stacklevel=2,
        )
    return reason


def _difference(device: torch.device) -> float:
    """The largest difference of pixels between kernels on a device and eager operations on the processor."""
    n, height, width, source = 4, 30, 20, torch.Generator().manual_seed(0)
    config = AugmentConfig(size=24, blur=0.7)  # more pixels than a program's; enlarged one way and shrunk the other
    images = torch.randint(0, 256, (n, 3, height, width), dtype=torch.uint8, generator=source)
    drawn = draw(config, n, height, width, source)
    whole = torch.tensor([0.0, 0.0, height, width])
    drawn = replace(drawn, box=torch.where(torch.arange(n)[:, None] % 2 == 0, drawn.box, whole))
    found = fused([config], images.to(device), [drawn])[0].cpu()
    return float((found - plain(config, images, drawn)).abs().nan_to_num(torch.inf).max())


def packed(configs: Sequence[AugmentConfig], parameters: Sequence[Parameters], size: int) -> Tensor:
    """What happens to each view, a row of numbers each as the kernels read them; one recipe's below the other's."""
    rows = []
    for config, drawn in zip(configs, parameters, strict=True):
        one = drawn.flip.new_ones(len(drawn.flip))
        jitter = config.jitter > 0
        blur = drawn.sigma if config.blur > 0 else 0 * one
        columns = [
            drawn.flip,
            *((each if jitter else one) for each in (drawn.brightness, drawn.contrast, drawn.saturation)),
            drawn.hue if jitter else 0 * one,
            drawn.grey if config.grey > 0 else 0 * one,
            blur,
            one * (config.kernel(size) // 2),
            torch.where(drawn.solarize * config.solarize > 0, config.solarize_threshold / 255, torch.inf),
            *(one * number for number in drawn.order),
        ]
        rows.append(torch.cat([drawn.box, torch.stack(columns, 1)], 1))
    return torch.cat(rows)


def fused(
    configs: Sequence[AugmentConfig],
    images: Tensor,
    parameters: Sequence[Parameters],
    layout: torch.memory_format = torch.contiguous_format,
) -> list[Tensor]:
    """A view of every image (n, C, H, W) for each recipe, float (n, C, size, size) in [0, 1]; see `augment.apply`.

    What was drawn goes to the device in one copy, and views of one size are made together.
    """
    n = len(images)
    sizes = [each.size or min(images.shape[-2:]) for each in configs]
    groups = {size: [place for place, each in enumerate(sizes) if each == size] for size in dict.fromkeys(sizes)}
    drawn = {
        size: packed([configs[place] for place in places], [parameters[place] for place in places], size)
        for size, places in groups.items()
    }
    rows = sent(torch.cat(list(drawn.values())), images.device)
    found: list[Tensor] = [images] * len(configs)
    source = images.contiguous()
    for (size, places), mine in zip(groups.items(), rows.split([len(each) for each in drawn.values()]), strict=True):
        made = _made([configs[place] for place in places], source, mine, size, layout)
        for place, view in zip(places, made.split(n), strict=True):
            found[place] = view
    return found


def _made(
    configs: Sequence[AugmentConfig], images: Tensor, rows: Tensor, size: int, layout: torch.memory_format
) -> Tensor:
    """(views, C, size, size): the images once for each recipe, by the rows of numbers."""
    n, channels, height, width = images.shape
    coloured = channels if channels == 3 else 1  # of other images every channel is one by itself
    planes, blocks = channels // coloured, -(-size * size // BLOCK)
    shape = len(rows), channels, size, size
    out = torch.empty(shape, device=images.device, memory_format=layout)
    means = torch.empty(len(rows) * planes, blocks, device=images.device)
    strides = dict(zip(("s_view", "s_plane", "s_y", "s_x"), out.stride(), strict=True))
    common = {"out": out, "rows": rows, "size": size, **strides, "BLOCK": BLOCK}
    of_image = {"images": images, "means": means, "count": n, "planes": planes, "height": height, "width": width}
    grid = len(rows) * planes, blocks
    flags = {"CHANNELS": coloured, "BYTES": images.dtype == torch.uint8}
    launch("cropped", grid, {**common, **of_image, "blocks": blocks, **flags})
    if any(each.jitter > 0 or each.grey > 0 or each.solarize > 0 for each in configs):
        held = 1 << (blocks - 1).bit_length()
        given = {"means": means, "planes": planes, "blocks": blocks, "CHANNELS": coloured, "BLOCKS": held}
        launch("coloured", grid, {**common, **given})
    if any(each.blur > 0 for each in configs):
        half = torch.empty_like(out)
        grid = len(rows) * channels, blocks
        launch("blurred", grid, {**common, "source": out, "out": half, "planes": channels, "DOWN": False})
        launch("blurred", grid, {**common, "source": half, "planes": channels, "DOWN": True})
    return out


def launch(name: str, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    """Launch a kernel of `augment_kernels`."""
    from dipole.vision import augment_kernels

    with torch.cuda.device_of(arguments["out"]):  # Triton launches on the current device, which may be another
        getattr(augment_kernels, name)[grid](**arguments)
