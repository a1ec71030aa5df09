"""The wire format: a versioned, typed header (MessagePack), then the array's raw little-endian bytes.

Everything received is checked before use: the header against its types, the run, the schema and the sequence; the size
of the payload against the header and the model. No part of a message can name code.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any

import msgspec
import numpy as np

from flockstep.arrays.kernels import numpy_dtype
from flockstep.errors import ProtocolError
from flockstep.links.shared_heap import PeerMemory
from flockstep.messages import Address, Array, Message, Note, Notes, node_name, note_kind

PROTOCOL = 9
GREETING = "flockstep.hello"
"""Tag of the messages that two nodes exchange when they connect; such a message has no sequence number."""
HANDED_ON = "flockstep.handed-on"
"""Tag of the model that nodes forward to one another before a run begins; such a message has no sequence number."""
HOST_MEMORY = "flockstep.host-memory"
"""Tag of the address of a host's shared memory, which one worker sends to the other workers before a run begins; such a
message has no sequence number.
"""
MAX_HEADER = 1 << 16
"""Largest size of a header in bytes. Headers are far smaller, whatever note the strategy adds."""
MAX_CODING = 1 << 16
"""Maximum number of bytes by which an encoded array may be longer than the unencoded array.

A longer encoding is not used, and the array is sent unencoded.
"""
DTYPES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
}


class Greeting(Note, frozen=True):
    """Note of the message with which a node greets a peer."""

    memory: bool = False
    """Whether the sender can read the receiver's memory."""
    session: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Key of the session with the receiver; empty if the connection is not to be opened again."""
    received: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of bytes that have arrived in the session."""


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The header of a message, which precedes the payload of the message."""

    protocol: int
    run: str
    source: int
    incarnation: int
    epoch: int
    schema: str
    tag: str
    step: int
    number: int
    reply_to: int
    dtype: str
    size: int
    place: int
    """Number of the slot of shared memory that holds the array; -1 if the array follows as a payload."""
    start: int
    note: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


_NO_NOTE = msgspec.Raw(_encoder.encode({}))


@cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name


@cache
def _little(name: str) -> np.dtype[Any]:
    return numpy_dtype(name).newbyteorder("<")


@cache
def note_reader(kind: type[Note] | None) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder for notes of the given type; None stands for the notes of the driver's own messages."""
    return msgspec.msgpack.Decoder(kind or dict[str, int | float | str])


@dataclass
class SenderIdentity:
    """Identity of a node in the headers that it writes and expects: run, address, and schema of the model."""

    run: str
    address: Address
    schema: str
    model_bytes: int
    incarnation: int = 0
    epoch: int = 0
    peer_memory: dict[Address, PeerMemory] = field(default_factory=dict)
    """Address of another node → memory of that node, for the nodes whose memory this node can read."""
    heard: dict[Address, int] = field(default_factory=dict)
    notes: Notes = field(default_factory=dict)
    """Tag → type of the note, for the messages that the strategy declares."""
    secret: bytes = field(default=b"", repr=False)
    """Secret of the run, which both ends of a TCP connection must know; empty if connections are not authenticated."""


def encode(message: Message, me: SenderIdentity, place: int = -1, start: int = 0) -> bytes:
    """Encode the header of `message`.

    `place` and `start` are the slot and the first byte of the array in shared memory, if the array lies there.
    """
    array = message.array
    dtype, size = ("", 0) if array is None else (_name(array.dtype), array.size)
    return _encoder.encode(
        Header(
            PROTOCOL,
            me.run,
            message.source,
            me.incarnation,
            me.epoch,
            me.schema,
            message.tag,
            message.step,
            message.number,
            message.reply_to,
            dtype,
            size,
            place,
            start,
            _NO_NOTE if message.note == {} else msgspec.Raw(_encoder.encode(message.note)),
        )
    )


def decode(
    header: bytes, payload: memoryview | None, sender: Address, me: SenderIdentity, most: int = MAX_HEADER
) -> Message:
    """Decode a message from a header of at most `most` bytes and a payload; the array is a view of `payload`.

    Raises:
        ProtocolError: a value breaks the protocol; the error names the sender, the value and the rule.
    """
    who = node_name(sender)
    if len(header) > most:
        raise ProtocolError(f"{who} sent a header of {len(header)} bytes; at most {most} are allowed")
    head = _read(header, who)
    _check(head, sender, me)
    array = None
    if head.dtype:
        array = _array(head, payload, me, who)
    elif payload is not None:
        raise ProtocolError(f"{who} sent {payload.nbytes} bytes with {head.tag!r}, but the header announced no bytes")
    note = _note(head, me.notes, who)
    if head.number:
        me.heard[sender] = head.number
    return Message(head.source, head.tag, array, note, head.step, head.number, head.reply_to)


