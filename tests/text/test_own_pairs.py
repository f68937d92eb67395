"""Pairs given by the user: a sentence twice (SimCSE), and the columns of a table."""

import json

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset, DatasetDict
from torch.nn.functional import normalize
from transformers import MambaConfig

import dipole
from dipole.core.cli import main
from dipole.core.train.model import construct, load_run
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import RunInterruptedError
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import ConfigError, DataError
from dipole.text.adapter import TextAdapter
from dipole.text.config import TextSettings
from dipole.text.evaluation import find_positives, nearest_sentences, next_sentence
from dipole.text.pair_table import read_pairs
from tests.runs import assert_same_weights, interrupted, logged, refused, run_of
from tests.text.made import text_adapter, write_bert, write_rows

TAU = 0.05
BOOKS = [{"sentences": [f"the word{d} and word{d * i % 7} or word{i} ." for i in range(16)]} for d in range(6)]
ROWS = [
    {"query": f"what is a{i} b", "pos": f"it is a{i} c", "neg": [f"no{i} d", f"nor{i} e"][: i % 3]} for i in range(40)
]


@pytest.fixture
def table(tmp_path):
    return write_rows(tmp_path / "pairs.jsonl", ROWS)


def books(folder):
    return write_rows(folder / "books.jsonl", BOOKS)


def make(tmp_path, batch_size=8, rank=0, world_size=1, **settings):
    settings = {"corpus": books(tmp_path), "encoder": "bow", "word_size": 6, "hidden_size": 8} | settings
    return text_adapter(settings, batch_size, workdir=tmp_path, rank=rank, world_size=world_size)


VIEWS = {"pairs": "views", "dropout": 0.2}
BERT = {"encoder": "transformer", "layers": 1, "heads": 2}


@pytest.mark.parametrize("encoder", [{}, BERT])
def test_views_are_simcse(tmp_path, encoder):
    """Gao et al. 2021, Eq. 4: -log exp(sim(h_i, h'_i) / tau) / sum_j exp(sim(h_i, h'_j) / tau), in a float64 loop."""
    adapter = make(tmp_path, **VIEWS, **encoder)
    assert adapter.config.sides == 1
    torch.manual_seed(3)
    embedded = adapter.embed(next(adapter.batches(0)))
    h, g = (normalize(embedded.rows[name].detach().double(), dim=1) for name in ("first", "second"))
    assert (h != g).any(1).all()
    scores = torch.stack([torch.stack([h[i] @ g[j] for j in range(8)]) for i in range(8)]) / TAU
    expected = np.mean([float(torch.logsumexp(row, 0) - row[i]) for i, row in enumerate(scores)])
    assert dipole.objective(f"infonce(temperature={TAU})")(embedded).loss.item() == pytest.approx(expected, rel=1e-5)
    adapter.module.eval()
    embedded = adapter.embed(next(adapter.batches(0)))
    assert torch.allclose(embedded.rows["first"], embedded.rows["second"], atol=1e-6)


def test_masks_of_views_are_drawn_anew_and_every_sentence_is_taken_once(tmp_path):
    settings = VIEWS | {"word_size": 500, "batch_size": 16}
    first, second = list(make(tmp_path, **settings).batches(0))[:2]
    assert set(first.masks.unique().tolist()) == {0.0, 1.25}
    assert len({tuple(mask) for mask in first.masks.flatten(0, 1).tolist()}) == 32
    assert first.masks.mean().item() == pytest.approx(1, abs=0.02)
    assert not torch.equal(first.masks, second.masks)
    again = next(make(tmp_path, **settings).batches(0, 1))
    assert torch.equal(again.masks, second.masks)
    assert torch.equal(again.index, second.index)
    adapter = make(tmp_path, **VIEWS)
    seen = [torch.cat([batch.index for batch in adapter.batches(epoch)]).tolist() for epoch in range(2)]
    assert len(set(seen[0])) == len(seen[0]) == 8 * adapter.steps_per_epoch
    assert seen[0] != seen[1]
    ordered = make(tmp_path, **VIEWS, order="sequential")
    assert torch.cat([b.index for b in ordered.batches(1)]).tolist() == sorted(ordered.train_rows)[: len(seen[0])]


