"""Table 2 of Langer et al. (2020) as criteria that are computed from what a plan predicts.

The paper grades techniques by hand: + to +++, easy to hard. Here every grade follows from a figure of the plan, for the
cluster at hand, so that the same strategy can be graded otherwise elsewhere. Model parallelism is not among them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from flockstep.codecs.base import Codec
from flockstep.errors import ConfigurationError
from flockstep.expression import Component, fields_of
from flockstep.planning.prospect import Pace, Prospect, codecs_of
from flockstep.planning.stand_in import Unrehearsed
from flockstep.planning.task import Site
from flockstep.report.words import number
from flockstep.strategies.base import Cell, Traits

NOISE = 3.0
"""r: how many times as many samples plain training takes because its batches are small; B_noise / B."""
DEPTH = 50.0
"""S: steps of a very large batch to the target. More steps make what is late by a fixed number of steps count less."""
APART = 0.5
"""Share of the noise that models of the workers' own keep, where they hardly ever meet."""
HALF = 4.0
"""Steps between meetings at which half of that is reached, without momentum."""
USUAL = 0.9
"""Momentum of optimisers that have it under another name."""
NEVER = 1e6
"""Late beyond use."""
DOUBT = 1.1
"""What each departure has to gain besides, as this is only a model: at the most the tenth that is lost without it."""
DROPPING = 0.01
"""Share of an array's energy above which what a codec leaves out counts as dropped."""
TRIED = 4096
"""Elements of the random array on which codecs are tried."""

LEAST = 1e-12
"""Seconds of a step that takes no time."""


@dataclass(frozen=True)
class Criteria:
    """A strategy's row of Table 2, on this cluster."""

    technique: str
    balanced_data: bool
    """R_LBD: whether the workers' data have to be alike and large."""
    learning_rate: Literal["higher", "likely", "lower"]
    """OptLR: the best one, compared with that of one worker, as the cluster grows."""
    overlap: float | None
    """COCC: versions by which updates are late in the mean; None where there are no versions."""
    hyper_parameters: int
    """CAHP: how many the strategy and its parts add."""
    exposure: float | None
    """RSOI: how much of the slowest worker's delay everyone takes on, 0 to 1; None: not known."""
    survives: int
    """RSOI: deaths of workers after which the others still go on."""
    reproducible: Literal["easy", "medium", "hard"]
    """ERB: how hard it is to get the same result again."""

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


def criteria(found: Prospect, pace: Pace | None) -> Criteria:
    """The row of a predicted strategy; of one worker, the trivial one."""
    if found.strategy is None:
        return Criteria("one worker", False, "likely", 0.0, 0, 1.0, 0, "easy")
    cell, traits = found.strategy.cell, found.strategy.traits
    central, synchronous = is_central(cell), is_synchronous(cell, traits)
    rate: Literal["higher", "likely", "lower"] = "lower" if not synchronous else "higher" if central else "likely"
    hard: Literal["easy", "medium", "hard"] = (
        "easy"
        if is_repeatable(cell, traits)
        else "medium"
        if cell is not None and cell.scheduling == "bounded async"
        else "hard"
    )
    return Criteria(
        f"{'central' if central else 'decentral'}, {'synchronous' if synchronous else 'asynchronous'}",
        not (central and synchronous),
        rate,
        found.staleness,
        count(found.strategy),
        None if pace is None else _exposure(pace),
        traits.deaths(found.workers),
        hard,
    )


def _exposure(pace: Pace) -> float | None:
    try:
        return pace.exposure
    except Unrehearsed:  # nothing small stands for the model, and with all of it a rehearsal takes too long
        return None


def is_central(cell: Cell | None) -> bool:
    """Whether one model is optimised, with everybody's gradients."""
    return cell is not None and cell.optimisation == "central"


def is_synchronous(cell: Cell | None, traits: Traits) -> bool:
    """Whether all wait for each other, and nobody computes on what is late."""
    return cell.scheduling == "sync" if cell is not None else traits.completeness == 1


