"""Failpoints for real runs: a process of a run sends itself a signal once, when it reaches a named point of the
code.
"""

from __future__ import annotations

from pathlib import Path

from flockstep_lab.chaos.base import Failpoint

_CODE = """
import os
from pathlib import Path
from flockstep.records import failpoints

HERE, WHO, POINT, NUMBER, SIGNAL = Path(__file__).parent, {who!r}, {point!r}, {number}, {signal}
reached = []

def signal_here(point):
    if point != POINT or (HERE / "fired").exists():
        return
    name = Path("/proc/self/comm").read_text().strip()
    if (name if name.startswith(("worker-", "server-")) else "launcher") != WHO:
        return
    reached.append(point)
    if len(reached) == NUMBER:
        (HERE / "half").write_text(f"{{WHO}} {{POINT}} {{NUMBER}} {{os.getpid()}}")
        (HERE / "half").rename(HERE / "fired")
        os.kill(os.getpid(), SIGNAL)

if signal_here not in failpoints.hooks:
    failpoints.hooks.append(signal_here)
"""


def write_failpoint(folder: Path, failpoint: Failpoint) -> str:
    """Write a Python file for `--import`, which makes a process send itself a signal; return its path.

    The process creates the file `fired` before it sends the signal.
    """
    file = folder / "failpoint.py"
    file.write_text(
        _CODE.format(who=failpoint.who, point=failpoint.point, number=failpoint.number, signal=int(failpoint.kind)),
        "utf-8",
    )
    return str(file)


def signalled(folder: Path) -> int | None:
    """Return the process id of the process that sent itself the signal; None if no process has."""
    file = folder / "fired"
    return int(file.read_text().split()[-1]) if file.exists() else None
