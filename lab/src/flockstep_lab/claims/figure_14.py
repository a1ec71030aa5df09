"""The exchanges of figure 14 of Langer et al. (2020) as programs, timed in virtual time without latency.

Reducing and updating count as computing: reducing a whole model takes n units of computing time, and updating a model
`UPDATE` times as many. Both begin as soon as their inputs have arrived, as the formulas assume. If there is a server,
its rank is n.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.exchange import broadcast_on_tree, children, parent
from flockstep.collectives.group import Subgroup
from flockstep.collectives.layouts import Times
from flockstep.nodes import Worker
from flockstep_lab.claims.programs_alone import run_once, spend

SHARE = 8192
"""Number of float64 elements in 1/n of the model; large enough that message headers add only a thousandth to
the time.
"""
UPDATE = 5
"""Time of updating a model divided by the time of reducing a model: 10 GiB/s ÷ 2 GiB/s."""


def model(n: int) -> FlatArray:
    """Return an array of the size of the whole model, filled with ones."""
    return np.ones(n * SHARE)


def times(n: int) -> Times:
    """Return the seconds of transmitting, reducing and updating the model, as inputs of the formulas."""
    return Times.of(model(n).nbytes)


def simulated(name: str, n: int) -> float:
    """Return the virtual seconds of one exchange of the named layout among n workers."""
    program, servers = PATTERNS[name]
    network = "link(bandwidth=1.25e9, latency=0)"
    run = run_once(lambda me: program(me, n), n + servers, network, unit=times(n).reduce / n)
    return run.totals[n].seconds if name == "asynchronous, all" else run.seconds


async def naive_server(me: Worker, n: int) -> None:
    """Every worker sends its gradient to one server, which sends the model to every worker."""
    if me.rank < n:
        me.send(n, "gradient", model(n))
        await me.receive_array("model", n)
        return
    for rank in range(n):
        await me.receive_array("gradient", rank)
    await spend(me, (n - 1) * n + UPDATE * n)
    me.send_all(range(n), "model", model(n))


async def tree_server(me: Worker, n: int) -> None:
    """Gradients are reduced and models are sent along a binomial tree of workers; the root exchanges with the
    server.
    """
    if me.rank == n:
        await me.receive_array("gradient", 0)
        await spend(me, UPDATE * n)
        me.send(0, "model", model(n))
        return
    for child in children(me.rank, n):
        await me.receive_array("reduce", child)
        await spend(me, n)
    if me.rank:
        me.send(parent(me.rank, n), "reduce", model(n))
    else:
        me.send(n, "gradient", model(n))
        await me.receive_array("model", n)
    await broadcast_on_tree(Subgroup(me, range(n)), model(n), 0)


async def scatter_server(me: Worker, n: int) -> None:
    """Workers reduce-scatter their gradients on a ring, exchange their shares with the server, and all-gather the
    shares on the ring.
    """
    share = np.ones(SHARE)
    if me.rank == n:
        for rank in range(n):
            await me.receive_array("gradient", rank)
        await spend(me, UPDATE * n)
        me.send_all(range(n), "model", share)
        return
    await _around(me, n, units=1)
    me.send(n, "gradient", share)
    await me.receive_array("model", n)
    await _around(me, n, units=0)


async def asynchronous_worker(me: Worker, n: int) -> None:
    """A single worker pushes its gradient to the server and pulls the model."""
    if me.rank == 0:
        me.send(n, "gradient", model(n))
        await me.receive_array("model", n)
    elif me.rank == n:
        await me.receive_array("gradient", 0)
        await spend(me, UPDATE * n)
        me.send(0, "model", model(n))


async def asynchronous_all(me: Worker, n: int) -> None:
    """All workers push their gradients at once; each receives the model after its gradient has been applied.

    The exchange ends when the last update has been applied.
    """
    if me.rank < n:
        me.send(n, "gradient", model(n))
        await me.receive_array("model", n)
        return
    for _ in range(n):
        message = await me.receive("gradient")
        await spend(me, UPDATE * n)
        me.send(message.source, "model", model(n))


async def distributed_server(me: Worker, n: int) -> None:
    """Every worker is also the server of 1/n of the model."""
    share = np.ones(SHARE)
    for tag, units in (("gradient", n - 1 + UPDATE), ("model", 0)):
        for hop in range(1, n):
            me.send((me.rank + hop) % n, tag, share)
        for hop in range(1, n):
            await me.receive_array(tag, (me.rank - hop) % n)
        await spend(me, units)


async def doubling(me: Worker, n: int) -> None:
    """Recursive doubling: workers exchange whole models with partners at distances of powers of two."""
    distance = 1
    while distance < n:
        me.send(me.rank ^ distance, "double", model(n))
        await me.receive_array("double", me.rank ^ distance)
        await spend(me, n)
        distance *= 2
    await spend(me, UPDATE * n)


async def ring(me: Worker, n: int) -> None:
    """Ring all-reduce: reduce-scatter, then all-gather, along a ring of all workers."""
    await _around(me, n, units=1)
    await _around(me, n, units=0)
    await spend(me, UPDATE * n)


async def _around(me: Worker, n: int, units: int) -> None:
    """Send a share n-1 times around the ring, computing `units` units after each hop."""
    share = np.ones(SHARE)
    for _ in range(n - 1):
        me.send((me.rank + 1) % n, "hop", share)
        await me.receive_array("hop", (me.rank - 1) % n)
        await spend(me, units)


PATTERNS: dict[str, tuple[Callable[[Worker, int], Awaitable[None]], int]] = {
    "naive server": (naive_server, 1),
    "binomial tree": (tree_server, 1),
    "scatter-reduce, one server": (scatter_server, 1),
    "asynchronous, one worker": (asynchronous_worker, 1),
    "asynchronous, all": (asynchronous_all, 1),
    "distributed server": (distributed_server, 0),
    "recursive doubling": (doubling, 0),
    "ring": (ring, 0),
}
"""Name of a parameter layout in `layouts.LAYOUTS` → (program of every node, number of servers)."""
