"""Benchmark of sending an array to another process on this host, which adds it to its own array: over flockstep's
transports and over raw sockets, compared with a memory copy.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.links.kinds import Transport
from flockstep.links.shared_group import SharedGroup
from flockstep.links.shared_memory import SharedMemory
from flockstep.report.progress import ProgressCallback, silent
from flockstep_lab.bench.bare_node import BareNode
from flockstep_lab.bench.implementation import BenchProcess, BenchWorker, Implementation, seconds_of
from flockstep_lab.bench.interleaved import Measurement, measure_interleaved

SIZES = (16 << 20,)
ROUNDS = 20
COPY = "memory copy"
DONE = b"d"


class _Pushing(BenchWorker):
    """Process 0 pushes arrays; process 1 adds them and replies when it has added all."""

    def __init__(self, place: BenchProcess):
        self._rank = place.rank
        self._array = np.random.default_rng(place.rank).random(place.largest // 4, np.float32)

    def run(self, size: int, calls: int) -> float:
        """Seconds of one push, measured by process 0; process 1 returns 0."""
        array = self._array[:size]
        if self._rank == 0:
            self._pushed(array, 1)
            return seconds_of(lambda: self._pushed(array, calls), 1) / calls
        self._added(array, 1)
        self._added(array, calls)
        array %= 1
        return 0.0

    def _pushed(self, array: FlatArray, calls: int) -> None:
        raise NotImplementedError

    def _added(self, array: FlatArray, calls: int) -> None:
        raise NotImplementedError


class _ByTransport(_Pushing):
    """Sends the array over a transport of the registry, through the messages and the mailbox of a node."""

    def __init__(self, name: str, place: BenchProcess):
        super().__init__(place)
        self._node = BareNode(Transport.parse(name), name, place)
        self.address = self._node.bus.address

    def connect(self, addresses: Sequence[str]) -> None:
        self._node.connect(addresses)

    def _pushed(self, array: FlatArray, calls: int) -> None:
        async def program() -> None:
            for _ in range(calls):
                self._node.peer.send(1, "push", array)
            await self._node.peer.receive("added", 1)

        self._node.run(program())

    def _added(self, array: FlatArray, calls: int) -> None:
        async def program() -> None:
            for _ in range(calls):
                array.__iadd__((await self._node.peer.receive("push", 0)).payload)
            self._node.peer.send(0, "added")

        self._node.run(program())

    def close(self) -> None:
        self._node.close()


class _InWindow(_Pushing):
    """Adds the array directly to the receiver's memory, with the method `accumulate` of a shared array's window."""

    def __init__(self, place: BenchProcess):
        super().__init__(place)
        self._group = SharedGroup(SharedMemory.attach(place.segment), place.rank, 2, place.largest + 4096)
        self._array = self._group.allocate(place.largest // 4, "float32")
        self._array += 0.5

    def _pushed(self, array: FlatArray, calls: int) -> None:
        part = self._group.at(1, self._array)[: len(array)]
        for _ in range(calls):
            with self._group.alone_on(1):
                np.add(part, array, out=part)

    def _added(self, array: FlatArray, calls: int) -> None:
        """Do nothing: the sender adds directly to the receiver's memory."""


class _BySocket(_Pushing):
    """Sends the array over a raw socket; the receiver adds it once it has arrived completely."""

    def __init__(self, family: socket.AddressFamily, place: BenchProcess):
        super().__init__(place)
        self._socket = socket.socket(family)
        self._room = np.empty(place.largest // 4, np.float32)
        self._unix = family == socket.AF_UNIX
        if place.rank == 1:
            self._socket.bind(str(place.folder / "raw") if self._unix else ("127.0.0.1", 0))
            self._socket.listen(1)
            address = self._socket.getsockname()
            self.address = address if self._unix else str(address[1])

    def connect(self, addresses: Sequence[str]) -> None:
        if self._rank == 0:
            self._socket.connect(addresses[1] if self._unix else ("127.0.0.1", int(addresses[1])))
        else:
            listening, self._socket = self._socket, self._socket.accept()[0]
            listening.close()
        if not self._unix:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _pushed(self, array: FlatArray, calls: int) -> None:
        for _ in range(calls):
            self._socket.sendall(array.data.cast("B"))
        self._socket.recv(1)

    def _added(self, array: FlatArray, calls: int) -> None:
        room = self._room[: len(array)].data.cast("B")
        for _ in range(calls):
            got = 0
            while got < len(room):
                got += self._socket.recv_into(room[got:])
            array += self._room[: len(array)]
        self._socket.sendall(DONE)

    def close(self) -> None:
        self._socket.close()


class _Copying(BenchWorker):
    """Copies the array with `numpy.copyto` within one process, as the reference for all transports."""

    def __init__(self, place: BenchProcess):
        self._rank = place.rank
        self._from, self._to = np.ones(place.largest // 4, np.float32), np.zeros(place.largest // 4, np.float32)

    def run(self, size: int, calls: int) -> float:
        if self._rank:
            return 0.0
        np.copyto(self._to[:size], self._from[:size])
        return seconds_of(lambda: np.copyto(self._to[:size], self._from[:size]), calls)


IMPLEMENTATIONS = (
    Implementation("shared window", _InWindow, needs_linux=True),
    *(
        Implementation(name, partial(_ByTransport, name), needs_linux=name == "shared_memory")
        for name in ("shared_memory", "ipc", "tcp")
    ),
    Implementation("raw unix socket", partial(_BySocket, socket.AF_UNIX)),
    Implementation("raw tcp socket", partial(_BySocket, socket.AF_INET)),
    Implementation(COPY, _Copying),
)
"""All implementations that the benchmark can measure."""


def measure(sizes: Sequence[int] = SIZES, rounds: int = ROUNDS, say: ProgressCallback = silent) -> list[Measurement]:
    """Measure one push of an array with each implementation, for each size in bytes."""
    return measure_interleaved("flockstep_lab.bench.transport", IMPLEMENTATIONS, 2, sizes, rounds, say)
