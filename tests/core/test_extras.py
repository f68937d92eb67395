"""The line that installs what is missing."""

import json
from pathlib import Path

import pytest

from dipole.core.ground.extras import install_line


def installed(folder: Path, origin: dict | None) -> None:
    info = folder / "assay-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: assay\nVersion: 1.0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, "pip install 'assay[board]'"),
        ({"url": "file:///a/wheel.whl", "archive_info": {}}, "pip install 'assay[board]'"),
        ({"url": "file:///my%20work/assay", "dir_info": {"editable": True}}, "pip install -e '/my work/assay[board]'"),
    ],
)
def test_the_line_is_right_for_a_checkout_and_for_an_index(tmp_path, monkeypatch, origin, line):
    installed(tmp_path, origin)
    monkeypatch.syspath_prepend(tmp_path)
    assert install_line("board", "assay") == line


def test_without_an_extra_and_for_what_is_not_installed():
    assert install_line(package="absent-package") == "pip install absent-package"
