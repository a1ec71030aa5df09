"""Predicts by how much a step becomes longer because workers send models for evaluation.

At every tick of a run over several hosts, that is every `evaluate_every` steps, each worker sends its parameters,
unencoded, to the coordinator, over one connection for each host, in the background. The parameters of workers on other
hosts enter the card of the coordinator's host, together with the messages to the workers there: this card is the
bottleneck, because each other host sends only its own share. With several workers per host the card carries more
messages than those of one worker, which are counted here, so that the figure is then a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.costs.cluster import ClusterShape
from flockstep.nodes import Hosts
from flockstep.planning.step_prediction import StepPrediction
from flockstep.records.config import RunConfig
from flockstep.report import formatting

COORDINATOR = 0
"""Index of the host that is assumed to coordinate the run: the one with the lowest ranks, node rank 0."""


@dataclass(frozen=True)
class EvaluationTraffic:
    """The models for evaluation that enter the coordinator's host from other hosts."""

    every: float
    """Steps of a worker between two evaluations."""
    nbytes: float
    """Bytes from all workers on other hosts for each evaluation."""
    seconds: float
    """Seconds that the bytes for one evaluation take on the link of the coordinator's host, if nothing else passes."""
    hosts: int
    """Number of other hosts, each of which sends over a connection of its own."""
    bandwidth: float
    """Bytes per second of the link of the coordinator's host."""

    @property
    def per_step(self) -> float:
        """Seconds of the link per step of a worker."""
        return self.seconds / self.every

    def longer(self, found: StepPrediction) -> float:
        """Return the seconds by which a predicted step becomes longer, in which workers wait m seconds for bytes on the
        link, and the link is free for c seconds.

        While models of h hosts arrive, TCP gives a message to the coordinator's host one share of 1 + h, so that a step
        takes c + (1 + h) m. In this step the models advance by c + h m: what passes while workers compute delays no
        step. E seconds of models per step thus make a step E h m / (c + h m) longer. A step cannot be shorter than the
        time that the link needs for both: models that workers send faster than the link carries them make workers wait
        for acknowledgements, whether or not they wait for messages.
        """
        crossing = self.hosts / (1 + self.hosts)  # the worker beside a server uses no link
        served = found.server_bytes / 2 * crossing  # half of the bytes enter the card
        busy = max(found.sent_bytes, served) / self.bandwidth
        waited = min(busy, (1 - found.utilization) * found.seconds)
        slower = self.hosts * waited
        shared = self.per_step * slower / (found.seconds - waited + slower) if waited > 0 else 0.0
        return max(shared, busy + self.per_step - found.seconds, 0.0)

    def sentence(self, found: StepPrediction, longer: float) -> str:
        """Sentence about the share of evaluations in the predicted step time."""
        return (
            f"workers send {formatting.size(self.nbytes)} to the coordinator's host every {self.every:g} steps for "
            f"evaluation: with these models a step is predicted to take {formatting.seconds(found.seconds + longer)}, "
            f"without them {formatting.seconds(found.seconds)}"
        )


def evaluation_traffic(
    config: RunConfig, hosts: Hosts, nbytes: float, cluster: ClusterShape
) -> EvaluationTraffic | None:
    """Return the models for evaluation that cross the links of a real run over several hosts.

    Args:
        config: the run, with its resolved number of steps between two evaluations.
        hosts: ranks of the workers of each host.
        nbytes: size of the model's parameters.
        cluster: the machines and links of the prediction.

    Returns:
        The traffic; None if no models cross a link: on one host, in virtual time, or if the run evaluates only before
        the first and after the last step. None, too, if `hosts` are not those of the run's workers.
    """
    every, steps = config.evaluate_every, config.steps
    if sum(map(len, hosts)) != config.workers:
        return None
    if config.kind == "simulate" or len(hosts) < 2 or not every or (steps is not None and every >= steps):
        return None
    first = hosts[COORDINATOR][0]
    links = [
        cluster.wire_between(first, rank, config.workers).bandwidth
        for place, host in enumerate(hosts)
        if place != COORDINATOR
        for rank in host
    ]
    seconds = sum(nbytes / bandwidth for bandwidth in links)
    return EvaluationTraffic(float(every), nbytes * len(links), seconds, len(hosts) - 1, min(links))
