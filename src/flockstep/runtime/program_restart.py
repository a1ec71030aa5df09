"""Restarts the programs of all nodes from a model that a script has replaced, and reads the state of servers for a
script.

A strategy's programs restart as at the start of a run. Every worker ends its program at its request for a gradient and
tells all other workers. When all workers have done so, each server ends its program and tells the other servers.
Messages in flight have then arrived, because messages between two nodes keep their order, and are dropped. Servers and
workers take the new parameters from rank 0, and no program begins before all nodes have dropped the old messages.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

import numpy as np

from flockstep.arrays.namespace import copied, to_host
from flockstep.arrays.schema import FlatArray
from flockstep.errors import PeerLost
from flockstep.messages import LEAVE, SCRIPT, Address, Fields, Message, Note, Notes, server
from flockstep.nodes import Node, Server, Worker
from flockstep.optimizers.base import OptimizerState
from flockstep.runtime.tracker import Tick, deciding
from flockstep.strategies.base import ResultPolicy, Strategy

CHANNEL = f"/{SCRIPT}servers"
"""Suffix of the tags of messages that `Loop.exchange("servers", …)` sends; a server's program does not receive these
messages.
"""
STOPPED, READ, RECALL = "stopped" + CHANNEL, "read" + CHANNEL, "recall" + CHANNEL


class OptimizerStateHeader(Note, frozen=True):
    """Scalars of an optimizer's state. Each slot, such as the momentum, follows in a message tagged with the slot's
    name.
    """

    steps: float
    numbers: dict[str, int | float]
    slots: tuple[str, ...]


class ProgramStopped(Note, frozen=True):
    """Note that a node's program has ended so that it can restart.

    Rank 0 gives the steps of the run so far, and new state for the servers' optimizers.
    """

    before: int = 0
    memory: OptimizerStateHeader | None = None


class Recall(Note, frozen=True):
    """Note that requests the state of a server's optimizer: its current state or, if `last` is set, its state at the
    end of the server's program.
    """

    last: bool = False


NOTES: Notes = {STOPPED: ProgramStopped, RECALL: Recall, f"reply to {RECALL}": OptimizerStateHeader}


def notes_of(strategy: Strategy) -> Notes:
    """Return message tag → type of the note in the run of a script: the notes of the strategy and those of this
    module.
    """
    return {**strategy.notes, **NOTES}


class ProgramRestart(Exception):
    """Raised inside a server's program to end the program so that it restarts."""


class ScriptRequests:
    """Answers requests that a script's driver sends to a server, while the server's program runs."""

    def __init__(self, node: Server, strategy: Strategy):
        self.stopped = False
        """Whether the program may not continue, because all workers have stopped theirs."""
        self.asked = False
        """Whether a request has arrived since the programs last began."""
        self._node = node
        node.notes = notes_of(strategy)
        self._strategy = strategy
        self._stopped: dict[Address, Message] = {}
        self._slots: dict[str, FlatArray] = {}
        self._reads: deque[Message] = deque()
        self._asked_for_the_end: list[Message] = []

    def hears(self, message: Message) -> bool:
        """Handle a message if it is a request of a script's driver, and return whether it was; if so, the server's
        program must not receive it.
        """
        if not message.tag.endswith(CHANNEL):
            return False
        self._node.mailbox.hear(message)
        self.asked = True
        if message.tag == STOPPED:
            self._stopped[message.source] = message
        elif message.tag in (READ, RECALL):
            last = message.tag == RECALL and message.note.last
            (self._asked_for_the_end if last else self._reads).append(message)
        else:
            self._slots[message.tag.removesuffix(CHANNEL)] = message.payload
        return True

    def attend(self, idle: bool) -> None:
        """Answer the requests of scripts while the server's program waits for a message.

        Raises:
            ProgramRestart: all nodes have stopped.
        """
        node = self._node
        while idle and self._reads:
            self._answer(self._reads.popleft())
        workers = set(range(node.cluster.workers)) - node.departed
        if not workers or not workers <= self._stopped.keys():
            return
        others = {server(index) for index in range(node.cluster.servers)} - {node.address}
        if not self.stopped:
            self.stopped = True
            node.send_all(sorted(others), STOPPED, None, ProgramStopped())
        if others <= self._stopped.keys():
            raise ProgramRestart

    def end(self) -> None:
        """Answer the requests that had to wait until the server's program ended."""
        for message in self._asked_for_the_end:
            self._answer(message)

    def restart(self) -> None:
        """Set the new parameters, and the new state of the optimizer if rank 0 has sent one; discard all other state of
        the server.
        """
        node, stopped = self._node, self._stopped
        new = next(stopped[rank] for rank in sorted(stopped) if stopped[rank].array is not None)
        node.params[:] = new.payload
        if new.note.memory is not None:
            node.optimizer.recall(node.params, node.optimizer_state, _state(new.note.memory, self._slots))
        end_tasks(node)
        forget(node, new.note.before)
        node.version = 0
        node.state = self._strategy.master_state(node)
        self.stopped, self._stopped, self._slots, self.asked = False, {}, {}, bool(self._reads)
        node.send_all([rank for rank in sorted(stopped) if rank >= 0], "begun" + CHANNEL)

    def _answer(self, message: Message) -> None:
        """Send the parameters, or the arrays of the optimizer's state, one message for each."""
        node = self._node
        if message.tag == READ:
            node.reply(message, node.params)
            return
        state = node.optimizer.remembered(node.optimizer_state)
        node.reply(message, None, _memory(state))
        for name, slot in state.slots.items():
            node.send(message.source, name + CHANNEL, slot)


