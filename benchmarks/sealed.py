"""Prints how long a gradient takes in a job, sealed, and sealed as a binary, one beside the other in one process.

    python benchmarks/sealed.py                      digits
    python benchmarks/sealed.py digits charlm

Figures are medians over 400 gradients on one core, in microseconds, and their ratios to the job itself. The order of
the three changes from gradient to gradient. Sealing as a binary needs a C++ compiler.
"""

from __future__ import annotations

import dataclasses
import sys
import time

import numpy as np
import torch

from flockstep.frameworks.base import Engine, Job
from flockstep.frameworks.job import make_engine
from flockstep.options import SealOptions
from flockstep.runtime.setup import load_job
from flockstep.sealed.job import job_of, sealed

GRADIENTS, WARM = 400, 50
KINDS = ("job", "sealed", "binary")


def engine_of(job: Job, binary: bool) -> Engine:
    sections, _ = sealed(job, SealOptions(job="", binary=binary))
    return make_engine(dataclasses.replace(job_of(sections, "the sealed job"), data=job.data), 0)


def medians(job: Job) -> dict[str, float]:
    start = time.perf_counter()
    engines = [make_engine(job, 0), engine_of(job, binary=False), engine_of(job, binary=True)]
    print(f"{job.name}: sealed twice in {time.perf_counter() - start:.0f} s")
    homes, out = [one.home() for one in engines], np.empty_like(engines[0].initial())
    samples, seconds = np.arange(job.batch), [list[float]() for _ in engines]
    for step in range(GRADIENTS):
        for turn in range(3):
            which = (turn + step) % 3
            start = time.perf_counter()
            engines[which].gradient(homes[which], samples, out, 0, step)
            seconds[which].append(time.perf_counter() - start)
    return {kind: 1e6 * float(np.median(taken[WARM:])) for kind, taken in zip(KINDS, seconds, strict=True)}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ["digits"]:
        found = medians(load_job(name, 0))
        print("  ".join(f"{kind} {value:.0f} µs ({value / found['job']:.3f})" for kind, value in found.items()))


if __name__ == "__main__":
    main()
