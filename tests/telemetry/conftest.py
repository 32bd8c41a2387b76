"""What the tests of telemetry share."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def logger():
    """Give the logger back as it was."""
    log = logging.getLogger("kvcore")
    level, handlers = log.level, list(log.handlers)
    yield log
    log.setLevel(level)
    for handler in [handler for handler in log.handlers if handler not in handlers]:
        log.removeHandler(handler)
        handler.close()
