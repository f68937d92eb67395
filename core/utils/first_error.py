"""Errors of several processes that were started together: the first is told, by its process alone.

One mistake in a recipe is met by every rank, and the end of one rank is an error in all others. All of them meet at the
launcher's store (torchrun), or at rank 0's (srun, mpirun), and the first one there speaks.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from dipole.core.utils.launched import Launched, launched

PATIENCE = 5.0
"""Seconds that rank 0 keeps its store open for the others, and that they try to reach it."""


def is_first(message: str) -> bool:
    """Whether this process is to tell an error; the answer of the first call is that of all later ones."""
    return first_message(message) is None


_told: list[str | None] = []  # the answer to this process, once there is one


def first_message(message: str) -> str | None:
    """What another process of the launch told before; None where this one is the first (or alone)."""
    here = launched()
    if here.size == 1:
        return None
    if not _told:
        _told.append(_ask(here, message))
    return _told[0]


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
        # A launch that torchrun starts again speaks anew.
        store = PrefixStore(f"dipole/error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", whole)
        first = store.add("told", 1) == 1
        if first:
            store.set("message", message)
        told = None if first else store.get("message").decode()
        store.add("heard", 1)
        end = time.monotonic() + PATIENCE
        while hosts and store.add("heard", 0) < here.size and time.monotonic() < end:
            time.sleep(0.05)
    except (RuntimeError, OSError):  # torch's own errors are RuntimeErrors: nobody is there to be asked
        return None
    return told
