"""Scripts whose replicas are held by several processes, with FSDP2 or tensor parallelism: they train as replicas that
one process holds, and mistakes are told in one sentence before the first step.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.processes import Ended, RealRun
from support.scripts import COMPILER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

STRATEGIES = ("all_reduce", "local_sgd(period=5)", "ps(consistency=bsp)", "dpsgd")
BEGIN = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import flockstep

HERE, found, replica = Path(__file__).parent, {}, flockstep.replica()
"""
TRAINS = """
def made(kind):
    torch.manual_seed(0)
    last = nn.LayerNorm(3) if kind == "tensor" else nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 3), last)  # of 3 rows, processes hold 2 and 1
    if replica.size > 1 and kind == "sharded":
        fully_shard(model[0], mesh=replica.mesh())
        fully_shard(model[2], mesh=replica.mesh())
        model[3].requires_grad_(False)
    elif replica.size > 1:
        parallelize_module(model, replica.mesh(("tensor",)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif kind == "sharded":
        model[3].requires_grad_(False)
    return model

def whole(model):
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone() for name, one in named}

def train(kind, strategy, rule):
    model = made(kind)
    model[3].eval()
    optimizer = flockstep.distribute(model, rule(model.parameters()), strategy)
    data = torch.Generator().manual_seed(replica.index)
    for step in range(20):
        x, y = torch.randn(8, 7, generator=data), torch.randn(8, 3, generator=data)
        if kind == "sharded":
            x, y = x.chunk(replica.size)[replica.rank], y.chunk(replica.size)[replica.rank]
        optimizer.zero_grad()
        for part in (slice(0, len(x) // 2), slice(len(x) // 2, None)):  # gradients of two passes are added up
            (nn.functional.mse_loss(model(x[part]), y[part]) / 2).backward()
        if not strategy.startswith("ps"):
            flockstep.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        if step == 12:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            optimizer.sync()
    with optimizer.consensus():
        shown = whole(model)
    optimizer.finish()
    return shown, whole(model)

adamw = lambda parameters: torch.optim.AdamW(parameters, 1e-2)
for strategy in STRATEGIES:
    found["sharded", strategy] = train("sharded", strategy, adamw)
found["tensor", "all_reduce"] = train("tensor", "all_reduce", adamw)
torch.save(found, HERE / f"found-{flockstep.rank()}")
"""


def launched(folder: Path, body: str, options: list[str], *arguments: str) -> Ended:
    (folder / "script.py").write_text(COMPILER + BEGIN + body)
    words = ["launch", *options, str(folder / "script.py"), *arguments]
    return RealRun(words, folder / "run", torch=True).end()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[Any, Any]]]:
    """What the scripts found, of two replicas of one process, and of two replicas of two processes."""
    runs = []
    for name, words in (("whole", ["-n", "2"]), ("split", ["-n", "4", "--replica-size", "2"])):
        folder = tmp_path_factory.mktemp(name)
        ended = launched(folder, f"STRATEGIES = {STRATEGIES}\n{TRAINS}", words)
        assert ended.code == 0, ended.err
        runs.append([torch.load(folder / f"found-{rank}") for rank in range(2 if name == "whole" else 4)])
    return runs


@pytest.mark.parametrize("case", [*(("sharded", one) for one in STRATEGIES), ("tensor", "all_reduce")])
def test_a_replica_of_two_processes_trains_as_one_process_would(
    found: list[list[dict[Any, Any]]], case: tuple[str, str]
) -> None:
    """With AdamW over 20 steps, accumulated and clipped gradients, and a model that the script changes meanwhile."""
    (one, *_), split = found
    for process in split:
        for expected, shown in zip(one[case], process[case], strict=True):
            assert expected.keys() == shown.keys()
            for name, value in expected.items():
                torch.testing.assert_close(shown[name], value, atol=1e-5, rtol=0)


NORM = """
mesh = replica.mesh(("dp", "tp"), (2, 2))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), 0.1), "all_reduce")
assert flockstep.clip_grad_norm_(optimizer, 1.0) == 0
torch.manual_seed(replica.rank // 2)
model(torch.randn(4, 8)).square().mean().backward()
whole = torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()]).norm()
torch.testing.assert_close(flockstep.clip_grad_norm_(optimizer, float(whole) / 2), whole)
optimizer.step()
clipped = torch.cat([parameter.grad.full_tensor().flatten() for parameter in model.parameters()]).norm()
torch.testing.assert_close(clipped, whole / 2)
optimizer.finish()
"""


def test_a_norm_over_two_dimensions_of_a_mesh_is_that_of_the_whole_gradient(tmp_path: Path) -> None:
    ended = launched(tmp_path, NORM, ["-n", "4", "--replica-size", "4"])
    assert ended.code == 0, ended.err


DISTRIBUTES = """
case, strategy = sys.argv[1:]
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
if case == "placements":
    style = RowwiseParallel() if replica.index else ColwiseParallel()
    parallelize_module(model, replica.mesh(("tensor",)), {"0": style})
elif case == "mesh":
    from torch.distributed.device_mesh import init_device_mesh
    store = torch.distributed.FileStore(str(HERE / "store"), -1)
    torch.distributed.init_process_group("gloo", store=store, rank=flockstep.rank(), world_size=flockstep.workers())
    fully_shard(model, mesh=init_device_mesh("cpu", (flockstep.workers(),)))
else:
    fully_shard(model, mesh=replica.mesh())
kind = torch.optim.LBFGS if case == "closure" else torch.optim.SGD
flockstep.distribute(model, kind(model.parameters()), strategy)
if case == "checkpoint":
    flockstep.checkpoint({})
"""


@pytest.mark.parametrize(
    ("case", "strategy", "said"),
    [
        ("placements", "all_reduce", r"0\.weight of shape \(8, 8\) as S\([01]\) .* instead of .* as S\([01]\)"),
        ("mesh", "all_reduce", "DTensors must be over the mesh of the process's replica"),
        ("whole", "powersgd", "powersgd sends factors of whole matrices"),
        pytest.param("whole", "adpsgd", "adpsgd has background tasks", marks=pytest.mark.full),
        pytest.param("closure", "all_reduce", "LBFGS compares gradients over the whole", marks=pytest.mark.full),
        pytest.param("checkpoint", "all_reduce", "checkpoint does not save the shards", marks=pytest.mark.full),
    ],
)
def test_what_replicas_of_two_processes_cannot_do(tmp_path: Path, case: str, strategy: str, said: str) -> None:
    ended = launched(tmp_path, DISTRIBUTES, ["-n", "4", "--replica-size", "2"], case, strategy)
    assert ended.code == 2, ended.err
    assert re.fullmatch(rf"flockstep: .*{said}.*\n", ended.err), ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "4", "--replica-size", "3"], "must be a multiple of --replica-size, got 4 workers"),
        (["-n", "4", "--replica-size", "2", "--min-workers", "2"], "do not work with --min-workers yet"),
        (["-n", "4", "--replica-size", "2", "--checkpoint-every", "5"], "do not work with --checkpoint-every yet"),
    ],
)
def test_options_that_contradict_replicas(tmp_path: Path, words: list[str], said: str) -> None:
    ended = launched(tmp_path, "", words)
    assert ended.code == 2, ended.err
    assert re.fullmatch(rf"flockstep: .*{said}.*\n", ended.err), ended.err
