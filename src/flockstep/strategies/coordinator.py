"""The coordinator of Sandblaster, which runs L-BFGS on gradients that workers compute in portions of the data."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays.schema import slices
from flockstep.messages import LEAVE, Message, Note
from flockstep.nodes import Server
from flockstep.strategies.vector_shards import direction, tell

ARMIJO = 1e-4
"""Fraction of the expected decrease that a step must achieve to be accepted (Armijo 1966)."""


@dataclass
class Portions:
    """The portions of one evaluation of loss and gradient. Each portion waits to be assigned (in `waiting`), is
    assigned (in `out`: portion → ranks), or is done (in `losses`).
    """

    count: int
    backups: int
    waiting: list[int] = field(default_factory=list)
    out: dict[int, list[int]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Start a new evaluation, in which every portion waits to be assigned."""
        self.waiting, self.out, self.losses = list(range(self.count)), {}, {}

    def hand_out(self, rank: int) -> int | None:
        """Assign a portion to an idle worker, and return the portion's number, or None if there is no portion to
        assign.

        The first choice is the next waiting portion. If no portion waits, the choice is the portion that was assigned
        longest ago and has not been repeated `backups` times yet.
        """
        if self.waiting:
            portion = self.waiting.pop(0)
            self.out[portion] = [rank]
            return portion
        for portion, ranks in self.out.items():  # in the order in which they were handed out first
            if len(ranks) <= self.backups and rank not in ranks:
                ranks.append(rank)
                return portion
        return None

    def done(self, portion: int, loss: float) -> None:
        """Record the loss of a portion; only the first result of a portion counts."""
        if portion in self.out:
            del self.out[portion]
            self.losses[portion] = loss

    def lose(self, rank: int) -> None:
        """Return the portions that only the dead worker `rank` was computing to the waiting portions."""
        for portion, ranks in list(self.out.items()):
            if rank in ranks:
                ranks.remove(rank)
            if not ranks:
                del self.out[portion]
                self.waiting.insert(0, portion)


class Report(Note, frozen=True):
    """Note of a worker that requests work: the result of its last portion or, in the first request, the number of
    portions that the worker may compute.
    """

    evaluation: int = 0
    portion: int = 0
    loss: float = 0.0
    """Sum of the losses over the portion's samples."""
    budget: int | None = None
    """Number of portions that the worker may compute; None in all requests but the first."""
    size: int = 0
    """Number of training samples of the job; 0 in all requests but the first."""


class PortionAssignment(Note, frozen=True):
    """Note that assigns a portion to a worker: the number of the portion, or -1 for no portion, and the range of its
    samples.
    """

    evaluation: int
    portion: int
    start: int
    stop: int


@dataclass
class Coordinator:
    """Runs the evaluations of loss and gradient, and the L-BFGS iteration that uses their results."""

    portions: Portions
    history: int
    evaluation: int = 0
    granted: dict[int, int] = field(default_factory=dict)
    """Rank of each live worker → number of portions that the worker may compute."""
    size: int = 0
    """Number of training samples of the job."""
    spent: int = 0
    loss: float | None = None
    """Mean loss at the current parameters; None before the first evaluation."""
    t: float = 1.0
    """Length of the next trial step, as a multiple of the search direction."""
    idle: list[Message] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    pairs: list[int] = field(default_factory=list)

    async def run(self, me: Server) -> None:
        """Iterate until the workers have computed all portions granted to them, or no step along the direction
        decreases the loss.
        """
        self.granted, self.gone, self.idle = {}, set(), []
        while len(self.granted.keys() | self.gone) < me.cluster.workers:
            await self._hear(me)
        if self.loss is None and self._affordable:
            self.loss = await self._evaluate(me)
            await tell(me, "set", "g", "sum")
            await tell(me, "scale", "g", by=1 / self.size)
        while self.loss is not None and self._affordable and len(self.gone) < me.cluster.workers:
            if not await self._step(me, self.loss):
                break
        await tell(me, "set", "trial", "w")
        self.evaluation += 1
        for work in self.idle:
            self._reply(me, work, -1)
        while len(self.gone) < me.cluster.workers:
            await self._hear(me, over=True)

    @property
    def _affordable(self) -> bool:
        """Whether the granted portions suffice for another evaluation."""
        return self.spent + self.portions.count <= sum(self.granted.values())

    async def _step(self, me: Server, loss: float) -> bool:
        """Search along the L-BFGS direction; return False if no step decreases the loss or the granted portions are
        spent.
        """
        await direction(me, self.pairs)
        slope = await tell(me, "dot", "g", "d")
        while slope < 0 and self._affordable:
            await tell(me, "set", "trial", "w")
            await tell(me, "add", "trial", "d", self.t)
            new = await self._evaluate(me)
            if new <= loss + ARMIJO * self.t * slope:
                await self._accept(me)
                self.loss, self.t = new, 1.0
                return True
            self.t /= 2
        return False

    async def _accept(self, me: Server) -> None:
        """Accept the trial step; store the step and the gradient's change as a pair if their curvature is positive."""
        k = next(k for k in range(self.history + 1) if k not in self.pairs)  # the oldest pair's vectors are used again
        for name, new, old in ((f"s{k}", "trial", "w"), (f"y{k}", "sum", "g")):
            await tell(me, "set", name, new)
            if new == "sum":
                await tell(me, "scale", name, by=1 / self.size)
                await tell(me, "set", "new", name)
            await tell(me, "add", name, old, -1.0)
        await tell(me, "set", "w", "trial")
        await tell(me, "set", "g", "new")
        if await tell(me, "dot", f"s{k}", f"y{k}") > 0:
            self.pairs = [*self.pairs, k][-self.history :]
        me.version += 1

    async def _evaluate(self, me: Server) -> float:
        """Return the mean loss at the trial parameters; afterwards the shards hold the sum of the gradients."""
        self.evaluation += 1
        self.portions.begin()
        parked, self.idle = self.idle, []
        for work in parked:
            self._give(me, work)
        while len(self.portions.losses) < self.portions.count:
            await self._hear(me)
        for rank in range(me.cluster.workers):
            if rank not in self.gone:
                me.record_update(rank, 0)
        return sum(self.portions.losses[portion] for portion in sorted(self.portions.losses)) / self.size

    async def _hear(self, me: Server, over: bool = False) -> None:
        """Receive one message: a request for work, with its report, or a worker's goodbye."""
        message = await me.receive()
        if message.source in self.gone:
            return  # a request from before the worker's death, received after the report of its death
        if message.tag == LEAVE:
            self.gone.add(message.source)
            self.idle = [work for work in self.idle if work.source != message.source]
            self.portions.lose(message.source)
            parked, self.idle = self.idle, []
            for work in parked:
                self._give(me, work)
            return
        note = message.note
        if note.budget is not None:
            self.granted[message.source], self.size = note.budget, note.size
        elif note.evaluation == self.evaluation:
            self.portions.done(note.portion, note.loss)
        if over:
            self._reply(me, message, -1)
        else:
            self._give(me, message)

    def _give(self, me: Server, work: Message) -> None:
        """Answer a request for work, or keep the request until a portion is available."""
        portion = self.portions.hand_out(work.source) if self.evaluation else None
        if portion is None:
            self.idle.append(work)
        else:
            self.spent += 1
            self._reply(me, work, portion)

    def _reply(self, me: Server, work: Message, portion: int) -> None:
        part = slices(self.size, self.portions.count)[portion] if portion >= 0 else slice(0, 0)
        me.reply(work, None, PortionAssignment(self.evaluation, portion, part.start, part.stop))
