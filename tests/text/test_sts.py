"""Similarity tasks in SentEval's folder layout: by cosine, by split, and as the numbers and tables of a record."""

import json
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizer

from dipole.core.utils.errors import DataError, OptionError
from dipole.text import senteval
from dipole.text.senteval.engine import as_encode
from dipole.text.senteval.scoring import cosine, numbers_of, sts_result, sts_table, written_tables
from dipole.text.senteval.tasks import STS
from tests.runs import refused
from tests.text.made import text_adapter, write_rows
from tests.text.tiny_sentences import tiny_model

TINY = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
WORDS = np.array([f"w{i}" for i in range(40)])
TABLE = np.random.default_rng(0).normal(size=(40, 6))


@cache
def vector(sentence):
    return TABLE[[int(word[1:]) for word in sentence.split()]].sum(0)


def encode(sentences):
    """Sums of fixed random word vectors."""
    return np.stack([vector(sentence) for sentence in sentences])


def cosines(pairs):
    left, right = (encode([pair[side] for pair in pairs]) for side in (0, 1))
    return (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """SentEval's files: STS12 to STS16 small, STS-B and SICK with as many lines as the published ones."""
    root, draw, truth = tmp_path_factory.mktemp("senteval"), np.random.default_rng(1), {}

    def write(file, line, key, count, head=""):
        words, lengths = WORDS[draw.integers(40, size=(2 * count, 6))].tolist(), draw.integers(2, 7, size=2 * count)
        texts = iter([" ".join(row[:length]) for row, length in zip(words, lengths, strict=True)])
        pairs = list(zip(texts, texts, strict=True))
        gold = np.round(draw.uniform(0, 5, count), 2)
        truth[key], rows = [pairs, gold], [(a, b, y) for (a, b), y in zip(pairs, gold, strict=True)]
        path = root / "downstream" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + "".join(line.format(i, *row) + "\n" for i, row in enumerate(rows)))

    for year, sets in STS.items():
        for count, name in enumerate(sets, 5):
            place, key = f"STS/{year}-en-test", (year, name)
            write(f"{place}/STS.input.{name}.txt", "{1}\t{2}", key, 3 * count)
            scores = "".join(f"{score}\n" for score in truth[key][1])
            (root / f"downstream/{place}/STS.gs.{name}.txt").write_text(scores)
    for split, count in (("train", 5749), ("dev", 1500), ("test", 1379)):
        write(f"STS/STSBenchmark/sts-{split}.csv", "main\tnews\t2012\t{0}\t{3}\t{1}\t{2}", ("STSB", split), count)
    head = "pair_ID\tsentence_A\tsentence_B\tscore\tjudgment\n"
    for split, name, count in (("train", "train", 4500), ("dev", "trial", 500), ("test", "test_annotated", 4927)):
        write(f"SICK/SICK_{name}.txt", "{0}\t{1}\t{2}\t{3}\tNEUTRAL", ("SICK", split), count, head)
    return root, truth


def test_cosine_tasks_score_each_split_by_itself(folder):
    root, truth = folder
    for task, key in (("STSBenchmark", "STSB"), ("SICKRelatedness-cosine", "SICK")):
        result = senteval.evaluate(encode, [task], root, progress=False)[task]
        for split in ("train", "dev", "test"):
            pairs, gold = truth[key, split]
            for measure, function in (("spearman", spearmanr), ("pearson", pearsonr)):
                wanted, found = function(cosines(pairs), gold), result[split][measure]
                assert found[0] == found.correlation == found.statistic == pytest.approx(wanted[0], abs=1e-9)
                assert found[1] == found.pvalue == pytest.approx(wanted[1], abs=1e-9)
            assert result[split]["nsamples"] == len(gold)
        wanted = {f"senteval/{task}/{split}/{name}" for split in ("dev", "test") for name in ("pearson", "spearman")}
        assert set(numbers_of(task, result)) == wanted
        line = senteval.describe(task, result)
        assert f"dev {result['dev']['spearman'][0]:.4f}  test {result['test']['spearman'][0]:.4f}" in line


