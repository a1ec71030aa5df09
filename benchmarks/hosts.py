"""Milliseconds per step of an all-reduce over two hosts with two workers each, beside DistributedDataParallel on gloo.

The hosts are network namespaces; the link between them has 100 Mbit/s, 1 Gbit/s, or what this machine gives. Both take
turns in the same processes, round after round. flockstep's links are encrypted, and in a run of their own are not. All
workers share the cores of this machine, so their processor time is shown too, which other programs hardly change. Needs
Linux and root.

    python benchmarks/hosts.py [--links 100mbit,1gbit,none] [--models digits,wide] [--rounds 6] [--plain | --encrypted]
        [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from network import OTHER_PORT, PORT, network, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from turns import Step, step_of, take_turns, write_figures

import flockstep
from flockstep.runtime.node_spec import spec_from_environment
from flockstep.strategies.overlap_trial import TRIED
from flockstep.workloads.digits import Digits

WAYS = ("ddp", "flockstep")
SAMPLES = 32
SECONDS = 1.5
"""Of one way's turn, about."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--links", default="100mbit,1gbit,none")
    parser.add_argument("--models", default="digits,wide", help="digits: its CNN; wide: 25 M parameters.")
    parser.add_argument("--rounds", type=int, default=6)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--plain", action="store_true", help="Measure without encryption only.")
    which.add_argument("--encrypted", action="store_true", help="Measure with encryption only.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    encryptions = (False,) if options.plain else (True,) if options.encrypted else (True, False)
    cases = list(product(options.models.split(","), options.links.split(","), encryptions))
    if options.json:
        print(json.dumps([measure(*case, options.rounds) for case in cases]))
        return
    print("model        link encrypted     DDP ms flockstep ms  of DDP     processor ms", flush=True)
    for case in cases:
        show(measure(*case, options.rounds))
    print("medians over rounds; of DDP: median of the rounds' own ratios; 2 hosts x 2 workers; processor: mean of a")
    print("worker's step, DDP and flockstep")


def show(row: dict[str, Any]) -> None:
    """Print a row of the table."""
    print(
        f"{row['model']:8} {row['link']:>8} {'yes' if row['encrypt'] else 'no':>9} {row['ddp']:>10.2f} "
        f"{row['flockstep']:>12.2f} {row['ratio']:>7.2f} {row['processor']['ddp']:>8.1f} "
        f"{row['processor']['flockstep']:>7.1f}",
        flush=True,
    )


def measure(model: str, link: str, encrypt: bool, rounds: int) -> dict[str, Any]:
    """Run the workers on both hosts and return rank 0's figures."""
    with tempfile.TemporaryDirectory() as folder, network(2, None if link == "none" else link) as hosts:
        out = Path(folder) / "figures.json"
        transport = f"tcp(memory=true, encrypt={str(encrypt).lower()})"
        where = ["--nodes", "2", "--coordinator", f"{hosts[0].address}:{PORT}", "-n", "4", "--transport", transport]
        script = [__file__, "--worker", out, model, hosts[0].address, str(rounds)]
        own = [["--node-rank", "1"], ["--node-rank", "0", "--out", str(Path(folder) / "run")]]
        launch = [["-m", "flockstep", "launch", *where, *options, *script] for options in own]
        started = zip(reversed(hosts), launch, strict=True)
        processes = [start(host, command, GLOO_SOCKET_IFNAME="eth0") for host, command in started]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"a run of {model} over {link} failed")
        return {"model": model, "link": link, "encrypt": encrypt, **json.loads(out.read_text())}


def worker(out: Path, model: str, store: str, rounds: int) -> None:
    """One process: both ways, in turn."""
    torch.set_num_threads(1)
    node_spec = spec_from_environment()
    assert node_spec is not None
    rank, workers = node_spec.address, node_spec.workers
    dist.init_process_group("gloo", init_method=f"tcp://{store}:{OTHER_PORT}", rank=rank, world_size=workers)
    ways = {name: Metered(build(name, model, rank)) for name in WAYS}
    for _ in range(2 * TRIED + 1):  # until all_reduce has chosen when gradients travel
        ways["flockstep"]()
    steps = {name: number_of_steps(step) for name, step in ways.items()}
    for way in ways.values():
        way.reset()
    times = take_turns(ways, steps, rounds)
    processor = torch.tensor([ways[name].mean() for name in WAYS])
    dist.all_reduce(processor)
    if rank == 0:
        write_figures(out, times)
        shares = dict(zip(WAYS, (1000 * processor / workers).tolist(), strict=True))
        out.write_text(json.dumps({**json.loads(out.read_text()), "processor": shares}))
    dist.barrier()
    ways.clear()  # DDP holds the process group, whose end may hang when it comes last
    dist.destroy_process_group()


class Metered:
    """A training step, and the processor time of the process during all calls."""

    def __init__(self, step: Step):
        self._step = step
        self.reset()

    def reset(self) -> None:
        """Forget the calls so far."""
        self._calls, self._seconds = 0, 0.0

    def __call__(self) -> None:
        begin = time.process_time()
        self._step()
        self._calls, self._seconds = self._calls + 1, self._seconds + time.process_time() - begin

    def mean(self) -> float:
        """Seconds of processor time per call."""
        return self._seconds / self._calls


def number_of_steps(step: Step) -> int:
    """Steps that last about `SECONDS`, the same in every process."""
    step()
    begin = time.perf_counter()
    step()
    step()
    mean = torch.tensor((time.perf_counter() - begin) / 2)
    dist.all_reduce(mean)
    return max(2, min(200, round(SECONDS * dist.get_world_size() / mean.item())))


def build(name: str, model_name: str, rank: int) -> Step:
    """One training step, the given way, on samples of the rank's own."""
    torch.manual_seed(rank)
    if model_name == "digits":
        job = Digits().job(0)
        model: nn.Module = job.model()
        data, mine = job.data(), slice(SAMPLES * rank, SAMPLES * (rank + 1))
        x, y = torch.as_tensor(data.train_x[mine]), torch.as_tensor(data.train_y[mine])
    else:  # 25 M parameters, whose gradients are quickly computed
        model = nn.Sequential(nn.Linear(784, 3200), nn.ReLU(), *block(3200), *block(3200), nn.Linear(3200, 640))
        x, y = torch.randn(SAMPLES, 784), torch.randint(0, 640, (SAMPLES,))
    wrapped = DistributedDataParallel(model) if name == "ddp" else model
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if name == "flockstep":
        optimizer = flockstep.distribute(model, optimizer, strategy="all_reduce")
    return step_of(wrapped, optimizer, x, y)


def block(width: int) -> tuple[nn.Module, nn.Module]:
    """A layer and its activation."""
    return nn.Linear(width, width), nn.ReLU()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()
