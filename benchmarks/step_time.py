"""Milliseconds per training step of the digits CNN: flockstep's all-reduce beside DistributedDataParallel on gloo.

The three ways (no exchange, DDP, flockstep) take turns in the same processes, round after round, so that whatever
else the machine does hits all of them alike. Each process uses one thread and its own model, batch 32.

    python benchmarks/step_time.py [--processes 1,2,4] [--rounds 20] [--steps 25] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from turns import Step, step_of, take_turns, write_figures

import flockstep
from flockstep.drivers.node_spec import spec_from_environment
from flockstep.launchers.script import launch
from flockstep.records.config import RunConfig
from flockstep.workloads.digits import Digits

WAYS = ("alone", "ddp", "flockstep")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=25, help="steps of each way in a round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [measure(int(n), options.rounds, options.steps) for n in options.processes.split(",")]
    if options.json:
        print(json.dumps(results))
        return
    headings = ("processes", "alone ms", "DDP ms", "flockstep ms", "flockstep/DDP", "overhead ratio")
    print("{:>9} {:>9} {:>9} {:>12} {:>14} {:>15}".format(*headings))
    for row in results:
        overhead = (row["flockstep"] - row["alone"]) / (row["ddp"] - row["alone"])
        print(
            f"{row['processes']:>9} {row['alone']:>9.2f} {row['ddp']:>9.2f} {row['flockstep']:>12.2f} "
            f"{row['ratio']:>14.2f} {overhead:>15.2f}"
        )
    print("medians over rounds; ratio: median of the rounds' own ratios; overhead: beyond no exchange, of medians")


def measure(processes: int, rounds: int, steps: int) -> dict[str, float]:
    """Run the workers and return rank 0's figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        arguments = ["--worker", str(out), str(rounds), str(steps)]
        config = RunConfig(kind="launch", job=__file__, strategy="all_reduce", workers=processes)
        launch(Path(__file__), arguments, config, Path(folder) / "run")
        return {"processes": processes, **json.loads(out.read_text())}


def worker(out: Path, rounds: int, steps: int) -> None:
    """Measure all three ways in turn, in one process."""
    torch.set_num_threads(1)
    node_spec = spec_from_environment()
    assert node_spec is not None
    dist.init_process_group(
        "gloo", init_method=f"file://{out.with_name('store')}", rank=node_spec.address, world_size=node_spec.workers
    )
    ways = {name: build(name) for name in WAYS}
    times = take_turns(ways, dict.fromkeys(ways, steps), rounds)
    if node_spec.address == 0:
        write_figures(out, times)
    dist.destroy_process_group()


def build(name: str) -> Step:
    """One training step of the digits CNN, the given way."""
    job = Digits().job(0)
    model: nn.Module = job.model()
    data = job.data()
    x, y = torch.as_tensor(data.train_x[:32]), torch.as_tensor(data.train_y[:32])
    wrapped = DistributedDataParallel(model) if name == "ddp" else model
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if name == "flockstep":
        optimizer = flockstep.distribute(model, optimizer, strategy="all_reduce")
    return step_of(wrapped, optimizer, x, y)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
