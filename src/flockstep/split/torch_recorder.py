"""Records what one process of a replica computes and exchanges, also among processes that are only pretended."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flockstep.errors import ConfigurationError
from flockstep.split.joint import Timeline, WayExchange

SKIPPED = ("wait_tensor", "_wrap_tensor_autograd")
"""Operations on the result of an exchange, which send nothing."""


@contextmanager
def pretended(processes: int) -> Iterator[DeviceMesh]:
    """Return a context with a mesh of this process and others that are not there: what they would send is arbitrary.

    Raises:
        ConfigurationError: this process is in a process group.
    """
    if dist.is_initialized():
        raise ConfigurationError(
            "a model can be divided only in a process without a process group, got one of "
            f"{dist.get_world_size()} processes; leave out init_process_group, or call this elsewhere"
        )
    hook = sys.excepthook  # the process group would put its rank before errors of this process
    mesh = open_mesh("fake", FakeStore(), 0, processes)
    sys.excepthook = hook
    try:
        yield mesh
    finally:
        dist.destroy_process_group()


def open_mesh(backend: str, store: Any, rank: int, processes: int, timeout: timedelta | None = None) -> DeviceMesh:
    """Open the default process group, and return a mesh over its processes."""
    dist.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=timeout)
    return init_device_mesh("cpu", (processes,), mesh_dim_names=("way",))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what a process computes and exchanges inside its context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[float | WayExchange] = []
        """Floating-point operations, and exchanges, in order."""
        self._saved: dict[int, int] = {}
        """Address of memory that autograd keeps for the backward pass → its bytes."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    @property
    def operations(self) -> float:
        """Number of floating-point operations so far."""
        return sum(one for one in self.work if not isinstance(one, WayExchange))

    def timeline(self, whole: float, ways: int) -> Timeline:
        """Return what was recorded; `whole`: operations of the unsplit model. Without any, its work is divided
        equally.
        """
        exchanges = [one for one in self.work if isinstance(one, WayExchange)]
        work = [one if isinstance(one, WayExchange) else one / whole for one in self.work] if whole else exchanges
        return Timeline(tuple(work if whole else [1 / ways, *exchanges]), sum(self._saved.values()))

    def __enter__(self) -> Recorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls again with the tensors of this process
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if FakeTensor in types:  # a DTensor finds out the shape of a result
            return found
        packet = func._overloadpacket
        if packet in flop_registry:
            count = float(flop_registry[packet](*args, **kwargs, out_val=found))
            if self.work and not isinstance(self.work[-1], WayExchange):
                self.work[-1] += count
            else:
                self.work.append(count)
        elif "c10d" in func.namespace and packet.__name__ not in SKIPPED:
            self.work.append(_exchange(packet.__name__, [*args, found]))
        return found

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        parameter = any(one is not None and one.is_leaf and one.requires_grad for one in (tensor, tensor._base))
        if not parameter and type(tensor) is torch.Tensor:
            storage = tensor.untyped_storage()
            self._saved[storage.data_ptr()] = storage.nbytes()
        return tensor


def _exchange(name: str, given: Sequence[Any]) -> WayExchange:
    """Return what an operation of torch.distributed exchanges, from its name, its arguments and its result."""
    nbytes = max(sum(tensor.nbytes for tensor in _tensors(one)) for one in given)
    plain = name.replace("_", "")
    if "reducescatter" in plain:
        return WayExchange("scatter", nbytes)
    if "allgather" in plain:
        return WayExchange("gather", nbytes)
    if "allreduce" in plain:
        return WayExchange("sum", nbytes)
    raise ConfigurationError(
        f"the processes of a replica may gather, add, and reduce and scatter arrays, got {name}; use another "
        "parallel_plan"
    )


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _tensors(one)
