"""What happened, one event a line: the only source of every number in a summary, a table or a report.

Times are seconds since all nodes were ready; virtual seconds where the run's clock is virtual. Bytes are payload
bytes, headers not counted. Node numbers are as in `flockstep.messages`: workers 0.., servers -1, -2, ...
"""

from __future__ import annotations

import msgspec


class Step(msgspec.Struct, tag="step", frozen=True):
    """A worker used its step-th gradient; the amounts are since its previous step event."""

    t: float
    rank: int
    step: int
    loss: float | None
    compute: float
    wait: float
    comm: float
    sent: int
    received: int
    messages_sent: int
    messages_received: int


class Update(msgspec.Struct, tag="update", frozen=True):
    """`count` updates of worker `source` (None: of every other worker) took effect on `node`.

    `weight`: multiple of the learning rate at which each of these gradients was applied (1/n under `bsp`, 1 under
    `asynchronous`); None where no server applied them, and in older records.
    """

    t: float
    node: int
    source: int | None
    count: int
    staleness: int | None
    weight: float | None = None


class Span(msgspec.Struct, tag="span", frozen=True):
    """What a node did from start to end: compute, wait or comm; kept for the first steps only."""

    node: int
    kind: str
    start: float
    end: float


class Snapshot(msgspec.Struct, tag="evaluation", frozen=True):
    """The resulting model as it would be if the run ended at t, evaluated off the clock.

    `step`: mean local steps per worker; `samples`: over all workers; `bytes`: sent per worker so far (mean);
    `divergence`: root mean square distance of the replicas from their mean, None where not all replicas are known.
    """

    t: float
    step: float
    samples: int
    bytes: float
    loss: float
    metric: float
    divergence: float | None


class Replica(msgspec.Struct, tag="replica", frozen=True):
    """A worker's own replica at its end, evaluated off the clock."""

    t: float
    rank: int
    loss: float
    metric: float


class Node(msgspec.Struct, tag="node", frozen=True):
    """Totals of one node at its end; `hash` is of its final parameters."""

    node: int
    t: float
    steps: int
    compute: float
    wait: float
    comm: float
    sent: int
    received: int
    messages_sent: int
    messages_received: int
    header_bytes: int
    hash: str


class Lost(msgspec.Struct, tag="lost", frozen=True):
    """A node died or stopped responding."""

    t: float
    node: int
    reason: str


class Diverged(msgspec.Struct, tag="diverged", frozen=True):
    """The parameters of a node are not finite any more."""

    t: float
    node: int
    reason: str


class Figure(msgspec.Struct, tag="figure", frozen=True):
    """A figure of a strategy's own, such as the number of lost updates."""

    t: float
    node: int
    name: str
    value: float


class Result(msgspec.Struct, tag="result", frozen=True):
    """The model in result.npy is the run's model as it was at t; `step`: mean local steps of its `workers` workers."""

    t: float
    step: float
    workers: int


Event = Step | Update | Span | Snapshot | Node | Lost | Diverged | Figure | Replica | Result
HELD_BACK = (Step, Update, Span)
"""Events that come in numbers: writers may wait for more of them."""
