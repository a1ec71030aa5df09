"""Neighbours on a graph, d of them, b = (m + header) / B.

Averaging beside the gradient: max(T_c, L + d b) where all cards are asked for alike; pushing after it: T_c + L + d b;
pushing every τ gradients, beside them: max(T_c, (L + d b) / τ).
"""

from __future__ import annotations

import numpy as np

from flockstep.costs import order_statistics, queues, rounds
from flockstep.costs.forms import form
from flockstep.costs.setting import Setting, StepCost, step
from flockstep.strategies.gradient_push import GradientPush
from flockstep.strategies.neighbour_averaging import NeighbourAveraging
from flockstep.strategies.pairwise import PairwiseAveraging
from flockstep.topologies.base import Topology
from flockstep.topologies.facts import hearing, mixing
from flockstep.topologies.requirements import sides


def patterns(topology: Topology, workers: int) -> list[rounds.Pattern]:
    """Who sends to whom, for each step of the graph's period."""
    return [
        rounds.Pattern.of([hearing(weights, rank) for rank in range(workers)]) for weights in mixing(topology, workers)
    ]


def _degree(known: list[rounds.Pattern]) -> float:
    """Messages that a worker sends in a step, in the mean."""
    return float(np.mean([pattern.sends.mean() for pattern in known]))


@form.register
def _(strategy: NeighbourAveraging, setting: Setting) -> StepCost:
    known, cards, busy = (
        patterns(strategy.topology, setting.workers),
        rounds.Cards(setting),
        setting.busy(setting.nbytes),
    )

    def turn(workers: rounds.Workers) -> None:
        for pattern in known:
            heard = cards.exchange(workers.at, pattern, busy)
            workers.at = np.maximum(workers.compute(), heard)

    mixed = setting.reducing(_degree(known) * setting.elements) + setting.updating(setting.elements)
    seconds = rounds.settled(setting, turn, len(known), _width(known)) / len(known)
    return _cost(setting, seconds + mixed, _degree(known), 1.0 + _degree(known), (0.0, 0))


@form.register
def _(strategy: GradientPush, setting: Setting) -> StepCost:
    known, cards, busy = (
        patterns(strategy.topology, setting.workers),
        rounds.Cards(setting),
        setting.busy(setting.nbytes),
    )
    flying: list[rounds.Times] = []  # when each has what is on its way to it: with tau, one exchange
    gradients = max(1, strategy.tau)

    def turn(workers: rounds.Workers) -> None:
        for pattern in known:
            at = workers.compute(gradients)
            if flying:
                at = np.maximum(at, flying.pop())
            heard = cards.exchange(at, pattern, busy)
            if strategy.tau:
                flying.append(heard)
            workers.at = at if strategy.tau else np.maximum(at, heard)

    turns = gradients * len(known)
    mixed = setting.reducing(_degree(known) * setting.elements) / gradients + setting.updating(setting.elements)
    seconds = rounds.settled(setting, turn, turns, _width(known)) / turns
    degree, late = _degree(known) / gradients, float(strategy.tau)
    return _cost(setting, seconds + mixed, degree, 1.0 + _degree(known), (late, None))


def _width(known: list[rounds.Pattern]) -> int:
    return 8 * sum(pattern.width for pattern in known)


def _cost(
    setting: Setting, seconds: float, degree: float, copies: float, late: tuple[float | None, int | None]
) -> StepCost:
    certain = order_statistics.certain(setting.compute)
    notes = [] if certain else ["random times: messages of one step are served before those of the next"]
    return step(setting, seconds, degree * setting.nbytes, degree, copies=copies, staleness=late, notes=notes)


@form.register
def _(strategy: PairwiseAveraging, setting: Setting) -> StepCost:
    """Who asks takes the longer of a gradient and an exchange, 2 (L + b); who is asked never waits.

    Those who are asked count with as many gradients as if they took turns with the others in waiting: what they compute
    between two exchanges beyond that is on a model of their own.
    """
    n = setting.workers
    asking, _ = sides(strategy.topology, n, f"adpsgd on {strategy.topology}")
    active = set(asking) if n > 1 else set[int]()
    exchange = 2 * setting.message(setting.nbytes) + setting.reducing(setting.elements)
    computes = queues.computing(setting)
    periods = [
        max(order_statistics.at_least(setting.compute, exchange, rank), computes[rank])
        if rank in active
        else computes[rank]
        for rank in range(n)
    ]
    seconds = sum(periods) / n
    asked = sum(1 / periods[rank] for rank in active if periods[rank]) * seconds / n
    return step(
        setting,
        seconds + setting.updating(setting.elements),
        2 * asked * setting.nbytes,
        2 * asked,
        copies=1.0,
        used=queues.rates(computes),
        notes=["workers that ask the same neighbour at the same time do not wait for each other"],
    )
