"""Keeps the state of a script's torch optimizer equal to the state on servers and on other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from flockstep.arrays.namespace import as_tensor, to_host
from flockstep.arrays.schema import FlatArray, slices
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_dtensors import placed_like
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.frameworks.torch_optimizers import shared_entries
from flockstep.frameworks.torch_state import flat_state, set_state
from flockstep.messages import Fields
from flockstep.nodes import Worker
from flockstep.optimizers.base import Optimizer, OptimizerState
from flockstep.runtime.loop import Loop
from flockstep.runtime.node_metrics import fingerprint
from flockstep.runtime.payloads import receive_pieces, send_pieces
from flockstep.runtime.program_restart import common_steps, notes_of_all
from flockstep.runtime.torch_buffers import packed, unpacked


def memory_of(
    flat: FlatModule, optimizer: torch.optim.Optimizer, loop: Loop, spec: Optimizer
) -> WorkerMemory | ServerMemory | SliceMemory:
    """Return the object that manages optimizer state under `loop`'s strategy; `spec`: the servers' optimizer."""
    traits = loop.strategy.traits
    if not traits.server_optimizer:
        return WorkerMemory(optimizer, loop)
    return (SliceMemory if traits.memory == "slices" else ServerMemory)(flat, optimizer, loop, spec)


class WorkerMemory:
    """Optimizer state under strategies whose workers update the parameters: each rank's torch optimizer has its own
    state.

    If all ranks step with a common gradient, their states must be equal; otherwise states may differ, and a rank that
    has loaded nothing takes the state that rank 0 has loaded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, loop: Loop):
        self._optimizer, self._loop = optimizer, loop
        self._alike = loop.strategy.traits.alike
        self._loaded = bool(optimizer.state)
        self._taking = False
        """Whether this object itself loads a state, that of another rank."""

    def begin(self) -> None:
        """Copy a state that was loaded into rank 0's optimizer before `distribute` to the ranks that need it."""
        if self._loop.workers > 1 and not self._loop.joined:
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

    def fetch(self) -> None:
        """Do nothing, because the torch optimizer holds the whole optimizer state."""

    def release(self) -> None:
        """Do nothing, because the torch optimizer keeps its state."""

    def consolidate(self, to: int) -> None:
        """Do nothing, because every rank has a whole optimizer state."""

    def finish(self) -> None:
        """End the run on this worker, whose state stays where it is."""
        self._loop.finish()

    def take_from(self, source: int) -> None:
        """Copy the optimizer state of rank `source` to every rank."""
        self._loop.exchange("final", lambda me: self._copied(me, source, set(me.peers)))

    async def agree(self, me: Worker) -> None:
        """Compare the states of all ranks; if they must be equal but differ, copy rank 0's to all ranks."""
        root = min([me.rank, *me.peers])
        own: Fields = {"digest": fingerprint(_packed(self._optimizer, whole=False)), "loaded": int(self._loaded)}
        notes = await notes_of_all(me, "memory", own)
        given = notes[root]
        takers = {r for r, note in notes.items() if self._alike and note["digest"] != given["digest"]}
        takers |= {r for r, note in notes.items() if given["loaded"] and not note["loaded"]}
        await self._copied(me, root, takers)

    async def _copied(self, me: Worker, source: int, takers: set[int]) -> None:
        """Send the state of `source` to `takers`, which load it and keep the entries of groups that are their own."""
        if me.rank == source:
            if takers:  # its size may be several times the model's
                send_pieces(me, sorted(takers), "state", _packed(self._optimizer, whole=True))
        elif me.rank in takers:
            state = unpacked(await receive_pieces(me, source, "state"))
            own, groups = self._optimizer.state_dict()["param_groups"], state["param_groups"]
            if len(own) == len(groups):
                state["param_groups"] = [a | b for a, b in zip(own, groups, strict=True)]
            held = [p for group in self._optimizer.param_groups for p in group["params"]]
            state["state"] = {at: placed_like(held[int(at)], one) for at, one in state["state"].items()}
            self._taking = True
            self._optimizer.load_state_dict(state)
            self._taking = False


