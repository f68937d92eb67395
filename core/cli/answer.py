"""What a command answers with --json: one JSON object on stdout, and nothing else there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any


@contextmanager
def answering(as_json: bool) -> Iterator[dict[str, Any]]:
    """Print what is filled inside the block, in which all else that is printed goes to stderr; without it, nothing."""
    answer: dict[str, Any] = {}
    if not as_json:
        yield answer
        return
    with redirect_stdout(sys.stderr):
        yield answer
    print(json.dumps(answer))
