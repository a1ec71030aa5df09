"""A script whose model has bfloat16 layers and a float32 norm, on two workers: as plain torch over both replicas."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.matrix import few
from support.mixed import Mixed, backward
from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

SUPPORT = Path(__file__).parents[1]
STEPS, PERIOD, LR = 7, 3, 0.1
Tensors = list[torch.Tensor]
SCRIPT = """
import sys, torch
sys.path.insert(0, {support!r})
from support.mixed import Mixed, backward
from support.torch_loops import start, values
model, optimizer = start({strategy!r}, Mixed(seed={seed}), lr={lr})
rank = optimizer.loop.rank
for number in range({steps}):
    optimizer.zero_grad()
    backward(model, 100 * number + rank)
    optimizer.step()
torch.save(torch.from_numpy(optimizer.flat.params), f"{folder}/master-{{rank}}")
optimizer.finish()
torch.save(values(model), f"{folder}/result-{{rank}}")
"""


def trained(strategy: str, folder: Path) -> tuple[Tensors, Tensors]:
    """Each worker's master copy after the last step, and the result."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(support=str(SUPPORT), strategy=strategy, seed=5, lr=LR, steps=STEPS, folder=folder))
    ended = RealRun(["launch", "-n", "2", str(script)], folder / "run", torch=True).end()
    assert ended.code == 0, ended.err
    one, other = (torch.load(folder / f"result-{rank}") for rank in range(2))
    assert all(map(torch.equal, one, other))
    return [torch.load(folder / f"master-{rank}") for rank in range(2)], one


class Replica:
    """One worker: a model in plain torch, and its master copy."""

    def __init__(self) -> None:
        self.model = Mixed(seed=5)
        self.master = [p.detach().float() for p in self.model.parameters()]
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=LR)

    def gradients(self, number: int) -> Tensors:
        self.sgd.zero_grad()
        backward(self.model, number)
        return [p.grad.float() for p in self.model.parameters() if p.grad is not None]

    def step(self, gradients: Tensors, keeps: bool = True) -> None:
        """The optimizer's step on the parameters; the master copy keeps what they cannot hold."""
        beyond = [m - p.detach().float() for m, p in zip(self.master, self.model.parameters(), strict=True)]
        for p, gradient in zip(self.model.parameters(), gradients, strict=True):
            p.grad = gradient.to(p.dtype)
        self.sgd.step()
        self.take([p.detach().float() + keeps * b for p, b in zip(self.model.parameters(), beyond, strict=True)])

    def take(self, master: Tensors) -> None:
        self.master = master
        for p, m in zip(self.model.parameters(), master, strict=True):
            p.data.copy_(m)


def mean(one: Tensors, other: Tensors) -> Tensors:
    return [(a + b) / 2 for a, b in zip(one, other, strict=True)]


def all_reduce(replicas: list[Replica], number: int) -> None:
    gradients = mean(*(replica.gradients(100 * number + rank) for rank, replica in enumerate(replicas)))
    for replica in replicas:
        replica.step(gradients)


def server(replicas: list[Replica], number: int) -> None:
    gradients = mean(*(replica.gradients(100 * number + rank) for rank, replica in enumerate(replicas)))
    for replica in replicas:
        rate = torch.tensor(LR, dtype=torch.float32)
        replica.take([m - rate * g for m, g in zip(replica.master, gradients, strict=True)])


def local_sgd(replicas: list[Replica], number: int, keeps: bool = True) -> None:
    for rank, replica in enumerate(replicas):
        replica.step(replica.gradients(100 * number + rank), keeps)
    if number % PERIOD == PERIOD - 1:
        averaged = mean(replicas[0].master, replicas[1].master)
        for replica in replicas:
            replica.take(list(averaged))


def forgetful(replicas: list[Replica], number: int) -> None:
    local_sgd(replicas, number, keeps=False)


def simulated(rule: Callable[[list[Replica], int], None]) -> list[Replica]:
    replicas = [Replica(), Replica()]
    for number in range(STEPS):
        rule(replicas, number)
    return replicas


@pytest.mark.parametrize(
    ("strategy", "rule", "control"),
    few(
        [
            ("all_reduce", all_reduce, server),
            ("ps(bsp)", server, all_reduce),
            (f"local_sgd({PERIOD})", local_sgd, forgetful),
        ],
        ("ps(bsp)", server, all_reduce),
    ),
    ids=["all_reduce", "ps", "local_sgd"],
)
def test_two_workers(
    strategy: str,
    rule: Callable[[list[Replica], int], None],
    control: Callable[[list[Replica], int], None],
    tmp_path: Path,
) -> None:
    """Bit for bit. Negative control: a rule that differs in what becomes of the master copy."""
    masters, result = trained(strategy, tmp_path)
    replicas, others = simulated(rule), simulated(control)
    for found, replica, other in zip(masters, replicas, others, strict=True):
        assert torch.equal(found, torch.cat([m.flatten() for m in replica.master]))
        assert not torch.equal(found, torch.cat([m.flatten() for m in other.master]))
    expected = mean(replicas[0].master, replicas[1].master)
    assert [p.dtype for p in result] == [p.dtype for p in replicas[0].model.parameters()]
    assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(result, expected, strict=True))
