"""Keeps the state of a script's torch optimizer equal to the state on servers and on other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flockstep.arrays.namespace import to_host
from flockstep.arrays.schema import slices
from flockstep.drivers.loop import Loop
from flockstep.drivers.node_metrics import fingerprint
from flockstep.drivers.payloads import receive_pieces, send_pieces
from flockstep.drivers.program_restart import common_steps, notes_of_all
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.frameworks.torch_optimizers import shared_entries
from flockstep.frameworks.torch_state import flat_state, packed, set_state, unpacked
from flockstep.messages import Fields
from flockstep.nodes import Worker
from flockstep.optimizers.base import Optimizer, OptimizerState


def memory_of(
    flat: FlatModule, optimizer: torch.optim.Optimizer, loop: Loop, spec: Optimizer
) -> WorkerMemory | ServerMemory | SliceMemory:
    """Return the object that manages optimizer state under the strategy of `loop`; `spec` is the optimizer in the form
    that servers execute.
    """
    traits = loop.strategy.traits
    if not traits.server_optimizer:
        return WorkerMemory(optimizer, loop)
    if traits.memory == "slices":
        return SliceMemory(flat, optimizer, loop, spec)
    return ServerMemory(flat, optimizer, loop, spec)


class _Memory:
    """What the kinds of memory do by default: the torch optimizer of each rank holds the whole state."""

    def __init__(self, optimizer: torch.optim.Optimizer, loop: Loop):
        self._optimizer = optimizer
        self._loop = loop

    def fetch(self) -> None:
        """Do nothing, because the torch optimizer holds the whole optimizer state."""

    def release(self) -> None:
        """Do nothing, because the torch optimizer keeps its state."""

    def consolidate(self, to: int) -> None:
        """Do nothing, because any rank can have the whole optimizer state."""

    def finish(self) -> None:
        """End the run on this worker, whose state stays where it is."""
        self._loop.finish()


class _MemoryElsewhere(_Memory):
    """State of the optimizer `spec`, which runs in place of the torch optimizer."""

    def __init__(self, flat: FlatModule, optimizer: torch.optim.Optimizer, loop: Loop, spec: Optimizer):
        super().__init__(optimizer, loop)
        self._flat = flat
        self._fresh = spec.init(flat.params[:1])
        self._unsent = False

    def _own(self) -> OptimizerState | None:
        """State of the torch optimizer."""
        return flat_state(self._flat, self._optimizer, foreign=self._fresh.foreign is not None)


class WorkerMemory(_Memory):
    """Optimizer state under strategies whose workers update the parameters: each rank's torch optimizer has its own
    state.

    If all ranks step with a common gradient, their states must be equal; otherwise states may differ, and a rank that
    has loaded nothing takes the state that rank 0 has loaded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, loop: Loop):
        super().__init__(optimizer, loop)
        self._alike = loop.strategy.traits.alike
        self._loaded = bool(optimizer.state)
        self._taking = False

    def begin(self) -> None:
        """Copy a state that was loaded into rank 0's optimizer before `distribute` to the ranks that need it."""
        if self._loop.workers > 1:
            self._loop.exchange("memory", self.agree)
        self._loaded = False

    def restart(self) -> None:
        """Restart the strategy on every rank from the parameters and the optimizer state of rank 0."""
        self._loop.restart(None)
        self.begin()

    def loaded(self) -> bool:
        """Record that the script has loaded a state; return whether ranks must agree on it before they step."""
        if self._taking:
            return False
        self._loaded = True
        return self._alike and self._loop.workers > 1 and not self._loop.finished

    def take_from(self, source: int) -> None:
        """Copy the optimizer state of rank `source` to every rank."""
        self._loop.exchange("final", lambda me: self._copied(me, source, set(me.peers)))

    async def agree(self, me: Worker) -> None:
        """Compare the optimizer states of all ranks; if they must be equal but differ, copy rank 0's state to all
        ranks.
        """
        root = min([me.rank, *me.peers])
        own: Fields = {
            "digest": fingerprint(packed(_shared(self._optimizer), whole=False)),
            "loaded": int(self._loaded),
        }
        notes = await notes_of_all(me, "memory", own)
        given = notes[root]
        takers = {r for r, note in notes.items() if self._alike and note["digest"] != given["digest"]}
        takers |= {r for r, note in notes.items() if given["loaded"] and not note["loaded"]}
        await self._copied(me, root, takers)

    async def _copied(self, me: Worker, source: int, takers: set[int]) -> None:
        """Send the state of `source` to `takers`, which load it."""
        if me.rank == source:
            if takers:  # its size may be several times the model's
                send_pieces(me, sorted(takers), "state", packed(_shared(self._optimizer)))
        elif me.rank in takers:
            array = await receive_pieces(me, source, "state")
            self._taking = True
            _take(self._optimizer, unpacked(array))
            self._taking = False


