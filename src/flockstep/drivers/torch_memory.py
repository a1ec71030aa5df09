"""State of a script's torch optimizer, kept equal to the state of servers and other ranks."""

from __future__ import annotations

import contextlib

import torch

from flockstep.arrays.namespace import to_host
from flockstep.drivers.loop import Loop
from flockstep.drivers.node_metrics import fingerprint
from flockstep.drivers.program_restart import common_steps
from flockstep.errors import ConfigurationError, PeerLost
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.frameworks.torch_state import flat_state, packed, set_state, unpacked
from flockstep.messages import Fields
from flockstep.nodes import Worker
from flockstep.optimizers.base import Optimizer, OptimizerState


class WorkerMemory:
    """Optimizer state under strategies whose workers step themselves: each rank's torch optimizer has its own state.

    If all ranks step with a common gradient, their states must be equal; otherwise states may differ, and a rank that
    has loaded nothing takes the state that rank 0 has loaded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, loop: Loop):
        self._optimizer = optimizer
        self._loop = loop
        self._alike = loop.strategy.traits.alike
        self._loaded = bool(optimizer.state)
        self._taking = False

    def begin(self) -> None:
        """Continue, at `distribute`, from the state that was loaded into rank 0's optimizer."""
        if self._loop.workers > 1:
            self._loop.exchange("memory", self.agree)
        self._loaded = False

    def restart(self) -> None:
        """Restart the strategy on every rank from rank 0's parameters and optimizer state."""
        self._loop.restart(None)
        self.begin()

    def loaded(self) -> bool:
        """Note that the script has loaded a state; return whether ranks must agree on it before they step."""
        if self._taking:
            return False
        self._loaded = True
        return self._alike and self._loop.workers > 1 and not self._loop.finished

    def fetch(self) -> None:
        """Do nothing: the torch optimizer has the whole state."""

    def finish(self) -> None:
        """End the run on this worker."""
        self._loop.finish()

    def take_from(self, source: int) -> None:
        """Copy the optimizer state of rank `source` to every rank."""
        self._loop.exchange("final", lambda me: self._copied(me, source, set(me.peers)))

    async def agree(self, me: Worker) -> None:
        """Compare the states of all ranks; take rank 0's state if the states must be equal and are not."""
        root = min([me.rank, *me.peers])
        own: Fields = {
            "digest": fingerprint(packed(self._optimizer.state_dict(), whole=False)),
            "loaded": int(self._loaded),
        }
        me.send_all(me.peers, "memory", None, own)
        notes = {me.rank: own}
        for peer in me.peers:
            with contextlib.suppress(PeerLost):
                notes[peer] = (await me.receive("memory", peer)).note
        given = notes[root]
        takers = {r for r, note in notes.items() if self._alike and note["digest"] != given["digest"]}
        takers |= {r for r, note in notes.items() if given["loaded"] and not note["loaded"]}
        await self._copied(me, root, takers)

    async def _copied(self, me: Worker, source: int, takers: set[int]) -> None:
        """Send the state of `source` to `takers`, which load it."""
        if me.rank == source:
            me.send_all(sorted(takers), "state", packed(self._optimizer.state_dict()) if takers else None)
        elif me.rank in takers:
            array = to_host((await me.receive("state", source)).payload)
            self._taking = True
            self._optimizer.load_state_dict(unpacked(array))
            self._taking = False


class ServerMemory:
    """Optimizer state under strategies whose servers step in place of the torch optimizer, with `spec`."""

    def __init__(self, flat: FlatModule, optimizer: torch.optim.Optimizer, loop: Loop, spec: Optimizer):
        self._flat = flat
        self._optimizer = optimizer
        self._loop = loop
        fresh = spec.init(flat.params[:1])
        self._foreign = fresh.foreign is not None
        self._own_memory = loop.strategy.traits.memory == "own"
        self._remembers = bool(fresh.slots) or self._foreign or loop.strategy.traits.memory != "optimizer"
        self._asked = False
        """Whether the script saves or loads states, so that rank 0 must also receive the final one."""
        self._kept = False
        self._unsent = False

    def begin(self) -> None:
        """Start the servers with the state that rank 0's optimizer had before `distribute`, if any."""
        if not self._remembers:
            return
        state = self._own()
        if self._loop.exchange("memory", lambda me: common_steps(me, 0 if state is None else state.steps)):
            self._require_servers()
            self._asked = True
            self._loop.restart(state)

    def restart(self) -> None:
        """Restart the strategy; the servers' optimizers keep their state, or take the state that rank 0 has loaded."""
        self._loop.restart(self._own() if self._unsent else None)
        self._unsent = False

    def loaded(self) -> bool:
        """Note that the script has loaded a state; return whether it must still be sent to the servers.

        Raises:
            ConfigurationError: workers hold slices of the state, or servers use an optimizer of their own.
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

    def _own(self) -> OptimizerState | None:
        return flat_state(self._flat, self._optimizer, self._foreign)

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
