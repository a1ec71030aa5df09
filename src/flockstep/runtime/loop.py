"""The user's own training loop: every `optimizer.step()` resumes the strategy until the strategy requests the next
gradient.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flockstep.arrays.memory import release
from flockstep.arrays.namespace import copied, first_not_finite, to_device_of, to_host
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import CompositionError, ConfigurationError, FlockstepError, RunError
from flockstep.expression import to_text
from flockstep.messages import SCRIPT, Address, Fields, server
from flockstep.nodes import BadGradients, BadGradientSettings, Cluster, Server, Worker
from flockstep.optimizers.base import Optimizer, OptimizerState
from flockstep.programs import Effect, ParameterGuard, Stepper
from flockstep.records import failpoints
from flockstep.records.events import DivergedEvent, MetricEvent
from flockstep.runtime.change import beside, held_of, settle
from flockstep.runtime.checkpoints import Extra, ScriptCheckpoints, manifest_of
from flockstep.runtime.cut import Cut
from flockstep.runtime.epochs import deal_as_before, deals_data
from flockstep.runtime.member import BeginAgain, NodeSpec
from flockstep.runtime.node_creation import DeclaredWork, Stepping, make_server, make_worker
from flockstep.runtime.node_metrics import NodeMetrics, fingerprint
from flockstep.runtime.node_spec import (
    claim_spec,
    place_of_script,
    require_own_process,
    spec_from_environment,
    take_spec,
)
from flockstep.runtime.part_group import NodePart, PartGroup, ReplicaParts, groups_of
from flockstep.runtime.plan import require_parts
from flockstep.runtime.program_restart import (
    ScriptRequests,
    all_here,
    common,
    end_tasks,
    meet,
    notes_of,
    remembered,
    restart_programs,
)
from flockstep.runtime.real import NodeConnection
from flockstep.runtime.reports import EventSender
from flockstep.runtime.runner import OneProcess, Runner
from flockstep.runtime.session import Session, require_side_by_side, session_of_script, sessions_here
from flockstep.runtime.settings import compared_at, room_for, tell_servers, told
from flockstep.runtime.signals import leave_script_to_supervisor
from flockstep.strategies.base import Strategy
from flockstep.strategies.finite import require_skippable

if TYPE_CHECKING:
    from flockstep.runtime.torch_keeper import TorchKeeper

T = TypeVar("T")

FIRST = 3
"""Number of gradients whose digests a worker reports, at the start and after each `sync`, for comparison with those of
other workers.
"""


def require_for_scripts(strategy: Strategy, workers: int) -> None:
    """Raise an error unless a script can train with this strategy on so many workers."""
    strategy.check(workers)
    if strategy.traits.needs_job:
        raise CompositionError(
            f"{strategy} needs gradients that a training loop in a script cannot provide; write a job() and use "
            "flockstep train"
        )


@dataclass(frozen=True)
class OfFramework:
    """What the framework of a script adds to its loop."""

    buffers: Callable[[], FlatArray] = lambda: np.empty(0, np.uint8)
    """Returns the worker's state besides parameters (uint8)."""
    overlaps: bool = False
    """Whether `awaited` and `hand_over` are used while gradients are computed."""
    bad_gradients: BadGradientSettings = (None, None)
    """Action and largest norm for this worker's gradients; None: as `flockstep launch` says."""
    parts: ReplicaParts | None = None
    """The parts of the replica, which several processes hold; None if this process holds it whole."""
    fragments: Callable[[int], list[slice]] | None = None
    """See `Worker.fragments`; None if this process holds the replica whole."""
    keeper: TorchKeeper | None = None
    """Keeps the state of the script's optimizer for checkpoints and other workers; None if the script does not."""


