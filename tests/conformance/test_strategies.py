"""Every registered strategy passes the shipped check; wrong ones do not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from flockstep import registry
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.messages import MASTER
from flockstep.strategies.access import CachedCopies, CancelStale
from flockstep.strategies.base import Strategy, Traits
from flockstep.strategies.broadcast import Broadcast, StepCount
from flockstep.strategies.consistency import BulkSynchronous, Consistency
from flockstep.strategies.parameter_server import ParameterServer
from flockstep.strategies.server_state import without
from flockstep.testing import strategies as checks
from flockstep.testing.strategies import check_strategy, run_strategy

DIFFERS_ALONE = {
    "easgd": "its worker is tied to the center",
    "easgd_sync": "its worker is tied to the center",
    "eamsgd": "its worker is tied to the center",
    "deepspark": "its worker is tied to the center",
    "federated": "its optimizer begins anew in every round",
    "fedbuff": "its optimizer begins anew in every task",
    "fedasync": "models are mixed",
    "epoch_server": "epochs end before their last batch",
    "overlap_local_sgd": "it is pulled back to where it was",
    "sandblaster": "it is not SGD",
    "decoupled_momentum": "it steps by signs",
    "majority_vote": "it steps by signs",
    "two_way": "gradients are rounded",
    "one_bit_sgd": "gradients are rounded",
    "ps(codec=half)": "gradients are rounded",
    "ps(codec=half, feedback=residual)": "gradients are rounded",
    "broadcast(scale=0.5)": "updates are scaled",
}


numbers_of_workers = pytest.mark.parametrize(
    "workers", [(1, 3), pytest.param((1, 2, 4), marks=pytest.mark.full)], ids=str
)
"""At every push fewer workers: what depends on their number are collectives and topologies, which have tests below."""


@numbers_of_workers
@pytest.mark.parametrize("name", registry.names("strategy"))
def test_conforms(name, workers):
    strategy = registry.load("strategy", name)()
    check_strategy(strategy, workers, alone_is_plain=name not in DIFFERS_ALONE)


@numbers_of_workers
@pytest.mark.parametrize("name", registry.names("consistency"))
@pytest.mark.parametrize("shards", [1, 3])
def test_parameter_server_conforms_with_each_consistency(name, shards, workers):
    consistency = registry.load("consistency", name)()
    if shards > 1 and isinstance(consistency.access, CancelStale):
        with pytest.raises(CompositionError, match=f"got shards={shards}, use shards=1"):
            ParameterServer(consistency, shards=shards)
        return
    # Own steps that are added to a copy round once more.
    plain = not isinstance(consistency.access, CachedCopies)
    check_strategy(ParameterServer(consistency, shards=shards), workers, alone_is_plain=plain)


@pytest.mark.parametrize("workers", [(4,), pytest.param((3, 5), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("rule", ["backup(2)", "k_sync(2)", "k_batch_sync(3)", "k_async(3)", "k_batch_async(3)"])
def test_parameter_server_conforms_when_several_make_a_step(rule, workers):
    check_strategy(Strategy.parse(f"ps({rule})"), workers)


@pytest.mark.parametrize("workers", [(3, 4), pytest.param((1, 2, 5), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("name", [n for n in registry.names("collective") if n != "torch_distributed"])  # real only
@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd(period=5, "])
def test_synchronous_strategies_conform_on_each_collective(strategy, name, workers):
    text = f"{strategy}collective={name})" if "(" in strategy else f"{strategy}({name})"
    check_strategy(Strategy.parse(text), workers)


@pytest.mark.parametrize("workers", [(2, 4), pytest.param((1, 6), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("name", registry.names("topology"))
def test_neighbor_averaging_conforms_on_each_topology(name, workers):
    check_strategy(Strategy.parse(f"dpsgd({name})"), workers)


@numbers_of_workers
@pytest.mark.parametrize(
    "text",
    [
        "ps(ssp(0))",
        "ps(ssp(1), shards=2)",
        "ps(ssp(1000000))",
        "local_sgd(1)",
        "gossip(1)",
        "partial(1)",
        "partial(0.01)",
        "partial(0.5, drop)",
        "diloco",
    ],
)
def test_conforms_with_other_settings(text, workers):
    check_strategy(Strategy.parse(text), workers)


@numbers_of_workers
@pytest.mark.parametrize(
    "text",
    [
        "easgd(1, 0.5)",
        "one_bit_sgd",
        "broadcast(0.5)",
        "ps(codec=half)",
        "ps(codec=half, feedback=residual)",
        "ps(asynchronous, codec=half, feedback=residual, shards=5)",
    ],
)
def test_conforms_with_settings_that_differ_alone(text, workers):
    check_strategy(Strategy.parse(text), workers, alone_is_plain=False)


@pytest.mark.parametrize("name", DIFFERS_ALONE)
def test_what_differs_alone_is_noticed(name):
    with pytest.raises(AssertionError, match="with one worker gives a different result"):
        checks.check_alone(Strategy.parse(name))


@dataclass(frozen=True)
class Sound(Strategy):
    """A strategy of a user's own: the mean of all gradients, each sent to everyone."""

    claims: ClassVar[Traits] = Traits(delivery="synchronous", survives=False, results=("rank0", "mean"))

    @property
    def traits(self):
        return self.claims

    async def worker(self, me):
        while me.training:
            gradient = (await me.gradient()).copy()
            me.send_all(me.peers, "gradient", gradient)
            heard = {peer: (await me.receive("gradient", peer)).array for peer in me.peers}
            total = sum(gradient if rank == me.rank else heard[rank] for rank in range(me.workers))
            me.optimizer_step((total / me.workers).astype(gradient.dtype))
            me.record_round()


