"""Strategies stopped several times in mid-run, with messages on their way, begin anew from bytes.

At every push, the checks of `test_strategies.py` include the restarts of every registered strategy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from flockstep import registry
from flockstep.messages import LEAVE, MASTER
from flockstep.nodes import Server, Worker
from flockstep.strategies.all_reduce import AllReduce
from flockstep.strategies.base import Strategy, Traits
from flockstep.strategies.local_sgd import LocalSGD
from flockstep.testing.strategies import check_restart, run_or_fail, run_strategy

OTHERS = [
    *(f"ps({name}, shards=3, codec=half, feedback=residual)" for name in ("asynchronous", "ssp(2)", "value_bound")),
    *(f"ps({name}, codec=half)" for name in ("essp(2)", "cached_ssp(2)", "backup(1)", "k_async(2)", "softsync(2)")),
    "ps(ssp(2), filters=(random_skip(0.5),))",
    "ps(asynchronous, server_update=delay_compensated, codec=topk(0.2), feedback=residual)",
    "all_reduce(codec=dgc(0.25))",
    "all_reduce(codec=powersgd(1), feedback=residual)",
    "local_sgd(4, outer_optimizer=nesterov)",
    "local_sgd(post_local(4, 10))",
    "streaming_diloco(period=4, overlap=3)",
    "overlap_local_sgd(3)",
    "gossip(0.5)",
    "gossip(0.5, acknowledged=True)",
    "downpour(3, 2)",
    "downpour(2, 2, overlap=True)",
    "partial(0.05, defer)",
    "sgp(tau=1)",
    "adpsgd(star)",
    "sandblaster(shards=2)",
    "ps(bsp, shards=2)",
]


@pytest.mark.parametrize("text", OTHERS)
def test_restart_with_other_settings(text: str) -> None:
    check_restart(run_or_fail(Strategy.parse(text), 4))


REFUSE = {
    "hogwild": "its workers write to one shared array, of which no node has a state of its own",
}
"""Registered strategy → reason why it refuses restarts."""


@pytest.mark.full
@pytest.mark.parametrize("name", registry.names("strategy"))
def test_restart_of_every_registered_strategy(name: str) -> None:
    strategy = registry.load("strategy", name)()
    assert strategy.traits.restarts == (name not in REFUSE), REFUSE.get(name)
    check_restart(run_or_fail(strategy, 4))


@dataclass(frozen=True)
class WaitMonitor(Strategy):
    """Worker 0 computes; the others give up when it says so, and wait for more of it in the same step."""

    traits = Traits(delivery="partial", survives=False, results=("rank0",))

    async def worker(self, me: Worker) -> None:
        while me.training:
            if me.rank == 0:
                gradient = await me.gradient()
                me.send_all(me.peers, "enough")
                me.send_all(me.peers, "more", gradient)
            else:
                await me.gradient_unless("enough")
                gradient = await me.receive_array("more", 0)
                for _ in me.arrived("enough"):
                    pass
            me.optimizer_step(gradient)


def test_restart_between_a_gradient_that_was_given_up_and_the_next_step() -> None:
    """What was noted of it before is not noted again."""
    setting = {"compute": "speeds(constant(1), (1, 3, 3, 3))", "network": "link(bandwidth=100, latency=0.3)"}
    whole = run_strategy(WaitMonitor(), 4, 6, **setting)
    for share in np.linspace(0.05, 0.95, 12):
        again = run_strategy(WaitMonitor(), 4, 6, restarts=[float(share) * whole.seconds], **setting)
        assert again.events == whole.events


class Counts(LocalSGD):
    """Counts the steps to the next average in a local."""

    async def worker(self, me: Worker) -> None:
        count = 0
        while me.training:
            me.optimizer_step(await me.gradient())
            count += 1
            if count % 4 == 0:
                await self.collective.average(me, me.params)


class Remembers(AllReduce):
    """Keeps what it has drawn in a place of its own."""

    async def worker(self, me: Worker) -> None:
        drawn = float(me.random.normal())
        while me.training:
            gradient = await me.gradient()
            gradient += np.float32(drawn)
            await self.collective.average(me, gradient)
            me.optimizer_step(gradient)


@dataclass(frozen=True)
class Collects(Strategy):
    """A server that keeps the round's gradients in a local."""

    traits = Traits(delivery="synchronous", survives=False, results=("server",))

    @property
    def servers(self) -> int:
        return 1

    async def worker(self, me: Worker) -> None:
        while me.training:
            me.params[:] = (await me.ask(MASTER, "push", await me.gradient())).payload

    async def master(self, me: Server) -> None:
        waiting = []
        async for message in me.messages():
            if message.tag == LEAVE:
                continue
            waiting.append(message)
            if len(waiting) == me.cluster.workers:
                for one in sorted(waiting, key=lambda one: one.source):
                    me.params -= 0.1 * one.payload / len(waiting)
                me.reply_all(waiting, me.params)
                waiting.clear()


class Holds(AllReduce):
    """Wrong strategy: its state contains an object that is not data."""

    def worker_state(self, me: Worker) -> object:
        return iter(range(10**6))


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Counts(), "ends differently|in me.state|has different events|was lost|deadlock"),
        (Remembers(), "in me.state"),
        (Collects(), "in me.state|deadlock"),
        (Holds(), r"state\.state is builtins\.range_iterator, which cannot be saved"),
    ],
)
def test_what_is_remembered_elsewhere_is_noticed(strategy: Strategy, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_restart(run_or_fail(strategy, 4))