class ServerMemory(_MemoryElsewhere):
    """Optimizer state under strategies whose servers run the optimizer `spec` in place of the torch optimizer."""

    def __init__(self, flat: FlatModule, optimizer: torch.optim.Optimizer, loop: Loop, spec: Optimizer):
        super().__init__(flat, optimizer, loop, spec)
        memory, fresh = loop.strategy.traits.memory, self._fresh
        self._own_memory = memory == "own"
        self._remembers = bool(fresh.slots) or fresh.foreign is not None or memory != "optimizer"
        self._asked = False
        """Whether the script saves or loads states, so that rank 0 must also receive the final one."""
        self._kept = False

    def begin(self) -> None:
        """Start the servers with the state that rank 0's optimizer had before `distribute`, if any."""
        if not self._remembers:
            return
        state = self._own()
        if self._loop.exchange("memory", lambda me: common_steps(me, 0 if state is None else state.steps)):
            self._require_servers()
            self._asked = True
            self._loop.exchange("memory", lambda me: take_settings(me, self._optimizer, state is not None))
            self._loop.restart(state)

    def restart(self) -> None:
        """Restart the strategy; the servers' optimizers keep their state, unless rank 0 has loaded a new state for
        them, whose settings all ranks then take.
        """
        self._loop.exchange("memory", lambda me: take_settings(me, self._optimizer, self._unsent))
        self._loop.restart(self._own() if self._unsent else None)
        self._unsent = False

    def loaded(self) -> bool:
        """Record that the script has loaded a state; return whether it must still be sent to the servers.

        Raises:
            ConfigurationError: workers hold slices of the state, or the strategy's servers have a separate optimizer.
        """
        if self._remembers and not self._loop.finished:
            self._require_servers()
            self._unsent = self._asked = True
        return self._unsent

    def fetch(self) -> None:
        """Copy the state of the servers' optimizers into the torch optimizer."""
        if not self._remembers or self._kept:
            return
        self._require_servers()
        if self._loop.finished:
            raise ConfigurationError(
                "after finish() only rank 0 has the optimizer state of the servers, and only if state_dict() was "
                "called or a state was loaded there before; call state_dict() before finish()"
            )
        self._asked = True
        set_state(self._flat, self._optimizer, self._loop.remembered())

    def finish(self) -> None:
        """End the run.

        If its script saves states, rank 0 stores the final state, after the last gradient of all ranks.
        """
        keeps = self._asked and self._loop.rank == 0 and not self._loop.finished
        last = self._loop.finish(remember=keeps)
        if last is not None:
            set_state(self._flat, self._optimizer, last)
            self._kept = True

    def _require_servers(self) -> None:
        if self._own_memory:
            raise ConfigurationError(
                f"servers of {self._loop.strategy} use a separate optimizer, whose state cannot be saved or loaded; "
                "use a server_update that applies the job's optimizer, such as plain"
            )
        if not self._loop.held:
            raise ConfigurationError(
                f"with {self._loop.strategy} each worker holds a slice of the state of "
                f"{type(self._optimizer).__name__}, which cannot be saved or loaded; use ps(bsp), or all_reduce, "
                "whose workers hold the whole state"
            )


class SliceMemory(_MemoryElsewhere):
    """Optimizer state under strategies in which worker i of n updates slice i of the parameters, with `spec` in place
    of the torch optimizer.

    Only this worker holds the state of the slice. `consolidate` collects all slices on one rank.
    """

    def __init__(self, flat: FlatModule, optimizer: torch.optim.Optimizer, loop: Loop, spec: Optimizer):
        super().__init__(flat, optimizer, loop, spec)
        self._whole: OptimizerState | None = None
        self._at = -1
        """Number of steps after which `_whole` was collected."""

    def begin(self) -> None:
        """Send each worker its slice of the state that rank 0's optimizer had before `distribute`, if there was one."""
        self._spread(self._own())

    def restart(self) -> None:
        """Restart the strategy; workers keep the state of their slices, unless rank 0 has loaded a new state for
        them.
        """
        kept: list[OptimizerState] = []

        async def keep(me: Worker) -> None:
            assert me.optimizer is not None
            kept.append(me.optimizer.remembered(me.state.optimizer))

        async def recall(me: Worker) -> None:
            _recall(me, kept[0])

        self._loop.exchange("memory", keep)
        self._loop.restart(None)
        self._loop.exchange("memory", recall)
        self._spread(self._own() if self._unsent else None)
        self._unsent, self._whole = False, None

    def loaded(self) -> bool:
        """Record that the script has loaded a state; return whether it must still be sent to the workers that hold the
        slices.
        """
        self._unsent = not self._loop.finished
        return self._unsent

    def consolidate(self, to: int) -> None:
        """Collect the state of all slices on rank `to`; every rank must call this."""
        self._whole = self._loop.exchange("memory", lambda me: _collected(me, to))
        self._at = self._loop.steps

    def fetch(self) -> None:
        """Copy the collected state into the torch optimizer.

        Raises:
            ConfigurationError: this rank has not collected the state since its last step.
        """
        if self._unsent:
            return
        if self._loop.workers == 1 and not self._loop.finished:
            self.consolidate(0)
        if self._whole is None or self._at != self._loop.steps:
            raise ConfigurationError(
                f"with {self._loop.strategy} each worker holds a slice of the state of "
                f"{type(self._optimizer).__name__}; call optimizer.consolidate_state_dict() on every rank after the "
                "last step(), and before finish(), then state_dict() on rank 0"
            )
        set_state(self._flat, self._optimizer, self._whole)

    def release(self) -> None:
        """Remove the collected state from the torch optimizer, which does not use it, to free the memory.

        The dict that `state_dict` has returned keeps the state.
        """
        if not self._unsent:
            self._optimizer.state.clear()

    def _spread(self, state: OptimizerState | None) -> None:
        """Send rank 0's `state` to the workers of its slices; None: they keep what they have."""
        groups, settings = self._optimizer.param_groups, _settings(self._optimizer)
        for group, given in zip(
            groups, self._loop.exchange("memory", lambda me: _spread(me, state, settings)), strict=True
        ):
            group.update(given)
        self._optimizer.state.clear()


