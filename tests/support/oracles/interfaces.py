"""Types that the oracles share.

`Gradient` is called as gradient(client, w, step). `step` counts the gradients that this client has computed before,
over the whole run, so that a stochastic gradient can choose its batch by (client, step).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Gradient = Callable[[int, Array, int], Array]
# One mapping per round: the clients that take part, each with its number of local steps.
Rounds = Sequence[Mapping[int, int]]


class Arrival(NamedTuple):
    """An update that reaches an asynchronous server: its client, the version of the model it started from, its steps.

    Version 0 is the initial model; every update of the server's model makes the next version.
    """

    client: int
    version: int
    steps: int


def arrivals_in_order(order: Sequence[int], steps: Sequence[int], *, every: int = 1) -> list[Arrival]:
    """Arrivals of clients that start again from the newest version as soon as the server has handled their update.

    All start from version 0. `order` lists the clients as their updates arrive, `steps` holds each client's number of
    local steps, and the server makes a version from `every` updates.
    """
    started: Counter[int] = Counter()
    arrivals = []
    for handled, client in enumerate(order, start=1):
        arrivals.append(Arrival(client, started[client], steps[client]))
        started[client] = handled // every
    return arrivals