def end_tasks(node: Node) -> None:
    """End every background task of a node at its current point."""
    while node.tasks:
        node.tasks.pop().close()


def _memory(state: OptimizerState) -> OptimizerStateHeader:
    return OptimizerStateHeader(float(state.steps), state.numbers, tuple(state.slots))


def _state(memory: OptimizerStateHeader, slots: dict[str, FlatArray]) -> OptimizerState:
    return OptimizerState(memory.steps, slots, numbers=dict(memory.numbers))


def forget(node: Node, before: int) -> None:
    """Drop the messages that have arrived for the node's program, and announce again which nodes have left; `before` is
    the number of steps that the run has taken.
    """
    node.mailbox.clear(but=CHANNEL)
    node.step, node.before = 0, before
    node.reported_departures.clear()
    for address in sorted(node.departed):
        node.mailbox.put(Message(address, LEAVE, note={"lost": int(address in node.lost)}))


async def common_steps(me: Worker, steps: float) -> float:
    """Return the step count in the optimizer state of rank 0, which rank 0 passes as `steps` and sends to the
    others.
    """
    if me.rank == 0:
        me.send_all(me.peers, "steps", None, {"steps": steps})
        return steps
    return float((await me.receive("steps", 0)).note["steps"])


async def all_here(me: Worker) -> None:
    """Wait until every other worker has also called this function.

    Raises:
        PeerLost: a worker has died or left the run.
    """
    me.send_all(me.peers, "here")
    for rank in range(me.workers):
        if rank != me.rank:
            await me.receive("here", rank)


async def notes_of_all(me: Worker, word: str, own: Fields) -> dict[int, Fields]:
    """Send the note `own` to all other workers; return rank → note for every worker that is not lost."""
    me.send_all(me.peers, word, None, own)
    notes = {me.rank: own}
    for peer in me.peers:
        with contextlib.suppress(PeerLost):
            notes[peer] = (await me.receive(word, peer)).note
    return notes


async def meet(me: Worker, word: str) -> int:
    """Barrier: send `word` to all workers, and wait for `word` from every living worker; return the largest step count
    among them.
    """
    me.send_all(me.peers, word)
    most = me.step
    for peer in me.peers:
        with contextlib.suppress(PeerLost):
            most = max(most, (await me.receive(word, peer)).step)
    return most


async def restart_programs(me: Worker, held: Sequence[slice], optimizer: OptimizerState | None, before: int) -> None:
    """Restart the programs of all nodes from rank 0's parameters, and the servers' optimizers from `optimizer`.

    Old messages are dropped.

    `before` is the number of steps that rank 0 has taken in the run.
    """
    root = min([me.rank, *me.peers])
    for index, part in enumerate(held):
        if me.rank != root:
            me.send(server(index), "stopped", note=ProgramStopped())
            continue
        if optimizer is not None:
            for name, slot in optimizer.slots.items():
                me.send(server(index), name, slot[part])
        memory = None if optimizer is None else _memory(optimizer)
        me.send(server(index), "stopped", me.params[part], ProgramStopped(before, memory))
    me.send_all(me.peers, "stopped", me.params if me.rank == root else None, ProgramStopped(before))
    for peer in me.peers:
        with contextlib.suppress(PeerLost):
            message = await me.receive("stopped", peer)
            if peer == root:
                me.params[:] = message.payload
                before = message.note.before
    for index in range(len(held)):
        await me.receive("begun", server(index))
    forget(me, before)
    await meet(me, "cleared")  # messages that arrive before this belong to the restarted programs


async def common(me: Worker, policy: ResultPolicy, held: Sequence[slice]) -> FlatArray:
    """Return the model that the result policy (server, mean or rank0) selects now; the worker of the lowest rank
    computes and distributes the model.
    """
    root = min([me.rank, *me.peers])
    if me.rank != root:
        me.send(root, "replica", me.params if policy == "mean" else None)
        return (await me.receive("common", root)).payload
    replicas = Tick(set())
    replicas.add_worker(to_host(me.params), 0, 0)
    for peer in me.peers:
        with contextlib.suppress(PeerLost):
            message = await me.receive("replica", peer)
            if message.array is not None:
                replicas.add_worker(to_host(message.array), 0, 0)
    chosen = await served(me, held) if policy == "server" else replicas.model(policy, held)
    assert chosen is not None
    me.send_all(me.peers, "common", chosen)
    return chosen


async def served(me: Worker, held: Sequence[slice]) -> FlatArray:
    """Return the whole parameters, collected from the servers. If several servers hold the same part, the first of them
    is asked.
    """
    whole = copied(me.params)
    asked = [(server(index), None, None) for index in range(len(held))]
    for index, reply in reversed(list(enumerate(await me.ask_all("read", asked)))):
        whole[held[index]] = reply.payload
    return whole


async def remembered(me: Worker, held: Sequence[slice], last: bool = False) -> OptimizerState:
    """Return the state of the servers' optimizers, joined over all servers; with `last`, their final state, after all
    workers have left.
    """
    whole, indices = OptimizerState(), deciding(held)
    asked = [(server(index), None, Recall(last)) for index in indices]
    for index, reply in zip(indices, await me.ask_all("recall", asked), strict=True):
        memory: OptimizerStateHeader = reply.note
        whole.steps, whole.numbers = memory.steps, whole.numbers | memory.numbers
        for name in memory.slots:
            slot = to_host((await me.receive(name, server(index))).payload)
            whole.slots.setdefault(name, np.zeros(len(me.params), slot.dtype))[held[index]] = slot
    return whole
