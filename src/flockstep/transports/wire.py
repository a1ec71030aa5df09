"""The wire format: a versioned, typed header (MessagePack), then the array's raw little-endian bytes.

Nothing is believed before it is checked: the header against its types, the run, the schema and the sequence; the
payload's size against the header and the model's. No part of it can name code.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import numpy as np

from flockstep.arrays.kernels import numpy_dtype
from flockstep.errors import ProtocolError
from flockstep.messages import Address, Array, Message, Note, Notes, node_name, note_kind
from flockstep.transports.shared_heap import Borrowed

PROTOCOL = 3
GREETING = "flockstep.hello"
"""Tag of what two nodes say to each other once they are connected; it has no number."""
HANDED_ON = "flockstep.handed-on"
"""Tag of the model that nodes hand on to one another before a run begins; it has no number either."""
MAX_HEADER = 1 << 16
"""Bytes; a header is far below, whatever the strategy puts into its note."""
MAX_CODING = 1 << 16
"""Bytes that an encoding may be larger than the array; one that would be larger sends the array as it is."""
DTYPES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
}


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What stands before every payload."""

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
    """In which slot of memory that both share the array lies; -1: it follows as a payload."""
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
def _reader(kind: type[Note] | None) -> msgspec.msgpack.Decoder[Any]:
    """Reads notes of that kind; None: a driver's own."""
    return msgspec.msgpack.Decoder(kind or dict[str, int | float | str])


@dataclass
class Identity:
    """Who sends, in which run, and for which model."""

    run: str
    address: Address
    schema: str
    model_bytes: int
    incarnation: int = 0
    epoch: int = 0
    borrowed: dict[Address, Borrowed] = field(default_factory=dict)
    """The memory of others that this node can read, by node."""
    heard: dict[Address, int] = field(default_factory=dict)
    notes: Notes = field(default_factory=dict)
    """The kinds of notes that the strategy declares."""

    @property
    def limit(self) -> int:
        """The largest payload, in bytes, that anyone in this run may send uncoded: the whole model."""
        return self.model_bytes


def encode(message: Message, me: Identity, place: int = -1, start: int = 0) -> bytes:
    """The header for `message`.

    `place` and `start` say in which slot of shared memory the array lies, if it does.
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


def decode(header: bytes, payload: memoryview | None, sender: Address, me: Identity, most: int = MAX_HEADER) -> Message:
    """The message that `header`, of at most `most` bytes, and `payload` say; its array is a view of `payload`.

    Raises:
        ProtocolError: anything in it is not as agreed; names the sender, the value and the rule.
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
        raise ProtocolError(f"{who} sent {payload.nbytes} bytes with {head.tag!r}, whose header announces none")
    note = _note(head, me, who)
    if head.number:
        me.heard[sender] = head.number
    return Message(head.source, head.tag, array, note, head.step, head.number, head.reply_to)


def announces(header: bytes, tag: str | None, array: Array) -> bool:
    """Whether a message with that header, which may be anything, carries the elements that `array` has room for."""
    try:
        head = _decoder.decode(header)
    except (ValueError, RecursionError):
        return False
    return head.tag == tag and head.dtype == array.dtype.name and head.size == array.size and not head.reply_to


def decode_greeting(header: bytes, me: Identity) -> Message:
    """What somebody said who has connected, and is not known before.

    Raises:
        ProtocolError: it is no greeting of this run.
    """
    head = _read(header, "somebody")
    if head.tag != GREETING or head.dtype:
        raise ProtocolError(f"somebody sent {head.tag!r} instead of a greeting")
    _check(head, head.source, me)
    return Message(head.source, head.tag, None, _note(head, me, "somebody"))


def _read(header: bytes, who: str) -> Header:
    try:
        return _decoder.decode(header)
    except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors, and so is text that is not UTF-8
        raise ProtocolError(f"{who} sent a header that is not protocol {PROTOCOL}: {error}") from None


def _check(head: Header, sender: Address, me: Identity) -> None:
    expected = 0 if head.tag in (GREETING, HANDED_ON) else me.heard.get(sender, 0) + 1
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
        (head.protocol == PROTOCOL, f"speaks protocol {head.protocol}, this is {PROTOCOL}; install the same version"),
        (head.run == me.run, f"belongs to run {head.run}, this is {me.run}"),
        (head.source == sender, f"claims to be {node_name(head.source)}"),
        (head.schema == me.schema, f"holds a model with schema {head.schema}, this is {me.schema}"),
        (head.epoch == me.epoch, f"is in epoch {head.epoch}, this is {me.epoch}"),
        (
            head.number == expected,
            f"sent message {head.number} where {expected} was due: one was lost or repeated",
        ),
    )
    for holds, what in rules:
        if not holds:
            raise ProtocolError(f"{who} {what}")


def _note(head: Header, me: Identity, who: str) -> Any:
    kind = note_kind(me.notes, head.tag, head.reply_to)
    if kind is None and head.note == _NO_NOTE:
        return {}
    try:
        return _reader(kind).decode(head.note)
    except (ValueError, RecursionError) as error:
        named = kind.__name__ if kind else "mapping of names to numbers and texts"
        raise ProtocolError(f"{who} sent {head.tag!r} with a note that is no {named}: {error}") from None


def _array(
    head: Header, payload: memoryview | None, me: Identity, who: str
) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    if head.dtype not in DTYPES:
        raise ProtocolError(f"{who} sent an array of {head.dtype!r}; allowed: {', '.join(sorted(DTYPES))}")
    dtype = _little(head.dtype)
    nbytes = head.size * dtype.itemsize
    if head.size < 0 or nbytes > me.limit + (MAX_CODING if head.dtype == "uint8" else 0):
        raise ProtocolError(f"{who} announced {nbytes} bytes with {head.tag!r}; the model has {me.limit}")
    if head.place >= 0 and payload is None:
        if head.source not in me.borrowed:
            raise ProtocolError(f"{who} sent slot {head.place} with {head.tag!r}, but shares no memory with this one")
        return me.borrowed[head.source].view(head.place, head.start, head.dtype, head.size)
    if payload is None or payload.nbytes != nbytes:
        got = 0 if payload is None else payload.nbytes
        raise ProtocolError(f"{who} sent {got} bytes with {head.tag!r}, whose header announces {nbytes}")
    array = np.frombuffer(payload, dtype)
    if sys.byteorder == "big":
        array = array.astype(dtype.newbyteorder("="))
    array.flags.writeable = False
    return array
