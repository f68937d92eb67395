"""Images per second of augmentation alone and of a whole SimCLR step.

    python -m dipole.benchmarks.speed.vision [--parts augmentation distribution step] [--batch 256] [--size 32]
        [--encoders small-conv alexnet resnet18] [--rounds 9] [--device cuda --bf16 --compile] [--out FILE]

Augmentation is compared, operation by operation and whole, with kornia's (if installed; parameters of its own for each
image) and with a plain loop over images in PyTorch. Float32, one thread on a processor, processor time there and wall
time on a GPU; rounds of the subjects alternate and the median counts. That both do the same is checked by
Kolmogorov-Smirnov tests of statistics of single images after many calls. The step is set beside the encoder's own
forward and backward pass on the same number of images. Results are written after every measurement, those of other
parts in the file stay.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import ks_2samp
from torch import Tensor

from dipole import objective
from dipole.core.objectives.pairs import Pairs
from dipole.vision import augment as A
from dipole.vision import image_ops as O
from dipole.vision.encoders import EncoderConfig, build_encoder, build_projector

Subject = Callable[[Tensor], Tensor]
OFF: dict[str, Any] = {
    "flip": 0.0,
    "jitter": 0.0,
    "grey": 0.0,
    "blur": 0.0,
    "crop_scale": (1.0, 1.0),
    "crop_ratio": (1.0, 1.0),
}
CROP = {"crop_scale": (0.2, 1.0), "crop_ratio": (3 / 4, 4 / 3)}
OPERATIONS: dict[str, dict[str, Any]] = {
    "crop": CROP,
    "crop and flip": {**CROP, "flip": 0.5},
    "jitter": {"jitter": 1.0},
    "blur": {"blur": 1.0},
    "crop, flip, jitter, grey": {**CROP, "flip": 0.5, "jitter": 1.0, "grey": 0.2},
    "all": {**CROP, "flip": 0.5, "jitter": 1.0, "grey": 0.2, "blur": 0.5},
}


def ours(settings: dict[str, Any]) -> Subject:
    """dipole with only these operations on."""
    config = A.AugmentConfig(**{**OFF, **settings})
    generator = torch.Generator().manual_seed(0)
    off = config.crop_scale == (1.0, 1.0)

    def run(images: Tensor) -> Tensor:
        parameters = A.Augmentation(config).draw(len(images), *images.shape[-2:], generator)
        if not off:
            return A.Augmentation(config).apply(images, parameters)
        # The crop is part of `apply`; without it the operation is called by itself, slice by slice as `apply` does.
        parameters = parameters.to(images.device)
        out = images.clone()
        step = A.slice_size(images, images.shape[-1])
        for start in range(0, len(images), step):
            part = slice(start, start + step)
            if config.jitter:
                A.color_jitter_(out[part], parameters[part])
            if config.blur:
                out[part] = O.gaussian_blur(out[part], parameters.sigma[part], config.kernel(images.shape[-1]))
        return out

    return run


def kornias(settings: dict[str, Any], size: int) -> Subject | None:
    """The same operations by kornia; None where it is not installed."""
    try:
        import kornia.augmentation as K
    except ImportError:
        return None
    steps: list[Any] = []
    if "crop_scale" in settings:
        steps.append(K.RandomResizedCrop((size, size), settings["crop_scale"], align_corners=False))
    if settings.get("flip"):
        steps.append(K.RandomHorizontalFlip(p=settings["flip"]))
    if settings.get("jitter"):
        steps.append(K.ColorJitter(0.4, 0.4, 0.4, 0.4))
    if settings.get("grey"):
        steps.append(K.RandomGrayscale(p=settings["grey"]))
    if settings.get("blur"):
        kernel = A.AugmentConfig().kernel(size)
        steps.append(K.RandomGaussianBlur((kernel, kernel), (0.1, 2.0), p=settings["blur"]))

    def run(images: Tensor) -> Tensor:
        for step in steps:
            images = step(images)
        return images

    return run


def plain_loop(settings: dict[str, Any], size: int) -> Subject:
    """One image at a time with PyTorch's own functions, as a data loader's worker does."""
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    def luma(x: Tensor) -> Tensor:
        return (x * x.new_tensor(O.LUMA)[:, None, None]).sum(0, keepdim=True)

    def crop(x: Tensor) -> Tensor:
        crop = A.Augmentation(A.AugmentConfig())
        box = crop.boxes(crop.draw_crops(1, generator), *x.shape[-2:])[0].int().tolist()
        top, left, height, width = box
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
                x = O.adjust_hue_(x[None].clone(), torch.tensor([uniform(-0.4, 0.4)]))[0]
        return x

    def blur(x: Tensor) -> Tensor:
        kernel = A.AugmentConfig().kernel(size)
        taps = torch.arange(kernel) - kernel // 2
        weight = torch.exp(-0.5 * (taps / uniform(0.1, 2.0)) ** 2)
        weight = (weight / weight.sum()).expand(x.shape[0], 1, 1, -1)
        half = kernel // 2
        y = F.pad(x[None], (half, half, half, half), mode="reflect")
        return F.conv2d(F.conv2d(y, weight, groups=len(x)), weight.mT, groups=len(x))[0]

    def one(x: Tensor) -> Tensor:
        if "crop_scale" in settings:
            x = crop(x)
        if settings.get("flip") and uniform(0, 1) < settings["flip"]:
            x = x.flip(-1)
        if settings.get("jitter"):
            x = jitter(x)
        if settings.get("grey") and uniform(0, 1) < settings["grey"]:
            x = luma(x).expand_as(x)
        if settings.get("blur") and uniform(0, 1) < settings["blur"]:
            x = blur(x)
        return x

    return lambda images: torch.stack([one(image) for image in images])


def clock(device: torch.device) -> float:
    """Processor time, or wall time once the GPU is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def medians(subjects: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, float]:
    """Median milliseconds of each subject; one warm-up, then alternating rounds."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds + 1):
        for name, run in subjects.items():
            start = clock(device)
            run()
            if number:
                times[name].append(1e3 * (clock(device) - start))
    return {name: statistics.median(values) for name, values in times.items()}


def augmentation(
    batch: int, size: int, device: torch.device, rounds: int, keep: Callable[[str, dict[str, float]], None]
) -> None:
    """Milliseconds per batch of every operation by every subject."""
    images = torch.rand(batch, 3, size, size, device=device)
    print(f"augmentation of {batch} images of {size} x {size}")
    print(f"  {'operation':22s} {'dipole':>12s}  {'images/s':>9s}  others: ms (times dipole)")
    for name, settings in OPERATIONS.items():
        found: dict[str, Subject | None] = {"dipole": ours(settings), "kornia": kornias(settings, size)}
        if device.type == "cpu":
            found["plain loop"] = plain_loop(settings, size)
        subjects = {key: (lambda run=run: run(images)) for key, run in found.items() if run is not None}
        row = medians(subjects, device, rounds)
        mine = row["dipole"]
        others = ", ".join(f"{key} {ms:.1f} ({ms / mine:.1f}x)" for key, ms in row.items() if key != "dipole")
        print(f"  {name:22s} {mine:9.2f} ms  {1e3 * batch / mine:9.0f}  {others}", flush=True)
        keep(name, row)


def texture(size: int) -> Tensor:
    """An image (1, 3, size, size) with edges, colours and smooth parts: every operation leaves a trace in it."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(1, 3, 5, 5, generator=generator)
    smooth = F.interpolate(coarse, (size, size), mode="bicubic", align_corners=False).clamp(0, 1)
    return (0.8 * smooth + 0.2 * torch.rand(1, 3, size, size, generator=generator)).clamp(0, 1)