def is_repeatable(cell: Cell | None, traits: Traits) -> bool:
    """Whether a run can be had again: of servers that give up gradients, the order of arrival decides whose."""
    return is_synchronous(cell, traits) and not (is_central(cell) and traits.completeness == 4)


def count(part: Component) -> int:
    """Hyper-parameters of a component and of its parts."""
    values = [getattr(part, name) for name in fields_of(type(part))]
    return sum(1 if not isinstance(value, Component) else count(value) for value in values)


def departures(found: Prospect, site: Site) -> tuple[str, ...]:
    """In what a strategy departs from plain training on one worker, so that its samples may be worth less."""
    if found.strategy is None:
        return ()
    cell, traits = found.strategy.cell, found.strategy.traits
    said = [f"{found.workers} times the batch" if is_synchronous(cell, traits) else f"{found.workers} workers at once"]
    if approximates(found):
        said.append("what is sent is an approximation")
        if drops(found):
            said.append("what it leaves out is lost, as nothing feeds it back")
    if not is_synchronous(cell, traits):
        said.append(f"updates are late by {number(lateness(found, site), 2)} versions on average")
    if not is_central(cell):
        said.append(f"workers have models of their own, which meet every {number(horizon(found, site), 2)} steps")
    return tuple(said)


def need(found: Prospect, site: Site) -> float:
    """How many samples of a strategy do the work of one sample of plain training on one worker.

    To a target, plain training takes S (1 + r) steps: S of them whatever the batch, and r S because of noise, which n
    times the batch lessens n times (McCandlish et al. 2018, equation 2.7; S and r as `DEPTH` and `NOISE` say, since no
    plan knows them). A strategy that departs from it takes, counted in gradients of all its workers and in units of S:

    * synchronous: n c + r (1 + omega), c as below, omega the variance that an unbiased codec adds;
    * asynchronous: c(tau) + r, where c(tau) = 1 / sin(pi / (2 (2 tau + 1))) is how much smaller the learning rate has
      to be, so that updates which are late by tau stay stable (Levin & May 1976): about 1.3 tau; with a momentum near 1
      it is pi / 2 times that, as x'' + (1 - mu) x' + eta x(t - tau) = 0 is stable for eta tau < 1 - mu;
    * models apart: n + r + r (n - 1) w, where w is the share of the noise that is averaged out too late, which begins
      later with momentum, as that averages each worker's own over 1 / (1 - mu) steps; and at the end two transits to
      have the mean, which nobody has before;
    * what error feedback holds back comes 1 / delta - 1 steps later in the mean, once: c = 1 + (1 / delta - 1) / S,
      where a codec keeps the share delta of the energy (Stich & Karimireddy 2020, whose delay is a lower-order term).

    Approximation, asynchrony and replicas that differ (of which the result may be a slow worker's) each count a tenth
    more.
    """
    if found.strategy is None:
        return 1.0
    n, cell, traits = found.workers, found.strategy.cell, found.strategy.traits
    noise, held = compression(found, site)
    late = 1 + held / DEPTH
    if not is_synchronous(cell, traits) and (is_central(cell) or traits.completeness == 3):
        stable = 1 / math.sin(math.pi / (2 * (2 * min(lateness(found, site), NEVER) + 1)))
        depth, apart, last = stable * late * (1 + (math.pi / 2 - 1) * momentum(site)), 0.0, 0.0
    elif is_central(cell):
        depth, apart, last = n * late, 0.0, 0.0
    else:
        met = min(horizon(found, site), NEVER) - 1
        apart = APART * met / (met + HALF / (1 - momentum(site)))
        depth, last = n * late, 2 * site.transit * n / max(found.seconds, LEAST) / DEPTH
    waits = is_synchronous(cell, traits)
    replicas = not is_central(cell) or (not waits and not found.strategy.servers_for(n))
    doubts = approximates(found) + (not waits) + replicas
    return (depth + NOISE * (1 + noise) + NOISE * (n - 1) * apart + last) / (1 + NOISE) * DOUBT**doubts


