"""Messages between the coordinator of a run and the agents of its hosts.

agent → coordinator   Join: which host this is, what it would run, and how many workers
coordinator → agent   Accepted, or Refused with the reason; Waiting while other hosts have not joined
coordinator → agent   Start for each process
agent → coordinator   Heard: what a process says first on its connection to the agent
both                  FramesOf a connection to a process
agent → coordinator   Broken connections; Exited processes; Stopped by its user
coordinator → agent   Close a connection; Kill a process; Over at the end of the run
coordinator → agent   Store a part of a file with a node's state; Discard such files; Fetch a file
agent → coordinator   PartOf a file that was fetched
agent → coordinator   Prepared: the workers with which the host joins a run in progress have built the job
coordinator → agent   Told: a sentence for the host's user
"""

from __future__ import annotations

import msgspec

from flockstep.arrays.schema import Schema
from flockstep.drivers.member import NodeSpec
from flockstep.drivers.part_group import PartGroup


class HostMessage(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag=True):
    """Base class of messages between the coordinator and a host agent."""


class Join(HostMessage, frozen=True):
    """The first message of a host agent: the host, its workers, and the settings that must be equal on all hosts."""

    protocol: int
    version: str
    """Version of flockstep on the host."""
    node: int
    nodes: int
    workers: int
    """Number of workers of the whole run."""
    ranks: tuple[int, ...]
    """Ranks of the processes that already run on the host, or that the host will start."""
    name: str
    """Name of the host that joins."""
    settings: dict[str, str]
    """Settings that must be equal on all hosts, such as the hash of the script."""
    watches: bool = False
    """Whether the agent watches processes that another launcher has started on the host, and reports when they end."""
    session: str = ""
    """Key of the session, by which the coordinator recognizes the agent when it connects again."""
    joining: int = 0
    """Number of workers with which the host joins a run in progress; 0 if the host takes part from the start."""


class Resume(HostMessage, frozen=True):
    """The first message of a host agent that connects again after its connection has broken."""

    node: int
    session: str
    received: int
    """Number of bytes that the agent has received from the coordinator."""


class Resumed(HostMessage, frozen=True):
    """Message to a host agent that has connected again: the number of bytes that the coordinator has received from the
    agent.
    """

    received: int


class Refused(HostMessage, frozen=True):
    """Message to a host agent: the agent may not join the run, for the given reason."""

    reason: str


class Accepted(HostMessage, frozen=True):
    """Message to a host agent: the host takes part in the run; `config` is the run's configuration as TOML."""

    config: str
    node: int = 0
    """Number of the host in the run, from 0."""
    settings: dict[str, str] = {}
    """The run's settings, for a host that joins a run in progress: the host's files must equal those of the run."""


class Prepared(HostMessage, frozen=True):
    """Message of a host agent whose host joins a run in progress: its workers have built the job, or one of them has
    failed for the reason `why`.
    """

    why: str = ""


class Told(HostMessage, frozen=True):
    """Message to a host agent: a sentence for the host's user."""

    text: str


class Waiting(HostMessage, frozen=True):
    """Message to a host agent: `text` says which hosts or ranks have not joined yet."""

    text: str


class ServerSpec(msgspec.Struct, frozen=True):
    """Specification of a server's process, which completes its node specification."""

    index: int
    strategy: str
    optimizer: str
    schema: Schema
    every: int
    """Number of steps of each worker between two snapshots of the server; 0 for no snapshots."""
    imports: tuple[str, ...]
    group: PartGroup | None = None
    """Part group of the server, if the model is split; `index` counts the servers of this group."""


class Start(HostMessage, frozen=True):
    """Message to a host agent: start a process; `server` is None for a worker."""

    number: int
    """Number by which later messages refer to this process."""
    spec: NodeSpec
    server: ServerSpec | None = None
    config: str = ""
    """The run's configuration as TOML; empty if it is the configuration that `Accepted` contained."""


class FramesOf(HostMessage, frozen=True):
    """Message in both directions: one forwarded message of a process, whose frames are the payloads."""

    link: int


class Close(HostMessage, frozen=True):
    """Message to a host agent: close a connection to a process of its host."""

    link: int


class Broken(HostMessage, frozen=True):
    """Message of a host agent: the connection to a process of its host broke."""

    link: int


class Heard(HostMessage, frozen=True):
    """Message of a host agent: a process has connected to the agent; the payload is what the process says first."""

    link: int
    """Number by which later messages refer to the connection."""


class Exited(HostMessage, frozen=True):
    """Message of a host agent: a process has ended with the given exit code; `reason` adds what the host knows about
    the end.
    """

    number: int
    code: int
    reason: str = ""


class Kill(HostMessage, frozen=True):
    """Message to a host agent: kill one of the host's processes."""

    number: int


class Stopped(HostMessage, frozen=True):
    """Message of a host agent: the host's user or system asks the run to stop; with `failed`, the host cannot do its
    part.
    """

    reason: str
    failed: bool = False


class Store(HostMessage, frozen=True):
    """Message to a host agent: the payload is the next part of a file in the agent's folder."""

    path: str
    """Path of the file in the agent's folder."""
    last: bool


class Discard(HostMessage, frozen=True):
    """Message to a host agent: remove a folder of files that the nodes have read."""

    path: str


class Fetch(HostMessage, frozen=True):
    """Message to a host agent: send a file of the agent's folder in parts, and remove the file."""

    number: int
    """Number of the transfer that the reply names."""
    path: str


class PartOf(HostMessage, frozen=True):
    """Message of a host agent: the payload is the next part of a file that the coordinator fetches; `why` says why the
    file cannot be read.
    """

    number: int
    last: bool
    why: str = ""


class Over(HostMessage, frozen=True):
    """Message to a host agent: the run has ended; `reason` is empty if it succeeded, `code` is the exit code."""

    reason: str
    code: int


AnyHostMessage = (
    Join | Refused | Accepted | Waiting | Start | FramesOf | Close | Broken | Heard | Exited | Kill | Stopped
    | Over | Prepared | Told | Resume | Resumed | Store | Discard | Fetch | PartOf
)  # fmt: skip
_decoder = msgspec.msgpack.Decoder(AnyHostMessage)
_encoder = msgspec.msgpack.Encoder()


def encoded(message: HostMessage) -> bytes:
    """Return a message encoded as the bytes of a header."""
    return _encoder.encode(message)


def decoded(header: bytes) -> AnyHostMessage:
    """Return the message that a header encodes.

    Raises:
        ValueError: the bytes do not encode a message.
    """
    try:
        message: AnyHostMessage = _decoder.decode(header)
    except RecursionError as error:  # it is no ValueError, as msgspec's other errors are
        raise ValueError(str(error)) from None
    return message
