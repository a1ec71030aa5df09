"""Data that each worker has alone, in different sizes: every batch counts once an epoch, and epochs end together."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from flockstep import registry
from flockstep.strategies.base import Strategy
from support.matrix import few
from support.processes import Ended, RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

SIZES = (5, 2, 3)
"""Batches of each worker."""
EPOCHS = 3
COMMON = """
import json
from pathlib import Path
import torch
from torch import nn
import flockstep

HERE, rank = Path(__file__).parent, flockstep.rank()

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def batches(of):
    generator = torch.Generator().manual_seed(1 + of)
    return [torch.randn(8, 4, generator=generator) for _ in range(SIZES[of])]

def loss(model, x):
    return (model(x) - x[:, :2]).square().mean()
""".replace("SIZES", str(SIZES))
SCRIPT = (
    COMMON
    + """
model = network()
inner = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
optimizer = flockstep.distribute(model, inner, STRATEGY)
mine, used, steps = batches(rank), [], []
schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
for epoch in range(EPOCHS):
    for number, x in enumerate(flockstep.shard(mine, private=True)):
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()
        used.append(number)
        AFTER_STEP
    steps.append(optimizer.loop.steps)
    with torch.no_grad():  # without steps, nobody waits for anybody
        for x in flockstep.shard(batches(0), private=True) if rank == 1 else ():
            loss(model, x)
    AFTER_EPOCH
optimizer.finish()
torch.save(torch.cat([p.detach().flatten() for p in model.parameters()]), HERE / f"model-{rank}")
(HERE / f"used-{rank}").write_text(json.dumps([used, steps]))
""".replace("EPOCHS", str(EPOCHS))
)


def outcome(folder: Path, strategy: str, after_step: str = "pass", after_epoch: str = "schedule.step()") -> Ended:
    script = folder / "script.py"
    body = SCRIPT.replace("STRATEGY", repr(strategy))
    script.write_text(body.replace("AFTER_STEP", after_step).replace("AFTER_EPOCH", after_epoch))
    return RealRun(["launch", "-n", str(len(SIZES)), str(script)], folder / "run", torch=True).end(400)


def alone() -> torch.Tensor:
    """The same on one process: the sum of the gradients of those who have a batch, divided by the number of all."""
    space: dict[str, object] = {"__file__": __file__}
    exec(COMMON, space)
    model, loss, batches = space["network"](), space["loss"], space["batches"]  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = [batches(rank) for rank in range(len(SIZES))]  # type: ignore[operator]
    for _ in range(EPOCHS):
        for number in range(max(SIZES)):
            optimizer.zero_grad()
            for mine in data:
                if number < len(mine):
                    (loss(model, mine[number]) / len(SIZES)).backward()  # type: ignore[operator]
            optimizer.step()
        schedule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


TOGETHER = ["all_reduce", "bucketed", "ps(bsp)", "local_sgd(2)", "dpsgd", "scatter_reduce", "easgd_sync"]
ON_THEIR_OWN = ["asgd", "gossip", "ps(ssp(1))"]


@pytest.mark.parametrize("strategy", few([*TOGETHER, *ON_THEIR_OWN], "all_reduce"))
def test_every_batch_is_used_once_an_epoch_and_nothing_hangs(strategy: str, tmp_path: Path) -> None:
    """Where steps need everyone, epochs end together; elsewhere nobody waits for those who have more."""
    ended = outcome(tmp_path, strategy)
    assert ended.code == 0, ended.err
    told = [json.loads((tmp_path / f"used-{rank}").read_text()) for rank in range(len(SIZES))]
    assert [used for used, _ in told] == [list(range(size)) * EPOCHS for size in SIZES]
    models = [torch.load(tmp_path / f"model-{rank}") for rank in range(len(SIZES))]
    assert all(torch.equal(model, models[0]) for model in models)
    if strategy in TOGETHER:
        assert [steps for _, steps in told] == [[max(SIZES) * (epoch + 1) for epoch in range(EPOCHS)]] * len(SIZES)
    else:
        assert [steps for _, steps in told] == [[size * (epoch + 1) for epoch in range(EPOCHS)] for size in SIZES]
    if strategy in ("all_reduce", "bucketed", "ps(bsp)", "scatter_reduce"):
        torch.testing.assert_close(models[0], alone(), rtol=1e-4, atol=1e-5)


UNEVEN = """
import numpy as np
import flockstep
from flockstep.arrays.schema import Schema
from flockstep.runtime.loop import Loop
from flockstep.runtime.plan import LocalOptimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Strategy

