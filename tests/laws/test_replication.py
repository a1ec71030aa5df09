"""Servers with backups, in virtual time: whenever a server dies, every push takes effect exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flockstep.errors import ConfigurationError, PeerLost, ProtocolError, RunError
from flockstep.messages import Message
from flockstep.optimizers.base import Optimizer
from flockstep.programs import NeedGradient
from flockstep.records.events import EvaluationEvent, LostEvent, PromotedEvent, ScalarEvent, UpdateEvent
from flockstep.runtime.replication import LOG, ReplicatedServer
from flockstep.runtime.runner import Runner
from flockstep.runtime.settings import tell_servers
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import Sent, SimulatedRun, Watched, check_strategy, run_strategy
from support.matrix import few

WORKERS, STEPS = 3, 12
REPEATED = "repeated_messages"
STRATEGIES = [
    "ps(bsp)",
    "ps(ssp(2), shards=2)",
    "ps(essp(1))",
    "ps(cached_ssp(1))",
    "ps(backup(1))",
    "ps(softsync(2), server_update=with_optimizer('adam'))",
    "ps(asynchronous, codec=topk(0.3), feedback=residual)",
    "downpour(2, 3)",
    "easgd(period=2)",
    "factor_server",
    "easgd_sync(period=2)",
    "epoch_server(length=4)",
    "gradient_coding(s=2)",
    "hierarchical(group=2)",
    "hierarchical(group=2, leaf=asynchronous, root=asynchronous)",
    "sandblaster(shards=2)",
]


def replicated(strategy: str, count: int = 1) -> str:
    return f"{strategy[:-1]}, replicas={count})" if strategy.endswith(")") else f"{strategy}(replicas={count})"


def run(strategy: str, *faults: str, workers: int = WORKERS, simulation: type[Watched] = Watched) -> SimulatedRun:
    network = "link(bandwidth='1gbit', latency=0.01)"
    return run_strategy(
        strategy, workers, STEPS, compute="lognormal(1, 0.3)", network=network, faults=faults, simulation=simulation
    )


def moments(whole: SimulatedRun, server: int = -1, every: int = 5) -> list[float]:
    """Seconds at which a push, its entry in the log, the backup's acknowledgment, or an answer is on its way."""
    sent = [one for one in whole.simulation.log if isinstance(one, Sent)]
    chosen = [one.t for one in sent if one.message.tag == LOG and one.message.source == server][2::every]
    assert len(chosen) > 1
    times = [t + phase for t in chosen for phase in (-0.005, 0.005, 0.015, 0.025)]
    return [t for t in times if t < whole.seconds - 0.5]  # then the server's program has not ended


def applied(one: SimulatedRun) -> Counter[tuple[int, int]]:
    """Number of gradients of each worker that each server has applied, as the record says."""
    found: Counter[tuple[int, int]] = Counter()
    for event in one.of(UpdateEvent):
        for source in range(WORKERS) if event.source is None else [event.source]:
            found[event.node, source] += event.count
    return found


def clocks(one: SimulatedRun) -> list[dict[int, int]]:
    """Clocks of the workers in the state of each process of a parameter server that is alive."""
    dead = {event.node for event in one.of(LostEvent)}
    return [node.state.clocks for address, node in one.nodes.items() if address < 0 and address not in dead]


@pytest.mark.parametrize("strategy", few(STRATEGIES, "ps(ssp(2), shards=2)", "easgd(period=2)"))
def test_every_push_is_applied_once_whenever_the_server_dies(strategy: str) -> None:
    """Deaths in all phases of a step: gradients are computed, pushes, log entries or replies are on their way."""
    whole = run(replicated(strategy))
    servers = Strategy.parse(strategy).servers_for(WORKERS)
    for node, at in [(-1 - i, at) for i in range(servers) for at in moments(whole, -1 - i, every=7)]:
        hurt = run(replicated(strategy), f"dies({node}, {at}, noticed=0.25)")
        [promoted] = hurt.of(PromotedEvent)
        assert (promoted.node, promoted.process, promoted.epoch) == (node, node - servers, 1)
        assert promoted.seconds == pytest.approx(at + 0.25)
        assert max(applied(hurt).values(), default=0) <= STEPS
        if Strategy.parse(strategy).traits.delivery != "partial":  # then late gradients are dropped
            assert applied(hurt) == applied(whole), f"death at {at}"
        evaluated = [[event.step for event in one.of(EvaluationEvent)] for one in (hurt, whole)]
        assert len(evaluated[0]) == len(evaluated[1])
        assert evaluated[0] == evaluated[1] or not Strategy.parse(strategy).traits.fixed_steps


