"""Pushes and pulls per second of one flockstep server with 4 workers, beside raw ZeroMQ in the same pattern.

A push is an array of float32 from a worker to the server, a pull the array that the server answers with. Both ways use
five processes on Unix sockets. Raw: four DEALER sockets and one ROUTER, which adds what arrives to its array and sends
that back; nothing is checked, encoded or recorded. flockstep: `ps(asynchronous)` with plain SGD, from `train`, with a
model whose gradient costs nothing to compute, and with its record. The two take turns, round after round.

    python benchmarks/parameter_server.py [--sizes 64KiB,1MiB,16MiB] [--rounds 5] [--mib 512] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import zmq

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
    headings = ("size", "raw /s", "flockstep /s", "raw GB/s", "flockstep GB/s", "flockstep/raw")
    print("{:>7} {:>10} {:>13} {:>10} {:>15} {:>14}".format(*headings))
    for row in results:
        print(
            f"{row['size']:>7} {row['raw']:>10.0f} {row['flockstep']:>13.0f} {row['raw_gb']:>10.2f} "
            f"{row['flockstep_gb']:>15.2f} {row['ratio']:>14.2f}"
        )
    print("/s: pushes, each answered by a pull; GB/s: both ways; medians over rounds; ratio: median of the rounds' own")


def measure(size: str, rounds: int, nbytes: int) -> dict[str, Any]:
    """Both ways at one size, in turn; the first round warms up."""
    elements = int(size[:-3]) * UNITS[size[-3:]] // 4
    steps = max(24, min(1000, nbytes // (4 * elements * WORKERS)))
    rates: dict[str, list[float]] = {"raw": [], "flockstep": []}
    for number in range(rounds + 1):
        for name in sorted(rates, reverse=number % 2 == 0):
            with tempfile.TemporaryDirectory() as folder:
                rate = (raw if name == "raw" else ours)(Path(folder), elements, steps)
            if number:
                rates[name].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    gigabytes = {f"{name}_gb": rate * 2 * 4 * elements / 1e9 for name, rate in medians.items()}
    ratios = [mine / theirs for mine, theirs in zip(rates["flockstep"], rates["raw"], strict=True)]
    return {"size": size, "steps": steps, **medians, **gigabytes, "ratio": statistics.median(ratios)}


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


def raw(folder: Path, elements: int, steps: int) -> float:
    """Pushes per second without flockstep: all over the time of the slowest worker."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(WORKERS), context.Queue()
    address = f"ipc://{folder / 'server'}"
    serve = context.Process(target=raw_server, args=(address, elements, steps))
    arguments = [(address, rank, elements, steps, barrier, queue) for rank in range(WORKERS)]
    processes = [serve, *(context.Process(target=raw_worker, args=args) for args in arguments)]
    for process in processes:
        process.start()
    seconds = [queue.get() for _ in range(WORKERS)]
    for process in processes:
        process.join()
    return steps * WORKERS / max(seconds)


def raw_server(address: str, elements: int, steps: int) -> None:
    """Add what arrives, answer with the sum; every worker greets first, which is not timed."""
    total = np.zeros(elements, np.float32)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        for _ in range(WORKERS * (steps + 1)):
            sender, payload = socket.recv_multipart(copy=False)
            total += np.frombuffer(payload.buffer, np.float32)
            socket.send_multipart([sender, total])


def raw_worker(address: str, rank: int, elements: int, steps: int, barrier: Barrier, queue: Any) -> None:
    """Push and pull over a raw socket, without flockstep."""
    gradient = np.zeros(elements, np.float32)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, b"n%d" % rank)
        socket.connect(address)
        for step in range(steps + 1):
            if step == 1:
                barrier.wait()
                start = time.perf_counter()
            socket.send(gradient)
            np.frombuffer(socket.recv(copy=False).buffer, np.float32)
        queue.put(time.perf_counter() - start)


if __name__ == "__main__":
    main()
