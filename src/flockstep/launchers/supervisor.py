"""Watches the processes of a run: what they say, and which of them take their turn, are lost, leave or join."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

import msgspec

from flockstep.errors import (
    ConfigurationError,
    FlockstepError,
    Interrupted,
    PeerLost,
    ProtocolError,
    RunError,
    in_short,
    of_kind,
)
from flockstep.launchers.admission import Admission
from flockstep.launchers.checkpoints import Checkpointer
from flockstep.launchers.children import ENDED, Child, how_it_ended, kill_all, reap, refuse_program_of
from flockstep.launchers.collection import Collection
from flockstep.launchers.comparisons import Comparisons
from flockstep.launchers.gathering import link_timeout_of
from flockstep.launchers.join_requests import JoinRequest
from flockstep.launchers.node_changes import Members, NodeChanges
from flockstep.launchers.peers import SETTLING, Outcome, ProcessLink, successor
from flockstep.launchers.signals import undisturbed
from flockstep.launchers.wait_monitor import WaitMonitor, on_stderr
from flockstep.links.control import Control, Frames
from flockstep.messages import Address, AnyNote, Fields, Message, node_name
from flockstep.records import owner
from flockstep.records.config import RunConfig
from flockstep.records.events import LostEvent
from flockstep.records.failpoints import reach
from flockstep.runtime.member import AGAIN, WINDOW, Failure, Hello, NodeLost, NodeSpec

GRACE = 3.0
"""Seconds that processes have to end by themselves after a failure, before they are killed."""
LAST_CODE = 15.0
"""Seconds that processes have after a failure if a script has ended without `finish()`; an interpreter with PyTorch
takes several seconds to end on a busy machine.
"""
TURN = 4 * WINDOW
"""Maximum number of messages of one node that are handled before those of the next node, so that no node can block the
others.
"""
LAST_CHECKPOINT = 10.0
"""Maximum number of seconds for the checkpoint that is taken when a signal stops the run."""
LAST_POLL = 0.005
"""Seconds between two polls of processes that are about to end."""
POLL = 0.05
"""Seconds between two polls of the processes."""
MOMENT = 0.1
"""Seconds after a loss within which the deaths of other nodes belong to the same change of the nodes: a host or a user
who kills several processes does not kill them in one instruction.
"""


class LaterCalls(Protocol):
    """Begins and ends the calls of `distribute` after the first one in the processes of a run of scripts."""

    def begin_call(self, first: Supervisor, number: int) -> Supervisor:
        """Return the supervisor of a later call, from that of the first call and the number of the call, from 2."""

    def end_call(self, number: int, outcome: Outcome) -> None:
        """Handle the outcome of a later call, whose nodes have left, or of which the whole run has ended."""


class Supervisor:
    """Watches the processes of a run, and of each call of `distribute` in them. `Admission` lets the processes in, and
    `Collection` keeps what they send.
    """

    _lost_at = -math.inf
    """Time of the last loss of a node, in seconds of the monotonic clock."""
    _released = False
    """Whether a later call has ended, and its sockets and files are closed."""

    def __init__(
        self,
        config: RunConfig,
        admission: Admission,
        collection: Collection,
        members: Members,
        calls: LaterCalls,
        checkpoints: Checkpointer | None = None,
        first: Supervisor | None = None,
    ):
        """Args:
        config: the run's configuration.
        admission: lets the processes in.
        collection: keeps what they send.
        members: how the workers have changed so far, and who joins.
        calls: begins and ends the later calls of `distribute`.
        checkpoints: takes the run's checkpoints, and knows where the run begins; None: there are none.
        first: the supervisor of the first call, if this is a later call; the first one watches the processes.
        """
        self.admission, self.members, self.peers, self.outcome = admission, members, admission.peers, collection.outcome
        self._executable, self._hosts = admission.executable, admission.hosts
        self.collection, self._calls_of, self._checkpoints = collection, calls, checkpoints
        self._grows = config.max_workers is not None
        self._changes = NodeChanges(self.peers, self.outcome, config, checkpoints, self._hosts, members)
        self._calls: list[Supervisor] = [self] if first is None else first._calls
        """Supervisors of the calls of `distribute` that the scripts have begun."""
        self._number = 1 if first is None else len(self._calls) + 1
        interruption = 0.0 if self._hosts.here else 2 * link_timeout_of(config)
        self._wait_monitor = WaitMonitor(
            config.workers, config.step_timeout, joins=self._executable.joins, interruption=interruption
        )
        self._comparisons = Comparisons(config.workers, lambda: self.outcome.strategy, config.processes_of_replica)
        self._open = ExitStack()
        self._failed: dict[Address, float] = {}
        """Workers that have reported an error → time until which another process of the replica may be found dead."""
        self._failing: list[tuple[Address, str, str, str]] = []
        """Errors of these workers, which may be due to such a death, as kind, reason and traceback."""

    # The whole run: the first call's supervisor alone does this.

    def run(self) -> Outcome:
        """Start the processes, wait for the end, and tell the nodes that the run has ended.

        Errors of the run are never raised, but stored in `outcome.error`.
        """
        try:
            self._hosts.why_not_join, self._hosts.let_leave = self._changes.why_no_host_joins, self._changes.let_leave
            self.admission.open(self._open)
            if self._grows:
                self._open.enter_context(self.members.requests.open(self.admission.control.address))
            self._watch()
            if self.outcome.change is not None:
                self._stop_for(self.outcome.change.gone, self.outcome.change.reason)
                return self.outcome
            reach("run.ended")
        except FlockstepError as error:
            if isinstance(error, PeerLost):
                error.args = (f"{error}{self._resumable()}",)
            self.outcome.error = error
        except KeyboardInterrupt as stop:
            where = self._last_checkpoint()
            begun = self.peers.went is not None
            kept = "everything computed so far is in the record" if begun else "no worker had begun to train"
            self.outcome.error = Interrupted(f"{str(stop) or 'interrupted'}; {kept}{where}")
        except Exception as error:  # noqa: BLE001 - of the system: no folder for the sockets, no more processes, …
            self.outcome.error = RunError(f"the run could not be supervised: {in_short(error)}")
            self.outcome.error.__cause__ = error
        try:
            self._end_all(self.outcome.error)
        except KeyboardInterrupt:  # a second request to end
            kill_all(self._processes())
            why = self.outcome.error = self.outcome.error or Interrupted("interrupted after the run had ended")
            self._hosts.close(str(why), why.exit_code)
        if self._hosts.rejected:
            many = f"{self._hosts.rejected} connections to the coordinator's port were rejected"
            self.outcome.warnings.append(many)
        self._clean_up()
        self._changes.refuse_joiners("the run ended before the workers joined it")
        return self.outcome

    @property
    def failed_later(self) -> bool:
        """Whether the run failed in a later call to `distribute`, after the first call's run had succeeded."""
        return self.peers.over and not all(one.peers.over for one in self._calls)

    @property
    def checkpoints(self) -> Checkpointer | None:
        """What takes the run's checkpoints; None if there are none."""
        return self._checkpoints

    def begin_again(self, rank: int, node_spec: NodeSpec, config: str) -> Child | None:
        """Give the process of a worker the node specification with which it continues; return the process, or None if
        it is not connected.
        """
        one = self.peers[rank]
        if one.link is None:
            return None
        one.link.tell(AGAIN, {"spec": msgspec.json.encode(node_spec).decode(), "config": config, "wait": 0})
        child, one.child = one.child, None
        assert child is not None
        return child

    def _stop_for(self, gone: set[int], reason: str) -> None:
        """Let the processes that go on wait for the run with other workers, or end scripts, which begin again then."""
        change = self.outcome.change
        if self._executable.script and not (change is not None and change.at_once):
            self._end_all(Interrupted(f"the script begins again with other workers: {reason}"))
            self._clean_up()
            return
        for address, one in self.peers.items():  # the workers that stay wait until the run continues; all others end
            if one.link is not None:
                stays = address >= 0 and address not in gone
                one.link.tell(AGAIN, {"spec": "", "config": "", "wait": int(stays)})
            elif one.child is not None:
                one.child.kill()
        # Nobody accepts here any more: who asks to join meanwhile asks again where the next supervisor listens.
        self.admission.control.close()

    def hear_rest(self) -> None:
        """Keep the events that nodes sent before they left for a change; a snapshot that not all of them sent is
        dropped.
        """
        for link in self.peers.links.values():
            with contextlib.suppress(ProtocolError):
                while (message := link.receive()) is not None:
                    if message.tag not in ("snapshot", "part"):
                        self.collection.take(message, link)

    def close(self) -> None:
        """End the remaining processes of a run that continues with other workers, and close the connections."""
        kill_all(self._processes())
        self._clean_up()

    def _watch(self) -> None:
        """Handle messages until every remaining node has sent its final parameters and has been dismissed.

        The processes of scripts may begin further calls of `distribute` until they end.

        Raises:
            RunError: a node failed, or was lost and the others cannot continue without it.
        """
        shown = 0.0
        while not all(one.peers.over for one in self._calls) or not self._no_further_call():
            self._poll()
            with undisturbed():  # half a message would look like a broken protocol
                for one in list(self._calls):
                    one._turn()
                self._changes.look()
            # A change of the nodes includes all deaths of one moment, also those that are only about to show.
            settled = time.monotonic() - self._lost_at >= MOMENT and not self.peers.dying()
            if self.outcome.change is not None and settled and self._all_hear():
                return
            if time.monotonic() - shown > 0.25:
                shown = time.monotonic()
                self._current().collection.show()
                owner.check(self.collection.record)
                self._changes.look_for_requests()
        self._current().collection.show()

    def _all_hear(self) -> bool:
        """Whether all workers that live can be told of a change; a script takes its step to the end before it meets the
        others again.
        """
        change = self.outcome.change
        alone = [one for rank, one in self.peers.items() if rank >= 0 and not one.gone and one.link is None]
        return not (alone and change is not None and change.at_once)

    def _current(self) -> Supervisor:
        """The supervisor of the first call whose run is not over; if all are, that of the last call."""
        return next((one for one in self._calls if not one.peers.over), self._calls[-1])

    def _no_further_call(self) -> bool:
        return not self._executable.script or all(map(self.peers.ended, range(self.peers.workers)))

    @property
    def _open_calls(self) -> list[Supervisor]:
        """The calls whose nodes may still send messages, the first one included."""
        return [one for one in self._calls if not one._released]

    def _poll(self) -> None:
        """Handle the messages of all calls' nodes."""
        if self.peers.went is None:
            self.members.hear_rest()
        self._hosts.require_running()
        if self._wait(LAST_POLL if all(one.peers.over for one in self._calls) else POLL):
            with undisturbed():  # half a message would look like a broken protocol
                for words, frames in self._heard():
                    self._accept(words, frames)
                for one in self._open_calls:
                    for link in one.peers.links.values():
                        one._hear(link, TURN)

    def _wait(self, seconds: float) -> bool:
        """Wait up to `seconds` until something has arrived from a node, or from another host."""
        links = [link for one in self._calls for link in one.peers.links.values()]
        sources = [one.frames for link in links for one in (link, link.beside) if one is not None]
        descriptors = self._hosts.descriptors()
        arrived = self.admission.control.wait(sources, 0.0 if self._hosts.waiting else seconds, descriptors)
        with undisturbed():
            Control.flush(sources)
            self._hosts.pump()
        return arrived or self._hosts.waiting

    def _heard(self) -> Iterator[tuple[bytes, Frames]]:
        """The first messages of processes that have connected, on this host or on another one."""
        yield from self.admission.control.heard()
        yield from self._hosts.heard()

    def _accept(self, data: bytes, frames: Frames) -> None:
        """Let a process in that has said which one it is; close the connection of any other."""
        words, joined = None, False
        with contextlib.suppress(ValueError, RecursionError):
            words = msgspec.msgpack.decode(data, type=Hello | Failure | JoinRequest)
        if isinstance(words, JoinRequest):
            self.members.requests.hear(words, frames)
            return
        for one in self._open_calls:
            if words is not None and words.run == one.admission.spec.run and words.address in one.peers:
                if isinstance(words, Failure):
                    frames.close()
                    one._fail(words.address, words.kind, words.reason, words.trace)
                joined |= one.admission.hello(words, frames, one._open)
        if not joined:
            frames.close()

    # The end of a run: a last checkpoint, and processes that do not end by themselves.

    def _last_checkpoint(self) -> str:
        """Take a checkpoint, because a signal ends the run; return where the run goes on, for a sentence."""
        checkpoints = self._checkpoints
        if checkpoints is None or checkpoints.unused:
            return ""
        self._changes.end()
        why = self._why_no_checkpoint(checkpoints)
        missing = f"; no checkpoint was taken at the end, because {why}" if why else ""
        if checkpoints.newest is None:
            return "" if self.peers.went is None else missing
        return f"{missing}{self._resumable()}, the step of the previous checkpoint" if why else self._resumable()

    def _resumable(self) -> str:
        """The command that continues the run from its newest checkpoint, for a sentence; nothing if there is none."""
        kept = None if self._checkpoints is None else self._checkpoints.newest
        if kept is None:
            return ""
        return f"; flockstep resume {self.collection.record} continues from step {min(kept.steps.values())}"

    def _why_no_checkpoint(self, checkpoints: Checkpointer) -> str:
        """Take a checkpoint, because a signal ends the run; return why there is none, and nothing if there is one."""
        began = time.monotonic()
        if self.peers.went is None:
            return "training had not begun"
        # A worker that has not come to the end of a step after five steps of mean length hangs.
        step = (began - self.peers.went) / max(self.peers.least_step, 1)
        try:
            if self._finished():
                return "all workers had taken their last step"
            checkpoints.stop()
            while checkpoints.busy:
                most = min(max(5 * step, 1.0), LAST_CHECKPOINT) if checkpoints.stopping else LAST_CHECKPOINT
                if time.monotonic() >= began + most:
                    what = "not all workers had stopped" if checkpoints.stopping else "it was not written"
                    return f"{what} within {most:.2g} s"
                self._poll()
                self._look_after_processes()
        except FlockstepError as error:
            return str(error)
        except KeyboardInterrupt:
            return "a second signal ended the run at once"
        return checkpoints.why_not

    def _end_all(self, error: FlockstepError | None) -> None:
        """After a failure, ask all processes to end, keep what they still send, and kill those that do not
        end in time.
        """
        if error is not None:
            self.collection.keep_own_flight()
            for call in self._calls:
                for address, one in call.peers.items():
                    if one.link is not None:
                        refused = int(isinstance(error, ConfigurationError))
                        one.link.tell("stop", {"reason": str(error)[:2000], "refused": refused})
                    elif one.child is not None and (call is self or address < 0 or one.asked):  # it is about to join
                        one.child.kill()
        patience = GRACE if error is not None or not self._executable.script else None
        if error is not None and any(p.unfinished is not None for one in self._calls for p in one.peers.values()):
            patience = LAST_CODE  # the exit code of such a script says why the run has ended
        deadline = math.inf if patience is None else time.monotonic() + patience
        last = deadline + 2 * GRACE
        while not all(one.peers.ended(address) for one in self._calls for address in one.peers):
            if time.monotonic() > last:
                self._hosts.abandon()
            if time.monotonic() > deadline:
                kill_all(self._processes())
                if all(child.exit_code() is not None for child in self._processes()):
                    break  # the others are not processes of this host: their links are closed
                deadline += 1.0
            self._collect(LAST_POLL)
        self._collect(0.0)
        if self._executable.script and (error is None or isinstance(error, PeerLost)):
            self._check_exits()

    def _processes(self) -> list[Child]:
        """The processes of all calls' nodes."""
        return [*{id(child): child for one in self._calls for child in one.peers.children.values()}.values()]

    def _collect(self, seconds: float) -> None:
        """Store what nodes send while the run ends, for about `seconds`."""
        if not (self._processes() or self.peers.links) or not self._wait(seconds):
            return
        for _, frames in self._heard():
            frames.close()  # no process can join any more
        for one in self._open_calls:
            for link in one.peers.links.values():
                with contextlib.suppress(ProtocolError, RunError):
                    while (message := link.receive()) is not None:
                        if message.tag in ("events", "snapshot", "part", "done", "flight", "tape"):
                            one._handle(message)

    def _clean_up(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.end(failed=self.outcome.error is not None)
        reap(self._processes(), GRACE, self._hosts.pump)
        for one in self._open_calls[1:]:
            one.outcome.error = None if one.peers.over else self.outcome.error
            try:
                one._release()
            except FlockstepError as error:
                self.outcome.error = self.outcome.error or error
        self._open.close()

    def _check_exits(self) -> None:
        """Name a script that has failed by its exit code, rather than what its end led to on other workers."""
        for one in self._calls:
            for address, child in one.peers.children.items():
                code = child.exit_code()
                if code in (0, None, ENDED) or any(
                    call.peers[address].gone for call in self._calls if address in call.peers
                ):
                    continue
                step = one.peers[address].unfinished
                when = "the run had ended" if step is None else f"step {step}, before optimizer.finish()"
                if self.outcome.error is None or (step is not None and code > 0):
                    self.outcome.error = RunError(f"{node_name(address)} {how_it_ended(code)} after {when}")

    # A call of `distribute`: each call's supervisor does this for the nodes of the call.

    def _ask_for_call(self, rank: int, number: int) -> None:
        """A worker calls `distribute` for the second time, or for a later one: let it say hello."""
        if not self._executable.script or not 2 <= number <= len(self._calls) + 1:
            raise ProtocolError(f"a worker began call {number} of distribute, but call {len(self._calls) + 1} is next")
        if number == len(self._calls) + 1:
            later = self._calls_of.begin_call(self, number)
            for address in range(self.peers.workers):
                later.peers[address].child = self.peers[address].child
            later.admission.open(later._open)
            self._calls.append(later)
            self.peers.several = True
        call = self._calls[number - 1]
        call.peers[rank].asked = True
        here = not self._hosts.has(rank)  # on another host the agent's folder serves all calls
        self.peers.link(rank).tell("call", {"directory": str(call.admission.directory)} if here else None)

    def _release(self) -> None:
        """Close the sockets and files of a later call that has ended, and report its outcome."""
        if self._released:
            return
        self._released = True
        for link in self.peers.links.values():
            self._hear(link)  # its last messages
        self._open.close()
        for address, one in self.peers.items():
            one.link = None
            if address < 0 and one.child is not None and not one.child.exit_code():
                one.child = None
        self._calls_of.end_call(self._number, self.outcome)
        self.collection.forget()

    def _turn(self) -> None:
        """Look for lost and late nodes of this call, and dismiss its nodes once all have finished."""
        if self.peers.over:
            servers = [child for address, child in self.peers.children.items() if address < 0]
            ended = self._number > 1 and all(child.exit_code() is not None for child in servers)
            if ended and all(map(self.peers.left, self.peers)):
                self._release()
            return
        self._look_after_processes()
        if self.outcome.change is not None:  # of nodes that were lost just now
            return
        gone = self.peers.gone
        self._wait_monitor.look(self.peers.links, self.peers.done | gone, gone)
        self._tell_early_ends()
        if not self._finished():
            if self._checkpoints is not None:
                with undisturbed():
                    self._checkpoints.look(self.peers.least_step)
            return
        assert self.outcome.strategy is not None
        for address in self.peers.missed - self.peers.done:  # the others may have finished too when this node was lost
            if address < 0 or not self.outcome.strategy.traits.survives:
                raise PeerLost(self.outcome.lost[address].reason)
        # Scripts that ended early count as lost, so that the result is that of the other workers; but if no script
        # calls finish(), an early end may be meant.
        if any(one.unfinished is None for rank, one in self.peers.items() if rank >= 0 and one.done):
            for rank, one in self.peers.items():
                if one.early:
                    since = time.monotonic() - (self.peers.went or 0.0)
                    self.outcome.lost[rank] = LostEvent(since, rank, one.early)
        self.collection.dismiss()
        self.peers.over = True

    def _finished(self) -> bool:
        expected = {address: one for address, one in self.peers.items() if not one.gone}
        if not any(address >= 0 for address in expected):
            raise PeerLost("every worker was lost: " + "; ".join(one.reason for one in self.outcome.lost.values()))
        return any(one.ready for one in self.peers.values()) and all(one.done for one in expected.values())

    def _hear(self, link: ProcessLink, most: int = -1) -> None:
        """Handle the messages of a node that have arrived, at most `most` of them."""
        try:
            while most and (message := link.receive()) is not None:
                step = self.peers[link.address].step
                self.collection.flight.note("receive", link.address, message.tag, step)
                self._handle(message)
                most -= 1
        except ProtocolError as error:
            if not self.peers[link.address].gone:
                self._lose(link.address, f"{node_name(link.address)} broke the protocol: {error}")

    def _handle(self, message: Message) -> None:
        address, note, heard = message.source, message.note, time.monotonic()
        match message.tag:
            case "clock":
                self.peers.link(address).tell("clock", {"heard": heard, "answered": time.monotonic()})
            case "ready":
                self._be_ready(address)
            case "call":
                self._ask_for_call(address, int(note["number"]))
            case "communicator":
                self.admission.communicator_met(address)
            case "events" | "flight" | "snapshot" | "part" | "tape":
                self._keep(message)
            case "waiting":
                self._wait_monitor.hear(address, note)
            case "gradient" | "data" | "settings":
                self._comparisons.hear(message)
            case "unfinished" | "done" | "left":
                self._leave(address, message.tag, int(note["step"]))
            case "checkpoint":
                self._hear_of_checkpoint(address, note)
            case "leave" | "quarantine":
                self._remove(address, note)
            case "failed":
                self._fail(address, str(note["kind"]), str(note["reason"]), str(note["trace"]))

    def _keep(self, message: Message) -> None:
        """Keep what a node reports; a worker's step shows, in every call, that it does not wait."""
        address = message.source
        if self.collection.take(message, self.peers.link(address)):
            self._wait_monitor.hear(address, {"step": self.peers[address].step})
            for call in self._calls:
                call._wait_monitor.note_sign(address)

    def _hear_of_checkpoint(self, address: Address, note: Fields) -> None:
        if self._checkpoints is not None:
            self._checkpoints.hear(address, note)
            return
        text = (
            "flockstep.checkpoint takes no checkpoints in this run, because flockstep launch has not started its "
            "processes from a script"
        )
        self.outcome.warn(text, on_stderr)

    def _leave(self, address: Address, how: str, step: int) -> None:
        """Handle a node whose script or program has ended, or that takes no more steps."""
        one = self.peers[address]
        if how == "unfinished":
            one.unfinished = step
            return
        if how == "done":
            one.done, one.state, one.step = True, "done", step
        self._tell_others("left", address, {"address": address, "step": step, "how": self._how_left(address, step)})

    def _remove(self, address: Address, note: Fields) -> None:
        """A node asks to leave, or, if there is a note, to put a worker in quarantine."""
        if not note:
            self._changes.ask_to_leave(address)
            return
        worker = int(note["address"])
        if worker < 0 or 0 <= address != worker:
            raise ProtocolError(
                f"{node_name(address)} asks to put {node_name(worker)} in quarantine, but only a server or the worker "
                "itself may do that"
            )
        self.peers[worker].condemned = str(note["reason"])

    def _be_ready(self, address: Address) -> None:
        """Let the run begin once all nodes are ready."""
        if not self.admission.ready(address):
            return
        # A script may open sockets of a communicator in the folder later, and joiners send their requests there.
        if not self._executable.script and not self._grows:
            # All are connected, so even a killed supervisor leaves no sockets behind.
            shutil.rmtree(self.admission.directory, ignore_errors=True)
        resumed = None if self._checkpoints is None else self._checkpoints.resumed
        strategy, began = self.outcome.strategy, self.admission.began
        assert strategy is not None
        assert began is not None
        since = began - (0.0 if resumed is None else resumed.manifest.seconds)
        went = self.peers.went = since if self.members.went is None else self.members.went
        if self._checkpoints is not None:
            self._checkpoints.begin(self.peers, strategy, self.peers.cluster, self.outcome.parts)
        self._wait_monitor.begin(bool(strategy.traits.results))
        self.collection.begin(self._open)
        for address, link in self.peers.links.items():
            self.peers[address].state = "running"
            link.tell("go", {"at": went})
        step = self.members.step if resumed is None else min(resumed.manifest.steps.values())
        text = f"the run continues with {self.peers.workers} workers from step {step}"
        self.members.requests.confirm(text)
        self._hosts.confirm(text)

    def _fail(self, address: Address, kind: str, reason: str, trace: str) -> None:
        """End the run with the error of a node, unless it is a worker that has joined and taken no step yet, or that
        PyTorch has failed because another process of the replica died, which may show a moment later.
        """
        due = self._failed.setdefault(address, time.monotonic() + SETTLING)
        others = [one for one in self._same_replica(address) if one not in self._failed and not self.peers[one].done]
        if any(map(self.peers.ended, others)):
            return  # the run hears of the death next
        if others and self._executable.script and kind == RunError.__name__ and time.monotonic() < due:
            self._failing.append((address, kind, reason, trace))
            return
        if self._changes.is_new(address):
            self._lose(address, f"{node_name(address)} failed before its first step: {reason}")
            return
        earlier = [one for one in self._failing if one[0] in self._same_replica(address)]  # which has caused this one
        address, kind, reason, trace = [*earlier, (address, kind, reason, trace)][0]
        self.peers[address].state = "failed"
        raise of_kind(kind, reason, f"In {node_name(address)}:\n{trace}" if trace else "")

    def _how_left(self, address: Address, step: int) -> str:
        if self.peers[address].unfinished is not None:
            return f"the script of {node_name(address)} ended after step {step} without optimizer.finish()"
        return f"{node_name(address)} left after step {step}"

    def _tell_early_ends(self) -> None:
        """Say once of every script that has ended without `finish()` that another worker has taken more steps. If the
        strategy needs all workers, the other worker says so when it ends the run.
        """
        if not self._survived:
            return
        first = max(range(self.peers.workers), key=lambda rank: self.peers[rank].step)
        for rank, one in self.peers.items():
            if one.unfinished is not None and one.unfinished < self.peers[first].step and not one.early:
                one.early = f"{self._how_left(rank, one.unfinished)}, and {node_name(first)} went on"
                self.outcome.warn(one.early, on_stderr)

    @property
    def _survived(self) -> bool:
        """Whether the strategy continues without workers that are lost now."""
        strategy = self.outcome.strategy
        return self.peers.went is not None and strategy is not None and bool(strategy.traits.survives)

    def _look_after_processes(self) -> None:
        """Remove workers that are in quarantine, and notice processes that have failed or died."""
        failing, self._failing = self._failing, []
        for failure in failing:
            self._fail(*failure)
        for address, one in list(self.peers.items()):
            reason, one.condemned = one.condemned, ""
            if reason and one.link is not None and not one.done:
                self._hear(one.link)
                self._lose(address, reason)
            how = None if one.gone else self.peers.how_lost(address)
            if how is not None and one.link is not None:
                self._hear(one.link)  # its last messages
            if how is not None and not one.gone:
                self._lose(address, f"{how} at about step {one.step}" if one.step else how)

    def _lose(self, address: Address, reason: str) -> None:
        """Handle the loss of a node; the other workers of a lost worker's replica end with it if the others go on."""
        if self.outcome.parts > 1 and address >= 0:
            replica, part = divmod(address, self.outcome.parts)
            reason = f"{reason}; it held {self._executable.part_name(part)} of replica {replica}"
        if self._survived:
            self._lose_with(address)
        self._lose_node(address, reason)
        if self.outcome.change is not None:
            self._lose_with(address)

    def _lose_with(self, address: Address) -> None:
        """Lose the workers that hold a replica together with a worker that is lost."""
        for other in self._same_replica(address):
            if not self.peers[other].gone:
                why = f"{node_name(other)} ended with {node_name(address)}, a worker of the same replica"
                self._lose_node(other, why, quiet=True)

    def _same_replica(self, address: Address) -> list[Address]:
        """The other workers that hold parts of the replica of which worker `address` holds a part."""
        first = address // self.outcome.parts * self.outcome.parts
        return [one for one in range(first, first + self.outcome.parts) if one != address] if address >= 0 else []

    def _lose_node(self, address: Address, reason: str, quiet: bool = False) -> None:
        one, peers = self.peers[address], self.peers
        one.gone, one.state, self._lost_at = True, "lost", time.monotonic()
        if one.child is not None:
            one.child.kill()
        if one.link is not None:
            one.link.close()  # the node may only have been stopped: messages that it sends later belong to no run
            one.link = None
        self.collection.lose(address, reason)
        heir = successor(peers.cluster, address, peers.gone)
        if peers.went is not None and self.outcome.change is None and heir is not None:
            self._replace(address, reason, *heir)
            return
        self.collection.evaluation.lose(peers.cluster.logical(address))
        if peers.went is None and one.child is not None:
            refuse_program_of(one.child)
        peers.view = peers.view.without(address)
        goes_on = self._changes.goes_on_after(address, reason)
        if peers.went is None and not goes_on:
            raise PeerLost(f"{reason} before the run started")
        if self._checkpoints is not None:
            if goes_on:
                self._checkpoints.end()
            else:
                split = self.outcome.parts > 1 and not self._executable.script
                self._checkpoints.lose(address, None if split else one.step)
        if goes_on:
            return
        if self.outcome.change is not None:
            self.outcome.change = None
            raise PeerLost(reason)
        one.told = NodeLost(address, reason, peers.view)
        self.collection.keep_own_flight()
        traits = None if self.outcome.strategy is None else self.outcome.strategy.traits
        survives = traits is not None and traits.survives and traits.results
        if address >= 0 and peers.view.ranks and survives and not quiet:
            on_stderr(f"{reason}; {len(peers.view.ranks)} of {peers.workers} workers continue")
        self._tell_others("lost", address, one.told)

    def _replace(self, address: Address, reason: str, leads: Address, promoted: bool) -> None:
        """A process of a server is lost, and process `leads` of the server continues: tell all nodes."""
        how = ", its backup, continues in its place" if promoted else ", whose backup it was, continues"
        text = f"{reason}; {node_name(leads)}{how}"
        if promoted:
            self.peers[leads].done = False  # it has to send the result
        on_stderr(text)
        self.outcome.warnings.append(text)
        if self._checkpoints is not None:
            self._checkpoints.interrupt(f"{node_name(address)} was lost")
        self._changes.replace(text)
        told = self.peers[address].told = NodeLost(address, reason, self.peers.view, True)
        self.collection.keep_own_flight()
        self._tell_others("lost", address, told)

    def _tell_others(self, tag: str, address: Address, note: AnyNote) -> None:
        for other, link in self.peers.links.items():
            if other != address:
                link.tell(tag, note)
