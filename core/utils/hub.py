"""Keep the Hugging Face Hub's client quiet, because our error already reports a failure."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


def is_offline() -> bool:
    """Return whether the user has switched the Hub off."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


@contextmanager
def without_retry_messages() -> Iterator[None]:
    """Do not print every failed attempt of the Hub's client. It still retries."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