class Loop:
    """One worker's part in a run that is driven by a user's loop.

    `params` and `gradients` are the flat arrays of the user's model, whose gradients must be moved to `loop.gradients`
    afterwards. `stepper` is the user's optimizer, and `server_optimizer` the equivalent for strategies whose servers
    apply the gradients. After `finish`, `handed` holds the buffers of every worker.
    """

    _shown = 0
    """Step up to which gradients have been reported to the supervisor."""

    address = rank = 0
    """Number of this process among all workers of the run, and of its replica among the replicas."""
    workers = 1
    """Number of replicas."""
    _before = _taken = 0
    """Steps of the script before this process, and in it. A worker counts a gradient that it cancels as a step, also if
    the script has never computed it.
    """
    _same_step: bool | None = True
    """Whether equal numbers of steps of two scripts mean the same step of a schedule; None: this is not known."""
    watch: ParameterGuard | None = None
    """Checks between two steps whether the script has changed the model; None if nothing needs to be checked."""
    loss: float | None = None
    """Loss of the mini-batch of the next step, for the record; None if the script does not give it."""
    _diverged = False
    _dealt = (0, 1)
    """This worker's place before the last change of the workers."""
    _began = False
    """Whether a worker that has joined has the run's model."""
    _reports: EventSender | None = None
    """Takes this worker's events, also after `finish()` if this is the script's first call of `distribute`."""

    def __init__(
        self,
        params: FlatArray,
        gradients: FlatArray,
        schema: Schema,
        strategy: Strategy,
        stepper: Stepper,
        server_optimizer: Optimizer,
        of_framework: OfFramework | None = None,
    ):
        self.strategy, self.gradients, self.epochs = strategy, gradients, 0
        self.handed: dict[int, FlatArray] = {}
        self._process = os.getpid()
        self._params, self._schema, self._stepper, self._optimizer = params, schema, stepper, server_optimizer
        self._of = of_framework or OfFramework()
        self._held = held_of(strategy, stepper)
        self._again: BeginAgain | None = None
        """Why the next step begins with other workers; None if the run goes on with the same."""
        self._exchanges, self._leaving = 0, threading.Event()
        """Number of exchanges between two steps that have ended, and whether a signal asks this worker to leave."""
        self.checkpoints: ScriptCheckpoints | None = None
        """The script's part in the run's checkpoints; None if the framework of the script has none."""
        self.epoch: Callable[[], AbstractContextManager[None]] | None = None
        """Makes the context of an epoch over private data, whose steps end on all workers together."""
        self._session: Session | None = None
        """This process's part in the run; None if it trains alone."""
        self.finished = False
        """Whether the run has ended for this worker, or failed."""
        self._failure: Exception | None = None
        self._directions: dict[str, bool] = {}
        """Name of each metric that the script has recorded → whether higher values are better."""
        self._servers: dict[Address, Server] = {}
        """Servers that run in this process."""
        self._part = self._take_place(spec_from_environment())  # may refuse the strategy, before the call joins the run
        node_spec = claim_spec()
        spec = node_spec if node_spec is not None and node_spec.call == 1 else None
        self.joined = spec is not None and spec.joins
        """Whether this worker has joined others that were training."""
        can_repeat = bool(strategy.repeats) and self._of.keeper is not None and self._part is None
        self._repeats = spec is not None and spec.changes and can_repeat
        if node_spec is None:
            self._alone()
        else:
            self._session = session_of_script(node_spec, self)
            self._enter(self._session)
        with self._telling():
            self._begin()
        self._before = self._worker.run_step
        atexit.register(self._at_exit)

    def _take_place(self, node_spec: NodeSpec | None) -> NodePart | None:
        """Take the rank of this process's replica, and return the part of the replica that it holds; None if it holds
        the replica whole.

        Raises:
            CompositionError: the strategy needs whole replicas, or a job.
            ConfigurationError: the framework cannot split a replica.
        """
        size, parts, strategy = 1 if node_spec is None else node_spec.replica_size, self._of.parts, self.strategy
        if node_spec is not None:
            self.address, self.workers = node_spec.address, node_spec.workers // size
            self.rank = self.address // size
        require_for_scripts(strategy, self.workers)
        if size == 1:
            return None
        require_parts(strategy, "replicas of one process")
        if strategy.traits.matrices:
            raise CompositionError(
                f"{strategy} sends factors of whole matrices, of which a process of a replica holds only shards; use a "
                "strategy such as all_reduce or local_sgd, or replicas of one process"
            )
        if parts is None:
            raise ConfigurationError(
                f"a replica of {size} processes needs the parameters of a PyTorch module, got a script of another "
                "framework; start the script without --replica-size"
            )
        group = groups_of(parts.sizes, strategy.servers_for(self.workers))[self.address % size]
        name = f"part {group.part} of replica {self.rank} (worker {self.address})"
        return NodePart(name, group, parts.sizes)

    def _enter(self, session: Session) -> None:
        """Take part in the run from its start, or from where the others are if this worker joins them."""
        self._dealt = self.rank, self.workers
        while True:
            try:
                with self._telling():
                    self._together(session)
                    if self.joined:
                        self._catch_up()
                    return
            except BeginAgain as again:  # others were lost before this worker took its first step
                if not session.renew(again):
                    sys.exit(0)
                take_spec(session.node_spec, claimed=1)

    def _begin(self) -> None:
        worker = self._worker
        worker.notes = notes_of(self.strategy)
        worker.bad_gradients = worker.bad_gradients.replaced(*self._of.bad_gradients)
        require_skippable(self.strategy, worker.bad_gradients, self.workers)

        def begin() -> None:
            self._runner.begin(self.strategy.worker(self._worker))

        if self._session is None:
            begin()
        else:
            self._session.start(begin, stops=self.checkpoints is not None and self.strategy.traits.restarts)
        self._runner.advance()
        require_side_by_side()
        if self._part is not None and any(task.again == "afresh" for task in self._worker.tasks):
            raise CompositionError(
                f"{self.strategy} has background tasks that answer other workers at any time, for which a worker would "
                "wait for another one that waits for the processes of its own replica; use a strategy without such "
                "tasks, such as all_reduce, local_sgd, ps or dpsgd, or start the script without --replica-size"
            )

    def step(self) -> None:
        """Pass the gradients of one mini-batch, which are in the flat array, to the strategy."""
        if self.finished:
            self._require_running("call finish() after the last step()")
        if self.checkpoints is not None:
            self.checkpoints.before_step()
        if self.watch is not None:
            self.watch.check()
        try:
            if self._session is not None:
                self._show_gradient()
                self._taken += 1
                number = self._before + self._taken
                if self._worker.step == 0 or compared_at(number):
                    self._tell_settings(number, ends=bool(self._same_step))
            for hook in failpoints.hooks:
                hook("gradient.computed")
            loss, self.loss = self.loss, None
            if self._repeats:
                self._use_gradient(loss)
            else:
                self._runner.advance(self.gradients, loss)
            if self._session is not None:
                require_side_by_side()
        except FlockstepError as error:
            self._fail(error)
            raise
        if self.watch is not None:
            self._note()

    def require(self, check: Callable[[], None]) -> None:
        """Make a check of the framework; if it fails, the supervisor says why, and the script's process does not."""
        with self._telling():
            check()

    def _use_gradient(self, loss: float | None) -> None:
        """Let the strategy use the gradient; if other workers are lost meanwhile, together with those that live."""

        def attempt() -> None:
            if not self._held.completed:
                self._runner.advance(self.gradients, loss)

        self._held.keep(self._worker, self.gradients)
        self._with_the_living(attempt)

    def record_metric(self, name: str, value: float, higher_is_better: bool, count: float | None) -> None:
        """Give a value of a metric to the record of the run; see `DistributedOptimizer.record_metric`."""
        if not name.strip():
            raise ConfigurationError(f'the name of a metric must be a text, got {name!r}; write for example "accuracy"')
        if count is not None and not 0 <= count < math.inf:
            raise ConfigurationError(
                f"count must be a number >= 0, got {count}; give the number of samples that {name} is a mean of"
            )
        if self._directions.setdefault(name, higher_is_better) != higher_is_better:
            raise ConfigurationError(
                f"higher_is_better must be the same for all values of {name}, got {not higher_is_better} before and "
                f"{higher_is_better} now; give metrics with different directions different names"
            )
        if self._session is None or (count is None and self.address > 0):
            return
        if self._failure is not None:
            raise self._failure
        if self._reports is None:
            raise ConfigurationError(
                f"the run of a later call of distribute takes no metric after finish(), got {name}; record the metric "
                "before finish(), for example with the model of consensus()"
            )
        number = None if count is None else float(count)
        self._reports.write(
            MetricEvent(
                self._session.member.seconds(), self.address, self.steps, name, float(value), higher_is_better, number
            )
        )

    @property
    def lr(self) -> float:
        """Learning rate of this worker's next step."""
        return self._worker.lr

    @property
    def steps(self) -> int:
        """Number of steps that this worker has taken in the run."""
        return self._worker.run_step

    @property
    def bad_gradients(self) -> BadGradients:
        """Policy of this worker for gradients that are not finite or too large."""
        return self._worker.bad_gradients

    @property
    def alone(self) -> bool:
        """Whether this worker is the only one, and none can join while its process lives."""
        return self.workers == 1 and not self._repeats

    @property
    def only_steps(self) -> bool:
        """Whether only this worker's optimizer ever reads this worker's gradients."""
        return self.alone and self.bad_gradients.max_norm is None and self.strategy.steps_alone

    def know_finite(self, known: Callable[[], bool]) -> None:
        """Ask `known` before each step whether the whole gradient is known to be finite."""
        self._worker.knows_finite = known

    @property
    def awaited(self) -> int:
        """Index of the first gradient element that the strategy has requested; 0 if the strategy waits for the whole
        gradient.
        """
        return 0 if self.finished or self._again is not None else self._runner.awaited

    @property
    def tentative(self) -> bool:
        """Whether a gradient that the strategy has received in parts may still change before `step`."""
        return not self.finished and (self._again is not None or self._runner.tentative)

    def revise(self) -> None:
        """Tell the strategy that the script has changed parts of the gradient that the strategy has already
        received.
        """
        self._worker.revised = True

    def hand_over(self) -> None:
        """Pass the gradient's elements from `awaited` on, which are in the flat array, to the strategy while the
        backward pass continues.
        """
        with self._telling(), self._noting_change():
            self._show_gradient()
            self._runner.advance(self.gradients, whole=False)

    def _show_gradient(self) -> None:
        """Report the first gradients to the supervisor, which compares them between workers: equal batches give equal
        gradients.

        The reported part is the one that the strategy uses first in its step, because the strategy may change parts
        after their use.
        """
        worker = self._worker
        if self._session is None or self.workers == 1 or self._shown > worker.run_step or worker.step >= FIRST:
            return
        self._shown = worker.run_step + 1
        part = self.gradients[self._runner.awaited :]
        telling = part.any() and first_not_finite(part) < 0  # a zero gradient tells nothing about the batch
        shown: Fields = {"step": self._shown, "gradient": fingerprint(part) if telling else ""}
        self._session.member.tell("gradient", None, shown)

    def compare_settings(self, loaded: bool) -> None:
        """Let the supervisor compare the optimizer's settings with those of the other workers, before the first step;
        `loaded`: the optimizer has a state that the script has loaded.
        """
        if self._worker.run_step == 0:  # later settings come from one checkpoint
            with self._telling():
                self._tell_settings(0, ends=True, start=True, loaded=loaded)

    def _tell_settings(self, step: int, ends: bool, start: bool = False, loaded: bool = False) -> None:
        """Report the optimizer's settings for a step to the supervisor, which compares settings of equal steps, so
        that no worker waits for another one; `ends`: a difference that must not be ends the run.
        """
        if self._session is not None and self.workers > 1 and self._same_step is not None:
            note: Fields = {"step": step, "ends": int(ends), "start": int(start), "loaded": int(loaded)}
            self._session.member.tell("settings", told(*self._stepper.settings), note)

    def listen(self) -> None:
        """Handle the messages that have arrived, and continue the tasks that wait for these messages."""
        if not self.finished and self._again is None:
            with self._telling(), self._noting_change():
                self._runner.collect()

    def exchange(self, name: str, program: Callable[[Worker], Coroutine[Effect, Any, T]]) -> T:
        """Run `program(worker)` on every worker between two steps; return the program's result on this worker.

        Every worker must call this at the same point and with the same name. The messages travel in a separate channel,
        so that a strategy that waits for messages meanwhile never receives them.

        Raises:
            ConfigurationError: the run has been finished.
            CompositionError: a worker that waits here would delay steps of other workers.
            PeerLost: a worker that `program` waits for died or left.
        """
        self._require_running(f"make every exchange before finish(), got {name} after finish()")
        self._require_rest(name)
        returned = self._with_the_living(lambda: self._exchange(name, program), name)
        self._exchanges += 1
        return returned

    def _require_rest(self, name: str) -> None:
        """Refuse an exchange whose waiting ranks would delay steps of other ranks."""
        if self.strategy.traits.held_up(self.workers) and self._worker.step and self._taken:
            raise CompositionError(
                f"a step of {self.strategy} waits only for the fastest workers, but {name} exchanges data between all "
                "ranks and would delay the step; call it before the first step(), or use a strategy such as ps(bsp)"
            )

    def _exchange(self, name: str, program: Callable[[Worker], Coroutine[Effect, Any, T]]) -> T:
        # Background tasks may write to the parameters. Those of parts do not, and parts are busy at different times.
        watched = self._worker.busy and self.watch is not None and self._part is None
        if watched and self.watch is not None:
            self.watch.check()
        with self._telling():
            returned = self._run(name, program)
        if watched:
            self._note()
        return returned

    def _run(self, name: str, program: Callable[[Worker], Coroutine[Effect, Any, T]]) -> T:
        return beside(self._runner, self._worker, name, program)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.exchange("barrier", all_here)

    def adopt(self, optimizer: Optimizer) -> None:
        """Use new optimizer settings from the next step on, both on the servers and for the slices that workers
        update.
        """
        with self._telling():
            tell_servers(self._worker, optimizer)

    def _note(self) -> None:
        """Accept the current model; if it is no longer finite, warn once and record it."""
        if self.watch is None:
            return
        self.watch.note()
        if self._diverged or (name := self.watch.not_finite()) is None:
            return
        self._diverged = True
        step = self._worker.run_step
        reason = (
            f"parameters of worker {self.address} are not finite after step {step}, the first is {name}; lower the "
            "learning rate"
        )
        if self._reports is not None:
            self._reports.write(DivergedEvent(self._runner.clock(), self.address, reason))
        warnings.warn(reason, RuntimeWarning, stacklevel=6)

    def restart(self, optimizer: OptimizerState | None) -> None:
        """Restart the strategy on every worker and server from the parameters of rank 0; every worker must call this.

        The servers' optimizers keep their state, unless rank 0 passes `optimizer`, which then replaces them.
        """
        self._require_running("call sync() before finish()")
        self._require_rest("sync")
        if self.checkpoints is not None:
            self.checkpoints.before_restart()
        self._with_the_living(lambda: self._restart(optimizer), "sync()")
        self._exchanges += 1

    def _restart(self, optimizer: OptimizerState | None) -> None:
        worker = self._worker
        with self._telling():
            new = copied(self._params)
            most = self._run("servers", lambda me: meet(me, "here"))  # background tasks serve other workers until then
            self._runner.close()
            end_tasks(worker)
            self._params[:] = new
            before = worker.before + most
            self._run("servers", lambda me: restart_programs(me, self.held, optimizer, before))
            worker.state = self.strategy.worker_state(worker)
            self._begin()
            if self.watch is not None:
                self.watch.note()

    def remembered(self) -> OptimizerState:
        """Return the state of the servers' optimizers; one worker may call this alone, between two steps."""
        self._require_running("ask before finish()")
        return self._exchange("servers", lambda me: remembered(me, self.held))

    def common(self) -> FlatArray:
        """Return the model (K,) that the run would have as its result now, equal on every worker; every worker must
        call this.

        The model is selected by the strategy's default policy, as at the end; updates in flight are not included.

        Raises:
            CompositionError: the strategy keeps an ensemble and has no common model.
        """
        policy = self.strategy.traits.results[0]
        if policy not in ("server", "mean", "rank0"):
            raise CompositionError(
                f"{self.strategy} has no common model, because its result is the {policy} of its replicas; evaluate "
                "the model of each rank separately"
            )
        return self.exchange("servers", lambda me: common(me, policy, self.held))

    @property
    def held(self) -> list[slice]:
        """Return the slice of the parameters that each server holds."""
        return self.strategy.held(self.workers, len(self._params))

    def _require_running(self, way_out: str) -> None:
        if self._failure is not None:
            raise self._failure
        if self.finished:
            raise ConfigurationError(f"the run has been finished; {way_out}")

    def finish(self, remember: bool = False) -> OptimizerState | None:
        """End the run: send delayed updates, and write the resulting model to the parameters.

        Returns the final state of the servers' optimizers if `remember` is set on this worker, otherwise None.
        """
        if self._failure is not None:
            raise self._failure
        if self.finished:
            return None
        self.finished = True
        session = self._session
        for close in () if session is None else tuple(session.before_leaving):
            close()
        last = self._with_the_living(lambda: self._end(remember))
        # Drop what holds memory and files of the run; the script keeps the model as long as it needs.
        atexit.unregister(self._at_exit)
        if session is not None:
            session.end()
            if session.node_spec.call > 1:
                self._reports = None
        return last

    def _end(self, remember: bool) -> OptimizerState | None:
        """Leave the run with the resulting model; see `finish`."""
        session, worker, last = self._session, self._worker, list[OptimizerState]()
        self._runner.close()

        async def to_the_end() -> None:
            task = worker.background(SCRIPT + "servers", remembered(worker, self.held, last=True)) if remember else None
            await self.strategy.finish(worker)
            if task is not None:
                if session is not None:  # other workers must not wait for this one meanwhile
                    session.member.tell("left", None, {"step": worker.run_step})
                last.append(await worker.finished(task))

        with self._telling():
            if worker.step:  # training is over: a difference since the last comparison does not cost the result
                self._tell_settings(self._before + self._taken + 1, ends=False)
            self._runner.aside(to_the_end())
            if session is not None:
                connection = session.connection
                assert connection is not None
                result = session.leave(self.handed)
                if result is not None:
                    self._params[:] = to_device_of(result, self._params)
                release(collect=False)  # what backward passes have freed; the gradients need this memory
                self.gradients = connection.taken_home(self.gradients)
                connection.leave(failed=False)
            elif self._servers and self.strategy.traits.results[0] == "server":
                for index, part in reversed(list(enumerate(self.held))):  # of equal parts the first one counts
                    self._params[part] = self._servers[server(index)].params
        return last[0] if last else None

    def checkpoint(self, extra: Extra | Callable[[], Extra]) -> None:
        """Let the script take part in checkpoints; see `ScriptCheckpoints.checkpoint`. If the workers have changed, all
        meet here: a worker that joins then computes its first gradient while the others compute theirs.
        """
        checkpoints = self.checkpoints
        assert checkpoints is not None
        self._with_the_living(lambda: checkpoints.checkpoint(extra, deals_data()))

    def _with_the_living(self, act: Callable[[], T], exchange: str = "") -> T:
        """Do what all workers do now, and do it again with those that live whenever others are lost meanwhile, or were
        in the middle of the script's own work. `exchange`: see `_go_on`.
        """
        while True:
            try:
                if self._again is not None:
                    raise self._again
                return act()
            except BeginAgain as again:
                self._go_on(again, exchange)

    @contextmanager
    def _noting_change(self) -> Iterator[None]:
        """Context manager in the middle of the script's own work, such as a backward pass: if workers are lost, the
        next step goes on without them.
        """
        try:
            yield
        except BeginAgain as again:
            self._again = again

    def _go_on(self, again: BeginAgain, exchange: str = "") -> None:
        """Go on with the workers that live, after others were lost, behind the last step that one of them completed.

        `exchange` names what this worker is about to repeat in place of a step.

        Raises:
            Interrupted: the run has ended instead.
            RunError: others had completed the exchange, so that it cannot be repeated.
            SystemExit: this worker leaves the run.
        """
        with self._telling():
            while True:
                try:
                    return self._meet_again(again, exchange)
                except BeginAgain as another:  # further workers were lost meanwhile
                    again = another

    def _meet_again(self, again: BeginAgain, exchange: str) -> None:
        session, keeper = self._session, self._of.keeper
        assert session is not None
        assert keeper is not None
        self._again = None
        if not session.renew(again):
            self.finished = True
            sys.exit(0)
        take_spec(session.node_spec, claimed=1)
        self._together(session, self._worker)
        if keeper.refusal:  # said to the supervisor of those who go on
            raise RunError(f"a worker was lost, and the others cannot go on: {keeper.refusal}")
        self._catch_up(exchange)
        self._begin()
        if not self._held.completed:
            self._held.put_back(self.gradients)
        if self.watch is not None:
            self.watch.note()

    def _catch_up(self, exchange: str = "") -> None:
        """Complete the step or round that another worker has completed, if there is one. A worker that has joined takes
        over its model.
        """
        keeper, own, strategy, script = self._of.keeper, self._exchanges, self.strategy, self.checkpoints
        assert keeper is not None
        assert script is not None
        joins = self.joined and not self._began

        def give() -> dict[str, Any]:
            return {"params": self._worker.params, "optimizer": keeper.at_boundary(), "place": script.place()}

        def take(taken: dict[str, Any]) -> None:
            keeper.take(taken["params"], taken["optimizer"])
            script.join(taken["place"])

        stands = settle(
            self._runner,
            self._worker,
            self._held,
            strategy=strategy,
            joins=joins,
            also={"exchanges": 0 if joins else own},
            give=give,
            take=take,
        )
        exchanges = max(int(one["exchanges"]) for one in stands.values())
        if exchange and exchanges > own:
            raise RunError(
                f"a worker was lost at the end of {exchange}, which not all of the others had completed; resume the run"
            )
        metrics, step = self._runner.metrics, self._worker.run_step
        if joins:
            self._exchanges, metrics.steps = exchanges, step
        else:
            most = max(step, *(self._worker.before + int(one["step"]) for one in stands.values()))
            someone = any(int(one["ended"]) < 0 for one in stands.values())
            deal_as_before(most, None if someone else self._dealt)
        self._dealt, self._began = (self.rank, self.workers), True
        self._runner.counted = metrics.steps > step

    def _alone(self) -> None:
        """Run the worker and the servers in this process."""
        strategy, here, cluster = self.strategy, OneProcess(), Cluster(1, self.strategy.servers_for(1))
        schema, stepper, optimizer = self._schema, self._stepper, self._optimizer
        worker = self._worker = make_worker(strategy, cluster, 0, self._params, schema, 0, Stepping(stepper, optimizer))
        self._runner = here.runners[0] = Runner(worker, here, NodeMetrics(0, None), time.monotonic)
        for index in range(cluster.servers):
            node = make_server(strategy, cluster, index, self._params, schema, 0, optimizer)
            runner = here.runners[node.address] = Runner(node, here, NodeMetrics(node.address, None), time.monotonic)
            runner.script_requests = ScriptRequests(node, strategy)
            self._servers[node.address] = node
        for node in self._servers.values():
            here.runners[node.address].serve(strategy, node)

    def _together(self, session: Session, former: Worker | None = None) -> None:
        """Run a worker whose peers are in other processes, in the place of `former` if the workers have changed."""
        strategy, optimizer, node_spec = self.strategy, self._optimizer, session.node_spec
        stepper: Stepper = self._held.stepper if self._repeats else self._stepper
        self._part = self._take_place(node_spec)
        settings = room_for(to_text(optimizer)), room_for(json.dumps(stepper.settings))
        initial = np.ascontiguousarray(to_host(self._params))
        with self._telling():
            largest = max(self._of.buffers().nbytes, *settings)
            cluster, params = session.meet(
                strategy,
                optimizer,
                self._of.parts.schema if self._part is not None and self._of.parts is not None else self._schema,
                initial,
                largest=largest,
                part=self._part,
                repeats=self._repeats,
            )
        group = None if self._part is None else self._part.group
        if former is None:
            self._params[:] = to_device_of(params, self._params)
        del params  # it lies in the memory of another node
        stepping, work = Stepping(stepper, optimizer), DeclaredWork(fragments=self._of.fragments)
        worker = make_worker(strategy, cluster, self.rank, self._params, self._schema, node_spec.seed, stepping, work)
        if former is not None:
            self._held.go_on(worker, former, strategy)
        elif self._repeats:
            self._held.watch(worker)
        with self._telling():
            kept = self._load(session, worker, group)
            connection = session.begin(lambda member: NodeConnection(member, worker, strategy, group=group))
        self._worker = worker
        worker.overlaps = self._of.overlaps and self.workers > 1 and not worker.shared.covers_run
        self._reports, self._runner = connection.reports, connection.runner
        connection.snapshots.buffers = self._of.buffers
        self.gradients = connection.home(self.gradients)
        if former is not None and self._of.keeper is not None:
            connection.runner.metrics.restore(session.totals)
            self._of.keeper.move_gradients(self.gradients)
        if self._of.keeper is None or node_spec.call > 1:
            return
        if self.checkpoints is None:
            self.checkpoints = ScriptCheckpoints(connection.checkpoints, self._of.keeper, kept)
        else:
            self.checkpoints.move(connection.checkpoints)
        if node_spec.supervisor:  # torchrun and others, which start processes themselves, end them with SIGTERM
            connection.asked_to_leave = self._leaving.is_set
            self.checkpoints.on_begin = functools.partial(leave_script_to_supervisor, self._leaving.set)
            if self._repeats and former is None:  # without a call of flockstep.checkpoint
                self.checkpoints.on_begin()

    def _load(self, session: Session, worker: Worker, group: PartGroup | None) -> Cut | None:
        """The state from which this worker goes on; None if the run begins at its start.

        Raises:
            ConfigurationError: the checkpoint is not of this model, optimizer or strategy.
        """
        node_spec = session.node_spec
        manifest = manifest_of(node_spec)
        if manifest is None:
            return None
        if manifest.strategy != str(self.strategy):
            raise ConfigurationError(
                f"the strategy of the checkpoint {node_spec.checkpoint} is {manifest.strategy}, but the script has "
                f"{self.strategy}; change the script back to the strategy of the checkpoint"
            )
        kept = session.load(worker, group, None if self._of.keeper is None else self._of.keeper.layout)
        if self._of.keeper is None or kept is None or kept.script is None:
            raise ConfigurationError(f"{node_spec.checkpoint} holds no state of a PyTorch script; restore the script")
        self._of.keeper.restore_at_boundary(kept.at_boundary)
        self._of.keeper.restore_between_steps(kept.script["between_steps"], random=False)
        traits = self.strategy.traits
        # after a change of members a worker that does not step together with the others may end an epoch some steps
        # earlier than they, although its number of steps keeps its distance to theirs
        self._same_step = kept.mailbox is not None or traits.delivery == "synchronous"
        if traits.delivery == "partial":  # a checkpoint does not hold how many gradients were canceled
            self._same_step = None
        return kept

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Context manager that reports an error of the run to the supervisor before the script sees it."""
        try:
            yield
        except FlockstepError as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure, self.finished = error, True
            if self._session is not None:
                self._session.fail(error)

    def _at_exit(self) -> None:
        """Finish the run of a script that did not call `finish`, unless the script is failing."""
        if os.getpid() != self._process:  # a forked child has no part in the run
            return
        if self._failure is None and not self.finished and getattr(sys, "last_value", None) is None:
            before, traits = copied(self._params), self.strategy.traits
            changed = traits.delivery != "synchronous"
            with contextlib.suppress(FlockstepError):  # the supervisor has been notified
                if self.workers > 1:
                    with self._telling():
                        self.require_used()
                if self._session is not None:
                    self._session.member.tell("unfinished", None, {"step": self._worker.run_step})
                self.finish()
                # A mean that rank 0 has already is no other model; otherwise `finish` may have changed parameters, or
                # made buffers equal that differed.
                others = changed and traits.results[0] != "mean"
                differ = len({array.tobytes() for array in self.handed.values()}) > 1
                changed = others or differ or bool((before != self._params).any())
            # Said once in a run: the script has ended with another model than the run's result.
            told = self._worker.step > 0 and self.workers > 1 and self.address == 0
            if changed and told and sys.stderr is not None:
                with contextlib.suppress(OSError, ValueError):  # a closed pipe, or a closed file
                    sys.stderr.write(
                        "flockstep: the script ended without optimizer.finish(), so the models of its workers are not "
                        "the result of the run, and what the script saved or evaluated outside of consensus() lacks "
                        "the last exchange; call optimizer.finish() after the last step\n"
                    )

    def require_used(self) -> None:
        """Raise `ConfigurationError` if the script has trained with another optimizer than the one of `distribute`."""
        if self.watch is None:
            return
        if self._worker.step > 0:
            self.watch.require_own_steps()
            return
        try:
            self.watch.check()
        except ConfigurationError as error:
            raise ConfigurationError(
                "the script changed its model, but took no step with the optimizer that flockstep.distribute "
                "returned, so its workers exchanged nothing; write optimizer = flockstep.distribute(model, optimizer, "
                "…) and call step() of this optimizer, or, if the script only loads a model, call optimizer.sync()"
            ) from error


def loop_with_checkpoints(name: str) -> Loop | None:
    """Return the loop through which this process's script takes part in checkpoints; None if the script runs alone.

    `name` is the function that the script has called.

    Raises:
        ConfigurationError: the script is not between `distribute` and `finish()`, or has several optimizers, or uses
            another framework than PyTorch.
    """
    require_own_process(name)
    if spec_from_environment() is None and place_of_script()[1] == 1:
        return None
    live = sessions_here()
    if not live:
        raise ConfigurationError(
            f"flockstep.{name} needs a run; call it after flockstep.distribute() and before finish()"
        )
    if len(live) > 1 or live[0].node_spec.call > 1:
        raise ConfigurationError(
            f"flockstep.{name} works in scripts that call flockstep.distribute once, got several calls; save "
            "state_dict()s in this script, as docs/how-to/loops.md shows"
        )
    loop = live[0].loop
    if not isinstance(loop, Loop) or loop.checkpoints is None:
        raise ConfigurationError(
            f"flockstep.{name} works only in a PyTorch script after flockstep.distribute, got a script of another "
            "framework or without distribute; save the state in the script itself"
        )
    return loop
