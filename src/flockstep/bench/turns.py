"""Takes turns: each way in processes of its own kind, round after round, so that what else goes on hits all alike."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flockstep.bench.ways import Way
from flockstep.errors import FlockstepError
from flockstep.transports.shared_group import needed
from flockstep.transports.shared_memory import SharedMemory

PATIENCE = 120.0
"""Seconds within which a process has to answer."""
ROOM = 1 << 20
"""Bytes of shared memory beside two arrays of the largest size."""


@dataclass
class Figure:
    """What one way took for one size, or why there is nothing to say."""

    way: str
    workers: int
    bytes: int
    seconds: float | None = None
    """Of one call: the median over rounds."""
    low: float | None = None
    """The first quartile."""
    high: float | None = None
    """The third."""
    rounds: int = 0
    missing: str = ""
    """How to install what the way lacks, or how it failed."""

    @property
    def rate(self) -> float | None:
        """Bytes of the array per second."""
        return None if not self.seconds else self.bytes / self.seconds


class Crew:
    """n processes that do as they are told, started by this one or by mpirun."""

    def __init__(self, catalogue: str, workers: int, by_mpirun: bool, folder: Path, largest: int):
        self._listening = socket.socket(socket.AF_UNIX)
        address = str(folder / ("m" if by_mpirun else "p"))
        self._listening.bind(address)
        self._listening.listen(workers)
        self._listening.settimeout(0.2)
        entry = [sys.executable, "-m", "flockstep.bench.rank", catalogue, address, str(workers), str(largest)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        commands = [_mpirun(workers) + entry] if by_mpirun else [[*entry, str(rank)] for rank in range(workers)]
        self._processes = [subprocess.Popen(command, env=environment) for command in commands]  # noqa: S603
        self._files: list[Any] = []
        try:
            self._files = [self._accepted() for _ in range(workers)]
            self._files = [
                file for _, file in sorted((json.loads(file.readline())["rank"], file) for file in self._files)
            ]
        except FlockstepError:
            self.close()
            raise

    def _accepted(self) -> Any:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                connection, _ = self._listening.accept()
                break
            except TimeoutError:
                ended = [process.args for process in self._processes if process.poll() is not None]
                if ended or time.monotonic() > deadline:
                    raise FlockstepError("its processes do not start") from None
        connection.settimeout(PATIENCE)
        with connection:  # the file keeps it open
            return connection.makefile("rw", encoding="utf-8")

    def ask(self, **what: Any) -> list[Any]:
        """Tell all of them the same; their answers by rank.

        Raises:
            FlockstepError: one of them failed.
        """
        try:
            for file in self._files:
                file.write(json.dumps(what) + "\n")
                file.flush()
            answers = [json.loads(file.readline() or '{"failed": "it ended"}') for file in self._files]
        except OSError as error:
            raise FlockstepError(f"its processes do not answer: {error}") from None
        for answer in answers:
            if "failed" in answer:
                raise FlockstepError(answer["failed"])
        return [answer["answer"] for answer in answers]

    def close(self) -> None:
        """End them."""
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        self._listening.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _mpirun(workers: int) -> list[str]:
    """How the wheel's mpirun is called, or else the system's."""
    own = Path(sysconfig.get_path("scripts")) / "mpirun"
    found = str(own) if own.exists() else shutil.which("mpirun") or "mpirun"
    bound = "core" if workers <= (os.cpu_count() or 1) else "none"
    return [found, "--allow-run-as-root", "--oversubscribe", "--bind-to", bound, "-n", str(workers)]


def take_turns(
    catalogue: str,
    ways: Sequence[Way],
    workers: int,
    sizes: Sequence[int],
    rounds: int,
    say: Callable[[str], None] = lambda what: None,
) -> list[Figure]:
    """Medians over rounds; in a round every way has its turn with every size (bytes). Missing ways say what they lack.

    `catalogue` is the module in whose `WAYS` the processes find a way by its name.
    """
    missing = [Figure(way.name, workers, size, missing=way.missing) for way in ways if way.missing for size in sizes]
    able = [way for way in ways if not way.missing]
    with contextlib.ExitStack() as stack, _crews(catalogue, able, workers, max(sizes)) as crews:
        failed = {way.name: "its processes do not start" for way in able if way not in [one for one, _ in crews]}
        for way, crew in crews:
            try:
                told = crew.ask(do="open", way=way.name, segment=_segment(stack, workers, max(sizes)))
                crew.ask(do="connect", way=way.name, told=told)
            except FlockstepError as error:
                failed[way.name] = str(error)
        times: dict[tuple[str, int], list[float]] = {}
        for number in range(-1, rounds):  # the first round warms up
            say(f"{workers} processes, round {number + 1} of {rounds}")
            for size in sizes:
                for way, crew in crews[number % len(crews) :] + crews[: number % len(crews)] if crews else []:
                    if way.name in failed:
                        continue
                    try:
                        spent = max(crew.ask(do="run", way=way.name, size=size // 4, calls=calls_for(size)))
                    except FlockstepError as error:
                        failed[way.name] = str(error)
                    else:
                        times.setdefault((way.name, size), []).extend([spent] if number >= 0 else [])
    missing += [Figure(name, workers, size, missing=why) for name, why in failed.items() for size in sizes]
    figures = [_figure(*key, workers, spent) for key, spent in times.items() if spent and key[0] not in failed]
    order = [way.name for way in ways]
    return sorted(figures + missing, key=lambda figure: (figure.bytes, order.index(figure.way)))


def calls_for(nbytes: int) -> int:
    """How many calls one measurement takes, so that starting together matters little."""
    return max(1, min(100, (4 << 20) // max(nbytes, 1)))


@contextlib.contextmanager
def _crews(catalogue: str, ways: Sequence[Way], workers: int, largest: int) -> Iterator[list[tuple[Way, Crew]]]:
    """Each way with its processes; those that are started alike share them."""
    crews: dict[bool, Crew] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for by_mpirun in sorted({way.by_mpirun for way in ways}):
            with contextlib.suppress(FlockstepError):  # what does not start has no part in it
                crews[by_mpirun] = Crew(catalogue, workers, by_mpirun, Path(folder), largest)
                stack.callback(crews[by_mpirun].close)
        yield [(way, crews[way.by_mpirun]) for way in ways if way.by_mpirun in crews]


def _segment(stack: contextlib.ExitStack, workers: int, largest: int) -> str:
    """A segment for one way, until the measurement ends; what of it is not used takes no memory."""
    if sys.platform != "linux":
        return ""
    memory = SharedMemory.create(needed(workers, 2 * largest + ROOM))
    stack.callback(lambda: memory.address)
    return memory.address


def _figure(way: str, size: int, workers: int, spent: list[float]) -> Figure:
    low, middle, high = statistics.quantiles(spent, n=4) if len(spent) > 1 else spent * 3
    return Figure(way, workers, size, statistics.median(spent) if len(spent) > 1 else middle, low, high, len(spent))
