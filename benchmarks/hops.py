"""How many calls of flockstep's own functions lie on a gradient's way through it.

    python benchmarks/hops.py

In a script's own loop with one worker: calls from `optimizer.step()` to its return. In virtual time, a ring all-reduce
of four workers: calls of the whole run per worker and step, without those of the start.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import torch

import flockstep
from flockstep.testing.strategies import run_strategy

OURS = str(Path(flockstep.__file__).parent)


def calls(action: Callable[[], object]) -> Counter[str]:
    """How often each of our functions was called meanwhile, by file, line and name."""
    counted: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            counted[f"{Path(code.co_filename).relative_to(OURS)}:{code.co_firstlineno} {code.co_name}"] += 1

    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
    return counted


def own_loop(strategy: str) -> Counter[str]:
    """Calls of one step of a script's own loop."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    x = torch.ones(3, 4)
    for _ in range(5):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(x).sum().backward()
    found = calls(optimizer.step)
    optimizer.finish()
    return found


def virtual(strategy: str, workers: int = 4, steps: int = 100) -> Counter[str]:
    """Calls of a run in virtual time, less those of one with half the steps; for half the steps of all workers."""
    long, short = (
        calls(partial(run_strategy, strategy, workers, n, evaluate_every=steps)) for n in (steps, steps // 2)
    )
    return Counter({name: count - short[name] for name, count in long.items()})


def main() -> None:
    """Print the figures; with an argument, also the functions of that one."""
    steps, workers = 100, 4
    figures = {
        "own loop, all_reduce": (own_loop("all_reduce"), 1),
        "own loop, ps(bsp)": (own_loop("ps(consistency=bsp)"), 1),
        "virtual, ring": (virtual("all_reduce(collective=ring)", workers, steps), workers * steps // 2),
    }
    for name, (counted, per) in figures.items():
        print(f"{name:24} {counted.total() / per:7.1f} calls a step")
        if len(sys.argv) > 1 and sys.argv[1] in name:
            for where, count in counted.most_common():
                print(f"    {count / per:7.2f}  {where}")


if __name__ == "__main__":
    main()
