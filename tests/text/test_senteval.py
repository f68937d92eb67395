"""SentEval's interface and tasks: same parameters and keys, damaged files, and the study of learning from text."""

import io
import json
import shutil
import sys

import numpy as np
import pytest
from scipy.stats import pearsonr

from dipole.benchmarks.studies import learning_text
from dipole.core.utils.errors import DataError
from dipole.text import senteval
from dipole.text.senteval import SIX_TASKS
from dipole.text.senteval.engine import ASKED
from dipole.text.senteval.scoring import relatedness_result, six_task_table, soft_targets
from dipole.text.senteval.tasks import STS, load_task
from tests.runs import refused

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
    assert (engine.params.samples, engine.params.current_task) == (80, "CR")
    # Each sentence is encoded once, short ones first.
    assert [len(s) for s in batcher.seen] == sorted(len(s) for s in batcher.seen)
    assert () in batcher.seen
    for given, protocol in (
        ({}, "fast"), ({"usepytorch": True}, "senteval-torch"),
        ({"usepytorch": False}, "senteval-sklearn"), ({"protocol": "skip-thoughts"}, "skip-thoughts"),
    ):  # fmt: skip
        assert senteval.SE(params(tiny, **given), Batcher()).settings.protocol == protocol


def test_a_missing_task_stops_before_anything_is_encoded(tiny, tmp_path):
    batcher = Batcher()
    refused(DataError, r"rt-polarity\.pos", senteval.SE(params(tiny), batcher).eval, ["CR", "MR"])
    assert not batcher.seen
    refused(DataError, r"custrev.pos.*downstream", load_task, "CR", tmp_path / "absent")
    refused(DataError, "Did you mean 'MRPC'", load_task, "MRPS", tmp_path)
    (tmp_path / "downstream/MRPC").mkdir()
    for part in ("train", "test"):  # with a header alone
        (tmp_path / f"downstream/MRPC/msr_paraphrase_{part}.txt").write_text("a\tb\tc\td\te\n")
    refused(DataError, "MRPC: no sample in train, test below", load_task, "MRPC", tmp_path, check=False)


