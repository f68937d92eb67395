"""Of several ranks that fail, only the first one prints its error.

Every rank meets a mistake in a recipe, and the end of one rank is an error in all others. The ranks compare at the
launcher's store (torchrun), or at a store of rank 0 (srun, mpirun).
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from dipole.core.utils.launched import Launched, launched

PATIENCE = 5.0
"""Seconds that rank 0 keeps its store open, and that the others try to reach it."""

_answer: list[str | None] = []  # empty before the first call


def first_message(message: str) -> str | None:
    """Return the error that another rank printed before, or None if this one is the first or alone.

    Later calls repeat the first answer.
    """
    here = launched()
    if here.size == 1:
        return None
    if not _answer:
        _answer.append(_ask(here, message))
    return _answer[0]


def _ask(here: Launched, message: str) -> str | None:
    from torch.distributed import PrefixStore, TCPStore

    hosts = here.rank == 0 and not here.hosted
    try:
        whole: Any = TCPStore(
            here.address,
            here.port,
            is_master=hosts,
            timeout=timedelta(seconds=PATIENCE),
            wait_for_workers=False,
            multi_tenant=True,
        )
        # A restart by torchrun prints again.
        store = PrefixStore(f"dipole/error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", whole)
        first = store.add("told", 1) == 1
        if first:
            store.set("message", message)
        told = None if first else store.get("message").decode()
        store.add("heard", 1)
        end = time.monotonic() + PATIENCE
        while hosts and store.add("heard", 0) < here.size and time.monotonic() < end:
            time.sleep(0.05)
    except (RuntimeError, OSError):  # torch raises RuntimeErrors if no store answers
        return None
    return told
