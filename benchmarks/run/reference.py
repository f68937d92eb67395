"""Estimate the time of a new run from a table of short runs on named machines and the speed of this machine.

`python -m dipole.benchmarks.run.measure_times` writes the table `times.json`. The time of a run similar to one in the
table follows from its startup and its time per epoch or step. The time of other runs follows from their operations
(`work.py`) and the seconds per billion operations of the nearest encoder.
"""

import hashlib
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any

from dipole.benchmarks.claims.protocol import leaves
from dipole.benchmarks.run.work import Work, work_of
from dipole.core.train.config import RunConfig
from dipole.core.utils.cache import kept_json
from dipole.core.utils.process import boot

TABLE = Path(__file__).with_name("times.json")
TRIES = 5
START = 5.0
"""Seconds until a new process trains: the interpreter, PyTorch and the recipe. Not part of a run's recorded time."""
# Settings that do not influence the time of a unit, or that the estimate treats separately.
LEFT_OUT = ("name", "description", "seed", "train.epochs", "train.steps", "train.checkpoint_every", "train.log_every")
# The settings with most influence, and their weights. Any other setting counts 1.
WEIGHTS = {
    "domain": 1000.0, "vision.encoder.name": 30.0, "vision.data.source": 20.0, "vision.augment.size": 20.0,
    "vision.method": 5.0, "vision.views": 5.0, "text.encoder": 30.0, "text.corpus": 20.0, "rl.task": 2.0,
    "rl.preset": 20.0, "rl.image_size": 20.0, "train.batch_size": 2.0,
}  # fmt: skip
FAR = 20.0  # runs at this distance are not similar
ALIKE, COUNTED, FOREIGN = 2.0, 3.0, 6.0
"""Accuracy as a factor: of a run similar to one in the table, of one whose encoder is there, of any other."""


@dataclass(frozen=True)
class Reckoned:
    """Seconds of a run, and the factor by which they may be wrong either way."""

    seconds: float
    within: float


def reckon(config: RunConfig) -> Reckoned:
    """Estimate the seconds of a run on this machine from the nearest run of the table."""
    kind, unit = kind_of(config), "step"
    if config.train.epochs is not None:
        unit = "epoch"
    runs = [entry for entry in table()["runs"] if entry["unit"] == unit] or table()["runs"]
    distances = [
        sum(WEIGHTS.get(key, 1.0) for key in kind.keys() | other.keys() if kind.get(key) != other.get(key))
        for other in (entry["kind"] for entry in runs)
    ]
    distance, within = min(distances), ALIKE
    if distance >= FAR:
        within = FOREIGN
        if (work := work_of(config)) is not None:
            return _by_work(work)
    nearest = runs[distances.index(distance)]
    length = float(config.train.epochs or config.train.steps or 1)
    rows = _ratio(kind, nearest["kind"], "vision.views")
    if unit == "step":  # an epoch has the same rows in any batch
        rows *= _ratio(kind, nearest["kind"], "train.batch_size")
    seconds = nearest["fixed"] + length * nearest["per_unit"] * rows
    return Reckoned(seconds * calibration() / nearest["pace"], within)


def _by_work(work: Work) -> Reckoned:
    """Estimate from operations, at the rate of the encoder nearest in kind, then in operations of a row."""
    domain = work.family.partition("/")[0]

    def distance(entry: Mapping[str, Any]) -> tuple[bool, bool, float]:
        family = entry["family"]
        return family != work.family, family.partition("/")[0] != domain, abs(log(work.flops / entry["flops"]))

    nearest = min(table()["steps"], key=distance)
    rate = nearest["per_gigaflop"] / 1e9
    training = work.steps * (nearest["per_step"] + work.rows * work.flops * rate)
    # The evaluation encodes the rows once, forward. Training two views costs six times that.
    seconds = training + work.seen * work.flops * rate / 6
    within = FOREIGN
    if nearest["family"] == work.family:
        within = COUNTED
    return Reckoned(seconds * calibration() / nearest["pace"], within)


def kind_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings on which the time of an epoch or step depends."""
    found = {key: value for key, value in leaves(config).items() if value is not None and key not in LEFT_OUT}
    return {key: value for key, value in found.items() if not key.startswith("objective")}


@cache
def table() -> Mapping[str, Any]:
    """Return short runs by kind and steps by encoder, each with its machine, date and machine speed."""
    found: Mapping[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def calibration() -> float:
    """Return the processor seconds of a fixed task on this machine. It is measured once per boot, in under 2 s."""
    import torch

    begun = boot() or f"{time.time() - time.monotonic():.0f}"[:-2]
    identity = hashlib.sha256(f"{begun} {torch.__version__} {platform.node()}".encode()).hexdigest()[:16]
    return float(kept_json("pace", identity, measure_pace))


def basis() -> str:
    """Return the basis of an estimated time."""
    entries = [*table()["runs"], *table()["steps"]]
    machines = (
        f"{', '.join(sorted({entry['machine'] for entry in entries}))}, {max(entry['date'] for entry in entries)}"
    )
    return (
        f"by short runs on {machines}, times {calibration() / table()['steps'][0]['pace']:.2g} for the pace of this "
        "machine's processor, idle; a GPU is faster, a machine that is shared slower. Earlier runs of the folder come "
        "first."
    )


def measure_pace() -> float:
    """Time convolutions, a matrix product and many small operations, forward and backward. Return the best try."""
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


def _ratio(kind: Mapping[str, Any], other: Mapping[str, Any], key: str) -> float:
    if not kind.get(key) or not other.get(key):
        return 1.0
    return float(kind[key]) / float(other[key])
