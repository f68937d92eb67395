"""Similarity tasks in SentEval's folder layout: by cosine, by split, and as the numbers and tables of a record."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from dipole.core.utils.errors import DataError
from dipole.core.utils.seeding import Seeds
from dipole.text import senteval
from dipole.text.adapter import TextAdapter
from dipole.text.config import TextSettings
from dipole.text.senteval.relatedness import sts_result
from dipole.text.senteval.scoring import numbers_of
from dipole.text.senteval.tables import sts_table, written_tables
from dipole.text.senteval.tasks import STS

WORDS = np.array([f"w{i}" for i in range(40)])


def encode(sentences):
    """Sums of fixed random word vectors."""
    table = dict(zip(WORDS, np.random.default_rng(0).normal(size=(40, 6)), strict=True))
    return np.stack([sum((table[w] for w in s.split()), np.zeros(6)) for s in sentences])


def cosines(pairs):
    left, right = (encode([pair[side] for pair in pairs]) for side in (0, 1))
    return (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)


def draw_pairs(draw, count):
    pairs = [tuple(" ".join(draw.choice(WORDS, size=draw.integers(2, 7))) for _ in range(2)) for _ in range(count)]
    return pairs, np.round(draw.uniform(0, 5, count), 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """SentEval's files: STS12 to STS16 small, STS-B and SICK with as many lines as the published ones."""
    root, draw, truth = tmp_path_factory.mktemp("senteval"), np.random.default_rng(1), {}
    for year, sets in STS.items():
        place = root / f"downstream/STS/{year}-en-test"
        place.mkdir(parents=True)
        for count, name in enumerate(sets, 5):
            pairs, gold = truth[year, name] = draw_pairs(draw, 3 * count)
            (place / f"STS.input.{name}.txt").write_text("\n".join("\t".join(pair) for pair in pairs) + "\n")
            (place / f"STS.gs.{name}.txt").write_text("\n".join(map(str, gold)) + "\n")
    place = root / "downstream/STS/STSBenchmark"
    place.mkdir()
    for split, count in (("train", 5749), ("dev", 1500), ("test", 1379)):
        pairs, gold = truth["STSB", split] = draw_pairs(draw, count)
        lines = [f"main\tnews\t2012\t{i}\t{y}\t{a}\t{b}" for i, ((a, b), y) in enumerate(zip(pairs, gold, strict=True))]
        (place / f"sts-{split}.csv").write_text("\n".join(lines) + "\n")
    place = root / "downstream/SICK"
    place.mkdir()
    for split, file, count in (
        ("train", "SICK_train", 4500), ("dev", "SICK_trial", 500), ("test", "SICK_test_annotated", 4927)
    ):  # fmt: skip
        pairs, gold = truth["SICK", split] = draw_pairs(draw, count)
        lines = [f"{i}\t{a}\t{b}\t{y}\tNEUTRAL" for i, ((a, b), y) in enumerate(zip(pairs, gold, strict=True))]
        (place / f"{file}.txt").write_text(
            "\n".join(["pair_ID\tsentence_A\tsentence_B\tscore\tjudgment", *lines]) + "\n"
        )
    return root, truth


def test_cosine_tasks_score_each_split_by_itself(folder):
    root, truth = folder
    for task, key in (("STSBenchmark-cosine", "STSB"), ("SICKRelatedness-cosine", "SICK")):
        result = senteval.evaluate(encode, [task], root, progress=False)[task]
        for split in ("train", "dev", "test"):
            pairs, gold = truth[key, split]
            assert result[split]["spearman"][0] == pytest.approx(spearmanr(cosines(pairs), gold)[0], abs=1e-9)
            assert result[split]["pearson"][0] == pytest.approx(pearsonr(cosines(pairs), gold)[0], abs=1e-9)
            assert result[split]["nsamples"] == len(gold)
        assert set(numbers_of(task, result)) == {
            f"senteval/{task}/{split}/{measure}" for split in ("dev", "test") for measure in ("pearson", "spearman")
        }
        line = senteval.describe(task, result)
        assert f"dev {result['dev']['spearman'][0]:.4f}  test {result['test']['spearman'][0]:.4f}" in line


def test_years_are_summed_up_in_three_ways_through_the_engine(folder):
    root, truth = folder
    engine = senteval.SE(
        {"task_path": str(root), "progress": False}, lambda params, batch: encode([" ".join(s) for s in batch])
    )
    found = engine.eval(list(STS))
    for year, result in found.items():
        parts = [truth[year, name] for name in STS[year]]
        each = [spearmanr(cosines(pairs), gold)[0] for pairs, gold in parts]
        sizes = [len(gold) for _, gold in parts]
        together = spearmanr(np.concatenate([cosines(p) for p, _ in parts]), np.concatenate([g for _, g in parts]))[0]
        assert result["all"]["spearman"] == pytest.approx(
            {"mean": np.mean(each), "wmean": np.average(each, weights=sizes), "all": together}, abs=1e-9
        )
        numbers = numbers_of(year, result)
        assert numbers[f"senteval/{year}/spearman"] == pytest.approx(together, abs=1e-9)
        assert numbers[f"senteval/{year}/spearman_wmean"] == result["all"]["spearman"]["wmean"]
        assert [result[name]["nsamples"] for name in STS[year]] == sizes


def test_constant_similarities_have_no_correlation():
    assert sts_result({"a": [0.0, 0.0]}, {"a": [1.0, 2.0]})["a"]["pearson"][0] == 0


def test_the_table_has_a_mean_of_seven_test_columns(folder):
    tasks = [*STS, "STSBenchmark-cosine", "SICKRelatedness-cosine"]
    found = senteval.evaluate(encode, tasks, folder[0], progress=False)
    head, row = (line.split() for line in sts_table({"mine": found}).splitlines())
    assert head == [*STS, "STS-B", "SICK-R", "STS-B", "dev", "mean"]
    values = [float(each) for each in row[1:]]
    assert values[-1] == pytest.approx(np.mean(values[:7]), abs=0.011)
    assert values[7] == pytest.approx(100 * found["STSBenchmark-cosine"]["dev"]["spearman"][0], abs=0.006)
    assert set(written_tables(found)) == {"sts.txt"}
    part = {task: found[task] for task in tasks[:3]}
    assert sts_table({"mine": part}).splitlines()[1].split()[-1] == "-"


def test_a_run_names_the_split_of_its_numbers(folder, tmp_path):
    adapter = TextAdapter(
        TextSettings(pairs="views", dropout=0.1, encoder="bow", word_size=4, limit=100, senteval=str(folder[0]),
                     tasks=("STSBenchmark-cosine",)),
        seed=Seeds(0), device=torch.device("cpu"), workdir=tmp_path, batch_size=8,
    )  # fmt: skip
    found = adapter.evaluate(None)
    assert {"senteval/STSBenchmark-cosine/dev/spearman", "senteval/STSBenchmark-cosine/test/spearman"} <= set(found)
    assert (tmp_path / "sts.txt").read_text().splitlines()[1].startswith("this run")
    assert not (tmp_path / "senteval.txt").exists()
    assert json.dumps(found)


def test_a_missing_split_names_its_place(folder, tmp_path):
    with pytest.raises(DataError, match=r"STSBenchmark-cosine: no file .*sts-train\.csv"):
        senteval.load_task("STSBenchmark-cosine", tmp_path)
