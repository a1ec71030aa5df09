"""Frames that arrive over connections, of every kind of message, and the ways of damaging them."""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import msgspec.inspect as kinds
import numpy as np

import flockstep.links.wire as wire
from flockstep import registry
from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import Schema
from flockstep.communicator import encoded as communicator
from flockstep.errors import ProtocolError
from flockstep.launchers import host_messages
from flockstep.launchers.supervisor import Supervisor
from flockstep.links import control
from flockstep.links.handshake import Handshake
from flockstep.links.streams import StreamBus
from flockstep.links.wire import SenderIdentity
from flockstep.messages import Message, Note
from flockstep.records import flight
from flockstep.records.events import Event
from flockstep.runtime import member, program_restart, replication
from flockstep.runtime.reports import events_in
from support.buses import SECRET, framed, greeting, raw_connection
from support.damage import Attempt, attempt
from support.mutations import changed, damaged

SIZE = 10
"""Numbers of the model of the run."""


@dataclass(frozen=True)
class Frames:
    """Sound frames of one kind, and how they are read; `document` says whether a frame is MessagePack."""

    sound: tuple[bytes, ...]
    read: Callable[[bytes, random.Random], object]
    document: bool = True


def example(kind: Any) -> Any:
    """A value of a type, as msgspec writes it to MessagePack."""
    return _example(kinds.type_info(kind))


def _example(info: kinds.Type) -> Any:
    match info:
        case kinds.StructType() | kinds.DataclassType() if info.cls is Schema:  # its tensors must lie one after another
            return msgspec.to_builtins(Schema.of({"w": (SIZE,)}, "float32"))
        case kinds.StructType():
            fields = {one.encode_name: _example(one.type) for one in info.fields}
            tag = {} if info.tag is None else {info.tag_field or "type": info.tag}
            return [*tag.values(), *fields.values()] if info.array_like else {**tag, **fields}
        case kinds.DataclassType() | kinds.NamedTupleType():
            return {one.encode_name: _example(one.type) for one in info.fields}
        case kinds.UnionType():
            return _example(next(one for one in info.types if not isinstance(one, kinds.NoneType)))
        case kinds.TupleType():
            return [_example(one) for one in info.item_types]
        case kinds.DictType():
            return {_example(info.key_type): _example(info.value_type)}
        case kinds.CollectionType():
            return [_example(info.item_type)]
        case kinds.LiteralType():
            return info.values[0]
        case kinds.StrType():
            return "x"
        case kinds.BytesType():
            return b"x"
        case kinds.FloatType():
            return 0.5
        case kinds.BoolType():
            return True
        case _:
            return 1


def identity(address: int, notes: Mapping[str, type[Note]] | None = None) -> SenderIdentity:
    return SenderIdentity("run", address, "0123456789abcdef", 8 * SIZE, notes=notes or {})


def messages(notes: Mapping[str, type[Note]], tags: tuple[str, ...]) -> Frames:
    """Messages between nodes with these tags and notes, each of which is a header and a payload."""
    mine, payload = identity(2, notes), bytes(4 * SIZE)
    array = np.arange(SIZE, dtype=np.float32)
    sound = []
    for tag in tags:
        name, reply = tag.removeprefix("reply to "), int(tag.startswith("reply to "))
        note = example(notes[tag]) if tag in notes else {"lr": 0.1}
        sound.append(wire.encode(Message(1, name, array, note, number=1, reply_to=reply), identity(1)))

    def read(data: bytes, draw: random.Random) -> object:
        mine.heard.clear()
        body = draw.choice([payload, payload, payload[:-1], b"", None])
        return wire.decode(data, None if body is None else memoryview(body), 1, mine)

    return Frames(tuple(sound), read)


def arrays() -> Frames:
    """Messages with an array of every dtype."""
    all_kinds = [np.zeros(SIZE, numpy_dtype(dtype)) for dtype in sorted(wire.DTYPES)]
    sound = tuple(wire.encode(Message(1, "push", one, number=1), identity(1)) for one in all_kinds)

    def read(data: bytes, draw: random.Random) -> object:
        return wire.decode(data, memoryview(bytes(draw.choice([1, 2, 4, 8]) * SIZE)), 1, identity(2))

    return Frames(sound, read)


def decoded(kind: object, read: Callable[[bytes], object]) -> Frames:
    """One MessagePack document of a type, or of each type of a union."""
    infos = kinds.type_info(kind)
    each = infos.types if isinstance(infos, kinds.UnionType) else (infos,)
    return Frames(tuple(msgspec.msgpack.encode(_example(one)) for one in each), lambda data, draw: read(data))


def listed(kind: object, read: Callable[[bytes], object]) -> Frames:
    """One MessagePack list with a value of each type of a union."""
    info = kinds.type_info(kind)
    each = info.types if isinstance(info, kinds.UnionType) else (info,)
    return Frames((msgspec.msgpack.encode([_example(one) for one in each]),), lambda data, draw: read(data))


def _control(data: bytes) -> None:
    """The supervisor ignores what is no message of its run, which counts as refused here."""
    heard: list[object] = []

    def hello(words: object, connection: object, files: object) -> bool:
        heard.append(words)
        return True

    admission = SimpleNamespace(spec=SimpleNamespace(run="x"), hello=hello)
    call = SimpleNamespace(admission=admission, peers={1: None}, _fail=lambda *given: None, _open=None)
    connection: Any = SimpleNamespace(close=lambda: None)
    Supervisor._accept(SimpleNamespace(_open_calls=[call]), data, connection)  # type: ignore[arg-type]
    if not heard:
        raise ProtocolError("ignored")


