"""Process groups of torch.distributed, and operations that run in the groups' threads.

For each backend, a run creates a separate group and does not use a script's group. But if the script has called
`torch.distributed.init_process_group` with the same backend, the run uses the script's group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flockstep.arrays.namespace import DEVICE_COPIES
from flockstep.errors import ConfigurationError, PeerLost
from flockstep.programs import Rendezvous

FOREVER = timedelta(days=365)
"""Time limit of a backend's operations, too long to be reached. The supervisor detects lost workers; a shorter limit
would end runs with slow workers.
"""
GLANCE = 0.0002
"""Seconds between two polls of an operation whose backend cannot wait with a time limit."""


class GroupOperation:
    """A group operation in progress; the function `after` is called once, when the operation has succeeded."""

    def __init__(self, what: str, work: Any, patient: bool, after: Callable[[], None] | None = None):
        self._what = what
        self._work = work
        self._patient = patient
        self._after = after

    def __str__(self) -> str:
        return self._what

    def done(self) -> bool:
        """Whether the operation has succeeded."""
        if not self._work.is_completed():
            return False
        try:
            self.wait(0.001)
        except PeerLost:
            return False  # `wait` reports the failure
        return True

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the operation; return whether it has ended.

        Raises:
            PeerLost: the operation failed, as it does when a peer dies.
        """
        try:
            if self._patient:
                self._work.wait(timedelta(seconds=seconds))
            else:  # the backend cannot wait with a time limit
                deadline = time.monotonic() + seconds
                while not self._work.is_completed():
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(GLANCE)
                self._work.wait()
        except RuntimeError as error:
            if not self._work.is_completed():
                return False  # the time limit has passed
            raise PeerLost(f"{self._what} failed: {_first_line(error)}") from None
        after, self._after = self._after, None
        if after is not None:
            after()
        return True


class Joining:
    """Creates a group in a thread, because the creation waits for all workers; meanwhile, messages of the supervisor
    are handled.
    """

    def __init__(self, backend: str, meeting: Rendezvous):
        self.group: Any = None
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, args=(backend, meeting), name="flockstep-join", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return "the process group"

    def done(self) -> bool:
        """Whether all workers have joined."""
        return not self._thread.is_alive() and self._error is None

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for all workers; return whether all have joined.

        Raises:
            ConfigurationError: torch cannot create such a group.
            PeerLost: a peer died meanwhile.
        """
        self._thread.join(seconds)
        if isinstance(self._error, RuntimeError):
            raise PeerLost(f"no process group could be created: {_first_line(self._error)}")
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self, backend: str, meeting: Rendezvous) -> None:
        try:
            self.group = _make(backend, meeting)
        except Exception as error:  # noqa: BLE001 - raised again in `wait`
            self._error = error


class ProcessGroup:
    """All workers of a run as one process group of a backend."""

    def __init__(self, backend: str, meeting: Rendezvous, hosts: int = 1):
        """`hosts`: number of hosts of the workers.

        Raises:
            ConfigurationError: the group cannot be created, or its workers are on several hosts.
        """
        self.backend = backend
        self._own = False
        self._meeting = meeting
        theirs = _of_script(backend, meeting)
        if theirs is None:
            if hosts > 1 and backend != "mpi":
                raise ConfigurationError(
                    f"torch_distributed(backend={backend}) makes a group only within one host, but the workers are on "
                    f"{hosts} hosts; leave collective=torch_distributed out, or let the script call "
                    f"torch.distributed.init_process_group({backend!r}, …), whose links are not encrypted"
                )
            joining = Joining(backend, meeting)
            meeting.attend(joining)
            self._own, theirs = True, joining.group
        self._group: Any = theirs

    def close(self, failed: bool) -> None:
        """Leave the process group. A group that the run has created is closed, or aborted if the run failed; a script's
        group is kept.
        """
        group, self._group = self._group, None
        if self._own and group is not None:
            if failed and hasattr(group, "abort"):
                group.abort()
            if hasattr(group, "shutdown"):
                group.shutdown()
            _file(self.backend, self._meeting).unlink(missing_ok=True)

    def sum_up(self, array: Any) -> GroupOperation:
        """Start to replace `array` with the sum over all workers."""
        tensor, back = self._taken(array)
        return self._work("all-reduce", self._group.allreduce([tensor], dist.AllreduceOptions()), back)

    def reduce(self, array: Any, root: int) -> GroupOperation:
        """Start to replace `array` on worker `root` with the sum over all workers.

        On the other workers `array` becomes undefined.
        """
        options = dist.ReduceOptions()
        options.rootRank = root
        tensor, back = self._taken(array)
        return self._work("reduce", self._group.reduce([tensor], options), back)

    def broadcast(self, array: Any, root: int) -> GroupOperation:
        """Start to replace `array` with the array of worker `root`."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        tensor, back = self._taken(array)
        return self._work("broadcast", self._group.broadcast([tensor], options), back)

    def gather(self, array: Any, out: Sequence[Any]) -> GroupOperation:
        """Start to write the `array` of every worker, all of the same size, into the arrays of `out`, in order of
        rank.
        """
        pairs = [self._taken(one) for one in out]
        tensor, _ = self._taken(array)
        work = self._group.allgather([[to for to, _ in pairs]], [tensor])
        return self._work("all-gather", work, lambda: [back() for _, back in pairs if back is not None])

    def scatter_sum(self, out: Any, parts: Sequence[Any]) -> GroupOperation:
        """Start to write this worker's part of the sum into `out`.

        `parts` are this worker's summands, one for each rank, all of the same size.
        """
        tensor, back = self._taken(out)
        given = [self._taken(part)[0] for part in parts]
        work = self._group.reduce_scatter([tensor], [given], dist.ReduceScatterOptions())
        return self._work("reduce-scatter", work, back)

    def meet(self) -> GroupOperation:
        """Start a barrier over all workers."""
        return self._work("barrier", self._group.barrier(dist.BarrierOptions()), None)

    def _work(self, what: str, work: Any, after: Callable[[], Any] | None) -> GroupOperation:
        return GroupOperation(f"a {self.backend} {what}", work, self.backend == "gloo", after)

    def _taken(self, array: Any) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """The array as a tensor that the backend accepts.

        If that is a copy, the second value is a function that copies the result back.
        """
        tensor = _tensor(array)
        if self.backend != "nccl" or tensor.is_cuda:
            return tensor, None
        there = tensor.cuda()
        DEVICE_COPIES.nbytes += tensor.nbytes
        return there, lambda: _copy(tensor, there)


