"""Ports for servers that a test starts later."""

from __future__ import annotations

import contextlib
import random
import socket

PLACES = range(12_000, 28_000)
"""Ports that no system gives to connections and to servers that ask for any port."""


def free_port() -> int:
    """A port at which nobody listens, and that no other process of the tests gets by chance in the meantime."""
    while True:
        place = "127.0.0.1", random.SystemRandom().choice(PLACES)
        with contextlib.suppress(OSError), socket.create_server(place):
            return place[1]
