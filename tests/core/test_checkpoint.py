"""Files of a run: checkpoints and records are atomic and verified, and old records stay readable."""

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from dipole.core.record import RunRecord, finite, read_record
from dipole.core.train.checkpoint import list_checkpoints, load_checkpoint, newest_checkpoint, save_checkpoint
from dipole.core.train.metrics import MetricsFile, read_metrics
from dipole.core.utils.errors import CheckpointError, RecordError
from dipole.core.utils.files import atomic_write, replacing
from dipole.core.utils.seeding import rng_state
from tests.systems import file_limit, posix


def state(step: int) -> dict:
    return {"step": step, "weights": torch.full((1000,), float(step)), "rng": rng_state(), "names": ["a", 1, None, 2.5]}


def test_the_last_two_are_kept_and_load_safely(tmp_path):
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, state(step))
    older, newest = list_checkpoints(tmp_path)
    assert [path.name.partition(".")[0] for path in (older, newest)] == ["step-00000002", "step-00000010"]
    assert len(list(tmp_path.iterdir())) == 2
    loaded = load_checkpoint(newest)
    assert (loaded["step"], loaded["names"]) == (10, ["a", 1, None, 2.5])
    assert torch.equal(loaded["weights"], state(10)["weights"])
    with safe_open(newest, framework="pt") as file:  # no reader of ours is needed
        assert json.loads(file.metadata()["state"])["dict"][0] == ["step", 10]
        assert len(file.keys()) == 2


def test_the_name_carries_the_hash_of_the_content(tmp_path):
    path = save_checkpoint(tmp_path, 3, state(3))
    assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(path.name.split(".")[1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:999] + bytes([content[999] ^ 1]) + content[1000:],
        lambda content: b"",
        lambda content: b"hello" * 1000,
    ],
    ids=["truncate", "flip", "empty", "foreign"],
)
def test_damage_is_one_error_and_the_one_before_is_taken(tmp_path, damage):
    save_checkpoint(tmp_path, 1, state(1))
    newest = save_checkpoint(tmp_path, 2, state(2))
    newest.write_bytes(damage(newest.read_bytes()))
    with pytest.raises(
        CheckpointError, match=rf"{newest}.*truncated or damaged|truncated or damaged.*{newest}"
    ) as caught:
        load_checkpoint(newest)
    found, problems = newest_checkpoint(tmp_path)
    assert (found["step"], problems) == (1, [str(caught.value)])


@posix
def test_full_disk_leaves_the_old_one_and_no_litter(tmp_path):
    old = save_checkpoint(tmp_path, 1, state(1))
    content = old.read_bytes()
    with file_limit(2000), pytest.raises(CheckpointError, match=r"step 2 .*large.*The checkpoint of step 1 is intact"):
        save_checkpoint(tmp_path, 2, state(2))
    assert (list(tmp_path.iterdir()), old.read_bytes()) == ([old], content)


def test_missing_and_foreign_places(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "model.pt").write_text("")
    absent = tmp_path / "step-00000001.0123456789abcdef.pt"
    for call, said in (
        (lambda: save_checkpoint(tmp_path / "file", 1, state(1)), "A file is in the place of a folder"),
        (lambda: load_checkpoint(absent), "no checkpoint"),
        (lambda: load_checkpoint(tmp_path / "model.pt"), "must be step-<number>"),
    ):
        with pytest.raises(CheckpointError, match=said):
            call()
    assert newest_checkpoint(tmp_path / "absent") == (None, [])


def test_code_is_neither_written_nor_read(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"cannot save state\.step, of type ModelMetaclass"):
        save_checkpoint(tmp_path, 1, {"step": RunRecord})
    assert list(tmp_path.iterdir()) == []
    for switch in ("none", "restricted"):
        monkeypatch.setenv("DIPOLE_PICKLES", switch)
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_checkpoint(put(tmp_path, pickle.dumps(Trap()), "safetensors"))
        with pytest.raises(CheckpointError, match="its name must be step-"):
            load_checkpoint(put(tmp_path, pickle.dumps(Trap()), "pt"))


class Trap:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return os.abort, ()


