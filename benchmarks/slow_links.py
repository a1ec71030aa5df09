"""Time to accuracy over slow links: the strategy that `flockstep plan` advises, beside DistributedDataParallel on gloo.

Four hosts with a worker each, network namespaces joined by links of 20 and 100 Mbit/s. Both train the same job on the
same parts of its data, each with three learning rates (the job's times 1/2, 1 and 2), one run after the other; the best
counts. DDP's clock stands still while rank 0 evaluates; flockstep's does not, and the models to be evaluated travel
over the same links. The plan sees the links and the time of a gradient, measured here, and nothing of the runs. The
hosts share the cores of this machine, so the time in which a worker of the advised strategy computed is shown, and how
many times faster than DDP the run would have been if it had done nothing else. Needs Linux and root.

    python benchmarks/slow_links.py [--links 20mbit,100mbit] [--jobs digits,charlm] [--rates 1,0.5,2] [--limit 300]
        [--json] [--keep]

`--keep` writes the rows to benchmarks/slow_links.json, from which docs/generate.py and docs/picture.py make the
README's table and picture.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from network import OTHER_PORT, PORT, network, start
from torch.nn.parallel import DistributedDataParallel

import flockstep
from flockstep.arrays.namespace import to_tensor
from flockstep.frameworks.base import Job
from flockstep.optimizers.adam import AdamW
from flockstep.optimizers.sgd import SGD
from flockstep.planning.step_prediction import ALONE
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep.workloads.base import Workload

HOSTS = 4
EVALUATE = {"digits": 20, "charlm": 50}
"""Steps between two evaluations."""
TITLES = "{:8} {:>8} {:30} {:>8} {:>10} {:>8} {:>13} {:>8}"
KEPT = Path(__file__).with_suffix(".json")
"""The rows that the README shows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--links", default="20mbit,100mbit")
    parser.add_argument("--jobs", default="digits,charlm")
    parser.add_argument("--rates", default="1,0.5,2", help="Learning rates, times the job's own.")
    parser.add_argument("--limit", type=float, default=300.0, help="Seconds after which a run of DDP ends.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true", help=f"Write the rows to {KEPT.name}.")
    options = parser.parse_args()
    rates = tuple(map(float, options.rates.split(",")))
    rows = []
    if not options.json:
        print(
            TITLES.format("job", "link", "advised", "seconds", "computing", "DDP", "times faster", "at most"),
            flush=True,
        )
    for job in options.jobs.split(","):
        seconds = gradient_seconds(job)
        for link in options.links.split(","):
            rows.append(compare(job, link, seconds, options.limit, rates))
            if not options.json:
                show(rows[-1])
    if options.keep:
        KEPT.write_text(json.dumps(rows, indent=1) + "\n")
    if options.json:
        print(json.dumps(rows))
        return
    print("seconds until the target, of the best learning rate; inf: never reached; computing: seconds in which a")
    print("worker computed gradients, on cores that all hosts share; at most: times faster if it did nothing else")


def show(row: dict[str, Any]) -> None:
    """Print a row of the table."""
    ours, computing, theirs = (
        math.inf if row[side] is None else row[side] for side in ("flockstep", "computing", "ddp")
    )
    figures = (f"{figure:.1f}" for figure in (ours, computing, theirs, theirs / ours, theirs / computing))
    print(TITLES.format(row["job"], row["link"], row["advised"], *figures), flush=True)


def gradient_seconds(name: str) -> float:
    """Median time of a gradient on one core of this machine."""
    torch.set_num_threads(1)
    trainer = Trainer(Workload.parse(name).job(0), 0, 1, 1.0)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        trainer.step()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def advised(name: str, link: str, seconds: float, folder: Path) -> str:
    """The strategy that the plan recommends for the hosts."""
    cluster = folder / "cluster.toml"
    cluster.write_text(
        f'compute = "lognormal({seconds:.3g}, sigma=0.1)"\n[nodes.hosts]\ncount = {HOSTS}\n'
        f'[[links]]\ninside = "hosts"\nbandwidth = "{link}"\nlatency = "100us"\n'
    )
    return flockstep.plan(name, cluster).advice.choice.name


