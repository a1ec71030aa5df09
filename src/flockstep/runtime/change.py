"""A script's step with the workers that live, after others were lost.

Between two steps all replicas are equal. So if some workers had completed the step in hand when others were lost, the
rest step along the gradient of one of them; if none had, all take the step again with the gradients that they hold.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flockstep.arrays.namespace import copied, to_device_of
from flockstep.arrays.schema import FlatArray
from flockstep.messages import Fields
from flockstep.nodes import Worker
from flockstep.optimizers.base import OptimizerState
from flockstep.programs import Stepper
from flockstep.runtime.payloads import receive_pieces, send_pieces
from flockstep.runtime.program_restart import notes_of_all
from flockstep.runtime.state import from_bytes, to_bytes
from flockstep.strategies.base import Strategy
from flockstep.strategies.resizing import FormerWorker

if TYPE_CHECKING:
    from flockstep.runtime.checkpoints import ScriptCheckpoints
    from flockstep.runtime.torch_keeper import TorchKeeper


class HeldStep:
    """What a worker needs to take its last step again, or to let others take it: the gradient and the strategy's state
    before the step, and the gradient along which all optimizers step.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = KeepingStepper(stepper)
        self.totals: Mapping[str, Any] = {}
        """Totals of the worker's metrics when other workers were lost."""
        self._gradient: FlatArray | None = None
        self._state: Any = None
        self._reached: Any = None
        """The strategy's state, as far as it had come in the step in hand."""
        self._step = 0
        self._before = -1
        """Steps that the worker's optimizer had taken before."""

    def keep(self, worker: Worker, gradient: FlatArray) -> None:
        """Copy what the next step of a worker begins with, because collectives sum gradients in their place."""
        self._gradient = kept(gradient, self._gradient)
        self._state, self._step, self._before = copy.deepcopy(worker.state), worker.step, self.stepper.steps

    def put_back(self, gradient: FlatArray) -> None:
        """Write the gradient of the step to the flat array (K,)."""
        gradient[:] = self._gradient

    @property
    def completed(self) -> bool:
        """Whether the worker's optimizer has taken the step."""
        return self.stepper.steps > self._before

    def go_on(self, worker: Worker, former: Worker, strategy: Strategy) -> None:
        """Give a new worker the place of a former one between two steps: behind the step if it was completed."""
        worker.before, worker.loss, worker.knows_finite = former.before, former.loss, former.knows_finite
        worker.step = former.step if self.completed else self._step
        worker.random.bit_generator.state = former.random.bit_generator.state
        self._reached = former.state
        self.give_state(worker, strategy, former.state if self.completed else self._state)

    def give_state(self, worker: Worker, strategy: Strategy, state: Any = None) -> None:
        """Give a worker the strategy's state, by the rule for another number of workers; None: that of a step in which
        the worker has done its part.
        """
        state = copy.deepcopy(self._reached if state is None else state)
        worker.state = state
        worker.state = strategy.worker_state(worker)
        own = FormerWorker(worker.rank, worker.params, worker.step, state, OptimizerState())
        strategy.take_over(worker, [own] * worker.workers)


class KeepingStepper:
    """A worker's own optimizer, which counts its steps and keeps the gradient of the last one."""

    def __init__(self, stepper: Stepper):
        self._stepper = stepper
        self.steps = 0
        self.gradient: FlatArray | None = None

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer's next step."""
        return self._stepper.lr

    @property
    def settings(self) -> tuple[str, list[dict[str, Any]]]:
        """Class of the optimizer, and the settings of each of its groups for the next step."""
        return self._stepper.settings

    def step(self, params: FlatArray, gradient: FlatArray, in_place: bool = False) -> None:
        """Keep the gradient, and let the optimizer step along it."""
        self.gradient = kept(gradient, self.gradient)
        self._stepper.step(params, gradient, in_place)
        self.steps += 1

    def reset(self, params: FlatArray) -> None:
        """Reset momentum and all other state to the state before the first step."""
        self._stepper.reset(params)


def kept(array: FlatArray, place: FlatArray | None) -> FlatArray:
    """Return a copy of an array, in `place` if there is one."""
    if place is None or place.dtype != array.dtype:
        return copied(array)
    place[:] = array
    return place


async def stand(me: Worker, exchanges: int, joins: bool) -> dict[int, Fields]:
    """Return rank → the numbers of steps and of exchanges between steps that each worker has completed; a worker that
    `joins` has no model.
    """
    step = -1 if joins else me.step
    return await notes_of_all(me, "stand", {"step": step, "exchanges": 0 if joins else exchanges})


async def catch_up(me: Worker, stands: Mapping[int, Fields], held: HeldStep, strategy: Strategy) -> bool:
    """Let workers that had not completed the last step take it along the gradient of one that had; return whether this
    is one of them.
    """
    steps = {rank: int(one["step"]) for rank, one in stands.items()}
    most, source = first_of(steps)
    behind = [rank for rank, step in steps.items() if 0 <= step < most]
    common = strategy.resizing.common
    if me.rank == source and behind:
        state = {name: getattr(me.state, name) for name in common}
        taken = {"gradient": held.stepper.gradient, "common": state}
        send_pieces(me, behind, "step", np.frombuffer(to_bytes(taken), np.uint8))
    if me.rank not in behind:
        return False
    taken = from_bytes((await receive_pieces(me, source, "step")).tobytes())
    me.step = most
    held.give_state(me, strategy)
    for name, value in taken["common"].items():
        setattr(me.state, name, value)
    me.optimizer_step(to_device_of(taken["gradient"], me.params))
    return True


async def join(
    me: Worker, stands: Mapping[int, Fields], strategy: Strategy, keeper: TorchKeeper, script: ScriptCheckpoints
) -> None:
    """Give workers that join the model, the optimizer's state and the place of the script of one that has trained."""
    steps = {rank: int(one["step"]) for rank, one in stands.items()}
    most, source = first_of(steps)
    joining = [rank for rank, step in steps.items() if step < 0]
    if me.rank == source and joining:
        common = {name: getattr(me.state, name) for name in strategy.resizing.common}
        whole = {"params": me.params, "optimizer": keeper.at_boundary(), "before": me.before, "place": script.place()}
        send_pieces(me, joining, "model", np.frombuffer(to_bytes({**whole, "common": common}), np.uint8))
    elif me.rank in joining:
        taken = from_bytes((await receive_pieces(me, source, "model")).tobytes())
        keeper.take(taken["params"], taken["optimizer"])
        for name, value in taken["common"].items():
            setattr(me.state, name, value)
        me.step, me.before = most, taken["before"]
        script.join(taken["place"])


def first_of(steps: Mapping[int, int]) -> tuple[int, int]:
    """Return the largest number of steps, and the lowest rank that has taken so many."""
    most = max(steps.values())
    return most, min(rank for rank, step in steps.items() if step == most)
