"""Keep what other libraries say once per matrix product off the user's screen while a call of ours runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Loggers and the starts of their messages. A model in int8 tells of each product that its inputs are cast.
NOISE = {"bitsandbytes.autograd._functions": ("MatMul8bitLt: inputs will be cast from",)}


class _OwnThreadFilter(logging.Filter):
    """Drops noise of the thread that made it; other threads, which may run calls of the host's, are still heard."""

    def __init__(self, messages: tuple[str, ...]) -> None:
        super().__init__()
        self.messages = messages
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        is_ours = threading.get_ident() == self.thread
        return not (is_ours and isinstance(record.msg, str) and record.msg.startswith(self.messages))


@contextmanager
def quiet() -> Iterator[None]:
    """Within this, the calling thread's noise is dropped; afterwards the loggers are as they were."""
    filters = [(logging.getLogger(name), _OwnThreadFilter(messages)) for name, messages in NOISE.items()]
    for logger, noise_filter in filters:
        logger.addFilter(noise_filter)
    try:
        yield
    finally:
        for logger, noise_filter in filters:
            logger.removeFilter(noise_filter)
