"""Who computes which portion of the data."""

from __future__ import annotations

from dataclasses import dataclass, field


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