class Deadlocks(Sound):
    async def worker(self, me):
        await super().worker(me)
        if me.workers > 2:
            await me.receive("never")


class WaitsForTheGone(Sound):
    async def worker(self, me):
        await super().worker(me)
        me.leave(peers=True)
        for peer in me.peers:
            await me.receive("leave", peer)
            await me.receive("more", peer)


class StopsEarly(Broadcast):
    async def worker(self, me):
        me.steps -= me.rank
        await super().worker(me)


class Explodes(Sound):
    async def finish(self, me):
        if me.rank == 1:  # not the one that is evaluated
            me.params[0] = np.inf


class Unseeded(Sound):
    async def finish(self, me):
        me.params += np.random.default_rng().random(len(me.params), np.float32)


class UnseededTraffic(Sound):
    async def finish(self, me):
        me.send_all(me.peers, "noise", np.zeros(np.random.default_rng().integers(1, 1 << 30) % 1000))
        for peer in me.peers:
            await me.receive("noise", peer)


class NeverExchanges(Sound):
    async def worker(self, me):
        while me.training:
            me.optimizer_step(await me.gradient())


class SumsFromItself(Sound):
    """Everything is exchanged, but each worker adds up in an order of its own: the last bits differ."""

    async def worker(self, me):
        while me.training:
            total = (await me.gradient()).copy()
            me.send_all(me.peers, "gradient", total)
            for hop in range(1, me.workers):
                total += (await me.receive("gradient", (me.rank + hop) % me.workers)).array
            total /= me.workers
            me.optimizer_step(total)


class ForgetsAtRestart(Sound):
    """Wrong strategy: keeps the last gradient in a local variable, which a restart loses."""

    async def worker(self, me):
        last = np.zeros_like(me.params)
        while me.training:
            gradient = await me.gradient()
            me.optimizer_step(gradient + last)
            last = gradient.copy()


class DoublesTheStep(Sound):
    async def worker(self, me):
        while me.training:
            if me.workers > 1:
                await super().worker(me)
            else:
                me.optimizer_step(2 * await me.gradient())


class KeepsSome(Sound):
    """Says that it is complete, and sends every other update only."""

    claims: ClassVar[Traits] = Traits(delivery="unbounded delay", survives=True, results=("mean",))

    async def worker(self, me):
        while me.training:
            me.optimizer_step(await me.gradient())
            for peer in me.peers if me.step % 2 else []:
                me.record_update(peer)


class CountsTwice(Sound):
    claims: ClassVar[Traits] = Traits(delivery="partial", survives=True, results=("mean",))

    async def worker(self, me):
        await super().worker(me)
        me.record_round()


