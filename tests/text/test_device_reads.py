"""No sentence encoder reads back from the device what it computes: a whole step on meta tensors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from dipole import objective
from dipole.text.adapter import TextAdapter
from dipole.text.encoders.networks import takes_whole_mask
from tests.device_reads import META, no_cuda_waits, no_reads
from tests.text.made import text_adapter, write_rows

SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {"encoder": "bow"},
        {"encoder": "bow", "sides": 1, "window": 2, "self_logit": "zero", "dropout": 0.1},
        {"encoder": "bow", "pairs": "blocks", "block_size": 2},
        {"encoder": "transformer", "layers": 1, "heads": 2},
        {"encoder": "transformer", "layers": 1, "heads": 2, "pooling": "cls"},
        {"encoder": "bow", "pairs": "views", "dropout": 0.1},
        {"encoder": "bow", "pairs": "columns", "dropout": 0.1},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)


def adapter_on(device: torch.device, settings: dict, tmp_path: Path) -> TextAdapter:
    draw = np.random.default_rng(0)
    sentences = [[" ".join(draw.choice(list("abcdefg"), size=3 + k % 3)) + " ." for k in range(9)] for _ in range(6)]
    rows = [{"id": str(n), "sentences": each} for n, each in enumerate(sentences)]
    if settings.get("pairs") == "columns":
        rows = [{"query": f"a{k}", "pos": f"b{k}", "neg": [f"c{k}"] * (k % 3)} for k in range(40)]
    corpus = write_rows(tmp_path / "corpus.jsonl", rows)
    values = {"corpus": corpus, "hidden_size": 8, "word_size": 6, "held_out": 0.2} | settings
    return text_adapter(values, 12, device=device, workdir=tmp_path)


@SETTINGS
def test_an_encoder_reads_nothing_back(settings, tmp_path):
    adapter = adapter_on(torch.device("cpu"), settings, tmp_path)
    found = next(iter(adapter.batches(0)))
    adapter.module.to(META).train()
    batch = replace(found, batch=found.batch.to(META), document=found.document.to(META), index=found.index.to(META))
    if found.masks is not None:
        batch = replace(batch, masks=found.masks.to(META))
    if found.partners is not None:
        there = {name: getattr(found.partners, name).to(META) for name in ("batch", "place", "absent")}
        batch = replace(batch, partners=replace(found.partners, **there))
    for text in ("quickthoughts", "infonce + dp", "blocks", "tuple" if settings.get("pairs") == "blocks" else "hcl"):
        with no_reads():
            objective(text)(adapter.embed(batch)).loss.backward()
            adapter.before_step()


@pytest.mark.parametrize(("name", "more", "is_whole"), [
    ("BertConfig", {}, True), ("RobertaConfig", {}, True), ("DistilBertConfig", {"dim": 16, "n_heads": 2}, True),
    ("BertConfig", {"is_decoder": True}, False), ("GPT2Config", {"n_embd": 16, "n_head": 2}, False),
    ("LlamaConfig", {}, False), ("ModernBertConfig", {"local_attention": 2, "pad_token_id": 0}, False),
])  # fmt: skip
def test_a_mask_of_whole_rows_attends_to_the_same_tokens(name, more, is_whole):
    """What a GPU is given instead of one row for each sentence. Decoders and sliding windows have their own mask."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.AutoModel.from_config(getattr(transformers, name)(vocab_size=30, **{**sizes, **more})).eval()
    ids = torch.randint(3, 30, (3, 9))
    mask = torch.arange(9) < torch.tensor([9, 4, 2])[:, None]
    whole = model(input_ids=ids, attention_mask=mask[:, None, None, :].expand(-1, 1, 9, -1)).last_hidden_state
    by_row = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    assert takes_whole_mask(model.config) is is_whole is torch.allclose(whole[mask], by_row[mask], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@SETTINGS
def test_a_step_on_a_gpu_waits_for_nothing(settings, tmp_path):
    device = torch.device("cuda")
    adapter = adapter_on(device, settings, tmp_path)
    adapter.module.to(device).train()
    term = objective("quickthoughts")
    batches = list(adapter.batches(0))
    term(adapter.embed(batches[0])).loss.backward()
    with no_cuda_waits():
        term(adapter.embed(batches[1])).loss.backward()
        adapter.before_step()
