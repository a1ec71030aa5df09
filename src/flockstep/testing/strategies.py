"""Checks of every strategy, in virtual time on a small regression problem in plain numpy."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError, ConfigurationError, FlockstepError
from flockstep.experiments.options import takes
from flockstep.frameworks.base import Data, Engine, Evaluation, Indices, Job
from flockstep.frameworks.numpy import NumpyEngine, QuadraticModel, SoftmaxRegression
from flockstep.messages import LEAVE, Address, Message, Wanted, node_name
from flockstep.nodes import Node
from flockstep.optimizers.base import Optimizer
from flockstep.options import Opt
from flockstep.records.events import EvaluationEvent, Event, NodeEvent, StepEvent, UpdateEvent
from flockstep.report.formatting import listed
from flockstep.runtime.cut import Cut
from flockstep.runtime.plan import LocalOptimizer, Plan
from flockstep.runtime.virtual import Simulation
from flockstep.schedules.base import Schedule
from flockstep.schedules.timetable import Timetable
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.faults import Fault
from flockstep.simulation.network import Network
from flockstep.strategies.base import ResultPolicy, Strategy, choose_result
from flockstep.testing.expressions import check_component
from flockstep.testing.samples import equal_bits as equal_bits
from flockstep.workloads.sampler import Sampler

STEPS = 20
OPTIMIZER = "sgd(lr=0.1, momentum=0.9)"
"""Optimizer of the checks, whose state must survive a restart, and stay with who applies updates."""
RESTARTS = (0.0, 0.13, 0.27, 0.5, 0.71, 0.94)
"""Times at which a run is stopped and restarted, as fractions of its duration."""
LONG = 25
"""Factor by which `check_exchanges` lengthens a run in which nothing was exchanged."""
SEPARATE = ("ensemble", "best")
"""Default results of strategies that train a separate model on each worker."""
COMPUTE = "exponential(0.05)"
NETWORK = "1gbit"
E = TypeVar("E", bound=Event)


def check_strategy(
    strategy: Strategy, workers: Sequence[int] = (1, 2, 4), steps: int = STEPS, alone_is_plain: bool = True
) -> str:
    """Run every check of this module that applies to the strategy's traits, with each number in `workers`; return a
    sentence that says with which numbers of workers the strategy passes.

    A number that the strategy refuses with `ConfigurationError` is skipped, but the strategy may not refuse all of
    them. `steps` must be a number after which the strategy holds no update back (local SGD: a multiple of its period).
    `alone_is_plain=False` is for a strategy that documents that with one worker it differs from its optimizer, as
    elastic averaging and lossy codecs do.

    Raises:
        AssertionError: a check fails; the message names the violated rule.
    """
    check_traits(strategy)
    accepted = [n for n in workers if accepts(strategy, n)]
    assert accepted, f"{strategy} refuses every number of workers in {tuple(workers)}"
    for n in accepted:
        run = run_or_fail(strategy, n, steps)
        check_ends(run)
        check_repeatable(run)
        check_deliveries(run)
        if strategy.traits.delivery == "synchronous":
            check_replicas_agree(run)
        check_restart(run)
    together = [n for n in accepted if n > 1]
    if together:
        check_exchanges(strategy, together[0], steps)
    if alone_is_plain and 1 in accepted:
        check_alone(strategy, steps)
    check_component(strategy)
    refused = [str(n) for n in workers if n not in accepted]
    others = f"; it refuses {', '.join(refused)}" if refused else ""
    return f"{strategy} passes every check with {listed(list(map(str, accepted)))} workers{others}"


def accepts(strategy: Strategy, workers: int) -> bool:
    """Return whether the strategy accepts the number of workers; only `ConfigurationError` is a refusal."""
    try:
        strategy.check(workers)
    except ConfigurationError:
        return False
    return True


def check_traits(strategy: Strategy) -> None:
    """Check that the traits are consistent: each result policy in the traits needs a node that holds such a model."""
    traits = strategy.traits
    assert traits.results, f"the traits of {strategy} name no policy for the result"
    held = strategy.servers_for(2) > 0
    assert held or "server" not in traits.results, (
        f"the result policy of {strategy} is server, but the strategy has no server"
    )


def check_exchanges(strategy: Strategy, workers: int, steps: int = STEPS) -> None:
    """Check that what one worker computes reaches another worker: if worker 0 trains on other samples, the parameters
    of another worker differ.

    The run has `steps` steps, and if nothing reaches another worker within them, `LONG` times as many. A strategy whose
    default result is "ensemble" or "best" trains a separate model on each worker, and is not checked, nor is a strategy
    whose workers compute on samples of other workers.
    """
    if strategy.traits.results[0] in SEPARATE or strategy.traits.samples == "others":
        return
    parts = GradientSource(workers).parts
    others = [parts[0][::-1], *parts[1:]]  # the sampler shuffles places in the part, so the batches differ
    for many in (steps, LONG * steps):
        first, second = (run_or_fail(strategy, workers, many, parts=one).replicas for one in (parts, others))
        if not equal_bits(first[1:], second[1:]):
            return
    assert not equal_bits(first, second), (
        f"{strategy} on {workers} workers trains nothing: in {LONG * steps} steps no parameters depend on the samples "
        "of worker 0; pass the gradient to me.optimizer_step(gradient), or send it to a server"
    )
    raise AssertionError(
        f"{strategy} on {workers} workers exchanges nothing: in {LONG * steps} steps the parameters of the other "
        "workers do not depend on the samples of worker 0; send the model or the gradient and apply what arrives, pass "
        'more steps if the first exchange comes later, or declare results=("ensemble",) if each worker trains a '
        "separate model"
    )


def check_ends(run: SimulatedRun) -> None:
    """Check that every program ends, after the requested steps and with finite parameters."""
    strategy, workers, steps = run.setting
    taken = Counter(event.rank for event in run.of(StepEvent))
    fixed = strategy.traits.fixed_steps
    wrong = {rank: taken[rank] for rank in range(workers) if fixed and taken[rank] != steps}
    assert not wrong, f"{strategy} on {workers} workers takes {wrong} steps (by rank) instead of {steps}"
    for address, params in run.params.items():
        assert np.isfinite(params).all(), (
            f"the parameters of {node_name(address)} are not finite after {strategy} on {workers} workers"
        )


def check_repeatable(first: SimulatedRun) -> None:
    """Check that two runs with one seed have the same parameters and events, bit for bit."""
    strategy, workers, steps = first.setting
    second = run_or_fail(strategy, workers, steps)
    differ = _differences(first, second)
    assert not differ, f"two runs of {strategy} on {workers} workers with the same seed differ on {differ}"
    assert first.events == second.events, (
        f"two runs of {strategy} on {workers} workers with the same seed have different events"
    )


def check_replicas_agree(run: SimulatedRun) -> None:
    """Check that all workers end with the same parameters, bit for bit, as synchronous delivery promises."""
    strategy, workers, _ = run.setting
    replicas = run.replicas
    apart = [rank for rank in range(1, workers) if not equal_bits(replicas[0], replicas[rank])]
    assert not apart, (
        f"{strategy} is declared synchronous, but the parameters of workers {apart} of {workers} differ from "
        "those of worker 0"
    )


def check_deliveries(run: SimulatedRun) -> None:
    """Check that no update takes effect twice.

    Unless delivery is partial, each update takes effect everywhere, and every message is read.

    Where servers record updates, an update takes effect on every server; otherwise, where workers record updates, on
    every other worker. Updates that a strategy does not record are not checked.
    """
    strategy, workers, steps = run.setting
    if not strategy.traits.fixed_steps:
        return
    who = f"{strategy} on {workers} workers"
    for (node, source), count in run.deliveries().items():
        assert count <= steps, (
            f"{who}: {count} updates of worker {source} take effect on {node_name(node)}, although the worker made "
            f"only {steps}"
        )
        assert count == steps or strategy.traits.delivery == "partial", (
            f"{who} is declared complete, but {count} of {steps} updates of worker {source} take effect on "
            f"{node_name(node)}"
        )
    if strategy.traits.delivery != "partial":
        unread = dict[str, list[str]]()
        for address, own in run.nodes.items():
            if tags := [message.tag for message in own.mailbox.take_all(Wanted()) if message.tag != LEAVE]:
                unread[node_name(address)] = tags
        assert not unread, f"{who} is declared complete, but leaves messages unread: {unread}"


def check_restart(whole: SimulatedRun) -> None:
    """Check that a run stopped midway, with messages in transit, and restarted from bytes ends like a run that was
    never stopped.

    Parameters, events and times must be equal bit for bit. All nodes are stopped at the same time, even in the middle
    of a step: a node restarts at its program's last restart point and receives the messages since then again. A
    strategy whose traits exclude restarts must refuse them.
    """
    strategy, workers, steps = whole.setting
    if not strategy.traits.restarts:
        with contextlib.suppress(CompositionError):
            run_strategy(strategy, workers, steps, restarts=[0.0])
            raise AssertionError(
                f"{strategy} declares restarts=False in its traits, but restarted without an error; declare "
                "restarts=True, or refuse restarts"
            )
        return
    times = [whole.seconds * share for share in RESTARTS]
    resumed = run_or_fail(strategy, workers, steps, restarts=times)
    who = f"{strategy} on {workers} workers, restarted at {', '.join(f'{t:.3g}' for t in times)} virtual seconds"
    differ = _differences(whole, resumed)
    assert not differ, f"{who}: the run ends differently on {differ}; keep all state between steps in me.state"
    assert whole.events == resumed.events, f"{who}: the run has different events"


def check_alone(strategy: Strategy, steps: int = STEPS) -> None:
    """Check that with one worker the result equals the result of the optimizer without any strategy, bit for bit."""
    source = GradientSource(job=small_job(OPTIMIZER))
    params = source.start()
    stepper = source.stepper(params)
    for _ in range(steps):
        stepper.step(params, source.gradient(0, params))
    result = run_or_fail(strategy, 1, steps).result
    assert equal_bits(result, params), (
        f"{strategy} with one worker gives a different result from training without a strategy; if the strategy "
        "documents this difference, call check_strategy with alone_is_plain=False"
    )


def small_job(optimizer: Optimizer | str = "sgd(lr=0.1)", dtype: str = "float32") -> Job:
    """Return a job with softmax regression: 18 parameters, batches of 8 out of 240 noisy samples."""

    def data() -> Data:
        random = np.random.default_rng(7)
        y = random.integers(0, 3, 300)
        x = random.normal(size=(3, 5))[y] + random.normal(size=(300, 5))
        return Data(x[:240], y[:240], x[240:], y[240:])

    return Job(lambda: SoftmaxRegression(5, 3, dtype=dtype), data, optimizer, batch=8)


def bowl_job(
    optimizer: Optimizer | str = "sgd(lr=0.1)",
    dimension: int = 8,
    noise: float = 1.0,
    start: float = 0.0,
    dtype: str = "float64",
) -> Job:
    """Return a job whose loss is a quadratic function with its minimum near 1 and curvatures from 1 down to 0.1.

    Each batch has 4 out of 240 noisy samples.
    """

    def data() -> Data:
        random = np.random.default_rng(7)
        x = 1 + noise * random.normal(size=(240, dimension))
        return Data(x, np.zeros(240), x.mean(0, keepdims=True), np.zeros(1))

    return Job(
        lambda: QuadraticModel(np.geomspace(1, 0.1, dimension), np.full(dimension, start), dtype),
        data,
        optimizer,
        metric=lambda outputs, targets: float(np.mean(np.square(outputs))),
        higher_is_better=False,
        batch=4,
    )


class GradientSource:
    """The initial parameters and gradients that `run_strategy` gives its workers, for programs without a strategy."""

    def __init__(
        self,
        workers: int = 1,
        job: Job | None = None,
        seed: int = 0,
        engine: Callable[[Job, int], Engine] = NumpyEngine,
    ):
        job = job or small_job()
        self.engine = engine(job, seed)
        self.parts: list[Indices] = np.array_split(np.arange(self.engine.train_size), workers)
        self._samplers = [Sampler(part, job.batch, seed, rank) for rank, part in enumerate(self.parts)]

    def start(self) -> FlatArray:
        """Return the initial parameters of every replica, of shape (K,)."""
        return self.engine.initial()

    def gradient(self, rank: int, params: FlatArray) -> FlatArray:
        """Return the mean gradient, of shape (K,), of worker `rank`'s next batch at `params`."""
        out = np.empty_like(params)
        self.engine.gradient(params, self._samplers[rank].next(), out, rank)
        return out

    def stepper(self, params: FlatArray) -> LocalOptimizer:
        """Return the job's optimizer, with its initial state."""
        return LocalOptimizer(self.engine.optimizer, params, self.engine.schema.slices)


