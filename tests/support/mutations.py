"""Files with damage that a seed draws: bytes that changed, and documents that say something else than was written."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

NUMBERS = [0, -1, 1, 2**31, 2**62, 2**63 - 1, -(2**63), 0.5, -0.0, 1e308, -1e308, 1e-320]
WORDS = [
    "",
    "x",
    "tensor",
    "device",
    "random",
    "data",
    "again",
    "step",
    "../../x",
    "\0",
    "inf",
    "nan",
    "float64",
    "object",
    "builtins",
    "9" * 400,
    "é" * 40,
]
DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP]
OTHERS: list[Any] = [None, True, False, [], {}, [0], {"": 0}, DEEP, [2**62, 2**62], [[]] * 40]
BYTES = [
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b"[" * 3000,
    b"\x91" * 3000,
    b"]",
    b'"',
    b"\n",
    b",",
    b"9" * 5000,
    b"1e999",
    b"null",
    b"NaN",
    b"-",
    b"\xed\xa0\x80",
]


def damaged(data: bytes, draw: random.Random) -> bytes:
    """`data` with one to three changes: bytes that were flipped, cut, repeated, swapped or put in."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data) + 1)
        to = min(len(data), at + draw.choice([1, 1, 2, 8, 64, 1000]))
        other = draw.randrange(len(data) + 1)
        data = draw.choice(
            [
                data[:at] + draw.randbytes(to - at) + data[to:],
                data[:at] + bytes(byte ^ 1 << draw.randrange(8) for byte in data[at:to]) + data[to:],
                data[:at] + data[to:],
                data[:at],
                data[:to] + data[at:to] + data[to:],
                data[:at] + data[other : other + to - at] + data[to:],
                data[:at] + draw.choice(BYTES) + data[to:],
                data[:at] + draw.choice(BYTES) + data[at:],
                data[:at] + draw.choice([2**62, 2**63 - 1, 2**64 - 1, 0, 2**32]).to_bytes(8, "little") + data[at + 8 :],
            ]
        )
    return data


def changed(document: Any, draw: random.Random) -> Any:
    """A copy of a document, as of JSON, with one or two values replaced, left out, repeated or renamed."""
    document = copy.deepcopy(document)
    for _ in range(draw.randint(1, 2)):
        places = list(_places(document))
        if not places:
            return draw.choice(OTHERS)
        inside, key = draw.choice(places)
        match draw.randrange(6):
            case 0:
                del inside[key]
            case 1:
                if isinstance(inside, list):
                    inside.insert(key, copy.deepcopy(inside[key]))
                else:
                    inside[draw.choice(WORDS)] = inside.pop(key)
            case 2:
                inside[key] = copy.deepcopy(draw.choice(OTHERS))
            case 3:
                other = draw.choice(places)
                inside[key] = copy.deepcopy(other[0][other[1]])
            case _:
                inside[key] = draw.choice(NUMBERS if draw.random() < 0.7 else WORDS)
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value in a document: what contains the value, and its key or index there."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield value, key
        yield from _places(one)
