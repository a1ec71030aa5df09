"""Messages between the coordinator of a run and the agents of its hosts.

agent → coordinator   Join: which host this is, what it would run, and how many workers
coordinator → agent   Accepted, or Refused with the reason; Waiting while others have not come
coordinator → agent   Start for each process; Open for each connection to one
both                  Frames of such a connection
agent → coordinator   Heard on the control socket of the host; Broken connections; Exited processes; Stopped by its user
coordinator → agent   Close a connection; Kill a process; Over at the end of the run
"""

from __future__ import annotations

import msgspec

from flockstep.arrays.schema import Schema
from flockstep.drivers.member import NodeSpec


class HostMessage(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag=True):
    """A message between the coordinator and a host agent."""


class Join(HostMessage, frozen=True):
    """The first message of a host agent."""

    protocol: int
    version: str
    """Version of flockstep on the host."""
    node: int
    nodes: int
    workers: int
    """Workers of the whole run."""
    ranks: tuple[int, ...]
    """Ranks whose processes the host has already, or will start."""
    name: str
    """Name of the host."""
    settings: dict[str, str]
    """What all hosts must agree on, such as the hash of the script."""
    watches: bool = False
    """Whether the agent tells how the processes end that the host has already."""


class Refused(HostMessage, frozen=True):
    """Message to a host agent: the agent may not join the run, with the reason."""

    reason: str


class Accepted(HostMessage, frozen=True):
    """Message to a host agent: the agent takes part; `config` is the run's configuration as TOML."""

    config: str


class Waiting(HostMessage, frozen=True):
    """Message to a host agent: `text` says which hosts or ranks have not come yet."""

    text: str


class ServerSpec(msgspec.Struct, frozen=True):
    """What a server's process needs besides its node specification."""

    index: int
    strategy: str
    optimizer: str
    schema: Schema
    every: int
    """Steps between two snapshots; 0: none."""
    imports: tuple[str, ...]


class Start(HostMessage, frozen=True):
    """Message to a host agent: start a process; `server` is None for a worker."""

    spec: NodeSpec
    server: ServerSpec | None = None


class Open(HostMessage, frozen=True):
    """Message to a host agent: connect to the process that listens at `endpoint` and sends arrays of at most
    `max_bytes`.
    """

    link: int
    endpoint: str
    max_bytes: int


class FramesOf(HostMessage, frozen=True):
    """A message of a connection that a host agent forwards; its frames are the payloads."""

    link: int


class Close(HostMessage, frozen=True):
    """Message to a host agent: close a connection to a process of its host."""

    link: int


class Broken(HostMessage, frozen=True):
    """Message of a host agent: the connection to a process of its host broke."""

    link: int


class Heard(HostMessage, frozen=True):
    """Message of a host agent: the payload has arrived on the control socket of the host."""


class Exited(HostMessage, frozen=True):
    """Message of a host agent: a process has ended with that exit code; `reason` adds to it."""

    address: int
    code: int
    reason: str = ""


class Kill(HostMessage, frozen=True):
    """Message to a host agent: kill a process."""

    address: int


class Stopped(HostMessage, frozen=True):
    """Message of a host agent: the user of the host, or its system, asked the run to stop, or it `failed`."""

    reason: str
    failed: bool = False


class Over(HostMessage, frozen=True):
    """Message to a host agent: the run has ended; `reason` is empty if it succeeded, `code` is the exit code."""

    reason: str
    code: int


AnyHostMessage = (
    Join | Refused | Accepted | Waiting | Start | Open | FramesOf | Close | Broken | Heard | Exited | Kill | Stopped
    | Over
)  # fmt: skip
_decoder = msgspec.msgpack.Decoder(AnyHostMessage)
_encoder = msgspec.msgpack.Encoder()


def encoded(message: HostMessage) -> bytes:
    """The header of a message."""
    return _encoder.encode(message)


def decoded(header: bytes) -> AnyHostMessage:
    """The message of a header.

    Raises:
        ValueError: it is none.
    """
    message: AnyHostMessage = _decoder.decode(header)
    return message
