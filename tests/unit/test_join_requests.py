"""Requests to join a run, as its supervisor hears and answers them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from flockstep.errors import RunError
from flockstep.launchers.join_requests import JoinAnswer, JoinRequest, JoinRequests
from flockstep.launchers.newcomers import Newcomers


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


class Asking:
    """The connection of a process that asks; the answers that it gets."""

    def __init__(self) -> None:
        self.said: list[JoinAnswer] = []
        self.closed = self.gone = False

    def disconnected(self) -> bool:
        return self.gone

    def send(self, frames: Any) -> None:
        self.said.append(msgspec.msgpack.decode(frames[0], type=JoinAnswer))

    def close(self) -> None:
        self.closed = True


def test_requests_are_confirmed_once_their_workers_take_part(tmp_path: Path) -> None:
    """A request that comes while others join is answered with its own workers."""
    requests, first, second, third = JoinRequests(tmp_path), *(cast(Any, Asking()) for _ in range(3))
    requests.hear(JoinRequest(2), first)
    assert requests.take(lambda workers: "")
    requests.admit()
    assert requests.workers == 0
    requests.hear(JoinRequest(1), second)
    requests.hear(JoinRequest(7), third)
    assert requests.take(lambda workers: "too many" if workers > 4 else "")
    assert (requests.workers, third.said) == (1, [JoinAnswer("too many", False)])
    requests.confirm("the run continues")
    assert (first.said, second.said) == ([JoinAnswer("the run continues", True)], [])
    requests.refuse("the run ended")
    assert second.said == [JoinAnswer("the run ended", False)]
    assert [one.closed for one in (first, second, third)] == [True] * 3
    assert requests.workers == 0


def test_no_worker_is_started_for_one_who_has_given_up_and_the_end_of_the_run_answers_every_other(
    tmp_path: Path,
) -> None:
    requests, gone, late = JoinRequests(tmp_path), *(cast(Any, Asking()) for _ in range(2))
    gone.gone = True
    requests.hear(JoinRequest(2), gone)
    assert not requests.take(lambda workers: "")
    assert requests.workers == 0
    requests.hear(JoinRequest(1), late)  # not looked at before the run ends
    requests.refuse("the run ended")
    assert late.said == [JoinAnswer("the run ended", False)]


def test_requests_of_an_earlier_version_make_room_for_the_address(tmp_path: Path) -> None:
    (tmp_path / "joining").mkdir()
    (tmp_path / "joining" / "1.json").touch()
    with JoinRequests(tmp_path).open("ipc:///run/control"):
        assert (tmp_path / "joining").read_text() == "ipc:///run/control"
