"""Seconds per step of a GPT of 30 M parameters in four stages on four hosts, beside torch.distributed.pipelining.

The hosts are network namespaces; the link of each has 1 Gbit/s, or what this machine gives. Runs of both, torch's on
gloo, take turns, with the same model, micro-batches and schedule. All stages share the cores of this machine, with one
thread each. flockstep's links are not encrypted, as gloo's are not; with --encrypt they are. Needs Linux and root.

    python benchmarks/pipeline.py [--links 1gbit,none] [--schedules gpipe,1f1b] [--rounds 3] [--steps 12] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from network import OTHER_PORT, PORT, Host, network, start
from pipeline_job import BATCH, CONTEXT, data, loss, model
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder

STAGES, MICROBATCHES = 4, 8
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
WARM_UP = 2
"""Steps that are not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--links", default="1gbit,none")
    parser.add_argument("--schedules", default="gpipe,1f1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--encrypt", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        measure(link, schedule, options.rounds, options.steps, options.encrypt)
        for link in options.links.split(",")
        for schedule in options.schedules.split(",")
    ]
    if options.json:
        print(json.dumps(rows))
        return
    print("schedule     link     torch s flockstep s of torch")
    for row in rows:
        print(
            f"{row['schedule']:8} {row['link']:>8} {row['torch']:>11.3f} {row['flockstep']:>11.3f} {row['ratio']:>8.3f}"
        )
    print("medians over rounds of a round's median step; of torch: median of the rounds' own ratios")


def measure(link: str, schedule: str, rounds: int, steps: int, encrypt: bool) -> dict[str, str | float]:
    """Run both ways in turn, and return the figures."""
    times: dict[str, list[float]] = {"torch": [], "flockstep": []}
    with network(STAGES, None if link == "none" else link) as hosts:
        for number in range(rounds):
            for name in list(times)[:: -1 if number % 2 else 1]:
                with tempfile.TemporaryDirectory() as folder:
                    out = Path(folder)
                    seconds = (
                        by_torch(hosts, out, schedule, steps)
                        if name == "torch"
                        else ours(hosts, out, schedule, steps, encrypt)
                    )
                    times[name].append(statistics.median(seconds[WARM_UP:]))
                    print(f"{link} {schedule} {name} {times[name][-1]:.3f} s", file=sys.stderr)
    ratios = [own / theirs for own, theirs in zip(times["flockstep"], times["torch"], strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"link": link, "schedule": schedule, **medians, "ratio": statistics.median(ratios)}


def ours(hosts: list[Host], folder: Path, schedule: str, steps: int, encrypt: bool) -> list[float]:
    """Seconds of each step of flockstep train."""
    partition = f"pipeline({STAGES}, schedule={schedule}, microbatches={MICROBATCHES})"
    command = ["-m", "flockstep", "train", Path(__file__).with_name("pipeline_job.py"), "-s", "all_reduce"]
    where = ["--nodes", str(STAGES), "--coordinator", f"{hosts[0].address}:{PORT}", "-n", str(STAGES), "--threads", "1"]
    what = ["--partition", partition, "--steps", str(steps), "--evaluate-every", str(steps)]
    what += ["--transport", f"tcp(memory=true, encrypt={str(encrypt).lower()})"]
    own = [["--node-rank", str(rank), *(["--out", folder / "run"] if rank == 0 else [])] for rank in range(STAGES)]
    wait([(host, [*command, *where, *what, *each]) for host, each in zip(hosts, own, strict=True)])
    ends = [event.seconds for event in RunFolder(folder / "run").read_events()
            if isinstance(event, StepEvent) and event.rank == 0]  # fmt: skip
    return [after - before for before, after in pairwise(sorted(ends))]


def by_torch(hosts: list[Host], folder: Path, schedule: str, steps: int) -> list[float]:
    """Seconds of each step of torch.distributed.pipelining."""
    out = folder / "seconds.json"
    command = [__file__, "--worker", out, schedule, str(steps), hosts[0].address]
    wait([(host, [*command, str(rank)]) for rank, host in enumerate(hosts)])
    seconds: list[float] = json.loads(out.read_text())
    return seconds


def wait(commands: list[tuple[Host, list[str | Path]]]) -> None:
    """Run one command on each host, and wait for their ends."""
    processes = [start(host, command, GLOO_SOCKET_IFNAME="eth0") for host, command in reversed(commands)]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("a run failed")


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
    samples, begin = data(), time.perf_counter()
    seconds: list[float] = []
    for step in range(steps):
        chosen = slice(BATCH * step % 64, BATCH * step % 64 + BATCH)
        run.step(
            *([samples.train_x[chosen]] if rank == 0 else []),
            **({"target": samples.train_y[chosen], "losses": []} if rank == STAGES - 1 else {}),
        )
        optimizer.step()
        optimizer.zero_grad()
        begin, before = time.perf_counter(), begin
        seconds.append(begin - before)
    if rank == 0:
        out.write_text(json.dumps(seconds[1:]))
    dist.barrier()
    dist.destroy_process_group()


def cuts_of(layers: list[nn.Module]) -> list[int]:
    """Where flockstep cuts the chain too."""
    from flockstep.frameworks.torch_chain import chain_of, chunks_of
    from flockstep.frameworks.torch_layers import shape_of

    whole = nn.Sequential(*layers)
    shape = shape_of(whole, torch.zeros(BATCH, CONTEXT, dtype=torch.int64), name="gpt")
    return [*chunks_of(chain_of(whole, "gpt"), shape, STAGES, (), BATCH, "gpt"), len(layers)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
    else:
        main()
