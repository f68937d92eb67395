"""Tables with a column of labels: a filter, weights, and labels that would be ignored."""

import warnings

import numpy as np
import pytest
import torch

import dipole
from dipole.core.utils.errors import DataError
from dipole.text.pair_labels import PairLabel
from dipole.text.pair_table import read_pairs
from tests.text.made import text_adapter, write_rows


def table_of(folder, labels, name="label", anchor="sentence1", positive="sentence2"):
    rows = [{"id": i, anchor: f"a{i} x", positive: f"b{i} y", name: label} for i, label in enumerate(labels)]
    return write_rows(folder / "pairs.jsonl", rows)


@pytest.mark.parametrize(
    ("columns", "name", "labels"),
    [
        (("sentence1", "sentence2"), "label", [1, 0, 1]),  # QQP
        (("sentence1", "sentence2"), "score", [5.0, 3.8, 0.4]),  # STS-B
        (("premise", "entailment"), "gold_label", ["entailment", "neutral", "entailment"]),
        (("question", "answer"), "Similarity", ["0.9", "0.9", "0.1"]),
        (("text1", "text2"), "is_duplicate", [True, False, True]),
        (("question1", "question2"), "isDuplicate", [0, 1, 1]),
        (("Premise", "Hypothesis"), "label", [0, 2, -1]),  # SNLI
        (("#1 String", "#2 String"), "Quality", ["1", "0", "1"]),  # MRPC
        (("sentence_A", "sentence_B"), "relatedness score", [4.5, 3.2, 4.5]),  # SICK
        (("Query", "passage"), "Relevance", [1, 0, 1]),
    ],
)
def test_labels_that_vary_are_not_ignored(tmp_path, columns, name, labels):
    source = table_of(tmp_path, labels, name, *columns)
    with pytest.raises(DataError, match=rf"line [23]: the column '{name}' .*text.label = '{name}'.*text.columns"):
        read_pairs(source)
    with pytest.warns(UserWarning, match=f"the column '{name}' is unused.*Every row is trained .*text.label"):
        assert len(read_pairs(source, columns)) == 3


def test_unused_columns_are_named(tmp_path):
    with pytest.warns(UserWarning, match="pairs are 'sentence1', 'sentence2'. Unused: 'id', 'label'"):
        assert len(read_pairs(table_of(tmp_path, [1, 1, 1]))) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_pairs(table_of(tmp_path, [1, 1, 1]), ["sentence1", "sentence2"])


@pytest.mark.parametrize(
    ("labels", "start", "kept"),
    [
        ([1, 0, 1], None, [0, 2]),
        (["1", "0", "0"], None, [0]),
        ([True, None, False, "yes"], None, [0, 3]),
        ([5.0, 3.8, 0.4], 3.5, [0, 1]),
        ([0.0, -0.5, -1.0], 0, [0]),
        ([0, 2, -1, 1, 0], "0", [0, 4]),  # NLI as the Hub has it
        (["entailment", "neutral", "Entailment "], "entailment", [0, 2]),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.filterwarnings("ignore:.*Unused")
def test_label_filters(tmp_path, labels, start, kept, cached):
    folder = tmp_path / "cache" if cached else None
    source = table_of(tmp_path, labels)
    for _ in range(2):  # the cache is read back
        table = read_pairs(source, label=PairLabel("label", "filter", start), folder=folder)
        assert [table.texts[i] for i in table.anchor] == [f"a{i} x" for i in kept]
        assert (table.filtered, table.weights) == (len(labels) - len(kept), None)


@pytest.mark.parametrize(
    ("labels", "label", "message"),
    [
        ([1, 3.8], PairLabel("label"), r"line 2: the column 'label' holds 3\.8.*text.label_from.*'target'"),
        ([1, -1], PairLabel("label"), "line 2: .* holds -1"),
        (["neutral"], PairLabel("label"), "the label 'neutral' is no number.*text.label_from"),
        ([0, 0], PairLabel("label"), "none of 2 rows has a label of a pair in 'label'"),
        ([-0.2], PairLabel("label", "target"), "the label -0.2 is negative"),
        ([0, 0], PairLabel("label", "target"), "all labels in the column 'label' are 0"),
        ([1], PairLabel("lable"), "no column 'lable'.*label"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Unused")
def test_wrong_labels_are_one_message(tmp_path, labels, label, message):
    with pytest.raises(DataError, match=message):
        read_pairs(table_of(tmp_path, labels), label=label)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.filterwarnings("ignore:.*Unused")
def test_labels_weight_pairs(tmp_path, cached):
    """The loss is the mean of rows weighted by label / highest label."""
    scores = [5.0, 2.5, 0.0, 4.0]
    settings = {"label": "score", "label_use": "target", "cache": str(tmp_path / "cache") if cached else None}
    table = {"corpus": table_of(tmp_path, scores, "score"), "pairs": "columns", "encoder": "bow", "word_size": 4}
    adapter = text_adapter({**table, "held_out": 0, **settings}, 4, workdir=tmp_path)
    embedded = adapter.embed(next(iter(adapter.batches(0))))
    weights = np.array(scores)[embedded.rows["index"].numpy()] / 5
    assert embedded.rows["weights"].numpy() == pytest.approx(weights)
    objective = dipole.objective("infonce(temperature=0.5)")
    anchor, positive = (torch.nn.functional.normalize(embedded.rows[name].double()) for name in ("anchor", "positive"))
    scaled = anchor @ positive.T / 0.5
    losses = (scaled.logsumexp(1) - scaled.diagonal()).detach().numpy()
    assert objective(embedded).loss.item() == pytest.approx((weights * losses).sum() / weights.sum(), rel=1e-5)


def test_no_duplicates_says_what_it_leaves_out(tmp_path):
    rows = [{"anchor": f"a{i}", "positive": "the same" if i % 9 else f"b{i}"} for i in range(27)]
    corpus = write_rows(tmp_path / "pairs.jsonl", rows)
    settings = {"corpus": corpus, "pairs": "columns", "encoder": "bow", "word_size": 4, "held_out": 0}
    with pytest.warns(UserWarning, match=r"leaves out \d+ of 27 rows .*'the same' stands in 24 rows.*batch_size"):
        adapter = text_adapter(settings, 2, workdir=tmp_path)
    assert adapter.steps_per_epoch <= 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*tokens on average")
        text_adapter({**settings, "no_duplicates": False}, 2, workdir=tmp_path)
