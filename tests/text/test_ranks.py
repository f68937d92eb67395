"""Windows and blocks on one, two and three processes: loss and every gradient are those of one process."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dipole
from dipole.core.objectives import gather
from dipole.core.train.config import TrainConfig
from dipole.core.train.memory_saving import PatchedEncoders
from tests.ranks import from_ranks
from tests.text.made import text_adapter, write_bert

# Batches of 14 sentences (7 blocks of 2, a sentence and its positive) are cut unequally by three.
CASES = {
    "window 1, zero": ({"window": 1, "self_logit": "zero"}, "quickthoughts + 0.1*dp"),
    "window 1, drop": ({"window": 1, "self_logit": "drop"}, "infonce"),
    "window 2, zero": ({"window": 2, "self_logit": "zero"}, "dcl"),
    "window 2, drop": ({"window": 2, "self_logit": "drop"}, "cacr(t_pos=1.0, t_neg=2.0)"),
    "window, within f and within g": ({"window": 1, "self_logit": "zero"}, "align_uniform"),
    "blocks": ({"pairs": "blocks", "block_size": 1}, "blocks"),
    "drawn blocks": ({"pairs": "blocks", "block_size": 1}, "blocks(k=4)"),
    "drawn random blocks": ({"pairs": "blocks", "blocks": "random", "block_size": 1}, "blocks(k=2, loss=hinge)"),
    "pairs in blocks": ({"pairs": "blocks", "block_size": 1}, "infonce + 0.1*dp"),
    "views": ({"pairs": "views", "dropout": 0.2}, "infonce(temperature=0.05) + 0.1*dp"),
    "columns": ({"pairs": "columns"}, "infonce(temperature=0.05) + 0.1*dp"),
    "columns, two encoders": ({"pairs": "columns", "sides": 2, "dropout": 0.2}, "dcl"),
}
BATCH = 14


def measured(corpus, rank=0, world_size=1, microbatch=None, cases=None, **other):
    """Loss and the gradients of all parameters, as DistributedDataParallel averages them, for every case."""
    found = {}
    for name, (settings, spec) in (cases or CASES).items():
        place = {"corpus": f"{corpus}/books", "unit": "sentences"}
        if settings.get("pairs") == "columns":
            place = {"corpus": f"{corpus}/pairs.csv"}
        base = {**place, "encoder": "gru", "hidden_size": 6, "word_size": 5, "held_out": 0.0}
        adapter = text_adapter({**base, **settings, **other}, BATCH, rank=rank, world_size=world_size)
        adapter.module.double()
        loss = dipole.objective(spec, dim=adapter.embedding_dim).double()
        encoding = PatchedEncoders(adapter.encoders(), TrainConfig(steps=1, microbatch=microbatch), compiles=False)
        torch.manual_seed(1)
        with encoding():
            embedded = adapter.embed(next(adapter.batches(0)))
        value = loss(embedded).loss
        value.backward()
        parameters = [p for p in (*adapter.module.parameters(), *loss.parameters()) if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        value = value.detach()
        if world_size > 1:
            for each in (value, *gradients):
                dist.all_reduce(each)
                each /= world_size
        found[name] = value, gradients
    return found


def on_a_rank(rank, world_size, corpus):
    """The cases, some of them with the negative control or divided into microbatches."""
    found = measured(corpus, rank, world_size)
    right = gather.gather_rows

    def wrong(x, sizes):
        """Other ranks' rows carry no gradient."""
        rows = right(x, sizes).detach().clone()
        start = sum(sizes[:rank])
        rows[start : start + sizes[rank]] = x
        return rows

    gather.gather_rows = wrong
    cut = measured(corpus, rank, world_size, cases={name: CASES[name] for name in list(CASES)[::4]})
    gather.gather_rows = right
    return found, cut, measured(corpus, rank, world_size, microbatch=2)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request, corpus):
    return from_ranks(request.param, on_a_rank, request.param, corpus)[0]


def off(found, expected):
    """Largest difference of loss or gradient, by case."""
    return {
        name: max(float((a - b).abs().max()) for a, b in zip((value, *grads), (one, *others), strict=True))
        for name, (value, grads) in found.items()
        for one, others in [expected[name]]
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    draw = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "books").mkdir()
    for document in range(3):
        words = [f"word{i}" for i in range(4 * document, 4 * document + 6)]
        lines = [" ".join(draw.choice(words, size=draw.integers(2, 6))) for _ in range(9)]
        (folder / "books" / f"{document}.txt").write_text("\n".join(lines))
    rows = ["anchor,positive,negative_1,negative_2"]
    for row in range(20):  # rows have no, one or two negatives
        cells = [" ".join(draw.choice(words, size=draw.integers(2, 6))) + f" word{row}" for _ in range(2 + row % 3)]
        rows.append(",".join([*cells, "", ""][:4]))
    (folder / "pairs.csv").write_text("\n".join(rows))
    return str(folder)


@pytest.fixture(scope="module")
def single(corpus):
    torch.set_num_threads(1)
    return measured(corpus)


def test_ranks_with_and_without_microbatches_are_one_process(ranks, single):
    found = off(ranks[0], single)
    assert set(found) == set(CASES)
    assert max(found.values()) < 1e-9, found
    assert all(max(float(g.abs().max()) for g in gradients) > 1e-6 for _, gradients in single.values())
    assert max(off(ranks[2], single).values()) < 1e-9
    assert min(off(ranks[1], single).values()) > 1e-6


@pytest.mark.parametrize(("encoder", "size"), [("uni", 1), ("combine", 3), ("bow", 1), ("bow", 3), ("transformer", 3)])
def test_microbatches_are_the_undivided_batch(corpus, tmp_path, encoder, size):
    """Sentences of unequal length, with dropout of the sentence vectors, which is drawn for the batch."""
    settings = {"encoder": encoder} if encoder == "bow" else {"encoder": "gru", "direction": encoder}
    dropout = 0.2
    if encoder == "transformer":
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        path = write_bert(tmp_path, num_hidden_layers=2, **none) / "config.json"
        settings, dropout = {"encoder": "transformer", "transformer": str(path)}, 0.0
    # One of each kind of pairs. The ranks divide every case, with GRUs.
    names = ("window 1, zero", "blocks", "views", "columns, two encoders")
    cases = {name: CASES[name] for name in names if dropout or name != "views"}
    whole = measured(corpus, dropout=dropout, cases=cases, **settings)
    divided = measured(corpus, dropout=dropout, microbatch=size, cases=cases, **settings)
    assert max(off(divided, whole).values()) < 1e-12
