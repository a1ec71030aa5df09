"""Whatever happens in a test, none of the processes that it has started survives it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.processes import RealRun


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    while RealRun.started:
        RealRun.started.pop().close()
