"""The events of a run, one JSON document per line. Every number in a summary, table or report is computed from them.

Fields in seconds count from the moment when all nodes were ready; if the run's clock is virtual, they are virtual
seconds. Bytes are payload bytes without headers. Node numbers are those of `flockstep.messages`: workers 0, 1, …,
servers -1, -2, …
"""

from __future__ import annotations

import msgspec


class StepEvent(msgspec.Struct, tag="step", frozen=True, gc=False, forbid_unknown_fields=True):
    """A worker used its gradient number `step`.

    Seconds, bytes and messages cover the time since the worker's previous step event.
    """

    seconds: float
    rank: int
    step: int
    loss: float | None
    compute_seconds: float
    wait_seconds: float
    comm_seconds: float
    sent_bytes: int
    received_bytes: int
    messages_sent: int
    messages_received: int


class UpdateEvent(msgspec.Struct, tag="update", frozen=True, gc=False, forbid_unknown_fields=True):
    """`count` updates of worker `source` took effect on `node`; a `source` of None stands for every other worker.

    `weight` is the factor on the learning rate with which each of these gradients was applied (1/n under `bsp`, 1 under
    `asynchronous`); None if no server applied the updates, and in older records.
    """

    seconds: float
    node: int
    source: int | None
    count: int
    staleness: int | None
    weight: float | None = None


class SpanEvent(msgspec.Struct, tag="span", frozen=True, gc=False, forbid_unknown_fields=True):
    """One activity of a node from `start` to `end`; `kind` is compute, wait or comm.

    Spans are recorded for the first steps only.
    """

    node: int
    kind: str
    start: float
    end: float


class ClockEvent(msgspec.Struct, tag="clock", frozen=True, forbid_unknown_fields=True):
    """A node has compared its host's clock with the supervisor's clock, on which all times of a real run are
    recorded.

    `offset_seconds` is added to the node's clock; `uncertainty_seconds` is the largest error of this offset.
    """

    seconds: float
    node: int
    offset_seconds: float
    uncertainty_seconds: float


class HostsEvent(msgspec.Struct, tag="hosts", frozen=True, forbid_unknown_fields=True):
    """The run uses several hosts.

    `hosts` holds the ranks of each host's workers; the hosts are in the order of their lowest ranks.
    """

    seconds: float
    hosts: tuple[tuple[int, ...], ...]


class EvaluationEvent(msgspec.Struct, tag="evaluation", frozen=True, forbid_unknown_fields=True):
    """Evaluation of the model that the run would return if the run ended at `seconds`.

    Evaluating takes no time on the run's clock.

    `step` is the mean number of local steps per worker; `samples`, the samples used by all workers; `sent_bytes`, the
    mean bytes sent per worker so far; `divergence`, the root mean square distance of the replicas from their mean, or
    None if not all replicas are known.
    """

    seconds: float
    step: float
    samples: int
    sent_bytes: float
    loss: float
    metric: float
    divergence: float | None


class ReplicaEvent(msgspec.Struct, tag="replica", frozen=True, forbid_unknown_fields=True):
    """Evaluation of a worker's own replica at the end of its program; evaluating takes no time on the run's clock."""

    seconds: float
    rank: int
    loss: float
    metric: float


class NodeEvent(msgspec.Struct, tag="node", frozen=True, forbid_unknown_fields=True):
    """Totals of one node at the end of its program; `hash` is the hash of the node's final parameters."""

    node: int
    seconds: float
    steps: int
    compute_seconds: float
    wait_seconds: float
    comm_seconds: float
    sent_bytes: int
    received_bytes: int
    messages_sent: int
    messages_received: int
    header_bytes: int
    hash: str
    backup_of: int | None = None
    """The server of which this process is a backup; None for all other nodes."""


class LostEvent(msgspec.Struct, tag="lost", frozen=True, forbid_unknown_fields=True):
    """A node died or stopped responding, and counts as lost."""

    seconds: float
    node: int
    reason: str


class PromotedEvent(msgspec.Struct, tag="promoted", frozen=True, forbid_unknown_fields=True):
    """A backup took the place of server `node`, whose process was lost; its process has the address `process`.

    `epoch` is the number of times that a backup has replaced this server. `push_seconds` are the seconds until the
    first message with an array arrived afterwards; None if no such message arrived.
    """

    seconds: float
    node: int
    process: int
    epoch: int
    push_seconds: float | None


class DivergedEvent(msgspec.Struct, tag="diverged", frozen=True, forbid_unknown_fields=True):
    """The parameters of a node are no longer finite."""

    seconds: float
    node: int
    reason: str


class RefusedEvent(msgspec.Struct, tag="refused", frozen=True, forbid_unknown_fields=True):
    """`node` refused a gradient of worker `source`, and used zeros in its place."""

    seconds: float
    node: int
    source: int
    reason: str


class NoteEvent(msgspec.Struct, tag="note", frozen=True, forbid_unknown_fields=True):
    """A sentence about the run, such as how its nodes changed; the summary's notes repeat it."""

    seconds: float
    text: str


class ScalarEvent(msgspec.Struct, tag="scalar", frozen=True, forbid_unknown_fields=True):
    """A scalar that a strategy records, such as the number of lost updates."""

    seconds: float
    node: int
    name: str
    value: float


class MetricEvent(msgspec.Struct, tag="metric", frozen=True, forbid_unknown_fields=True):
    """A script has recorded a value of a metric of its own on worker `rank`, after `step` local steps.

    `count` is the number of samples or other weight of the value in the mean over the workers; None for a value of rank
    0 that stands for the run.
    """

    seconds: float
    rank: int
    step: int
    name: str
    value: float
    higher_is_better: bool
    count: float | None = None


class ResultEvent(msgspec.Struct, tag="result", frozen=True, forbid_unknown_fields=True):
    """result.npy holds the run's model at `seconds`; `step` is the mean number of local steps of its `workers`
    workers.
    """

    seconds: float
    step: float
    workers: int


Event = (
    StepEvent
    | UpdateEvent
    | SpanEvent
    | ClockEvent
    | HostsEvent
    | EvaluationEvent
    | NodeEvent
    | LostEvent
    | PromotedEvent
    | DivergedEvent
    | RefusedEvent
    | NoteEvent
    | ScalarEvent
    | ReplicaEvent
    | MetricEvent
    | ResultEvent
)
HELD_BACK = (StepEvent, UpdateEvent, SpanEvent)
"""Types of frequent events, which a writer may buffer before it writes them."""