def described(x: Tensor) -> dict[str, Tensor]:
    """Statistics (n,) of single images (n, 3, H, W) that crop, flip, jitter, greyscale or blur change."""
    left, right = x.chunk(2, 3)
    return {
        "brightness": x.mean((1, 2, 3)),
        "contrast": x.std((1, 2, 3)),
        "colour": x.std(1).mean((1, 2)),
        "red share": x[:, 0].mean((1, 2)) / x.mean((1, 2, 3)).clamp_min(1e-6),
        "left against right": (left - right).mean((1, 2, 3)),
        "detail": x.diff(dim=3).abs().mean((1, 2, 3)),
    }


def distribution(size: int, calls: int, keep: Callable[[str, dict[str, float]], None]) -> None:
    """Smallest Kolmogorov-Smirnov p-value over the statistics of dipole's and kornia's images, for every operation.

    `calls` batches of 32 each, since the order of the jitter is drawn once per call by both.
    """
    images = texture(size).repeat(32, 1, 1, 1)
    print("same distribution as kornia: Kolmogorov-Smirnov, least p over the statistics (times their number)")
    for name, settings in OPERATIONS.items():
        torch.manual_seed(0)
        theirs = kornias(settings, size)
        if theirs is None:
            print("  kornia is not installed")
            return
        a, b = (torch.cat([run(images) for _ in range(calls)]) for run in (ours(settings), theirs))
        first, second = described(a), described(b)
        tests = {key: ks_2samp(first[key].numpy(), second[key].numpy()) for key in first}
        p = min(1.0, min(float(test.pvalue) for test in tests.values()) * len(tests))
        largest = max(float(test.statistic) for test in tests.values())
        print(f"  {name:22s} p {p:.3f}, largest distance {largest:.4f} of {len(a)} images each", flush=True)
        keep(name, {"p": p, "distance": largest, "images": len(a)})


