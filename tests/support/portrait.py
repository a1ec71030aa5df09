"""A script that writes all that it can see of its process; it begins with the imports that a preload may do for it."""

import numpy as np
import torch
from torch import nn

import flockstep  # noqa: F401 - imported as users' scripts import it

# what follows may be imported last, and a portrait is printed as a script would
# ruff: noqa: E402, T201, NPY002
MODULES = None
import sys

MODULES = sorted(sys.modules)
PATHS = sorted(sys.path_importer_cache)
import atexit
import inspect
import json
import multiprocessing
import os
import random
import time
import traceback
from pathlib import Path

from facts import facts

TEST = "PYTEST_CURRENT_TEST"
"""The variable that differs between the tests whose portraits are compared."""


def failure():
    try:
        nn.Linear(2, 2)(torch.ones(3))
    except RuntimeError:
        return traceback.format_exc()


def variables():
    changed = {"RANK": int, "LOCAL_RANK": int, "FLOCKSTEP_NODE_SPEC": lambda text: sorted(json.loads(text))}
    return [[name, str(changed.get(name, str)(value))] for name, value in os.environ.items() if name != TEST]


def seen():
    spec = json.loads(os.environ["FLOCKSTEP_NODE_SPEC"])
    return {
        **facts(),
        "main": [__name__, __file__, repr(__spec__), type(__loader__).__name__, __package__, sorted(globals())],
        "is main": sys.modules["__main__"].__dict__ is globals(),
        "environment": variables(),
        "process of the run": [spec["process"] == os.getpid(), spec["address"] == int(os.environ["RANK"])],
        "modules": MODULES,
        "searched": PATHS,
        "frames": [frame.function for frame in inspect.stack()],
        "failure": failure(),
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype())],
        "cuda": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()],
        "modes": [
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.multiprocessing.get_sharing_strategy(),
        ],
        "sums": [float(torch.arange(1000).float().sin().sum()), float(np.sin(np.arange(1000)).sum())],
    }


def drawn():
    """What differs from worker to worker."""
    authkey = bytes(multiprocessing.current_process().authkey).hex()
    seeds = np.random.get_bit_generator().seed_seq.entropy
    return [
        random.random(),
        np.random.rand(),
        torch.rand(1).item(),
        torch.initial_seed(),
        authkey,
        str(seeds),
        os.getpid(),
    ]


def square(number):
    return number * number


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    portrait = {"seen": seen(), "drawn": drawn(), "parent": os.getppid()}
    if "pools" in sys.argv:
        pools = [multiprocessing.get_context(method).Pool(1) for method in ("fork", "spawn", "forkserver")]
        portrait["pools"] = [pool.map(square, range(3)) for pool in pools]
        for pool in pools:
            pool.close()
            pool.join()
        with torch.no_grad():
            torch.set_num_threads(2)
            portrait["product"] = float((torch.ones(600, 600) @ torch.ones(600, 600)).sum())
    atexit.register(lambda: (folder / f"end-{os.environ['RANK']}").touch())
    (folder / f"portrait-{os.environ['RANK']}").write_text(json.dumps(portrait))
    while not all((folder / f"portrait-{rank}").exists() for rank in range(2)):  # a run ends with its first worker
        time.sleep(0.01)
    print("to the output")
    if os.environ["RANK"] == "1":
        raise ValueError("the end")
