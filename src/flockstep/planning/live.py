"""A simulation that evaluates the current model during a run, instead of the model after the same number of steps of
all nodes.
"""

from __future__ import annotations

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.runner import Runner
from flockstep.drivers.tracker import FINAL
from flockstep.drivers.virtual import Simulation
from flockstep.messages import server
from flockstep.records.events import EvaluationEvent

NOW = ("server", "mean", "rank0")
"""Result policies whose model is available at every moment of a run."""


class LiveSimulation(Simulation):
    """A simulation whose snapshots show the model at the time of the snapshot: on average, one snapshot for every
    gradient of each worker.

    In contrast, the snapshots of a record show the model after the same number of steps of all nodes, and are as late
    as the slowest node. If workers differ in speed and do not wait for each other, the current model is then far ahead,
    and determines the time to target.
    """

    _begun = 0

    def _send_snapshot(self, runner: Runner, tick: float, params: FlatArray | None = None) -> None:
        if tick == FINAL or self.plan.result not in NOW:
            super()._send_snapshot(runner, tick, params)
            return
        if runner.node.address < 0:
            return
        workers = self.plan.cluster.workers
        if self._begun % workers == workers - 1:  # all workers have the last update
            self._look(self._begun // workers * self.plan.evaluate_every)
        self._begun += 1

    def _look(self, steps: int) -> None:
        workers = range(self.plan.cluster.workers)
        found = self._engine.evaluate(self._model(), workers)
        sent = sum(self.runners[rank].metrics.traffic.sent_bytes for rank in workers) / len(workers)
        apart = (
            float(np.abs(self._gradients.params - self._gradients.params[0]).max())
            if self.plan.result == "mean"
            else 0.0
        )
        samples = len(workers) * self.plan.samples_at(steps)
        self._emit(EvaluationEvent(self.now, steps, samples, sent, found.loss, found.metric, apart))

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
            processes = [one for one in self.plan.cluster.chain(server(index)) if one not in self._dead]
            whole[part] = self.runners[processes[0]].node.params
        return whole
