"""One rule for the Hugging Face Hub: what fails is said once, by our error."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_retry_messages() -> Iterator[None]:
    """Keep the Hub's client from printing every failed attempt; it still tries again."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
