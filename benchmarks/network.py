"""Hosts of the benchmarks: the network namespaces of the tests, each with a card of limited bandwidth. Linux, root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import hosts

PORT, OTHER_PORT = 29400, 29500
"""Of flockstep's coordinator, and of the store of torch.distributed."""


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    inner: hosts.Host

    @property
    def address(self) -> str:
        """Address of its card."""
        return self.inner.address

    def start(self, arguments: Sequence[str | Path], **environment: str) -> subprocess.Popen[str]:
        """Start a Python program on this host; its output is this program's."""
        command = [*self.inner.enter(), sys.executable, *map(str, arguments)]
        return subprocess.Popen(command, env={**os.environ, "FLOCKSTEP_SECRET": hosts.SECRET, **environment}, text=True)


@contextmanager
def network(count: int, bandwidth: str | None) -> Iterator[list[Host]]:
    """So many hosts; every card sends and receives at most `bandwidth`, None: as fast as this machine can."""
    with hosts.network(count, bandwidth) as found:
        yield [Host(one) for one in found]
