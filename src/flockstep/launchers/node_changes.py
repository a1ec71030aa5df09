"""Changes of a run's nodes while the run goes on: workers leave and join, and lost processes of servers are
replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass

from flockstep.errors import FlockstepError, RunError
from flockstep.launchers.checkpoints import CALLED, Checkpointer
from flockstep.launchers.hosts import NONE_JOINS, OtherHosts
from flockstep.launchers.join_requests import JoinRequests
from flockstep.launchers.newcomers import Newcomers
from flockstep.launchers.peers import Change, Outcome, RunPeers
from flockstep.launchers.wait_monitor import on_stderr
from flockstep.messages import Address, node_name
from flockstep.records.config import RunConfig

LEAVE_AGAIN = 10.0
"""Seconds after which workers try again to leave the run, if no checkpoint could be written before they left."""


@dataclass(frozen=True)
class Members:
    """Who may join a run, and how its workers have changed so far."""

    requests: JoinRequests
    newcomers: Newcomers
    """The processes in which workers that join start."""
    joining: Set[int] = frozenset()
    """Ranks of workers that join from now on, without which the run continues if they are lost before all nodes are
    ready.
    """
    epoch: int = 0
    """Number of changes of the workers so far."""
    went: float | None = None
    """When the run began, on the monotonic clock, if the workers go on with what their processes hold."""
    step: int = 0
    """The step from which they go on."""
    ends: str = ""
    """Why the run ends with a checkpoint as soon as it goes on; empty if it does not."""
    hear_rest: Callable[[], None] = lambda: None
    """Keeps what they still send to the supervisor of the workers before."""
    back_to: int | None = None
    """Smallest step of a checkpoint from which the run continues when a server is lost; None: a lost server ends the
    run.
    """


class NodeChanges:
    """Decides when the nodes of a run change, and makes all nodes stop and save their states before the change."""

    _renewing = ""
    """Sentence on the lost process of a server, in whose place another is to be started; empty if there is none."""
    _cutting = False
    """Whether all nodes are asked to stop with their states, so that workers can leave and join."""
    _leave_again: float | None = None
    """Time of the monotonic clock at which workers that could not leave the run try again; None: no attempt failed."""

    def __init__(
        self,
        peers: RunPeers,
        outcome: Outcome,
        config: RunConfig,
        checkpoints: Checkpointer | None,
        hosts: OtherHosts,
        members: Members,
    ):
        """See `Supervisor` for the arguments."""
        self._peers, self._outcome, self._checkpoints, self._hosts = peers, outcome, checkpoints, hosts
        self._requests, self._newcomers = members.requests, members.newcomers
        self._least, self._most = config.min_workers, config.max_workers
        self._joining, self._back_to, self._began_at_once = members.joining, members.back_to, members.went is not None
        self._ends, self._leavers = members.ends, set[int]()
        self._losses: list[str] = []
        """Clauses about the lost nodes without which the run is about to continue."""

    def end(self) -> None:
        """Refuse every later request of a worker to leave, because the run ends."""
        self._least = None

    def replace(self, text: str) -> None:
        """Start another process in place of a lost process of a server, if the run has checkpoints; `text` describes
        the loss.
        """
        if self._back_to is not None:
            self._renewing = text

    def look(self) -> None:
        """If workers leave or join, or a lost process is to be replaced, take a checkpoint, and change the nodes once
        it is complete.

        Raises:
            KeyboardInterrupt: too few workers are left, so that the run ends.
        """
        if self._ends and self._peers.running:
            raise KeyboardInterrupt(self._ends)
        checkpoints = self._checkpoints
        if checkpoints is None or not self._peers.running or self._outcome.change is not None:
            return
        if self._leavers and self._at_once():
            self._change("", 0, at_once=True)
            return
        missing = "" if checkpoints.at_intervals or self._most is None else checkpoints.missing
        if missing and self._peers.least_step >= CALLED:
            text = f"--max-workers has no effect so far, because {missing}; call it at the top of the loop over batches"
            self._outcome.warn(text, on_stderr)
        joiners = self._joiners()
        if not (self._leavers or joiners or self._renewing):
            return
        if not self._cutting and (joiners or self._leave_again is None or time.monotonic() >= self._leave_again):
            self._cutting = True
            checkpoints.cut()
        if self._cutting and checkpoints.is_cut:
            # In the middle of a pass, a worker that joins would get other batches than those that were dealt.
            at_once = self._at_once() and not (self._renewing or checkpoints.deals)
            self._change(self._renewing, joiners, at_once)
        elif self._cutting and checkpoints.is_cut is False:
            # The run is about to end, a node was lost, or the disk is full: workers that asked to leave try again.
            self._cutting = False
            why = checkpoints.why_not or "the nodes continued before their states were saved"
            self.refuse_joiners(why)
            for rank in sorted(self._leavers):
                self._outcome.warn(f"{node_name(rank)} did not leave after SIGTERM: {why}", on_stderr)
            self._leave_again = time.monotonic() + LEAVE_AGAIN

    @property
    def _staying(self) -> int:
        """Number of workers that live and have not asked to leave, nor has another one that holds their replica."""
        return self._whole(set(self._peers.view.ranks) - self._leavers)

    def _whole(self, ranks: set[int]) -> int:
        """Number of workers among `ranks` whose replicas are held by workers among `ranks` alone."""
        return sum(ranks.issuperset(self._replica(rank)) for rank in ranks)

    def _replica(self, rank: int) -> range:
        """The workers that hold a replica together with worker `rank`."""
        first, parts = rank - rank % self._outcome.parts, self._outcome.parts
        return range(first, first + parts)

    def _joiners(self) -> int:
        """Number of workers that can take part now, because their processes, here or elsewhere, have built the job."""
        try:
            here = self._requests.workers if self._newcomers.ready() else 0
        except RunError as error:
            self.refuse_joiners(str(error))
            here = 0
        return here + self._hosts.prepared

    def refuse_joiners(self, why: str) -> None:
        """Refuse all workers that are about to join, and end their processes."""
        self._newcomers.end()
        self._requests.refuse(f"no worker can join now: {why}")
        self._hosts.refuse_joiners(f"no worker can join now: {why}")

    def _change(self, loss: str, joined: int, at_once: bool = False, ends: str = "") -> None:
        """Continue without the workers that leave or were lost, and with those that join; `loss`: a clause about a lost
        node, which is added to those of other losses, or empty. `at_once`: no process goes back to a checkpoint.
        `ends`: why the run then ends with a checkpoint.
        """
        if joined > self._hosts.prepared:
            self._requests.admit()
        self._losses.append(loss)
        names = " and ".join(node_name(rank) for rank in sorted(self._leavers))
        left = f"{names} left after SIGTERM" if names else ""
        text = f"{joined} worker{'s' * (joined > 1)} joined" if joined else ""
        reason = ", and ".join(filter(None, (*self._losses, left, text)))
        gone = self._leavers | (set(range(self._peers.workers)) - set(self._peers.view.ranks))
        newest = None if self._checkpoints is None else self._checkpoints.newest
        renamed = newest is not None and bool(newest.lost)
        self._outcome.change = Change(gone, reason, joined, renamed, at_once, ends and f"{reason}, and {ends}")

    def _at_once(self) -> bool:
        """Whether the scripts that live can go on from the step in hand, with what their processes hold."""
        if self._peers.went is None:
            return self._began_at_once
        links = self._peers.links.values()
        alone = not (self._peers.several or self._peers.done or any(link.beside for link in links))
        return alone and bool(links) and all(link.hello.repeats for link in links)

    def look_for_requests(self) -> None:
        """Start the processes of workers that want to join the run."""
        if self._most is None or not self._peers.running or self._cutting:
            return
        if self._checkpoints is not None and self._checkpoints.missing and self._peers.least_step == 0:
            return  # the script may still call flockstep.checkpoint for the first time, as its first step begins
        try:
            if self._requests.take(lambda workers: self._why_not_joined_by(workers + self._hosts.joining)):
                self._newcomers.invite(self._requests.workers)
        except RunError as error:
            self.refuse_joiners(str(error))

    def why_no_host_joins(self, workers: int) -> str:
        """Return why `workers` workers of another host cannot join now; an empty text if they can."""
        if self._most is None:
            return NONE_JOINS
        if not self._peers.running or self._cutting:
            return "no worker can join just now, because the run is starting, ending or changing its workers; try again"
        return self._why_not_joined_by(workers + self._hosts.joining + self._requests.workers)

    def let_leave(self, ranks: Collection[int]) -> bool:
        """Let workers leave because their host is stopped; return whether the run continues without them."""
        leavers = self._leavers | set(ranks)
        if self._least is None or self._checkpoints is None or not self._peers.running:
            return False
        if self._why_not_with(self._whole(set(self._peers.view.ranks) - leavers)):
            return False
        self._leavers = leavers
        return True

    def _why_not_joined_by(self, workers: int) -> str:
        """Why this number of workers cannot join now; empty if they can."""
        if self._peers.done:
            return "no worker can join, because a worker has taken its last step"
        if self._checkpoints is not None and (missing := self._checkpoints.missing):
            return (
                f"no worker can join, because {missing}; let the script call flockstep.checkpoint at the top of its "
                "loop"
            )
        if workers % self._outcome.parts:
            return f"{self._outcome.parts} workers hold a replica together, so that they join together, got {workers}"
        total = self._staying + workers
        if self._most is not None and total > self._most:
            return f"the number of workers must be <= --max-workers {self._most}, got {total}; let fewer workers join"
        why = self._why_not_with(total)
        return f"the number of workers cannot become {total}: {why}" if why else ""

    def ask_to_leave(self, address: Address) -> None:
        """Ask a worker to leave the run, because a signal was received.

        Raises:
            KeyboardInterrupt: too few workers are left, so that the run ends.
        """
        if self._least is None or self._checkpoints is None or self._peers.over or address in self._leavers:
            return
        leavers = self._replica(address)
        if why := self._why_not_with(self._staying - len(leavers)):
            raise KeyboardInterrupt(f"{node_name(address)} left after SIGTERM, and {why}")
        self._leavers.update(leavers)

    def _why_not_with(self, workers: int) -> str:
        """Why the run cannot continue with this number of workers; empty if it can."""
        if self._least is not None and workers < self._least:
            return f"the {workers} remaining workers are fewer than --min-workers {self._least}"
        return self._why_impossible_with(workers)

    def _why_impossible_with(self, workers: int) -> str:
        """Why no run can go on with this number of workers under the strategy; empty if one can."""
        if workers < 1:
            return "no worker is left"
        try:
            if self._outcome.strategy is not None:
                self._outcome.strategy.check(workers // self._outcome.parts)
        except FlockstepError as error:
            return str(error)
        return ""

    def is_new(self, address: Address) -> bool:
        """Whether a worker has joined and taken no step yet, so that the run can do without it."""
        return address in self._joining and self._peers[address].step == 0

    def goes_on_after(self, address: Address, reason: str) -> bool:
        """Let the run continue after the loss of a server, or of a worker that its strategy needs, with the step in
        hand or from the newest checkpoint; return whether it can.
        """
        newest = None if self._checkpoints is None else self._checkpoints.newest
        new = all(map(self.is_new, self._peers.missed))
        may = self._least is not None or new
        at_once = may and address >= 0 and self._at_once()
        if (newest is None and not at_once) or address in self._peers.done:
            return False
        began, strategy, ends = self._peers.went is not None, self._outcome.strategy, ""
        change = self._outcome.change  # of another node that was lost just now
        joined = change.joined if change is not None else self._joiners() if began and not at_once else 0
        if address < 0:
            if change is not None:  # servers are started again anyway
                return True
            some_died = len(self._peers.view.ranks) < self._peers.workers
            if newest is None or self._back_to is None or not began or some_died:
                return False
            if min(newest.steps.values()) < self._back_to:
                return False
        else:
            # Before all nodes are ready, every strategy needs all workers; but those that join may be lost again.
            survives = strategy is not None and strategy.traits.deaths(self._peers.workers) >= len(self._peers.missed)
            if survives and began:
                return False
            if not may:
                return False
            ends = self._why_not_with(self._staying + joined)
            # Too few for --min-workers can still complete the step in hand, so that nothing is lost.
            saved = at_once and self._checkpoints is not None and not self._checkpoints.missing
            if ends and (not saved or self._why_impossible_with(self._staying)):
                return False
        self._change(reason, joined, at_once, ends)
        return True