class Sent(NamedTuple):
    """A message that was sent to the virtual network at virtual second t."""

    t: float
    to: Address
    message: Message


class Watched(Simulation):
    """A simulation that logs all events and all sent messages of a run in one list."""

    def __init__(self, engine: Engine, plan: Plan, compute: ComputeModel, network: Network, faults: Sequence[Fault]):
        super().__init__(engine, plan, compute, network, self.note, faults=faults)
        self.log: list[Sent | Event] = []

    def note(self, event: Event) -> None:
        """Add an event of a node to the log of the run."""
        self.log.append(event)

    def send(self, to: Address, message: Message) -> None:
        """Add a message to the log of the run, and send the message."""
        self.log.append(Sent(self.now, to, message))
        super().send(to, message)


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """A finished run, with the final state of its simulation."""

    simulation: Watched

    @property
    def setting(self) -> tuple[Strategy, int, int]:
        """The strategy, the number of workers, and the number of steps of each worker."""
        plan = self.simulation.plan
        return plan.strategy, plan.cluster.workers, plan.steps

    @property
    def events(self) -> list[Event]:
        """All events of the run, sorted by virtual time."""
        return [entry for entry in self.simulation.log if not isinstance(entry, Sent)]

    @property
    def result(self) -> FlatArray:
        """The parameters of the model that the run returns, of shape (K,)."""
        result = self.simulation.tracker.result
        assert result is not None, "the run was never evaluated"
        return result

    @property
    def evaluation(self) -> Evaluation:
        """Return loss and metric of the run's resulting model on the test set."""
        evaluation = self.simulation.tracker.evaluation
        assert evaluation is not None, "the run was never evaluated"
        return evaluation

    def seconds_to(self, target: float) -> float:
        """Return the virtual seconds until an evaluation reached `target` from below; infinite if none did."""
        return next((event.seconds for event in self.of(EvaluationEvent) if event.metric >= target), math.inf)

    @property
    def nodes(self) -> dict[Address, Node]:
        """Every node by its address, workers first."""
        return {address: runner.node for address, runner in self.simulation.runners.items()}

    @property
    def params(self) -> dict[Address, FlatArray]:
        """The final parameters of every node, by its address."""
        return {address: node.params for address, node in self.nodes.items()}

    @property
    def replicas(self) -> FlatArray:
        """The final parameters of the workers, of shape (n, K)."""
        return np.stack([params for address, params in self.params.items() if address >= 0])

    @property
    def server(self) -> FlatArray:
        """The final parameters of the servers, joined to one array of shape (K,)."""
        return np.concatenate([params for address, params in self.params.items() if address < 0])

    @property
    def seconds(self) -> float:
        """Duration of the run in virtual seconds."""
        return max(event.seconds for event in self.of(NodeEvent))

    def of(self, kind: type[E]) -> list[E]:
        """Return the run's events of one class, in order of virtual time."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def totals(self) -> dict[Address, NodeEvent]:
        """The totals of every node by its address, workers first."""
        totals = {event.node: event for event in self.of(NodeEvent)}
        return {address: totals[address] for address in self.nodes}

    def sent(self, tag: str, source: Address | None = None) -> list[Sent]:
        """Return the messages with tag `tag` from node `source` (None: any node), in the order of sending."""
        sent = [entry for entry in self.simulation.log if isinstance(entry, Sent)]
        return [s for s in sent if s.message.tag == tag and source in (None, s.message.source)]

    def deliveries(self) -> Counter[tuple[Address, int]]:
        """(node, rank) → number of the rank's updates that took effect on the node; empty if none is recorded."""
        updates, cluster = self.of(UpdateEvent), self.simulation.plan.cluster
        workers = range(cluster.workers)
        at_servers = any(update.node < 0 for update in updates)
        nodes = [node for node in cluster.addresses if (node < 0) == at_servers]
        counts = Counter({(node, rank): 0 for node in nodes for rank in workers if rank != node} if updates else {})
        for update in updates:
            for rank in workers if update.source is None else [update.source]:
                if (update.node, rank) in counts:
                    counts[update.node, rank] += update.count
        return counts


