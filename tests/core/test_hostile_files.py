"""Files of runs that somebody else has made: a value or one short error of ours, soon; never a hang, never code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from dipole.core.record import read_record
from dipole.core.record.additions import read_additions
from dipole.core.train.checkpoint import save_checkpoint, starting_state
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load, read_recipe
from dipole.core.train.run_folder import RunFolder, find_run
from dipole.core.utils.errors import CheckpointError, DipoleError, ReceivedError, TrainingError
from dipole.core.utils.received import parse_json, parse_toml, read_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from hostile import NO_FILES, answered, contents, settings_of, toml_contents

from tests.systems import was_killed

RECORD = json.loads((Path(__file__).parents[1] / "benchmarks" / "records" / "v1-vision.json").read_text())
RECORD["histogram"] = {"edges": [0.0, 0.5, 1.0], "all": [1, 2], "same": [0, 1], "different": [1, 1]}
RECIPE = read_recipe("digits-simclr")
LINE = {"step": 10, "epoch": 0.5, "time": 1.25, "train/loss": 2.5, "eval/knn/accuracy": None}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", ["record.json", "metrics.jsonl", "config.toml", "measured.json", ".pid"])
def test_what_is_no_file_is_not_waited_for(tmp_path, name, kind):
    run = tmp_path / "0123456789ab"
    run.mkdir()
    (run / "record.json").write_text(json.dumps(RECORD | {"status": "running"}))
    (run / name).unlink(missing_ok=True)
    NO_FILES[kind](run / name)
    for call in (
        lambda: read_record(run / "record.json"),
        lambda: read_metrics(run / "metrics.jsonl"),
        lambda: RunFolder(run).read_config(),
        lambda: read_additions(run),
        lambda: load(run / "config.toml"),
        lambda: find_run("0123", tmp_path),
    ):
        answered(call)


def read(reader: Any, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    answered(lambda: reader(path))


@settings_of(150, is_quick=True)
@given(contents(RECORD))
def test_records(tmp_path_factory, content):
    read(read_record, tmp_path_factory.getbasetemp() / "record.json", content)


@pytest.mark.slow
@settings_of(20_000, is_quick=False)
@given(contents(RECORD))
def test_many_records(tmp_path_factory, content):
    read(read_record, tmp_path_factory.getbasetemp() / "record.json", content)


@settings_of(150, is_quick=True)
@given(contents(LINE))
def test_metrics(tmp_path_factory, content):
    read(read_metrics, tmp_path_factory.getbasetemp() / "metrics.jsonl", content)


@pytest.mark.slow
@settings_of(20_000, is_quick=False)
@given(contents(LINE))
def test_many_metrics(tmp_path_factory, content):
    read(read_metrics, tmp_path_factory.getbasetemp() / "metrics.jsonl", content)


@settings_of(60, is_quick=True)
@given(toml_contents(RECIPE))
def test_recipes(tmp_path_factory, content):
    read(load, tmp_path_factory.getbasetemp() / "recipe.toml", content)


@pytest.mark.slow
@settings_of(10_000, is_quick=False)
@given(toml_contents(RECIPE))
def test_many_recipes(tmp_path_factory, content):
    read(load, tmp_path_factory.getbasetemp() / "recipe.toml", content)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 65 + "]" * 65, "nested deeper"),
        ('{"a":' * 10**5, "nested deeper"),
        ("9" * 5000, "limit"),
        ("NaN", "no number"),
        ("[-Infinity]", "no number"),
        ("1e999", "beyond what a float holds"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' stands twice"),
        (r'"\ud800"', "surrogate"),
        ("", "Expecting value in line 1"),
    ],
)
def test_json_that_is_none(tmp_path, text, said):
    with pytest.raises(ValueError, match=said):
        parse_json(text)
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ReceivedError, match=rf"^{tmp_path}/x\.json is damaged: .*{said}"):
        read_json(tmp_path / "x.json")


def test_json_that_is_some():
    text = r'{"a": [1, -2.5e-3, null, true, "\ud83d\ude00", "[[[["], "b": {}}'
    assert parse_json(text) == json.loads(text)
    brackets = json.dumps({"a": "[" * 1000, "b": [[1]] * 1000})
    assert parse_json(brackets) == json.loads(brackets)


@pytest.mark.parametrize(
    "text",
    [
        "a." * 100_000 + "b = 1",
        '"a".' * 50_000,
        " a . " * 50_000,
        "a = " + "{b=" * 70_000,
        "9" * 250_000,
        "a" * 250_000,
    ],
)
def test_toml_that_is_none(text):
    def call() -> None:
        with pytest.raises(ValueError):  # noqa: PT011 (whatever the library says)
            parse_toml(text)

    answered(call)


def test_a_file_is_said_once_and_shortly(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({str(n) * 50: "y" * 1000 for n in range(3000)}))
    with pytest.raises(DipoleError, match=r"and 299\d more") as caught:
        read_record(path)
    assert len(str(caught.value)) < 2000


def put(folder: Path, state: Any) -> Path:
    """A checkpoint with a right hash, whatever is in it."""
    return save_checkpoint(folder, 4, state)


KILLED = """
import psutil, sys
from pathlib import Path
from dipole.core.utils.files import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.mkdir()
    (temporary / "replay.npz").write_bytes(bytes(9))
    psutil.Process().kill()
"""


def test_what_a_kill_leaves_is_removed_at_the_next_opening(blobs, tmp_path):
    config = load(blobs).config
    folder = RunFolder(tmp_path / config.hash)
    mine = folder.checkpoints / ".mine.tmp"
    mine.parent.mkdir(parents=True)
    mine.touch()
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder.checkpoints / "agent-000000012")])
    assert was_killed(done.returncode)
    for place in (folder.path, folder.model, folder.kept, folder.checkpoints, folder.checkpoints / "best"):
        place.mkdir(parents=True, exist_ok=True)
        (place / ".step-00000004.0123abcd.tmp.safetensors").touch()
    left = [path for path in folder.path.rglob(".*") if ".tmp" in path.name and path != mine]
    assert len(left) == 6
    folder.open(config)
    left[0].touch()
    with pytest.raises(TrainingError, match="another process"):  # who cannot have the lock removes nothing
        RunFolder(folder.path).open(config)
    assert [path for path in left if path.exists()] == [left[0]]
    folder.close()
    folder.open(config)
    folder.close()
    assert not any(path.exists() for path in left)
    assert mine.exists()


@pytest.mark.parametrize("state", [None, [], {}, {"format": 1}, {"format": 1, "hash": []}, {"format": 1, "hash": "a"}])
def test_what_is_no_state_is_one_error(tmp_path, state):
    path = put(tmp_path, state)
    with pytest.raises(CheckpointError):
        starting_state(tmp_path, {"a"}, path, lambda said: None)