@pytest.mark.parametrize("replicas", few([1, 2], 1))
def test_a_synchronous_run_ends_with_the_bits_of_a_run_without_backups(replicas: int) -> None:
    plain = run("ps(bsp, shards=2)")
    strategy = replicated("ps(bsp, shards=2)", replicas)
    for at in moments(run(strategy), server=-2):
        hurt = run(strategy, f"dies(-2, {at}, noticed=0.25)")
        assert len(hurt.of(PromotedEvent)) == 1
        assert np.array_equal(hurt.replicas, plain.replicas)
        assert np.array_equal(hurt.result, plain.result)
        assert clocks(hurt) == [dict.fromkeys(range(WORKERS), STEPS)] * (2 * (1 + replicas) - 1)


@given(st.floats(0.1, 9.0), st.floats(0.0, 1.5), st.booleans())
def test_a_server_and_a_worker_may_die(at: float, noticed: float, worker: bool) -> None:
    faults = [f"dies(-1, {at}, noticed={noticed})", *([f"dies(2, {at}, noticed=0.3)"] if worker else [])]
    one = run("ps(asynchronous, replicas=1)", *faults)
    found = applied(one)
    for rank in range(2 if worker else 3):
        assert found[-1, rank] == STEPS
    assert found[-1, 2] <= STEPS
    assert len(one.of(PromotedEvent)) == 1


@example(1.25, 0.0, 0.0, [-1, -2, -3], False)
@given(st.floats(0.1, 11.0), st.floats(0.0, 1.5), st.floats(0.0, 5.0), st.permutations([-1, -2, -3]), st.booleans())
def test_two_of_three_processes_of_a_server_may_die(
    at: float, noticed: float, later: float, order: list[int], worker: bool
) -> None:
    """In any order, also one before the other is noticed, and with the death of a worker in between."""
    faults = [f"dies({order[0]}, {at}, noticed={noticed})", f"dies({order[1]}, {at + later}, noticed=0.5)"]
    faults += [f"dies(2, {at + later / 2}, noticed=0.3)"] if worker else []
    one = run("ps(ssp(2), replicas=2)", *faults)
    found = applied(one)
    for rank in range(2 if worker else 3):
        assert found[-1, rank] == STEPS
    assert found[-1, 2] <= STEPS
    epochs = [event.epoch for event in one.of(PromotedEvent)]
    assert epochs == sorted(set(epochs))
    again = run("ps(ssp(2), replicas=2)", *faults)
    assert again.events == one.events
    assert np.array_equal(again.replicas, one.replicas)


@pytest.mark.parametrize("order", [(-1, -3), (-3, -1)])
def test_the_processes_of_a_server_may_hear_of_a_death_one_after_another(order: tuple[int, int]) -> None:
    """The middle process of three dies; a process sends to another one that has not been told yet."""

    class OneByOne(Watched):
        at = 0.0

        def run(self, restarts: Sequence[float] = ()) -> None:
            self._queue.schedule(self.at, lambda: self.die(-2))
            for place, address in enumerate(order):
                self._queue.schedule(self.at + 0.3 + place, lambda address=address: self.runners[address].lose(-2))
            super().run(restarts)

    for at in moments(run("ps(bsp, replicas=2)")):
        OneByOne.at = at
        assert applied(run("ps(bsp, replicas=2)", simulation=OneByOne)) == {
            (-1, rank): STEPS for rank in range(WORKERS)
        }


def test_new_settings_of_the_optimizer_count_as_a_message() -> None:
    """A script changes another setting than the learning rate: the server takes it over, and expects the next push."""

    class Changes(Watched):
        def _start_gradient(self, runner: Runner, need: NeedGradient) -> None:
            if runner.node.step == 3 and runner.node.address == 0:
                tell_servers(runner.node, Optimizer.parse("sgd(lr=0.05, weight_decay=0.01)"))
            super()._start_gradient(runner, need)

    for replicas in (0, 1):
        one = run(f"ps(asynchronous, replicas={replicas})", simulation=Changes)
        assert applied(one) == {(-1, rank): STEPS for rank in range(WORKERS)}
        assert str(one.nodes[-1].optimizer) == "sgd(lr=0.05, weight_decay=0.01)"
        assert not one.nodes[-1].mailbox.missing


def test_what_a_process_keeps_is_bounded() -> None:
    """Logs and unacknowledged messages are as many as a step of all workers sends, however long the run is."""
    most = Counter[str]()

    class Measured(Watched):
        def send(self, to: int, message: object) -> None:
            super().send(to, message)  # type: ignore[arg-type]
            for runner in self.runners.values():
                one = runner.replication
                most["sent"] = max(most["sent"], *(len(kept) for kept in one.sent.values()), 0)
                if isinstance(one, ReplicatedServer):
                    most["log"] = max(most["log"], len(one._log), len(one._held), len(one._handled))

    run("ps(essp(1), replicas=1)", simulation=Measured)
    assert 0 < most["log"] <= 2 * WORKERS
    assert 0 < most["sent"] <= 2 * WORKERS


