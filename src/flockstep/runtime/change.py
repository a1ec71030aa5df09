"""Goes on with the workers that live, after others were lost, from what their processes hold.

If replicas are equal between two steps, and some workers had completed the step in hand, the rest step along the
gradient of one of them; if none had, all take the step again with the gradients that they hold. If replicas are equal
only where a round has ended, local steps stay as they are, and the same holds for the exchange at the end of a round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import numpy as np

from flockstep.arrays.namespace import copied, to_device_of
from flockstep.arrays.schema import FlatArray
from flockstep.messages import SCRIPT, Fields
from flockstep.nodes import Worker
from flockstep.programs import Effect, Stepper
from flockstep.runtime.payloads import receive_pieces, send_pieces
from flockstep.runtime.program_restart import notes_of_all
from flockstep.runtime.runner import Runner
from flockstep.runtime.state import from_bytes, to_bytes
from flockstep.strategies.base import Strategy

T = TypeVar("T")


class HeldWork:
    """What a worker holds to go on with the workers that live: beginning of the exchange in hand, result of the last
    one.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper

    @property
    def completed(self) -> bool:
        """Whether the step in hand needs its gradient no more."""
        raise NotImplementedError

    def watch(self, worker: Worker) -> None:
        """Hold what `worker` begins exchanges with from now on."""

    def keep(self, worker: Worker, gradient: FlatArray) -> None:
        """Note that a worker begins its next step with a gradient (K,)."""

    def put_back(self, gradient: FlatArray) -> bool:
        """Write the gradient of the step in hand to the flat array (K,); return whether this worker holds it."""
        return False

    def go_on(self, worker: Worker, former: Worker, strategy: Strategy) -> None:
        """Give a new worker the place of a former one between two steps."""
        worker.before, worker.loss, worker.knows_finite = former.before, former.loss, former.knows_finite
        worker.step = former.step
        worker.random.bit_generator.state = former.random.bit_generator.state

    def ended(self, worker: Worker) -> tuple[int, int]:
        """Number of the last exchange that a worker has completed, and its steps at the end of that exchange."""
        raise NotImplementedError

    def join(self, ended: int, at: int) -> None:
        """Count exchanges from the last one on that others have completed, after `at` steps."""

    def shared(self, worker: Worker, strategy: Strategy) -> dict[str, Any]:
        """Field of the strategy's state → value, for the fields with which a worker that joins begins."""
        raise NotImplementedError

    def result(self, worker: Worker, strategy: Strategy) -> tuple[FlatArray, dict[str, Any]]:
        """The array (K,), and fields of the strategy's state, with which others complete the last exchange."""
        raise NotImplementedError

    def take(self, worker: Worker, array: FlatArray, fields: Mapping[str, Any], strategy: Strategy) -> None:
        """Complete the last exchange with the result of another worker."""
        raise NotImplementedError


class HeldStep(HeldWork):
    """The gradient and the strategy's state before the step in hand, and the gradient along which all step."""

    stepper: KeepingStepper

    def __init__(self, stepper: Stepper) -> None:
        super().__init__(KeepingStepper(stepper))
        self._gradient: FlatArray | None = None
        self._state: Any = None
        self._reached: Any = None
        """The strategy's state, as far as it had come in the step in hand when workers were first lost in it."""
        self._step = 0
        self._before = -1
        """Steps that the worker's optimizer had taken before."""

    def keep(self, worker: Worker, gradient: FlatArray) -> None:
        """Copy what the next step begins with, because collectives sum gradients in their place."""
        self._gradient, self._reached = kept(gradient, self._gradient), None
        self._state, self._step, self._before = copy.deepcopy(worker.state), worker.step, self.stepper.steps

    def put_back(self, gradient: FlatArray) -> bool:
        gradient[:] = self._gradient
        return True

    @property
    def completed(self) -> bool:
        return self.stepper.steps > self._before

    def go_on(self, worker: Worker, former: Worker, strategy: Strategy) -> None:
        super().go_on(worker, former, strategy)
        self._reached = former.state if self._reached is None else self._reached
        if not self.completed:
            worker.step = self._step
        strategy.go_on(worker, copy.deepcopy(former.state if self.completed else self._state))

    def ended(self, worker: Worker) -> tuple[int, int]:
        return worker.step, worker.step

    def shared(self, worker: Worker, strategy: Strategy) -> dict[str, Any]:
        return {name: getattr(worker.state, name) for name in strategy.resizing.common}

    def result(self, worker: Worker, strategy: Strategy) -> tuple[FlatArray, dict[str, Any]]:
        assert self.stepper.gradient is not None
        return self.stepper.gradient, self.shared(worker, strategy)

    def take(self, worker: Worker, array: FlatArray, fields: Mapping[str, Any], strategy: Strategy) -> None:
        worker.step += 1
        strategy.go_on(worker, copy.deepcopy(self._reached))  # the worker has done its part of the step
        set_fields(worker.state, fields)
        worker.optimizer_step(array)


