"""A proxy for TCP connections that injects faults into the forwarded bytes, for tests of transports."""

from __future__ import annotations

import contextlib
import math
import random
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from threading import Event, Thread

FAULTS = ("cut", "close", "half_open", "late", "delay", "outage", "corrupt", "drop", "repeat", "reorder")
"""Faults of a link: `cut` resets both connections, `close` ends both in the regular way, `half_open` forwards nothing
more on a connection that stays open, `late` closes the sender's end at once and delivers the last bytes after the next
connection was opened, `delay` holds bytes back for a while, during an `outage` nothing is forwarded on any connection;
the other faults change bytes, as could happen on a link without the checksums of TCP.
"""
READ = 1 << 16
"""Largest number of bytes that are forwarded at a time."""
DELAY = 0.2
"""Seconds for which bytes are held back."""
POLL = 0.02
"""Seconds between two checks of whether the proxy has been closed."""


class FaultProxy:
    """Forwards the connections to one TCP address, with faults at random places of the streams of bytes.

    Every kind of fault is injected once before any is repeated. The places are the same for the same seed and the same
    sizes of reads. `fired` counts the injected faults, each of which affected bytes in transit.
    """

    def __init__(
        self,
        target: tuple[str, int],
        faults: tuple[str, ...],
        seed: int,
        every: int,
        most: int = 10,
        fire: Callable[[str], None] = lambda fault: None,
        outage: float = 2.0,
    ):
        """Listen on a free port of the loopback address.

        Args:
            target: host and port to which connections are forwarded.
            faults: names from `FAULTS`.
            seed: seed of the places and kinds of faults.
            every: mean number of forwarded bytes between two faults.
            most: largest number of faults.
            fire: receives the name of each injected fault.
            outage: seconds of an outage.
        """
        self.fired: Counter[str] = Counter()
        self._target, self._every, self._most, self._fire = target, every, most, fire
        self._random = random.Random(seed)  # noqa: S311 - places of faults, no secrets
        self._order = self._random.sample(faults, len(faults))
        self._outage = outage
        self._opened = 0
        """Number of connections that were forwarded."""
        self._left = self._drawn()
        self._over, self.down = Event(), Event()
        """`down`: while set, no connection is forwarded, and no bytes."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(POLL)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._threads = [Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """End all connections through the proxy."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _drawn(self) -> float:
        """Number of bytes until the next fault."""
        return self._random.expovariate(1 / self._every)

    def _accept(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                near, _ = self._listener.accept()
                thread = Thread(target=self._carry, args=(near,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, near: socket.socket) -> None:
        """Forward one connection until it ends."""
        with near, socket.socket() as far:
            self._wait(lambda: not self.down.is_set())
            with contextlib.suppress(OSError):
                far.connect(self._target)
                self._opened += 1
                for one in (near, far):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while not self._over.is_set() and self._pass_on(near, far):
                    pass

    def _pass_on(self, near: socket.socket, far: socket.socket) -> bool:
        """Forward what has arrived; return False at the end of the connection."""
        readable, _, _ = select.select([near, far], [], [], POLL)
        for source in () if self.down.is_set() else readable:
            data = source.recv(READ)
            if not data:
                return False
            if not self._forward(data, source, far if source is near else near):
                return False
        return True

    def _forward(self, data: bytes, source: socket.socket, to: socket.socket) -> bool:
        """Forward bytes, with a fault if one is due; return False if it ended the connection."""
        self._left -= len(data)
        if self._left > 0 or self.fired.total() >= self._most:
            to.sendall(data)
            return True
        self._left = self._drawn()
        fault = self._order[self.fired.total() % len(self._order)]
        self.fired[fault] += 1
        self._fire(fault)
        at = self._random.randrange(len(data))
        if fault in ("cut", "close", "half_open", "late"):
            self._end(fault, data, at, source, to)
            return False
        if fault == "outage":
            self.down.set()
            self._wait(lambda: False, self._outage)
            self.down.clear()
        if fault == "delay":
            time.sleep(DELAY)
        changed = {
            "delay": data,
            "outage": data,
            "corrupt": data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :],
            "drop": data[:at],
            "repeat": data[:at] + data,
            "reorder": data[at:] + data[:at],
        }
        to.sendall(changed[fault])
        return True

    def _end(self, fault: str, data: bytes, at: int, source: socket.socket, to: socket.socket) -> None:
        """Forward the first `at` bytes, and end the connection."""
        to.sendall(data[:at])
        if fault == "half_open":
            self._wait(lambda: not (_is_open(source) and _is_open(to)))
        elif fault == "late":
            opened = self._opened
            source.close()
            self._wait(lambda: self._opened > opened)
            to.sendall(data[at:])
        elif fault == "cut":
            for one in (source, to):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _wait(self, condition: Callable[[], bool], seconds: float = math.inf) -> None:
        """Wait until the condition holds, at most that time, or until the proxy is closed."""
        until = time.monotonic() + seconds
        while not (self._over.is_set() or condition() or time.monotonic() > until):
            time.sleep(POLL)


def _is_open(sock: socket.socket) -> bool:
    """Whether the other end has not closed the connection; what it has sent is dropped."""
    readable, _, _ = select.select([sock], [], [], 0)
    return not readable or bool(sock.recv(READ))
