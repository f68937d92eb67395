"""Checkpoint files: atomic, verified, two kept."""

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

from dipole.core.record import RunRecord
from dipole.core.train.checkpoint import list_checkpoints, load_checkpoint, newest_checkpoint, save_checkpoint
from dipole.core.utils.errors import CheckpointError
from dipole.core.utils.files import atomic_write
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
    assert loaded["step"] == 10
    assert loaded["names"] == ["a", 1, None, 2.5]
    assert torch.equal(loaded["weights"], state(10)["weights"])
    with safe_open(newest, framework="pt") as file:  # no reader of ours is needed
        assert json.loads(file.metadata()["state"])["dict"][0] == ["step", 10]
        assert len(file.keys()) == 2


def test_the_name_carries_the_hash_of_the_content(tmp_path):
    path = save_checkpoint(tmp_path, 3, state(3))
    assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(path.name.split(".")[1])


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign"])
def test_damage_is_one_error_and_the_one_before_is_taken(tmp_path, damage):
    save_checkpoint(tmp_path, 1, state(1))
    newest = save_checkpoint(tmp_path, 2, state(2))
    content = newest.read_bytes()
    middle = len(content) // 2
    newest.write_bytes(
        {
            "truncate": content[:-1],
            "flip": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "empty": b"",
            "foreign": b"hello" * 1000,
        }[damage]
    )
    with pytest.raises(CheckpointError, match="truncated or damaged") as caught:
        load_checkpoint(newest)
    assert str(newest) in str(caught.value)
    found, problems = newest_checkpoint(tmp_path)
    assert found is not None
    assert found["step"] == 1
    assert problems == [str(caught.value)]


@posix
def test_full_disk_leaves_the_old_one_and_no_litter(tmp_path):
    old = save_checkpoint(tmp_path, 1, state(1))
    content = old.read_bytes()
    with file_limit(2000), pytest.raises(CheckpointError, match=r"step 2 .*large.*The checkpoint of step 1 is intact"):
        save_checkpoint(tmp_path, 2, state(2))
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_bytes() == content


def test_missing_and_foreign_places(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="A file is in the place of a folder"):
        save_checkpoint(tmp_path / "file", 1, state(1))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(tmp_path / "step-00000001.0123456789abcdef.pt")
    (tmp_path / "model.pt").write_text("")
    with pytest.raises(CheckpointError, match="must be step-<number>"):
        load_checkpoint(tmp_path / "model.pt")
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
    kinds = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool,
    )  # fmt: skip
    given: dict[Any, Any] = {str(kind): (torch.randn(3, 4) * 100).to(kind) for kind in kinds}
    whole = torch.arange(24.0).reshape(4, 6)
    given |= {"rows": whole[1:3], "turned": whole.T, "whole": whole, "tied": whole, "one": torch.tensor(2.5)}
    given |= {"none": torch.zeros(0, 3), 7: (float("nan"), float("-inf"), -0.0, 0.1), "nan": torch.tensor(float("nan"))}
    found = load_checkpoint(save_checkpoint(tmp_path, 1, given))
    assert list(found) == list(given)
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert found[name].shape == value.shape
            assert torch.equal(found[name].view(-1).view(torch.uint8), value.reshape(-1).contiguous().view(torch.uint8))
        else:
            assert repr(found[name]) == repr(value)
    assert found["tied"] is found["whole"]


def test_the_state_of_a_module_keeps_its_versions(tmp_path):
    module = nn.BatchNorm1d(3)
    found = load_checkpoint(save_checkpoint(tmp_path, 1, {"module": module.state_dict()}))["module"]
    assert found._metadata == module.state_dict()._metadata
    nn.BatchNorm1d(3).load_state_dict(found)


@posix
def test_atomic_write_keeps_the_old_text(tmp_path):
    path = tmp_path / "record.json"
    atomic_write(path, "old")
    with file_limit(10), pytest.raises(OSError, match="large"):
        atomic_write(path, "new" * 100)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
