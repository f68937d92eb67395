"""SentEval's interface: same parameters, same result keys, every distinct sentence encoded once."""

import io
import json
import sys

import numpy as np
import pytest
from scipy.stats import pearsonr

from dipole.core.utils.errors import DataError
from dipole.text import senteval
from dipole.text.senteval.engine import ASKED
from dipole.text.senteval.relatedness import relatedness_result, soft_targets
from dipole.text.senteval.tables import six_task_table

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
