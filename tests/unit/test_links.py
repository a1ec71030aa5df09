"""A supervisor and a process of its run over a real socket."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import PeerLost, ProtocolError
from flockstep.launchers.peers import ProcessLink
from flockstep.links.bus import LAUNCHER
from flockstep.links.control import Control, Line, LocalFrames, _ProcessState, framed, unframed
from flockstep.links.wire import PROTOCOL, SenderIdentity
from flockstep.messages import Message
from flockstep.runtime.member import LISTENED, Hello, Member, NodeSpec
from support.processes import PATIENCE, wait_until

MODEL = 8 << 20


def identity(address: int) -> SenderIdentity:
    return SenderIdentity("run", address, "schema", MODEL)


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    control = Control(f"ipc://{tmp_path / 'control'}", 0.2)
    yield control
    control.close()


@pytest.fixture
def link(control: Control) -> Iterator[tuple[Line, LocalFrames]]:
    """A process that has said hello, and the supervisor's connection to it."""
    line = Line(identity(0), control.address, 60)
    line.introduce(b"hello")
    ((words, connection),) = control.heard()
    assert words == b"hello"
    yield line, connection
    line.close()
    connection.close()


def said(connection: LocalFrames, line: Line, tag: str, note: dict[str, str], array: FlatArray | None) -> Message:
    """What the process hears when the supervisor sends a message."""
    connection.send(framed(Message(LAUNCHER, tag, array, note, number=1), identity(LAUNCHER)))
    heard: list[Message] = []

    def arrived() -> bool:
        connection.flush()
        heard.extend(filter(None, [line.receive()]))
        return bool(heard)

    wait_until(arrived, PATIENCE, "the message arrives")
    return heard[0]


def test_a_welcome_names_where_two_thousand_nodes_listen(link: tuple[Line, LocalFrames]) -> None:
    where = f"tcp://192.168.100.100:65535 {'0' * 32}@{'0' * 36}/4026531840:/proc/4194304/fd/100"
    peers = msgspec.json.encode(dict.fromkeys(range(2048), where)).decode()
    line, connection = link
    assert said(connection, line, "welcome", {"peers": peers}, None).note["peers"] == peers


@pytest.mark.parametrize("size", [0, 1, MODEL // 4])
def test_an_array_larger_than_the_socket_arrives_whole(size: int, link: tuple[Line, LocalFrames]) -> None:
    line, connection = link
    array = np.arange(size, dtype=np.float32)
    assert np.array_equal(said(connection, line, "end", {}, array).payload, array)


def test_a_process_waits_until_the_supervisor_reads(control: Control) -> None:
    """And what it has sent may change afterwards."""
    sender = f"""
import numpy as np
from flockstep.links.control import Line
from flockstep.links.wire import SenderIdentity
line = Line(SenderIdentity("run", 0, "schema", {MODEL}), {control.address!r}, 60)
line.introduce(b"hello")
array = np.ones({MODEL // 4}, np.float32)
for _ in range(3):
    line.send("part", None, array)
    array += 1
"""
    with subprocess.Popen([sys.executable, "-c", sender]) as process, first(control) as connection:
        heard, me = list[float](), identity(LAUNCHER)
        while len(heard) < 3:
            assert control.wait([connection], PATIENCE)
            if (frames := connection.receive(MODEL)) is not None:
                values = set(unframed(frames, 0, me).payload)
                assert len(values) == 1
                heard += values
        assert heard == [1, 2, 3]
        assert process.wait() == 0


@contextlib.contextmanager
def first(control: Control) -> Iterator[LocalFrames]:
    """The supervisor's connection to the first process that says hello."""
    found: list[tuple[bytes, LocalFrames]] = []
    wait_until(lambda: found.extend(control.heard()) or bool(found), PATIENCE, "a process says hello")  # type: ignore[func-returns-value]
    with contextlib.closing(found[0][1]) as connection:
        yield connection


WAITING = """
import os, sys, time
from flockstep.links.control import Line
from flockstep.links.wire import SenderIdentity
line = Line(SenderIdentity("run", 0, "schema", 1), sys.argv[1], 60)
line.introduce(b"hello")
if len(sys.argv) > 2 and os.fork():
    os._exit(0)
time.sleep(600)
"""


def test_a_process_is_gone_once_it_was_stopped_for_longer_than_the_heartbeat(control: Control) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITING, control.address]) as process, first(control) as connection:
        assert not connection.disconnected()
        process.send_signal(signal.SIGSTOP)
        wait_until(connection.disconnected, PATIENCE, "it counts as gone")
        assert not connection.ended
        process.kill()
        wait_until(lambda: connection.receive(1) is None and connection.ended, PATIENCE, "the connection closes")


