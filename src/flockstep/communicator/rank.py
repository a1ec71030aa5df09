"""The node of a communicator; each of its tasks is one call that a thread of the process has made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from flockstep.communicator.encoded import CALLED_OFF, CLOSING, NOTES, REQUEST, SEND, WINDOW, Encoded, Failed, Reply
from flockstep.errors import ConfigurationError, FlockstepError, PeerLost, RunError, TimedOut
from flockstep.messages import Address, AnyNote, Array, Message, Wanted, node_name, note_kind
from flockstep.nodes import Cluster, Peer
from flockstep.programs import Task

T = TypeVar("T")
KINDS = {kind.__name__: kind for kind in (ConfigurationError, PeerLost, TimedOut)}
"""Name of an error that ends a call on all ranks → class of the error."""


@dataclass(eq=False)
class CollectiveCall:
    """A collective call, as far as this rank knows it."""

    what: str = ""
    """Text that describes this rank's call; empty until this rank makes the call."""
    theirs: dict[str, Address] = field(default_factory=dict)
    """Text that describes a call of other ranks → the first rank that made it; used until this rank makes the call
    too.
    """
    task: Task | None = None
    off: FlockstepError | None = None
    """Error with which another rank has ended the call; None if no rank has ended it."""


class Rank(Peer):
    """One rank of a communicator; all its methods run on the engine's thread."""

    def __init__(self, rank: int, workers: int, seed: int):
        self.seeds = np.random.SeedSequence((seed, 0x30FE, rank))
        random = np.random.default_rng(self.seeds)
        super().__init__(rank, Cluster(workers), np.empty(0, np.float32), random)
        self.others = [other for other in range(workers) if other != rank]
        self.notes = NOTES
        self.reasons: dict[Address, str] = {}
        """Rank → how the rank died."""
        self._handlers: dict[str, Callable[[Message], None]] = {CLOSING: self._left}
        self._calls: dict[str, CollectiveCall] = {}
        self._open: dict[Future[Any], Task] = {}
        self._closing = False

    def gone(self, rank: Address) -> bool:
        """Whether a rank sends no more arrays, because the rank has left, is closing, or has died."""
        return rank in self.departed or rank in self.leaving

    def handle(self, tag: str, handler: Callable[[Message], None]) -> None:
        """Pass every message with a tag to `handler`, including messages that have already arrived."""
        self._handlers[tag] = handler
        for message in self.mailbox.take_all(Wanted(tag)):
            handler(message)

    def forget(self, tag: str) -> None:
        """Stop passing messages with a tag to their handler."""
        self._handlers.pop(tag, None)

    def begin(
        self, program: Callable[[Rank], Awaitable[T]], future: Future[T], channel: str = "", what: str = ""
    ) -> None:
        """Start a call whose result goes into `future`. In a collective call `channel` identifies the call, and all
        ranks must pass the same `what`.
        """
        call, channel = CollectiveCall(), f"/{channel}"
        if what:
            call = self._calls.setdefault(channel, call)
            call.what = what
        task = call.task = Task(0, channel, self._run(program, future, call, channel))
        self._advance(task, None)
        if not task.done:
            self.tasks.append(task)
            self._open[future] = task

    def give_up(self, future: Future[Any], error: FlockstepError) -> None:
        """Raise `error` in one waiting call."""
        if future in self._open:
            self._fail(self._open[future], error)

    def give_up_all(self, error: FlockstepError) -> None:
        """Raise `error` in every waiting call."""
        for future in list(self._open):
            self.give_up(future, error)

    async def leave(self) -> None:
        """Announce that this rank closes, and wait until all other ranks close too; meanwhile only handlers answer
        requests.
        """
        self._closing = True
        for tag in [tag for tag in self.mailbox.queues if tag.startswith(REQUEST)]:
            for message in self.mailbox.take_all(Wanted(tag)):
                self._refuse(message)
        self.send_all(self.others, CLOSING)
        for rank in self.others:
            with suppress(PeerLost):  # raised once the rank can send nothing more
                await self.receive("word", rank)

    def _handles(self, message: Message) -> bool:
        """Handle a message that has arrived, or that this rank has sent to itself, and return True; return False if the
        message is for a program of this rank.
        """
        handler = None if message.reply_to else self._handler(message.tag)
        if handler is not None:
            self.mailbox.hear(message)
            handler(message)
            return True
        if not message.reply_to and (theirs := getattr(message.note, "call", "")):
            self._compare("/" + message.tag.partition("/")[2], message.source, theirs)
        return False

    def _can_never_arrive(self, wanted: Wanted) -> bool:
        """Whether a message that has not arrived can no longer arrive; a rank that is closing still answers
        requests.
        """
        if wanted.reply_to is not None:
            return wanted.source in self.departed
        if wanted.source is not None:
            return self.gone(wanted.source)
        return self.workers > 1 and all(map(self.gone, self.others))

    def _missed(self, wanted: Wanted) -> PeerLost:
        """Return the error to raise in a wait for a message that can never arrive."""
        who, tag = wanted.source, wanted.tag or ""
        what = repr(tag[len(SEND) : -1]) if tag.startswith(SEND) else "a reply" if wanted.reply_to else "its part"
        end = "all other workers have left the run" if who is None else self.end_of(who)
        return PeerLost(f"{end}{' while' if who is None else ';'} {node_name(self.rank)} waited for {what}")

    def end_of(self, rank: Address) -> str:
        """Return a text that says how a rank ended: by leaving, closing, or dying."""
        return self.reasons.get(rank) or f"{node_name(rank)} has {'left' if self.gone(rank) else 'not answered'}"

    async def _run(
        self, program: Callable[[Rank], Awaitable[T]], future: Future[T], call: CollectiveCall, channel: str
    ) -> None:
        """Run a call to its end, passing its result or error to `future`."""
        try:
            if call.off is not None:
                raise call.off
            for theirs, source in call.theirs.items():
                if theirs != call.what:
                    raise self._disagreement(source, theirs, call.what)
            result = await program(self)
        except Exception as error:  # noqa: BLE001 - raised in the thread that called
            self._calls.pop(channel, None)
            if call.what and error is not call.off:  # the other ranks need not wait; they may know already
                self.send_all(self.others, CALLED_OFF + channel, None, Failed(type(error).__name__, str(error)[:1000]))
            self._open.pop(future, None)
            future.set_exception(error)
        else:
            self._calls.pop(channel, None)
            self._open.pop(future, None)
            future.set_result(result)

    def _fail(self, task: Task, error: FlockstepError) -> None:
        if task in self.tasks:
            self.tasks.remove(task)
            task.fail(error)

    def _compare(self, channel: str, source: Address, theirs: str) -> None:
        """Fail a call that another rank makes differently; remember the other's call if this rank has not made
        it yet.
        """
        call = self._calls.setdefault(channel, CollectiveCall())
        if not call.what:
            call.theirs.setdefault(theirs, source)
        elif call.task is not None and theirs != call.what:
            self._fail(call.task, self._disagreement(source, theirs, call.what))

    def _disagreement(self, source: Address, theirs: str, ours: str) -> ConfigurationError:
        return ConfigurationError(
            f"{node_name(source)} calls {theirs}, but {node_name(self.rank)} calls {ours}; call the same collectives "
            "in the same order on every worker, or give every call a name"
        )

    def _handler(self, tag: str) -> Callable[[Message], None] | None:
        """Return the function that handles messages with a tag, or None if a call receives them."""
        if tag in self._handlers:
            return self._handlers[tag]
        if tag.startswith(CALLED_OFF):
            return self._called_off
        return self._refuse if tag.startswith(WINDOW) or (self._closing and tag.startswith(REQUEST)) else None

    def _left(self, message: Message) -> None:
        self.leaving.add(message.source)
        self._advance_tasks()

    def _called_off(self, message: Message) -> None:
        call = self._calls.setdefault(message.tag.removeprefix(CALLED_OFF), CollectiveCall())
        call.off = KINDS.get(message.note.kind, RunError)(message.note.why)
        if call.task is not None:
            self._fail(call.task, call.off)

    def _refuse(self, message: Message) -> None:
        how = "closed that window" if message.tag.startswith(WINDOW) else "left without answering"
        self.reply(message, None, Reply(error=f"{node_name(self.rank)} has {how}"))

    def _ended(self, task: Task) -> None:
        """Do nothing: the call has reported its own end."""

    def _post(
        self, to: Address, tag: str, array: Array | None, note: AnyNote | None, reply_to: int = 0, copied: bool = False
    ) -> int:
        if not reply_to and "/" not in tag:
            tag += self._channel
        if note is None and (kind := note_kind(self.notes, tag, reply_to)) is not None:
            note = kind()
        if isinstance(note, Encoded) and not reply_to and self._channel in self._calls:
            note = msgspec.structs.replace(note, call=self._calls[self._channel].what)
        return super()._post(to, tag, array, note, reply_to, copied)
