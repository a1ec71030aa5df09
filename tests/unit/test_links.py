"""What a supervisor says to its nodes, over real sockets in one process."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from flockstep.errors import ProtocolError
from flockstep.messages import Message
from flockstep.transports.bus import LAUNCHER
from flockstep.transports.links import Control, Line
from flockstep.transports.wire import SenderIdentity


def said(folder: Path, note: dict[str, int | float | str]) -> Message:
    """What a node hears of a welcome with that note."""
    line = Line(SenderIdentity("run", 0, "schema", 1 << 10), f"ipc://{folder / 'line'}", 60)
    control = Control(f"ipc://{folder / 'control'}", 60)
    wire = control.link(0, line.address, SenderIdentity("run", LAUNCHER, "schema", 1 << 10))
    try:
        wire.send("welcome", note)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            if (message := line.receive()) is not None:
                return message
        raise TimeoutError("nothing was heard")
    finally:
        wire.close()
        control.close()
        line.close(0)


def test_a_welcome_names_where_two_thousand_nodes_listen(tmp_path: Path) -> None:
    where = f"tcp://192.168.100.100:65535 {'0' * 32}@{'0' * 36}/4026531840:/proc/4194304/fd/100"
    peers = msgspec.json.encode(dict.fromkeys(range(2048), where)).decode()
    assert said(tmp_path, {"peers": peers}).note["peers"] == peers


SECRET = b"the secret of the run"
FORGED = b"n" + LAUNCHER.to_bytes(4, "big", signed=True)


def stranger(endpoint: str, **options: bytes) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """A ZeroMQ socket without the secret that says it is the supervisor, and sends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, FORGED)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.connect(endpoint)
    socket.send(b"forged")
    return context, socket


@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("key", [False, True])
def test_a_stranger_with_the_supervisors_name_is_heard_by_nobody(secret: bytes, key: bool) -> None:
    """Without a secret it takes the supervisor's place: the negative control. A key of its own helps nobody."""
    line = Line(SenderIdentity("run", 0, "schema", 1 << 10, secret=secret), "tcp://127.0.0.1:*", 60)
    control = Control("tcp://127.0.0.1:*", 60, secret)
    public, private = zmq.curve_keypair()
    keys = {"CURVE_SERVERKEY": public, "CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": private} if key and secret else {}
    context, forger = stranger(line.address, **keys)
    try:
        if not secret:
            with pytest.raises(ProtocolError, match="header"):
                heard(line)
            return
        monitored = refusals(forger)
        wire = control.link(0, line.address, SenderIdentity("run", LAUNCHER, "schema", 1 << 10))
        wire.send("welcome", {"peers": "all"})
        assert heard(line).note == {"peers": "all"}
        assert line.rejected == 0
        assert monitored
        wire.close()
    finally:
        forger.close(0)
        context.term()
        control.close()
        line.close(0)


def heard(line: Line) -> Message:
    while (message := line.receive()) is None:
        line.wait(0.05)
    return message


def refusals(socket: zmq.Socket[bytes]) -> int:
    """Wait until the other end has closed the connection during the handshake; the number of times it did."""
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    count = 0
    while not count:
        count += bool(monitor.poll(50)) and bool(recv_monitor_message(monitor))
    socket.disable_monitor()
    monitor.close()
    return count


def test_an_endless_message_of_a_stranger_is_not_read() -> None:
    """The first bytes of ZeroMQ's protocol without authentication, then parts of a message that never ends."""
    control = Control("tcp://127.0.0.1:*", 60, SECRET)
    host, _, port = control.address.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    with socket.create_connection((host, int(port))) as forger:
        forger.sendall(greeting + ready)
        assert endured(forger, (b"\x01\xff" + bytes(255)) * 100) < 1 << 24
    assert list(control.heard()) == []
    control.close()


def endured(sock: socket.socket, data: bytes) -> int:
    """Number of bytes that the other end took before it closed the connection; at most 256 MiB are sent."""
    sent = 0
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while sent < 1 << 28:
            sock.sendall(data)
            sent += len(data)
    return sent