def _of_script(backend: str, meeting: Rendezvous) -> Any:
    """The script's group, if its backend is `backend`; otherwise None."""
    if not dist.is_initialized() or backend not in str(dist.get_backend_config(dist.group.WORLD)):
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (meeting.rank, meeting.workers):
        raise ConfigurationError(
            f"the script's process group must have the ranks of the run, got rank {rank} of {size} in worker "
            f"{meeting.rank} of {meeting.workers}; pass flockstep.rank() to init_process_group, or let flockstep "
            "create the process group"
        )
    return dist.group.WORLD


def private_store(file: Path) -> Any:
    """Return a store of torch.distributed in a file that only this user can read and write: whoever writes to the file
    can take part in the process group.
    """
    os.close(os.open(file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
    classes: Any = dist  # not all of what it offers is declared
    return classes.FileStore(str(file), -1)  # its destructor waits for no other worker


def _make(backend: str, meeting: Rendezvous) -> Any:
    """Create a group of all workers, which must be on one host."""
    if backend == "mpi":
        if not dist.is_mpi_available():
            raise _not_built(backend)
        return dist.ProcessGroupMPI.create(list(range(meeting.workers)))
    classes: Any = dist  # not all of what it offers is declared
    store = private_store(_file(backend, meeting))
    if backend == "nccl":
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise _not_built(backend)
        torch.cuda.set_device(meeting.rank % torch.cuda.device_count())
        return dist.ProcessGroupNCCL(store, meeting.rank, meeting.workers, dist.ProcessGroupNCCL.Options())
    gloo = classes.ProcessGroupGloo
    options = gloo._Options()  # the only way to say that nobody outside of this host may connect
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = FOREVER
    options._threads = 2
    return gloo(store, meeting.rank, meeting.workers, options)


def _file(backend: str, meeting: Rendezvous) -> Path:
    """Path of the file through which the workers of a run find each other."""
    return meeting.folder / f".torch-{backend}-{meeting.run}"


def _not_built(backend: str) -> ConfigurationError:
    return ConfigurationError(
        f"this installation of torch or this machine has no {backend}; use torch_distributed(backend=gloo)"
    )


def _tensor(array: Any) -> torch.Tensor:
    """A tensor on the array's own memory; torch does not accept numpy's bfloat16."""
    if isinstance(array, torch.Tensor):
        return array
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
    DEVICE_COPIES.nbytes += target.nbytes


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