def _shared(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer without the entries of its groups that are the script's own."""
    state = optimizer.state_dict()
    return state | {"param_groups": [shared_entries(optimizer, group) for group in state["param_groups"]]}


def _take(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `_shared` has returned on another rank, and keep the entries of groups that are the script's own."""
    own = optimizer.state_dict()["param_groups"]
    groups = state["param_groups"]
    merged = [a | b for a, b in zip(own, groups, strict=True)] if len(own) == len(groups) else groups
    optimizer.load_state_dict(state | {"param_groups": merged})


async def take_settings(me: Worker, optimizer: torch.optim.Optimizer, loaded: bool) -> None:
    """Take the settings of rank 0's parameter groups, which rank 0 sends if it has `loaded` a state."""
    if me.rank == 0:
        me.send_all(me.peers, "settings", packed({"groups": _settings(optimizer)}) if loaded else None)
        return
    message = await me.receive("settings", 0)
    if message.array is not None:
        given_groups = unpacked(to_host(message.array))["groups"]
        for group, given in zip(optimizer.param_groups, given_groups, strict=True):
            group.update(given)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, without the entries that are the script's own."""
    shared = [shared_entries(optimizer, group) for group in optimizer.param_groups]
    return [{name: value for name, value in group.items() if name != "params"} for group in shared]


def _recall(me: Worker, state: OptimizerState) -> None:
    """Set the state of this worker's slice."""
    assert me.optimizer is not None
    if state.steps:
        me.optimizer.recall(me.params[_slice(me, me.rank)], me.state.optimizer, state)


def _slice(me: Worker, rank: int) -> slice:
    return slices(len(me.params), me.workers)[rank]


async def _spread(me: Worker, state: OptimizerState | None, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send the slices of rank 0's state to their workers, which continue with them.

    Returns the settings of the groups, which are rank 0's if it sends a state.
    """
    if me.rank:
        found = await _received(me, 0)
        if found is None:
            return settings
        _recall(me, found)
        given: list[dict[str, Any]] = unpacked(to_host((await me.receive("settings", 0)).payload))["groups"]
        return given
    for rank in [*me.peers, 0]:
        part = _slice(me, rank)
        own = None
        if state is not None:
            slots = {name: slot[part] for name, slot in state.slots.items()}
            own = OptimizerState(state.steps, slots, numbers=state.numbers)
        if rank:
            _send(me, rank, own)
        elif own is not None:
            _recall(me, own)
    if state is not None:
        me.send_all(me.peers, "settings", packed({"groups": settings}))
    return settings


async def _collected(me: Worker, to: int) -> OptimizerState | None:
    """Collect the state of all slices on rank `to`."""
    assert me.optimizer is not None
    own = me.optimizer.remembered(me.state.optimizer)
    if me.rank != to:
        _send(me, to, own)
        return None
    whole = OptimizerState(own.steps)
    for rank in range(me.workers):
        found = own if rank == to else await _received(me, rank)
        assert found is not None
        whole.numbers |= found.numbers
        for name, slot in found.slots.items():
            array = to_host(slot)
            whole.slots.setdefault(name, np.zeros(len(me.params), array.dtype))[_slice(me, rank)] = array
    return whole


def _send(me: Worker, to: int, state: OptimizerState | None) -> None:
    """Send a state: its numbers as `packed` writes them, then each slot."""
    slots = {} if state is None else state.slots
    numbers = {} if state is None else dict(state.numbers)
    steps = 0.0 if state is None else float(state.steps)
    me.send(to, "memory", packed({"steps": steps, "numbers": numbers, "slots": list(slots)}))
    for name, slot in slots.items():
        me.send(to, f"slot {name}", to_host(slot))


async def _received(me: Worker, source: int) -> OptimizerState | None:
    """Receive what `_send` has sent; None for no state."""
    told = unpacked(to_host((await me.receive("memory", source)).payload))
    found = OptimizerState(told["steps"], numbers=told["numbers"])
    for name in told["slots"]:
        found.slots[name] = to_host((await me.receive(f"slot {name}", source)).payload)
    return found if found.steps else None