def announces(header: bytes, tag: str | None, array: Array) -> bool:
    """Return whether a header, not yet checked, announces an array with the tag, dtype and size of `array`."""
    try:
        head = _decoder.decode(header)
    except (ValueError, RecursionError):
        return False
    return head.tag == tag and head.dtype == array.dtype.name and head.size == array.size and not head.reply_to


def decode_greeting(header: bytes, me: SenderIdentity) -> Message:
    """Decode the greeting of a peer that is not yet known.

    Raises:
        ProtocolError: the message is not a greeting of this run.
    """
    head = _read(header, "somebody")
    if head.tag != GREETING or head.dtype or head.reply_to:
        raise ProtocolError(f"an unknown process sent {head.tag!r} instead of a greeting")
    _check(head, head.source, me)
    return Message(head.source, head.tag, None, _note(head, {GREETING: Greeting}, "somebody"))


def _read(header: bytes, who: str) -> Header:
    try:
        return _decoder.decode(header)
    except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors, and so is text that is not UTF-8
        raise ProtocolError(f"{who} sent a header that does not follow protocol {PROTOCOL}: {error}") from None


def _check(head: Header, sender: Address, me: SenderIdentity) -> None:
    expected = 0 if head.tag in (GREETING, HANDED_ON, HOST_MEMORY) else me.heard.get(sender, 0) + 1
    if (
        head.number == expected
        and head.source == sender
        and head.epoch == me.epoch
        and head.protocol == PROTOCOL
        and head.run == me.run
        and head.schema == me.schema
    ):
        return
    who = node_name(sender)
    rules = (
        (
            head.protocol == PROTOCOL,
            f"uses protocol {head.protocol}, but this node uses protocol {PROTOCOL}; install the same version on both",
        ),
        (head.run == me.run, f"belongs to run {head.run}, but this node belongs to run {me.run}"),
        (head.source == sender, f"claims to be {node_name(head.source)}"),
        (head.schema == me.schema, f"has a model with schema {head.schema}, but this node has schema {me.schema}"),
        (head.epoch == me.epoch, f"is in epoch {head.epoch}, but this node is in epoch {me.epoch}"),
        (
            head.number == expected,
            f"sent message {head.number} when message {expected} was expected: a message was lost or repeated",
        ),
    )
    for holds, what in rules:
        if not holds:
            raise ProtocolError(f"{who} {what}")


def _note(head: Header, notes: Notes, who: str) -> Any:
    kind = note_kind(notes, head.tag, head.reply_to)
    if kind is None and head.note == _NO_NOTE:
        return {}
    try:
        return note_reader(kind).decode(head.note)
    except (ValueError, RecursionError) as error:
        named = kind.__name__ if kind else "mapping of names to numbers and texts"
        raise ProtocolError(f"{who} sent {head.tag!r} with a note that is not of type {named}: {error}") from None


def _array(
    head: Header, payload: memoryview | None, me: SenderIdentity, who: str
) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    if head.dtype not in DTYPES:
        raise ProtocolError(f"{who} sent an array of {head.dtype!r}; allowed: {', '.join(sorted(DTYPES))}")
    dtype = _little(head.dtype)
    nbytes = head.size * dtype.itemsize
    if head.size < 0 or nbytes > me.model_bytes + (MAX_CODING if head.dtype == "uint8" else 0):
        raise ProtocolError(
            f"{who} announced {nbytes} bytes with {head.tag!r}, but the model has only {me.model_bytes} bytes"
        )
    if head.place >= 0 and payload is None:
        if head.source not in me.peer_memory:
            raise ProtocolError(f"{who} sent slot {head.place} with {head.tag!r}, but shares no memory with this node")
        return me.peer_memory[head.source].view(head.place, head.start, head.dtype, head.size)
    if payload is None or payload.nbytes != nbytes:
        got = 0 if payload is None else payload.nbytes
        raise ProtocolError(f"{who} sent {got} bytes with {head.tag!r}, but the header announced {nbytes}")
    array = np.frombuffer(payload.toreadonly(), dtype)
    if sys.byteorder == "big":
        array = array.astype(dtype.newbyteorder("="))
        array.flags.writeable = False
    return array
