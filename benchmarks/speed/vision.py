"""Images per second of the augmentation alone and of a SimCLR step.

    python -m dipole.benchmarks.speed.vision [--parts augmentation distribution step] [--batch 256] [--size 32]
        [--encoders small-conv alexnet resnet18] [--rounds 9] [--device cuda --bf16 --compile] [--out FILE]

The augmentation is compared with kornia's (if installed, with own parameters for each image) and with a loop over
images in PyTorch. Float32, one thread and processor time on a processor, wall time on a GPU. Rounds of the subjects
alternate, and the median counts. Kolmogorov-Smirnov tests of statistics of single images check that dipole and kornia
draw from the same distribution. The step is compared with the encoder's own forward and backward pass on the same
number of images.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import ks_2samp
from torch import Tensor

from dipole import Pairs, objective
from dipole.benchmarks.speed.timing import Results, interleaved
from dipole.vision.augment import Augmentation, AugmentConfig
from dipole.vision.encoders import EncoderConfig, build_encoder, build_projector
from dipole.vision.image_ops import LUMA, adjust_hue_

Subject = Callable[[Tensor], Tensor]
PARTS = ("augmentation", "distribution", "step")
# All operations crop. Other operations are off.
OPERATIONS: dict[str, dict[str, float]] = {
    "crop": {},
    "crop and flip": {"flip": 0.5},
    "crop, flip, jitter, grey": {"flip": 0.5, "jitter": 1.0, "grey": 0.2},
    "all": {"flip": 0.5, "jitter": 1.0, "grey": 0.2, "blur": 0.5},
}
OFF = {"flip": 0.0, "jitter": 0.0, "grey": 0.0, "blur": 0.0}


def ours(chances: dict[str, float]) -> Subject:
    augment, generator = Augmentation(AugmentConfig(**(OFF | chances))), torch.Generator().manual_seed(0)
    return lambda images: augment(images, generator)


def kornias(chances: dict[str, float], size: int) -> Subject | None:
    """Return the same operations by kornia, or None if it is not installed."""
    try:
        import kornia.augmentation as K
    except ImportError:
        return None
    kernel = AugmentConfig().kernel(size)
    chances = OFF | chances
    steps = torch.nn.Sequential(
        K.RandomResizedCrop((size, size), (0.2, 1.0), align_corners=False),
        K.RandomHorizontalFlip(p=chances["flip"]),
        K.ColorJitter(0.4, 0.4, 0.4, 0.4, p=chances["jitter"]),
        K.RandomGrayscale(p=chances["grey"]),
        K.RandomGaussianBlur((kernel, kernel), (0.1, 2.0), p=chances["blur"]),
    )
    used = [step for step in steps if step.p > 0]
    return torch.nn.Sequential(*used)


def plain_loop(chances: dict[str, float], size: int) -> Subject:
    """One image at a time with PyTorch's own functions, as a worker of a data loader does."""
    chances = OFF | chances
    kernel = AugmentConfig().kernel(size)
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    def luma(x: Tensor) -> Tensor:
        return (x * x.new_tensor(LUMA)[:, None, None]).sum(0, keepdim=True)

    def crop(x: Tensor) -> Tensor:
        whole = x.shape[-1]
        height, width, top, left = whole, whole, 0, 0
        for _ in range(10):
            area, ratio = uniform(0.2, 1.0) * whole**2, math.exp(uniform(math.log(3 / 4), math.log(4 / 3)))
            height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if height <= whole and width <= whole:
                top, left = int(uniform(0, whole - height + 1)), int(uniform(0, whole - width + 1))
                break
        part = x[None, :, top : top + height, left : left + width]
        return F.interpolate(part, (size, size), mode="bilinear", align_corners=False, antialias=True)[0]

    def jitter(x: Tensor) -> Tensor:
        for index in torch.randperm(4, generator=generator).tolist():
            factor = uniform(0.6, 1.4)
            if index == 0:
                x = (x * factor).clamp(0, 1)
            elif index == 1:
                x = (factor * x + (1 - factor) * luma(x).mean()).clamp(0, 1)
            elif index == 2:
                x = (factor * x + (1 - factor) * luma(x)).clamp(0, 1)
            else:
                x = adjust_hue_(x[None].clone(), torch.tensor([uniform(-0.4, 0.4)]))[0]
        return x

    def blur(x: Tensor) -> Tensor:
        half = kernel // 2
        weight = torch.exp(-0.5 * ((torch.arange(kernel) - half) / uniform(0.1, 2.0)) ** 2)
        weight = (weight / weight.sum()).expand(x.shape[0], 1, 1, -1)
        y = F.pad(x[None], (half, half, half, half), mode="reflect")
        return F.conv2d(F.conv2d(y, weight, groups=len(x)), weight.mT, groups=len(x))[0]

    def one(x: Tensor) -> Tensor:
        x = crop(x)
        if uniform(0, 1) < chances["flip"]:
            x = x.flip(-1)
        if uniform(0, 1) < chances["jitter"]:
            x = jitter(x)
        if uniform(0, 1) < chances["grey"]:
            x = luma(x).expand_as(x)
        if uniform(0, 1) < chances["blur"]:
            x = blur(x)
        return x

    return lambda images: torch.stack([one(image) for image in images])