def test_negative_control_without_the_window_a_push_is_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that the backup has, but that the dead server did not acknowledge, is sent again by its worker."""
    whole = run("ps(asynchronous, replicas=1)")
    times = moments(whole)
    hurt = [run("ps(asynchronous, replicas=1)", f"dies(-1, {at}, noticed=0.25)") for at in times]
    assert all(applied(one) == applied(whole) for one in hurt)
    repeated = [sum(e.value for e in one.of(ScalarEvent) if e.node < 0 and e.name == REPEATED) for one in hurt]
    assert max(repeated) > 0, "no push was sent twice"
    monkeypatch.setattr(ReplicatedServer, "_is_repeated", lambda self, source, number: False)
    hurt = [run("ps(asynchronous, replicas=1)", f"dies(-1, {at}, noticed=0.25)") for at in times]
    assert [applied(one) != applied(whole) for one in hurt] == [count > 0 for count in repeated]


def test_negative_control_acknowledged_before_the_backup_has_it_a_push_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledged at once, a push on its way to the backup of a dead server is sent by nobody any more."""

    def eager(self: ReplicatedServer, *arguments: object) -> None:
        handle(self, *arguments)
        self._commit(self.position)

    handle = ReplicatedServer._handle
    monkeypatch.setattr(ReplicatedServer, "_handle", eager)
    times = moments(run("ps(asynchronous, replicas=1)"))

    class Cut(Watched):
        """The log entries that are on their way when the server dies do not arrive."""

        def die(self, address: int) -> None:
            super().die(address)
            self.cut = address

        def _arrive(self, to: int, message: object, sent_at: float) -> None:
            assert isinstance(message, Message)
            if message.tag != LOG or getattr(self, "cut", None) != message.source:
                super()._arrive(to, message, sent_at)

    seen = 0
    for at in times:
        try:
            run("ps(asynchronous, replicas=1)", f"dies(-1, {at}, noticed=0.25)", simulation=Cut)
        except (ProtocolError, RunError):  # the worker's next push has the wrong number, or there is none
            seen += 1
    assert seen > 0


def test_a_server_that_wakes_up_is_fenced() -> None:
    """A server that was taken for dead goes on: its messages are refused, and it is told that another one leads."""

    class Wakes(Watched):
        """Server 0 stops at `stops` and goes on at `wakes`; the others are told of its death in between."""

        stops, told, wakes = 4.0, 5.0, 6.0
        ended = ""

        def run(self, restarts: Sequence[float] = ()) -> None:
            self._queue.schedule(self.told, self.tell)
            super().run(restarts)

        def tell(self) -> None:
            for address, runner in self.runners.items():
                if address != -1:
                    runner.lose(-1)

        def _arrive(self, to: int, message: object, sent_at: float) -> None:
            if to == -1 and self.stops <= self.now < self.wakes:
                self._queue.schedule(self.wakes, lambda: self._arrive(to, message, sent_at))  # type: ignore[arg-type]
            elif not (to == -1 and self.ended):
                try:
                    super()._arrive(to, message, sent_at)  # type: ignore[arg-type]
                except PeerLost as error:
                    assert to == -1
                    self.ended = str(error)
                    self.runners[-1].close()

    woken = run("ps(asynchronous, replicas=1)", simulation=Wakes)
    assert isinstance(woken.simulation, Wakes)
    assert woken.simulation.ended == (
        "server 0 was declared lost, and another process leads server 0 in epoch 1; this process ends"
    )
    assert sum(e.value for e in woken.of(ScalarEvent) if e.name == "fenced_messages") > 0
    assert applied(woken) == {(-1, rank): STEPS for rank in range(WORKERS)}


def test_a_server_dies_with_its_last_process() -> None:
    with pytest.raises(PeerLost, match="server 1 died at step"):
        run("ps(bsp, replicas=1)", "dies(-1, 3)", "dies(-2, 5)")


@pytest.mark.parametrize("strategy", few(["ps(ssp(1), replicas=1)", "easgd(replicas=1)"], "ps(ssp(1), replicas=1)"))
def test_a_strategy_with_backups_passes_the_checks(strategy: str) -> None:
    check_strategy(Strategy.parse(strategy), alone_is_plain="easgd" not in strategy)


@pytest.mark.parametrize("replicas", [-1, 5])
def test_numbers_of_backups_that_are_refused(replicas: int) -> None:
    with raises_replicas(replicas):
        Strategy.parse(f"ps(replicas={replicas})")


def raises_replicas(got: int) -> pytest.RaisesExc[ConfigurationError]:
    return pytest.raises(
        ConfigurationError, match=rf"replicas must be >= 0 and <= 4 backups of each server, got {got}; 1"
    )
