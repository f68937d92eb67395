"""Files: atomic and verified where dipole writes them, a value or one short error where a stranger sends them."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

import dipole
from dipole import CheckpointError, DipoleError, OptionError, ReceivedError, RecordError, SpecError, TrainingError
from dipole.core.cli.commands.rm import _check_idle
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import parse
from dipole.core.record import RunRecord, finite, read_additions, read_record
from dipole.core.train.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint, starting_state
from dipole.core.train.metrics import MetricsFile, read_metrics
from dipole.core.train.model import load_weights
from dipole.core.train.recipe import load_recipe, parse_override, read_recipe, resolve
from dipole.core.train.run_folder import RunFolder, find_run
from dipole.core.utils.files import atomic_write, replacing
from dipole.core.utils.received import parse_json, parse_toml, read_json
from dipole.core.utils.seeding import rng_state
from tests.hostile import NO_FILES, answered, contents, settings_of, toml_contents
from tests.runs import refused
from tests.systems import file_limit, was_killed


def state(step: int) -> dict:
    weights, names = torch.full((1000,), float(step)), ["a", 1, None, 2.5]
    return {"step": step, "weights": weights, "rng": rng_state(), "names": names, "format": 1, "hash": "a"}


def test_the_last_two_are_kept_and_load_safely(tmp_path):
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, state(step))
    older, newest = list_checkpoints(tmp_path)
    assert [path.name.partition(".")[0] for path in (older, newest)] == ["step-00000002", "step-00000010"]
    assert len(list(tmp_path.iterdir())) == 2
    assert hashlib.sha256(newest.read_bytes()).hexdigest().startswith(newest.name.split(".")[1])
    loaded = load_checkpoint(newest)
    assert (loaded["step"], loaded["names"]) == (10, ["a", 1, None, 2.5])
    assert torch.equal(loaded["weights"], state(10)["weights"])
    with safe_open(newest, framework="pt") as file:  # no reader of ours is needed
        assert json.loads(file.metadata()["state"])["dict"][0] == ["step", 10]
        assert len(file.keys()) == 2


DAMAGES = {
    "truncated": lambda content: content[:-1],
    "flipped": lambda content: content[:999] + bytes([content[999] ^ 1]) + content[1000:],
    "empty": lambda content: b"", "foreign": lambda content: b"hello" * 1000,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_one_error_and_the_one_before_is_taken(tmp_path, damage):
    save_checkpoint(tmp_path, 1, state(1))
    newest = save_checkpoint(tmp_path, 2, state(2))
    newest.write_bytes(damage(newest.read_bytes()))
    with pytest.raises(CheckpointError, match="truncated or damaged") as caught:
        load_checkpoint(newest)
    assert str(newest) in str(caught.value)
    found = starting_state(tmp_path, "a", "auto", (problems := []).append)
    assert (found["step"], problems) == (1, [f"warning: {caught.value}"])


def test_missing_and_foreign_places(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "model.pt").write_text("")
    absent = tmp_path / "step-00000001.0123456789abcdef.pt"
    for call, said in (
        (lambda: save_checkpoint(tmp_path / "file", 1, state(1)), "A file is in the place of a folder"),
        (lambda: load_checkpoint(absent), "no checkpoint"),
        (lambda: load_checkpoint(tmp_path / "model.pt"), "must be step-<number>"),
    ):
        refused(CheckpointError, said, call)
    assert starting_state(tmp_path / "absent", "a", "auto", print) is None


def test_code_is_neither_written_nor_read(tmp_path, monkeypatch):
    said = r"cannot save state\.step, of type ModelMetaclass"
    refused(CheckpointError, said, save_checkpoint, tmp_path, 1, {"step": RunRecord})
    assert list(tmp_path.iterdir()) == []
    content = pickle.dumps(Trap())
    for switch in ("none", "restricted"):
        monkeypatch.setenv("DIPOLE_PICKLES", switch)
        for suffix, said in (("safetensors", "cannot be read"), ("pt", "its name must be step-")):
            path = tmp_path / f"step-00000001.{hashlib.sha256(content).hexdigest()[:16]}.{suffix}"
            path.write_bytes(content)
            refused(CheckpointError, said, load_checkpoint, path)
            path.unlink()
    for state in (None, [], {}, {"format": 1}, {"format": 1, "hash": []}, {"format": 1, "hash": "a"}):
        path = save_checkpoint(tmp_path, 4, state)  # its hash is right, whatever is in it
        with pytest.raises(CheckpointError):
            starting_state(tmp_path, "b", path, print)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return os.abort, ()


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path):
    names = "float64 float32 float16 bfloat16 complex64 int64 int32 int16 int8 uint8 bool"
    given: dict[Any, Any] = {kind: (torch.randn(3, 4) * 100).to(getattr(torch, kind)) for kind in names.split()}
    whole = torch.arange(24.0).reshape(4, 6)
    given |= {"rows": whole[1:3], "turned": whole.T, "whole": whole, "tied": whole, "one": torch.tensor(2.5)}
    given |= {"none": torch.zeros(0, 3), 7: (float("nan"), float("-inf"), -0.0, 0.1), "nan": torch.tensor(float("nan"))}
    given["module"] = nn.BatchNorm1d(3).state_dict()
    found = load_checkpoint(save_checkpoint(tmp_path, 1, given))
    assert list(found) == list(given)
    module = found.pop("module")
    assert module._metadata == given.pop("module")._metadata
    nn.BatchNorm1d(3).load_state_dict(module)
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert torch.equal(found[name].view(-1).view(torch.uint8), value.reshape(-1).contiguous().view(torch.uint8))
        else:
            assert repr(found[name]) == repr(value)
    assert found["tied"] is found["whole"]


FIRST_RECORD = {
    "schema_version": 1, "hash": "0123456789ab", "name": "blobs", "domain": "blobs", "objective": "infonce", "seed": 0,
    "status": "done", "started": "2026-11-20T19:00:00Z", "updated": "2026-11-20T19:01:00Z",
    "config": {"domain": "blobs"}, "versions": {"dipole": "0.1.0"},
    "hardware": {"device": "cpu", "device_name": "x", "machine": "Linux x86_64", "processors": 2, "threads": 1},
    "seeds": {"root": 0}, "data": {"name": "blobs"}, "parameters": 10,
    "results": {"linear/accuracy": 0.5, "knn/accuracy": None}, "histogram": {"edges": [0.0, 1.0], "all": [3.0]},
}  # fmt: skip


def written(folder: Path, **changes: object) -> Path:
    path = folder / "record.json"
    path.write_text(json.dumps({**FIRST_RECORD, **changes}))
    return path


def test_first_version_is_read_and_every_problem_named(tmp_path):
    record = read_record(written(tmp_path))
    assert (record.results, record.evaluations) == ({"linear/accuracy": 0.5, "knn/accuracy": None}, [])
    with pytest.raises(RecordError) as caught:
        read_record(written(tmp_path, status="finished", seed="x", surprise=1))
    assert all(text in str(caught.value) for text in ("status: Input should be 'running'", "seed: ", "surprise: "))
    assert finite({"a": float("nan"), "b": 1, "c": float("inf")}) == {"a": None, "b": 1.0, "c": None}


DAMAGED = [b"{", b"\xff", b"", b"[" * 200_000, b'{"schema_version": ' + b"1" * 5000 + b"}"]


def test_damaged_or_foreign_files(tmp_path):
    said = dict.fromkeys(DAMAGED, "is damaged") | {b"[]": "does not follow schema", b'{"schema_version": 99}': "Update"}
    for content, message in said.items():
        (tmp_path / "record.json").write_bytes(content)
        refused(RecordError, message, read_record, tmp_path / "record.json")
    refused(RecordError, "cannot be read", read_record, tmp_path / "absent.json")


def test_metrics_are_cut_back_and_a_torn_line_is_left_out(tmp_path):
    first = MetricsFile(path := tmp_path / "metrics.jsonl")
    first.write({"step": 1, "train/loss": float("nan")})
    keep = first.position()
    first.write({"step": 2, "train/loss": 1 / 3})
    assert read_metrics(path) == [{"step": 1, "train/loss": None}, {"step": 2, "train/loss": 0.3333333}]
    first.close()
    with open(path, "a") as file:
        file.write('{"step": 3, "tr')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    second = MetricsFile(path, keep)
    second.write({"step": 2, "train/loss": 0.25})
    with file_limit(10):
        refused(TrainingError, f"cannot write {path}", second.write, {"step": 3})
        refused(TrainingError, f"cannot write {path}", second.close)
    assert [line["train/loss"] for line in read_metrics(path)] == [None, 0.25]


def test_values_that_no_run_writes_are_refused(tmp_path):
    wrong = [("results", {"linear/accuracy": float("nan")}), ("wall_seconds", float("inf")), ("name", "\ud800")]
    wrong += [("histogram", {"edges": edges, "all": counts}) for edges, counts in (([0, 1], [1, 2]), ([0, 0], [1]))]
    wrong += [("histogram", {"edges": [], "all": []}), ("histogram", {"edges": [0, 1], "all": [1], "same": [-1]})]
    for name, value in wrong:
        said = {"results": "results.linear/accuracy", "name": "damaged"}.get(name, name)
        refused(RecordError, said, read_record, written(tmp_path, **{name: value}))


def test_a_replaced_file_is_complete_whoever_writes(tmp_path):
    path = tmp_path / "new" / "agent.zip"
    atomic_write(path, b"old")
    with replacing(path) as temporary:
        assert (temporary.suffix, temporary.parent) == (".zip", path.parent)
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert (path.read_text(), list(path.parent.iterdir())) == ("new", [path])
    path = tmp_path / "cache.bin"
    with replacing(path) as first:
        first.write_text("first, long")
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first, long"


def test_a_block_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    atomic_write(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(FileNotFoundError), replacing(path):
        pass  # nothing is written
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_a_folder_is_replaced_whole(tmp_path):
    path = tmp_path / "agent"
    for exists, name in ((False, "old"), (True, "new")):
        with replacing(path) as temporary:
            (temporary / name).mkdir(parents=True)
            (temporary / name / "file").write_text(name)
            assert path.exists() == exists
    found = [each.relative_to(tmp_path).as_posix() for each in sorted(tmp_path.rglob("*"))]
    assert found == ["agent", "agent/new", "agent/new/file"]


RECORD = json.loads((Path(__file__).parents[1] / "benchmarks" / "records" / "v1-vision.json").read_text())
RECORD["histogram"] = {"edges": [0.0, 0.5, 1.0], "all": [1, 2], "same": [0, 1], "different": [1, 1]}
RECIPE = read_recipe("digits-simclr")
LINE = {"step": 10, "epoch": 0.5, "time": 1.25, "train/loss": 2.5, "eval/knn/accuracy": None}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize(
    "name", ["record.json", "metrics.jsonl", "config.toml", "measured.json", ".pid", "module.safetensors"]
)
def test_what_is_no_file_is_not_waited_for(tmp_path, name, kind):
    run = tmp_path / "0123456789ab"
    run.mkdir()
    (run / "record.json").write_text(json.dumps(RECORD | {"status": "running"}))
    (run / name).unlink(missing_ok=True)
    NO_FILES[kind](run / name)
    for reader, *arguments in (
        (read_record, run / "record.json"), (read_metrics, run / "metrics.jsonl"), (RunFolder(run).read_config,),
        (read_additions, run), (load_recipe, run / "config.toml"), (find_run, "0123", tmp_path),
        (_check_idle, run, False), (load_weights, run, nn.Linear(1, 1), None),
    ):  # fmt: skip
        answered(partial(reader, *arguments))


def read(reader: Any, name: str) -> Any:
    """Return a function that reads a content from a file of this name."""

    def call(folder: Path, content: bytes) -> None:
        (folder / name).write_bytes(content)
        reader(folder / name)

    return call


@pytest.mark.parametrize(("text", "said"), [
    *(("[" * 65 + "]" * 65, "nested deeper"), ('{"a":' * 10**5, "nested deeper"), ("9" * 5000, "limit")),
    *(("NaN", "no number"), ("[-Infinity]", "no number"), ("1e999", "beyond what a float holds")),
    *(('{"a": 1, "b": 2, "a": 3}', "'a' stands twice"), (r'"\ud800"', "surrogate")),
    ("", "Expecting value in line 1"),
])  # fmt: skip
def test_json_that_is_none(tmp_path, text, said):
    refused(ValueError, said, parse_json, text)
    (tmp_path / "x.json").write_text(text)
    refused(ReceivedError, rf"^{tmp_path}/x\.json is damaged: .*{said}", read_json, tmp_path / "x.json")


def test_json_that_is_some(tmp_path):
    text = r'{"a": [1, -2.5e-3, null, true, "\ud83d\ude00", "[[[["], "b": {}}'
    for each in (text, json.dumps({"a": "[" * 1000, "b": [[1]] * 1000})):
        assert parse_json(each) == parse_json(b"\xef\xbb\xbf" + each.encode()) == json.loads(each)
    path = tmp_path / "record.json"
    path.write_text(json.dumps({str(n) * 50: "y" * 1000 for n in range(3000)}))
    with pytest.raises(DipoleError, match=r"and 299\d more") as caught:
        read_record(path)
    assert len(str(caught.value)) < 2000


def test_toml_that_is_none():
    texts = "a." * 100_000 + "b = 1", '"a".' * 50_000, " a . " * 50_000, "a = " + "{b=" * 70_000, "9" * 250_000
    for text in (*texts, "a" * 250_000):
        answered(partial(refused, ValueError, None, parse_toml, text))


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
    config = load_recipe(blobs).config
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
    refused(TrainingError, "another process", RunFolder(folder.path).open, config)  # without the lock: removes nothing
    assert [path for path in left if path.exists()] == [left[0]]
    folder.close()
    folder.open(config)
    folder.close()
    assert not any(path.exists() for path in left)
    assert mine.exists()


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
KEYS = ["train.steps", "train.batch_size", "objective", "seed", "domain", "train", "vision.views", "train.schedule"]
OVERRIDE = st.tuples(st.sampled_from(KEYS) | st.text(max_size=10), VALUES | SPEC).map("=".join)
SENT = {  # what is sent, what reads it in a folder, and how many examples are drawn in the quick and the slow test
    "record": (contents(RECORD), read(read_record, "record.json"), 150, 20_000),
    "metrics": (contents(LINE), read(read_metrics, "metrics.jsonl"), 150, 20_000),
    "recipe": (toml_contents(RECIPE), read(load_recipe, "recipe.toml"), 60, 10_000),
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


@pytest.mark.parametrize(("text", "said"), [
    ("1" * 4000 + "*dp", "a number of more than 2000 characters"), ("1" * 10_000 + "*dp", "too long"),
    ("dp(self=None)", "no option 'self'"), ("cllr(dim=10000000000)", "10000000000 x 10000000000 takes"),
    ("swav(dim=10000000000)", "GB with its gradient"), ("cllr(dim=" + "9" * 30 + ")", "up to 9007199254740992"),
    ("\N{ARABIC-INDIC DIGIT ONE}*dp", "cannot read"),
])  # fmt: skip
def test_sizes_and_lengths_are_refused_before_they_cost_anything(text, said):
    refused((SpecError, OptionError), said, dipole.objective, text)


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


def test_recipes_names_and_overrides_that_are_none(tmp_path):
    recipes = ["a = " + "[" * 5000, "a = " + "9" * 5000, "[" * 3000, "\x00", "a = 1e99999"]
    overrides = ["train.steps=" + "9" * 5000, "a=" + "[" * 5000, "=" * 5000, "a." * 5000 + "b=1"]
    calls = [partial(read(load_recipe, "recipe.toml"), tmp_path, text.encode()) for text in recipes]
    calls += [partial(read_recipe, name) for name in ("a" * 5000, "a\x00b", "/" * 300, "")]
    calls += [partial(resolve, RECIPE, [text]) for text in overrides]
    calls += [partial(parse_override, text) for text in overrides]
    for call in calls:
        answered(call)


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
