"""No sentence encoder reads back from the device what it computes: a whole step on meta tensors."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dipole import objective
from dipole.core.ground.seeding import Seeds
from dipole.text.adapter import TextAdapter
from dipole.text.config import TextSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from device_reads import META, no_reads


@pytest.mark.parametrize(
    "settings",
    [
        {"encoder": "bow"},
        {"encoder": "bow", "sides": 1, "window": 2, "self_logit": "zero", "dropout": 0.1},
        {"encoder": "bow", "pairs": "blocks", "block_size": 2},
        {"encoder": "transformer", "layers": 1, "heads": 2},
        {"encoder": "transformer", "layers": 1, "heads": 2, "pooling": "cls"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_an_encoder_reads_nothing_back(settings: dict, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [
        {"id": str(n), "sentences": [" ".join(draw.choice(list("abcdefg"), size=3 + k % 3)) + " ." for k in range(9)]}
        for n in range(6)
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {"corpus": str(tmp_path / "corpus.jsonl"), "hidden_size": 8, "word_size": 6, "held_out": 0.2} | settings
    adapter = TextAdapter(
        TextSettings(**values), seed=Seeds(0), device=torch.device("cpu"), workdir=tmp_path, batch_size=12
    )
    found = next(iter(adapter.batches(0)))
    adapter.module.to(META).train()
    batch = replace(found, batch=found.batch.to(META), document=found.document.to(META), index=found.index.to(META))
    for text in ("quickthoughts", "infonce + dp", "blocks", "tuple" if "pairs" in settings else "hcl"):
        with no_reads():
            objective(text)(adapter.embed(batch)).loss.backward()
            adapter.before_step()
