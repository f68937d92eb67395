"""Estimate the time of a new run from a table of short runs on named machines and the speed of this machine.

`python -m dipole.benchmarks.run.measure_times` writes the table `times.json`. The time of a run similar to one in the
table follows from its startup and its time per epoch or step. The time of other runs follows from their operations
(`work_of`) and the seconds per billion operations of the nearest encoder. Networks on the meta device are counted, so a
run of weeks is counted in a second. Data are not read, except for their sizes.
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

import torch
from torch.utils.flop_counter import FlopCounterMode

from dipole.benchmarks.claims.protocol import leaves
from dipole.core.train.config import RunConfig
from dipole.core.utils.cache import kept_json
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.process import boot
from dipole.core.utils.progress import duration
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.version import __version__

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
BATCH = 4  # images, or blocks of images, in the counted batch
WORDS = 12  # words of a sentence, as the corpus is not read
PASSES = 10  # encoder passes per row of an agent's update: critics, targets, actor, and two views of the objective
SENTENCES = {
    "wiki3029.jsonl.gz": (3029, 200),
    "hub:bookcorpus/bookcorpus": (1, 74_000_000),
    "hub:stanfordnlp/imdb": (50_000, 11),
}
"""Documents of a corpus and sentences of each document: Wiki-3029 as `dipole data wiki3029` builds it, BookCorpus (Zhu
et al. 2015), and the unlabelled reviews of IMDb (Maas et al. 2011) in sentences of twenty words.
"""


@dataclass(frozen=True)
class Time:
    """Seconds of several runs, how many of them the reference table estimates, and within which factor."""

    seconds: float
    reckoned: int
    within: float

    def __str__(self) -> str:
        if self.within == 1.0:
            return duration(self.seconds)
        low, high = duration(self.seconds / self.within), duration(self.seconds * self.within)
        return f"{duration(self.seconds)} ({low} to {high})"


@dataclass(frozen=True)
class Work:
    family: str  # domain and encoder
    steps: float  # optimizer steps of the whole run
    rows: int  # of a step
    flops: float  # operations of a row with all its views, forward and backward
    seen: int = 0  # rows that the evaluation encodes


def reckon(config: RunConfig) -> Time:
    """Estimate the seconds of a run on this machine from the nearest run of the table."""
    kind, unit = kind_of(config), "step"
    if config.train.epochs is not None:
        unit = "epoch"
    runs = [entry for entry in table()["runs"] if entry["unit"] == unit] or table()["runs"]

    def distance(entry: Mapping[str, Any]) -> float:
        other = entry["kind"]
        return sum(WEIGHTS.get(key, 1.0) for key in kind.keys() | other.keys() if kind.get(key) != other.get(key))

    nearest, within = min(runs, key=distance), ALIKE
    if distance(nearest) >= FAR:
        within = FOREIGN
        if (work := work_of(config)) is not None:
            return _by_work(work)
    length = float(config.train.epochs or config.train.steps or 1)
    rows = _ratio(kind, nearest["kind"], "vision.views")
    if unit == "step":  # an epoch has the same rows in any batch
        rows *= _ratio(kind, nearest["kind"], "train.batch_size")
    seconds = nearest["fixed"] + length * nearest["per_unit"] * rows
    return Time(seconds * calibration() / nearest["pace"], 1, within)


def _by_work(work: Work) -> Time:
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
    return Time(seconds * calibration() / nearest["pace"], 1, within)


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
    begun = boot() or f"{time.time() - time.monotonic():.0f}"[:-2]
    identity = hashlib.sha256(f"{begun} {torch.__version__} {platform.node()}".encode()).hexdigest()[:16]
    return float(kept_json("pace", identity, measure_pace))


def basis() -> str:
    entries = [*table()["runs"], *table()["steps"]]
    machines, date = ", ".join(sorted({entry["machine"] for entry in entries})), max(entry["date"] for entry in entries)
    return (
        f"by short runs on {machines}, {date}, times {calibration() / table()['steps'][0]['pace']:.2g} for the pace of "
        "this machine's processor, idle; a GPU is faster, a machine that is shared slower. Earlier runs of the folder "
        "come first."
    )


def measure_pace() -> float:
    """Time convolutions, a matrix product and many small operations, forward and backward. Return the best try."""
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


def work_of(config: RunConfig) -> Work | None:
    """Return the work of a run, or None if it cannot be counted (another domain, or downloaded networks)."""
    count = {"vision": _vision, "text": _text, "rl": _agent}.get(config.domain)
    if count is None:
        return None
    try:
        return count(config)
    except (DipoleError, NotImplementedError, RuntimeError, KeyError, ValueError):
        return None


def _vision(config: RunConfig) -> Work:
    from dipole.vision.data import expected

    settings: Any = config.settings
    images = expected(settings.data, Seeds(0), settings.augment.size, looks=True)
    rows = config.train.batch_size
    order = settings.framework.order(settings, images, rows, 1, Seeds(0))
    units = max(len(order) // rows, 1)
    keys = {"method", "views", "encoder", "negatives", settings.method}
    sides = [view.size for view in settings.framework.augmentations(settings)]
    table = settings.model_dump(mode="json", include=keys) | {"sides": sides, "images": [*images.images.shape[1:]]}
    digest = hashlib.sha256(json.dumps([__version__, table], sort_keys=True, default=str).encode()).hexdigest()
    flops = kept_json("flops", digest[:16], lambda: _counted(settings, images))
    return Work(f"vision/{settings.encoder.name}", _steps(config, units), rows, flops, len(images))


def _counted(settings: Any, images: Any) -> float:
    """Return the operations of an image: all its views through their networks, forward and backward."""
    from dipole.vision.frameworks.base import Batch, Setup

    size = settings.augment.size or min(images.images.shape[-2:])
    count = BATCH * (settings.block_positives + 1)
    with torch.device("meta"):
        method = settings.framework.from_config(settings, Setup(images, size, count, settings.encoder))
        sides = [view.size or size for view in settings.framework.augmentations(settings)]
        views = [torch.empty(count, images.channels, side, side) for side in sides]
        batch = Batch(views, None, torch.arange(count), 0)
        with FlopCounterMode(display=False) as counter:
            rows = method.embed(batch).rows.values()
            sum(each.sum() for each in rows if each is not None and each.requires_grad).backward()
    return float(counter.get_total_flops()) / count


def _text(config: RunConfig) -> Work | None:
    settings: Any = config.settings
    if settings.transformer is not None or settings.tokenizer != "words":
        return None
    documents, each = SENTENCES.get(settings.corpus, (1, 30_000))
    unit = 1
    if settings.pairs == "blocks":
        unit = settings.block_size + 1
    if settings.block_count is not None:
        each = settings.block_count * unit
    found = documents * each
    rows = config.train.batch_size
    units = max((1 - settings.held_out) * min(found, settings.limit or found) / rows, 1.0)
    # A product with a weight takes two operations forward and four backward.
    flops = 6.0 * WORDS * _weights(settings)
    return Work(f"text/{settings.encoder}", _steps(config, units), rows, flops)


def _weights(settings: Any) -> int:
    """Return the number of weights applied to every word: all but the word embeddings."""
    from torch import nn

    from dipole.text.model import build_model

    words = settings.vocabulary_size + 1
    with torch.device("meta"):
        fixed = None
        if settings.channels != "trained":
            fixed = nn.Embedding(words, settings.word_size)
        module = build_model(settings, words, fixed)
    tables = {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    return max(sum(p.numel() for p in module.parameters() if id(p) not in tables), settings.word_size)


def _agent(config: RunConfig) -> Work:
    import gymnasium
    import numpy as np

    from dipole.rl.envs.registry import find
    from dipole.rl.networks import PixelEncoder

    settings: Any = config.settings
    task = find(settings.task)
    rendered, rows = settings.size or task.default("size"), config.train.batch_size
    repeat = settings.action_repeat or task.default("action_repeat") or 1
    if rendered is None:
        return Work("rl/states", _steps(config, 1) / repeat, rows, 6.0 * sum(settings.hidden) ** 2)
    channels = 3 * settings.frame_stack
    seen = settings.image_size or round(0.84 * rendered)
    with torch.device("meta"):
        box = gymnasium.spaces.Box(0, 255, (channels, rendered, rendered), np.uint8)
        encoder = PixelEncoder(box, settings.features, seen, settings.layers, settings.filters)
        with FlopCounterMode(display=False) as counter:
            encoder(torch.empty(BATCH, channels, seen, seen))
    return Work("rl/pixels", _steps(config, 1) / repeat, rows, PASSES * counter.get_total_flops() / BATCH)


def _steps(config: RunConfig, units: float) -> float:
    train = config.train
    if train.epochs is not None:
        return float(train.epochs) * units
    return float(train.steps or 1)
