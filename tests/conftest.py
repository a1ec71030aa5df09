"""Whatever happens in a test, no process that it has started survives it, and signals do what they do by default."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from support.processes import RealRun


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process inherits what is ignored here
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    while RealRun.started:
        RealRun.started.pop().close()