@dataclass(frozen=True)
class VirtualRun:
    """What is run in virtual time, and under which conditions."""

    strategy: Strategy | str
    workers: int = 4
    steps: int = STEPS
    _: KW_ONLY
    job: Job | None = None
    compute: ComputeModel | str = COMPUTE
    network: Network | str = NETWORK
    seed: int = 0
    result: ResultPolicy | None = None
    evaluate_every: int | None = None
    replicas: FlatArray | None = Opt(
        "(n, K), initial parameters of each worker; state derived from the common initial parameters is kept."
    ).default()
    resume: Mapping[Address, Cut] | None = Opt(
        "state from `Simulation.save`, from which the run continues up to `steps`."
    ).default()
    simulation: type[Watched] = Opt("a subclass of `Simulation` that inspects or changes messages.").default(Watched)
    faults: Sequence[Fault | str] = Opt('injected faults, for example "dies(1, 0.5)".').default(())
    restarts: Sequence[float] = Opt("virtual seconds at which all nodes are stopped and restarted from bytes.").default(
        ()
    )
    schedule: Schedule | str | None = Opt(
        "schedule of learning rate and batch size over the steps of the run."
    ).default()
    engine: Callable[[Job, int], Engine] = Opt(
        "function that creates the engine for the job's gradients from job and seed."
    ).default(NumpyEngine)
    parts: Sequence[Indices] | None = Opt("the training samples of each worker; None for equal parts.").default()


