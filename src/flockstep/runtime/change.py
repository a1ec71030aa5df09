"""A script's step with the workers that live, after others were lost.

Between two steps all replicas are equal. So if some workers had completed the step in hand when others were lost, the
rest take the model of one of them; if none had, all take the step again with the gradients that they hold.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.messages import Fields
from flockstep.nodes import Worker
from flockstep.optimizers.base import OptimizerState
from flockstep.runtime.payloads import receive_pieces, send_pieces
from flockstep.runtime.program_restart import notes_of_all
from flockstep.runtime.state import from_bytes, to_bytes
from flockstep.strategies.base import Strategy
from flockstep.strategies.resizing import FormerWorker

if TYPE_CHECKING:
    from flockstep.runtime.checkpoints import ScriptCheckpoints
    from flockstep.runtime.torch_keeper import TorchKeeper


class HeldStep:
    """What a worker needs to take its last step again: the gradient, and the strategy's state before the step."""

    def __init__(self) -> None:
        self.totals: Mapping[str, Any] = {}
        """Totals of the worker's metrics when other workers were lost."""
        self._gradient: FlatArray | None = None
        self._state: Any = None
        self._step = 0
        self._applied = -1
        """Steps that the worker's optimizer had taken before."""

    def keep(self, worker: Worker, gradient: FlatArray) -> None:
        """Copy what the next step of a worker begins with, because collectives sum gradients in their place."""
        if self._gradient is None:
            self._gradient = copied(gradient)
        else:
            self._gradient[:] = gradient
        self._state, self._step, self._applied = copy.deepcopy(worker.state), worker.step, worker.applied

    def put_back(self, gradient: FlatArray) -> None:
        """Write the gradient of the step to the flat array (K,)."""
        gradient[:] = self._gradient

    def completed(self, worker: Worker) -> bool:
        """Return whether the worker's optimizer has taken the step."""
        return worker.applied > self._applied

    def go_on(self, worker: Worker, former: Worker, strategy: Strategy) -> None:
        """Give a new worker the place of a former one between two steps: behind the step if it was completed."""
        complete = self.completed(former)
        state = copy.deepcopy(former.state if complete else self._state)
        worker.before, worker.loss, worker.knows_finite = former.before, former.loss, former.knows_finite
        worker.step, worker.applied = former.step if complete else self._step, former.applied
        worker.random.bit_generator.state = former.random.bit_generator.state
        worker.state = state
        worker.state = strategy.worker_state(worker)
        own = FormerWorker(former.rank, worker.params, worker.step, state, OptimizerState())
        strategy.take_over(worker, [own] * worker.workers)


async def stand(me: Worker, exchanges: int, joins: bool) -> dict[int, Fields]:
    """Return rank → the numbers of steps and of exchanges between steps that each worker has completed; a worker that
    `joins` has no model.
    """
    step = -1 if joins else me.step
    return await notes_of_all(me, "stand", {"step": step, "exchanges": 0 if joins else exchanges})


async def catch_up(
    me: Worker,
    stands: Mapping[int, Fields],
    common: Sequence[str],
    keeper: TorchKeeper,
    script: ScriptCheckpoints | None,
) -> bool:
    """Let workers that had not completed the last step, or join, take the model of one that had completed it; return
    whether this is one. `common` names the fields of the strategy's state that are equal on all workers. A worker that
    joins takes over the place of the script, too.
    """
    steps = {rank: int(one["step"]) for rank, one in stands.items()}
    most = max(steps.values())
    source = min(rank for rank, step in steps.items() if step == most)
    behind = [rank for rank, step in steps.items() if step < most]
    joins = steps[me.rank] < 0
    if me.rank == source and behind:
        place = script.place() if script is not None and min(steps.values()) < 0 else None
        whole: dict[str, Any] = {
            "params": me.params,
            "optimizer": keeper.at_boundary(),
            "before": me.before,
            "place": place,
        }
        whole["common"] = {name: getattr(me.state, name) for name in common}
        send_pieces(me, behind, "model", np.frombuffer(to_bytes(whole), np.uint8))
    if me.rank not in behind:
        return False
    taken = from_bytes((await receive_pieces(me, source, "model")).tobytes())
    keeper.take(taken["params"], taken["optimizer"])
    for name, value in taken["common"].items():
        setattr(me.state, name, value)
    me.step, me.applied = most, me.applied + 1
    if joins and script is not None:
        me.before = taken["before"]
        script.join(taken["place"])
    return True
