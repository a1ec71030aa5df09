"""Automatic selection of the fastest collective for the array size and the number of workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.base import Collective
from flockstep.collectives.binomial_tree import BinomialTree
from flockstep.collectives.costs import LinkModel
from flockstep.collectives.double_tree import DoubleTree
from flockstep.collectives.group import Group
from flockstep.collectives.pipelined import Pipelined
from flockstep.collectives.rabenseifner import Rabenseifner
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.collectives.table import nearest, read_table
from flockstep.errors import ConfigurationError
from flockstep.expression import SIZED
from flockstep.messages import HEADER_BYTES

CANDIDATES: tuple[Collective, ...] = (
    RecursiveDoubling(),
    Rabenseifner(),
    Ring(),
    BinomialTree(),
    *map(DoubleTree, (2, 8, 32, 128)),
    *map(Pipelined, (4, 16, 64, 256)),
)
"""Collectives among which `auto` selects. Of collectives with equal cost, the first in this order is selected."""


@dataclass(frozen=True)
class Auto(Collective):
    """Chooses for every array the collective of least cost (selection as in Thakur, Rabenseifner & Gropp 2005).

    The cost is that of the model in `collectives/costs.py` for `latency` in seconds and `bandwidth` in bytes per
    second. With `table`, a TOML file of which every host needs a copy, the cost is the time measured for the nearest
    array size and the nearest number of workers. The choice depends only on P and the array's bytes, so all ranks make
    the same choice and sum in the same order; arrays of different sizes may be summed in different orders.
    """

    latency: float = 5e-5
    bandwidth: float = field(default=1.25e9, metadata=SIZED)
    table: str = ""

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and 0 < self.bandwidth < float("inf")):
            raise ConfigurationError(
                f"auto needs a latency >= 0 s and a bandwidth > 0 bytes per second, got {self.latency} and "
                f"{self.bandwidth}; for 10 Gbit Ethernet use 5e-5 and 1.25e9"
            )
        if self.table:
            for row in read_table(self.table):
                Collective.parse(row.collective)

    def choose(self, workers: int, nbytes: int) -> Collective:
        """Return the collective for an array of `nbytes` bytes."""
        if self.table:
            rows = nearest(read_table(self.table), workers, nbytes)
            return Collective.parse(min(rows, key=lambda row: row.seconds).collective)
        link = LinkModel(self.latency, 1 / self.bandwidth, HEADER_BYTES)
        return min(CANDIDATES, key=lambda candidate: candidate.cost(workers, nbytes, link))

    async def divided_sum(self, me: Group, array: FlatArray, divisor: int) -> None:
        await self.choose(me.workers, array.nbytes).divided_sum(me, array, divisor)

    def cost(self, workers: int, nbytes: float, link: LinkModel) -> float:
        return self.choose(workers, round(nbytes)).cost(workers, nbytes, link)

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        """Return the number of elements that the selected collective sends, if `size` elements of 4 bytes each are
        summed.
        """
        return self.choose(workers, 4 * size).sent_elements(workers, size, rank)

    def rounds(self, workers: int) -> int:
        """Return the number of rounds of the collective that `auto` selects for the smallest arrays."""
        return self.choose(workers, 0).rounds(workers)
