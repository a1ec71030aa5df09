"""What scripts under `flockstep launch` begin with, and what they say."""

import re

NUMPY = """
import os, subprocess, sys, time
from pathlib import Path
import numpy as np
from flockstep.arrays.schema import Schema
from flockstep.runtime.loop import Loop
from flockstep.runtime.node_spec import spec_from_environment
from flockstep.runtime.plan import LocalOptimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Strategy

HERE = Path(__file__).parent
rank = spec_from_environment().address

def until(name):
    while not (HERE / name).exists():
        time.sleep(0.01)

def start(strategy="all_reduce", shapes={"w": (20,)}):
    global params, optimizer
    schema = Schema.of(shapes)
    params, gradient = np.full(schema.size, rank, np.float32), np.zeros(schema.size, np.float32)
    arguments = schema, Strategy.parse(strategy), LocalOptimizer(SGD(lr=0.1), params), SGD(lr=0.1)
    optimizer = Loop(params, gradient, *arguments)

def steps(count):
    for _ in range(count):
        optimizer.gradients[:] = params - rank
        optimizer.step()

"""
"""With numpy the loop that `flockstep.distribute` runs with PyTorch, so that a script starts ten times as fast.

Its gradient leads worker r to parameters of r, and all workers together to the mean of their ranks.
"""

COMPILER = """
import sys
import torch
sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "WithoutCompiler"]  # the tests' stand-in
sys.modules.pop("torch._dynamo", None)
vars(torch).pop("_dynamo", None)
"""
"""For scripts that need torch's own compiler, as process groups of torch.distributed and DTensors do."""

REPLICAS = (
    COMPILER
    + """
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import flockstep

size, *address = sys.argv[1:]
replica = flockstep.replica(size=int(size), over_hosts=bool(address))
if address and replica.size > 1:
    dist.init_process_group("gloo", init_method=address[0], rank=replica.rank, world_size=replica.size)
torch.manual_seed(0)
model = nn.Linear(8, 2)
fully_shard(model, mesh=replica.mesh())
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), 0.5), "all_reduce")
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
for step in range(60):
    own = x[flockstep.rank() :: flockstep.workers()]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(own), own[:, :2]).backward()
    optimizer.step()
optimizer.finish()
found = model.weight.full_tensor()
assert (found - torch.eye(8)[:2]).abs().max() < 0.01, found
part = f"process {replica.rank} of {replica.size} of replica {replica.index} of {replica.count}"
print(f"rank {flockstep.rank()} is {part}: {found.sum():.4f}", flush=True)
"""
)
"""Trains a linear layer whose replicas are sharded over processes; the arguments are the number of processes of a
replica, and, if a replica may be on several hosts, the address at which its processes meet.
"""


def of_replicas(out: str, workers: int, size: int) -> None:
    """Check that every worker of `REPLICAS` says its place, and that all have one model."""
    found = sorted(re.findall(r"rank \d+ is .*?: [-.\d]+", out))
    assert [line.partition(":")[0] for line in found] == [
        f"rank {rank} is process {rank % size} of {size} of replica {rank // size} of {workers // size}"
        for rank in range(workers)
    ], out
    assert len({line.partition(":")[2] for line in found}) == 1, out
