"""Measures everything in docs/explanation/performance.md, each figure beside another program in the same run.

    python benchmarks/all.py [--only TEXT]

`make bench` calls it: it takes under 20 minutes on two cores, wants a quiet machine, and writes performance.json, of
which the page is made. `--only` measures the parts whose name contains the text, and keeps the other rows. The step
over two hosts needs Linux and root, and is left out elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flockstep.doctor import facts

HERE = Path(__file__).parent
FIGURES = HERE / "performance.json"
COMMAND = [str(Path(sys.executable).with_name("flockstep"))]
PLAIN = """
import time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{distribute}
model(torch.ones(8, 64)).square().mean().backward()
optimizer.step()
"""

Row = tuple[str, str, str]
"""What is measured, beside what, and the figure."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="measure only parts whose name contains this text")
    options = parser.parse_args()
    kept = json.loads(FIGURES.read_text()) if options.only and FIGURES.exists() else {"rows": {}}
    kept["machine"] = {
        name: text for name, text in facts().items() if name in ("Python", "platform", "cores", "memory")
    }
    kept["machine"] |= {"torch": version("torch"), "measured": time.strftime("%Y-%m-%d")}
    for name, part in PARTS.items():
        if options.only in name:
            print(name, file=sys.stderr, flush=True)
            kept["rows"][name] = list(part())
            FIGURES.write_text(json.dumps(kept, indent=1) + "\n")


def measured(*words: str) -> Any:
    """What a benchmark prints as JSON."""
    program = [*COMMAND, "bench"] if not words[0].endswith(".py") else [sys.executable]
    ended = subprocess.run([*program, *words, "--json"], cwd=HERE, stdout=subprocess.PIPE, check=True)
    return json.loads(ended.stdout)


def own_loop() -> Iterator[Row]:
    rows = measured(
        "step_time.py", "--models", "digits,resnet18", "--processes", "1,2,4", "--rounds", "7", "--steps", "10"
    )
    for row in rows:
        ways, what = row["ways"], f"a step of {row['model']}, workers: {row['processes']}"
        if row["processes"] == 1:
            yield what, "a plain loop", f"{ways['flockstep']['of alone']:.2f}"
        plain = f"DDP on gloo; a loop without any exchange: {ways['alone']['of ddp']:.2f}"
        yield what, plain, f"{ways['flockstep']['of ddp']:.2f}"


def over_hosts() -> Iterator[Row]:
    if os.geteuid() != 0:
        return
    for row in measured("hosts.py", "--links", "1gbit,none", "--models", "digits,wide"):
        kind = "sealed" if row["encrypt"] else "plain"
        link = row["link"].replace("none", "as fast as it goes").replace("1gbit", "1 Gbit/s")
        yield (
            f"a step of {row['model']}, two hosts of two workers, {link}, {kind}",
            "DDP on gloo",
            f"{row['ratio']:.2f}",
        )


def sums() -> Iterator[Row]:
    peers = {"shared memory": "openmpi", "shared memory, ordinary arrays": "openmpi", "ring over tcp": "gloo"}
    chosen = [word for name in (*peers, "openmpi", "gloo") for word in ("-i", name)]
    rows = measured("collectives", *chosen)
    seconds = {(row["implementation"], row["workers"], row["bytes"]): row["seconds"] for row in rows}
    for (name, workers, nbytes), own in seconds.items():
        theirs = seconds.get((peers.get(name, ""), workers, nbytes))
        if theirs and own:
            named = peers[name].replace("openmpi", f"OpenMPI {_openmpi()}")
            yield f"all-reduce, {name}, {workers} workers, {_size(nbytes)}", named, f"{own / theirs:.2f}"


def messages() -> Iterator[Row]:
    for row in measured("parameter_server.py", "--rounds", "3", "--mib", "256"):
        for name, way in row["ways"].items():
            if name != "flockstep":
                rate = row["ways"]["flockstep"]["rate"]
                yield f"one server, 4 workers, pushes and pulls of {row['size']}", name, f"{way['rate'] / rate:.2f}"
    rows = {row["implementation"]: row["seconds"] for row in measured("transport", "--sizes", "4096")}
    for ours, theirs in (("tcp", "raw tcp socket"), ("ipc", "raw unix socket")):
        if rows.get(ours) and rows.get(theirs):
            yield f"one push and add of 4 KiB, {ours}", theirs, f"{rows[ours] / rows[theirs]:.2f}"


def codecs() -> Iterator[Row]:
    for row in measured("codecs", "dct", "adacomp", "threshold", "powersgd", "int8", "topk", "-r", "7"):
        if row["encode"] and row["bits"] and row["codec"] != "numpy.copyto":
            encode = row["encode_residual"] if row["codec"].startswith("powersgd") else row["encode"]
            yield f"encoding by {row['codec']}, 16 MiB", "a copy of the array", f"{1 / encode:.1f}"


def virtual_time() -> Iterator[Row]:
    for workload in ("softmax", "tabular"):
        for row in measured("simulator", "-w", workload, "-n", "16,256", "-r", "5"):
            if row["events"]:
                what = f"a worker's virtual step, {workload}, {row['strategy']}, {row['replicas']} replicas"
                yield what, "a plain loop", f"{1 / row['to_loop']:.2f}"


def starting() -> Iterator[Row]:
    distribute = 'import flockstep\noptimizer = flockstep.distribute(model, optimizer, strategy="all_reduce")'
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        cpu = []
        for lines in ("", distribute):
            script.write_text(PLAIN.format(distribute=lines))
            cpu.append(min(_cpu([sys.executable, str(script)]) for _ in range(3)))
        yield "a script until its first step, processor time", "the same without flockstep", f"{cpu[1] / cpu[0]:.2f}"
        for words in (["--help"], ["simulate", "softmax", "-s", "local_sgd", "-n", "8"], ["doctor"]):
            used = min(_cpu([*COMMAND, *words], folder) for _ in range(2))
            yield f"`flockstep {' '.join(words)}`", "processor seconds", f"{used:.2f}"
        plan = _cpu([*COMMAND, "plan", "digits", "--cluster", "edge"], folder)
        yield "`flockstep plan digits --cluster edge`", "processor seconds", f"{plan:.1f}"


def _cpu(words: list[str], folder: str | None = None) -> float:
    """Processor seconds of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _openmpi() -> str:
    try:
        return version("openmpi")
    except ModuleNotFoundError:
        return ""


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "own loop": own_loop,
    "two hosts": over_hosts,
    "sums": sums,
    "messages": messages,
    "codecs": codecs,
    "virtual time": virtual_time,
    "starting": starting,
}


if __name__ == "__main__":
    main()