@takes(VirtualRun)
def run_strategy(given: VirtualRun) -> SimulatedRun:
    """Run a strategy in virtual time, by default on `small_job`.

    Raises:
        FlockstepError: the run failed, for example by a deadlock.
    """
    strategy, workers, steps = Strategy.parse(given.strategy), given.workers, given.steps
    strategy.check(workers)
    job = given.job or small_job()
    source, cluster = GradientSource(workers, job, given.seed, given.engine), strategy.cluster(workers)
    policy, every = choose_result(strategy, given.result), given.evaluate_every or steps
    optimizer, parts, timetable = source.engine.optimizer, given.parts or source.parts, None
    if given.schedule is not None:
        facts = optimizer.lr, job.batch, workers, source.engine.train_size, steps
        timetable = Timetable.over_steps(Schedule.parse(given.schedule), *facts)
    plan = Plan(strategy, cluster, optimizer, parts, job.batch, steps, given.seed, policy, every, timetable)
    models = ComputeModel.parse(given.compute), Network.parse(given.network)
    faults = [Fault.parse(fault) for fault in given.faults]
    virtual = given.simulation(source.engine, plan, *models, faults)
    virtual.continue_from(given.resume or {})
    for rank, params in enumerate([] if given.replicas is None else given.replicas):
        virtual.runners[rank].node.params[:] = params
    virtual.run(given.restarts)
    return SimulatedRun(virtual)


def run_or_fail(
    strategy: Strategy,
    workers: int,
    steps: int = STEPS,
    restarts: Sequence[float] = (),
    parts: Sequence[Indices] | None = None,
) -> SimulatedRun:
    """Run a strategy on the small job; its errors, and a call without await, become an `AssertionError`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "coroutine .* was never awaited", RuntimeWarning)
        try:
            run = run_strategy(strategy, workers, steps, job=small_job(OPTIMIZER), restarts=restarts, parts=parts)
        except FlockstepError as error:
            raise AssertionError(f"{strategy} on {workers} workers fails: {error}") from error
    for each in caught:
        assert "was never awaited" not in str(each.message), f"{strategy}: {each.message}; write await before the call"
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return run


def _differences(first: SimulatedRun, second: SimulatedRun) -> str:
    """Names of the nodes on which two runs ended with different parameters, for a message."""
    pairs = [(a, first.params[a], second.params[a]) for a in first.params]
    return ", ".join(node_name(address) for address, one, other in pairs if not equal_bits(one, other))