class HeldRound(HeldWork):
    """The replica and the strategy's state where the last exchange between replicas began, and where one has ended."""

    _began: tuple[FlatArray, Any] | None = None
    """None: the worker is in no exchange."""
    _result: tuple[FlatArray, Any] | None = None
    _ended = _ended_at = 0
    """Number of exchanges that have ended, and the worker's steps at the end of the last one."""
    _worker: Worker
    _at = -1
    """Steps of the worker before the step in hand."""

    def watch(self, worker: Worker) -> None:
        self._worker, worker.on_hold = worker, self._hold

    def _hold(self, ended: bool) -> None:
        worker = self._worker
        now = copied(worker.params), copy.deepcopy(worker.state)
        if ended:
            self._began, self._result = None, now
            self._ended, self._ended_at = self._ended + 1, worker.step
        else:
            self._began = now

    def keep(self, worker: Worker, gradient: FlatArray) -> None:
        self._at = worker.step

    @property
    def completed(self) -> bool:
        return self._worker.step > self._at

    def go_on(self, worker: Worker, former: Worker, strategy: Strategy) -> None:
        super().go_on(worker, former, strategy)
        state = former.state
        if self._began is not None:
            worker.params[:], state = self._began
        strategy.go_on(worker, copy.deepcopy(state))
        self.watch(worker)

    def ended(self, worker: Worker) -> tuple[int, int]:
        return self._ended, self._ended_at

    def join(self, ended: int, at: int) -> None:
        self._ended, self._ended_at = ended, at

    def shared(self, worker: Worker, strategy: Strategy) -> dict[str, Any]:
        return dict(vars(worker.state))

    def result(self, worker: Worker, strategy: Strategy) -> tuple[FlatArray, dict[str, Any]]:
        assert self._result is not None
        return self._result[0], vars(self._result[1])

    def take(self, worker: Worker, array: FlatArray, fields: Mapping[str, Any], strategy: Strategy) -> None:
        worker.params[:] = array
        set_fields(worker.state, fields)
        strategy.go_on(worker, worker.state)
        self._hold(ended=True)


def held_of(strategy: Strategy, stepper: Stepper) -> HeldWork:
    """Return what holds a worker's part in exchanges under a strategy."""
    return HeldRound(stepper) if strategy.repeats == "round" else HeldStep(stepper)


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


def beside(runner: Runner, worker: Worker, name: str, program: Callable[[Worker], Coroutine[Effect, Any, T]]) -> T:
    """Run `program(worker)` on every worker while their own programs wait or have not begun; return its result here.

    Its messages travel in the channel `name`, so that no strategy's program receives them.
    """
    returned = list[T]()

    async def to_the_end() -> None:
        returned.append(await worker.finished(worker.background(SCRIPT + name, program(worker))))

    runner.aside(to_the_end())
    return returned[0]


def settle(
    runner: Runner,
    worker: Worker,
    held: HeldWork,
    *,
    strategy: Strategy,
    joins: bool,
    also: Fields,
    give: Callable[[], dict[str, Any]],
    take: Callable[[dict[str, Any]], None],
) -> dict[int, Fields]:
    """Let all workers complete the last exchange that one of them has completed, and let workers that join `take` what
    one that has trained can `give` besides its steps and the strategy's state.

    Return rank → the last exchange that each worker had completed, its steps then and now, and what it says `also`; a
    worker that joins has completed none: -1.
    """
    ended, at = (-1, 0) if joins else held.ended(worker)
    own: Fields = {"ended": ended, "at": at, "step": worker.step, **also}
    stands = beside(runner, worker, "stand", lambda me: notes_of_all(me, "stand", own))
    beside(runner, worker, "step", lambda me: _catch_up(me, stands, held, strategy))
    beside(runner, worker, "model", lambda me: _join(me, stands, held, strategy, give=give, take=take))
    return stands


async def _catch_up(me: Worker, stands: Mapping[int, Fields], held: HeldWork, strategy: Strategy) -> None:
    most, source = _first_of(stands)
    behind = [rank for rank, one in stands.items() if 0 <= int(one["ended"]) < most]
    if me.rank == source and behind:
        array, fields = held.result(me, strategy)
        taken = {"array": array, "fields": fields}
        send_pieces(me, behind, "step", np.frombuffer(to_bytes(taken), np.uint8))
    if me.rank in behind:
        taken = from_bytes((await receive_pieces(me, source, "step")).tobytes())
        held.take(me, to_device_of(taken["array"], me.params), taken["fields"], strategy)


async def _join(
    me: Worker,
    stands: Mapping[int, Fields],
    held: HeldWork,
    strategy: Strategy,
    *,
    give: Callable[[], dict[str, Any]],
    take: Callable[[dict[str, Any]], None],
) -> None:
    ended, source = _first_of(stands)
    joining = [rank for rank, one in stands.items() if int(one["ended"]) < 0]
    if me.rank == source and joining:
        whole = {**give(), "step": me.step, "before": me.before, "shared": held.shared(me, strategy)}
        send_pieces(me, joining, "model", np.frombuffer(to_bytes(whole), np.uint8))
    elif me.rank in joining:
        taken = from_bytes((await receive_pieces(me, source, "model")).tobytes())
        set_fields(me.state, taken.pop("shared"))
        me.step, me.before = taken.pop("step"), taken.pop("before")
        held.join(ended, int(stands[source]["at"]))
        take(taken)


def _first_of(stands: Mapping[int, Fields]) -> tuple[int, int]:
    """Return the last exchange that a worker has completed, and the lowest rank that has."""
    most = max(int(one["ended"]) for one in stands.values())
    return most, min(rank for rank, one in stands.items() if one["ended"] == most)


def set_fields(state: Any, values: Mapping[str, Any]) -> None:
    """Set fields of a strategy's state."""
    for name, value in values.items():
        setattr(state, name, value)