class LeavesUnread(Broadcast):
    """Records what it should, but does not wait for what is still in flight."""

    async def worker(self, me):
        while me.training:
            me.optimizer_step(await me.gradient())
            me.send_all(me.peers, "update", me.params, StepCount())

    async def finish(self, me):
        me.record_round(me.step)
        me.leave(peers=True)


class LosesAPush(ParameterServer):
    """A server that answers the last push of worker 1, but loses the gradient in it."""

    def _apply(self, me, state, pushes):
        lost = [push for push in pushes if (push.rank, push.timestamp) == (1, checks.STEPS - 1)]
        state.pushes = without(state.pushes, lost)
        super()._apply(me, state, [push for push in pushes if push not in lost])


class NeverAdmits(BulkSynchronous):
    """A rule that forgets the last read of worker 1."""

    def admitted(self, reads, view):
        return [read for read in super().admitted(reads, view) if (read.rank, read.clock) != (1, checks.STEPS)]


@dataclass(frozen=True)
class AnswersTooFew(ParameterServer):
    """A server that applies the last push of worker 1, but never answers it."""

    consistency: Consistency = field(default_factory=NeverAdmits)


class NoResult(Sound):
    claims: ClassVar[Traits] = Traits(delivery="synchronous", survives=False, results=())


class NoSuchServer(Sound):
    claims: ClassVar[Traits] = Traits(delivery="synchronous", survives=False, results=("server",))


class RefusesAll(Sound):
    def check(self, workers):
        raise ConfigurationError("no")


class Asynchronous(Sound):
    """Sound, were it not declared synchronous: everyone follows a server that steps on arrival."""

    @property
    def servers(self):
        return 1

    async def worker(self, me):
        while me.training:
            me.params[:] = await me.request(MASTER, "pull")
            me.send(MASTER, "push", await me.gradient())

    async def master(self, me):
        async for message in me.messages():
            if message.tag == "pull":
                me.reply(message, me.params)
            elif message.tag == "push":
                me.update(message.array)


PARTIAL = Traits(delivery="partial", survives=False, results=("mean", "rank0"))


class SendsNothing(Sound):
    claims: ClassVar[Traits] = PARTIAL

    async def worker(self, me):
        while me.training:
            me.optimizer_step(await me.gradient())


class AppliesNothing(Sound):
    """Its workers send their models, and drop what they receive."""

    claims: ClassVar[Traits] = PARTIAL

    async def worker(self, me):
        while me.training:
            me.send_all(me.peers, "model", me.params)
            for peer in me.peers:
                await me.receive("model", peer)
            me.optimizer_step(await me.gradient())


class TrainsNothing(Sound):
    claims: ClassVar[Traits] = PARTIAL

    async def worker(self, me):
        while me.training:
            await me.gradient()
            me.send_all(me.peers, "model", me.params)
            for peer in me.peers:
                me.params += ((await me.receive("model", peer)).payload - me.params) / 2


class TakesAnotherArray(Sound):
    async def worker(self, me):
        while me.training:
            me.params = me.params - 0.1 * await me.gradient()


@dataclass(frozen=True)
class Rarely(Sound):
    """Averages the models every `period` steps."""

    claims: ClassVar[Traits] = PARTIAL
    period: int = 100

    async def worker(self, me):
        while me.training:
            if me.step % self.period == self.period - 1:
                me.send_all(me.peers, "model", me.params)
                for peer in me.peers:
                    me.params += ((await me.receive("model", peer)).payload - me.params) / 2
            me.optimizer_step(await me.gradient())


class Separate(SendsNothing):
    claims: ClassVar[Traits] = Traits(delivery="partial", survives=True, results=("ensemble", "rank0"))


def test_exchanges_may_be_rare_and_separate_models_need_none():
    for strategy in (Rarely(), Separate(), Strategy.parse("ensemble"), Strategy.parse("local_sgd(period=100)")):
        checks.check_exchanges(strategy, 2)
    with pytest.raises(AssertionError, match=r"on 3 workers exchanges nothing: in 500 steps .*pass more steps if"):
        checks.check_exchanges(Rarely(period=501), 3)
    checks.check_exchanges(Rarely(period=501), 3, steps=30)


class ForgetsAwait(SendsNothing):
    async def swap(self, me):
        me.params[:] = 0

    async def worker(self, me):
        while me.training:
            self.swap(me)  # type: ignore[unused-coroutine]
            me.optimizer_step(await me.gradient())


