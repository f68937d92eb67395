"""SentEval's files: counts, orders, and the damage that must not pass unnoticed."""

import shutil

import pytest

from dipole.core.utils.errors import DataError
from dipole.text.senteval.tasks import STS, load_task

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
    (
        "SUBJ/subj.subjective",
        lambda data: b'<?xml version="1.0"?><Error><Code>Denied</Code></Error>',
        "error page",
    ),
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
