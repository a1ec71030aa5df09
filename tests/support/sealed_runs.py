"""Runs of sealed jobs in processes that find nothing of the sender's, and runs of the same jobs from their source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flockstep.experiments.single import RunResult
from flockstep.records.events import EvaluationEvent

TESTS = str(Path(__file__).parents[1])
"""Where processes find the source of the jobs."""


def command(folder: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, where Python finds the installed packages and, of the source, only `path`."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-m", "flockstep", *words],
        cwd=folder,
        env=clean | ({"PYTHONPATH": path} if path else {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def trained(folder: Path, out: str, *words: str, path: str = "") -> RunResult:
    done = command(folder, *words, "--out", out, path=path)
    assert done.returncode == 0, done.stderr
    return RunResult.read(folder / out)


def evaluations(run: RunResult) -> list[tuple[float, float]]:
    return [(one.loss, one.metric) for one in run.events() if isinstance(one, EvaluationEvent)]