def test_a_program_that_is_no_coroutine_is_refused_where_it_is_defined():
    with pytest.raises(ConfigurationError, match=r"Plain.worker must be a coroutine; write async def worker"):

        class Plain(SendsNothing):
            def worker(self, me):
                me.leave()


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (SendsNothing(), "on 2 workers exchanges nothing: in 500 steps the parameters of the other workers do not"),
        (AppliesNothing(), "on 2 workers exchanges nothing: .* do not depend on the samples of worker 0; send the"),
        (TrainsNothing(), "on 2 workers trains nothing: in 500 steps no parameters depend on the samples of worker 0"),
        (TakesAnotherArray(), "assigned another array to params of worker 0 at step 1; write into the array, as in"),
        (Strategy.parse("gossip(0)"), "on 2 workers exchanges nothing: in 500 steps"),
        (Deadlocks(), r"on 4 workers fails: deadlock.*'never' from any node"),
        (WaitsForTheGone(), r"on 2 workers fails: worker \d has left"),
        (StopsEarly(), "takes {1: 19} steps"),
        (Explodes(), "the parameters of worker 1 are not finite"),
        (Unseeded(), "with the same seed differ on worker 0"),
        (UnseededTraffic(), "with the same seed have different events"),
        (NeverExchanges(), r"declared synchronous, but the parameters of workers \[1\] of 2"),
        (SumsFromItself(), r"declared synchronous, but the parameters of workers \[.*\] of 4"),
        (Asynchronous(), r"declared synchronous, but the parameters of workers"),
        (ForgetsAtRestart(), "ends differently on worker 0; keep all state between steps in me.state"),
        (DoublesTheStep(), "with one worker gives a different result"),
        (KeepsSome(), "is declared complete, but 10 of 20 updates of worker 1 take effect on worker 0"),
        (CountsTwice(), "21 updates of worker 1 take effect on worker 0"),
        (LeavesUnread(), "leaves messages unread"),
        (LosesAPush(), "on 2 workers is declared complete, but 19 of 20 updates of worker 1 take effect on server 0"),
        (
            AnswersTooFew(),
            "on 2 workers fails: deadlock.*: worker 1 for a reply from server 0 at step 20; server 0 for",
        ),
        (ForgetsAwait(), "coroutine 'ForgetsAwait.swap' was never awaited; write await before the call"),
        (NoResult(), "name no policy"),
        (NoSuchServer(), "is server, but the strategy has no server"),
        (RefusesAll(), "refuses every number of workers"),
        (Sound(), "is not registered as a strategy"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Strategy) else "",
)
def test_a_broken_promise_is_noticed(broken, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_strategy(broken, workers=(1, 2, 4))


def test_a_strategy_of_ones_own_conforms(monkeypatch):
    monkeypatch.setitem(registry._TABLE["strategy"], "sound", f"{__name__}:Sound")
    monkeypatch.setitem(registry._loaded, ("strategy", "sound"), Sound)
    monkeypatch.setitem(registry._names, Sound, "sound")
    check_strategy(Sound())


def test_a_number_of_workers_that_is_refused_is_left_out():
    torus = Strategy.parse("dpsgd(torus)")
    assert not checks.accepts(torus, 5)
    check_strategy(torus, workers=(1, 4, 5))
    with pytest.raises(AssertionError, match="refuses every number of workers"):
        check_strategy(torus, workers=(5, 7))


def test_a_run_of_another_seed_differs():
    """Negative control: if the seed had no effect, equal bits of two runs would prove nothing."""
    first, second = (run_strategy("all_reduce", seed=seed) for seed in (0, 1))
    assert not checks.equal_bits(first.result, second.result)
    assert first.seconds != second.seconds


def test_deliveries_are_those_of_the_record():
    run = run_strategy("broadcast", workers=3, steps=4)
    assert run.deliveries() == Counter({(i, j): 4 for i in range(3) for j in range(3) if i != j})
    assert run_strategy("bsp", workers=2, steps=4).deliveries() == {(-1, 0): 4, (-1, 1): 4}
    assert run_strategy("easgd", workers=2, steps=4).deliveries() == {}
    assert len(run.sent("update")) == 3 * 2 * 4
    assert len(run.sent("update", source=1)) == 2 * 4
