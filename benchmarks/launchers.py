"""Seconds from a command to the end of the first step, for each launcher, in turn with `flockstep launch`.

python benchmarks/launchers.py --rounds 3

Needs Linux, root, and the launchers themselves; the hosts are namespaces of this machine. `--only TEXT` measures those
launchers whose name contains the text.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import slurm, ssh  # noqa: E402
from support.hosts import Host, connected  # noqa: E402

SCRIPT = """
import sys
import time
import numpy as np
import flockstep
from flockstep.arrays.schema import Schema
from flockstep.runtime.loop import Loop
from flockstep.runtime.plan import LocalOptimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Strategy

params, gradient = np.zeros(20, np.float32), np.zeros(20, np.float32)
arguments = Schema.of({"w": (20,)}), Strategy.parse("ps"), LocalOptimizer(SGD(lr=0.1), params), SGD(lr=0.1)
loop = Loop(params, gradient, *arguments)
loop.gradients[:] = 1.0
loop.step()
if flockstep.rank() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(str(time.time()))
loop.finish()
"""


def seconds(host: Host, folder: Path, command: list[str]) -> float:
    """Seconds from the start of the command until rank 0 has made its first step."""
    said = folder / "first"
    said.unlink(missing_ok=True)
    begun = time.time()
    host.run("env", "-C", str(folder), "FLOCKSTEP_SECRET=a secret of this benchmark", *command, str(said))
    return float(said.read_text()) - begun


def measure(folder: Path, rounds: int, only: str) -> dict[str, list[float]]:
    """Name of a launcher → seconds, one figure for each round; `folder` has a short path."""
    bin_ = Path(sys.executable).parent
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    (folder / "script.py").write_text(SCRIPT)
    own, python = [str(bin_ / "flockstep")], [sys.executable, "script.py"]
    found: dict[str, list[float]] = {}
    with connected(folder / "hosts", "home", "d0", "d1") as hosts:
        home, first, _ = hosts
        config, agent = slurm.start(folder / "slurm", hosts), ssh.serve(folder / "ssh", hosts[1:])
        mpirun, srun = [str(bin_ / "mpirun"), "--oversubscribe"], ["env", f"SLURM_CONF={config}", "srun"]
        job = [*srun[:-1], *own, "launch", "--on", "slurm", "-n", "2"]
        passed = ["-x", "FLOCKSTEP_SECRET", "-x", "FLOCKSTEP_COORDINATOR=d0:21078", "--host", "d0:1,d1:1"]
        by_ssh = ["--prtemca", "plm_ssh_agent", f"ssh -F {agent}"]
        torchrun = [str(bin_ / "torchrun"), "--standalone", "--nproc-per-node", "2", "script.py"]
        trials: dict[str, Callable[[], float]] = {
            "flockstep launch, one host": lambda: seconds(first, folder, [*own, "launch", "-n", "2", "script.py"]),
            "torchrun, one host": lambda: seconds(first, folder, torchrun),
            "mpirun, one host": lambda: seconds(first, folder, [*mpirun, "-n", "2", *python]),
            "srun, one host": lambda: seconds(home, folder, [*srun, "-N1", "-n2", *python]),
            "mpirun, two hosts": lambda: seconds(home, folder, [*mpirun, *by_ssh, *passed, "-n", "2", *python]),
            "srun, two hosts": lambda: seconds(home, folder, [*srun, "-N2", "-n2", *python]),
            "flockstep launch --on slurm, one host": lambda: seconds(home, folder, [*job, "script.py"]),
            "flockstep launch --on slurm, two hosts": lambda: seconds(
                home, folder, [*job, "--nodes", "2", "script.py"]
            ),
        }
        for _ in range(rounds):
            for name, trial in trials.items():
                if only not in name:
                    continue
                found.setdefault(name, []).append(trial())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        found = measure(Path(folder), given.rounds, given.only)
    print("| launcher | seconds to the first step: median | range |\n|---|---|---|")
    for name, times in found.items():
        print(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f} to {max(times):.1f} |")


if __name__ == "__main__":
    main()
