"""Lower bounds on the delay of one step's communication, by the placement of the parameters.

The eight formulas of Langer et al. (2020, figure 14). n is the number of workers; T, R and U are the seconds that
transmitting, reducing (adding one gradient to another) and updating a whole model take; latency is ignored. Work that
is shared among k nodes takes a k-th of the time. Transmitting, reducing and updating follow one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flockstep.collectives.costs import halvings


@dataclass(frozen=True)
class Times:
    """Seconds to transmit, to reduce and to update a whole model, as three fields."""

    transmit: float
    reduce: float
    update: float

    @classmethod
    def of(
        cls, nbytes: float, network: float = 1.25e9, reducing: float = 10 * 2**30, updating: float = 2 * 2**30
    ) -> Times:
        """Return the times for a model of `nbytes` bytes, given the bytes per second of transmitting, reducing and
        updating; by default 10 Gbit/s, 10 GiB/s and 2 GiB/s.
        """
        return cls(nbytes / network, nbytes / reducing, nbytes / updating)


def naive_server(n: int, t: Times) -> float:
    """One server receives n gradients and sends n models: 2nT + (n-1)R + U."""
    return 2 * n * t.transmit + (n - 1) * t.reduce + t.update


def tree_server(n: int, t: Times) -> float:
    """One server that reduces and broadcasts along a binomial tree over itself and the n workers: 2⌈log2(n+1)⌉T + ⌈log2
    n⌉R + U.
    """
    return 2 * halvings(n + 1) * t.transmit + halvings(n) * t.reduce + t.update


def scatter_server(n: int, t: Times) -> float:
    """One server; workers reduce-scatter before they send, and gather after they receive: (2 + 2(n-1)/n)T + (n-1)/n R +
    U.
    """
    return (2 + 2 * (n - 1) / n) * t.transmit + (n - 1) / n * t.reduce + t.update


def asynchronous_worker(n: int, t: Times) -> float:
    """One worker pushes and pulls while no other worker does: 2T + U."""
    return 2 * t.transmit + t.update


def asynchronous_all(n: int, t: Times) -> float:
    """All n workers push; answers and updates overlap with other workers' pushes: nT + U."""
    return n * t.transmit + t.update


def distributed_server(n: int, t: Times) -> float:
    """Every worker is the server of an n-th of the model: 2(n-1)/n T + (n-1)/n R + U/n."""
    return (n - 1) / n * (2 * t.transmit + t.reduce) + t.update / n


def doubling(n: int, t: Times) -> float:
    """Recursive doubling, with every worker updating: ⌈log2 n⌉(T + R) + U."""
    return halvings(n) * (t.transmit + t.reduce) + t.update


def ring(n: int, t: Times) -> float:
    """Reduce-scatter and gather on a ring, with every worker updating: 2(n-1)/n T + (n-1)/n R + U."""
    return (n - 1) / n * (2 * t.transmit + t.reduce) + t.update


LAYOUTS: dict[str, Callable[[int, Times], float]] = {
    "naive server": naive_server,
    "binomial tree": tree_server,
    "scatter-reduce, one server": scatter_server,
    "asynchronous, one worker": asynchronous_worker,
    "asynchronous, all": asynchronous_all,
    "distributed server": distributed_server,
    "recursive doubling": doubling,
    "ring": ring,
}
"""Name of a layout → formula of its delay, in the order of the figure."""
