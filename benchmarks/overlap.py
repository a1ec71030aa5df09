"""Milliseconds per training step of an MLP: DistributedDataParallel, all_reduce, and bucketed that overlaps.

All ways take turns in the same processes, round after round, so that whatever else the machine does hits all of them
alike. Each process uses one thread and its own model of about a million parameters, float32.

    python benchmarks/overlap.py [--processes 2,4] [--rounds 10] [--steps 10] [--batch 64] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from turns import Step, step_of, take_turns, write_figures

import flockstep
from flockstep.runtime.node_spec import spec_from_environment

BUCKETS = "cap=1, first=0.25"  # megabytes; DDP gets the same
WAYS = {
    "all_reduce": "all_reduce",
    "bucketed": f"bucketed({BUCKETS})",
    "all_reduce on gloo": "all_reduce(collective=torch_distributed)",
    "bucketed on gloo": f"bucketed({BUCKETS}, collective=torch_distributed)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="steps of each way in a round")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [measure(int(n), options.rounds, options.steps, options.batch) for n in options.processes.split(",")]
    if options.json:
        print(json.dumps(results))
        return
    for row in results:
        print(f"{row['processes']} processes")
        for name in ("alone", "ddp", *WAYS):
            ratio = f"{row[name + ' / ddp']:.2f} of DDP" if name in WAYS else ""
            print(f"  {name:<20} {row[name]:>8.2f} ms  {ratio}")
    print("medians over rounds; ratios: median of the rounds' own")


def measure(processes: int, rounds: int, steps: int, batch: int) -> dict[str, float]:
    """Each way of flockstep needs a run of its own: beside it DDP and no exchange are measured again."""
    figures: dict[str, float] = {"processes": processes}
    for name, strategy in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "figures.json"
            command = [sys.executable, "-m", "flockstep", "launch", "-n", str(processes), "--out", f"{folder}/run"]
            arguments = ["--worker", str(out), str(rounds), str(steps), str(batch), strategy]
            subprocess.run([*command, __file__, *arguments], check=True, stderr=subprocess.DEVNULL)
            found = json.loads(out.read_text())
        figures |= {"alone": found["alone"], "ddp": found["ddp"], name: found["ours"], f"{name} / ddp": found["ratio"]}
    return figures


def worker(out: Path, rounds: int, steps: int, batch: int, strategy: str) -> None:
    """One process: no exchange, DDP and one way of flockstep, in turn."""
    torch.set_num_threads(1)
    node_spec = spec_from_environment()
    assert node_spec is not None
    dist.init_process_group(
        "gloo", init_method=f"file://{out.with_name('store')}", rank=node_spec.address, world_size=node_spec.workers
    )
    ways = {name: build(name, strategy, batch) for name in ("alone", "ddp", "ours")}
    times = take_turns(ways, dict.fromkeys(ways, steps), rounds)
    if node_spec.address == 0:
        write_figures(out, times, "ours")
    dist.destroy_process_group()


def build(name: str, strategy: str, batch: int) -> Step:
    """Return a function that takes one training step in the given way."""
    torch.manual_seed(0)
    widths = (256, 512, 512, 512, 512, 256, 10)  # 1.05 million parameters
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers[:-1])
    x, y = torch.randn(batch, widths[0]), torch.randint(widths[-1], (batch,))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1) if name == "ddp" else model
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if name == "ours":
        optimizer = flockstep.distribute(model, optimizer, strategy=strategy)
    return step_of(wrapped, optimizer, x, y)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    else:
        main()
