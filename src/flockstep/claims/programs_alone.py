"""Programs on their own, without training: what a set of workers does once, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from flockstep.claims.clockwork import still_job
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, Traits
from flockstep.testing.strategies import Run, run_strategy

Program = Callable[[Worker], Awaitable[None]]


@dataclass(frozen=True)
class Once(Strategy):
    """Every worker runs `program` once."""

    program: Program

    @property
    def traits(self) -> Traits:
        """Nothing is trained."""
        return Traits(completeness=1, survives=False, results=("rank0",))

    async def worker(self, me: Worker) -> None:
        """The program."""
        await self.program(me)


def run_once(program: Program, workers: int, network: str, unit: float = 0.0) -> Run:
    """Run it on so many workers; one gradient, which costs nothing to compute, takes `unit` virtual seconds."""
    return run_strategy(
        Once(program), workers, 1_000_000, job=still_job(), compute=f"constant({unit!r})", network=network
    )


async def spend(me: Worker, units: int) -> None:
    """Compute for that many units of virtual time."""
    for _ in range(units):
        await me.gradient()
