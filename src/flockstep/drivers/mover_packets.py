"""Arrays of any shape as messages: shape and codec in the note, the payload flat; nothing of it is believed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from flockstep.arrays.kernels import FLOATS, numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec, Shape
from flockstep.errors import ConfigurationError, FlockstepError, ProtocolError
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import fitted, random_of
from flockstep.messages import Array, Fields, Message, frozen, node_name
from flockstep.transports.wire import DTYPES

LONGEST_TEXT = 500
"""Characters of a codec's expression that a message may bring."""
MOST_AXES = 32
"""Axes that an array may have."""
PLAIN = NoFeedback()


@dataclass(frozen=True)
class Packet:
    """What travels for one array: a flat read-only array and the note that says what it stands for."""

    data: FlatArray
    note: Fields

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return int(self.data.nbytes)


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


def at_hand(codec: Codec, array: Array, step: int) -> Codec:
    """The codec as it is for that array at that use; refuses an array that is not of floating-point numbers."""
    if array.dtype.name not in FLOATS:
        raise ConfigurationError(
            f"codec {codec} takes {', '.join(FLOATS)}, got {array.dtype}; leave the codec out for other arrays"
        )
    return fitted(codec, PLAIN, (array.shape,), step)


def plain(array: Array) -> Packet:
    """A copy of the array as it is now; it goes as it is."""
    return Packet(frozen(array.reshape(-1)), {"shape": _shape_text(array.shape)})


def coded(data: FlatArray, array: Array, codec: Codec, step: int) -> Packet:
    """What `codec` has made of the array."""
    text = str(codec)
    if len(text) > LONGEST_TEXT:
        raise ConfigurationError(f"a codec is written in at most {LONGEST_TEXT} characters, got {len(text)}")
    return Packet(data, {"shape": _shape_text(array.shape), "dtype": array.dtype.name, "codec": text, "at": step})


def packed(array: Array, codec: Codec | None, step: int, random: Callable[[], np.random.Generator]) -> Packet:
    """The array as it is now, encoded where there is a codec."""
    if codec is None:
        return plain(array)
    fit = at_hand(codec, array, step)
    data: FlatArray = np.asarray(fit.encode(array, random_of(fit, random(), step)))
    data.flags.writeable = False
    return coded(data, array, codec, step)


def whole(message: Message, key: str) -> int:
    """An integer of a message's note.

    Raises:
        ProtocolError: there is none of that name.
    """
    value = message.note.get(key)
    if not isinstance(value, int):
        raise ProtocolError(f"{node_name(message.source)} sent {value!r} as {key!r}; it is an integer")
    return value


def unpacked(message: Message, most: int) -> Array:
    """The array that a message stands for: its own copy, in its shape and dtype.

    Raises:
        ProtocolError: shape, dtype, codec and payload do not go together, or the array has more than `most` bytes.
    """
    who = node_name(message.source)
    shape, data = shape_of(message), message.payload
    if "codec" not in message.note:
        if data.size != math.prod(shape):
            raise ProtocolError(f"{who} sent {data.size} elements for an array of shape {shape}")
        return data.reshape(shape).copy()
    codec, dtype = _codec_of(message, shape, most)
    return codec.decode(data, math.prod(shape), dtype).reshape(shape)


def add_unpacked(message: Message, out: FlatArray, scale: float, most: int) -> None:
    """out (size,) += scale * the array that a message stands for.

    Raises:
        ProtocolError: as `unpacked`, or another size or dtype than `out` has.
    """
    shape = shape_of(message)
    dtype = str(message.note.get("dtype", message.payload.dtype.name))
    if math.prod(shape) != out.size or dtype != out.dtype.name:
        raise ProtocolError(
            f"{node_name(message.source)} sent {math.prod(shape)} × {dtype} for {out.size} × {out.dtype.name}"
        )
    if "codec" in message.note:
        _codec_of(message, shape, most)[0].add_decoded(message.payload, out, scale)
        return
    array = unpacked(message, most).reshape(-1)
    if array.dtype != out.dtype:
        raise ProtocolError(f"{node_name(message.source)} sent {array.dtype} for {out.dtype.name}")
    out += array if scale == 1 else (array * scale).astype(out.dtype)


def shape_of(message: Message) -> Shape:
    """The shape that a message announces.

    Raises:
        ProtocolError: it announces none.
    """
    text = str(message.note.get("shape", "?"))
    axes = text.split("x") if text else []
    if len(axes) > MOST_AXES or not all(axis.isascii() and axis.isdigit() and len(axis) < 16 for axis in axes):
        raise ProtocolError(f"{node_name(message.source)} announced the shape {text[:80]!r}")
    shape = tuple(map(int, axes))
    if math.prod(axis or 1 for axis in shape) >= 1 << 48:  # an empty array of such a shape would be none of numpy's
        raise ProtocolError(f"{node_name(message.source)} announced the shape {text[:80]!r}, which nothing can have")
    return shape


def _codec_of(message: Message, shape: Shape, most: int) -> tuple[Codec, str]:
    """The codec of a coded message and the dtype of its elements; nothing is allocated before its size is checked."""
    who, note, data = node_name(message.source), message.note, message.payload
    dtype, text, step = str(note.get("dtype")), str(note.get("codec")), note.get("at", 0)
    if dtype not in FLOATS:
        raise ProtocolError(f"{who} announced an encoded array of {dtype[:40]!r}; allowed: {', '.join(FLOATS)}")
    nbytes = math.prod(axis or 1 for axis in shape) * numpy_dtype(dtype).itemsize
    if nbytes > most:  # an axis of none frees no codec from the others
        raise ProtocolError(f"{who} announced an array of {nbytes} bytes; at most {most} are allowed")
    if data.dtype != np.uint8:
        raise ProtocolError(f"{who} sent {data.dtype} where an encoding was announced; encodings are uint8")
    if not isinstance(step, int) or not 0 <= step < 1 << 53:
        raise ProtocolError(f"{who} announced the step {step!r}; steps are counted from 0")
    try:
        return fitted(_parsed(text), PLAIN, (shape,), step), dtype
    except FlockstepError as error:
        raise ProtocolError(f"{who} announced a codec that cannot be used here: {error}") from None


@lru_cache(maxsize=256)
def _parsed(text: str) -> Codec:
    if len(text) > LONGEST_TEXT:
        raise ConfigurationError(f"a codec is written in at most {LONGEST_TEXT} characters, got {len(text)}")
    return Codec.parse(text)


def _shape_text(shape: Shape) -> str:
    return "x".join(map(str, shape))
