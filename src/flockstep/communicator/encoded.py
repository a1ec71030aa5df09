"""Arrays of any shape as messages: the note says what the flat payload stands for; nothing of it is believed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from msgspec import Meta
from msgspec.structs import asdict

from flockstep.arrays.kernels import FLOATS, numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec
from flockstep.errors import ConfigurationError, FlockstepError, ProtocolError
from flockstep.feedback.base import Feedback
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import fitted, random_of
from flockstep.messages import Array, Message, Note, frozen, node_name
from flockstep.transports.wire import DTYPES

LONGEST_TEXT = 500
"""Characters of a codec's expression that a message may bring."""
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
E = TypeVar("E", bound="Encoded")
_NONE = NoFeedback()
_codec = lru_cache(maxsize=256)(Codec.parse)


class Encoded(Note, frozen=True, omit_defaults=True):
    """Which array a payload stands for: flat as it is, or what `codec` has made of it at the step `at`."""

    shape: Annotated[tuple[Count, ...], Meta(max_length=32)] = ()
    codec: Annotated[str, Meta(max_length=LONGEST_TEXT)] = ""
    dtype: str = ""
    at: Count = 0
    call: str = ""
    """What all ranks have to agree on, in a call in which every rank takes part."""

    def within(self, kind: type[E], **others: Any) -> E:
        """The same in a note that says more."""
        return kind(**asdict(self), **others)


What = Literal["put", "add", "get"]
"""What a rank does to another's window."""


class Access(Encoded, frozen=True, omit_defaults=True):
    """What is to be done to `size` elements of a window; `codec` is the one to answer with where they are read."""

    what: What = "get"
    offset: Count = 0
    size: Count = 0
    scale: float = 1.0


class Answer(Encoded, frozen=True, omit_defaults=True):
    """What the reply to a request says; `error`: why there is no answer."""

    error: str = ""


class Failed(Note, frozen=True):
    """Why something that a rank began could not be completed; `kind` names an error of ours."""

    kind: str
    why: str


SEND, REQUEST, WINDOW, UNDONE, CALLED_OFF = "send:", "request:", "window:", "undone:", "called off:"
"""What stands before the name in a message's tag; in those of a call that all ranks make stands none of them."""
CLOSING = "closing/"
"""Tag of the message of a rank that will send no more arrays, but answers until all others have said so too."""
_KINDS: dict[str, type[Note]] = {WINDOW: Access, UNDONE: Failed, CALLED_OFF: Failed}


class _Notes(Mapping[str, type[Note]]):
    """The kind of note by how a tag begins."""

    def __getitem__(self, tag: str) -> type[Note]:
        if tag.startswith("reply to "):
            return Answer
        if "/" not in tag:  # no channel: a message of the node's own
            raise KeyError(tag)
        return _KINDS.get(tag[: tag.find(":") + 1], Encoded)

    def __iter__(self) -> Iterator[str]:
        return iter(_KINDS)

    def __len__(self) -> int:
        return len(_KINDS)


NOTES = _Notes()
"""What travels beside the arrays of a communicator."""


@dataclass(frozen=True)
class Packet:
    """What travels for one array: a flat read-only array and the note that says what it stands for."""

    data: FlatArray
    note: Encoded


def checked(array: Any, most: int) -> Array:
    """`array` as a numpy array that can travel.

    Raises:
        ConfigurationError: its dtype has no place on the wire, or it has more than `most` bytes.
    """
    found: Array = np.asarray(array)
    if found.dtype.name not in DTYPES:
        raise ConfigurationError(f"an array must be one of {', '.join(sorted(DTYPES))}, got {found.dtype}; convert it")
    if found.nbytes > most:
        raise ConfigurationError(
            f"an array may have at most {most} bytes, got {found.nbytes}; send it in parts, or join with more max_bytes"
        )
    return found


def codec_of(codec: str | Codec | None) -> Codec | None:
    """The codec that a caller named; None where arrays go as they are."""
    return None if codec is None else Codec.parse(codec)


def at_hand(codec: Codec, array: Array, step: int, feedback: Feedback = _NONE) -> Codec:
    """The codec as it is for that array at that use; refuses an array that is not of floating-point numbers."""
    if array.dtype.name not in FLOATS:
        raise ConfigurationError(
            f"codec {codec} takes {', '.join(FLOATS)}, got {array.dtype}; leave the codec out for other arrays"
        )
    return fitted(codec, feedback, (array.shape,), step)


def packed(array: Array, codec: Codec | None, step: int, random: Callable[[], np.random.Generator]) -> Packet:
    """A copy of the array as it is now, encoded where there is a codec."""
    if codec is None:
        return Packet(frozen(array.reshape(-1)), Encoded(array.shape))
    text, fit = str(codec), at_hand(codec, array, step)
    if len(text) > LONGEST_TEXT:
        raise ConfigurationError(f"a codec is written in at most {LONGEST_TEXT} characters, got {len(text)}")
    data: FlatArray = np.asarray(fit.encode(array, random_of(fit, random(), step)))
    data.flags.writeable = False
    return Packet(data, Encoded(array.shape, text, array.dtype.name, step))


def unpacked(message: Message, most: int) -> Array:
    """The array that a message stands for: a copy of its own, in its shape and dtype.

    Raises:
        ProtocolError: shape, dtype, codec and payload do not go together, or the array has more than `most` bytes.
    """
    note, data = message.note, message.payload
    size = _size(message)
    if note.codec:
        return _codec_at(message, most).decode(data, size, note.dtype).reshape(note.shape)
    if data.size != size:
        raise ProtocolError(f"{node_name(message.source)} sent {data.size} elements for an array of shape {note.shape}")
    return data.reshape(note.shape).copy()


def add_unpacked(message: Message, out: FlatArray, scale: float, most: int) -> None:
    """out (size,) += scale * the array that a message stands for.

    Raises:
        ProtocolError: as `unpacked`, or another size or dtype than `out` has.
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
    """Elements of the array that a message announces, which numpy could hold if it were of no element."""
    shape = message.note.shape
    if math.prod(axis or 1 for axis in shape) >= 1 << 48:
        raise ProtocolError(f"{node_name(message.source)} announced the shape {shape}, which nothing can have")
    return math.prod(shape)


def _codec_at(message: Message, most: int) -> Codec:
    """The codec of an encoded message; nothing is allocated before its size is checked."""
    who, note, data = node_name(message.source), message.note, message.payload
    if note.dtype not in FLOATS:
        raise ProtocolError(f"{who} announced an encoded array of {note.dtype[:40]!r}; allowed: {', '.join(FLOATS)}")
    nbytes = math.prod(axis or 1 for axis in note.shape) * numpy_dtype(note.dtype).itemsize
    if nbytes > most:  # an axis of none frees no codec from the others
        raise ProtocolError(f"{who} announced an array of {nbytes} bytes; at most {most} are allowed")
    if data.dtype != np.uint8:
        raise ProtocolError(f"{who} sent {data.dtype} where an encoding was announced; encodings are uint8")
    try:
        return fitted(_codec(note.codec), _NONE, (note.shape,), note.at)
    except FlockstepError as error:
        raise ProtocolError(f"{who} announced a codec that cannot be used here: {error}") from None
