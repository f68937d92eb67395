"""Count the work of a run: optimizer steps, rows of a step, and floating-point operations of a row.

Counted on networks without memory, so that a run of weeks is counted in a second. Of data nothing is read but
sizes, where a file tells them.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from dipole.core.train.config import RunConfig
from dipole.core.utils.cache import kept_json
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.version import __version__

COUNTED = 4  # images, or blocks of them, of the batch that is counted
WORDS = 12  # of a sentence of a corpus that is not read
PASSES = 10  # of the encoder for a row of an agent's update: critics, targets, actor, and two views of the contrast
SENTENCES = {
    "wiki3029.jsonl.gz": (3029, 200),
    "hub:bookcorpus/bookcorpus": (1, 74_000_000),
    "hub:stanfordnlp/imdb": (50_000, 11),
}
"""Documents of a corpus and sentences of each: of Wiki-3029 as `dipole data wiki3029` builds it, of BookCorpus as it is
published (Zhu et al. 2015), of the unlabelled reviews of IMDb (Maas et al. 2011) in sentences of twenty words.
"""


@dataclass(frozen=True)
class Work:
    """The work of a run.

    Args:
        family: what is computed alike: domain and encoder.
        steps: of the optimizer, over the whole run.
        rows: of a step.
        flops: of a row, forward and back, all its views.
        units: steps of an epoch, or 1 if the run's length is given in steps.
        seen: rows that are encoded, once forward, when the run is evaluated.
    """

    family: str
    steps: float
    rows: int
    flops: float
    units: float = 1.0
    seen: int = 0


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
    return Work(f"vision/{settings.encoder.name}", _steps(config, units), rows, flops, units, len(images))


def _counted(settings: Any, images: Any) -> float:
    """Floating-point operations of an image: those of all its views through the networks that see them, and back."""
    from dipole.vision.frameworks.base import Batch, Setup

    size = settings.augment.size or min(images.images.shape[-2:])
    count = COUNTED * (settings.framework.block_positives(settings) + 1)
    with torch.device("meta"):
        method = settings.framework.from_config(settings, Setup(images, size, count, settings.encoder))
        sides = [view.size or size for view in settings.framework.augmentations(settings)]
        views = [torch.empty(count, images.channels, side, side) for side in sides]
        batch = Batch(views, None, torch.arange(count), 0)
        with FlopCounterMode(display=False) as counter:
            rows = method(batch).rows.values()
            sum(each.sum() for each in rows if each is not None and each.requires_grad).backward()
    return float(counter.get_total_flops()) / count


def _text(config: RunConfig) -> Work | None:
    settings: Any = config.settings
    if settings.transformer is not None or settings.tokenizer != "words":
        return None
    documents, each = SENTENCES.get(settings.corpus, (1, 30_000))
    unit = settings.block_size + 1 if settings.pairs == "blocks" else 1
    found = documents * each if settings.block_count is None else documents * settings.block_count * unit
    rows = config.train.batch_size
    units = max((1 - settings.held_out) * min(found, settings.limit or found) / rows, 1.0)
    # A product with a weight is two operations, and twice that on the way back.
    flops = 6.0 * WORDS * _weights(settings)
    return Work(f"text/{settings.encoder}", _steps(config, units), rows, flops, units)


def _weights(settings: Any) -> int:
    """Weights that every word meets: all but the table of words."""
    from torch import nn

    from dipole.text.model import build_model

    words = settings.vocabulary_size + 1
    with torch.device("meta"):
        fixed = None if settings.channels == "trained" else nn.Embedding(words, settings.word_size)
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
            encoder(torch.empty(COUNTED, channels, seen, seen))
    return Work("rl/pixels", _steps(config, 1) / repeat, rows, PASSES * counter.get_total_flops() / COUNTED)


def _steps(config: RunConfig, units: float) -> float:
    train = config.train
    return float(train.epochs) * units if train.epochs is not None else float(train.steps or 1)
