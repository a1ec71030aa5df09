"""Requests to join a run, as files that anybody may have written."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flockstep.errors import RunError
from flockstep.launchers.join_requests import JOINING, MOST, JoinRequests
from flockstep.launchers.newcomers import Newcomers


def test_a_request_is_read_as_far_as_requests_are_long(tmp_path: Path) -> None:
    requests = JoinRequests(tmp_path)
    (tmp_path / JOINING).mkdir()
    (tmp_path / JOINING / "right.request").write_text('{"workers": 2}')
    large = tmp_path / JOINING / "large.request"
    large.write_text('{"workers": 1}')
    os.truncate(large, 1 << 26)
    tracemalloc.start()
    try:
        assert requests.take(lambda workers: "")
        assert tracemalloc.get_traced_memory()[1] < 100 * MOST
    finally:
        tracemalloc.stop()
    assert requests.workers == 2


def test_a_process_that_cannot_be_started_is_no_reason_to_end_those_that_train() -> None:
    """The system has no room for another process: the first newcomer is ended, too, and the request is refused."""
    ended = []
    made: list[Any] = [SimpleNamespace(end=lambda: ended.append(1), ready=lambda: True)]

    def start() -> Any:
        if not made:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return made.pop()

    newcomers = Newcomers(start)
    with pytest.raises(RunError, match="no process could be started for a worker: Resource temporarily unavailable"):
        newcomers.invite(2)
    assert ended == [1]
    assert newcomers.next() is None


def test_requests_are_confirmed_once_their_workers_take_part(tmp_path: Path) -> None:
    """A request that comes while others join is answered with its own workers."""
    requests = JoinRequests(tmp_path)
    folder = tmp_path / JOINING
    folder.mkdir()
    (folder / "first.request").write_text('{"workers": 2}')
    assert requests.take(lambda workers: "")
    requests.admit()
    assert requests.workers == 0
    (folder / "second.request").write_text('{"workers": 1}')
    assert requests.take(lambda workers: "")
    requests.confirm("the run continues")
    assert [(file.name, file.read_text()) for file in folder.glob("*.answer")] == [
        ("first.answer", '{"text":"the run continues","joined":true}')
    ]
    requests.refuse("the run ended")
    assert (folder / "second.answer").read_text() == '{"text":"the run ended","joined":false}'
    assert requests.workers == 0
