"""L-BFGS on gradients that many workers compute in portions."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays.schema import slices
from flockstep.messages import BYE, Message, Note
from flockstep.nodes import Server
from flockstep.strategies.vector_shards import direction, tell

ARMIJO = 1e-4
"""The share of the expected decrease that a step must achieve (Armijo 1966)."""


@dataclass
class Portions:
    """The portions of one evaluation: not handed out, out (with how many workers, since when), done."""

    count: int
    backups: int
    waiting: list[int] = field(default_factory=list)
    out: dict[int, list[int]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        """A new evaluation: nothing is handed out."""
        self.waiting, self.out, self.losses = list(range(self.count)), {}, {}

    def hand_out(self, rank: int) -> int | None:
        """A portion for an idle worker: the next one, or a copy of the one that has been out longest; None: none."""
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
        """The first result of a portion counts."""
        if portion in self.out:
            del self.out[portion]
            self.losses[portion] = loss

    def lose(self, rank: int) -> None:
        """What only a dead worker was at is to be handed out again."""
        for portion, ranks in list(self.out.items()):
            if rank in ranks:
                ranks.remove(rank)
            if not ranks:
                del self.out[portion]
                self.waiting.insert(0, portion)


class Report(Note, frozen=True):
    """Of a worker that asks for work: what it has done, or, to begin with, what it may do."""

    evaluation: int = 0
    portion: int = 0
    loss: float = 0.0
    """Sum over the portion's samples."""
    budget: int | None = None
    """Portions that it may compute."""
    size: int = 0
    """Number of training samples."""


class Work(Note, frozen=True):
    """A portion, -1 where there is none, and its samples."""

    evaluation: int
    portion: int
    start: int
    stop: int


@dataclass
class Coordinator:
    """Runs evaluation after evaluation, and L-BFGS on what they give."""

    portions: Portions
    history: int
    evaluation: int = 0
    granted: dict[int, int] = field(default_factory=dict)
    """Portions that each live worker may compute."""
    size: int = 0
    """Number of training samples."""
    spent: int = 0
    loss: float | None = None
    """At the current parameters; None before the first evaluation."""
    t: float = 1.0
    """How far the line search goes next, in lengths of the direction."""
    idle: list[Message] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    pairs: list[int] = field(default_factory=list)

    async def run(self, me: Server) -> None:
        """Until what the workers were granted is spent, or nothing is left to gain."""
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
        """Whether what is granted allows for another evaluation."""
        return self.spent + self.portions.count <= sum(self.granted.values())

    async def _step(self, me: Server, loss: float) -> bool:
        """One line search along the L-BFGS direction; False where no step helps, or none may be tried any more."""
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
        """Keep the step and the change of the gradient as a pair, if its curvature is positive."""
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
        """The mean loss at the trial parameters; the shards then hold the sum of the gradients."""
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
        """Take in one request for work, with its report, or a farewell."""
        message = await me.receive()
        if message.source in self.gone:
            return  # asked before it died, which was heard of first
        if message.tag == BYE:
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
        """Answer a request for work, or keep it until there is some."""
        portion = self.portions.hand_out(work.source) if self.evaluation else None
        if portion is None:
            self.idle.append(work)
        else:
            self.spent += 1
            self._reply(me, work, portion)

    def _reply(self, me: Server, work: Message, portion: int) -> None:
        part = slices(self.size, self.portions.count)[portion] if portion >= 0 else slice(0, 0)
        me.reply(work, None, Work(self.evaluation, portion, part.start, part.stop))
