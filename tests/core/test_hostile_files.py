"""Files, recipes and objectives that a stranger sends: a value or one short error of ours, soon; never code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dipole
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import parse
from dipole.core.record import read_record
from dipole.core.record.additions import read_additions
from dipole.core.train.checkpoint import save_checkpoint, starting_state
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load, parse_override, read_recipe, resolve
from dipole.core.train.run_folder import RunFolder, find_run
from dipole.core.utils.errors import CheckpointError, DipoleError, OptionError, ReceivedError, SpecError, TrainingError
from dipole.core.utils.received import parse_json, parse_toml, read_json
from tests.hostile import NO_FILES, answered, contents, settings_of, toml_contents
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


def read(reader: Any, name: str) -> Any:
    """Return a function that reads a content from a file of this name."""

    def call(folder: Path, content: bytes) -> None:
        (folder / name).write_bytes(content)
        reader(folder / name)

    return call


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
    ids=range(6),
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
    """A checkpoint with a right hash, whatever is in it."""
    path = save_checkpoint(tmp_path, 4, state)
    with pytest.raises(CheckpointError):
        starting_state(tmp_path, {"a"}, path, lambda said: None)


NAMES = [entry.name for entry in registry.entries()]
OPTIONS = sorted({option.name for entry in registry.entries() for option in entry.options})
ODD_NUMBERS = st.sampled_from(["9" * 4000, "1e999", "nan"])
NUMBERS = st.one_of(st.integers(-5, 5), st.integers(-(10**30), 10**30), st.floats(), ODD_NUMBERS).map(str)
VALUES = NUMBERS | st.sampled_from(["true", "none", "learned", "cosine", "'a'", "[", "(1)"]) | st.text(max_size=5)
OPTION = st.tuples(st.sampled_from([*OPTIONS, "self", "", "temperatur"]), VALUES).map("=".join)
TERM = st.builds(
    lambda weight, name, options: f"{weight}{name}({', '.join(options)})",
    st.one_of(st.just(""), NUMBERS.map(lambda number: f"{number}*")),
    st.one_of(st.sampled_from(NAMES), st.text(max_size=8)),
    st.lists(OPTION, max_size=3),
)
SPEC = st.one_of(st.lists(TERM, min_size=1, max_size=4).map(" + ".join), st.text(max_size=60))


KEYS = st.sampled_from(
    ["train.steps", "train.batch_size", "objective", "seed", "domain", "train", "vision.views", "train.schedule"]
)
OVERRIDE = st.tuples(KEYS | st.text(max_size=10), VALUES | SPEC).map("=".join)
SENT = {  # what is sent, what reads it in a folder, and how many examples are drawn in the quick and the slow test
    "record": (contents(RECORD), read(read_record, "record.json"), 150, 20_000),
    "metrics": (contents(LINE), read(read_metrics, "metrics.jsonl"), 150, 20_000),
    "recipe": (toml_contents(RECIPE), read(load, "recipe.toml"), 60, 10_000),
    "objective": (SPEC, lambda folder, text: dipole.objective(text, dim=8), 300, 36_500),
    "settings": (st.lists(OVERRIDE, max_size=3), lambda folder, sets: resolve(RECIPE, sets), 60, 3000),
}


@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", SENT)
def test_whatever_is_sent_is_answered(tmp_path, kind, is_quick):
    strategy, call, few, many = SENT[kind]

    @settings_of(few if is_quick else many, is_quick)
    @given(strategy)
    def every(sent):
        answered(lambda: call(tmp_path, sent))

    every()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1" * 4000 + "*dp", "a number of more than 2000 characters"),
        ("1" * 10_000 + "*dp", "too long"),
        ("dp(self=None)", "no option 'self'"),
        ("cllr(dim=10000000000)", "10000000000 x 10000000000 takes"),
        ("swav(dim=10000000000)", "GB with its gradient"),
        ("cllr(dim=" + "9" * 30 + ")", "up to 9007199254740992"),
        ("\N{ARABIC-INDIC DIGIT ONE}*dp", "cannot read"),
    ],
)
def test_sizes_and_lengths_are_refused_before_they_cost_anything(text, said):
    with pytest.raises((SpecError, OptionError), match=said):
        dipole.objective(text)


def test_long_texts_are_shown_around_the_place_and_large_sizes_work():
    text = "infonce + " * 200 + "dq + " + "infonce + " * 200 + "dp"
    with pytest.raises(SpecError) as caught:
        dipole.objective(text)
    shown, marks = str(caught.value).splitlines()[-2:]
    assert shown[marks.index("^") : marks.rindex("^") + 1] == "dq"
    assert len(shown) < 200
    assert dipole.objective("cllr(dim=64)").terms[0].L.shape == (64, 64)
    with torch.device("meta"):
        assert dipole.objective("cllr", dim=100_000).terms[0].L.shape == (100_000, 100_000)


@pytest.mark.parametrize("content", ["a = " + "[" * 5000, "a = " + "9" * 5000, "[" * 3000, "\x00", "a = 1e99999"])
def test_recipes_that_are_none(tmp_path, content):
    answered(lambda: read(load, "recipe.toml")(tmp_path, content.encode()))


@pytest.mark.parametrize("name", ["a" * 5000, "a\x00b", "/" * 300, ""])
def test_names_that_no_recipe_has(name):
    answered(lambda: read_recipe(name))


@pytest.mark.parametrize("text", ["train.steps=" + "9" * 5000, "a=" + "[" * 5000, "=" * 5000, "a." * 5000 + "b=1"])
def test_overrides_that_are_none(text):
    answered(lambda: resolve(RECIPE, [text]))
    answered(lambda: parse_override(text))


@pytest.mark.parametrize(
    "text", ["infonce \x1b[2J + 0", "infonce(\x9b=1)", "dp +\x07", "in\u202efonce", "infonce +\x00 dcl"]
)
def test_errors_of_a_text_hold_no_control_characters(text):
    with pytest.raises(SpecError) as caught:
        parse(text)
    message = str(caught.value)
    assert all(each.isprintable() for each in message.replace("\n", ""))
    line, marks = message.splitlines()[1:]
    assert len(line) == 2 + len(text)
    wrong = next(place for place, each in enumerate(text) if not each.isprintable())
    assert marks.index("^") == 2 + wrong
