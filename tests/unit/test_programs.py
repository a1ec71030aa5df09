"""What a program may wait for: background tasks, gradients given up, in parts, of other blocks and samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.collectives.ring import Ring
from flockstep.errors import PeerLost
from flockstep.messages import Message
from flockstep.nodes import Worker
from flockstep.records.events import StepEvent
from flockstep.strategies.base import Strategy, Traits
from flockstep.testing.strategies import GradientSource, equal_bits, run_strategy

SYNCHRONOUS = Traits("synchronous", False, ("mean", "rank0"))


@dataclass(frozen=True)
class Bucketed(Strategy):
    """All-reduce in parts, each in the background from the moment that it is complete."""

    parts: int = 3
    one_channel: bool = False

    @property
    def traits(self) -> Traits:
        return SYNCHRONOUS

    async def worker(self, me: Worker) -> None:
        parts = slices(len(me.params), self.parts)[::-1]
        while me.training:
            tasks = []
            async for part, gradient in me.gradient_parts(parts):
                channel = "same" if self.one_channel else f"{part.start}"
                tasks.append(me.background(channel, Ring().average(me, gradient[part])))
            for task in tasks:
                await me.finished(task)
            me.optimizer_step(gradient)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_collectives_in_the_background_equal_those_in_the_foreground(n):
    network = "link(bandwidth=1000, latency=0.01)"  # slow: all are under way at once
    run = run_strategy(Bucketed(), n, 12, network=network)
    assert equal_bits(*run.replicas) if n > 1 else True
    plain = run_strategy("all_reduce", n, 12, network=network)
    assert np.allclose(run.result, plain.result, rtol=1e-5, atol=1e-6)
    assert [run.nodes[rank].step for rank in range(n)] == [12] * n
    assert len(run.of(StepEvent)) == 12 * n


def test_without_a_channel_of_their_own_their_messages_mix():
    network = "link(bandwidth=1000, latency=0.01)"
    mixed, apart = (run_strategy(Bucketed(one_channel=one), 3, 12, network=network) for one in (True, False))
    assert not np.allclose(mixed.result, apart.result, rtol=1e-3, atol=1e-3)


@dataclass(frozen=True)
class Impatient(Strategy):
    """Worker 0 computes; the others give up as soon as it says that it is done."""

    @property
    def traits(self) -> Traits:
        return Traits("partial", False, ("rank0",))

    async def worker(self, me: Worker) -> None:
        while me.training:
            if me.rank == 0:
                await me.gradient()
                me.send_all(me.peers, "done")
            else:
                got = await me.gradient_unless("done")
                assert isinstance(got, Message) or len(got) == len(me.params)
                if not isinstance(got, Message):
                    await me.receive("done")
                    me.state.append(me.step)

    def worker_state(self, me: Worker) -> list[int]:
        return []


def test_a_gradient_is_given_up_in_the_moment_in_which_the_message_is_here():
    run = run_strategy(Impatient(), 3, 5, compute="speeds(constant(1), (1, 2, 0.5))", network="ideal")
    ends = {rank: [event.seconds for event in run.of(StepEvent) if event.rank == rank] for rank in range(3)}
    assert ends[1] == ends[0]  # twice as slow: always given up
    assert ends[2] == [t - 0.5 * ends[0][0] for t in ends[0]]  # twice as fast: never
    assert run.nodes[1].state == []
    assert run.nodes[2].state == [1, 2, 3, 4, 5]
    assert [event.loss for event in run.of(StepEvent) if event.rank == 1] == [None] * 5
    assert run.totals[1].compute_seconds == pytest.approx(run.totals[0].compute_seconds)


@dataclass(frozen=True)
class Asks(Strategy):
    """Worker 0 keeps the gradients that it asks for, the last of which ends the step."""

    @property
    def traits(self) -> Traits:
        return Traits("partial", False, ("rank0",), needs_job=True)

    def worker_state(self, me: Worker) -> list[object]:
        return []

    async def worker(self, me: Worker) -> None:
        while me.training:
            for block in range(me.workers):
                gradient = await me.gradient_of(block, last=False)
                me.state.append(gradient.copy())
            gradient = await me.gradient_over(0, me.train_size)
            me.state.append(gradient.copy())
            me.state.append(me.loss)


def test_gradients_of_other_blocks_and_of_chosen_samples():
    run = run_strategy(Asks(), 3, 2, compute="constant(1)")
    source = GradientSource(3)
    w = source.start()
    for rank in range(3):
        asked = run.nodes[rank].state
        fresh = GradientSource(3)
        for step in range(2):
            mine = asked[5 * step : 5 * step + 5]
            for block in range(3):
                assert equal_bits(mine[block], fresh.gradient(block, w))
            whole = np.empty_like(w)
            loss = source.engine.gradient(w, np.arange(source.engine.train_size), whole)
            assert equal_bits(mine[3], whole)
            assert mine[4] == loss
    assert len(run.of(StepEvent)) == 6
    assert run.seconds == pytest.approx(2 * (3 + 240 / 8))  # batches of 8 take a second


@dataclass(frozen=True)
class AnswersWhileComputing(Strategy):
    """Worker 1 changes its parameters in the background while its gradient is being computed."""

    @property
    def traits(self) -> Traits:
        return Traits("partial", False, ("rank0",))

    async def worker(self, me: Worker) -> None:
        if me.rank == 0:
            me.send(1, "disturb/serve")
            await me.gradient()
            return
        task = me.background("serve", self.serve(me))
        gradient = (await me.gradient()).copy()
        assert task.done
        me.state.append(gradient)

    def worker_state(self, me: Worker) -> list[object]:
        return []

    async def serve(self, me: Worker) -> None:
        await me.receive("disturb")
        me.params[:] = 7


def test_a_gradient_is_of_the_parameters_that_it_was_asked_at():
    run = run_strategy(AnswersWhileComputing(), 2, 1, compute="constant(1)")
    source = GradientSource(2)
    assert equal_bits(run.nodes[1].state[0], source.gradient(1, source.start()))
    assert (run.nodes[1].params == 7).all()


@dataclass(frozen=True)
class WaitsForALeaver(Strategy):
    """Worker 1 waits in the background for a message of worker 0, which leaves instead."""

    @property
    def traits(self) -> Traits:
        return Traits("partial", False, ("rank0",))

    async def worker(self, me: Worker) -> None:
        if me.rank == 1:
            await me.finished(me.background("wait", self.wait(me)))
        await me.gradient()

    async def wait(self, me: Worker) -> None:
        await me.receive("never", 0)

    async def finish(self, me: Worker) -> None:
        me.leave(peers=True)


def test_a_task_hears_that_what_it_waits_for_cannot_come():
    with pytest.raises(PeerLost, match="'never/wait' from worker 0"):
        run_strategy(WaitsForALeaver(), 2, 1)