def lateness(found: Prospect, site: Site) -> float:
    """By how many updates those of a strategy are late; where it has no versions, by those of the others meanwhile."""
    if found.staleness is not None:
        return found.staleness
    return (found.workers - 1) * (1 + delay(found, site))


def delay(found: Prospect, site: Site) -> float:
    """Steps that a model is on its way where nobody waits for it: more, the more links are asked for; infinite at last.

    The transit over 1 - rho, where rho is the share of the time that a worker's card sends: as long as a queue's jobs
    stay whose size and arrival vary as they like.
    """
    busy = found.sent / site.link[1] / max(found.seconds, LEAST)
    return site.transit / max(found.seconds, LEAST) / max(1 - busy, LEAST)


def momentum(site: Site) -> float:
    """Of the job's optimiser; of others that keep something, 0.9."""
    return float(getattr(site.task.optimizer, "momentum", USUAL if site.task.slots else 0.0))


def horizon(found: Prospect, site: Site) -> float:
    """Steps until everyone has heard of a worker's step: all of what an average takes has to be sent, by pairs more."""
    assert found.strategy is not None
    n, sent = found.workers, max(found.sent / site.task.nbytes, 1e-9)
    if n == 1:
        return 1.0
    cell = found.strategy.cell
    if found.strategy.traits.completeness < 4:
        return max(1.0, 2 * (1 - 1 / n) / sent)
    waits = is_synchronous(cell, found.strategy.traits)
    rounds = math.log2(n)
    if cell is not None and cell.topology == "closed ring":
        rounds = n * n / 8
    elif cell is not None and cell.topology == "dedicated master":  # a centre goes about 1/n of the way to a replica
        rounds = float(n)
    return max(1.0, rounds / min(1.0, sent)) + (0.0 if waits else delay(found, site))


def approximates(found: Prospect) -> bool:
    """Whether what is sent says less than what is meant."""
    return not found.lossless or (found.strategy is not None and found.strategy.traits.approximation != "none")


def drops(found: Prospect) -> bool:
    """Whether a codec leaves out something that comes in no later message: accuracy is lost for good."""
    if found.strategy is None:
        return False
    if found.strategy.traits.approximation == "lost":
        return True
    feedback = getattr(found.strategy, "feedback", None)
    fed = feedback is not None and feedback.needs_contraction
    return not fed and any(not one.unbiased and lost(one) > DROPPING for one in codecs_of(found.strategy))


def compression(found: Prospect, site: Site) -> tuple[float, float]:
    """Variance omega that unbiased codecs add, relative; and steps by which the others hold back what they leave out.

    Both from an array of Laplacian random numbers, whose tails are heavier than the normal law's, as those of gradients
    are (Aji & Heafield 2017 find most of them near zero). Strategies that approximate without a codec count as if they
    kept the share that they send.
    """
    noise, held = 0.0, 0.0
    for codec in codecs_of(found.strategy):
        if codec.lossless:
            continue
        if codec.unbiased:
            noise += lost(codec)
        else:
            held += 1 / max(1 - lost(codec), 1e-6) - 1
    if found.strategy is not None and found.strategy.traits.approximation != "none":
        dense = 2 * (1 - 1 / found.workers) * site.task.nbytes
        held += max(0.0, dense / max(found.sent, LEAST) - 1)
    return noise, held


@lru_cache(maxsize=256)
def lost(codec: Codec) -> float:
    """Share of the energy of a Laplacian random array that is not in its encoding; 1 where it cannot be tried."""
    array = np.random.default_rng(0).laplace(size=TRIED).astype(np.float32)
    try:
        fit = codec.on(((TRIED,),)).at(0)
        decoded = np.asarray(fit.decode(fit.encode(array, np.random.default_rng(1)), TRIED, "float32"))
    except (ConfigurationError, NotImplementedError):
        return 1.0
    return float(((decoded - array) ** 2).sum() / (array**2).sum())


def worth(samples_per_second: float, needed: float) -> float:
    """Samples a second in terms of those of plain training: what strategies are compared by."""
    return samples_per_second / needed
