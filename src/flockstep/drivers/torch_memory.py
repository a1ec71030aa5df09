"""What servers' optimizers remember, in and out of a script's torch optimizer."""

from __future__ import annotations

from typing import Any

import torch

from flockstep.drivers.loop import Loop
from flockstep.drivers.renewal import told
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.frameworks.torch_state import flat_state, set_state
from flockstep.optimizers.base import Optimizer, OptimizerState


class ServerMemory:
    """Keeps the state of a torch optimizer and that of the servers which step in its place together.

    Without `spec`, the optimizer that servers step with, each rank's own optimizer steps: nothing is to be done.
    """

    def __init__(self, flat: FlatModule, optimizer: torch.optim.Optimizer, loop: Loop, spec: Optimizer | None):
        self._flat = flat
        self._optimizer = optimizer
        self._loop = loop
        fresh = OptimizerState() if spec is None else spec.init(flat.params[:1])
        self._foreign = fresh.foreign is not None
        self._remembers = bool(fresh.slots) or self._foreign
        self._kept = False

    def begin(self) -> None:
        """Let the servers begin with what rank 0's optimizer remembers from before `distribute`, if anything."""
        if not self._remembers:
            return
        state = flat_state(self._flat, self._optimizer)
        if self._loop.exchange("memory", lambda me: told(me, 0 if state is None else state.steps)):
            self._require_servers()
            self._loop.renew(state)

    def fetch(self) -> None:
        """Put what the servers remember into the torch optimizer."""
        if not self._remembers or self._kept:
            return
        if self._loop.finished:
            raise ConfigurationError(
                "after finish() rank 0 alone holds what the servers remembered; call state_dict() there, or before it"
            )
        self._require_servers()
        set_state(self._flat, self._optimizer, self._loop.remembered())

    def keep(self) -> None:
        """Before servers end: rank 0 keeps what they remember."""
        if (
            self._remembers
            and not self._foreign
            and self._loop.held
            and self._loop.rank == 0
            and not self._loop.finished
        ):
            self.fetch()
            self._kept = True

    def check_loaded(self) -> bool:
        """Whether what was loaded into the torch optimizer is still to be sent to servers.

        Raises:
            ConfigurationError: workers hold slices of it, or torch's own optimizers step on the servers.
        """
        if self._remembers:
            self._require_servers()
        return self._remembers

    def loaded(self) -> OptimizerState | None:
        """What the torch optimizer has been loaded with, for the servers; None where they go on with their own."""
        guard: Any = self._loop.watch
        return flat_state(self._flat, self._optimizer) if self._remembers and guard.unsent else None

    def _require_servers(self) -> None:
        if self._foreign:
            raise ConfigurationError(
                f"what {type(self._optimizer).__name__} with its groups remembers on servers cannot be saved; "
                "use one group of SGD, Adam, AdamW or Adagrad, or all_reduce, whose workers hold all of it"
            )
        if not self._loop.held:
            raise ConfigurationError(
                f"with {self._loop.strategy} workers hold slices of what {type(self._optimizer).__name__} remembers, "
                "which cannot be saved or loaded; use ps(bsp), or all_reduce, whose workers hold all of it"
            )