def augmentation(batch: int, size: int, device: torch.device, rounds: int, results: Results) -> None:
    """Measure milliseconds per batch of every operation by every subject."""
    images = torch.rand(batch, 3, size, size, device=device)
    for name, chances in OPERATIONS.items():
        found: dict[str, Subject | None] = {"dipole": ours(chances), "kornia": kornias(chances, size)}
        if device.type == "cpu":
            found["plain loop"] = plain_loop(chances, size)
        calls = {key: (lambda run=run: run(images)) for key, run in found.items() if run is not None}
        row = interleaved(calls, rounds, device)
        results.add("augmentation", name, row | {"images/s": 1e3 * batch / row["dipole"]})


def texture(size: int) -> Tensor:
    """Return an image (1, 3, size, size) with edges, colours and smooth parts, which every operation changes."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(1, 3, 5, 5, generator=generator)
    smooth = F.interpolate(coarse, (size, size), mode="bicubic", align_corners=False).clamp(0, 1)
    return (0.8 * smooth + 0.2 * torch.rand(1, 3, size, size, generator=generator)).clamp(0, 1)


def describe(x: Tensor) -> dict[str, Tensor]:
    """Return statistics (n,) of single images (n, 3, H, W) that crop, flip, jitter, greyscale or blur change."""
    left, right = x.chunk(2, 3)
    return {
        "brightness": x.mean((1, 2, 3)),
        "contrast": x.std((1, 2, 3)),
        "colour": x.std(1).mean((1, 2)),
        "red share": x[:, 0].mean((1, 2)) / x.mean((1, 2, 3)).clamp_min(1e-6),
        "left against right": (left - right).mean((1, 2, 3)),
        "detail": x.diff(dim=3).abs().mean((1, 2, 3)),
    }


def distribution(size: int, calls: int, results: Results) -> None:
    """Test whether dipole's and kornia's images have the same distribution, for every operation.

    Takes `calls` batches of 32 images, since both draw the order of the jitter once per call. The p-value is the
    smallest over the statistics times their number.
    """
    images = texture(size).repeat(32, 1, 1, 1)
    for name, chances in OPERATIONS.items():
        torch.manual_seed(0)
        theirs = kornias(chances, size)
        if theirs is None:
            print("distribution: kornia is not installed")
            return
        first, second = (describe(torch.cat([run(images) for _ in range(calls)])) for run in (ours(chances), theirs))
        tests = [ks_2samp(first[key].numpy(), second[key].numpy()) for key in first]
        p = min(1.0, len(tests) * min(float(test.pvalue) for test in tests))
        distance = max(float(test.statistic) for test in tests)
        results.add("distribution", name, {"p": p, "distance": distance, "images": 32 * calls})


def simclr(
    name: str, *, batch: int, size: int, device: torch.device, bf16: bool, compiles: bool
) -> dict[str, Callable[[], None]]:
    """Return an encoder's forward and backward pass on 2 x `batch` images, and a SimCLR step of `batch` images."""
    config = EncoderConfig(name=name)
    encoder = build_encoder(config, 3, size).to(device)
    width = encoder.taps[encoder.last]
    projector, _ = build_projector(config, width)
    projector.to(device)
    memory = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    encoder.to(memory_format=memory)
    if compiles:
        encoder.compile()
    augment, generator = Augmentation(AugmentConfig()), torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, device=device)
    loss_of = objective("infonce(temperature=0.5)")
    parameters = [*encoder.parameters(), *projector.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.9, fused=True)
    ready = torch.rand(2 * batch, 3, size, size, device=device).contiguous(memory_format=memory)
    weight = torch.rand(2 * batch, width, device=device)
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=bf16)

    def alone() -> None:
        with mixed:
            features = encoder(ready)
        (features.float() * weight).sum().backward()
        encoder.zero_grad()

    def step() -> None:
        views = torch.cat([augment(images, generator) for _ in range(2)]).contiguous(memory_format=memory)
        with mixed:
            z = projector(encoder(views))
        loss_of(Pairs.from_views(list(z.float().chunk(2)))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"encoder": alone, "step": step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default all)")
    parser.add_argument("--encoders", nargs="+", default=["small-conv", "alexnet", "resnet18"], help="of the step")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=60, help="batches of every operation in the distribution tests")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="the step in bfloat16 (autocast)")
    parser.add_argument("--compile", action="store_true", help="compile the encoder")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    options: Any = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    setting = {name: getattr(options, name) for name in ("device", "batch", "size", "bf16", "compile")}
    results = Results(options.out, setting | {"torch": torch.__version__, "unit": "milliseconds"})
    if "augmentation" in options.parts:
        augmentation(options.batch, options.size, device, options.rounds, results)
    if "distribution" in options.parts:
        distribution(options.size, options.calls, results)
    for name in options.encoders if "step" in options.parts else ():
        calls = simclr(
            name, batch=options.batch, size=options.size, device=device, bf16=options.bf16, compiles=options.compile
        )
        row = interleaved(calls, max(3, options.rounds // 3), device)
        results.add("step", name, row | {"ratio": row["step"] / row["encoder"]})


if __name__ == "__main__":
    main()
