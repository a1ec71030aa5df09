"""Processes that will join a run. They build the job while the other workers train, which shortens the interruption."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

import msgspec

from flockstep.errors import RunError
from flockstep.launchers.children import KERNELS, Child, fork, how_it_ended, kill_all, reap
from flockstep.launchers.entry import READY, Part, newcomer_main
from flockstep.records.config import RunConfig
from flockstep.runtime.member import NodeSpec


class Newcomer:
    """A process that builds the job of a run, or runs a script up to its first question of flockstep, and waits for its
    part in the run.
    """

    def __init__(self, start: Callable[[socket.socket], Child], end: Callable[[], None] = lambda: None):
        """Start the process with `start`, which gets the process's end of a pair of sockets; `end` is called if the
        process does not join.

        Raises:
            OSError: the system starts no more processes.
        """
        self._feed, theirs = socket.socketpair()
        self._at_end = end
        with theirs:
            try:
                self.child = start(theirs)
            except BaseException:
                self._feed.close()
                raise
        self._feed.setblocking(False)
        self._ready = False

    def ready(self) -> bool:
        """Return whether the process has built the job.

        Raises:
            RunError: the process has failed.
        """
        if not self._ready:
            try:
                said = self._feed.recv(1 << 12)
            except BlockingIOError:
                return False
            except OSError:
                said = b""
            if said != READY:
                reap([self.child], 0.0)
                how = said.decode(errors="replace") or f"its process {how_it_ended(self.child.exit_code() or 0)}"
                raise RunError(f"a worker could not join: {how}")
            self._ready = True
        return self._ready

    def begin(self, node_spec: NodeSpec, config: RunConfig) -> Child:
        """Let the process take part in the run as a worker, and return the process."""
        self._feed.setblocking(True)
        with contextlib.suppress(OSError):  # the process has ended: its supervisor will notice
            self._feed.sendall(msgspec.json.encode(Part(node_spec, config.to_toml())))
        self._feed.close()
        return self.child

    def end(self) -> None:
        """End the process, because it does not join the run."""
        self._feed.close()
        kill_all([self.child])
        reap([self.child], None)
        self._at_end()


def of_job(config: RunConfig, kernels: bool) -> Newcomer:
    """Start a process that builds the job of a run, for a worker that sums in shared memory with `kernels`."""

    def start(feed: socket.socket) -> Child:
        arguments = os.getpid(), config.threads or 1, config.to_toml(), feed
        return fork(newcomer_main, arguments, [KERNELS] if kernels else ())

    return Newcomer(start)


class Newcomers:
    """The workers that are about to join a run."""

    def __init__(self, start: Callable[[], Newcomer | None] = lambda: None):
        """`start` returns None if processes are started only when their workers join."""
        self._start = start
        self._waiting: list[Newcomer] = []

    def invite(self, workers: int) -> None:
        """Start processes until there is one for each of `workers` workers.

        Raises:
            RunError: the system cannot start more processes; all processes that were to join have been ended.
        """
        try:
            while len(self._waiting) < workers and (newcomer := self._start()) is not None:
                self._waiting.append(newcomer)
        except OSError as error:
            self.end()
            raise RunError(f"no process could be started for a worker: {error.strerror or error}") from None

    def ready(self) -> bool:
        """Return whether all processes that will join have built the job.

        Raises:
            RunError: a process has failed; all processes that were to join have been ended.
        """
        try:
            return all(one.ready() for one in self._waiting)
        except RunError:
            self.end()
            raise

    def next(self) -> Newcomer | None:
        """Return the process of the next worker that joins; None if no process was started for it in advance."""
        return self._waiting.pop(0) if self._waiting else None

    def end(self) -> None:
        """End the processes that do not take part in the run."""
        while self._waiting:
            self._waiting.pop().end()
