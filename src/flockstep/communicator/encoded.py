"""Arrays of any shape as messages; a note describes the flat payload, and the receiver checks every field of the
note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from msgspec import Meta
from msgspec.structs import asdict

from flockstep.arrays.kernels import FLOATS, numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec
from flockstep.errors import ConfigurationError, FlockstepError, ProtocolError
from flockstep.feedback.base import Feedback
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import bound_codec, random_of
from flockstep.links.wire import DTYPES
from flockstep.messages import Array, Message, Note, frozen, node_name

LONGEST_TEXT = 500
"""Maximum number of characters of a codec's expression in a message."""
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
E = TypeVar("E", bound="Encoded")
_NONE = NoFeedback()
_codec = lru_cache(maxsize=256)(Codec.parse)


class Encoded(Note, frozen=True, omit_defaults=True):
    """Note that describes a payload: a flat array whose shape is `shape`, either as it is or encoded by `codec` at step
    `at`.
    """

    shape: Annotated[tuple[Count, ...], Meta(max_length=32)] = ()
    codec: Annotated[str, Meta(max_length=LONGEST_TEXT)] = ""
    dtype: str = ""
    at: Count = 0
    call: str = ""
    """Text on which all ranks have to agree in a collective call; empty in other calls."""

    def within(self, kind: type[E], **others: Any) -> E:
        """Return a note of type `kind` with the fields of this note and the given further fields."""
        return kind(**asdict(self), **others)


What = Literal["put", "add", "get"]
"""Name of an operation on another rank's window."""


class WindowOperation(Encoded, frozen=True, omit_defaults=True):
    """Note of an operation on `size` elements of a window; for "get", `codec` encodes the answer."""

    what: What = "get"
    offset: Count = 0
    size: Count = 0
    scale: float = 1.0


class Reply(Encoded, frozen=True, omit_defaults=True):
    """Note of the reply to a request; `error` says why the request has no answer."""

    error: str = ""


class Failed(Note, frozen=True):
    """Note that says why an operation could not be completed; `kind` is the name of one of flockstep's errors."""

    kind: str
    why: str


SEND, REQUEST, WINDOW, UNDONE, CALLED_OFF = "send:", "request:", "window:", "undone:", "called off:"
"""Prefixes of the tags of messages, each followed by a name: sent arrays, requests, window operations, failed window
operations, and canceled calls. Messages of collective calls have no prefix.
"""
CLOSING = "closing/"
"""Tag of the message of a rank that closes its communicator: the rank sends no more arrays, but answers until all ranks
close theirs.
"""
_KINDS: dict[str, type[Note]] = {WINDOW: WindowOperation, UNDONE: Failed, CALLED_OFF: Failed}


class _Notes(Mapping[str, type[Note]]):
    """Tag → type of the note, by the tag's prefix."""

    def __getitem__(self, tag: str) -> type[Note]:
        if tag.startswith("reply to "):
            return Reply
        if "/" not in tag:  # no channel: one of the node's own messages
            raise KeyError(tag)
        return _KINDS.get(tag[: tag.find(":") + 1], Encoded)

    def __iter__(self) -> Iterator[str]:
        return iter(_KINDS)

    def __len__(self) -> int:
        return len(_KINDS)


NOTES = _Notes()
"""Types of the notes that a communicator sends with arrays."""


class Packet(NamedTuple):
    """One array to send: a flat read-only array and the note that describes it."""

    data: FlatArray
    note: Encoded


def checked(array: Any, most: int) -> Array:
    """Return `array` as a numpy array that can be sent.

    Raises:
        ConfigurationError: the wire format does not support the dtype of the array, or the array has more than `most`
            bytes.
    """
    found: Array = np.asarray(array)
    if found.dtype.name not in DTYPES:
        raise ConfigurationError(
            f"the dtype of an array must be one of {', '.join(sorted(DTYPES))}, got {found.dtype}; convert it"
        )
    if found.nbytes > most:
        raise ConfigurationError(
            f"an array may have at most {most} bytes, got {found.nbytes}; send it in parts, or join with a larger "
            "max_bytes"
        )
    return found


def codec_of(codec: str | Codec | None) -> Codec | None:
    """Return the codec that the argument `codec` of a call names; None if arrays are sent unencoded."""
    return None if codec is None else Codec.parse(codec)


