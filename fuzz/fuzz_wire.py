"""Fuzzing of the wire format with atheris: any header and payload give a typed error or a valid message.

python fuzz/fuzz_wire.py -max_total_time=150
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["flockstep"]):
    import numpy as np

    from flockstep.errors import ProtocolError
    from flockstep.links import wire
    from flockstep.messages import Message


def identity(address: int) -> wire.SenderIdentity:
    """A node of a run whose model has 10 float32."""
    return wire.SenderIdentity("run", address, "0123456789abcdef", 40)


GOOD = wire.encode(Message(1, "push", np.arange(10, dtype=np.float32), {"lr": 0.1}, number=1), identity(1))


def one(data: bytes) -> None:
    """Read one message: bytes from nowhere, or a sound header with some bytes changed."""
    choose = atheris.FuzzedDataProvider(data)
    payload = None if choose.ConsumeBool() else choose.ConsumeBytes(choose.ConsumeIntInRange(0, 64))
    header = bytearray(GOOD)
    if choose.ConsumeBool():
        header = bytearray(choose.ConsumeBytes(choose.remaining_bytes()))
    while header and choose.remaining_bytes():
        header[choose.ConsumeIntInRange(0, len(header) - 1)] = choose.ConsumeIntInRange(0, 255)
    try:
        message = wire.decode(bytes(header), None if payload is None else memoryview(payload), 1, identity(2))
    except ProtocolError:
        return
    if message.array is not None and message.array.nbytes != len(payload or b""):
        raise AssertionError(f"{message.array.nbytes} bytes came out of {len(payload or b'')}")


if __name__ == "__main__":
    atheris.Setup([*sys.argv, "-max_len=512", "-rss_limit_mb=2048", "-timeout=20"], one)
    atheris.Fuzz()