def test_years_are_summed_up_in_three_ways_through_the_engine(folder):
    root, truth = folder
    found = senteval.SE({"task_path": str(root), "progress": False}, batcher).eval(list(STS))
    for year, result in found.items():
        parts = [truth[year, name] for name in STS[year]]
        each = [spearmanr(cosines(pairs), gold)[0] for pairs, gold in parts]
        sizes = [len(gold) for _, gold in parts]
        together = spearmanr(np.concatenate([cosines(p) for p, _ in parts]), np.concatenate([g for _, g in parts]))[0]
        wanted = {"mean": np.mean(each), "wmean": np.average(each, weights=sizes), "all": together}
        assert result["all"]["spearman"] == pytest.approx(wanted, abs=1e-9)
        numbers = numbers_of(year, result)
        assert numbers[f"senteval/{year}/spearman"] == pytest.approx(together, abs=1e-9)
        assert numbers[f"senteval/{year}/spearman_wmean"] == result["all"]["spearman"]["wmean"]
        assert [result[name]["nsamples"] for name in STS[year]] == sizes


def test_the_table_of_a_run_has_a_mean_of_seven_test_columns(folder, tmp_path):
    tasks = [*STS, "STSBenchmark", "SICKRelatedness-cosine"]
    found = senteval.evaluate(encode, tasks, folder[0], progress=False)
    head, row = (line.split() for line in sts_table(found, "mine").splitlines())
    assert head == [*STS, "STS-B", "SICK-R", "STS-B", "dev", "mean"]
    values = [float(each) for each in row[1:]]
    assert values[-1] == pytest.approx(np.mean(values[:7]), abs=0.011)
    assert values[7] == pytest.approx(100 * found["STSBenchmark"]["dev"]["spearman"][0], abs=0.006)
    assert set(written_tables(found)) == {"sts.txt"}
    part = {task: found[task] for task in tasks[:3]}
    assert sts_table(part, "mine").splitlines()[1].split()[-1] == "-"
    settings = {"pairs": "views", "dropout": 0.1, "encoder": "bow", "word_size": 4, "limit": 100}
    corpus = write_rows(tmp_path / "corpus.jsonl", [{"sentences": ["w1 w2.", "w3 w4."]}] * 10)
    settings |= {"senteval": str(folder[0]), "tasks": ("STSBenchmark-cosine",), "corpus": corpus}
    found = text_adapter(settings, workdir=tmp_path).evaluate(None)
    assert {"senteval/STSBenchmark-cosine/dev/spearman", "senteval/STSBenchmark-cosine/test/spearman"} <= set(found)
    assert (tmp_path / "sts.txt").read_text().splitlines()[1].startswith("this run")
    assert not (tmp_path / "senteval.txt").exists()
    assert json.dumps(found)


def batcher(params, batch):
    return torch.from_numpy(encode([" ".join(sentence) for sentence in batch]))


@pytest.mark.parametrize("task", ["STSBenchmark", "STS13"])
def test_a_script_of_simcse_reads_and_writes_its_numbers(folder, task):
    """Its parameters, its task names, the entries that its tables read, and JSON of all results."""
    classifier = {"nhid": 0, "optim": "rmsprop", "batch_size": 128, "tenacity": 3, "epoch_size": 2}
    params = {"task_path": str(folder[0]), "usepytorch": True, "kfold": 5, "classifier": classifier}
    engine = senteval.engine.SE(params, batcher, lambda params, samples: None)
    engine.progress.quiet = True
    result = engine.eval(task)
    again = json.loads(json.dumps({task: result}))[task]
    if task == "STSBenchmark":
        assert result["dev"]["spearman"][0] == again["dev"]["spearman"][0]
        assert again["test"]["spearman"] == [result["test"]["spearman"].correlation, result["test"]["spearman"].pvalue]
    assert again["all"]["spearman"]["all"] == result["all"]["spearman"]["all"]


def test_the_regression_of_the_first_senteval_and_missing_splits_are_named(folder, tmp_path):
    result = senteval.evaluate(encode, ["STSBenchmark"], folder[0], progress=False)["STSBenchmark"]
    by_cosine = r"by cosine, as in SimCSE's SentEval.*STSBenchmark-finetune"
    for key, message in (("pearson", by_cosine), ("yhat", by_cosine), ("tset", r"^'tset'$")):
        refused(KeyError, message, result.__getitem__, key)
    for task in ("STSBenchmark-finetune", "SICKRelatedness-finetune"):
        assert senteval.load_task(task, folder[0]).kind == "relatedness"
    task = "STSBenchmark-cosine"
    refused(DataError, rf"{task}: no file .*sts-train\.csv", senteval.load_task, task, tmp_path)
    assert sts_result({"a": [0.0, 0.0]}, {"a": [1.0, 2.0]})["a"]["pearson"][0] == 0


