"""A failed export leaves nothing that blocks the next one, and a full disk is named as the reason."""

import pytest

from dipole.core.cli import main
from dipole.core.utils.files import disk_error
from tests.systems import file_limit, posix


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    settings = ["train.steps=1", "train.epochs=", "train.batch_size=8", "vision.encoder.width=4"]
    arguments = ["train", "digits-simclr", "--quiet", "--runs", str(runs)]
    assert main([*arguments, *(word for each in settings for word in ("--set", each))]) == 0
    return str(next(runs.iterdir()))


@posix
@pytest.mark.parametrize(
    ("to", "limit", "there"), [("onnx", 2000, False), ("transformers", 2000, True), ("transformers", 300, False)]
)
def test_a_full_disk_is_the_reason_and_nothing_is_left(trained, tmp_path, capfd, to, limit, there):
    out = tmp_path / "out"
    if there:
        (out / ".export.0123abcd.tmp").mkdir(parents=True)  # of a killed export
    with file_limit(limit):
        assert main(["export", trained, "--to", to, "--out", str(out)]) == 1
    said = capfd.readouterr().err
    assert f"cannot export to {out}: File too large. The file size limit is reached" in said
    assert out.exists() == there
    if (to, limit) == ("transformers", 300):
        assert main(["export", trained, "--to", to, "--out", str(out), "--license", "mit"]) == 0
        assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in out.iterdir()}
        assert not [path for path in out.iterdir() if path.name.endswith(".tmp")]


def test_a_format_that_does_not_fit_leaves_no_folder(trained, tmp_path):
    assert main(["export", trained, "--to", "timm", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), 28),
        (OSError(122, "Disk quota exceeded"), 122),
        (FileNotFoundError(2, "No such file"), None),
        (ValueError("os error is not meant"), None),
    ],
)
def test_the_disk_is_found_among_the_causes(error, number):
    outer = RuntimeError("Failed to convert the model")
    outer.__cause__ = error
    found = disk_error(outer)
    assert (found and found.errno) == number
