"""Several movers in one process, joined by sockets as in a run: each rank is a thread of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import zmq

from flockstep.drivers.mover import Mover
from flockstep.messages import Message
from flockstep.transports.wire import Identity
from flockstep.transports.zeromq import LAUNCHER, Endpoint, Tcp, routing_id

T = TypeVar("T")
PATIENCE = 30.0


class Sockets:
    """What a mover needs of its membership."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], rank: int, most: int):
        self.endpoint = Endpoint(context, Identity("run", rank, "schema", most), Tcp().listen(Path(), ""), 5.0)

    def receive(self, seconds: float) -> Message | None:
        return self.endpoint.receive(seconds)

    def close(self, linger: float) -> None:
        self.endpoint.close(min(linger, 0.2))  # the lost ones never read what is still for them


class Group:
    """The movers of all ranks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], workers: int, most: int):
        self.context = context
        self.sockets = [Sockets(context, rank, most) for rank in range(workers)]
        where = {rank: one.endpoint.address for rank, one in enumerate(self.sockets)}
        for rank, one in enumerate(self.sockets):
            one.endpoint.expect({peer: at for peer, at in where.items() if peer != rank})
        for rank, one in enumerate(self.sockets):
            for lower in range(rank):
                one.endpoint.send(lower, Message(rank, "hello"))
                assert self.sockets[lower].receive(PATIENCE)
                self.sockets[lower].endpoint.send(rank, Message(lower, "hello"))
                assert one.receive(PATIENCE)
        self.movers = [Mover(rank, workers, one, None, None, most) for rank, one in enumerate(self.sockets)]
        self._pool = ThreadPoolExecutor(4 * workers)

    def start(self, program: Callable[[Mover], T], *ranks: int) -> list[Any]:
        """Run a program on some ranks (none: on all); the futures."""
        chosen = ranks or range(len(self.movers))
        return [self._pool.submit(program, self.movers[rank]) for rank in chosen]

    def run(self, program: Callable[[Mover], T], *ranks: int) -> list[T]:
        """What it returns, rank by rank."""
        return [future.result(PATIENCE) for future in self.start(program, *ranks)]

    def say(self, to: int, tag: str, **note: Any) -> None:
        """What a supervisor would say to a mover."""
        from flockstep.transports.wire import encode

        link = self.context.socket(zmq.DEALER)
        link.setsockopt(zmq.ROUTING_ID, routing_id(LAUNCHER))
        link.connect(self.sockets[to].endpoint.address)
        header = encode(Message(LAUNCHER, tag, note=note), to, Identity("run", LAUNCHER, "schema", 1 << 20))
        link.send_multipart([header])
        link.close(2000)

    def lose(self, rank: int, reason: str) -> None:
        """All others hear that a rank is dead."""
        for other in range(len(self.movers)):
            if other != rank:
                self.say(other, "lost", address=rank, reason=reason)

    def close(self) -> None:
        """Close what is left."""
        for future in self.start(lambda mover: mover.close(0.1)):
            future.exception(PATIENCE)
        self._pool.shutdown()


@contextmanager
def movers(workers: int, most: int = 1 << 24) -> Iterator[Group]:
    """Movers of ranks 0..workers-1."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    group = Group(context, workers, most)
    try:
        yield group
    finally:
        group.close()
        context.destroy(linger=0)
