"""What it costs to record a run so that it can be replayed, and how long the replay takes.

Runs with and without --replayable take turns. "cost" is the median over the rounds of the ratio of the times of a step,
"bytes" what a node's tape takes for each message that entered its program (without checksums), "replay" the time of
`flockstep replay` over that of the run's steps.

    python benchmarks/replay.py [--job digits] [--workers 2] [--steps 400] [--rounds 5] [--json]
        [--strategies "all_reduce;gossip"]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import flockstep
from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from flockstep.records.tape import GradientEntry, MessageEntry, SnapshotEntry, read_tape, segments_of

STRATEGIES = "all_reduce;local_sgd;ps(asynchronous);gossip(p=0.5);easgd;broadcast"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--job", default="digits")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategies", default=STRATEGIES, help="expressions with semicolons between them")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {strategy: measured(options, strategy) for strategy in options.strategies.split(";")}
    if options.json:
        print(json.dumps(found))
        return
    for strategy, one in found.items():
        spread = f"{min(one['costs']):.3f} to {max(one['costs']):.3f}"
        print(
            f"{strategy:<20} cost {one['cost']:.3f} ({spread}), {one['bytes']:.1f} bytes a message, "
            f"{one['step_bytes']:.0f} bytes a step, replay {one['replay']:.2f}"
        )


def measured(options: argparse.Namespace, strategy: str) -> dict[str, Any]:
    """The figures of a strategy; the first round is not counted."""
    costs, replays = [], []
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds + 1):
            folders = {name: Path(scratch) / f"{name}-{number}" for name in (True, False)}
            order = (True, False) if number % 2 else (False, True)
            seconds = {taped: trained(options, strategy, folders[taped], taped) for taped in order}
            began = time.perf_counter()
            flockstep.Replay(folders[True]).run()
            if number:
                costs.append(seconds[True] / seconds[False])
                replays.append((time.perf_counter() - began) / seconds[True])
        figures = sizes(folders[True])
    return {"cost": statistics.median(costs), "costs": costs, "replay": statistics.median(replays), **figures}


def trained(options: argparse.Namespace, strategy: str, folder: Path, replayable: bool) -> float:
    """Seconds until the last step of a run."""
    facts = {"workers": options.workers, "steps": options.steps, "evaluate_every": options.steps}
    flockstep.run(options.job, strategy, out=folder, replayable=replayable, **facts)
    return max(event.seconds for event in RunFolder(folder).read_events() if isinstance(event, StepEvent))


def sizes(record: Path) -> dict[str, float]:
    """Bytes of the tapes for each message, and for each gradient."""
    messages = gradients = checks = total = 0
    for path in segments_of(record)[0].glob("*.tape"):
        entries = list(read_tape(path)[1])
        messages += sum(isinstance(one, MessageEntry) for one in entries)
        gradients += sum(isinstance(one, GradientEntry) for one in entries)
        checks += sum(4 * len(one.checks) + 11 for one in entries if isinstance(one, GradientEntry | SnapshotEntry))
        total += len(path.read_bytes().partition(b"\n")[2])
    return {"bytes": (total - checks) / messages if messages > gradients / 2 else 0.0, "step_bytes": total / gradients}


if __name__ == "__main__":
    main()
