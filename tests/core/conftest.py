"""A tiny real domain for the tests of runs, and commands of dipole in processes of their own."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dipole.core.train.domains import temporary_domain

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture
def blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Path of a recipe of the blobs domain; the working directory is a fresh folder."""
    import blobs_domain

    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "blobs.toml"
    recipe.write_text(blobs_domain.RECIPE)
    with temporary_domain(blobs_domain.BLOBS):
        yield recipe


@pytest.fixture
def dipole_process(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `dipole` (with the blobs domain) in a process of its own."""

    def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(HERE / "blobs_domain.py"), *map(str, arguments)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    return start
