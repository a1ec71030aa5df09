"""Milliseconds per training step and memory of each worker: flockstep beside DistributedDataParallel on gloo.

Ways: alone (a plain loop without any exchange), ddp, fabric (DDP as Lightning's Fabric sets it up; the package
`lightning`, or `lightning_fabric`, which comes with `pytorch-lightning`) and flockstep. They
take turns in the same processes, round after round, so that whatever else the machine does hits all of them alike. Each
process uses one thread and its own model. "cpu ms" is the processor time of rank 0, waits in a loop included, which
other programs disturb less. Each process holds the models of all ways at once: gpt2 with alone, ddp and flockstep takes
4 GB per process. With `--memory` each way runs by itself, and the peak of the workers' memory is measured, where memory
that processes share counts once.

    python benchmarks/step_time.py [--models digits,resnet18,gpt2] [--processes 1,2,4] [--rounds 5] [--steps 2]
        [--ways alone,ddp,fabric,flockstep] [--optimizer sgd] [--memory] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from large_models import MODELS
from peaks import ready, watching
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from turns import Step, step_of, take_turns

import flockstep
from flockstep.launchers.script import launch
from flockstep.records.config import RunConfig
from flockstep.runtime.node_spec import spec_from_environment

WAYS = ("alone", "ddp", "fabric", "flockstep")
FABRIC = next((name for name in ("lightning.fabric", "lightning_fabric") if find_spec(name.partition(".")[0])), None)
"""Name of the installed package that has Fabric; None if no package has it."""


class MasterAdamW(torch.optim.AdamW):
    """AdamW on a float32 master copy of bfloat16 parameters, as scripts under DDP write it."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.narrow = parameters
        self.wide = [nn.Parameter(p.detach().float()) for p in parameters]
        super().__init__(self.wide, lr=1e-4)

    def step(self, closure: Any = None) -> None:
        """Widen the gradients, step on the master copy and round it into the parameters."""
        for narrow, wide in zip(self.narrow, self.wide, strict=True):
            wide.grad, narrow.grad = None if narrow.grad is None else narrow.grad.float(), None
        super().step(closure)
        with torch.no_grad():
            for narrow, wide in zip(self.narrow, self.wide, strict=True):
                narrow.copy_(wide)
                wide.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="digits,resnet18", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--ways", default="alone,ddp,flockstep", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--strategy", default="all_reduce")
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "momentum", "adamw"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of each way in a round")
    parser.add_argument("--batch", type=int, default=0, help="samples of a step; 0: as the model has it")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "fabric" in options.ways and FABRIC is None:
        raise SystemExit("fabric needs Lightning; pip install lightning, or leave fabric out of --ways")
    results = [
        (memory if options.memory else times)(options, model, int(n))
        for model in options.models.split(",")
        for n in options.processes.split(",")
    ]
    if options.json:
        print(json.dumps(results))
        return
    for row in results:
        print(f"{row['model']}, {row['processes']} processes")
        for way, figure in row["ways"].items():
            print(f"  {way:<10} " + ", ".join(f"{name} {value:.4g}" for name, value in figure.items()))


def times(options: argparse.Namespace, model: str, processes: int) -> dict[str, Any]:
    """Milliseconds per step of each way, and the ratio to DDP and to a plain loop: medians over rounds."""
    figures = run(options, model, processes, options.ways.split(","))
    taken = figures["times"]
    found = {way: {"ms": statistics.median(own), "cpu ms": figures["cpu"][way]} for way, own in taken.items()}
    for way, own in taken.items():
        for other in {"alone", "ddp"} & (taken.keys() - {way}):
            ratios = [mine / theirs for mine, theirs in zip(own, taken[other], strict=True)]
            found[way][f"of {other}"] = statistics.median(ratios)
    return {"model": model, "processes": processes, "ways": found}


def memory(options: argparse.Namespace, model: str, processes: int) -> dict[str, Any]:
    """Peak of what the workers of each way need beyond their imports, as bytes per parameter of one worker."""
    found = {}
    for way in options.ways.split(","):
        result = run(options, model, processes, [way], watched=True)
        found[way] = {
            "worker MB": result["workers"] / processes / 1e6,
            "worker bytes per parameter": result["workers"] / processes / result["parameters"],
            "launcher MB": result["launcher"] / 1e6,
        }
    for way in found:
        if "ddp" in found:
            found[way]["of ddp"] = found[way]["worker MB"] / found["ddp"]["worker MB"]
    return {"model": model, "processes": processes, "ways": found}