def test_features_are_cached_by_encoder_and_text(tiny, tmp_path):
    options = params(tiny, cache=str(tmp_path / "features"), cache_key="one")
    first, second, other, changed = (Batcher() for _ in range(4))
    whole = dict(senteval.SE(options, first).eval("CR"))
    assert dict(senteval.SE(options, second).eval("CR")) == whole
    assert len(second.seen) <= ASKED < len(first.seen)  # no more than tells that it is the same encoder
    (kept,) = (tmp_path / "features").glob("*.npy")
    data = kept.read_bytes()
    for length in (0, 1, 7, 60, 127, 128, 129, len(data) // 2, len(data) - 1):
        kept.write_bytes(data[:length])  # features that were cut off are made again
        assert dict(senteval.SE(options, Batcher()).eval("CR")) == whole
        assert kept.read_bytes() == data
    senteval.SE(options | {"cache_key": "two"}, other).eval("CR")
    assert len(other.seen) == len(first.seen)
    found = senteval.SE(options, lambda p, batch: 2 * changed(p, batch)).eval("CR")  # another encoder under the key
    assert dict(found) == dict(senteval.SE(params(tiny), lambda p, b: 2 * Batcher()(p, b)).eval("CR"))
    assert len(changed.seen) > ASKED


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


def test_evaluate_takes_any_encoder_of_strings_and_shows_in_a_notebook_where_it_is(tiny, monkeypatch):
    def encode(sentences):
        return np.array([[sum(WORDS.get(w, 0.0) for w in s.split()), 1.0] for s in sentences])

    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stderr", stream)
    found = senteval.evaluate(encode, ["CR"], tiny, kfold=4, check=False)
    assert found["CR"]["acc"] > 80
    assert "CR" in senteval.describe("CR", found["CR"])
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
    ours = {task: senteval.Result({"acc": 70.0 + i, "devacc": 71.0}) for i, task in enumerate(SIX_TASKS)}
    for result in ours.values():
        result.protocol = "fast"
    lines = six_task_table(ours, "ours").splitlines()
    assert lines[1].split()[1:] == ["70.0", "71.0", "72.0", "73.0", "74.0", "75.0", "72.0", "73.0"]
    printed = next(line for line in lines if line.startswith("QT")).split()
    assert printed[1:] == ["76.8", "81.3", "86.6", "93.4", "89.8", "73.6", "93.4", "86.6", "lmcl-table4"]
    assert sum(line.startswith("QT ") for line in lines) == 1
    assert any("CLLR" in line for line in lines)
    assert "fast" in lines[-2]
    assert "exchanged" in lines[-1]


def test_tasks_have_the_published_sizes(shared_data):
    root = shared_data / "senteval"
    for name, size in {"MR": 10662, "CR": 3775, "SUBJ": 10000, "MPQA": 10606}.items():
        split = load_task(name, root).splits["all"]
        assert (len(split), split.labels[0], split.labels[-1]) == (size, 1, 0)
    assert sum(not sentence for sentence in load_task("CR", root).splits["all"].sentences[0]) == 4
    trec = load_task("TREC", root)
    assert [trec.splits["train"].labels.count(c) for c in range(6)] == [86, 1162, 1250, 1223, 835, 896]
    mrpc = load_task("MRPC", root)
    assert [(len(s), sum(s.labels)) for s in mrpc.splits.values()] == [(4076, 2753), (1725, 1147)]
    split = mrpc.splits["test"].sorted()  # by length, then by label
    keys = [(len(a), len(b), y) for a, b, y in zip(*split.sentences, split.labels, strict=True)]
    assert keys == sorted(keys)


@pytest.mark.parametrize(("file", "damage", "message"), [
    ("CR/custrev.pos", lambda data: b"\n".join(data.split(b"\n")[:20]), "20 samples, the published file has 2,407"),
    ("MR/rt-polarity.pos", lambda data: data.replace(b" the ", b" the\x85 ", 13), "cat -v"),
    ("TREC/TREC_10.label", lambda data: data.replace(b"What", b"What's", 1), "apostrophes"),
    ("MRPC/msr_paraphrase_test.txt", lambda data: data.replace(b'"', b"<QUOTE>"), "QUOTE"),
    ("MRPC/msr_paraphrase_test.txt", lambda data: data.replace(b"\t", b" ", 5), "line 1: "),
    # The remains of dead links.
    ("SUBJ/subj.subjective", lambda data: b"<!DOCTYPE html><html>404</html>", "error page"),
    ("SUBJ/subj.subjective", lambda data: b'<?xml version="1.0"?><Error><Code>Denied</Code></Error>', "error page"),
    ("SUBJ/subj.subjective", lambda data: b"", "is empty"),
    ("SUBJ/subj.subjective", lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
])  # fmt: skip
def test_damage_is_noticed(shared_data, tmp_path, file, damage, message):
    name, path = file.partition("/")[0], tmp_path / "downstream" / file
    shutil.copytree(shared_data / "senteval/downstream" / name, path.parent)
    path.write_bytes(damage(path.read_bytes()))
    refused(DataError, message, load_task, name, tmp_path)
    if name == "CR":  # lost lines may be allowed
        assert len(load_task("CR", tmp_path, check=False).splits["all"]) == 20 + 1368
    if name == "MR":  # one file saved twice
        shutil.copy(path.with_suffix(".neg"), path)
        refused(DataError, "same text", load_task, "MR", tmp_path)


def test_files_of_sts_sst_sick_and_probing(tmp_path):
    folder = tmp_path / "downstream/STS/STS13-en-test"
    folder.mkdir(parents=True)
    for dataset in STS["STS13"]:
        (folder / f"STS.input.{dataset}.txt").write_text("a b\tc\nd\te f\ng\th\n")
        (folder / f"STS.gs.{dataset}.txt").write_text("1.5\n\n3\n")
    task = load_task("STS13", tmp_path)
    assert [len(split) for split in task.splits.values()] == [2, 2, 2]
    assert task.splits["FNWN"].labels == [1.5, 3.0]
    (folder / "STS.gs.FNWN.txt").write_text("1.5\n")
    refused(DataError, "1 score for 3 pairs", load_task, "STS13", tmp_path)
    for split in ("train", "dev", "test"):
        fine = tmp_path / f"downstream/SST/fine/sentiment-{split}"
        binary = tmp_path / f"downstream/SST/binary/sentiment-{split}"
        for path, text in ((fine, "4 so good\n0 so bad\n"), (binary, "so good\t1\nso bad\t0\n")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    assert load_task("SST5", tmp_path, check=False).splits["dev"].labels == [4, 0]
    assert load_task("SST2", tmp_path, check=False).splits["dev"].sentences == [[["so", "good"], ["so", "bad"]]]
    refused(DataError, "published file has 8,544", load_task, "SST5", tmp_path)
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


def test_intervals_verdicts_and_random_words():
    runs = {
        f"{name}/{seed}": dict.fromkeys(SIX_TASKS, base + seed) | {"TREC": trec}
        for name, base, trec in (("untrained", 60.0, 70.0), ("random words", 62.0, 60.0), ("QT", 65.0, 65.0))
        for seed in range(3)
    }
    assert learning_text.mean_and_interval([6500.0, 6600.0, 6700.0]) == f"6600.0 +- {430.27 / 3**0.5:.1f}"
    assert learning_text.mean_and_interval([65.0]) == "65.0"
    (line,) = learning_text.verdict(runs).splitlines()
    assert line == "QT: 5 of 6 above untrained, 6 of 6 above random words; both: MR, CR, SUBJ, MPQA, MRPC"
    assert "| QT (3) | 66.0 +- 2.5 |" in learning_text.table(runs)
    first, again, other = (learning_text.RandomWords(4, seed) for seed in (0, 0, 1))
    assert np.array_equal(first(["A dog .", ""]), again(["a DOG .", "."]))
    assert not np.allclose(first(["a"]), other(["a"]))
    assert first(["a b"])[0] == pytest.approx((first(["a"])[0] + first(["b"])[0]) / 2)


@pytest.mark.slow
def test_quick_thoughts_learns_from_real_text(shared_data, tmp_path):
    """A third of the study's updates is enough for the tasks that profit most."""
    runs = tmp_path / "runs"
    corpus = learning_text.link_corpus(shared_data, "reviews", runs)
    found = {
        name: learning_text.run(name, 0, shared_data / "senteval", corpus, runs, steps=200)
        for name in (*learning_text.BASELINES, "QT", "DCL+CLLR")
    }
    for name in ("QT", "DCL+CLLR"):
        for baseline in learning_text.BASELINES:
            assert found[name]["MR"] > found[baseline]["MR"] + 1
            assert found[name]["SUBJ"] > found[baseline]["SUBJ"] + 5
