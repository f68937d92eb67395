"""Mistakes of SentEval scripts: one message each, or the right result."""

import hashlib
import os
import re
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch

from dipole.core.cli import main
from dipole.core.evaluation import logistic
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import DataError, OptionError
from dipole.text import senteval
from dipole.text.senteval.engine import as_rows, task_names
from dipole.text.senteval.protocols import ProbeSettings, classify, pair_features
from dipole.text.senteval.tasks import DIGESTS, Split, Task, load_task
from dipole.text.senteval.torch_classifier import Classifier
from tests.runs import refused
from tests.text.test_using import trained

UNDER_A_FILE = str(Path(__file__) / "cache")


@pytest.fixture
def tiny(tmp_path):
    """CR with 20 + 20 lines."""
    folder = tmp_path / "downstream/CR"
    folder.mkdir(parents=True)
    for file, word in (("custrev.pos", "good"), ("custrev.neg", "bad")):
        (folder / file).write_text("\n".join(f"{word} {'a ' * (i % 5)}w{i}" for i in range(20)) + "\n")
    return tmp_path


def rows(params, batch):
    return np.array([[float("good" in s), len(s), len("".join(s))] for s in batch])


def engine(path, batcher=rows, **more):
    given = {"task_path": str(path), "kfold": 4, "check": False, "progress": False} | more
    return senteval.SE(given, batcher)


@pytest.mark.parametrize(("given", "message"), [
    ({"kfold": 1}, "kfold must be a whole number >= 2, got 1"), ({"similarity": 3}, "similarity must be a function"),
    ({"kfold": 5.0}, "kfold must be"), ({"seed": -1}, "seed must be"),
    ({"seed": 2**40}, "seed must be .*got 1099511627776"), ({"batch_size": 0}, "batch_size must be"),
    ({"usepytorh": True}, "Did you mean 'usepytorch'"), ({"usepytorch": "yes"}, "usepytorch must be"),
    ({"cache": 3, "cache_key": "k"}, "cache must be a folder, got 3"),
    ({"cache": UNDER_A_FILE, "cache_key": "k"}, f"cache: the folder {re.escape(UNDER_A_FILE)} cannot be written"),
    ({"cache": "a\0b", "cache_key": "k"}, "cannot be written: embedded null"),
    ({"usepytorch": True, "protocol": "fast"}, "contradict"), ({"cache": "x"}, "needs 'cache_key'"),
    ({"protocol": "fats"}, "Did you mean 'fast'"), ({"task_path": None}, "needs 'task_path'"),
    ({"classifier": {"optim": "adam"}}, "classifier needs 'nhid'"),
    ({"classifier": {"nhid": 0, "tenacty": 3}}, "Did you mean 'tenacity'"),
    ({"classifier": {"nhid": 0, "optim": "adem"}}, "Did you mean 'adam'"),
    ({"classifier": {"nhid": 0, "optim": "sgd"}}, "learning rate"),
    ({"classifier": [0]}, "classifier must be a dictionary"), ({"classifier": {"nhid": 0, 3: 4}}, "has no setting 3"),
    ({"classifier": {"nhid": -1}}, "nhid must be a whole number >= 0"),
    ({"classifier": {"nhid": 0, "max_epoch": -1}}, "max_epoch must be"),
    ({"classifier": {"nhid": 0, "batch_size": 0}}, "batch_size must be"),
    ({"classifier": {"nhid": 0, "dropout": 1.0}}, "dropout must be"),
    ({"classifier": {"nhid": 0, "optim": 3}}, "optim must be text"),
    ({"classifier": {"nhid": 0, "optim": "sgd,lr=-1"}}, "optim 'sgd,lr=-1'"),
])  # fmt: skip
def test_a_wrong_parameter_is_one_message(tiny, given, message):
    refused(OptionError, message, engine, tiny, **given)


def test_repeated_tasks_bytes_and_known_files(shared_data):
    assert task_names({"MR", "CR"}) == ["CR", "MR"]
    assert task_names(["MR", "CR", "MR"]) == ["MR", "CR"]
    assert task_names("MR") == ["MR"]
    refused(OptionError, "task_path must be the folder", load_task, "CR", {"task_path": "data"})
    left, right = np.array([[3, 200]], dtype=np.uint8), np.array([[5, 100]], dtype=np.uint8)
    assert np.array_equal(pair_features(left, right), [[2, 100, 15, 20000]])
    for relative, digest in DIGESTS.items():
        assert hashlib.sha256((shared_data / "senteval" / relative).read_bytes()).hexdigest() == digest
    assert load_task("CR", shared_data / "senteval").changed == ()