class ServerMemory:
    """Optimizer state under strategies whose servers run the optimizer `spec` in place of the torch optimizer."""

    def __init__(self, flat: FlatModule, optimizer: torch.optim.Optimizer, loop: Loop, spec: Optimizer):
        self._flat, self._optimizer, self._loop = flat, optimizer, loop
        fresh, kind = spec.init(flat.params[:1]), loop.strategy.traits.memory
        self._foreign = fresh.foreign is not None
        self._own_memory = kind == "own"
        self._remembers = bool(fresh.slots) or self._foreign or kind != "optimizer"
        self._unsent = False
        """Whether the script has loaded a state that the servers do not have."""
        self._asked = False
        """Whether the script saves or loads states, so that rank 0 must also receive the final one."""
        self._kept = False

    def begin(self) -> None:
        """Start the servers with the state that rank 0's optimizer had before `distribute`, if any."""
        if not self._remembers:
            return
        state = flat_state(self._flat, self._optimizer, self._foreign)
        if self._loop.exchange("memory", lambda me: common_steps(me, 0 if state is None else state.steps)):
            self._require_servers()
            self._asked = True
            self._loop.exchange("memory", lambda me: take_settings(me, self._optimizer, state is not None))
            self._loop.restart(state)

    def restart(self) -> None:
        """Restart the strategy; servers keep their state, unless rank 0 has loaded one, whose settings all take."""
        self._loop.exchange("memory", lambda me: take_settings(me, self._optimizer, self._unsent))
        self._loop.restart(flat_state(self._flat, self._optimizer, self._foreign) if self._unsent else None)
        self._unsent = False

    def loaded(self) -> bool:
        """Record that the script has loaded a state; return whether it must still be sent to the servers."""
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

    def release(self) -> None:
        """Do nothing, because the next `fetch` replaces the copied state."""

    def consolidate(self, to: int) -> None:
        """Do nothing, because any rank can have the servers' state."""

    def finish(self) -> None:
        """End the run.

        If its script saves states, rank 0 stores the final state, after the last gradient of all ranks.
        """
        last = self._loop.finish(remember=self._asked and self._loop.rank == 0 and not self._loop.finished)
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


class SliceMemory:
    """Optimizer state under strategies in which worker i of n updates slice i of the parameters, with `spec` in place
    of the torch optimizer.

    Only this worker holds the state of the slice. `consolidate` collects all slices on one rank.
    """

    def __init__(self, flat: FlatModule, optimizer: torch.optim.Optimizer, loop: Loop, spec: Optimizer):
        self._flat, self._optimizer, self._loop = flat, optimizer, loop
        self._foreign = spec.init(flat.params[:1]).foreign is not None
        self._unsent = False
        """Whether the script has loaded a state that the other workers do not have."""
        self._whole: tuple[int, OptimizerState] | None = None
        """The state that this rank has collected, and the number of steps after which it did."""

    def begin(self) -> None:
        """Send each worker its slice of the state that rank 0's optimizer had before `distribute`, if there was one."""
        self._spread(flat_state(self._flat, self._optimizer, self._foreign))

    def restart(self) -> None:
        """Restart the strategy; workers keep their slices' state, unless rank 0 has loaded a new one."""

        async def own(me: Worker) -> OptimizerState:
            assert me.optimizer is not None
            return me.optimizer.remembered(me.state.optimizer)

        async def recall(me: Worker) -> None:
            _recall(me, kept)

        kept = self._loop.exchange("memory", own)
        self._loop.restart(None)
        self._loop.exchange("memory", recall)
        self._spread(flat_state(self._flat, self._optimizer, self._foreign) if self._unsent else None)
        self._unsent, self._whole = False, None

    def loaded(self) -> bool:
        """Record that the script has loaded a state; return whether the slices' workers still lack it."""
        self._unsent = not self._loop.finished
        return self._unsent

    def fetch(self) -> None:
        """Copy the collected state to the optimizer; raise `ConfigurationError` if not collected since the step."""
        if self._unsent:
            return
        if self._loop.workers == 1 and not self._loop.finished:
            self.consolidate(0)
        if self._whole is None or self._whole[0] != self._loop.steps:
            raise ConfigurationError(
                f"with {self._loop.strategy} each worker holds a slice of the state of "
                f"{type(self._optimizer).__name__}; call optimizer.consolidate_state_dict() on every rank after the "
                "last step(), and before finish(), then state_dict() on rank 0"
            )
        set_state(self._flat, self._optimizer, self._whole[1])

    def release(self) -> None:
        """Remove the collected state from the torch optimizer, which does not use it, to free the memory.

        The dict that `state_dict` has returned keeps the state.
        """
        if not self._unsent:
            self._optimizer.state.clear()

    def consolidate(self, to: int) -> None:
        """Collect the state of all slices on rank `to`; every rank must call this."""
        whole = self._loop.exchange("memory", lambda me: _collected(me, to))
        self._whole = None if whole is None else (self._loop.steps, whole)

    def finish(self) -> None:
        """End the run on this worker."""
        self._loop.finish()

    def _spread(self, state: OptimizerState | None) -> None:
        """Send rank 0's `state` to the workers of its slices, and its settings; None: they keep what they have."""

        async def spread(me: Worker) -> None:
            if me.rank:
                if (given := unpacked(await receive_pieces(me, 0, "memory"))) is not None:
                    _recall(me, _state_of(given[0]))
                    _take_groups(self._optimizer, given[1])
                return
            for rank, part in reversed(list(enumerate(slices(len(me.params), me.workers)))):
                own = None
                if state is not None:
                    held = {name: slot[part] for name, slot in state.slots.items()}
                    own = OptimizerState(state.steps, held, numbers=state.numbers)
                if rank in me.peers:
                    given = None if own is None else (_data_of(own), _settings(self._optimizer))
                    send_pieces(me, [rank], "memory", packed(given))
                elif rank == 0 and own is not None:
                    _recall(me, own)

        self._loop.exchange("memory", spread)
        self._optimizer.state.clear()


