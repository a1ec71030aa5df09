"""Messages between the coordinator of a run and the agents of its hosts, and the links that carry them.

The coordinator and the agents are nodes of a stream bus of their own, encrypted in any case. An agent connects as soon
as the coordinator listens, and says:

agent → coordinator   Join: which host this is, what it would run, and how many workers
coordinator → agent   Accepted, or Refused with the reason
coordinator → agent   Start for each process
agent → coordinator   Heard: what a process says first on its connection to the agent
both                  FramesOf a connection to a process; Closed connections; PartOf a file with a node's state
agent → coordinator   Exited processes; Stopped by its user
coordinator → agent   Kill a process; Over at the end of the run; Discard files with states; Fetch a file
agent → coordinator   Prepared: the workers with which the host joins a run in progress have built the job
coordinator → agent   Told: a sentence for the host's user
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Sequence

import msgspec
import numpy as np

from flockstep import __version__
from flockstep.arrays.schema import Schema
from flockstep.errors import ProtocolError
from flockstep.links.control import Buffer
from flockstep.links.streams import LinkLog, StreamBus
from flockstep.links.wire import PROTOCOL, SenderIdentity
from flockstep.messages import LAUNCHER, Address, Message
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.part_group import PartGroup

MAX_MESSAGE = 1 << 36
"""Largest size of a message in bytes; a message may carry an array of a model."""
NAMED = 100
"""Maximum number of refused addresses that are reported."""
_LENGTH = struct.Struct("<I")


class HostMessage(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag=True):
    """Base class of messages between the coordinator and a host agent."""


class Join(HostMessage, frozen=True):
    """The first message of a host agent: the host, its workers, and the settings that must be equal on all hosts."""

    node: int
    nodes: int
    workers: int
    """Number of workers of the whole run."""
    ranks: tuple[int, ...]
    """Ranks of the processes that already run on the host, or that the host will start."""
    settings: dict[str, str]
    """Settings that must be equal on all hosts, such as the hash of the script."""
    watches: bool = False
    """Whether the agent watches processes that another launcher has started on the host, and reports when they end."""
    joining: int = 0
    """Number of workers with which the host joins a run in progress; 0 if the host takes part from the start."""
    name: str = msgspec.field(default_factory=socket.gethostname)
    """Name of the host that joins."""
    protocol: int = PROTOCOL
    version: str = __version__
    """Version of flockstep on the host."""


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
    """Message of a host agent whose host joins a run in progress: its workers have built the job."""


class Told(HostMessage, frozen=True):
    """Message to a host agent: a sentence for the host's user."""

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


class Heard(HostMessage, frozen=True):
    """Message of a host agent: a process has connected to the agent; `words` is what the process says first."""

    link: int
    """Number by which later messages refer to the connection."""
    words: bytes


class FramesOf(HostMessage, frozen=True):
    """Message in both directions: one forwarded message of a process; the payload is the message's array."""

    link: int
    header: bytes
    array: bool


class Closed(HostMessage, frozen=True):
    """Message in both directions: a connection to a process of the host has ended, or is to be closed."""

    link: int


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
    part. A host that is about to join does not join then.
    """

    reason: str
    failed: bool = False


class Discard(HostMessage, frozen=True):
    """Message to a host agent: remove a folder of files that the nodes have read."""

    path: str


class Fetch(HostMessage, frozen=True):
    """Message to a host agent: send a file of the agent's folder in parts, and remove the file."""

    path: str


class PartOf(HostMessage, frozen=True):
    """Message in both directions: the payload is the next part of a file in the agent's folder."""

    path: str
    last: bool
    why: str = ""
    """Reason why a file that the coordinator fetches cannot be read."""


class Over(HostMessage, frozen=True):
    """Message to a host agent: the run has ended; `reason` is empty if it succeeded, `code` is the exit code."""

    reason: str
    code: int


AnyHostMessage = (
    Join | Refused | Accepted | Prepared | Told | Start | Heard | FramesOf | Closed | Exited | Kill | Stopped
    | Discard | Fetch | PartOf | Over
)  # fmt: skip
_decoder = msgspec.msgpack.Decoder(AnyHostMessage)
_encoder = msgspec.msgpack.Encoder()


