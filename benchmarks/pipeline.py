"""Seconds per step of a GPT of 30 M parameters in four stages on four hosts, beside torch.distributed.pipelining.

The hosts are network namespaces; the link of each has 1 Gbit/s, or what this machine gives. Both runs, torch's on gloo,
exist at the same time and take turns of a second: the processes of one are stopped while those of the other run, so
that whatever else this machine does hits both alike. The turns begin when both have completed a step. Model,
micro-batches, schedule and optimizer are the same. All stages share the cores of this machine, with one thread each.
The first steps are left out on both sides: flockstep evaluates the first model meanwhile. Processor seconds are those
of all processes of a side. flockstep's links are not encrypted, as gloo's are not; with --encrypt they are. Needs Linux
and root.

    python benchmarks/pipeline.py [--links 1gbit,none] [--schedules gpipe,1f1b] [--steps 16] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from network import OTHER_PORT, PORT, Host, network, start
from pipeline_job import BATCH, CONTEXT, data, loss, model
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from flockstep.records.folder import RunFolder

STAGES, MICROBATCHES = 4, 8
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
WARM_UP = 4
"""Steps that are not counted."""
TURN = 1.0
"""Seconds for which one side runs while the other is stopped; shorter than flockstep's heartbeat."""
GLANCE = 0.02
"""Seconds between two looks at the number of steps."""
TICKS = os.sysconf("SC_CLK_TCK")
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--links", default="1gbit,none")
    parser.add_argument("--schedules", default="gpipe,1f1b")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--encrypt", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = {
        (schedule, link): measure(link, schedule, options.steps, options.encrypt)
        for link in options.links.split(",")
        for schedule in options.schedules.split(",")
    }
    if options.json:
        print(json.dumps([{"schedule": schedule, "link": link, **row} for (schedule, link), row in rows.items()]))
        return
    print("schedule     link     torch s flockstep s of torch   torch cpu s flockstep cpu s of torch")
    for (schedule, link), row in rows.items():
        print(
            f"{schedule:8} {link:>8} {row['torch']:>11.3f} {row['flockstep']:>11.3f} {row['ratio']:>8.3f} "
            f"{row['torch_cpu']:>13.3f} {row['flockstep_cpu']:>15.3f} {row['ratio_cpu']:>8.3f}"
        )
    print(f"medians over the steps behind the first {WARM_UP}; processor seconds per step: means of all processes")


@dataclass
class Side:
    """One of the two runs: its processes, and its progress while they are not stopped."""

    processes: list[subprocess.Popen[str]]
    log: Path
    """File to which rank 0 adds a line for each step."""
    mark: bytes
    """What such a line contains."""
    active: float = 0.0
    """Seconds for which the processes have run."""
    seen: list[tuple[float, float]] = field(default_factory=list)
    """Active seconds, and processor seconds of all processes, at the end of each step."""

    def take_turn(self) -> None:
        """Run for a turn, or until all processes have ended."""
        self._signal(signal.SIGCONT)
        begin = time.monotonic()
        while (spent := time.monotonic() - begin) < TURN and self.runs():
            time.sleep(GLANCE)
            self._look(self.active + spent)
        self.stop()
        self.active += time.monotonic() - begin

    def stop(self) -> None:
        """Stop all processes until the next turn."""
        self._signal(signal.SIGSTOP)

    def begun(self) -> bool:
        """Whether the first step is complete.

        Raises:
            SystemExit: all processes have ended before.
        """
        if not self.runs():
            raise SystemExit("a run failed")
        self._look(0.0)
        return bool(self.seen)

    def runs(self) -> bool:
        """Whether any process runs."""
        return any(process.poll() is None for process in self.processes)

    def seconds(self) -> float:
        """Median active seconds of a step."""
        return statistics.median(after[0] - before[0] for before, after in pairwise(self.seen[WARM_UP:]))

    def processor_seconds(self) -> float:
        """Mean processor seconds of a step."""
        counted = self.seen[WARM_UP:]
        return (counted[-1][1] - counted[0][1]) / (len(counted) - 1)

    def _look(self, active: float) -> None:
        with contextlib.suppress(FileNotFoundError):
            done = self.log.read_bytes().count(self.mark)
            if done > len(self.seen):
                now = active, sum(seconds for seconds in processes_of(self.processes).values())
                self.seen += [now] * (done - len(self.seen))

    def _signal(self, number: signal.Signals) -> None:
        for pid in processes_of(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def processes_of(roots: list[subprocess.Popen[str]]) -> dict[int, float]:
    """Process id → processor seconds, of processes and their descendants."""
    children, seconds = dict[int, list[int]](), dict[int, float]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            facts = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(facts[1]), []).append(int(folder.name))
            seconds[int(folder.name)] = (int(facts[11]) + int(facts[12])) / TICKS
    found, left = dict[int, float](), [root.pid for root in roots]
    while left:
        pid = left.pop()
        left += children.get(pid, [])
        if pid in seconds:
            found[pid] = seconds[pid]
    return found


