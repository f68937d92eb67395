"""Files and folders appear whole or not at all."""

import pytest

from dipole.core.utils.files import atomic_write, replacing


def test_a_replaced_file_is_complete_whoever_writes(tmp_path):
    path = tmp_path / "new" / "agent.zip"
    atomic_write(path, b"old")
    with replacing(path) as temporary:
        assert temporary.suffix == ".zip"
        assert temporary.parent == path.parent
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]
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
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
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
