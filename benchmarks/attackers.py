"""Accuracy of each aggregation under attack, and its cost on a server, for the table in docs/how-to/attackers.md.

python benchmarks/attackers.py
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from flockstep.strategies.aggregations import Aggregation
from flockstep_lab.claims.c22_attackers import RULES, accuracies

SEEDS, ROUNDS, WORKERS, SIZE = 3, 3, 8, 25_000_000


def costs() -> dict[str, float]:
    """CPU time of combining `WORKERS` gradients of `SIZE` parameters, relative to the mean, in one run."""
    random = np.random.default_rng(0)
    vectors = [random.standard_normal(SIZE, dtype=np.float32) for _ in range(WORKERS)]
    seconds: dict[str, list[float]] = {rule: [] for rule in RULES}
    for _ in range(ROUNDS):
        for rule, taken in seconds.items():
            aggregation, begun = Aggregation.parse(rule), time.process_time()
            aggregation.combine(vectors)
            taken.append(time.process_time() - begun)
    middle = {rule: statistics.median(taken) for rule, taken in seconds.items()}
    return {rule: middle[rule] / middle["mean"] for rule in RULES}


def main() -> None:
    """Measure, and write the rows."""
    found = accuracies(SEEDS, lambda line: print(line, file=sys.stderr, flush=True))
    cost = costs()
    rows = [
        {
            "rule": rule,
            "cost": round(cost[rule], 1),
            "accuracy": {
                f"{attack}, {f}": round(statistics.median(got), 1)
                for (other, attack, f), got in found.items()
                if other == rule
            },
        }
        for rule in RULES
    ]
    (Path(__file__).parent / "attackers.json").write_text(
        json.dumps(rows, indent=1, ensure_ascii=False) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
