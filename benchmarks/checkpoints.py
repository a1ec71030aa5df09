"""What a checkpoint every 100 steps costs a model of 25 M parameters: a share of the time of a step.

One run of a script takes checkpoints, so that blocks of steps with one checkpoint and without alternate in the same
processes, and whatever else the machine does hits both alike. "ms" is the time of a step, "cpu ms" the processor time
of rank 0, with the thread that writes the checkpoint. A checkpoint costs what a block with a checkpoint takes longer
than the block before it; that is divided by the time of 100 steps without a checkpoint.

    python benchmarks/checkpoints.py [--parameters 25e6] [--block 100] [--rounds 3] [--workers 2] [--batch 64]
        [--strategy all_reduce] [--momentum 0.9] [--out FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flockstep
from flockstep.launchers.script import launch
from flockstep.records.checkpoints import newest
from flockstep.records.config import RunConfig

LAYERS = 4
WRITER = "flockstep-checkpoint"
"""Name of the thread that writes a worker's state."""
EVERY = 100
"""Steps from one checkpoint to the next for which the cost is stated."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=float, default=25e6)
    parser.add_argument("--block", type=int, default=100, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of blocks")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="samples of a worker's step")
    parser.add_argument("--strategy", default="all_reduce")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--out", help="folder of the record; by default one that is removed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measured(options, Path(scratch), Path(options.out or f"{scratch}/run"))
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['parameters']:,} parameters, {options.workers} workers, {found['megabytes']:.0f} MB per checkpoint")
    for name in ("ms", "cpu ms"):
        one = found[name]
        print(
            f"  {name:<6} per step: {one['without']:.1f} without a checkpoint, {one['with']:.1f} with one: "
            f"{one['cost']:+.2%} of {EVERY} steps ({', '.join(f'{share:+.2%}' for share in one['costs'])})"
        )
    print(f"  longest step: {found['longest']['without']:.0f} ms without, {found['longest']['with']:.0f} ms with")


def measured(options: argparse.Namespace, scratch: Path, record: Path) -> dict[str, Any]:
    """Run the workers; the figures of rank 0."""
    steps = scratch / "steps.json"
    config = RunConfig(
        kind="launch",
        job=__file__,
        strategy=options.strategy,
        workers=options.workers,
        checkpoint_every=str(2 * options.block),
        keep=1,
    )
    summary = launch(Path(__file__), ["--worker", json.dumps({**vars(options), "steps": str(steps)})], config, record)
    if summary.notes:
        raise SystemExit(f"not measured: {'; '.join(summary.notes)}")
    own = json.loads(steps.read_text())
    last = newest(record)
    found = {"parameters": own["parameters"], "megabytes": sum(shard.nbytes for shard in last.manifest.shards) / 1e6}
    return {**found, **figures(own, options.block, options.rounds)}


def figures(own: dict[str, Any], block: int, rounds: int) -> dict[str, Any]:
    """Compare each block after step 2 * i * `block`, in which checkpoint i is taken, with the block before it."""
    wanted = [2 * block * (number + 1) for number in range(rounds)]
    copied, writing = own["copied"], own["writing"]
    if len(copied) != rounds or any(not at < step <= at + block for at, step in zip(wanted, copied, strict=True)):
        raise SystemExit(f"checkpoints were taken at the steps {copied}, not soon after {wanted}; repeat the run")
    if late := [at for at in wanted if writing[at + block - 1] or not any(writing[at : at + block])]:
        raise SystemExit(f"checkpoints after the steps {late} were not written within {block} steps; use larger blocks")
    found: dict[str, Any] = {}
    for name in ("ms", "cpu ms"):
        values = own[name]
        pairs = [[statistics.mean(values[at : at + block]) for at in (step, step - block)] for step in wanted]
        costs = [(taken / free - 1) * block / EVERY for taken, free in pairs]
        means = [statistics.mean(each) for each in zip(*pairs, strict=True)]
        found[name] = {"with": means[0], "without": means[1], "cost": statistics.mean(costs), "costs": costs}
    longest = [max(itertools.chain(*(own["ms"][at - off : at - off + block] for at in wanted))) for off in (0, block)]
    return {**found, "longest": {"with": longest[0], "without": longest[1]}}


def worker(options: dict[str, Any]) -> None:
    """One worker's script; rank 0 writes the times of its steps, and the steps at which checkpoints were taken."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = round((options["parameters"] / LAYERS) ** 0.5)
    model = nn.Sequential(*itertools.chain(*((nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS))))
    inner = torch.optim.SGD(model.parameters(), lr=0.001, momentum=options["momentum"])
    optimizer = flockstep.distribute(model, inner, strategy=options["strategy"])
    flockstep.resumed()
    x = torch.randn(options["batch"], width, generator=torch.Generator().manual_seed(flockstep.rank()))
    copied, writing, wall, cpu = list[int](), list[bool](), list[float](), list[float]()
    for step in range(options["block"] * (2 * options["rounds"] + 1) + 1):
        begin, begin_cpu = time.perf_counter(), time.process_time()

        def extra(step: int = step) -> dict[str, int]:
            copied.append(step)
            return {"step": step}

        flockstep.checkpoint(extra)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
        writing.append(any(thread.name == WRITER for thread in threading.enumerate()))
        wall.append(1000 * (time.perf_counter() - begin))
        cpu.append(1000 * (time.process_time() - begin_cpu))
    if flockstep.is_main():
        parameters = sum(one.numel() for one in model.parameters())
        taken = {"copied": copied[1:], "writing": writing}  # without the first call, which begins
        own = {"ms": wall, "cpu ms": cpu, "parameters": parameters, **taken}
        Path(options["steps"]).write_text(json.dumps(own))
    optimizer.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]))
    else:
        main()
