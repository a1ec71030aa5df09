"""Hosts of the benchmarks: those of the tests, each with a card of limited bandwidth. Needs Linux and root."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.hosts import Host, network

__all__ = ["OTHER_PORT", "PORT", "Host", "network", "start"]
PORT, OTHER_PORT = 29400, 29500
"""Of flockstep's coordinator, and of the store of torch.distributed."""


def start(host: Host, arguments: Sequence[str | Path], **environment: str) -> subprocess.Popen[str]:
    """Start a Python program on a host; its output is this program's."""
    return host.attach(sys.executable, *arguments, **environment)
