"""Shared by the text tests: adapters, files of rows, small transformers, and text that tokenizers disagree on."""

import json
import random
from pathlib import Path

import torch

from dipole.core.utils.seeding import Seeds
from dipole.text.adapter import TextAdapter
from dipole.text.config import TextSettings

CPU = torch.device("cpu")
TINY_BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def text_adapter(settings, batch_size=8, seed=0, **context):
    """An adapter of a [text] table, whose networks are drawn by a seed."""
    torch.default_generator.manual_seed(seed)
    config = settings if isinstance(settings, TextSettings) else TextSettings(**settings)
    return TextAdapter(config, seed=Seeds(seed), batch_size=batch_size, **{"device": CPU, "workdir": Path(), **context})


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_bert(folder, vocab_size=40, **more):
    """Write a small BERT as transformers does."""
    from transformers import BertConfig, BertModel

    torch.default_generator.manual_seed(0)
    BertModel(BertConfig(**{"vocab_size": vocab_size, **TINY_BERT, **more})).save_pretrained(folder)
    return folder


ODD_WORDS = (
    "The the cat can't n't 1,000.5 <unk> <unk>a <UNK> -- ... self-made <unk><unk> . Mr. etc. end. Then? na\u00efve "
    "e\u0301 in\u00adter \ufeffA x\u00b2 \u65e5\u672c \u1112\u1161 \u03a3\u0391\u03a3 \u0130 \u2019s it\u2019s \u200b "
    "\u24b6 u\u0308. _a\u203fb \U0001f600 \ufb01"
)


def text_of(seed: int, words: int) -> str:
    draw = random.Random(seed)
    odd = ODD_WORDS.split()
    blanks = [" ", " ", " ", "\n", ". ", "\n\n", "\n \n"]
    return "".join(draw.choice(odd) + draw.choice(blanks) for _ in range(words))