def simclr(
    name: str, *, batch: int, size: int, device: torch.device, bf16: bool, compiles: bool
) -> dict[str, Callable[[], None]]:
    """An encoder's forward and backward pass on 2 x `batch` images, and the whole SimCLR step of `batch` images."""
    config = EncoderConfig(name=name)
    encoder = build_encoder(config, 3, size).to(device)
    projector, _ = build_projector(config, encoder.taps[encoder.last])
    projector.to(device)
    if device.type == "cuda":
        encoder.to(memory_format=torch.channels_last)
    if compiles:
        encoder.compile()
    augment, generator = A.Augmentation(A.AugmentConfig()), torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, device=device)
    loss_of = objective("infonce(temperature=0.5)")
    parameters = [*encoder.parameters(), *projector.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.9, fused=True)
    memory = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    ready = torch.rand(2 * batch, 3, size, size, device=device).contiguous(memory_format=memory)
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    weight = torch.rand(2 * batch, encoder.taps[encoder.last], device=device)

    def alone() -> None:
        with mixed:
            features = encoder(ready)
        (features.float() * weight).sum().backward()
        encoder.zero_grad()

    def whole() -> None:
        views = torch.cat([augment(images, generator) for _ in range(2)]).contiguous(memory_format=memory)
        with mixed:
            z = projector(encoder(views))
        loss_of(Pairs.from_views(list(z.float().chunk(2)))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"encoder": alone, "step": whole}


def step(name: str, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Milliseconds of an encoder's forward and backward pass, and of a whole SimCLR step with two views."""
    subjects = simclr(
        name, batch=options.batch, size=options.size, device=device, bf16=options.bf16, compiles=options.compile
    )
    found = medians(subjects, device, max(3, options.rounds // 3))
    alone_ms, whole_ms = found["encoder"], found["step"]
    print(f"SimCLR step, {name}, 2 x {options.batch} views of {options.size} x {options.size}")
    print(
        f"  encoder forward + backward {alone_ms:.0f} ms, whole step {whole_ms:.0f} ms, {whole_ms / alone_ms:.3f} times"
    )
    share = 100 * (1 - alone_ms / whole_ms)
    print(f"  outside the encoder {share:.1f} %; {1e3 * options.batch / whole_ms:.0f} images/s", flush=True)
    return found


class Results:
    """The numbers so far; every new one is written at once."""

    def __init__(self, path: Path | None, setting: dict[str, Any]) -> None:
        self.path = path
        self.parts: dict[str, Any] = {}
        if path is not None and path.is_file():
            self.parts = json.loads(path.read_text(encoding="utf-8"))
        self.setting = setting

    def keep(self, part: str) -> Callable[[str, dict[str, float]], None]:
        """What writes the rows of a part; rows of other settings are dropped."""
        old = self.parts.get(part, {})
        rows = old.get("rows", {}) if old.get("setting") == self.setting else {}
        self.parts[part] = {"setting": self.setting, "date": date.today().isoformat(), "rows": rows}

        def write(name: str, row: dict[str, float]) -> None:
            rows[name] = {key: round(value, 4) for key, value in row.items()}
            if self.path is not None:
                self.path.write_text(json.dumps(self.parts, indent=1) + "\n", encoding="utf-8")

        return write


PARTS = ("augmentation", "distribution", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default all)")
    parser.add_argument("--encoders", nargs="+", default=["small-conv", "alexnet", "resnet18"], help="of the step")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=60, help="of every operation when distributions are compared")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="the step in bfloat16 (autocast)")
    parser.add_argument("--compile", action="store_true", help="compile the encoder")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    setting = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "processor time, one thread",
        "batch": options.batch,
        "size": options.size,
        "bf16": options.bf16,
        "compile": options.compile,
        "torch": torch.__version__,
    }
    results = Results(options.out, setting)
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    if "augmentation" in options.parts:
        augmentation(options.batch, options.size, device, options.rounds, results.keep("augmentation"))
    if "distribution" in options.parts:
        distribution(options.size, options.calls, results.keep("distribution"))
    if "step" in options.parts:
        keep = results.keep("step")
        for name in options.encoders:
            keep(name, step(name, options, device))


if __name__ == "__main__":
    main()
