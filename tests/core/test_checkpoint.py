"""Checkpoint files: atomic, verified, two kept."""

import hashlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dipole.core.ground.errors import CheckpointError
from dipole.core.ground.files import atomic_write
from dipole.core.ground.seeding import rng_state
from dipole.core.record import RunRecord
from dipole.core.train.checkpoint import list_checkpoints, load_checkpoint, newest_checkpoint, save_checkpoint


def state(step: int) -> dict:
    return {"step": step, "weights": torch.full((1000,), float(step)), "rng": rng_state(), "names": ["a", 1, None, 2.5]}


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Every write beyond `size` bytes of a file fails, as on a full disk."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_the_last_two_are_kept_and_load_safely(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, state(step))
    older, newest = list_checkpoints(tmp_path)
    assert [path.name.partition(".")[0] for path in (older, newest)] == ["step-00000002", "step-00000010"]
    assert len(list(tmp_path.iterdir())) == 2
    loaded = load_checkpoint(newest)
    assert loaded["step"] == 10
    assert loaded["names"] == ["a", 1, None, 2.5]
    assert torch.equal(loaded["weights"], state(10)["weights"])
    assert torch.load(newest, weights_only=True)["step"] == 10


def test_the_name_carries_the_hash_of_the_content(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 3, state(3))
    assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(path.name.split(".")[1])


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign"])
def test_damage_is_one_error_and_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
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


def test_full_disk_leaves_the_old_one_and_no_litter(tmp_path: Path) -> None:
    old = save_checkpoint(tmp_path, 1, state(1))
    content = old.read_bytes()
    with file_limit(2000), pytest.raises(CheckpointError, match=r"step 2 .*limit.*The checkpoint of step 1 is intact"):
        save_checkpoint(tmp_path, 2, state(2))
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_bytes() == content


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="A file stands where a folder is needed"):
        save_checkpoint(tmp_path / "file", 1, state(1))


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(tmp_path / "step-00000001.0123456789abcdef.pt")
    (tmp_path / "model.pt").write_text("")
    with pytest.raises(CheckpointError, match="must be step-<number>"):
        load_checkpoint(tmp_path / "model.pt")
    assert newest_checkpoint(tmp_path / "absent") == (None, [])


def test_objects_that_could_run_code_are_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"step": RunRecord})
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(path)


def test_atomic_write_keeps_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    atomic_write(path, "old")
    with file_limit(10), pytest.raises(OSError, match="large"):
        atomic_write(path, "new" * 100)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