def uneven(params, batch):
    return np.ones((len(batch), 3 + (len(batch[0]) > 4)))


def constant(value, params, batch):
    return np.full((len(batch), 3), value)


@pytest.mark.parametrize(("given", "tasks", "error", "message"), [
    *(({}, tasks, OptionError, "tasks must be names") for tasks in (None, [], set(), 3, [None], b"CR")),
    ({"kfold": 21}, "CR", DataError, "20 samples, fewer than the 21 folds"),
    ({"batcher": uneven, "batch_size": 8}, "CR", DataError, "vectors of 3 and 4 numbers"),
    ({"usepytorch": True, "classifier": {"nhid": 10**9}}, "CR", OptionError, "of 10{9} hidden units of .* takes .* GB"),
    *(
        ({"batcher": partial(constant, value), "protocol": protocol}, "CR", DataError, r"1e\+30|NaN or infinity")
        for value, protocol in product((1e30, np.nan, np.inf), ("fast", "senteval-sklearn"))
    ),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(tiny, given, tasks, error, message):
    refused(error, message, engine(tiny, **given).eval, tasks)
    assert engine(tiny, model=object(), word_vec={}, samples=3, eval_batch_size=8).params.samples == 3


@pytest.mark.parametrize("value", [
    torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.float16), torch.ones(2, 3, requires_grad=True),
    [torch.ones(3), torch.ones(3, requires_grad=True)], [[1.0, 1.0, 1.0]] * 2, np.ones((2, 3), dtype=np.uint8),
    np.ones((2, 3), dtype=bool), scipy.sparse.csr_matrix(np.ones((2, 3))), torch.ones(2, 3).to_sparse(),
    scipy.sparse.coo_array(np.ones((2, 3), dtype=np.float32)), np.ma.masked_array(np.ones((2, 3))),
])  # fmt: skip
def test_vectors_of_any_kind_become_floats(value):
    found = as_rows(value, 2, "CR")
    assert found.dtype in (np.float32, np.float64)
    assert np.array_equal(found, np.ones((2, 3)))


@pytest.mark.parametrize(("value", "message"), [
    ([[1.0], [1.0, 2.0]], r"2 sentences must be numbers of shape \(n, d\): setting an array element"),
    ([torch.ones(3), torch.ones(2)], "tensors that do not stack"), (np.ones((2, 0)), r"shape \(2, 0\)"),
    (["a", "b"], r"must be numbers of shape \(n, d\), got list of <U1\.$"), (None, "got NoneType of object"),
    (np.ones(2), r"shape \(2,\)"), (np.ones((2, 3, 1)), r"shape \(2, 3, 1\)"), (np.ones((2, 3), complex), "complex128"),
    (np.ones((3, 3)), r"CR: the vectors of 2 sentences have shape \(3, 3\): .* must return one each, \(n, d\)"),
    (np.ma.masked_array(np.ones((2, 3)), mask=[[0, 0, 1], [0, 0, 0]]), "masked values"),
])  # fmt: skip
def test_what_is_no_vectors_is_one_message(value, message):
    refused(DataError, message, as_rows, value, 2, "CR")


@pytest.mark.parametrize(("task", "file", "text", "message"), [
    ("SST5", "SST/fine/sentiment-train", "5 so good\n", "label 5 is none of 0 to 4"),
    ("SST2", "SST/binary/sentiment-train", "so good\t2\n", "label 2 is none of 0 to 1"),
    ("SST2", "SST/binary/sentiment-train", "so good\n", "not a number"),
    ("MRPC", "MRPC/msr_paraphrase_train.txt", "h\th\th\th\th\n7\t1\t2\ta\tb\n", "label 7 is none of 0 to 1"),
    ("MRPC", "MRPC/msr_paraphrase_train.txt", "h\th\th\th\th\nnan\t1\t2\ta\tb\n", "not a number"),
    ("TREC", "TREC/train_5500.label", "NOSUCH:x what ?\n", "COARSE one of"),
])  # fmt: skip
def test_odd_labels(tmp_path, task, file, text, message):
    path = tmp_path / "downstream" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    refused(DataError, message, load_task, task, tmp_path, check=False)


def test_a_changed_file_is_said_in_the_result_the_record_and_eval(tiny, tmp_path, capsys):
    with pytest.warns(UserWarning, match=r"custrev.pos is not the known file: its sha256 is .* expected 91a20a4f"):
        result = engine(tiny).eval("CR")
    content = (tiny / "downstream/CR/custrev.neg").read_bytes()
    assert len(result.changed) == 2
    assert hashlib.sha256(content).hexdigest() in result.changed[1]
    for name, count in (("custrev.pos", 2407), ("custrev.neg", 1368)):
        (tiny / "downstream/CR" / name).write_text("".join(f"word{i % 24} {name}\n" for i in range(count)))
    with pytest.warns(UserWarning, match="is not the known file"):
        run = trained(tmp_path / "run", encoder="bow", senteval=str(tiny), tasks=["CR"], kfold=2)
    notes = RunFolder(run).read_record().notes
    assert sum("custrev.pos is not the known file" in line for line in notes) == 1
    capsys.readouterr()
    with pytest.warns(UserWarning, match="is not the known file"):
        assert main(["eval", str(run)]) == 0
    assert capsys.readouterr().out.count("custrev.neg is not the known file") == 1
    assert any("custrev.neg" in line for line in RunFolder(run).read_record().evaluations[-1].notes)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_may_not_be_read(tiny):
    folder = tiny / "downstream/CR"
    folder.chmod(0)
    try:
        refused(DataError, r"cannot be read .* look at its permissions", engine(tiny).eval, "CR")
    finally:
        folder.chmod(0o755)


def test_word_content_has_no_hidden_units():
    draw = np.random.default_rng(0)
    y = draw.integers(2, size=60)
    x = {name: draw.normal(size=(60, 3)) + y[:, None] for name in ("train", "dev", "test")}
    splits = {name: Split([[["w"]] * 60], list(y)) for name in x}

    def probe(nhid, linear):
        task = Task("toy", "split", splits, classes=2, linear=linear)
        how = Classifier(nhid=nhid, max_epoch=3, epoch_size=1)
        found = classify(task, splits, x, ProbeSettings("senteval-torch", 4, classifier=how))
        return found.dev, found.test, found.predicted[0].tolist()

    assert probe(50, linear=True) == probe(0, linear=True) == probe(0, linear=False)
    assert probe(50, linear=False) != probe(0, linear=False)


def test_what_has_not_converged_is_said(monkeypatch):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 5))
    y = (x[:, 0] + draw.normal(size=200) > 0).astype(int)
    monkeypatch.setattr(logistic, "STEPS", 1)
    task = Task("toy", "nested", {"all": Split([[["w"]] * 200], list(y))}, 2)
    with pytest.warns(logistic.NotConverged, match=r"of 36 logistic regressions did not converge"):
        assert classify(task, task.splits, {"all": x}, ProbeSettings("fast", 2)).unconverged > 18


@pytest.mark.parametrize("value", ["x", None, float("nan"), np.ones(2)])
def test_scores_and_similarities_lie_in_their_range(tmp_path, value):
    """An STS Benchmark of ten pairs a split."""
    folder = tmp_path / "downstream/STS/STSBenchmark"
    folder.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        lines = [f"main\tx\t2012\t{i}\t{i / 2}\ta{i} b\tb{i} a a\n" for i in range(10)]
        (folder / f"sts-{split}.csv").write_text("".join(lines))
    asked, task = engine(tmp_path, similarity=lambda left, right: value), "STSBenchmark-cosine"
    refused(DataError, rf"{task}: similarity returned .*; it must be a finite number", asked.eval, task)
    with (folder / "sts-test.csv").open("a") as file:
        file.write("main\tx\t2012\t10\t9\ta b\tb a a\n")
    for task in ("STSBenchmark", "STSBenchmark-cosine"):
        refused(DataError, r"sts-test\.csv, line 11: the score 9 is none of 0 to 5", engine(tmp_path).eval, task)