def test_views_without_dropout_are_refused(tmp_path):
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    own = {"encoder": "transformer", "transformer": str(write_bert(tmp_path / "none", 2000, **none) / "config.json")}
    refused(ConfigError, r"has no dropout.*Set text\.dropout", make, tmp_path, pairs="views", **own)
    MambaConfig(vocab_size=2000, hidden_size=8, num_hidden_layers=1, state_size=4).save_pretrained(tmp_path)
    mamba = own | {"transformer": str(tmp_path / "config.json")}
    refused(ConfigError, r"no layer for text\.dropout either", make, tmp_path, **VIEWS, **mamba)
    dropped = make(tmp_path, **VIEWS, **own)
    assert {m.p for m in dropped.module.modules() if isinstance(m, torch.nn.Dropout)} == {0.2}
    usual = str(write_bert(tmp_path / "own", 2000) / "config.json")
    kept = make(tmp_path, pairs="views", encoder="transformer", transformer=usual)
    assert {m.p for m in kept.module.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.filterwarnings("ignore:.*lack a negative")
def test_columns_are_the_softmax_over_positives_and_hard_negatives(table, tmp_path, sides):
    """SimCSE Eq. 5 with any number of negatives in a row, as MultipleNegativesRankingLoss sums them."""
    adapter = make(tmp_path, pairs="columns", corpus=table, sides=sides, no_duplicates=False, held_out=0.0)
    batch = next(adapter.batches(0))
    rows = [ROWS[i] for i in batch.index.tolist()]

    def vectors(texts, side):
        rows = np.array([adapter.data.table.texts.index(text) for text in texts])
        return normalize(adapter._probe().sides(rows)[side].double(), dim=1)

    asked = vectors([row["query"] for row in rows], 0)
    known = vectors([row["pos"] for row in rows] + [text for row in rows for text in row["neg"]], 1)
    scores = asked @ known.T / TAU
    expected = -(scores.log_softmax(1).diagonal()).mean().item()
    loss = dipole.objective(f"infonce(temperature={TAU})")(adapter.embed(batch)).loss
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert (adapter.module.g is None) == (sides == 1)
    corpus = write_rows(tmp_path / "t.jsonl", [{"sentence1": f"a{i} b", "sentence2": f"c{i} d"} for i in range(30)])
    adapter = make(tmp_path, pairs="columns", corpus=corpus, sides=sides, dropout=0.1, held_out=0.2)
    embedded = adapter.embed(next(adapter.batches(0)))
    pairs = embedded.relate(embedded.rows)
    assert (len(pairs.anchors), len(pairs.candidates)) == (8, 8)  # without negatives
    assert torch.isfinite(dipole.objective("infonce")(embedded).loss)
    assert "triplet/accuracy" not in adapter.evaluate(None)


def test_formats_give_the_same_table(tmp_path):
    rows = [{"anchor": f'a "{i}", b', "positive": f"line\nbreak {i}", "negative": f"n{i}"} for i in range(5)]
    write_rows(tmp_path / "a.jsonl", rows)
    frame = pandas.DataFrame(rows)
    frame.to_json(tmp_path / "b.jsonl.gz", orient="records", lines=True)
    frame.to_csv(tmp_path / "c.csv", index=False, encoding="utf-8-sig")
    frame.to_csv(tmp_path / "d.tsv", index=False, encoding="utf-8-sig", sep="\t")
    data = Dataset.from_list(rows)
    data.to_parquet(tmp_path / "e.parquet")
    data.save_to_disk(tmp_path / "f")
    DatasetDict({"train": data, "dev": data.select([0])}).save_to_disk(tmp_path / "g")
    tables = [read_pairs(str(tmp_path / n)) for n in ("a.jsonl", "b.jsonl.gz", "c.csv", "d.tsv", "e.parquet", "f", "g")]
    tables.append(read_pairs(str(tmp_path / "d.tsv"), folder=tmp_path / "cache"))
    assert tables[0].texts[:3] == ['a "0", b', "line break 0", "n0"]
    assert len({(each.fingerprint, *each.texts, *each.columns) for each in tables}) == 1
    assert len(read_pairs(str(tmp_path / "g"), split="dev")) == 1
    refused(DataError, "no split 'test'; it has train, dev", read_pairs, str(tmp_path / "g"), split="test")
    with pytest.raises(DataError, match=r"no column 'anhor'; it has anchor, positive, .*Did you mean 'anchor'"):
        read_pairs(str(tmp_path / "a.jsonl"), ["anhor", "positive"])
    refused(DataError, "nothing at", read_pairs, str(tmp_path / "absent.csv"))
    assert TextSettings().determining() == {}


@pytest.mark.parametrize(("names", "expected"), [
    (["id", "positive", "anchor", "negative_2", "negative_1"], ["anchor", "positive", "negative_2", "negative_1"]),
    (["query", "pos", "neg", "prompt"], ["query", "pos", "neg"]),
    (["sentence1", "sentence2", "label"], ["sentence1", "sentence2"]),
    (["premise", "entailment", "contradiction"], ["premise", "entailment", "contradiction"]),
    (["sent0", "sent1", "hard_neg"], ["sent0", "sent1", "hard_neg"]),
    (["Question", "Answer"], ["Question", "Answer"]),
])  # fmt: skip
def test_usual_names_are_found(tmp_path, names, expected):
    found = read_pairs(write_rows(tmp_path / "t.jsonl", [{name: f"text {name}" for name in names}]))
    assert list(found.columns) == expected
    numbers = [found.anchor[0], found.positive[0], *found.negatives[0]]
    assert [found.texts[i] for i in numbers] == [f"text {name}" for name in expected]


def test_lists_give_several_and_missing_cells_are_counted(tmp_path):
    rows = [
        {"a": "one", "p": ["two", "three"], "n": ["four", " ", "five"]}, {"a": "one", "p": "", "n": ["six"]},
        {"a": None, "p": "seven"}, {"a": "eight", "p": "nine"},
    ]  # fmt: skip
    with pytest.warns(UserWarning, match=r"of 4 rows 2 have no 'a' or no 'p' and are skipped, 1 lack a negative"):
        found = read_pairs(write_rows(tmp_path / "t.jsonl", rows), ["a", "p", "n"])
    texts = [*found.texts, None]
    numbers = np.column_stack([found.anchor, found.positive, found.negatives])
    wanted = [["one", "two", "four", "five"], ["one", "three", "four", "five"], ["eight", "nine", None, None]]
    assert [[texts[i] for i in row] for row in numbers] == wanted
    assert (found.incomplete, found.fewer) == (2, 1)
    halves = write_rows(tmp_path / "t.jsonl", [{"a": "x", "p": ""}] * 2)
    refused(DataError, "none of 2 rows has both 'a' and 'p'", read_pairs, halves, ["a", "p"])


def test_duplicates_wait_on_any_number_of_ranks_and_after_a_resume(tmp_path):
    rows = [{"anchor": f"a{i // 3}", "positive": f"p{i}", "negative": f"n{i % 25}"} for i in range(60)]
    settings = {"pairs": "columns", "corpus": write_rows(tmp_path / "t.jsonl", rows), "held_out": 0.0}
    whole = make(tmp_path, **settings)
    epochs = [[batch.index.tolist() for batch in whole.batches(epoch)] for epoch in range(3)]
    for batch in [batch for epoch in epochs for batch in epoch]:
        for column in rows[0]:
            assert len({rows[i][column] for i in batch}) == 8
    assert [len(epoch) for epoch in epochs] == [whole.steps_per_epoch] * 3
    assert whole.steps_per_epoch >= 6
    parts = [make(tmp_path, rank=rank, world_size=3, **settings) for rank in range(3)]
    shares = [[batch.index.tolist() for batch in part.batches(1)] for part in parts]
    assert [[i for share in split for i in share] for split in zip(*shares, strict=True)] == epochs[1]
    assert [batch.index.tolist() for batch in make(tmp_path, **settings).batches(2, 3)] == epochs[2][3:]
    alone = write_rows(tmp_path / "o.jsonl", [{"anchor": f"a{i // 10}", "positive": f"b{i}"} for i in range(60)])
    with pytest.raises(DataError, match=r"test part of .*, 6 rows, holds one anchor.*Raise text\.held_out"):
        make(tmp_path, **settings | {"corpus": alone, "held_out": 0.1})
    same = write_rows(tmp_path / "s.jsonl", [{"anchor": f"a{i}", "positive": "yes"} for i in range(20)])
    with pytest.raises(DataError, match=r"no 8 of the 20 rows.*\('yes' stands in 20 rows\).*no_duplicates = false"):
        make(tmp_path, **settings | {"corpus": same})
    assert make(tmp_path, **settings | {"corpus": same, "no_duplicates": False}).steps_per_epoch == 2


def test_partners_are_ranked_among_all_candidates():
    draw = torch.Generator().manual_seed(0)
    f, g = (torch.randn(30, 5, generator=draw) for _ in range(2))
    anchor = torch.tensor([0, 0, 1, 2, 12])
    positive = torch.tensor([10, 11, 12, 13, 14])
    negatives = torch.tensor([[20, 21], [22, -1], [-1, -1], [23, 24], [10, -1]])
    ranks, won = [], []
    pool = sorted({10, 11, 12, 13, 14, 20, 21, 22, 23, 24})
    score = {(a, c): float(normalize(f[a], dim=0) @ normalize(g[c], dim=0)) for a in anchor.tolist() for c in pool}
    for row, (a, p) in enumerate(zip(anchor.tolist(), positive.tolist(), strict=True)):
        own = {int(q) for q, b in zip(positive, anchor, strict=True) if b == a} | {a}
        ranks.append(1 + sum(score[a, c] > score[a, p] for c in pool if c not in own))
        won += [score[a, p] > score[a, n] for n in negatives[row].tolist() if n >= 0]
    found = find_positives(f, g, anchor, positive, negatives)
    assert found["positive@1"] == pytest.approx(np.mean([r == 1 for r in ranks]))
    assert found["positive_mrr"] == pytest.approx(np.mean([1 / r for r in ranks]), rel=1e-6)
    assert found["triplet/accuracy"] == pytest.approx(np.mean(won))
    assert found["chance@1"] == 0.1
    # Equal vectors are as good as a random order.
    found = next_sentence(torch.ones(21, 3), torch.ones(21, 3), torch.zeros(21))
    assert (found["next@1"], found["next@10"]) == pytest.approx((found["chance@1"], 0.5))
    assert found["next_mrr"] == pytest.approx(np.mean([1 / rank for rank in range(1, 21)]))
    found = find_positives(torch.ones(30, 5), torch.ones(30, 5), anchor, positive, negatives)
    assert found["positive@1"] == pytest.approx((1 / 9 * 2 + 1 / 10 + 1 / 10 + 1 / 9) / 5)


def test_sentences_without_finite_vectors_have_no_rank():
    f = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    f[2, 0] = torch.nan
    none = torch.zeros(4, 0, dtype=torch.long)
    said = "1 of 8 sentences are not finite"
    refused(DataError, said, find_positives, f, f, torch.arange(4), torch.arange(4, 8), none)
    refused(DataError, said, next_sentence, f, f, torch.zeros(8))
    refused(DataError, said, nearest_sentences, [0], f, list("abcdefgh"))


RECIPE = """
name = "tiny"
domain = "text"
objective = "infonce(temperature=0.05) + 0.1*dp"
[train]
steps = 8
batch_size = 8
[text]
held_out = 0.3
hidden_size = 8
word_size = 6
corpus = "{corpus}"
"""
RUNS = {
    "random blocks": 'pairs = "blocks"\nblocks = "random"\nblock_size = 3\nencoder = "bow"\n',
    "views": 'pairs = "views"\ndropout = 0.1\nencoder = "transformer"\nlayers = 1\nheads = 2\n',
    "columns": 'pairs = "columns"\ndropout = 0.1\nencoder = "bow"\n',
}


@pytest.mark.filterwarnings("ignore:.*lack a negative")
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_is_continued_bit_for_bit_evaluated_and_exported(kind, table, tmp_path, capsys):
    recipe = tmp_path / "tiny.toml"
    recipe.write_text((RECIPE + RUNS[kind]).format(corpus=table if kind == "columns" else books(tmp_path)))
    construct(load_recipe(recipe).config)
    whole = run_of(recipe, tmp_path / "whole")
    run, parts = (tmp_path / name / whole.hash for name in ("whole", "parts"))
    with interrupted(TextAdapter, "embed", 6), pytest.raises(RunInterruptedError, match="checkpoint is saved"):
        run_of(recipe, tmp_path / "parts")
    assert run_of(recipe, tmp_path / "parts").results == whole.results
    assert_same_weights(run, parts)
    capsys.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agrees"] is True
    if kind == "columns":
        assert whole.data["columns"] == ["query", "pos", "neg"]
        assert whole.data["rows_with_fewer_negatives"] == 14
        assert {"positive@1", "triplet/accuracy", "pair_error"} <= whole.results.keys()
    assert main(["export", str(run), "--to", "sentence-transformers", "--out", str(tmp_path / "st")]) == 0


@pytest.mark.filterwarnings("ignore:.*lack a negative")
def test_the_weights_of_the_best_evaluation_are_kept(table, tmp_path):
    recipe, runs = tmp_path / "tiny.toml", tmp_path / "runs"
    recipe.write_text((RECIPE + RUNS["columns"]).format(corpus=table))
    every = ["train.evaluate_every=2", "train.learning_rate=0.3"]
    by = "-positive_mrr"  # the smallest value comes before the last evaluation
    record = run_of(recipe, runs, *every, f"train.best_by={by}")
    folder = runs / record.hash
    seen = {line["step"]: line["eval/positive_mrr"] for line in logged(folder, "eval/positive_mrr")}
    assert set(seen) == {2, 4, 6, 8}
    best = min(seen, key=lambda step: seen[step])
    assert record.chosen == {"by": by, "step": best, "value": pytest.approx(seen[best], rel=1e-6), "on": "validation"}
    assert (record.curves_on, record.evaluated_on) == ("validation", "test")
    # The choice is made on the validation part. The kept weights are measured on the test part, once.
    (last,) = logged(folder, "test/positive_mrr")
    assert last["step"] == 8
    assert last["test/positive_mrr"] == pytest.approx(record.results["positive_mrr"], rel=1e-6)
    _, adapter, objective = load_run(RunFolder(folder))
    assert adapter.evaluate(objective)["positive_mrr"] == record.results["positive_mrr"]
    assert best < 8
    assert not (folder / "checkpoints").exists()
    for settings, message in (
        ([*every, "train.best_by=positive_mr"], r"no result 'positive_mr'.*Did you mean 'positive_mrr'"),
        (["train.best_by=positive_mrr"], "Set evaluate_every"),
        ([*every, "train.curves_on=test", "train.best_by=positive_mrr"], "would be chosen on the test part"),
    ):
        refused(ConfigError, message, run_of, recipe, runs, *settings)
