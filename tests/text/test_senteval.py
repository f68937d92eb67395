"""SentEval's interface and tasks: same parameters and keys, each sentence encoded once, damaged files noticed."""

import io
import json
import shutil
import sys

import numpy as np
import pytest
from scipy.stats import pearsonr

from dipole.core.utils.errors import DataError
from dipole.text import senteval
from dipole.text.senteval.engine import ASKED
from dipole.text.senteval.relatedness import relatedness_result, soft_targets
from dipole.text.senteval.tables import six_task_table
from dipole.text.senteval.tasks import STS, load_task

WORDS = {"good": 1.0, "fine": 0.8, "bad": -1.0, "poor": -0.8}


@pytest.fixture
def tiny(tmp_path):
    """CR with 40 + 40 lines, among them two empty ones and many that repeat."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "downstream/CR"
    folder.mkdir(parents=True)
    for file, words in (("custrev.pos", ["good", "fine"]), ("custrev.neg", ["bad", "poor"])):
        lines = [" ".join(draw.choice([*words, "a", "film"], size=draw.integers(1, 6))) for _ in range(39)]
        (folder / file).write_text("\n".join([*lines, ""]) + "\n")
    return tmp_path


class Batcher:
    def __init__(self):
        self.seen, self.prepared = [], 0

    def prepare(self, params, samples):
        self.prepared += 1
        params.samples = len(samples)

    def __call__(self, params, batch):
        self.seen += [tuple(sentence) for sentence in batch]
        rows = [[sum(WORDS.get(w, 0.0) for w in s), len(s), 1.0] for s in batch]
        return np.array(rows) + 0.01 * np.arange(3)


def params(path, **more):
    return {"task_path": str(path), "kfold": 4, "check": False, "progress": False, **more}


def test_result_keys_protocol_and_order(tiny, capsys):
    batcher = Batcher()
    engine = senteval.engine.SE(params(tiny) | {"progress": True}, batcher, batcher.prepare)
    result = engine.eval(["CR"])["CR"]
    assert set(result) == {"devacc", "acc", "ndev", "ntest"}
    assert result["ndev"] == result["ntest"] == 80
    assert result["acc"] > 80
    assert result.majority == 50
    assert len(result.folds) == len(result.chosen) == 4
    assert result.protocol == "fast"
    assert "fast" in repr(result)
    assert "[fast, kfold 4]" in capsys.readouterr().err
    assert engine.params.samples == 80
    assert engine.params.current_task == "CR"
    # Each sentence is encoded once, short ones first.
    assert [len(s) for s in batcher.seen] == sorted(len(s) for s in batcher.seen)
    assert () in batcher.seen


def test_an_encoder_that_has_changed_under_its_key_is_asked_again(tiny, tmp_path):
    options = params(tiny, cache=str(tmp_path), cache_key="one")
    senteval.SE(options, Batcher()).eval("CR")
    changed = Batcher()
    changed_vectors = senteval.SE(options, lambda p, batch: 2 * changed(p, batch)).eval("CR")
    assert dict(changed_vectors) == dict(senteval.SE(params(tiny), lambda p, b: 2 * Batcher()(p, b)).eval("CR"))
    assert len(changed.seen) > ASKED


def test_features_that_were_cut_off_are_made_again(tiny, tmp_path):
    options = params(tiny, cache=str(tmp_path), cache_key="one")
    whole = dict(senteval.SE(options, Batcher()).eval("CR"))
    (kept,) = tmp_path.glob("*.npy")
    data = kept.read_bytes()
    for length in (0, 1, 7, 60, 127, 128, 129, len(data) // 2, len(data) - 1):
        kept.write_bytes(data[:length])
        assert dict(senteval.SE(options, Batcher()).eval("CR")) == whole
        assert kept.read_bytes() == data


@pytest.mark.parametrize(
    ("given", "protocol"),
    [
        ({}, "fast"),
        ({"usepytorch": True}, "senteval-torch"),
        ({"usepytorch": False}, "senteval-sklearn"),
        ({"protocol": "skip-thoughts"}, "skip-thoughts"),
    ],
)
def test_usepytorch_or_protocol_selects(tiny, given, protocol):
    classifier = {"nhid": 0, "optim": "adam", "batch_size": 64, "tenacity": 1, "epoch_size": 1, "max_epoch": 3}
    result = senteval.SE(params(tiny, classifier=classifier, **given), Batcher()).eval("CR")
    assert result.protocol == protocol
    assert 0 <= result["acc"] <= 100


def test_a_missing_task_stops_before_anything_is_encoded(tiny):
    batcher = Batcher()
    with pytest.raises(DataError, match=r"rt-polarity\.pos"):
        senteval.SE(params(tiny), batcher).eval(["CR", "MR"])
    assert not batcher.seen


def test_features_are_cached_by_encoder_and_text(tiny, tmp_path):
    first, second, other = Batcher(), Batcher(), Batcher()
    options = params(tiny, cache=str(tmp_path / "features"))
    a = senteval.SE(options | {"cache_key": "one"}, first).eval("CR")
    b = senteval.SE(options | {"cache_key": "one"}, second).eval("CR")
    senteval.SE(options | {"cache_key": "two"}, other).eval("CR")
    assert dict(a) == dict(b)
    assert first.seen
    assert len(second.seen) <= ASKED < len(first.seen)  # no more than tells that it is the same encoder
    assert len(other.seen) == len(first.seen)


def test_the_adapter_gives_genuine_senteval_the_same_vectors(tiny):
    calls = []

    def encode(sentences):
        calls.append(len(sentences))
        return np.array([[len(s), s.count("o")] for s in sentences], dtype=float)

    prepare, batcher = senteval.for_genuine(encode)
    samples = [["good", "film"], [], ["bad"], ["bad"]]
    prepare(senteval.Params(), samples)
    assert np.array_equal(batcher(senteval.Params(), samples), encode(["good film", "", "bad", "bad"]))
    assert calls[0] == 3
    batcher(senteval.Params(), [["new"]])
    assert calls[-1] == 1


def test_evaluate_takes_any_encoder_of_strings(tiny):
    def encode(sentences):
        return np.array([[sum(WORDS.get(w, 0.0) for w in s.split()), 1.0] for s in sentences])

    found = senteval.evaluate(encode, ["CR"], tiny, kfold=4, check=False, progress=False)
    assert found["CR"]["acc"] > 80
    assert "CR" in senteval.describe("CR", found["CR"])


def test_evaluate_shows_in_a_notebook_where_it_is(tiny, monkeypatch):
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stderr", stream)
    senteval.evaluate(lambda sentences: np.ones((len(sentences), 2)), ["CR"], tiny, kfold=4, check=False)
    encoding, scoring = stream.getvalue().split("\n")[0].split("\r")[1:]
    assert encoding.startswith("encoding ")
    assert scoring.startswith("scoring CR")
    assert stream.getvalue().split("\n")[1].startswith("CR ")


def test_relatedness_learns_from_soft_targets():
    targets = np.array([[1, 0, 0, 0, 0], [0, 0, 0.75, 0.25, 0], [0, 0, 0, 0, 1]])
    assert soft_targets([1.0, 3.25, 5.0]) == pytest.approx(targets)
    draw = np.random.default_rng(0)
    x = {split: draw.random((n, 4)) for split, n in (("train", 200), ("dev", 50), ("test", 50))}
    y = {split: 1 + 4 * value[:, 0] for split, value in x.items()}
    result = relatedness_result(x, y, seed=1111)
    assert result["devpearson"] > 0.95
    assert pearsonr(result["yhat"], y["test"])[0] > 0.95
    assert json.loads(json.dumps(result)) == result


def test_the_six_tasks_stand_beside_the_published_rows():
    ours = {task: senteval.Result({"acc": 70.0 + i, "devacc": 71.0}) for i, task in enumerate(senteval.SIX_TASKS)}
    for result in ours.values():
        result.protocol = "fast"
    lines = six_task_table({"ours": ours}).splitlines()
    assert lines[1].split()[1:] == ["70.0", "71.0", "72.0", "73.0", "74.0", "75.0", "72.0", "73.0"]
    printed = next(line for line in lines if line.startswith("QT")).split()
    assert printed[1:] == ["76.8", "81.3", "86.6", "93.4", "89.8", "73.6", "93.4", "86.6", "lmcl-table4"]
    assert sum(line.startswith("QT ") for line in lines) == 1
    assert any("CLLR" in line for line in lines)
    assert "fast" in lines[-2]
    assert "exchanged" in lines[-1]


SIZES = {"MR": 10662, "CR": 3775, "SUBJ": 10000, "MPQA": 10606}


@pytest.fixture
def copy(shared_data, tmp_path):
    """A writable copy of one task of the real data."""

    def make(name):
        shutil.copytree(shared_data / "senteval/downstream" / name, tmp_path / "downstream" / name)
        return tmp_path / "downstream" / name

    return make


@pytest.mark.parametrize("name", SIZES)
def test_binary_tasks_have_the_published_sizes(shared_data, name):
    split = load_task(name, shared_data / "senteval").splits["all"]
    assert len(split) == SIZES[name]
    assert split.labels[0] == 1
    assert split.labels[-1] == 0
    if name == "CR":
        assert sum(not sentence for sentence in split.sentences[0]) == 4


def test_trec_and_mrpc_sorted_by_length_then_label(shared_data):
    trec = load_task("TREC", shared_data / "senteval")
    assert [trec.splits["train"].labels.count(c) for c in range(6)] == [86, 1162, 1250, 1223, 835, 896]
    mrpc = load_task("MRPC", shared_data / "senteval")
    assert [(len(s), sum(s.labels)) for s in mrpc.splits.values()] == [(4076, 2753), (1725, 1147)]
    split = load_task("MRPC", shared_data / "senteval").splits["test"].sorted()
    keys = [(len(a), len(b), y) for a, b, y in zip(*split.sentences, split.labels, strict=True)]
    assert keys == sorted(keys)


def test_missing_files_and_unknown_tasks_are_named(tmp_path):
    with pytest.raises(DataError, match=r"custrev.pos.*downstream"):
        load_task("CR", tmp_path)
    with pytest.raises(DataError, match="Did you mean 'MRPC'"):
        load_task("MRPS", tmp_path)


DAMAGES = [
    ("CR/custrev.pos", lambda data: b"\n".join(data.split(b"\n")[:20]), "20 samples, the published file has 2,407"),
    ("MR/rt-polarity.pos", lambda data: data.replace(b" the ", b" the\x85 ", 13), "cat -v"),
    ("TREC/TREC_10.label", lambda data: data.replace(b"What", b"What's", 1), "apostrophes"),
    ("MRPC/msr_paraphrase_test.txt", lambda data: data.replace(b'"', b"<QUOTE>"), "QUOTE"),
    ("MRPC/msr_paraphrase_test.txt", lambda data: data.replace(b"\t", b" ", 5), "line 1: "),
    # What dead links leave behind.
    ("SUBJ/subj.subjective", lambda data: b"<!DOCTYPE html><html>404</html>", "error page"),
    ("SUBJ/subj.subjective", lambda data: b'<?xml version="1.0"?><Error><Code>Denied</Code></Error>', "error page"),
    ("SUBJ/subj.subjective", lambda data: b"", "is empty"),
    ("SUBJ/subj.subjective", lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
]


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGES)
def test_damage_is_noticed(copy, tmp_path, file, damage, message):
    name = file.partition("/")[0]
    path = copy(name).parent / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        load_task(name, tmp_path)
    if name == "CR":  # lost lines may be allowed
        assert len(load_task("CR", tmp_path, check=False).splits["all"]) == 20 + 1368


def test_one_file_saved_twice(copy, tmp_path):
    folder = copy("MR")
    shutil.copy(folder / "rt-polarity.pos", folder / "rt-polarity.neg")
    with pytest.raises(DataError, match="same text"):
        load_task("MR", tmp_path)


def test_sts_leaves_out_pairs_without_a_score(tmp_path):
    folder = tmp_path / "downstream/STS/STS13-en-test"
    folder.mkdir(parents=True)
    for dataset in STS["STS13"]:
        (folder / f"STS.input.{dataset}.txt").write_text("a b\tc\nd\te f\ng\th\n")
        (folder / f"STS.gs.{dataset}.txt").write_text("1.5\n\n3\n")
    task = load_task("STS13", tmp_path)
    assert [len(split) for split in task.splits.values()] == [2, 2, 2]
    assert task.splits["FNWN"].labels == [1.5, 3.0]
    (folder / "STS.gs.FNWN.txt").write_text("1.5\n")
    with pytest.raises(DataError, match="1 score for 3 pairs"):
        load_task("STS13", tmp_path)


def test_sst_sick_and_probing(tmp_path):
    for split in ("train", "dev", "test"):
        fine = tmp_path / f"downstream/SST/fine/sentiment-{split}"
        binary = tmp_path / f"downstream/SST/binary/sentiment-{split}"
        for path, text in ((fine, "4 so good\n0 so bad\n"), (binary, "so good\t1\nso bad\t0\n")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    assert load_task("SST5", tmp_path, check=False).splits["dev"].labels == [4, 0]
    assert load_task("SST2", tmp_path, check=False).splits["dev"].sentences == [[["so", "good"], ["so", "bad"]]]
    with pytest.raises(DataError, match="published file has 8,544"):
        load_task("SST5", tmp_path)
    sick = tmp_path / "downstream/SICK"
    sick.mkdir()
    for file in ("SICK_train.txt", "SICK_trial.txt", "SICK_test_annotated.txt"):
        rows = "1\ta man\ta dog\t3.5\tNEUTRAL\n2\tx\ty\t1\tCONTRADICTION\n"
        (sick / file).write_text(f"id\tA\tB\tscore\tjudgment\n{rows}")
    assert load_task("SICKRelatedness", tmp_path, check=False).splits["test"].labels == [3.5, 1.0]
    assert load_task("SICKEntailment", tmp_path, check=False).splits["test"].labels == [1, 0]
    probing = tmp_path / "probing/past_present.txt"
    probing.parent.mkdir()
    probing.write_text("tr\tPAST\tit was\ntr\tPRES\tit is\nva\tPRES\tit is\nte\tPAST\tit was\n")
    assert load_task("Tense", tmp_path).splits["dev"].labels == [1]