def between_hosts() -> Frames:
    """Messages of every kind between the coordinator and an agent, with a payload."""
    each = [example(kind) for kind in typing.get_args(host_messages.AnyHostMessage)]
    sound = [msgspec.msgpack.encode(one) for one in each]
    framed = [len(data).to_bytes(4, "little") + data + b"x" * 50 for data in sound]
    return Frames(tuple(framed), lambda data, draw: host_messages.unpacked(memoryview(data)), False)


def line() -> Frames:
    """What a process sends to its supervisor; the connection then ends."""

    def read(data: bytes, draw: random.Random) -> object:
        ours, theirs = socket.socketpair()
        with contextlib.closing(control.LocalFrames(ours, 5.0)) as frames, theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            return list(iter(lambda: frames.receive(8 * SIZE), None))

    ours, theirs = socket.socketpair()
    with contextlib.closing(control.LocalFrames(ours, 5.0)) as frames, theirs:
        frames.send([b"x" * 50, bytes(4 * SIZE)])
        frames.send([b"x" * 50])
        return Frames((theirs.recv(1 << 16),), read, False)


def handshake(connects: bool, encrypts: bool) -> Frames:
    """What the other end says until both have proved that they know the secret; the proof itself is never right."""

    def read(data: bytes, draw: random.Random) -> object:
        end = Handshake(SECRET, connects, encrypts)
        while end.due:
            now, data = data[: end.due], data[end.due :]
            end.require_protocol(now)
            if len(now) < end.due:
                raise ProtocolError("the connection ended")
            end.feed(now)
        return end.keys()

    other = Handshake(SECRET, True, encrypts)
    return Frames((other.out + bytes(64), other.out), read, False)


class Bus:
    """A bus that listens in a folder, to which somebody connects for each frame."""

    def __init__(self, folder: Path):
        me = SenderIdentity("run", 0, "schema", 8 * SIZE, secret=SECRET)
        self._bus = StreamBus(me, f"ipc://{folder / 'bus'}")
        self._bus.connect({1: "ipc://nowhere"})

    def frames(self) -> Frames:
        message = wire.encode(
            Message(1, "push", np.zeros(SIZE, np.float32), number=1), SenderIdentity("run", 1, "schema", 8 * SIZE)
        )
        return Frames((greeting(1), greeting(1) + framed(message, bytes(4 * SIZE))), self._read, False)

    def _read(self, data: bytes, draw: random.Random) -> object:
        """A stranger is turned away, and a peer's message arrives or is refused; the connection then ends."""
        rejected, found = self._bus.traffic.rejected, None
        with raw_connection(self._bus, data) as other:
            other.shutdown(socket.SHUT_WR)
            found = self._bus.poll(0.0)
            while self._bus._connections:
                found = self._bus.poll(0.001) or found
        if found is None and self._bus.traffic.rejected > rejected:
            raise ProtocolError("turned away")
        return found

    def close(self) -> None:
        self._bus.close(0)


@functools.cache
def frames() -> dict[str, Frames]:
    """Name → frames that need no connection: of every strategy, of the drivers, of the supervisor and of hosts."""
    found: dict[str, Frames] = {"arrays": arrays(), "messages without a note": messages({}, ("push", "leave"))}
    declared = {name: registry.load("strategy", name).notes for name in registry.names("strategy")}
    declared |= {"backups": replication.NOTES, "restarts": program_restart.NOTES, "the supervisor": member.SAID}
    for name, notes in declared.items():
        if notes:
            found[f"messages of {name}"] = messages(notes, tuple(notes))
    tags = ("all/1", "window:w/1", "undone:w/1", "called off:c/1", "reply to request:r/1")
    found["messages of a communicator"] = messages({tag: communicator.NOTES[tag] for tag in tags}, tags)
    hello = (wire.encode(Message(1, wire.GREETING, note=wire.Greeting()), identity(1)),)
    found["greetings"] = Frames(hello, lambda data, draw: wire.decode_greeting(data, identity(2)))
    found["control"] = decoded(member.Hello | member.Failure, _control)
    found["messages of hosts"] = between_hosts()
    found["line to the supervisor"] = line()
    found["events"] = listed(Event, lambda data: events_in(np.frombuffer(data, np.uint8)))
    found["flight recorder"] = listed(flight.FlightEvent, flight.decoded)
    for connects in (True, False):
        for encrypts in (True, False):
            name = f"handshake, {'connects' if connects else 'accepts'}, {'encrypted' if encrypts else 'plain'}"
            found[name] = handshake(connects, encrypts)
    return found


def bad_frame(subject: Frames, draw: random.Random) -> bytes:
    """A sound frame with changed bytes, or a document with other values."""
    good = draw.choice(subject.sound)
    if subject.document and draw.random() < 0.5:
        try:
            return msgspec.msgpack.encode(changed(msgspec.msgpack.decode(good, strict=False), draw))
        except (OverflowError, ValueError, TypeError):  # such as an integer of 65 bits
            pass
    return damaged(good, draw)


def damaged_frames(name: str, subject: Frames, count: int, draw: random.Random) -> Iterator[Attempt]:
    """Read `count` damaged frames."""
    for number in range(count):
        data = bad_frame(subject, draw)
        yield attempt(name, number, data, functools.partial(subject.read, data, draw))
