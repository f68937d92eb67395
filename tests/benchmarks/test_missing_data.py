"""Data that are not there are reported before the first job, with the command that fetches them."""

import json

import pytest

from dipole.core.cli import main

SUITE = """
name = "tiny"
title = "tiny"
columns = [{{ name = "a", metric = "knn/accuracy" }}]
rows = [{rows}]
[scale.small]
recipe = "{recipe}"
seeds = [0]
"""
ONE = '{ method = "one", objective = "infonce" }'
CASES = {
    "senteval": ("pydoc-bow", "text.senteval=data/senteval", "dipole data get senteval"),
    "corpus": ("pydoc-bow", "text.corpus=no.txt", "no corpus at no.txt"),
    "built": ("pydoc-bow", "text.corpus=wiki3029/wiki3029.jsonl.gz", "`dipole data wiki3029 --help`"),
    "labelled": ("pydoc-bow", "text.labelled=no.jsonl", "no labelled documents at no.jsonl"),
    "npz": ("digits-simclr", "vision.data.source=data/cifar10/train.npz", "dipole data get cifar10"),
    "test part": ("digits-simclr", "vision.data.test=gone/test.npz", "no data at gone/test.npz"),
    "folder": ("digits-simclr", "vision.data.source=./images", r"no data at './images'"),
    "shards": ("digits-simclr", "vision.data.source=wds:x-{000..002}.tar", "3 of 3 shards are missing"),
}


@pytest.mark.parametrize("case", CASES)
def test_train_and_a_suite_report_them_before_anything_is_made(case, tmp_path, capsys, monkeypatch):
    recipe, setting, said = CASES[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(SUITE.format(rows=ONE, recipe=recipe))
    assert main(["bench", "tiny.toml", "--plan", "--set", setting]) == 1
    assert said in "".join(capsys.readouterr())
    assert main(["bench", "tiny.toml", "--runs", "runs", "--set", setting]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["train", recipe, "--set", setting, "--quiet"]) == 1
    assert capsys.readouterr().err.count(said) == 1
    assert not list(tmp_path.rglob("config.toml"))


@pytest.mark.parametrize(
    ("recipe", "data", "setting"),
    [
        ("cifar10-simclr", "cifar10", "vision.data.source=data/cifar10/train.npz"),
        ("quick-thoughts", "bookcorpus", "text.corpus=data/bookcorpus"),
    ],
)
def test_a_set_of_the_hub_without_a_network_names_the_command(recipe, data, setting, tmp_path, capsys, monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert main(["train", recipe, "--quiet", "--runs", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"`dipole data get {data}` fetches it" in said
    assert f"--set {setting}" in said
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_be_built_leaves_no_folder(tmp_path):
    assert main(["train", "digits-simclr", "--quiet", "--runs", str(tmp_path), "--set", "train.batch_size=5000"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_suite_of_one_scale_needs_no_option(capsys):
    assert main(["bench", "lmcl-table5-500k", "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scale"] == "paper"
    assert main(["bench", "lmcl-table5-500k", "--plan", "--scale", "small"]) == 2
    assert "Add --scale paper." in capsys.readouterr().err