def at_hand(codec: Codec, array: Array, step: int, feedback: Feedback = _NONE) -> Codec:
    """Return `codec` bound to the shape of the array to encode and to the given step.

    Raises: ConfigurationError: the array does not hold floating-point numbers.
    """
    if array.dtype.name not in FLOATS:
        raise ConfigurationError(
            f"codec {codec} encodes only {', '.join(FLOATS)}, got {array.dtype}; send other arrays without a codec"
        )
    return bound_codec(codec, feedback, (array.shape,), step)


def packed(array: Array, codec: Codec | None, step: int, random: Callable[[], np.random.Generator]) -> Packet:
    """Return a copy of the array at the time of the call, encoded if a codec is given, with the note that describes
    it.
    """
    if codec is None:
        return Packet(frozen(array.reshape(-1)), Encoded(array.shape))
    text, fit = str(codec), at_hand(codec, array, step)
    if len(text) > LONGEST_TEXT:
        raise ConfigurationError(
            f"a codec may be written in at most {LONGEST_TEXT} characters, got {len(text)}; use shorter arguments"
        )
    data: FlatArray = np.asarray(fit.encode(array, random_of(fit, random(), step)))
    data.flags.writeable = False
    return Packet(data, Encoded(array.shape, text, array.dtype.name, step))


def unpacked(message: Message, most: int) -> Array:
    """Return the array that a message describes: a new array with the sender's shape and dtype.

    Raises:
        ProtocolError: shape, dtype, codec and payload are inconsistent, or the array has more than `most` bytes.
    """
    note, data = message.note, message.payload
    size = _size(message)
    if note.codec:
        return _codec_at(message, most).decode(data, size, note.dtype).reshape(note.shape)
    if data.size != size:
        raise ProtocolError(f"{node_name(message.source)} sent {data.size} elements for an array of shape {note.shape}")
    return data.reshape(note.shape).copy()


def add_unpacked(message: Message, out: FlatArray, scale: float, most: int) -> None:
    """Decode the array that a message describes, multiply it by `scale`, and add it to `out`, of shape (size,).

    Raises:
        ProtocolError: `unpacked` would refuse the message, or the array has another size or dtype than `out`.
    """
    note, who, size = message.note, node_name(message.source), _size(message)
    dtype = note.dtype if note.codec else message.payload.dtype.name
    if size != out.size or dtype != out.dtype.name:
        raise ProtocolError(f"{who} sent {size} × {dtype} for {out.size} × {out.dtype.name}")
    if note.codec:
        _codec_at(message, most).add_decoded(message.payload, out, scale)
        return
    array = unpacked(message, most).reshape(-1)
    out += array if scale == 1 else (array * scale).astype(out.dtype)


def _size(message: Message) -> int:
    """Return the number of elements of the array that a message describes.

    Raises:
        ProtocolError: numpy could not hold such a shape.
    """
    shape = message.note.shape
    if math.prod(axis or 1 for axis in shape) >= 1 << 48:
        raise ProtocolError(f"{node_name(message.source)} announced the impossible shape {shape}")
    return math.prod(shape)


def _codec_at(message: Message, most: int) -> Codec:
    """Return the codec of an encoded message; nothing is allocated before the size is checked.

    Raises:
        ProtocolError: the dtype, the size or the codec is not allowed.
    """
    who, note, data = node_name(message.source), message.note, message.payload
    if note.dtype not in FLOATS:
        raise ProtocolError(f"{who} announced an encoded array of {note.dtype[:40]!r}; allowed: {', '.join(FLOATS)}")
    nbytes = math.prod(axis or 1 for axis in note.shape) * numpy_dtype(note.dtype).itemsize
    if nbytes > most:  # an axis of length 0 does not make the other axes harmless to a codec
        raise ProtocolError(f"{who} announced an array of {nbytes} bytes; at most {most} are allowed")
    if data.dtype != np.uint8:
        raise ProtocolError(f"{who} sent {data.dtype} where an encoded array of uint8 was announced")
    try:
        return bound_codec(_codec(note.codec), _NONE, (note.shape,), note.at)
    except FlockstepError as error:
        raise ProtocolError(f"{who} announced a codec that cannot be used here: {error}") from None
