"""Rounds per second and memory of federated averaging with many clients, beside Flower's simulation of the same job.

Softmax regression on 200,000 samples, divided over the clients by dirichlet(0.1); 100 clients take part in a round, and
each takes 10 steps on batches of 4. Both ways evaluate the model after each round. Seconds per round are those between
a run of few and one of many rounds, so that starting counts for nobody; memory is the largest sum of the proportional
set sizes of all processes of the longer run. Flower (pip install "flwr[simulation]") may live in an environment of its
own, whose Python --flower names. Needs Linux.

    python benchmarks/clients.py [--flower PYTHON] [--clients 10000] [--rounds 20,100] [--flower-rounds 3,9] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from flockstep.workloads.softmax import Softmax
from flockstep.workloads.split import Split

PARTICIPANTS, STEPS, BATCH, TRAIN = 100, 10, 4, 200_000
FLOWER = "import sys, clients_flower; clients_flower.simulate(*sys.argv[1:])"
"""Program of Flower's simulation, whose functions other processes import."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flower", default=sys.executable, help="Python of an environment with flwr[simulation]")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", default="20,100")
    parser.add_argument("--flower-rounds", default="3,9")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), given.clients)
        ours = measured(lambda rounds: flockstep(folder, given.clients, rounds), given.rounds)
        theirs = measured(lambda rounds: flower(given.flower, folder, given.clients, rounds), given.flower_rounds)
    rows = {"flockstep": ours, "Flower": theirs}
    if given.json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name:10} {row['rounds_per_second']:8.2f} rounds/s {row['memory'] / 2**20:8.0f} MiB", end=" ")
        print(f"accuracy {row['accuracy']:.3f} after {row['rounds']:.0f} rounds, {row['seconds']:.1f} s in all")
    print(f"rounds per second {ours['rounds_per_second'] / theirs['rounds_per_second']:.1f} times, ", end="")
    print(f"memory {ours['memory'] / theirs['memory']:.2f} of Flower's")


def write_data(folder: Path, clients: int) -> None:
    """Write the samples of the job, and those of each client."""
    data = Softmax(train=TRAIN).job(0).data()
    parts = Split.parse("dirichlet(0.1)").assign(data.train_y, len(data.train_y), clients, 0)
    np.savez(
        folder / "data.npz",
        x=data.train_x,
        y=data.train_y,
        test_x=data.test_x,
        test_y=data.test_y,
        order=np.concatenate(parts),
        ends=np.cumsum(list(map(len, parts))),
    )


def measured(run: Callable[[int], tuple[float, float, float]], rounds: str) -> dict[str, float]:
    """Figures of a run of few and one of many rounds."""
    few, many = map(int, rounds.split(","))
    (seconds, *_), (longer, memory, accuracy) = run(few), run(many)
    rate = (many - few) / (longer - seconds)
    return {
        "rounds_per_second": rate,
        "memory": memory,
        "accuracy": accuracy,
        "rounds": many,
        "seconds": longer,
    }


def flockstep(folder: str, clients: int, rounds: int) -> tuple[float, float, float]:
    """Seconds, bytes and accuracy of a simulation."""
    record, steps = Path(folder) / f"run-{rounds}", rounds * PARTICIPANTS * STEPS / clients
    words = ["simulate", f"softmax(train={TRAIN})", "-s", f"federated({PARTICIPANTS}, {STEPS})", "-n", str(clients)]
    words += ["--split", "dirichlet(0.1)", "--batch", str(BATCH), "--steps", str(round(steps))]
    words += ["--evaluate-every", "1", "--out", str(record)]
    seconds, memory, _ = watched([sys.executable, "-m", "flockstep", *words])
    return seconds, memory, json.loads((record / "summary.json").read_text())["final_metric"]


def flower(python: str, folder: str, clients: int, rounds: int) -> tuple[float, float, float]:
    """Seconds, bytes and accuracy of Flower's simulation."""
    numbers = clients, rounds, PARTICIPANTS, STEPS, BATCH
    seconds, memory, out = watched([python, "-c", FLOWER, folder, *map(str, numbers)])
    return seconds, memory, float(out.strip().rsplit("accuracy ", 1)[1])


def watched(words: Sequence[str]) -> tuple[float, float, str]:
    """Run a command; return its seconds, the largest memory of its session in bytes, and what it prints."""
    began, most = time.monotonic(), 0.0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(words, stdout=out, stderr=errors, start_new_session=True, env=environment)
        while child.poll() is None:
            most = max(most, memory_below(child.pid))
            time.sleep(0.2)
        seconds = time.monotonic() - began
        out.seek(0)
        errors.seek(0)
        if child.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{errors.read()[-2000:]}")
        return seconds, most, out.read()


def memory_below(root: int) -> float:
    """Proportional set sizes of a process and all its descendants, in bytes."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family = {root}
    for _ in range(8):
        family |= {pid for pid, parent in parents.items() if parent in family}
    return sum(map(set_size, family))


def set_size(pid: int) -> float:
    """Proportional set size of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(1024.0 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
