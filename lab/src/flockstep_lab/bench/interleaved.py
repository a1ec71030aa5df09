"""Measures implementations in turns, round after round, each in separate processes, so that other load affects all of
them equally.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flockstep.errors import FlockstepError
from flockstep.links.shared_group import needed
from flockstep.links.shared_memory import SharedMemory
from flockstep.report.progress import ProgressCallback, silent
from flockstep_lab.bench.implementation import Implementation

ANSWER_TIMEOUT = 120.0
"""Seconds that a benchmark waits for the answer of one of its processes."""
EXTRA_BYTES = 1 << 20
"""Bytes of shared memory that a benchmark allocates beyond two arrays of the largest size."""


@dataclass
class Measurement:
    """Seconds per call of one implementation for one array size, or the reason why they were not measured."""

    implementation: str
    workers: int
    bytes: int
    seconds: float | None = None
    """Seconds of one call, median over the rounds."""
    low: float | None = None
    """First quartile of the seconds of one call."""
    high: float | None = None
    """Third quartile of the seconds of one call."""
    rounds: int = 0
    missing: str = ""
    """Command that installs the missing packages, or the reason why the measurement failed; empty if it succeeded."""

    @property
    def rate(self) -> float | None:
        """Bytes of the array per second; None if nothing was measured."""
        return None if not self.seconds else self.bytes / self.seconds


class ProcessSet:
    """The processes of one implementation, which were started by this process or by mpirun and execute requests."""

    def __init__(self, catalog: str, workers: int, by_mpirun: bool, folder: Path, largest: int):
        self._listening = socket.socket(socket.AF_UNIX)
        address = str(folder / ("m" if by_mpirun else "p"))
        self._listening.bind(address)
        self._listening.listen(workers)
        self._listening.settimeout(0.2)
        entry = [sys.executable, "-m", "flockstep_lab.bench.rank", catalog, address, str(workers), str(largest)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        commands = [_mpirun(workers) + entry] if by_mpirun else [[*entry, str(rank)] for rank in range(workers)]
        self._processes = [subprocess.Popen(command, env=environment) for command in commands]
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
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while True:
            try:
                connection, _ = self._listening.accept()
                break
            except TimeoutError:
                ended = [process.args for process in self._processes if process.poll() is not None]
                if ended or time.monotonic() > deadline:
                    raise FlockstepError("the processes of this implementation did not start") from None
        connection.settimeout(ANSWER_TIMEOUT)
        with connection:  # the file keeps it open
            return connection.makefile("rw", encoding="utf-8")

    def ask(self, **what: Any) -> list[Any]:
        """Send the same request to all processes; return their answers by rank.

        Raises:
            FlockstepError: one of the processes failed.
        """
        try:
            for file in self._files:
                file.write(json.dumps(what) + "\n")
                file.flush()
            answers = [json.loads(file.readline() or '{"failed": "it ended"}') for file in self._files]
        except OSError as error:
            raise FlockstepError(f"the processes of this implementation do not answer: {error}") from None
        for answer in answers:
            if "failed" in answer:
                raise FlockstepError(answer["failed"])
        return [answer["answer"] for answer in answers]

    def close(self) -> None:
        """End all processes of the implementation."""
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
    """The command line of mpirun, from the wheel if it is installed, otherwise from the system."""
    own = Path(sysconfig.get_path("scripts")) / "mpirun"
    found = str(own) if own.exists() else shutil.which("mpirun") or "mpirun"
    bound = "core" if workers <= (os.cpu_count() or 1) else "none"
    return [found, "--allow-run-as-root", "--oversubscribe", "--bind-to", bound, "-n", str(workers)]


def measure_interleaved(
    catalog: str,
    implementations: Sequence[Implementation],
    workers: int,
    sizes: Sequence[int],
    rounds: int,
    say: ProgressCallback = silent,
) -> list[Measurement]:
    """Measure all implementations; in each round every implementation is measured once with every array size in bytes.

    Returns medians over the rounds; an implementation that cannot run has a `Measurement` with the reason. `catalog`:
    module in whose `IMPLEMENTATIONS` the processes find an implementation by its name.
    """
    missing = [
        Measurement(implementation.name, workers, size, missing=implementation.missing)
        for implementation in implementations
        if implementation.missing
        for size in sizes
    ]
    able = [implementation for implementation in implementations if not implementation.missing]
    with contextlib.ExitStack() as stack, _process_sets(catalog, able, workers, max(sizes)) as process_sets:
        failed = {
            implementation.name: "the processes of this implementation did not start"
            for implementation in able
            if implementation not in [one for one, _ in process_sets]
        }
        secret = secrets.token_hex(32)
        for implementation, processes in process_sets:
            try:
                addresses = processes.ask(
                    do="open",
                    implementation=implementation.name,
                    segment=_segment(stack, workers, max(sizes)),
                    secret=secret,
                )
                processes.ask(do="connect", implementation=implementation.name, addresses=addresses)
            except FlockstepError as error:
                failed[implementation.name] = str(error)
        times: dict[tuple[str, int], list[float]] = {}
        for number in range(-1, rounds):  # the first round warms up
            say(f"{workers} processes, round {number + 1} of {rounds}", number + 1, rounds + 1)
            for size in sizes:
                for implementation, processes in (
                    process_sets[number % len(process_sets) :] + process_sets[: number % len(process_sets)]
                    if process_sets
                    else []
                ):
                    if implementation.name in failed:
                        continue
                    try:
                        spent = max(
                            processes.ask(
                                do="run", implementation=implementation.name, size=size // 4, calls=calls_for(size)
                            )
                        )
                    except FlockstepError as error:
                        failed[implementation.name] = str(error)
                    else:
                        times.setdefault((implementation.name, size), []).extend([spent] if number >= 0 else [])
    missing += [Measurement(name, workers, size, missing=why) for name, why in failed.items() for size in sizes]
    figures = [_figure(*key, workers, spent) for key, spent in times.items() if spent and key[0] not in failed]
    order = [implementation.name for implementation in implementations]
    return sorted(figures + missing, key=lambda figure: (figure.bytes, order.index(figure.implementation)))


def calls_for(nbytes: int) -> int:
    """Return the number of calls in one measurement: large enough that differences between the processes' start times
    hardly matter.
    """
    return max(1, min(100, (4 << 20) // max(nbytes, 1)))


@contextlib.contextmanager
def _process_sets(
    catalog: str, implementations: Sequence[Implementation], workers: int, largest: int
) -> Iterator[list[tuple[Implementation, ProcessSet]]]:
    """Context manager: each implementation with its processes.

    Implementations started in the same way share processes.
    """
    process_sets: dict[bool, ProcessSet] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for by_mpirun in sorted({implementation.by_mpirun for implementation in implementations}):
            with contextlib.suppress(FlockstepError):  # an implementation whose processes do not start is skipped
                process_sets[by_mpirun] = ProcessSet(catalog, workers, by_mpirun, Path(folder), largest)
                stack.callback(process_sets[by_mpirun].close)
        yield [
            (implementation, process_sets[implementation.by_mpirun])
            for implementation in implementations
            if implementation.by_mpirun in process_sets
        ]


def _segment(stack: contextlib.ExitStack, workers: int, largest: int) -> str:
    """The address of a shared segment for one implementation, until the measurement ends.

    Unused memory is not allocated.
    """
    if sys.platform != "linux":
        return ""
    memory = SharedMemory.create(needed(workers, 2 * largest + EXTRA_BYTES))
    stack.callback(lambda: memory.address)
    return memory.address


def _figure(implementation: str, size: int, workers: int, spent: list[float]) -> Measurement:
    low, middle, high = statistics.quantiles(spent, n=4) if len(spent) > 1 else spent * 3
    return Measurement(
        implementation, workers, size, statistics.median(spent) if len(spent) > 1 else middle, low, high, len(spent)
    )
