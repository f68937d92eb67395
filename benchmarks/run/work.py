"""Count the work of a run: optimizer steps, rows of a step, and floating-point operations of a row.

Networks on the meta device are counted, so a run of weeks is counted in a second. Data are not read, except for their
sizes.
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

COUNTED = 4  # images, or blocks of images, in the counted batch
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
class Work:
    """The work of a run."""

    family: str  # domain and encoder
    steps: float  # optimizer steps of the whole run
    rows: int  # of a step
    flops: float  # operations of a row with all its views, forward and backward
    seen: int = 0  # rows that the evaluation encodes


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
    count = COUNTED * (settings.block_positives + 1)
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
            encoder(torch.empty(COUNTED, channels, seen, seen))
    return Work("rl/pixels", _steps(config, 1) / repeat, rows, PASSES * counter.get_total_flops() / COUNTED)


def _steps(config: RunConfig, units: float) -> float:
    train = config.train
    if train.epochs is not None:
        return float(train.epochs) * units
    return float(train.steps or 1)