def test_a_process_that_ended_is_gone_though_a_child_holds_its_socket(control: Control) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITING, control.address, "fork"], start_new_session=True)
    try:
        with first(control) as connection:
            wait_until(connection.disconnected, PATIENCE, "it counts as gone, before somebody has waited for it")
            assert connection.receive(1) is None
            assert not connection.ended
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_what_a_process_said_before_its_end_is_heard(control: Control) -> None:
    said = f"from flockstep.links.control import say_to_control; say_to_control({control.address!r}, b'failed')"
    subprocess.run([sys.executable, "-c", said], check=True)
    ((words, connection),) = control.heard()
    connection.close()
    assert words == b"failed"


def test_what_a_communicator_says_is_read(control: Control, link: tuple[Line, LocalFrames]) -> None:
    """It says that it is alive; unread, this would fill its socket and keep the supervisor from waiting."""
    schema = Schema.of({"w": (1,)}, "float32")
    hello = Hello(PROTOCOL, "run", 0, "bus", "host", "bsp", {}, schema, MODEL)
    process, beside = ProcessLink(link[1], hello), Line(identity(0), control.address, 60)
    beside.introduce(b"hello")
    ((_, frames),) = control.heard()
    process.beside = ProcessLink(frames, hello)
    me = SenderIdentity("run", 0, schema.hash, MODEL)
    for number in range(1, 100):
        frames_of_it = framed(Message(0, "alive", number=number), me)
        beside._send(frames_of_it)
    assert process.receive() is None
    assert not control.wait([process.frames, frames], 0.0)
    beside.close()
    process.close()


def test_what_is_too_large_or_no_message_ends_the_connection(control: Control, link: tuple[Line, LocalFrames]) -> None:
    line, connection = link
    line.send("part", None, np.zeros(100, np.float32))
    with pytest.raises(ProtocolError, match="an array of 400 bytes, but at most"):
        connection.receive(399)
    assert connection.disconnected()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(control.address.partition("://")[2])
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        assert list(control.heard()) == []
        stranger.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "it was hung up on"


def test_a_supervisor_that_is_gone_is_told_of(control: Control, link: tuple[Line, LocalFrames]) -> None:
    line, connection = link
    connection.close()
    assert line.receive() is None
    assert line.descriptors == (), "there is nothing to wait for"
    with pytest.raises(PeerLost, match="no connection"):
        line.send("alive")
    control.close()
    with pytest.raises(PeerLost, match="does not listen"):
        Line(identity(0), control.address, 60)


def test_a_supervisor_that_goes_on_hears_nothing_more_from_a_process_that_has_given_it_up(
    link: tuple[Line, LocalFrames], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, connection = link
    with monkeypatch.context() as stopped:
        stopped.setattr(_ProcessState, "lost", lambda state: True)
        with pytest.raises(PeerLost, match="no connection"):
            line.send("events")
    with pytest.raises(PeerLost, match="no connection"):
        line.send("failed")
    frames = connection.receive(0)
    assert frames is not None
    assert unframed(frames, 0, identity(LAUNCHER)).tag == "events"
    assert connection.receive(0) is None
    assert connection.ended


def test_a_supervisor_is_heard_although_other_nodes_never_pause(control: Control, tmp_path: Path) -> None:
    schema = Schema.of({"w": (4,)}, "float32")
    member = Member(NodeSpec("run", 0, control.address, str(tmp_path), "ipc", 5.0, "", 1, 0), schema)
    member.introduce("bsp", {})
    words, frames = next(control.heard())
    ProcessLink(frames, msgspec.msgpack.decode(words, type=Hello)).tell("end")
    member.bus.poll = lambda *arguments: Message(1, "push")  # type: ignore[method-assign]
    heard = [member.receive(0) for _ in range(LISTENED + 1)]
    assert [message.tag for message in heard if message is not None] == ["push"] * LISTENED + ["end"]
    frames.close()
    member.line.close()
    member.bus.close(0.0)