@pytest.mark.parametrize(("how", "task", "value"), [
    ("engine", "STS12", np.nan), ("evaluate", "STSBenchmark", np.inf),
    ("evaluate", "SICKRelatedness-finetune", np.nan), ("engine", "SICKEntailment", -np.inf),
    ("the first SentEval", "STS13", np.nan), ("cache", "STS12", None),
])  # fmt: skip
def test_vectors_that_are_not_finite_have_no_score(folder, tmp_path, how, task, value):
    def vectors(sentences):
        found = encode(sentences)
        found[::10] = value
        return found

    prepare, _ = senteval.for_genuine(vectors)
    params = {"task_path": str(folder[0]), "progress": False}
    if how == "cache":
        params |= {"cache": str(tmp_path), "cache_key": "k"}
        senteval.SE(params, batcher).eval(task)
        (kept,) = tmp_path.glob("*.npy")
        features = np.load(kept)
        features[7] = np.nan
        np.save(kept, features)
    calls = {
        "cache": lambda: senteval.SE(params, batcher).eval(task),
        "engine": lambda: senteval.SE(params, lambda _, batch: vectors([" ".join(each) for each in batch])).eval(task),
        "evaluate": lambda: senteval.evaluate(vectors, [task], folder[0], progress=False),
        "the first SentEval": lambda: prepare(senteval.Params(), senteval.load_task(task, folder[0]).samples()),
    }
    said = r"of \d+ vectors are not finite \(NaN or infinity\): the encoder has diverged"
    refused(DataError, r"STS12: .* not finite" if how == "cache" else said, calls[how])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A SentenceTransformer, and its transformer as a model of transformers. Both know WORDS."""
    saved = tmp_path_factory.mktemp("model")
    return tiny_model(saved, words=" ".join(WORDS)), AutoModel.from_pretrained(saved)


@pytest.mark.parametrize("size", [None, 7])
def test_models_are_scored_as_their_own_vectors(folder, models, size):
    sentences, transformer = models

    vectors = cache(lambda text: sentences.encode(text, show_progress_bar=False))

    def own(texts):
        return np.stack([vectors(text) for text in texts])

    wanted = senteval.evaluate(own, ["STS13"], folder[0], progress=False)["STS13"]["all"]["spearman"]["all"]
    transformer.train()
    for model in (sentences, transformer, own, SimpleNamespace(encode=own)):
        found = senteval.evaluate(model, ["STS13"], folder[0], progress=False, batch_size=size)["STS13"]
        assert found["all"]["spearman"]["all"] == pytest.approx(wanted, abs=1e-3)
    assert transformer.training


def test_poolings_of_a_transformer(models):
    _, transformer = models
    texts = ["w1 w7 w3", "w2 w9", ""]
    tokens = AutoTokenizer.from_pretrained(transformer.name_or_path)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = transformer.eval()(**tokens)
    found = {pooling: as_encode(transformer, 2, pooling=pooling)(texts) for pooling in ("cls", "pooler")}
    assert found["cls"] == pytest.approx(wanted.last_hidden_state[:, 0].numpy(), abs=1e-5)
    assert found["pooler"] == pytest.approx(wanted.pooler_output.numpy(), abs=1e-5)


@pytest.mark.parametrize(("encoder", "options", "message"), [
    *((x, {}, "to vectors .* got [<'B]") for x in ("bert", SimpleNamespace, BertTokenizer(vocab={"[UNK]": 0}))),
    (encode, {"tokenizer": "bert"}, "tokenizer and pooling are of a model of transformers, and function is none"),
    (torch.nn.Linear(2, 2), {}, "Linear is no model of transformers and has no method `encode`"),
    *((encode, {name: 0}, f"{name} must be a whole number >= 1") for name in ("batch_size", "halves")),
    (BertModel(TINY), {}, "no tokenizer is saved with BertModel .made in memory.: give tokenizer="),
    (BertModel(TINY), {"pooling": "max"}, "pooling must be one of mean, cls, pooler, got 'max'"),
])  # fmt: skip
def test_what_is_no_encoder_is_one_message(folder, encoder, options, message):
    refused(OptionError, message, senteval.evaluate, encoder, ["STS13"], folder[0], progress=False, **options)


@pytest.mark.parametrize("scale", [1e-40, 1e-25, 1, 1e25])
def test_the_cosine_does_not_depend_on_the_length(scale):
    """Products of small or large lengths leave the range of single precision."""
    u, v = np.random.default_rng(0).normal(size=(2, 8))
    small, large = (np.float32(scale * each) for each in (u, v))
    assert cosine(small, large) == pytest.approx(cosine(u, v), abs=1e-4)
    assert cosine(small, 0 * large) == 0