def run(
    options: argparse.Namespace, model: str, processes: int, ways: list[str], watched: bool = False
) -> dict[str, Any]:
    """Run the workers; return rank 0's figures, with the peaks of memory if `watched`."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        peaks = stack.enter_context(watching(Path(folder))) if watched else {}
        out = Path(folder) / "figures.json"
        arguments = {**vars(options), "ways": ways, "model": model, "out": str(out)}
        config = RunConfig(kind="launch", job=__file__, strategy=options.strategy, workers=processes)
        launch(Path(__file__), ["--worker", json.dumps(arguments)], config, Path(folder) / "run")
        found: dict[str, Any] = json.loads(out.read_text())
    return {**found, **peaks}


def worker(options: dict[str, Any]) -> None:
    """One process: all ways, in turn."""
    torch.set_num_threads(1)
    node_spec = spec_from_environment()
    assert node_spec is not None
    rank, workers, out = node_spec.address, node_spec.workers, Path(options["out"])
    store = f"file://{out.with_name('store')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=workers)
    ready(out.parent)
    dist.barrier()
    built = {way: build(way, options, rank, workers) for way in options["ways"]}
    ways = {way: one.step for way, one in built.items()}
    cpu = {way: list[float]() for way in ways}
    counted = {way: counting(step, cpu[way]) for way, step in ways.items()}
    taken = take_turns(counted, dict.fromkeys(ways, options["steps"]), options["rounds"])
    if rank == 0:
        medians = {way: statistics.median(own) for way, own in cpu.items()}
        out.write_text(
            json.dumps({"times": taken, "cpu": medians, "parameters": next(iter(built.values())).parameters})
        )
    dist.barrier()
    for one in built.values():
        one.finish()
    if "flockstep" not in ways:  # the launcher waits for a call
        part = nn.Linear(1, 1)
        flockstep.distribute(part, torch.optim.SGD(part.parameters(), lr=0.1), strategy="all_reduce").finish()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Built:
    """A model, ready to be trained one way."""

    step: Step
    """Function that trains the model for one step."""
    parameters: int
    finish: Callable[[], object] = lambda: None
    """Function to call after the last step."""


def counting(step: Step, cpu: list[float]) -> Step:
    """The step, which adds the milliseconds of processor time that it takes to `cpu`."""

    def counted() -> None:
        begin = time.process_time()
        step()
        cpu.append(1000 * (time.process_time() - begin))

    return counted


def build(way: str, options: dict[str, Any], rank: int, workers: int) -> Built:
    """A model that is trained the given way, on samples of the rank's own."""
    chosen = MODELS[options["model"]]
    torch.manual_seed(0)
    model = chosen.build().to(getattr(torch, options["dtype"]))
    parameters = sum(p.numel() for p in model.parameters())
    torch.manual_seed(rank)
    x, y = chosen.data(options["batch"] or chosen.batch)
    x = x.to(getattr(torch, options["dtype"])) if x.is_floating_point() else x
    optimizer = optimizer_of(model, way, options)
    if way == "flockstep":
        ours = flockstep.distribute(model, optimizer, strategy=options["strategy"])
        return Built(step_of(model, ours, x, y), parameters, ours.finish)
    if way == "ddp":
        return Built(step_of(DistributedDataParallel(model), optimizer, x, y), parameters)
    step = on_fabric(model, optimizer, rank, workers, x, y) if way == "fabric" else step_of(model, optimizer, x, y)
    return Built(step, parameters)


def optimizer_of(model: nn.Module, way: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer; beside flockstep, which has a master copy of its own, AdamW makes one of narrower parameters."""
    if options["optimizer"] == "adamw":
        narrow = options["dtype"] != "float32" and way != "flockstep"
        return MasterAdamW(list(model.parameters())) if narrow else torch.optim.AdamW(model.parameters(), lr=1e-4)
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9 * (options["optimizer"] == "momentum"))


def on_fabric(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, workers: int, x: torch.Tensor, y: torch.Tensor
) -> Step:
    """A training step under Fabric's DDP, in the process group that is open already."""
    assert FABRIC is not None
    parts = [import_module(name) for name in (FABRIC, f"{FABRIC}.plugins.environments", f"{FABRIC}.strategies")]
    fabric_of, environment, ddp = parts[0].Fabric, parts[1].TorchElasticEnvironment, parts[2].DDPStrategy

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    plan = ddp(cluster_environment=environment(), process_group_backend="gloo")
    fabric = fabric_of(accelerator="cpu", devices=workers, strategy=plan)
    fabric.launch()
    wrapped, stepper = fabric.setup(model, optimizer)
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        fabric.backward(loss_fn(wrapped(x), y))
        stepper.step()
        stepper.zero_grad()

    return step


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]))
    else:
        main()
