"""Virtual time with the model evaluated as it is now, not as it was when the slowest worker had come as far."""

from __future__ import annotations

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.runner import Runner
from flockstep.drivers.tracker import FINAL
from flockstep.drivers.virtual import Simulation
from flockstep.messages import server
from flockstep.records.events import Snapshot

NOW = ("server", "mean", "rank0")
"""Policies whose model can be had at any moment."""


class LiveSimulation(Simulation):
    """A run whose snapshots are of the model at their own time, one for every gradient of each worker in the mean.

    A record's snapshots are of the same progress on all nodes, and as late as the slowest one. Where workers differ in
    speed and do not wait for each other, the model at hand is by then far ahead, and time to target is that model's.
    """

    _begun = 0

    def _hand_in(self, runner: Runner, tick: float) -> None:
        if tick == FINAL or self.plan.result not in NOW:
            super()._hand_in(runner, tick)
            return
        if runner.node.address < 0:
            return
        workers = self.plan.cluster.workers
        if self._begun % workers == workers - 1:  # the last of so many that begin a gradient: all have the last update
            self._look(self._begun // workers * self.plan.evaluate_every)
        self._begun += 1

    def _look(self, steps: int) -> None:
        workers = range(self.plan.cluster.workers)
        found = self._engine.evaluate(self._model(), workers)
        sent = sum(self.runners[rank].account.traffic.sent_bytes for rank in workers) / len(workers)
        apart = (
            float(np.abs(self._gradients.params - self._gradients.params[0]).max())
            if self.plan.result == "mean"
            else 0.0
        )
        samples = len(workers) * self.plan.samples_at(steps)
        self._emit(Snapshot(self.now, steps, samples, sent, found.loss, found.metric, apart))

    def _model(self) -> FlatArray:
        replicas = self._gradients.params
        if self.plan.result == "mean":
            mean: FlatArray = replicas.mean(0, dtype=np.float64).astype(replicas.dtype)
            return mean
        if self.plan.result == "rank0":
            first: FlatArray = replicas[0]
            return first
        whole: FlatArray = np.empty_like(replicas[0])
        for index, part in reversed(list(enumerate(self.plan.held(len(whole))))):
            whole[part] = self.runners[server(index)].node.params
        return whole
