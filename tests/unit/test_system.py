"""What runs where only some of a system's calls exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ELSEWHERE = """
import os, select, signal, socket, sys
import asyncio, concurrent.futures, multiprocessing, subprocess
import click, msgspec, numpy, sklearn.datasets
from pathlib import Path

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
gone = {
    os: "pidfd_open sched_getaffinity memfd_create fork fchmod getuid geteuid killpg setsid register_at_fork statvfs",
    select: "epoll poll",
    socket: "AF_UNIX SO_PEERCRED",
    signal: "SIGHUP SIGKILL SIGUSR1 SIGCHLD SIGALRM pthread_sigmask setitimer",
}
for module, names in gone.items():
    for name in names.split():
        delattr(module, name)
sys.platform, read = "elsewhere", Path.read_text

def without_proc(path, *given, **named):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(str(path))
    return read(path, *given, **named)

Path.read_text = without_proc
from flockstep.cli.app import run

sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="takes away calls that Linux has")
def test_simulations_comparisons_plans_and_reports_run_on_any_system(tmp_path: Path) -> None:
    run, table = str(tmp_path / "run"), str(tmp_path / "table")
    job = ["softmax", "-s", "local_sgd", "-n", "2", "--steps", "4", "--target", "0.1"]
    commands = [
        ["simulate", *job, "--out", run],
        ["compare", *job, "-s", "bsp", "--simulate", "--out", table],
        ["report", run],
        ["plan", "softmax", "--cluster", "lab-1gbit", "-s", "bsp"],
    ]
    for command in commands:
        ended = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, *command], capture_output=True, text=True, cwd=tmp_path
        )
        assert ended.returncode == 0, (command, ended.stderr)
