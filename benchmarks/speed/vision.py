"""Images per second of the augmentation alone and of a SimCLR step.

    python -m dipole.benchmarks.speed.vision [--parts augmentation step] [--batch 256] [--size 32]
        [--encoders small-conv alexnet resnet18] [--rounds 9] [--device cuda --bf16 --compile] [--out FILE]

The augmentation is compared with kornia's if it is installed, with own parameters for each image. Float32, one thread
and processor time on a processor, wall time on a GPU. Rounds of the subjects alternate, and the median counts. The step
is compared with the encoder's own forward and backward pass on as many images. From 96 pixels on ResNets have the stem
of ImageNet.
"""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dipole import Pairs, objective
from dipole.benchmarks.speed.timing import Results, interleaved
from dipole.vision.augment import Augmentation, AugmentConfig
from dipole.vision.encoders import EncoderConfig, build_encoder, build_projector

PARTS = ("augmentation", "step")
# All operations crop. Other operations are off.
OPERATIONS: dict[str, dict[str, float]] = {
    "crop": {},
    "crop and flip": {"flip": 0.5},
    "crop, flip, jitter, grey": {"flip": 0.5, "jitter": 1.0, "grey": 0.2},
    "all": {"flip": 0.5, "jitter": 1.0, "grey": 0.2, "blur": 0.5},
}
OFF = {"flip": 0.0, "jitter": 0.0, "grey": 0.0, "blur": 0.0}


def kornias(chances: dict[str, float], size: int) -> torch.nn.Module:
    import kornia.augmentation as K

    kernel = AugmentConfig().kernel(size)
    steps = [
        K.RandomResizedCrop((size, size), (0.2, 1.0), align_corners=False),
        K.RandomHorizontalFlip(p=chances["flip"]),
        K.ColorJitter(0.4, 0.4, 0.4, 0.4, p=chances["jitter"]),
        K.RandomGrayscale(p=chances["grey"]),
        K.RandomGaussianBlur((kernel, kernel), (0.1, 2.0), p=chances["blur"]),
    ]
    return torch.nn.Sequential(*[step for step in steps if step.p > 0])


def augmentation(batch: int, size: int, device: torch.device, rounds: int, results: Results) -> None:
    """Measure milliseconds per batch of every operation by dipole and by kornia."""
    images, generator = torch.rand(batch, 3, size, size, device=device), torch.Generator().manual_seed(0)
    for name, chances in OPERATIONS.items():
        ours = Augmentation(AugmentConfig(**(OFF | chances)))
        calls: dict[str, Callable[[], Any]] = {"dipole": lambda ours=ours: ours(images, generator)}
        if find_spec("kornia"):
            theirs = kornias(OFF | chances, size)
            calls["kornia"] = lambda theirs=theirs: theirs(images)
        row = interleaved(calls, rounds, device)
        results.add("augmentation", name, row | {"images/s": 1e3 * batch / row["dipole"]})


def simclr(
    name: str, *, batch: int, size: int, device: torch.device, bf16: bool, compiles: bool
) -> dict[str, Callable[[], None]]:
    """Return an encoder's forward and backward pass on 2 x `batch` images, and a SimCLR step of `batch` images."""
    config = EncoderConfig(name=name, stem="imagenet" if size >= 96 else "cifar")
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
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--bf16", action="store_true", help="the step in bfloat16 (autocast)")
    parser.add_argument("--compile", action="store_true", help="compile the encoder")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    options = parser.parse_args()
    batch, size, device = options.batch, options.size, options.device
    if device.type == "cpu":
        torch.set_num_threads(1)
    setting = {"device": str(device), "batch": batch, "size": size, "bf16": options.bf16, "compile": options.compile}
    results = Results(options.out, setting | {"torch": torch.__version__, "unit": "milliseconds"})
    if "augmentation" in options.parts:
        augmentation(batch, size, device, options.rounds, results)
    for name in options.encoders if "step" in options.parts else ():
        calls = simclr(name, batch=batch, size=size, device=device, bf16=options.bf16, compiles=options.compile)
        row = interleaved(calls, max(3, options.rounds // 3), device)
        results.add("step", name, row | {"ratio": row["step"] / row["encoder"]})


if __name__ == "__main__":
    main()
