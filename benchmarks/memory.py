"""Peak memory of every process of a training run, in multiples of the model: an MLP in float32, SGD with momentum.

Each process's largest resident size (VmHWM) is read in a run with the model and in one with a model of a quarter of its
size: by how much it grows belongs to the model, the rest to what is imported. Of memory that workers share, in which
gradients are added up, each worker counts its part.

    python benchmarks/memory.py [--parameters 20e6] [--workers 2] [--strategy all_reduce] [--partition none]
        [--layers 4] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

STEPS = 30
"""Enough for every process to be seen at work."""
SMALLER = 4
"""How many times smaller the model is that is compared with."""
COMMAND = [sys.executable, "-c", "from flockstep.cli import main; main()"]
JOB = """
import torch

import flockstep


def model():
    return torch.nn.Sequential(*[torch.nn.Linear({width}, {width}) for _ in range({layers})])


def data():
    x = torch.randn(64, {width}, generator=torch.Generator().manual_seed(0))
    return flockstep.Data(x, x[:, 0], x[:8], x[:8, 0])


def loss(outputs, targets):
    return ((outputs[:, 0] - targets) ** 2).mean()


def job():
    return flockstep.Job(
        model, data, "sgd(lr=0.0001, momentum=0.9)", loss, lambda a, b: -float(loss(a, b)), batch=8, name="wide"
    )
"""


@dataclass(frozen=True)
class Peak:
    """The largest size of one process in MB, and by how many MB it grows for each MB of the model."""

    process: str
    megabytes: float
    models: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=float, default=20e6, help="of the model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategy", default="all_reduce")
    parser.add_argument("--partition", default="none")
    parser.add_argument("--layers", type=int, default=4, help="of the model, all of one size")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    found = measure(args.parameters, args.workers, args.strategy, args.partition, args.layers)
    if args.json:
        print(json.dumps([vars(one) for one in found]))
        return
    composition = f"{args.workers} workers, {args.strategy}, partition {args.partition}"
    print(f"model: {4e-6 * args.parameters:.0f} MB in {args.layers} layers, {composition}")
    print(f"{'process':<12}{'peak MB':>10}{'models':>9}")
    for one in found:
        print(f"{one.process:<12}{one.megabytes:>10.0f}{one.models:>9.2f}")


def measure(
    parameters: float, workers: int = 2, strategy: str = "all_reduce", partition: str = "none", layers: int = 4
) -> list[Peak]:
    """What each process of a run needs for a model of so many float32 parameters."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = parameters / SMALLER, parameters
        small, large = (peaks(Path(folder), size, workers, strategy, partition, layers) for size in sizes)
    more = 4e-6 * parameters * (1 - 1 / SMALLER)
    return [Peak(name, large[name], (large[name] - small[name]) / more) for name in sorted(large.keys() & small.keys())]


def peaks(
    folder: Path, parameters: float, workers: int, strategy: str, partition: str, layers: int
) -> dict[str, float]:
    """Process → its largest size in MB in one run."""
    width = round((parameters / layers) ** 0.5)
    job, out = folder / f"job{width}.py", folder / f"run{width}"
    job.write_text(JOB.format(width=width, layers=layers))
    options = ["-n", str(workers), "-s", strategy, "--steps", str(STEPS), "--out", str(out)]
    options += ["--evaluate-every", str(STEPS // 3), "--partition", partition]
    mark = f"FLOCKSTEP_MEASURED={folder}/{width}"
    environment = {**os.environ, **dict([mark.split("=")])}
    run = subprocess.Popen([*COMMAND, "train", str(job), *options], env=environment, stdout=subprocess.DEVNULL)
    found: dict[int, tuple[float, float]] = {}
    roles: dict[int, str] = {run.pid: "supervisor"}
    with run:
        try:
            while run.poll() is None:
                for pid in pids(mark.encode()):
                    found[pid] = tuple(map(max, found.get(pid, (0.0, 0.0)), resident(pid)))
                    name = role(pid, out)
                    if name and pid != run.pid:
                        roles[pid] = name
                time.sleep(0.02)
        finally:
            run.kill()
    if run.returncode:
        raise SystemExit(f"the run ended with exit code {run.returncode}")
    others = 1 - 1 / workers
    return {name: found[pid][0] - others * found[pid][1] * ("worker" in name) for pid, name in roles.items()}


def pids(mark: bytes) -> list[int]:
    """Ids of the processes whose environment contains the marker."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdecimal() and mark in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def resident(pid: int) -> tuple[float, float]:
    """The largest resident size of a process so far, and how much of memory that processes share it has now, in MB."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        found = {name: int(size) / 1000 for name, size in re.findall(r"(\w+):\s+(\d+) kB", text)}
        return found.get("VmHWM", 0.0), found.get("RssShmem", 0.0)
    return 0.0, 0.0


def role(pid: int, record: Path) -> str:
    """The node that a process is called after, or "evaluation" of the one that writes the launcher's events."""
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if re.fullmatch("(worker|server)-[0-9]+", name):
            return name
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if link.readlink() == record.resolve() / "events" / "launcher.jsonl":
                    return "evaluation"
    return ""


if __name__ == "__main__":
    main()
