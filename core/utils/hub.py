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
def without_retry_messages(name: str = "huggingface_hub") -> Iterator[None]:
    """Print no failed attempts of the Hub's client, which still retries, or no warnings of another logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
