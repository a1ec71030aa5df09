"""Nothing of an encrypted record reaches the program before the tag of the record is verified."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flockstep.links.sealed import RECORD
from flockstep.messages import Message, Wanted
from support.buses import buses, relaying, still_works


def test_a_changed_record_leaves_no_plaintext_in_the_array_of_the_program(tmp_path: Path) -> None:
    """The program waits for the message with a place for its array, which fills one record."""
    place = np.zeros(RECORD // 4, np.float32)
    passed = 0

    def changed(data: bytes) -> bytes:
        """The bytes of the message, of which the last one, in the tag of the array's record, is changed."""
        nonlocal passed
        passed += len(data)
        return data[:-1] + bytes([data[-1] ^ 1]) if passed > RECORD else data

    with buses(tmp_path) as make, relaying(make) as (first, second, relay):
        still_works(first, second)
        relay.change = changed
        second.send(0, Message(1, "push", np.ones(RECORD // 4, np.float32), number=2))
        while not first.broken(0):
            assert first.poll(0.01, wanted=Wanted("push", 1, place=place)) is None
            second.poll(0)
    assert not place.any()