async def _collected(me: Worker, to: int) -> OptimizerState | None:
    """The state of all slices, on rank `to`."""
    assert me.optimizer is not None
    own = me.optimizer.remembered(me.state.optimizer)
    if me.rank != to:
        send_pieces(me, [to], "memory", packed(_data_of(own)))
        return None
    whole = OptimizerState(own.steps)
    for rank, part in enumerate(slices(len(me.params), me.workers)):
        found = own if rank == to else _state_of(unpacked(await receive_pieces(me, rank, "memory")))
        whole.numbers |= found.numbers
        for name, slot in found.slots.items():
            array = to_host(slot)
            whole.slots.setdefault(name, np.zeros(len(me.params), array.dtype))[part] = array
    return whole


def _recall(me: Worker, state: OptimizerState) -> None:
    """Set the state of this worker's slice."""
    assert me.optimizer is not None
    if state.steps:
        part = slices(len(me.params), me.workers)[me.rank]
        me.optimizer.recall(me.params[part], me.state.optimizer, state)


def _data_of(state: OptimizerState) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    return float(state.steps), dict(state.numbers), {name: as_tensor(slot) for name, slot in state.slots.items()}


def _state_of(data: tuple[float, dict[str, float], dict[str, torch.Tensor]]) -> OptimizerState:
    steps, numbers, slots = data
    return OptimizerState(steps, {name: to_host(slot) for name, slot in slots.items()}, numbers=numbers)


async def take_settings(me: Worker, optimizer: torch.optim.Optimizer, loaded: bool) -> None:
    """Take the settings of rank 0's parameter groups, which rank 0 sends if it has `loaded` a state."""
    if me.rank == 0:
        me.send_all(me.peers, "settings", packed(_settings(optimizer)) if loaded else None)
    elif (array := (await me.receive("settings", 0)).array) is not None:
        _take_groups(optimizer, unpacked(array))


def _take_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        group.update(given)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, without the entries that are the script's own."""
    shared = [shared_entries(optimizer, group) for group in optimizer.param_groups]
    return [{name: value for name, value in group.items() if name != "params"} for group in shared]


def _packed(optimizer: torch.optim.Optimizer, whole: bool) -> FlatArray:
    """The state of an optimizer as bytes, without the entries of its groups that are the script's own. Unless `whole`
    is set, a value that is not data counts by its class, for a comparison of ranks.
    """
    state = optimizer.state_dict()
    state |= {"param_groups": [shared_entries(optimizer, group) for group in state["param_groups"]]}
    try:
        return packed(state)
    except ConfigurationError as error:
        if whole:
            raise ConfigurationError(
                f"the state of {type(optimizer).__name__} cannot be sent to other ranks: {error}; load such a state on "
                "every rank before flockstep.distribute"
            ) from None
    plain = torch.Tensor | bool | int | float | str | None
    return packed(tree_map(lambda one: one if isinstance(one, plain) else type(one).__name__, state))