params, gradient, rank = np.zeros(20, np.float32), np.zeros(20, np.float32), flockstep.rank()
arguments = Schema.of({"w": (20,)}), Strategy.parse(STRATEGY), LocalOptimizer(SGD(lr=0.1), params), SGD(lr=0.1)
loop = Loop(params, gradient, *arguments)
for _ in range((40, 11, 26, 3)[rank]):
    loop.gradients[:] = np.random.default_rng(rank).normal(size=20)
    loop.step()
loop.finish()
"""


def leavable() -> list[str]:
    """Every strategy of a script that says that a worker may leave before the others."""
    found = [*registry.names("strategy"), "ps(ssp(1))", "ps(k_sync(2))", "ps(k_async(2))", "ps(backup(1))"]
    traits = {text: Strategy.parse(text).traits for text in found}
    return [text for text, one in traits.items() if not one.needs_job and (text == "dpsgd" or not one.in_step)]


@pytest.mark.parametrize("strategy", few(leavable(), "gossip", "dpsgd"))
def test_workers_leave_one_after_the_other_unless_the_traits_say_otherwise(strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNEVEN.replace("STRATEGY", repr(strategy)))
    ended = RealRun(["launch", "-n", "4", str(script)], tmp_path / "run").end(400)
    if Strategy.parse(strategy).traits.in_step:
        assert ended.code == 1
        assert re.search(r"worker 3 (has left while worker \d waited|left after step 3)", ended.err), ended.err
    else:
        assert ended.code == 0, ended.err


def test_a_schedule_that_steps_by_batches_is_refused_where_replicas_would_part(tmp_path: Path) -> None:
    ended = outcome(tmp_path, "all_reduce", after_step="schedule.step()", after_epoch="pass")
    assert ended.code == 2
    said = r"worker [012] steps with learning rate 0\.\d+, but the mean of the workers is 0\.\d+, .* once per epoch"
    assert re.search(said, ended.err), ended.err


SPLIT_TWICE = (
    COMMON
    + """
model = network()
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.3), "all_reduce")
DATA
for x in flockstep.shard(loader):
    loss(model, x).backward()
    optimizer.step()
optimizer.finish()
"""
)
TOLD = "workers 0 and 1 read different data or read the data"
REFUSED = "workers 0 and 1 hold different data, got 48 samples"
CASES = [
    ("loader = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)]", 0, ""),
    ("loader = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i + 9 * rank)) for i in range(6)]", 0, TOLD),
    ("loader = torch.utils.data.DataLoader(torch.randn(48 + 16 * rank, 4), batch_size=8)", 2, REFUSED),
    (
        """
torch.manual_seed(rank)
train, _ = torch.utils.data.random_split(torch.ones(64, 4), [48, 16])
loader = torch.utils.data.DataLoader(train, batch_size=8, shuffle=True)
""",
        2,
        REFUSED,
    ),
]


@pytest.mark.parametrize(("data", "code", "told"), few(CASES, CASES[1], CASES[3]))
def test_data_that_differ_and_are_split_all_the_same_are_told_of(
    data: str, code: int, told: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPLIT_TWICE.replace("DATA", data))
    ended = RealRun(["launch", "-n", "2", str(script)], tmp_path / "run", torch=True).end(400)
    assert ended.code == code, ended.err
    assert ended.err.count(told or "different data") == bool(told), ended.err
    assert ended.err.count("private=True") == bool(told)
