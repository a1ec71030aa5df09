"""Checks that decoding arbitrary bytes gives a typed error or a valid array, within bounded memory."""

from __future__ import annotations

import tracemalloc

import numpy as np

from flockstep.arrays.kernels import numpy_dtype
from flockstep.codecs.base import Codec
from flockstep.errors import ProtocolError

FACTOR = 12
"""Largest memory that decoding may use, including intermediate results, as a multiple of the bytes of the decoded array
plus the received bytes.
"""
SLACK = 1 << 18
"""Number of bytes that decoding may use in addition, for overhead of Python and numpy."""


def check_any_bytes(codec: Codec, data: bytes, size: int, dtype: str, measured: bool = True) -> bool:
    """Decode `data` as `size` elements with every decoding method of the codec; return whether `data` was accepted.

    Raises:
        AssertionError: the result was neither a `ProtocolError` nor an array of `size` elements, or decoding used more
            memory than `FACTOR` times the announced bytes plus the received bytes.
    """
    received = np.frombuffer(data, np.uint8)
    what = f"{codec} on {len(data)} bytes for {size} {dtype}"
    if not measured:
        return _decode(codec, received, size, dtype, what)
    limit = FACTOR * (size * numpy_dtype(dtype).itemsize + len(data)) + SLACK
    for _ in range(2):  # the first call of a process may load compiled code
        tracemalloc.start()
        try:
            taken = _decode(codec, received, size, dtype, what)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if peak <= limit:
            return taken
    raise AssertionError(f"{what}: decoding takes {peak} bytes of memory, which is more than {limit}")


def _decode(
    codec: Codec, received: np.ndarray[tuple[int], np.dtype[np.uint8]], size: int, dtype: str, what: str
) -> bool:
    taken = []
    out = np.zeros(size, numpy_dtype(dtype))
    with np.errstate(all="ignore"):  # arbitrary bytes may decode to any number
        for way in ("decode", "add_decoded", *(["stream"] if codec.sparse else [])):
            try:
                if way == "decode":
                    decoded = codec.decode(received, size, dtype)
                    assert decoded.shape == (size,), f"{what}: {way} gives shape {decoded.shape}"
                    assert decoded.dtype == out.dtype, f"{what}: {way} gives {decoded.dtype}"
                elif way == "add_decoded":
                    codec.add_decoded(received, out)
                else:
                    indices, values = codec.stream(received, size, dtype)
                    assert len(indices) == len(values), f"{what}: {len(indices)} indices, {len(values)} values"
                    inside = not len(indices) or (
                        int(indices.max()) < size and (np.diff(indices.astype(np.int64)) > 0).all()
                    )
                    assert inside, f"{what}: {way} returns element indices out of order or out of range"
                taken.append(True)
            except ProtocolError:
                taken.append(False)
    assert len(set(taken)) == 1, (
        f"{what}: decode, add_decoded and stream must all accept or all refuse the bytes, got {taken}"
    )
    return taken[0]
