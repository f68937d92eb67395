"""What was found out once and can be found out again: JSON files of a cache folder."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dipole.core.ground.files import atomic_write

FOLDER = "DIPOLE_CACHE"


def cache_folder() -> Path:
    """$DIPOLE_CACHE, or dipole/ in the user's cache folder."""
    if told := os.environ.get(FOLDER):
        return Path(told).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dipole"


def kept_json(kind: str, identity: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, made once for an identity (hexadecimal digits of what it depends on).

    A file that is cut off or damaged is made again; where nothing can be written, nothing is kept.
    """
    path = cache_folder() / kind / f"{identity}.json"
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        found = json.loads(path.read_bytes())
        if found["identity"] == identity:
            return found["content"]
    content = make()
    with suppress(OSError):
        atomic_write(path, json.dumps({"identity": identity, "content": content}))
    return content
