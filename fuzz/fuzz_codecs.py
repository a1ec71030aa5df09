"""Fuzzing of every decoder with atheris: any bytes give a typed error or a valid array.

    python fuzz/fuzz_codecs.py -max_total_time=150

The first bytes choose the codec, the size and the dtype; the rest is decoded.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["flockstep"]):
    from flockstep import registry
    from flockstep.arrays.kernels import FLOATS
    from flockstep.codecs.base import Codec
    from flockstep_lab.damage import check_any_bytes

CODECS = [Codec.parse(name) for name in registry.names("codec")]
SHAPES = ((7,), (8, 5), ())
LARGEST = 2048


def one(data: bytes) -> None:
    """Decode one fuzzed input with a codec."""
    choose = atheris.FuzzedDataProvider(data)
    codec = CODECS[choose.ConsumeIntInRange(0, len(CODECS) - 1)]
    dtype = FLOATS[choose.ConsumeIntInRange(0, len(FLOATS) - 1)]
    size = choose.ConsumeIntInRange(0, LARGEST)
    if choose.ConsumeBool():
        codec, size = codec.on(SHAPES).at(size), 48
    length = codec.wire_bytes(size, dtype) if choose.ConsumeBool() else choose.remaining_bytes()
    rest = choose.ConsumeBytes(length)
    check_any_bytes(codec, rest + bytes(min(length, 1 << 16) - len(rest)), size, dtype, measured=False)


if __name__ == "__main__":
    atheris.Setup([*sys.argv, "-max_len=4096", "-rss_limit_mb=4096", "-timeout=60"], one)
    atheris.Fuzz()
