"""What the Hub's client prints while it tries again."""

import logging

from dipole.core.utils.hub import without_retry_messages


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def test_attempts_are_not_printed_and_errors_are():
    import huggingface_hub  # noqa: F401  (it sets up its logger when it is imported)

    client, kept = logging.getLogger("huggingface_hub.utils"), Kept()
    client.addHandler(kept)
    try:
        client.warning("before")
        with without_retry_messages():
            client.warning("Retrying in 8s [Retry 5/5].")
            client.error("broken")
        client.warning("after")
    finally:
        client.removeHandler(kept)
    assert kept.messages == ["before", "broken", "after"]
