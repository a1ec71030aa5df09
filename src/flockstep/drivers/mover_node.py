"""A mover's node: a worker whose tasks are the calls of a user's threads, each with a channel and an end of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flockstep.errors import ConfigurationError, FlockstepError, PeerLost, RunError, TimedOut
from flockstep.messages import Address, Array, Beside, Mailbox, Message, Note, Wanted, node_name
from flockstep.nodes import Cluster, Worker
from flockstep.programs import Port, Task

CLOSING = "closing/"
"""Tag of the message of a mover that will send no more arrays, but answers until all others have said so too."""
CALLED_OFF = "called off/"
"""What stands before the channel of a call that a rank could not complete."""
KINDS = {kind.__name__: kind for kind in (ConfigurationError, PeerLost, TimedOut)}
"""Errors that end the calls of all who take part."""
SEND, REQUEST = "send:", "request:"
"""What stands before the names that users give; after them stands "/", which is where no channel is."""


class _Unused:
    """A mover optimises nothing."""

    lr = 0.0

    def step(self, params: Array, gradient: Array) -> None:
        """Nothing."""

    def reset(self, params: Array) -> None:
        """Nothing."""


class _Unbroken(Mailbox):
    """Nothing can be missing here: the transport checks the sequence of all messages."""

    def require_all(self, source: Address) -> None:
        """All is here."""


class Party(Worker):
    """One rank of a mover. All of it happens on one thread: the driver's."""

    def __init__(self, rank: int, workers: int, seed: int, port: Port, hear: Callable[[Message], bool]):
        """`hear` is shown every message first, and says whether that was all there is to do."""
        self.seeds = np.random.SeedSequence((seed, 0x30FE, rank))
        random = np.random.default_rng(self.seeds)
        super().__init__(rank, Cluster(workers), np.empty(0, np.float32), random, _Unused(), None)
        self.port = port
        self.mailbox = _Unbroken()
        self.reasons: dict[Address, str] = {}
        self._hear = hear
        self._calls: dict[str, tuple[Task | None, str]] = {}
        self._others: dict[str, dict[str, Address]] = {}
        self._off: dict[str, FlockstepError] = {}

    @property
    def others(self) -> list[int]:
        """Every other rank, lost or not."""
        return [rank for rank in range(self.workers) if rank != self.rank]

    def gone(self, rank: Address) -> bool:
        """Whether that rank sends no more arrays."""
        return rank in self.departed or rank in self.leaving

    def deliver(self, message: Message) -> None:
        """A message has arrived, or one to oneself was sent."""
        if message.tag == CLOSING:
            self.leaving.add(message.source)
            self._advance_tasks()
        elif message.tag.startswith(CALLED_OFF):
            self._called_off(message)
        elif not self._hear(message):
            what, channel = message.note.get("call"), "/" + message.tag.partition("/")[2]
            if isinstance(what, str):
                self._compare(channel, message.source, what)
            super().deliver(message)

    def objection(self, channel: str, what: str) -> FlockstepError | None:
        """Why a call that all ranks take part in is in vain already; `what` says what they have to agree on."""
        channel = "/" + channel
        others = [(source, theirs) for theirs, source in self._others.pop(channel, {}).items() if theirs != what]
        if channel in self._off:
            return self._off[channel]
        if others:
            return self._disagreement(*others[0], what)
        self._calls[channel] = None, what
        return None

    def begun(self, channel: str, task: Task) -> None:
        """That call is under way, or has ended at once."""
        channel = "/" + channel
        if task.done:
            self._calls.pop(channel, None)
        elif channel in self._calls:
            self._calls[channel] = task, self._calls[channel][1]

    def give_up(self, task: Task, error: FlockstepError) -> None:
        """Raise `error` in a task, where it waits."""
        if task not in self.tasks:
            return
        self.tasks.remove(task)
        self._calls.pop(task.channel, None)
        task.fail(error)  # type: ignore[arg-type]

    def call_off(self, channel: str, error: Exception) -> None:
        """A call in a channel ended with an error: those who take part in it need not wait, unless they know."""
        if channel and self._off.pop("/" + channel, None) is not error:
            note = {"kind": type(error).__name__, "why": str(error)[:1000]}
            for rank in self.others:
                self.send(rank, CALLED_OFF + channel, None, note)

    def missed(self, wanted: Wanted) -> PeerLost:
        """The error for a wait that can never end."""
        who, tag = wanted.source, wanted.tag or ""
        what = (
            repr(tag.removeprefix(SEND).removesuffix("/"))
            if tag.startswith(SEND)
            else "a reply"
            if wanted.reply_to
            else "its part"
        )
        if who is None:
            return PeerLost(f"everyone else has left while {node_name(self.rank)} waited for {what}")
        return PeerLost(f"{self.end_of(who)}; {node_name(self.rank)} waited for {what}")

    def end_of(self, rank: Address) -> str:
        """How a rank that is gone went."""
        return self.reasons.get(rank) or f"{node_name(rank)} has {'left' if self.gone(rank) else 'not answered'}"

    def _compare(self, channel: str, source: Address, theirs: str) -> None:
        """Fail a call that another rank understands differently; remember what it said if the call is yet to come."""
        if channel not in self._calls:
            self._others.setdefault(channel, {}).setdefault(theirs, source)
            return
        task, ours = self._calls[channel]
        if task is not None and ours != theirs:
            self.give_up(task, self._disagreement(source, theirs, ours))

    def _disagreement(self, source: Address, theirs: str, ours: str) -> ConfigurationError:
        return ConfigurationError(
            f"{node_name(source)} calls {theirs} where {node_name(self.rank)} calls {ours}; call the same "
            "collectives in the same order on every worker, or give each a name"
        )

    def _called_off(self, message: Message) -> None:
        channel = message.tag.removeprefix(CALLED_OFF[:-1])
        kind = KINDS.get(str(message.note.get("kind")), RunError)
        task = self._calls.get(channel, (None, ""))[0]
        error = self._off[channel] = kind(f"{message.note.get('why')}")
        if task is not None:
            self.give_up(task, error)

    def _post(
        self, to: Address, tag: str, array: Array | None, note: Beside | None, reply_to: int = 0, copied: bool = False
    ) -> int:
        if self._channel in self._calls and not reply_to:
            assert not isinstance(note, Note)
            note = {**(note or {}), "call": self._calls[self._channel][1]}
        return super()._post(to, tag, array, note, reply_to, copied)

    def _advance_tasks(self) -> None:
        for task in list(self.tasks):
            while (wanted := task.wanted) is not None and task in self.tasks:
                found = task.take(self.mailbox) or (self.missed(wanted) if self._hopeless(wanted) else None)
                if found is None:
                    break
                self._advance(task, found)
            if task.done and task in self.tasks:
                self.tasks.remove(task)
                self._calls.pop(task.channel, None)

    def require_coming(self, wanted: Wanted) -> None:
        """Raise `PeerLost` if that message, which is not here, can come no more."""
        if self._hopeless(wanted):
            raise self.missed(wanted)

    def _hopeless(self, wanted: Wanted) -> bool:
        """Whether what is not here yet cannot come any more; a rank that is closing still replies."""
        if wanted.reply_to is not None:
            return wanted.source in self.departed
        if wanted.source is not None:
            return self.gone(wanted.source)
        return self.workers > 1 and all(map(self.gone, self.others))
