"""Time of a step and memory of a process: replicas of FSDP2 under flockstep beside PyTorch's hybrid sharding (HSDP).

Both train a decoder on random tokens by AdamW with 2 replicas of 2 processes. HSDP is `fully_shard` on a 2-D mesh and
sums gradients over replicas by gloo; flockstep is `fully_shard` on the replica's own mesh under a strategy. Ways take
turns as whole runs, because each has a default process group of its own. Bytes are what a process sends to other
replicas in a step. Needs PyTorch.

    python benchmarks/replicas.py [--width 256] [--layers 6] [--rounds 3] [--steps 20] [--strategies all_reduce]
        [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from large_models import Decoder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flockstep
from flockstep.records.folder import RunFolder

TOKENS, LENGTH, REPLICAS, SHARDS = 2048, 64, 2, 2
WARM = 5
"""Steps before the measured ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--strategies", default="all_reduce", help="strategies of flockstep, separated by semicolons")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        worker(options)
        return
    ways = ["hsdp", *options.strategies.split(";")]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for turn in range(len(ways)):
            way = ways[(number + turn) % len(ways)]
            found[way].append(measured(way, options))
            print(f"{way}: {json.dumps(found[way][-1])}", file=sys.stderr, flush=True)
    medians = {
        way: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for way, runs in found.items()
    }
    if options.json:
        print(json.dumps(medians))
        return
    print(f"{'way':<34}{'ms a step':>12}{'of hsdp':>9}{'MB a process':>14}{'of hsdp':>9}{'MB sent':>9}")
    for way, one in medians.items():
        base = medians["hsdp"]
        ratios = one["ms"] / base["ms"], one["memory"] / base["memory"]
        print(f"{way:<34}{one['ms']:12.1f}{ratios[0]:9.2f}{one['memory']:14.0f}{ratios[1]:9.2f}{one['sent']:9.2f}")


def measured(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per step, peak MB of a process, and MB that a process sends to other replicas in a step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        words = [__file__, "--width", str(options.width), "--layers", str(options.layers)]
        words += ["--steps", str(options.steps), "--way", way, "--out", str(out)]
        workers = REPLICAS * SHARDS
        if way == "hsdp":
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        else:
            launch = [sys.executable, "-m", "flockstep", "launch", "-n", str(workers)]
            command = [*launch, "--replica-size", str(SHARDS), "--out", str(out / "run")]
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        each = [json.loads(file.read_text()) for file in out.glob("figures-*")]
        sent = 0.0
        if way != "hsdp":
            summary = RunFolder(out / "run").read_summary()
            sent = summary.sent_bytes_per_worker / (WARM + options.steps) / 1e6
        names = ("ms", "memory")
        return {**{name: statistics.median(one[name] for one in each) for name in names}, "sent": sent}


def worker(options: argparse.Namespace) -> None:
    """Train as one process of a way, and write its figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder(options.width, options.layers, heads=4, tokens=TOKENS, context=LENGTH)
    if options.way == "hsdp":
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replica", "shard"))
        rank = dist.get_rank()
    else:
        mesh, rank = flockstep.replica().mesh(("shard",)), flockstep.rank()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if options.way != "hsdp":
        optimizer = flockstep.distribute(model, optimizer, options.way)
    loss_fn, random = nn.CrossEntropyLoss(), torch.Generator().manual_seed(rank)
    times = []
    for _ in range(WARM + options.steps):
        tokens = torch.randint(TOKENS, (4, LENGTH + 1), generator=random)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss_fn(model(tokens[:, :-1]), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    figures = {"ms": statistics.median(times[WARM:]) * 1e3, "memory": peak}
    (options.out / f"figures-{rank}").write_text(json.dumps(figures))
    if options.way == "hsdp":
        dist.destroy_process_group()
    else:
        optimizer.finish()


if __name__ == "__main__":
    main()
