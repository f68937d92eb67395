"""Pages and notebooks of the tutorials, which are scripts with cells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext

FOLDER = Path(__file__).resolve().parents[1] / "tutorials"


def scripts() -> list[Path]:
    """All of them, in their order."""
    return sorted(FOLDER.glob("*.py"))


def title(script: Path) -> str:
    """The first heading."""
    return next(
        line for line in script.read_text(encoding="utf-8").splitlines() if line.startswith("# # ")
    ).removeprefix("# # ")


def files(script: Path, run: bool) -> Iterator[tuple[str, bytes]]:
    """Name and content of the page, the notebook and the pictures of one.

    Args:
        script: the tutorial.
        run: execute it on its small settings, so that the page has what it prints and draws.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        cells = _run(script, folder) if run else _read(script)
        yield f"{script.stem}.md", _page(script, cells).encode()
        yield f"{script.stem}.ipynb", jupytext.writes(jupytext.read(script), fmt="ipynb").encode()
        yield from ((path.name, path.read_bytes()) for path in sorted(folder.glob("*.svg")))


def _read(script: Path) -> list[dict[str, Any]]:
    cells = jupytext.read(script).cells
    return [{"kind": cell.cell_type, "source": cell.source, "output": "", "pictures": []} for cell in cells]


def _run(script: Path, folder: Path) -> list[dict[str, Any]]:
    environment = os.environ | {"DIPOLE_TUTORIAL": "small", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("execute.py")), str(script), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"the tutorial {script.name} does not run:\n{done.stderr}")
    return json.loads((folder / "cells.json").read_text(encoding="utf-8"))


def _page(script: Path, cells: list[dict[str, Any]]) -> str:
    parts = []
    for cell in cells:
        if cell["kind"] == "markdown":
            parts.append(cell["source"])
        elif cell["source"].strip():
            parts.append(f"```python\n{cell['source']}\n```")
        if cell["output"].strip():
            parts.append(f"```text\n{cell['output'].rstrip()}\n```")
        parts += [f"![What the cell above draws]({picture})" for picture in cell["pictures"]]
    head = f"[Open it as a notebook]({script.stem}.ipynb){{ download }}; what stands here is its small setting."
    return "\n\n".join([parts[0], head, *parts[1:]]) + "\n"
