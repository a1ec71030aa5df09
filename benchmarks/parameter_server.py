"""Pushes and pulls per second of one flockstep server with 4 workers, beside raw ZeroMQ and raw sockets in the same
pattern.

A push is an array of float32 from a worker to the server, a pull the array that the server answers with. All ways use
five processes on Unix sockets. ZeroMQ: four DEALER sockets and one ROUTER, which adds what arrives to its array, and
sends that back; sockets: the same by one loop over an epoll; nothing is checked, encoded or recorded. flockstep:
`ps(asynchronous)` with plain SGD, from `train`, with a model whose gradient costs nothing to compute, and with its
record. The three take turns, round after round.

    python benchmarks/parameter_server.py [--sizes 64KiB,1MiB,16MiB] [--rounds 5] [--mib 512] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import select
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from flockstep.arrays.schema import FlatArray
from flockstep.launchers.train import train
from flockstep.records.config import RunConfig
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder

WORKERS = 4
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}
JOB = '''
import numpy as np

from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model


class Idle(Model):
    """{elements} parameters, and a gradient that is whatever was there."""

    @property
    def shapes(self):
        return {{"w": ({elements},)}}

    def initial(self, random):
        return {{"w": np.zeros({elements})}}

    def gradients(self, params, x, y, out):
        return np.zeros(len(x))

    def outputs(self, params, x):
        return x

    def loss(self, params, outputs, y):
        return 0.0


def job():
    samples = np.zeros((8, 1))
    data = lambda: Data(samples, np.zeros(8), samples, np.zeros(8))
    return Job(Idle, data, "sgd(lr=0.001)", metric=lambda outputs, targets: 0.0, batch=1)
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="64KiB,1MiB,16MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="MiB that a round pushes, at most 1000 pushes a worker")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [measure(size, options.rounds, options.mib << 20) for size in options.sizes.split(",")]
    if options.json:
        print(json.dumps(results))
        return
    print("{:>7} {:>10} {:>12} {:>10} {:>12}".format("size", "way", "/s", "GB/s", "of ZeroMQ's"))
    for row in results:
        for name, way in row["ways"].items():
            print(f"{row['size']:>7} {name:>10} {way['rate']:>12.0f} {way['gb']:>10.2f} {way['ratio']:>12.2f}")
    print("/s: pushes, each answered by a pull; GB/s: both ways; medians over rounds; ratio: median of the rounds' own")


def measure(size: str, rounds: int, nbytes: int) -> dict[str, Any]:
    """All ways at one size, in turn; the first round warms up."""
    elements = int(size[:-3]) * UNITS[size[-3:]] // 4
    steps = max(24, min(1000, nbytes // (4 * elements * WORKERS)))
    ways = {
        "zeromq": partial(raw, zmq_server, zmq_worker),
        "sockets": partial(raw, epoll_server, socket_worker),
        "flockstep": ours,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in sorted(ways, reverse=number % 2 == 0):
            with tempfile.TemporaryDirectory() as folder:
                rate = ways[name](Path(folder), elements, steps)
            if number:
                rates[name].append(rate)
    figures = {}
    for name, values in rates.items():
        ratios, rate = [a / b for a, b in zip(values, rates["zeromq"], strict=True)], statistics.median(values)
        figures[name] = {"rate": rate, "gb": rate * 8 * elements / 1e9, "ratio": statistics.median(ratios)}
    return {"size": size, "steps": steps, "ways": figures}


def ours(folder: Path, elements: int, steps: int) -> float:
    """Pushes per second of a flockstep run, from its record: all steps over the time at which the last was complete."""
    job = folder / "idle.py"
    job.write_text(JOB.format(elements=elements))
    config = RunConfig(
        kind="train", job=str(job), strategy="ps(asynchronous)", workers=WORKERS, steps=steps, evaluate_every=steps
    )
    train(config, folder / "run")
    return (
        steps * WORKERS / max(e.seconds for e in RunFolder(folder / "run").merge_events() if isinstance(e, StepEvent))
    )


def raw(server: Callable[..., None], worker: Callable[..., None], folder: Path, elements: int, steps: int) -> float:
    """Pushes per second without flockstep: all over the time of the slowest worker."""
    context = multiprocessing.get_context("spawn")
    listens, barrier, queue = context.Event(), context.Barrier(WORKERS), context.Queue()
    address = str(folder / "server")
    serve = context.Process(target=server, args=(address, elements, steps, listens))
    serve.start()
    listens.wait()
    workers = [
        context.Process(target=worker, args=(address, rank, elements, steps, (barrier, queue)))
        for rank in range(WORKERS)
    ]
    for process in workers:
        process.start()
    seconds = [queue.get() for _ in range(WORKERS)]
    for process in (serve, *workers):
        process.join()
    return steps * WORKERS / max(seconds)


def zmq_server(address: str, elements: int, steps: int, listens: Event) -> None:
    """Add what arrives, answer with the sum; every worker greets first, which is not timed."""
    total = np.zeros(elements, np.float32)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{address}")
        listens.set()
        for _ in range(WORKERS * (steps + 1)):
            sender, payload = router.recv_multipart(copy=False)
            total += np.frombuffer(payload.buffer, np.float32)
            router.send_multipart([sender, total])


def zmq_worker(address: str, rank: int, elements: int, steps: int, timing: tuple[Barrier, Any]) -> None:
    """Push and pull over a ZeroMQ socket."""
    gradient = np.zeros(elements, np.float32)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.ROUTING_ID, b"n%d" % rank)
        dealer.connect(f"ipc://{address}")

        def step() -> None:
            dealer.send(gradient)
            np.frombuffer(dealer.recv(copy=False).buffer, np.float32)

        timed(step, steps, *timing)


def epoll_server(address: str, elements: int, steps: int, listens: Event) -> None:
    """As `zmq_server`, by one loop over an epoll: a socket whose room for one array is full is answered at once."""
    total = np.zeros(elements, np.float32)
    rooms: dict[int, tuple[socket.socket, FlatArray]] = {}
    filled = dict[int, int]()
    with select.epoll() as epoll, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(WORKERS)
        listens.set()
        while len(rooms) < WORKERS:
            link, _ = listener.accept()
            rooms[link.fileno()], filled[link.fileno()] = (link, np.empty(elements, np.float32)), 0
            epoll.register(link, select.EPOLLIN)
        left = WORKERS * (steps + 1)
        while left:
            for descriptor, _ in epoll.poll():
                link, room = rooms[descriptor]
                filled[descriptor] += link.recv_into(room.data.cast("B")[filled[descriptor] :])
                if filled[descriptor] == room.nbytes:
                    filled[descriptor], left = 0, left - 1
                    total += room
                    link.sendall(total.data)  # a worker that has pushed only reads, so this ends


def socket_worker(address: str, rank: int, elements: int, steps: int, timing: tuple[Barrier, Any]) -> None:
    """Push and pull over a socket."""
    gradient, model = np.zeros(elements, np.float32), np.empty(elements, np.float32)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)

        def step() -> None:
            link.sendall(gradient.data)
            got = 0
            while got < model.nbytes:
                got += link.recv_into(model.data.cast("B")[got:])

        timed(step, steps, *timing)


def timed(step: Callable[[], None], steps: int, barrier: Barrier, queue: Any) -> None:
    """Put the seconds of all steps but the first, which all workers take before, on the queue."""
    step()
    barrier.wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    queue.put(time.perf_counter() - start)


if __name__ == "__main__":
    main()
