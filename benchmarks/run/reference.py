"""How long a run takes that nobody has run yet: a table of short runs of a named machine, times the pace of this one.

`times.json` is made by `python -m dipole.benchmarks.run.measure_times`.
"""

import hashlib
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dipole.benchmarks.protocol import leaves
from dipole.core.ground.cache import kept_json
from dipole.core.train.config import RunConfig

TABLE = Path(__file__).with_name("times.json")
TRIES = 5
ROWS = {
    "digits": 1_078, "cifar10": 50_000, "cifar100": 50_000, "stl10": 100_000, "imagenet": 126_689,
    "wiki3029.jsonl.gz": 600_000, "hub:bookcorpus/bookcorpus": 74_000_000, "hub:stanfordnlp/imdb": 50_000,
}  # fmt: skip
"""Rows of an epoch of a data set; of ImageNet the 100 classes of CMC."""
# What says nothing of the time of a unit, or stands in the estimate by itself.
LEFT_OUT = ("name", "description", "seed", "train.epochs", "train.steps", "train.checkpoint_every", "train.log_every")
# What decides most about it, and how much a difference counts beside one of any other setting.
WEIGHTS = {
    "domain": 1000.0, "vision.encoder.name": 30.0, "vision.data.source": 10.0, "vision.augment.size": 20.0,
    "vision.method": 5.0, "vision.views": 5.0, "text.encoder": 30.0, "text.corpus": 20.0, "rl.task": 2.0,
    "rl.preset": 20.0, "rl.image_size": 20.0, "train.batch_size": 2.0,
}  # fmt: skip


@dataclass(frozen=True)
class Reckoned:
    """Seconds of a run, and the factor by which they may be off either way."""

    seconds: float
    within: float


def reckon(config: RunConfig) -> Reckoned:
    """Seconds of a run on this machine, from the nearest kind of the table."""
    kind, unit = kind_of(config), "epoch" if config.train.epochs is not None else "step"
    entries = [entry for entry in table()["entries"] if entry["unit"] == unit] or table()["entries"]
    distances = [_distance(kind, entry["kind"]) for entry in entries]
    distance = min(distances)
    nearest = entries[distances.index(distance)]
    length = float(config.train.epochs or config.train.steps or 1)
    # An agent's and a block's step is as long as its batch; an epoch has the same rows in any batch.
    rows = _ratio(kind, nearest["kind"], "train.batch_size") if unit == "step" else 1.0
    rows *= _ratio(kind, nearest["kind"], "vision.views")
    seconds = (nearest["fixed"] + length * nearest["per_unit"] * rows) * pace()
    within = 30.0 if distance >= 20 else 4.0 if "stand_in" in nearest else 2.0
    if unit == "epoch" and "stand_in" not in nearest:
        seconds *= rows_of(kind) / rows_of(nearest["kind"])
    return Reckoned(seconds, within)


def rows_of(kind: Mapping[str, Any]) -> int:
    """Rows of an epoch of a data set, as its authors have it; those that ship count alike."""
    return ROWS.get(str(kind.get("text.corpus") or kind.get("vision.data.source")), ROWS["digits"])


def kind_of(config: RunConfig) -> dict[str, Any]:
    """The settings that the time of a unit of length depends on."""
    found = leaves(config)
    return {
        key: value
        for key, value in found.items()
        if value is not None and key not in LEFT_OUT and not key.startswith("objective")
    }


@cache
def table() -> Mapping[str, Any]:
    """The machine, its pace, and seconds by kind."""
    found: Mapping[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def calibration() -> float:
    """Processor seconds of a fixed piece of work on this machine; measured once for each boot, in less than 2 s."""
    return float(kept_json("pace", _boot(), _measure))


def pace() -> float:
    """Seconds here for a second of the table's machine."""
    return calibration() / float(table()["pace"])


def machine_name() -> str:
    """The processor, for the table."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, one thread"


def _boot() -> str:
    import torch

    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = f"{time.time() - time.monotonic():.0f}"[:-2]
    return hashlib.sha256(f"{boot} {torch.__version__} {platform.node()}".encode()).hexdigest()[:16]


def _measure() -> float:
    """The best of a few tries at convolutions, a product of matrices and many small operations, forward and back."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(32, 16, 16, 16, generator=generator)
        kernel = torch.randn(32, 16, 3, 3, generator=generator, requires_grad=True)
        square = torch.randn(256, 256, generator=generator, requires_grad=True)
        found = []
        for _ in range(TRIES + 1):
            began = time.process_time()
            for _ in range(4):
                torch.nn.functional.conv2d(images, kernel, padding=1).relu().mean().backward()
                (square @ square).logsumexp(1).mean().backward()
                for _ in range(50):
                    kernel.detach().mul(0.9).sum()
            found.append(time.process_time() - began)
    finally:
        torch.set_num_threads(threads)
    return min(found[1:])


def _distance(kind: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    keys = kind.keys() | other.keys()
    return sum(WEIGHTS.get(key, 1.0) for key in keys if kind.get(key) != other.get(key))


def _ratio(kind: Mapping[str, Any], other: Mapping[str, Any], key: str) -> float:
    return float(kind[key]) / float(other[key]) if kind.get(key) and other.get(key) else 1.0
