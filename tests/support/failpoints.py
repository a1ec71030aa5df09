"""A process of a run that kills itself at a point of the code, counted."""

from __future__ import annotations

from pathlib import Path

STRIKE = """
import os, signal
from pathlib import Path
from flockstep.records import failpoints

HERE = Path(__file__).parent
reached = []

def strike(point):
    if (HERE / "fired").exists():
        return
    who, wanted, number = (HERE / "plan").read_text().split()
    name = Path("/proc/self/comm").read_text().strip()
    if point != wanted or (name if name.startswith(("worker-", "server-")) else "coordinator") != who:
        return
    reached.append(point)
    if len(reached) == int(number):
        (HERE / "fired").write_text(f"{who} {point} {number}")
        os.kill(os.getpid(), signal.SIGKILL)

if strike not in failpoints.hooks:
    failpoints.hooks.append(strike)
"""


def plan_kill(folder: Path, who: str, point: str, number: int) -> str:
    """A file for `--import`: `who` ("worker-0", "server-0" or "coordinator") kills itself at the point, the given
    number of times after which it has come there.
    """
    (folder / "strike.py").write_text(STRIKE)
    (folder / "plan").write_text(f"{who} {point} {number}")
    return str(folder / "strike.py")


def fired(folder: Path) -> str:
    """The kill that has happened; empty if none has."""
    file = folder / "fired"
    return file.read_text() if file.exists() else ""
