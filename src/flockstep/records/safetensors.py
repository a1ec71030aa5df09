"""Files of arrays in the format safetensors: the size of a JSON header, the header, then the arrays' bytes.

The format is described at https://huggingface.co/docs/safetensors. Arrays are written without being copied in memory,
and a hash of the whole file is returned. A file is checked completely before any of its arrays is returned.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from flockstep.arrays.kernels import name_of, numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_KINDS = {theirs: ours for ours, theirs in _NAMES.items()}
_LARGEST_HEADER = 100_000_000
"""Limit of the header's size in bytes that the format sets."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_arrays(file: IO[bytes], arrays: Mapping[str, FlatArray]) -> tuple[int, str]:
    """Write contiguous arrays to an open file; return the number of bytes and their SHA-256 in hexadecimal digits.

    Raises:
        ConfigurationError: the format has no name for the dtype of an array.
    """
    entries, end = dict[str, _Entry](), 0
    for name, array in arrays.items():
        if name_of(array) not in _NAMES:
            raise ConfigurationError(f"{name} has the dtype {name_of(array)}, which a checkpoint cannot hold")
        entries[name] = _Entry(_NAMES[name_of(array)], array.shape, (end, end + array.nbytes))
        end += array.nbytes
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    digest = hashlib.sha256(head)
    file.write(head)
    for array in arrays.values():
        if array.nbytes:
            data = array.reshape(-1).view(np.uint8).data
            digest.update(data)
            file.write(data)
    return len(head) + end, digest.hexdigest()


def read_arrays(path: Path, digest: str) -> dict[str, FlatArray]:
    """Read the arrays of a file, whose SHA-256 must be `digest`.

    Raises:
        ConfigurationError: the file is missing or damaged.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}; resume from another checkpoint") from None
    if hashlib.sha256(data.data).hexdigest() != digest:
        raise ConfigurationError(
            f"{path} is damaged: its bytes differ from those written; resume from another checkpoint"
        )
    try:
        return arrays_in(data)
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ConfigurationError(f"{path} is not a file of arrays: {error}; resume from another checkpoint") from None


def arrays_in(data: FlatArray) -> dict[str, FlatArray]:
    """Return the arrays in `data`, the bytes of a file as uint8 (bytes,), as views of `data`.

    Raises:
        ValueError: `data` is not in the format safetensors.
    """
    size = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or size > min(len(data) - 8, _LARGEST_HEADER):
        raise ValueError(f"the header has {size} bytes according to the file, which has {len(data)} bytes")
    header = msgspec.json.decode(data[8 : 8 + size].tobytes(), type=dict[str, msgspec.Raw])
    msgspec.json.decode(header.pop("__metadata__", b"{}"), type=dict[str, str])  # texts of whoever wrote the file
    entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in header.items()}
    body, arrays, end = data[8 + size :], dict[str, FlatArray](), 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if entry.dtype not in _KINDS or start != end or any(length < 0 for length in entry.shape):
            raise ValueError(f"{name} is described as {entry}")
        dtype = numpy_dtype(_KINDS[entry.dtype])
        if stop - start != math.prod(entry.shape) * dtype.itemsize or stop > len(body):
            raise ValueError(f"{name} has {stop - start} bytes")
        arrays[name] = np.frombuffer(body[start:stop].tobytes(), dtype).reshape(entry.shape)
        end = stop
    if end != len(body):
        raise ValueError(f"{len(body) - end} bytes of the file belong to no array")
    return arrays