def compare(name: str, link: str, seconds: float, limit: float, rates: Sequence[float]) -> dict[str, Any]:
    """The best times of both, in turns."""
    with tempfile.TemporaryDirectory() as text, network(HOSTS, link) as hosts:
        folder = Path(text)
        strategy = advised(name, link, seconds, folder)
        job = Workload.parse(name).job(0)
        assert isinstance(job.optimizer, SGD | AdamW)
        ours: dict[float, float | None] = {}
        theirs: dict[float, float | None] = {}
        computing: dict[float, float] = {}
        for factor in rates:
            rate = factor * job.optimizer.lr
            out = folder / f"run-{factor:g}"
            command: list[Any] = ["-m", "flockstep", "train", name, "--lr", rate, "--evaluate-every", EVALUATE[name]]
            if strategy == ALONE:
                started = [start(hosts[0], [*command, "-s", "all_reduce", "-n", 1, "--out", out])]
            else:
                command += ["-s", strategy, "-n", HOSTS, "--nodes", HOSTS]
                command += ["--coordinator", f"{hosts[0].address}:{PORT}", "--out", out]
                started = [start(host, [*command, "--node-rank", rank]) for rank, host in enumerate(hosts)]
            codes = [process.wait() for process in started]
            summary = json.loads((out / "summary.json").read_text())
            ours[factor] = summary["seconds_to_target"]
            computing[factor] = computed(out, math.inf if ours[factor] is None else ours[factor])
            figures = folder / "ddp.json"
            script: list[Any] = [__file__, "--worker", figures, name, hosts[0].address, factor, limit]
            started = [
                start(host, [*script, rank], GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1")
                for rank, host in enumerate(hosts)
            ]
            codes += [process.wait() for process in started]
            theirs[factor] = json.loads(figures.read_text())
            print(f"{name} {link} x{factor:g}: {strategy} {ours[factor]} s, DDP {theirs[factor]} s, exit codes "
                  f"{codes}", file=sys.stderr, flush=True)  # fmt: skip
        row = {"job": name, "link": link, "advised": strategy, "gradient": seconds, "limit": limit}
        fastest = [computing[factor] for factor in rates if ours[factor] is not None and ours[factor] == best(ours)]
        row["computing"] = fastest[0] if fastest else None
        return {**row, "flockstep": best(ours), "ddp": best(theirs), "rates": [ours, theirs], "load": os.getloadavg()}


def computed(folder: Path, until: float) -> float:
    """Seconds in which a worker computed gradients before that time, as a mean over the workers of a record."""
    steps = [event for event in RunFolder(folder).read_events() if isinstance(event, StepEvent)]
    workers = len({event.rank for event in steps})
    return sum(event.compute_seconds for event in steps if event.seconds <= until) / workers


def best(times: dict[float, float | None]) -> float | None:
    """The shortest time until the target; None if no run reached it."""
    return min((seconds for seconds in times.values() if seconds is not None), default=None)


class Trainer:
    """Trains one replica of a job on this rank's part of the data."""

    def __init__(self, job: Job, rank: int, workers: int, factor: float):
        self._job = job
        self.model = job.model()
        self._data = job.data()
        self._part = np.random.default_rng(0).permutation(len(self._data.train_x))[rank::workers]
        self._random = np.random.default_rng(rank)
        self._left: list[int] = []
        self._forward = DistributedDataParallel(self.model) if workers > 1 else self.model
        self._optimizer = optimizer_of(job, self.model, factor)
        self.steps = math.ceil(max(job.epochs * len(self._data.train_x) / job.batch / workers, job.least_steps))

    def step(self) -> None:
        """One step on the next batch; every pass is shuffled anew."""
        if len(self._left) < self._job.batch:
            self._left = list(self._random.permutation(self._part))
        batch, self._left = self._left[: self._job.batch], self._left[self._job.batch :]
        x, y = (to_tensor(np.asarray(array[batch])) for array in (self._data.train_x, self._data.train_y))
        assert self._job.loss is not None
        self._job.loss(self._forward(x), y).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def reached(self) -> bool:
        """Whether the model has reached the job's target on the test set."""
        self.model.eval()
        with torch.no_grad():
            outputs = self.model(to_tensor(np.asarray(self._data.test_x)))
        self.model.train()
        targets = to_tensor(np.asarray(self._data.test_y))
        if self._job.metric == "accuracy":
            metric = (outputs.argmax(-1) == targets).float().mean().item()
        else:
            assert callable(self._job.metric)
            metric = float(self._job.metric(outputs, targets))
        assert self._job.target is not None
        return metric >= self._job.target if self._job.higher_is_better else metric <= self._job.target


def optimizer_of(job: Job, model: torch.nn.Module, factor: float) -> torch.optim.Optimizer:
    """PyTorch's optimizer with the job's settings."""
    match job.optimizer:
        case SGD() as sgd:
            return torch.optim.SGD(model.parameters(), factor * sgd.lr, sgd.momentum)
        case AdamW() as adam:
            betas = (adam.beta1, adam.beta2)
            return torch.optim.AdamW(model.parameters(), factor * adam.lr, betas, adam.eps, adam.weight_decay)
        case _:
            raise TypeError(job.optimizer)


def worker(out: Path, name: str, store: str, factor: float, limit: float, rank: int) -> None:
    """One process of DDP: writes the seconds until the target, null if it is not reached."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{store}:{OTHER_PORT}", rank=rank, world_size=HOSTS)
    trainer = Trainer(Workload.parse(name).job(0), rank, HOSTS, factor)
    clock, done, step, found = 0.0, torch.zeros(1), 0, None
    dist.barrier()
    while not done.item() and step < trainer.steps:
        begin = time.perf_counter()
        for _ in range(EVALUATE[name]):
            trainer.step()
        clock, step = clock + time.perf_counter() - begin, step + EVALUATE[name]
        if rank == 0:
            found = clock if trainer.reached() else None
            done[0] = float(found is not None or clock > limit)
        dist.broadcast(done, 0)
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5]), float(sys.argv[6]), int(sys.argv[7]))
    else:
        main()
