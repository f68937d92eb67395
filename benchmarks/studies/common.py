"""Result files of studies and of measurements of speed."""

import json
from pathlib import Path
from typing import Any

from dipole.core.utils.files import atomic_write


def load(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    return json.loads(path.read_text(encoding="utf-8"))


def save(path: Path, content: Any) -> None:
    """Write a JSON file atomically, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(content, indent=1) + "\n")
