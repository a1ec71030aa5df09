"""What scripts under `flockstep launch` begin with."""

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
