"""Reads damaged frames and damaged files, as many as asked for, and counts what comes of them.

    python tools/fuzz.py --frames 1000000 --files 100000 --seed 7
    python tools/fuzz.py --frames 2000 --files 0 --seed 7 --only "messages of hosts"

Frames are those of every strategy's messages, of the drivers, the supervisor, hosts, the handshake and a bus that
listens; files are checkpoints, records and the other files of `tests/support/files.py`. Each input must be refused with
an error of flockstep or read as a value. For each kind a line says how many there were, how many were read and refused,
the slowest, and the growth of the resident memory since a tenth of the inputs was read. The command exits with 1 if
reading raised another error, hung, or let memory grow; it prints the beginning of such an input. The seed draws the
same damages again; the bytes of files also depend on the run that wrote the files.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from support.damage import Attempt, resident  # noqa: E402 - the tests' folder is on the path now
from support.files import SUBJECTS, damaged_files, write_all  # noqa: E402
from support.frames import Bus, damaged_frames, frames  # noqa: E402

GROWTH = 16 << 20
"""Bytes by which the resident memory may grow while the inputs of one kind are read."""
SHOWN = 3
"""Wrong inputs of one kind that are printed."""


@dataclass
class Tally:
    """What came of the inputs of one kind."""

    name: str
    taken: int = 0
    refused: int = 0
    wrong: list[Attempt] = field(default_factory=list)
    slowest: float = 0.0
    growth: int = 0

    def read(self, found: Iterable[Attempt], count: int) -> None:
        """Count `count` attempts; the first tenth of them warms up."""
        before = resident()
        for number, one in enumerate(found):
            if number == count // 10:
                before = resident()
            self.taken += one.taken
            self.refused += not one.taken and one.error is None
            self.slowest = max(self.slowest, one.seconds)
            if one.error is not None:
                self.wrong.append(one)
        self.growth = resident() - before

    @property
    def bad(self) -> bool:
        """Whether an input was neither read nor refused, or memory grew."""
        return bool(self.wrong) or self.growth > GROWTH

    def __str__(self) -> str:
        count = self.taken + self.refused + len(self.wrong)
        return (
            f"{self.name:36} {count:8} inputs {self.refused:8} refused {self.taken:7} read {len(self.wrong):4} wrong  "
            f"slowest {1e3 * self.slowest:7.1f} ms  {self.growth / 2**20:+6.1f} MiB"
        )


def of_frames(count: int, seed: int, only: str) -> Iterator[Tally]:
    """Read `count` frames, as many of each kind whose name contains `only`."""
    with tempfile.TemporaryDirectory(prefix="fs-") as place:
        bus = Bus(Path(place))
        try:
            kinds = {name: one for name, one in {**frames(), "bus": bus.frames()}.items() if only in name}
            for number, (name, subject) in enumerate(kinds.items()):
                share, tally = (count + number) // len(kinds), Tally(name)
                draw = random.Random(f"{name} {seed}")  # noqa: S311 - inputs that a seed repeats
                tally.read(damaged_frames(name, subject, share, draw), share)
                yield tally
        finally:
            bus.close()


def of_files(count: int, seed: int, only: str) -> Iterator[Tally]:
    """Read `count` files, as many of each kind whose name contains `only`, of a real run that is carried out first."""
    kinds = [name for name in SUBJECTS if only in name]
    with tempfile.TemporaryDirectory(prefix="fs-") as place:
        written = write_all(Path(place), afresh=True)
        for number, name in enumerate(kinds):
            share, tally = (count + number) // len(kinds), Tally(name)
            copy = Path(place, str(number))
            copy.mkdir()
            tally.read((found for found, _ in damaged_files(name, written, copy, share, seed)), share)
            yield tally


def together(tallies: list[Tally]) -> Tally:
    """What came of all inputs."""
    total = Tally("together", sum(one.taken for one in tallies), sum(one.refused for one in tallies))
    total.wrong = [wrong for one in tallies for wrong in one.wrong]
    total.slowest = max((one.slowest for one in tallies), default=0.0)
    total.growth = sum(one.growth for one in tallies)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="damaged frames to read")
    parser.add_argument("--files", type=int, default=100_000, help="damaged files to read")
    parser.add_argument("--seed", type=int, default=1, help="what is drawn")
    parser.add_argument("--only", default="", help="text in the names of the kinds to read")
    given = parser.parse_args()
    tallies = []
    for count, of_kind in ((given.frames, of_frames), (given.files, of_files)):
        for tally in of_kind(count, given.seed, given.only) if count else ():
            print(tally, flush=True)
            for one in tally.wrong[:SHOWN]:
                print(f"  {one}")
            tallies.append(tally)
    if not tallies:
        parser.error(f"--only must be text in the name of a kind, got {given.only!r}; leave it out for all kinds")
    print(together(tallies))
    return int(any(one.bad for one in tallies))


if __name__ == "__main__":
    sys.exit(main())
