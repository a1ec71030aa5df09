"""An asynchronous parameter server in plain numpy, and a surrogate for a server."""

from __future__ import annotations

import heapq

from flockstep.simulation.compute import ComputeModel
from flockstep.testing.strategies import COMPUTE, GradientSource, run_strategy, small_job

STEPS = 15


def oracle(n, apply, job=None, steps=STEPS):
    """The server's parameters: asynchronous, where messages take no time; `apply(w, gradient, tau, backup)`
    changes w in place, where backup is what the worker had read."""
    source = GradientSource(n, job or small_job())
    w = source.start()
    durations = [ComputeModel.parse(COMPUTE).stream(0, rank) for rank in range(n)]
    read, seen, left, version = [w.copy()] * n, [0] * n, [steps] * n, 0
    due = [(next(durations[rank]), rank) for rank in range(n)]
    heapq.heapify(due)
    while due:
        now, rank = heapq.heappop(due)
        apply(w, source.gradient(rank, read[rank]), version - seen[rank], read[rank])
        version += 1
        read[rank], seen[rank] = w.copy(), version
        left[rank] -= 1
        if left[rank]:
            heapq.heappush(due, (now + next(durations[rank]), rank))
    return w


def served(rule, n=4, job=None, **options):
    return run_strategy(f"ps(asynchronous, server_update={rule})", n, STEPS, job=job, network="ideal", **options).server


class FakeServer:
    """The part of a server that a server update sees."""

    def __init__(self, params, version, optimizer=None):
        self.params, self.version, self.optimizer = params, version, optimizer
        self.state, self.optimizer_state = None, optimizer and optimizer.init(params)

    def update(self, gradient, lr, share=1.0):
        self.params -= lr * share * gradient
        self.version += 1
