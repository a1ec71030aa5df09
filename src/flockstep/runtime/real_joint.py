"""A worker of this process that holds one part of a replica that PyTorch divides over processes, in a real run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import PeerLost, in_short
from flockstep.nodes import Worker
from flockstep.programs import NeedGradient
from flockstep.runtime.member import Member
from flockstep.runtime.part_group import PartGroup
from flockstep.runtime.plan import Batches, LocalOptimizer, Plan
from flockstep.runtime.real_part import HoldingConnection
from flockstep.split.stages import SplitModel

if TYPE_CHECKING:
    from flockstep.split.torch_joint import DividedReplica

T = TypeVar("T")


class JointConnection(HoldingConnection):
    """The connection of a worker that computes a replica together with others, whose process group PyTorch uses."""

    def __init__(
        self,
        member: Member,
        worker: Worker,
        plan: Plan,
        split: SplitModel,
        group: PartGroup,
        batches: Batches,
        begins: bool,
    ):
        """`begins`: whether the worker's parameters are the initial ones, so that what it computes can be compared with
        what the whole model computes.
        """
        super().__init__(member, worker, plan, split, group)
        self._split, self._batches, self._begins, self._parts = split, batches, begins, group.parts
        self._thread = CallingThread()
        self._file = Path(member.node_spec.record) / f".replica-{worker.rank}-{member.node_spec.run}"
        self._gradient = np.zeros_like(worker.params)
        self._replica: DividedReplica

    def train(self, stepper: LocalOptimizer) -> None:
        """Divide the replica, and run the worker's program to its end.

        Raises:
            ConfigurationError: the replica's workers together compute something else than the model.
        """
        self._replica = self._done(self._opened)
        super().train(stepper)

    def _opened(self) -> DividedReplica:
        """Open the process group of the replica, and divide the model over its processes.

        Only the thread of these calls may: DTensors remember for each thread what was decided for pretended processes.
        """
        import torch.distributed as dist

        from flockstep.links.process_groups import FOREVER, private_store
        from flockstep.split.torch_joint import TorchJointModel
        from flockstep.split.torch_recorder import open_mesh

        assert isinstance(self._split, TorchJointModel)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the only way to say that no other host may connect
        mesh = open_mesh("gloo", private_store(self._file), self._part, self._parts, FOREVER)
        replica = self._split.opened(self.node.params if self._begins else None, self.node.address, mesh)
        dist.barrier()  # until then another process may still look for the file
        self._file.unlink(missing_ok=True)
        return replica

    def _computed(self, need: NeedGradient) -> tuple[FlatArray, float]:
        node, indices, out = self.node, self._batches.next(need), self._gradient
        loss, sent = self._done(lambda: self._replica.counted(node.params, indices, out, node.address, node.step))
        self._count(round(sent), round(sent), 0)
        return out, loss

    def _done(self, call: Callable[[], T]) -> T:
        """Return the value of a call that all processes of the replica make, and handle messages meanwhile."""
        work = self._thread.begin(call)
        self._attend(work)
        return work.value


class JointCall(Generic[T]):
    """A call that all processes of a replica make together, in a thread."""

    value: T
    """What the call has returned, once it is done."""

    def __init__(self, call: Callable[[], T]):
        self._call, self._ended = call, Event()
        self._error: BaseException | None = None

    def __str__(self) -> str:
        return "the other processes of its replica"

    def run(self) -> None:
        """Make the call, and keep what it returns or raises."""
        try:
            self.value = self._call()
        except BaseException as error:  # noqa: BLE001 - raised again in `wait`
            self._error = error
        self._ended.set()

    def done(self) -> bool:
        """Whether the call has returned."""
        return self._ended.is_set() and self._error is None

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the call; return whether it has ended.

        Raises:
            PeerLost: another process of the replica has died.
        """
        if not self._ended.wait(seconds):
            return False
        if isinstance(self._error, RuntimeError) and "gloo" in str(self._error):
            raise PeerLost(f"the other processes of the replica are gone: {in_short(self._error)}") from self._error
        if self._error is not None:
            raise self._error
        return True


class CallingThread:
    """A thread that makes calls one after another."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[JointCall[Any]] = SimpleQueue()
        Thread(target=self._run, name="flockstep-replica", daemon=True).start()

    def begin(self, call: Callable[[], T]) -> JointCall[T]:
        """Let the thread make a call."""
        found = JointCall(call)
        self._calls.put(found)
        return found

    def _run(self) -> None:
        while True:
            self._calls.get().run()
