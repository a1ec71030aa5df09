"""The training script of `preemption.py`: preemption_script.py WAY FOLDER TARGET STEP SEED. It trains the workload
`digits` by SGD, evaluates every fifth step, and writes the time of each step to a file of its process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flockstep
from flockstep.workloads.digits import Digits

LR = 0.03
"""A quarter of the workload's learning rate: about 300 steps to an accuracy of 0.95."""
EVALUATIONS, CHECKPOINTS = 5, 10
"""Steps between two evaluations, and between two checkpoints of torchrun."""
TIMEOUT = timedelta(seconds=30)
"""Time after which gloo gives a connection or a sum up; by default half an hour, for which some restarts have hung."""


class OfFlockstep:
    """A script of flockstep, whose workers change while it runs."""

    def __init__(self, model: nn.Module, folder: Path):
        self.model = model
        self.optimizer: Any = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=LR), "all_reduce")
        self.step = int((flockstep.resumed() or {"step": 0})["step"])

    @property
    def place(self) -> tuple[int, int]:
        """Rank and number of workers of the next step."""
        return flockstep.rank(), flockstep.workers()

    def keep(self) -> None:
        """Note the step, with which workers that join begin."""
        flockstep.checkpoint({"step": self.step})


class OfTorchft:
    """torchft: each worker is a replica group of one process."""

    def __init__(self, model: nn.Module, folder: Path):
        from torchft import Manager, Optimizer, ProcessGroupGloo
        from torchft.ddp import PureDistributedDataParallel  # the other class ends at a death

        sgd = torch.optim.SGD(model.parameters(), lr=LR)

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            sgd.load_state_dict(state["optimizer"])

        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
            load_state_dict=load,
            state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
            min_replica_size=1,
            timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self._store.port,
            replica_id=f"worker_{os.environ['REPLICA']}_",
        )
        self.model = PureDistributedDataParallel(self._manager, model)
        self.optimizer = Optimizer(self._manager, sgd)

    @property
    def place(self) -> tuple[int, int]:
        """Number of the group, as torchft's sampler has it, and the largest number of groups."""
        return int(os.environ["REPLICA"]), int(os.environ["REPLICAS"])

    @property
    def step(self) -> int:
        """Number of steps that all have committed."""
        return int(self._manager.current_step())

    @step.setter
    def step(self, number: int) -> None:
        """Do nothing: the manager counts."""

    def keep(self) -> None:
        """Do nothing: a worker that comes back asks a living one."""


class OfTorchrun:
    """DistributedDataParallel with checkpoints, under torchrun."""

    def __init__(self, model: nn.Module, folder: Path):
        dist.init_process_group("gloo", timeout=TIMEOUT)
        self.model, self._file, self.step = DistributedDataParallel(model), folder / "state.pt", 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        self.place = dist.get_rank(), dist.get_world_size()
        if self._file.exists():
            state = torch.load(self._file)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def keep(self) -> None:
        """Write a checkpoint when it is time."""
        if self.place[0] == 0 and self.step % CHECKPOINTS == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
            torch.save(state, self._file.with_suffix(".half"))
            self._file.with_suffix(".half").replace(self._file)


WAYS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "flockstep": OfFlockstep,
    "torchft": OfTorchft,
    "torchrun": OfTorchrun,
}


def main(way: str, folder: Path, target: float, seconds: float, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = Digits().job(0)
    data = digits.data()
    train_x, train_y, test_x, test_y = map(torch.as_tensor, (data.train_x, data.train_y, data.test_x, data.test_y))
    run = WAYS[way](digits.model(), folder)
    times = (folder / f"times-{os.getpid()}").open("a", buffering=1)
    while not (folder / "reached").exists():
        run.keep()
        rank, workers = run.place
        epoch, batch = divmod(run.step, len(train_x) // (workers * digits.batch))
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        start = (batch * workers + rank) * digits.batch
        index = order[start : start + digits.batch]
        run.optimizer.zero_grad()
        time.sleep(seconds)
        digits.loss(run.model(train_x[index]), train_y[index]).backward()
        run.optimizer.step()
        run.step += 1
        times.write(f"{time.time()}\n")
        if run.step % EVALUATIONS == 0:
            with torch.no_grad():
                accuracy = (run.model(test_x).argmax(1) == test_y).float().mean().item()
            if accuracy >= target:
                (folder / "reached").touch()
    os._exit(0)  # the others may be in a step, in which nobody waits for them


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(float, sys.argv[3:5]), int(sys.argv[5]))
