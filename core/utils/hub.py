"""Keep the Hugging Face Hub's client quiet, because our error already reports a failure."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


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