def packed(message: HostMessage, payload: Buffer = b"") -> bytes:
    """Return a message and its payload as bytes."""
    header = _encoder.encode(message)
    return b"".join((_LENGTH.pack(len(header)), header, payload))


def unpacked(data: memoryview) -> tuple[AnyHostMessage, memoryview]:
    """Return the message and the payload that bytes hold; the payload is a view of them.

    Raises:
        ProtocolError: the bytes hold no message.
    """
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        if end > data.nbytes:
            raise ProtocolError(f"a message of {data.nbytes} bytes announced a header that ends at byte {end}")
        return _decoder.decode(data[_LENGTH.size : end]), data[end:]
    except (ValueError, RecursionError, struct.error) as error:  # msgspec's own errors are ValueErrors
        raise ProtocolError(str(error)) from None


def frames_of(link: int, frames: Sequence[Buffer]) -> tuple[FramesOf, Buffer]:
    """Return the message that forwards the frames of a process's message, and its payload."""
    return FramesOf(link, bytes(frames[0]), len(frames) > 1), frames[1] if len(frames) > 1 else b""


class HostLinks(LinkLog):
    """The links of the coordinator to the agents, or of an agent to the coordinator.

    A link that breaks is opened again by the agent, and continues with the next byte.
    """

    def __init__(self, secret: bytes, heartbeat: float, link_timeout: float, listener: socket.socket | None = None):
        """`listener`: where the coordinator listens; None for an agent.

        A link that is silent for `heartbeat` seconds is opened again; the other end is lost if the link is down for
        longer than `link_timeout`, or for two heartbeat timeouts after an agent has closed it.
        """
        me = LAUNCHER if listener is not None else LAUNCHER + 1 + secrets.randbits(48)
        self._identity = SenderIdentity("the hosts of a run", me, "", MAX_MESSAGE, secret=secret)
        self.bus = StreamBus(
            self._identity,
            listener,
            encrypts=True,
            heartbeat=heartbeat,
            link_timeout=link_timeout,
            local_sessions=True,
            log=self,
        )
        self._sent = Counter[Address]()
        self._named: set[str] = set()
        self.refusals: deque[tuple[str, str]] = deque()
        """Address and reason of each connection that was refused, one for each address."""
        self.resumptions: deque[tuple[Address, float, str]] = deque()
        """Peer of each link that was opened again, seconds without the link, and why it broke."""
        if listener is not None:
            self.bus.open(returns_within=2 * heartbeat)

    def refused(self, me: Address, host: str, begun: bool, why: str, first: bool) -> None:
        """Keep a refusal, unless the other end is no flockstep or was named before: such connections are only
        counted.
        """
        if begun and host not in self._named and len(self._named) < NAMED:
            self._named.add(host)
            self.refusals.append((host, why))

    def resumed(self, me: Address, peer: Address, seconds: float, why: str, nbytes: int) -> None:
        """Keep what is to be said about a link that was opened again."""
        self.resumptions.append((peer, seconds, why))

    def send(self, peer: Address, message: HostMessage, payload: Buffer = b"") -> None:
        """Queue a message without waiting.

        Raises:
            Backlog: too much is queued for the peer.
            PeerLost: the link to the peer has ended.
        """
        array = np.frombuffer(packed(message, payload), np.uint8)
        self.bus.send(peer, Message(self._identity.address, "host", array, number=self._sent[peer] + 1))
        self._sent[peer] += 1

    def receive(self, seconds: float = 0.0) -> tuple[Address, memoryview] | None:
        """Return the next message, packed, and its sender, or None if none arrives within `seconds`.

        A peer whose message breaks the protocol of the bus is lost.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                message = self.bus.poll(max(0.0, until - time.monotonic()))
            except ProtocolError:  # `bus.broken` names the peer, and `bus.obstacle` the reason
                continue
            if message is None:
                return None
            return message.source, memoryview(b"" if message.array is None else message.array.data)
