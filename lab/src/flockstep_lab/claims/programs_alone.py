"""Runs a communication program once on several workers, in virtual time and without training."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, Traits
from flockstep.testing.strategies import SimulatedRun, run_strategy
from flockstep_lab.claims.update_trace import still_job

WorkerProgram = Callable[[Worker], Awaitable[None]]


@dataclass(frozen=True)
class Once(Strategy):
    """A strategy in which every worker runs the function `program` once."""

    program: WorkerProgram

    @property
    def traits(self) -> Traits:
        """The strategy's traits: synchronous delivery; the run does not survive the loss of a worker."""
        return Traits(delivery="synchronous", survives=False, results=("rank0",))

    async def worker(self, me: Worker) -> None:
        await self.program(me)


def run_once(program: WorkerProgram, workers: int, network: str, unit: float = 0.0) -> SimulatedRun:
    """Run a program once on each of `workers` workers, in virtual time.

    `me.gradient()` takes `unit` virtual seconds.
    """
    return run_strategy(
        Once(program), workers, 1_000_000, job=still_job(), compute=f"constant({unit!r})", network=network
    )


async def spend(me: Worker, units: int) -> None:
    """Let the worker compute for `units` units of virtual time."""
    for _ in range(units):
        await me.gradient()
