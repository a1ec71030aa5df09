"""Claim: replicas that receive every update are equal in the end, when no message is in flight anymore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, Traits
from flockstep.strategies.broadcast import Broadcast
from flockstep.testing.strategies import equal_bits, run_strategy, small_job
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, same


@dataclass(frozen=True)
class AtTheReceiver(Strategy):
    """Strategy in which each worker adds the updates of all workers to its replica.

    With `momentum` or `rate`, the receiver changes an update before the addition.
    """

    does: Literal["nothing", "momentum", "rate"] = "nothing"

    @property
    def traits(self) -> Traits:
        return Broadcast().traits

    def worker_state(self, me: Worker) -> FlatArray:
        """Return the initial momentum buffer: zeros of shape (K,)."""
        return np.zeros_like(me.params)

    async def worker(self, me: Worker) -> None:
        """Apply the updates that have arrived, compute a gradient, and send the update to all peers."""
        while me.training:
            for message in me.arrived("update"):
                self._absorb(me, message.payload)
            update = -me.lr * await me.gradient()
            me.params += update
            me.send_all(me.peers, "update", update)

    async def finish(self, me: Worker) -> None:
        """Apply the updates that are still in flight when the worker has taken its last step."""
        me.leave(peers=True)
        async for message in me.messages():
            if message.tag == "update":
                self._absorb(me, message.payload)

    def _absorb(self, me: Worker, update: FlatArray) -> None:
        if self.does == "momentum":
            me.state = update = 0.5 * me.state + update
        me.params += update * (1 / (1 + me.step) if self.does == "rate" else 1)


@dataclass(frozen=True)
class StatementOne(Claim):
    """Claim: statement 1 of FAST, that replicas are equal in the end if each receives every update."""

    patterns: int = 1000
    statement = "If every update reaches every worker, even late, all replicas are equal in the end"
    source = "FAST (seed 000), section 3, statement 1"
    setting = "broadcast, 2 to 5 workers, softmax regression, random gradient times and latencies"
    tolerance = "replicas are equal bit for bit for every pattern of delays, and never if one message is lost"

    def check(self, say: Say) -> Verdict:
        """Run many random patterns of message delays, and every tenth of them with one lost message."""
        draw = np.random.default_rng(18)
        equal = broken = 0
        for pattern in range(self.patterns):
            equal += self._agree("broadcast", draw, pattern, None)
            if pattern % 10 == 0:
                broken += not self._agree("broadcast", draw, pattern, (0, 1))
            if pattern % 250 == 249:
                say(f"{pattern + 1} of {self.patterns} patterns")
        tenth = len(range(0, self.patterns, 10))
        rows = (
            same("patterns of delays after which all replicas are equal", self.patterns, equal),
            same("patterns of delays with one lost message after which replicas differ", tenth, broken),
            self._sender("largest difference between replicas, momentum at the sender", "sgd(lr=0.1, momentum=0.9)"),
            self._sender("largest difference between replicas, Adam at the sender", "adam(lr=0.02)"),
            self._receiver("largest difference between replicas, plain additions (rounding)", "nothing", "< 1e-6"),
            self._receiver("largest difference between replicas, momentum at the receiver", "momentum", "> 1e-3"),
            self._receiver(
                "largest difference between replicas, each receiver with its own learning rate", "rate", "> 1e-3"
            ),
        )
        return Verdict(rows)

    def _agree(self, strategy: str, draw: np.random.Generator, pattern: int, lost: tuple[int, int] | None) -> bool:
        n = int(draw.integers(2, 6))
        latency = float(draw.exponential(0.1))
        faults = [] if lost is None else [f"drops({lost[0]}, {lost[1]}, {int(draw.integers(1, 6))})"]
        run = run_strategy(
            strategy,
            n,
            6,
            compute=f"lognormal(0.05, {float(draw.uniform(0.1, 2))})",
            network=f"link(bandwidth=1e6, latency={latency})",
            seed=pattern,
            faults=faults,
        )
        return equal_bits(*run.replicas)

    def _sender(self, what: str, optimizer: str) -> ClaimRow:
        run = run_strategy("broadcast", 4, 12, job=small_job(optimizer), compute="exponential(0.05)")
        apart = float(np.ptp(run.replicas, axis=0).max())
        return ClaimRow(what, "0", apart, apart == 0)

    def _receiver(self, what: str, does: Literal["nothing", "momentum", "rate"], bound: str) -> ClaimRow:
        run = run_strategy(AtTheReceiver(does), 4, 12, job=small_job(dtype="float64"), compute="exponential(0.05)")
        apart = float(np.ptp(run.replicas, axis=0).max())
        return ClaimRow(what, bound, apart, apart < 1e-6 if does == "nothing" else apart > 1e-3)
