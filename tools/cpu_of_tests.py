"""A plugin of pytest that measures the CPU time of each test, with that of all processes that the test starts.

    PYTHONPATH=tools python -m pytest -p cpu_of_tests --costs costs.tsv tests/faults

A line of the file is: seconds of CPU time of all processes, seconds of the process of pytest alone, seconds of wall
time, and the test. Processes that outlive their parent become children of pytest and are counted, too. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of linux/prctl.h."""
TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, required=True, help="file to which the CPU time of each test is added")


def pytest_configure(config: pytest.Config) -> None:
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before, own, begin = spent(), time.process_time(), time.monotonic()
    result = yield
    end, mine = time.monotonic(), time.process_time()
    reap()
    with item.config.getoption("--costs").open("a") as file:
        file.write(f"{spent() - before:.2f}\t{mine - own:.2f}\t{end - begin:.2f}\t{item.nodeid}\n")
    return result


def spent() -> float:
    """Seconds of CPU time so far: of this process, of all processes that have ended below it, and of those that run."""
    return sum(os.times()[:4]) + sum(sum(map(int, stat[11:15])) / TICKS for _, stat in descendants(os.getpid()))


def reap() -> None:
    """Wait for those processes that have ended whose parent nobody is but this process, for want of another one."""
    for pid, stat in list(descendants(os.getpid())):
        if stat[0] == "Z" and stat[1] == str(os.getpid()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def descendants(pid: int) -> Iterator[tuple[int, list[str]]]:
    """All processes below a process, with the fields of /proc/PID/stat from the state on."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a process has ended
            for child in map(int, children.read_text().split()):
                yield child, Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                yield from descendants(child)