def measure(link: str, schedule: str, steps: int, encrypt: bool) -> Figures:
    """Run both sides in turn, and return the figures."""
    with network(STAGES, None if link == "none" else link) as hosts, tempfile.TemporaryDirectory() as folder:
        sides = {
            "torch": by_torch(hosts, Path(folder), schedule, steps),
            "flockstep": ours(hosts, Path(folder), schedule, steps, encrypt),
        }
        while not sides["flockstep"].begun():
            if sides["torch"].begun():
                sides["torch"].stop()
            time.sleep(GLANCE)
        while any(side.runs() for side in sides.values()):
            for side in sides.values():
                side.take_turn()
        if any(process.returncode for side in sides.values() for process in side.processes):
            raise SystemExit("a run failed")
    found: Figures = {}
    for name, side in sides.items():
        found |= {name: side.seconds(), f"{name}_cpu": side.processor_seconds()}
        print(f"{link} {schedule} {name} {found[name]:.3f} s, {found[f'{name}_cpu']:.3f} s of cores", file=sys.stderr)
    ratios = {f"ratio{what}": found[f"flockstep{what}"] / found[f"torch{what}"] for what in ("", "_cpu")}
    return {**found, **ratios}


def ours(hosts: list[Host], folder: Path, schedule: str, steps: int, encrypt: bool) -> Side:
    """Start flockstep train."""
    partition = f"pipeline({STAGES}, schedule={schedule}, microbatches={MICROBATCHES})"
    command = ["-m", "flockstep", "train", Path(__file__).with_name("pipeline_job.py"), "-s", "all_reduce"]
    where = ["--nodes", str(STAGES), "--coordinator", f"{hosts[0].address}:{PORT}", "-n", str(STAGES), "--threads", "1"]
    what = ["--partition", partition, "--steps", str(steps), "--evaluate-every", str(steps)]
    what += ["--transport", f"tcp(memory=true, encrypt={str(encrypt).lower()})"]
    own = [["--node-rank", str(rank), *(["--out", folder / "run"] if rank == 0 else [])] for rank in range(STAGES)]
    started = begin([(host, [*command, *where, *what, *each]) for host, each in zip(hosts, own, strict=True)])
    return Side(started, RunFolder(folder / "run").node_events_file(0), b'"type":"step"')


def by_torch(hosts: list[Host], folder: Path, schedule: str, steps: int) -> Side:
    """Start torch.distributed.pipelining."""
    out = folder / "steps.txt"
    command = [__file__, "--worker", out, schedule, str(steps), hosts[0].address]
    return Side(begin([(host, [*command, str(rank)]) for rank, host in enumerate(hosts)]), out, b"\n")


def begin(commands: list[tuple[Host, list[str | Path]]]) -> list[subprocess.Popen[str]]:
    """Start one command on each host."""
    return [start(host, command, GLOO_SOCKET_IFNAME="eth0") for host, command in reversed(commands)]


def worker(out: Path, schedule: str, steps: int, store: str, rank: int) -> None:
    """One stage of torch.distributed.pipelining."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{store}:{OTHER_PORT}", rank=rank, world_size=STAGES)
    layers = list(model())
    cuts = cuts_of(layers)
    part = nn.Sequential(*layers[cuts[rank] : cuts[rank + 1]])
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
    run = SCHEDULES[schedule](stage, MICROBATCHES, loss_fn=loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    samples = data()
    for step in range(steps):
        chosen = slice(BATCH * step % 64, BATCH * step % 64 + BATCH)
        run.step(
            *([samples.train_x[chosen]] if rank == 0 else []),
            **({"target": samples.train_y[chosen], "losses": []} if rank == STAGES - 1 else {}),
        )
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with out.open("a") as log:
                log.write(f"{step}\n")
    dist.barrier()
    dist.destroy_process_group()


def cuts_of(layers: list[nn.Module]) -> list[int]:
    """Where flockstep cuts the chain too."""
    from flockstep.frameworks.torch_layers import shape_of
    from flockstep.split.torch_chain import chain_of, chunks_of

    whole = nn.Sequential(*layers)
    shape = shape_of(whole, torch.zeros(BATCH, CONTEXT, dtype=torch.int64), name="gpt")
    return [*chunks_of(chain_of(whole, "gpt"), shape, STAGES, (), BATCH, "gpt"), len(layers)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
    else:
        main()