def put(folder: Path, content: bytes, suffix: str) -> Path:
    path = folder / f"step-00000001.{hashlib.sha256(content).hexdigest()[:16]}.{suffix}"
    path.write_bytes(content)
    return path


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path):
    names = "float64 float32 float16 bfloat16 complex64 int64 int32 int16 int8 uint8 bool"
    given: dict[Any, Any] = {kind: (torch.randn(3, 4) * 100).to(getattr(torch, kind)) for kind in names.split()}
    whole = torch.arange(24.0).reshape(4, 6)
    given |= {"rows": whole[1:3], "turned": whole.T, "whole": whole, "tied": whole, "one": torch.tensor(2.5)}
    given |= {"none": torch.zeros(0, 3), 7: (float("nan"), float("-inf"), -0.0, 0.1), "nan": torch.tensor(float("nan"))}
    found = load_checkpoint(save_checkpoint(tmp_path, 1, given))
    assert list(found) == list(given)
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert torch.equal(found[name].view(-1).view(torch.uint8), value.reshape(-1).contiguous().view(torch.uint8))
        else:
            assert repr(found[name]) == repr(value)
    assert found["tied"] is found["whole"]


def test_the_state_of_a_module_keeps_its_versions(tmp_path):
    module = nn.BatchNorm1d(3)
    found = load_checkpoint(save_checkpoint(tmp_path, 1, {"module": module.state_dict()}))["module"]
    assert found._metadata == module.state_dict()._metadata
    nn.BatchNorm1d(3).load_state_dict(found)


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
    assert record.results == {"linear/accuracy": 0.5, "knn/accuracy": None}
    assert record.evaluations == []
    with pytest.raises(RecordError) as caught:
        read_record(written(tmp_path, status="finished", seed="x", surprise=1))
    for text in ("status: Input should be 'running'", "seed: ", "surprise: "):
        assert text in str(caught.value)
    assert finite({"a": float("nan"), "b": 1, "c": float("inf")}) == {"a": None, "b": 1.0, "c": None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is damaged"),
        (b"\xff", "is damaged"),
        (b"[]", "does not follow schema"),
        (b'{"schema_version": 99}', "Update"),
        (b"", "is damaged"),
        (b"[" * 200_000, "is damaged"),
        (b'{"schema_version": ' + b"1" * 5000 + b"}", "is damaged"),
    ],
)
def test_damaged_or_foreign_files(tmp_path, content, message):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        read_record(path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_record(tmp_path / "absent.json")


def test_metrics_are_cut_back_and_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
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
    second.close()
    assert [line["train/loss"] for line in read_metrics(path)] == [None, 0.25]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"results": {"linear/accuracy": float("nan")}}, "results.linear/accuracy"),
        ({"wall_seconds": float("inf")}, "wall_seconds"),
        ({"histogram": {"edges": [0.0, 1.0], "all": [1.0, 2.0]}}, "histogram"),
        ({"histogram": {"edges": [0.0, 0.0], "all": [1.0]}}, "histogram"),
        ({"histogram": {"edges": [], "all": []}}, "histogram"),
        ({"histogram": {"edges": [0.0, 1.0], "all": [1.0], "same": [-1.0]}}, "histogram"),
        ({"name": "\ud800"}, "damaged"),
    ],
)
def test_values_that_no_run_writes_are_refused(tmp_path, changes, where):
    with pytest.raises(RecordError, match=where):
        read_record(written(tmp_path, **changes))


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

    def stopped() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])
    atomic_write(tmp_path / "file.txt", "old")
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "file.txt"):
        pass
    assert (tmp_path / "file.txt").read_text() == "old"


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_is_replaced_whole(tmp_path, exists):
    path = tmp_path / "agent"
    if exists:
        path.mkdir()
        (path / "old").write_text("old")
    with replacing(path) as temporary:
        (temporary / "part").mkdir(parents=True)
        (temporary / "part" / "new").write_text("new")
        assert path.exists() == exists
    assert [each.relative_to(tmp_path).as_posix() for each in sorted(tmp_path.rglob("*"))] == [
        "agent",
        "agent/part",
        "agent/part/new",
    ]
