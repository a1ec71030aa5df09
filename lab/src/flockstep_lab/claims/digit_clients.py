"""Fifty clients with handwritten digits, of which each has a few labels, and rounds of federated averaging."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from flockstep.frameworks.base import Indices
from flockstep.records.events import EvaluationEvent
from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Say
from flockstep_lab.claims.digits_perceptron import digits_job
from flockstep_lab.claims.spans import median

CLIENTS, BATCH, LR = 50, 10, 0.1


@dataclass(frozen=True)
class RoundsTo:
    """What a run needs until its first evaluation at or above a target accuracy (infinite if it has none), and its
    final accuracy in percent.
    """

    steps: float
    """Local steps of all clients."""
    seconds: float
    final: float


@cache
def parts_of(similarity: float, seed: int) -> Sequence[Indices]:
    """Return the samples of each client: a share `similarity` drawn from all, and two shards of the rest, sorted by
    label (McMahan et al. 2017, section 3; Karimireddy et al. 2020, section 7).
    """
    labels, random = digits_job("sgd(lr=0.1)", BATCH).data().train_y, np.random.default_rng(seed)
    order = random.permutation(len(labels))
    mixed, rest = np.split(order, [round(similarity * len(order))])
    shards = np.array_split(rest[np.argsort(labels[rest], kind="stable")], 2 * CLIENTS)
    turn = random.permutation(2 * CLIENTS)
    own = np.array_split(mixed, CLIENTS)
    return [np.concatenate([own[k], shards[turn[2 * k]], shards[turn[2 * k + 1]]]) for k in range(CLIENTS)]


def trained(
    strategy: str,
    similarity: float,
    seed: int,
    steps: int,
    *,
    target: float,
    compute: str = "constant(1)",
    faults: Sequence[str] = (),
) -> RoundsTo:
    """Train until all clients together have taken `steps` local steps."""
    run = run_strategy(
        strategy,
        CLIENTS,
        math.ceil(steps / CLIENTS),
        job=digits_job(f"sgd(lr={LR})", BATCH),
        parts=parts_of(similarity, seed),
        compute=compute,
        network="link(bandwidth='10gbit', latency=0.01)",
        seed=seed,
        evaluate_every=1,
        faults=faults,
    )
    events = run.of(EvaluationEvent)
    hit = next((event for event in events if event.metric >= target), None)
    final = 100 * events[-1].metric
    return RoundsTo(math.inf, math.inf, final) if hit is None else RoundsTo(hit.step * CLIENTS, hit.seconds, final)


def medians(ends: Sequence[RoundsTo], what: str, say: Say) -> RoundsTo:
    """Show the runs of several seeds as a line of progress, and return the median of each figure."""
    say(f"{what}: " + ", ".join(f"{one.steps:.0f} steps, {one.seconds:.0f} s, {one.final:.1f} %" for one in ends))
    return RoundsTo(*(median([getattr(one, name) for one in ends]) for name in ("steps", "seconds", "final")))
