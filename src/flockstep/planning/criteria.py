"""The criteria of Table 2 of Langer et al. (2020), computed from a plan's predictions.

The paper grades techniques by hand, from + to +++ and from easy to hard. In a plan, every grade follows from a
predicted figure for the given cluster, so a strategy may be graded differently on another cluster. Model parallelism is
not included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from flockstep.codecs.base import Codec
from flockstep.errors import ConfigurationError
from flockstep.expression import Component, fields_of
from flockstep.planning.job_profile import Site
from flockstep.planning.step_prediction import StepPrediction, exposure
from flockstep.planning.surrogate import Unrehearsed
from flockstep.report.formatting import number
from flockstep.strategies.base import Strategy
from flockstep.strategies.encoding import codecs_of

DEPTH = 50.0
"""Assumed number S of steps to the target with a very large batch.

The larger S is, the smaller is the effect of a delay of a fixed number of steps.
"""
APART = 0.5
"""Share of the gradient noise that is not averaged out in local models that hardly ever synchronize."""
HALF = 4.0
"""Number of local steps between two synchronizations at which, without momentum, half of the noise share `APART`
remains in local models.
"""
USUAL = 0.9
"""Momentum that is assumed for optimizers that have a state but no hyper-parameter named momentum."""
NEVER = 1e6
"""Largest number of steps, or of versions of staleness, that a prediction assumes."""
DOUBT = 1.1
"""Factor by which the predicted number of samples grows for each effect of a strategy that the prediction does not
model.
"""
DROPPING = 0.01
"""Squared error of a codec, as a share of the array's energy (sum of squares), above which the codec counts as a lossy
approximation.
"""
MARGIN = 1.2
"""Predicted speed relative to one worker from which several workers are recommended. Predictions err by up to a fifth,
so that a smaller gain may be none.
"""
TRIED = 4096
"""Number of elements of the random array on which the error of codecs is measured."""

LEAST = 1e-12
"""Seconds assumed for a step that takes no time, to avoid division by zero."""


@dataclass(frozen=True)
class Criteria:
    """A strategy's row of Table 2 of Langer et al. (2020), computed for one cluster."""

    technique: str
    balanced_data: bool
    """Criterion R_LBD: whether the workers' data must be large and similar."""
    learning_rate: Literal["higher", "likely", "lower"]
    """Criterion OptLR: the best learning rate relative to that of one worker, as the cluster grows."""
    overlap: float | None
    """Criterion COCC: mean staleness of updates in versions; None if the strategy has no versions."""
    hyper_parameters: int
    """Criterion CAHP: number of hyper-parameters that the strategy and its components add."""
    exposure: float | None
    """Criterion RSOI, stragglers: share of the slowest worker's delay that all workers suffer, from 0 to 1; None if
    unknown.
    """
    survives: int
    """Criterion RSOI of table 2 (robustness), failures: number of workers that may die while the others continue."""
    reproducible: Literal["easy", "medium", "hard"]
    """Criterion ERB: difficulty of reproducing a result exactly."""


def criteria(found: StepPrediction, site: Site) -> Criteria:
    """Return the row of Table 2 of Langer et al. (2020) for a predicted strategy. For one worker, the row says that
    nothing differs from training on one worker.
    """
    if found.strategy is None:
        return Criteria("one worker", False, "likely", 0.0, 0, 1.0, 0, "easy")
    strategy, cell = found.strategy, found.strategy.taxonomy_entry
    central, synchronous = is_central(strategy), is_synchronous(strategy)
    rate: Literal["higher", "likely", "lower"] = "lower" if not synchronous else "higher" if central else "likely"
    hard: Literal["easy", "medium", "hard"] = "hard"
    if is_repeatable(strategy):
        hard = "easy"
    elif cell is not None and cell.scheduling == "bounded async":
        hard = "medium"
    try:
        waits: float | None = exposure(strategy, site, found.workers)
    except Unrehearsed:  # nothing small stands for the model, and with all of it a rehearsal takes too long
        waits = None
    return Criteria(
        f"{'central' if central else 'decentral'}, {'synchronous' if synchronous else 'asynchronous'}",
        not (central and synchronous),
        rate,
        found.staleness,
        count(strategy),
        waits,
        strategy.traits.deaths(found.workers),
        hard,
    )


def is_central(strategy: Strategy) -> bool:
    """Return whether the gradients of all workers optimize one common model."""
    cell = strategy.taxonomy_entry
    return cell is not None and cell.optimization == "central"


def is_synchronous(strategy: Strategy) -> bool:
    """Return whether all workers wait for each other, so that no gradient is stale."""
    cell = strategy.taxonomy_entry
    return cell.scheduling == "sync" if cell is not None else strategy.traits.delivery == "synchronous"


def is_repeatable(strategy: Strategy) -> bool:
    """Return whether a run of the strategy can be repeated exactly.

    If servers drop gradients, the order of arrival decides which gradients are dropped.
    """
    return is_synchronous(strategy) and not (is_central(strategy) and strategy.traits.delivery == "partial")


def count(part: Component) -> int:
    """Return the number of hyper-parameters of a component and of the components in it."""
    values = [getattr(part, name) for name in fields_of(type(part))]
    return sum(1 if not isinstance(value, Component) else count(value) for value in values)


def departures(found: StepPrediction, site: Site) -> tuple[str, ...]:
    """Return the ways in which a strategy differs from training on one worker; each may increase the number of samples
    that the strategy needs.
    """
    if found.strategy is None:
        return ()
    said = [
        f"the batch is {found.replicas} times as large"
        if is_synchronous(found.strategy)
        else f"{found.replicas} workers train at the same time"
    ]
    if approximates(found):
        said.append("messages are approximations")
        if drops(found):
            said.append("the part of a gradient that a message leaves out is lost, because there is no error feedback")
    if not is_synchronous(found.strategy):
        said.append(f"updates are {number(lateness(found, site), 2)} versions late on average")
    if not is_central(found.strategy):
        steps = max(1, round(horizon(found, site)))
        after = "1 step" if steps == 1 else f"about {steps:,} steps"
        said.append(f"workers have separate models, and a worker's step has reached all of them after {after}")
    return tuple(said)


def relative_samples(found: StepPrediction, site: Site) -> float:
    """Return the factor by which a strategy needs more samples than training on one worker for the same accuracy.

    To a target, plain training takes S (1 + r) steps: S steps for any batch size, and r S further steps because of
    gradient noise, which a batch n times as large reduces n times (McCandlish et al. 2018, equation 2.7; r is
    `JobProfile.noise`, and S is assumed to be `DEPTH`). Counted in gradients of all its workers and in units of S, a
    strategy takes:

    * synchronous: n c + r (1 + ω), with c as below, and ω the variance that an unbiased codec adds;
    * asynchronous: c(τ) + r, where c(τ) = 1 / sin(π / (2 (2 τ + 1))) is the factor by which the learning rate must be
      smaller for updates with staleness τ to be stable (Levin & May 1976): about 1.3 τ; with a momentum μ near 1, c(τ)
      is π / 2 times as large, because x'' + (1 - μ) x' + η x(t - τ) = 0 is stable for η τ < 1 - μ;
    * replicas that differ: n + r + r (n - 1) w, where w is the share of the noise that is averaged too late. With
      momentum w grows later, because momentum averages each worker's own noise over 1 / (1 - μ) steps. Computing the
      mean at the end takes two transits;
    * error feedback delays its residual by a mean of 1 / δ - 1 steps, once: c = 1 + (1 / δ - 1) / S, if the codec keeps
      the share δ of the energy (Stich & Karimireddy 2020, whose delay is a lower-order term).

    Asynchrony, and approximations that leave out or add more than `DROPPING` of the energy, which half precision does
    not, each add a tenth, and so does a partition whose gradients are late, which costs samples as staleness does.
    """
    if found.strategy is None:
        return 1.0
    n, central, waits = found.replicas, is_central(found.strategy), is_synchronous(found.strategy)
    noise, held = compression(found, site)
    late = 1 + held / DEPTH
    if not waits and (central or found.strategy.traits.delivery == "unbounded delay"):
        stable = _slowed(min(lateness(found, site), NEVER))
        depth, apart, last = stable * late * (1 + (math.pi / 2 - 1) * momentum(site)), 0.0, 0.0
    elif central:
        depth, apart, last = n * late, 0.0, 0.0
    else:
        met = min(horizon(found, site), NEVER) - 1
        apart = APART * met / (met + HALF / (1 - momentum(site)))
        depth, last = n * late, 2 * site.transit * n / usual_step(found, site) / DEPTH
    doubts = (noise + held > DROPPING) + (not waits)
    r = site.task.noise
    relative = (depth + r * (1 + noise) + r * (n - 1) * apart + last) / (1 + r) * DOUBT**doubts
    if late_by := found.partition.mean_delay:
        relative = DOUBT * (relative + n * (_slowed(late_by) - 1) / (1 + r))
    return relative


def _slowed(late: float) -> float:
    """Factor by which the learning rate must be smaller for updates that are `late` versions late to be stable."""
    return 1 / math.sin(math.pi / (2 * (2 * late + 1)))


def repeated(found: StepPrediction, site: Site) -> float:
    """Return the factor by which a strategy whose workers do not wait for each other needs more samples if every worker
    has different data; 1 for other strategies.

    Worker i of n takes the share p_i of all steps, but its data are 1/n of all data. Weighting a sample by 1 / (n p_i)
    corrects this, and multiplies the variance by the mean over i of 1 / (n p_i) (importance sampling). This is the mean
    time of a worker's step, multiplied by the gradients of all workers per second, and divided by n.
    """
    if found.strategy is None or is_synchronous(found.strategy):
        return 1.0
    return max(1.0, found.seconds / usual_step(found, site))


def lateness(found: StepPrediction, site: Site) -> float:
    """Return the staleness of a strategy's updates, in versions. For a strategy without versions, return the number of
    updates by other workers during a step and the transit of a model.
    """
    if found.staleness is not None:
        return found.staleness
    return (found.replicas - 1) * (1 + delay(found, site))


def delay(found: StepPrediction, site: Site) -> float:
    """Return the number of a worker's steps during which a model is in transit, if no worker waits for the model.

    The number grows without limit with the load of the links: the transit time is divided by 1 - ρ, where ρ is the
    share of time in which a worker's network card sends, as in a queue whose jobs vary in size and arrival.
    """
    step = usual_step(found, site)
    busy = found.exchanged_bytes / site.link[1] / step
    return site.transit / step / max(1 - busy, LEAST)


def usual_step(found: StepPrediction, site: Site) -> float:
    """Return the mean seconds between two gradients of a replica, over all gradients. Most gradients come from fast
    workers, so the result is at most the mean over workers.
    """
    return max(found.replicas * site.task.batch / max(found.samples_per_second, LEAST), LEAST)


def momentum(site: Site) -> float:
    """Return the momentum of the job's optimizer; 0.9 for optimizers that have a state but no such hyper-parameter, and
    0 for optimizers without state.
    """
    return float(getattr(site.task.optimizer, "momentum", USUAL if site.task.slots else 0.0))


def horizon(found: StepPrediction, site: Site) -> float:
    """Return the number of steps after which the effect of a worker's step has reached all workers."""
    assert found.strategy is not None
    n, sent = found.replicas, max(found.exchanged_bytes / site.task.nbytes, 1e-9)
    if n == 1:
        return 1.0
    cell = found.strategy.taxonomy_entry
    if found.strategy.traits.delivery != "partial":
        return max(1.0, 2 * (1 - 1 / n) / sent)
    rounds = math.log2(n)
    if cell is not None and cell.topology == "closed ring":
        rounds = n * n / 8
    elif cell is not None and cell.topology == "dedicated master":  # a center moves about 1/n of the way to a replica
        rounds = float(n)
    return max(1.0, rounds / min(1.0, sent)) + (0.0 if is_synchronous(found.strategy) else delay(found, site))


def approximates(found: StepPrediction) -> bool:
    """Return whether a strategy's messages contain approximations of the exact values."""
    return not found.lossless or (found.strategy is not None and found.strategy.traits.approximation != "none")


def drops(found: StepPrediction) -> bool:
    """Return whether a strategy drops values that no later message contains, so that accuracy is lost permanently."""
    if found.strategy is None:
        return False
    if found.strategy.traits.approximation == "lost":
        return True
    feedback = getattr(found.strategy, "feedback", None)
    fed = feedback is not None and feedback.needs_contraction
    return not fed and any(not one.unbiased and lost(one) > DROPPING for one in codecs_of(found.strategy))


def compression(found: StepPrediction, site: Site) -> tuple[float, float]:
    """Return the relative variance ω that unbiased codecs add, and the number of steps by which other codecs delay the
    values that they leave out.

    Both figures are measured on an array of Laplacian random numbers, which, like gradients, have heavier tails than
    normally distributed numbers (Aji & Heafield 2017 find most gradients near zero). A strategy that approximates
    without a codec counts as keeping the share that it sends.
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
        dense = 2 * (1 - 1 / found.replicas) * site.task.nbytes
        held += max(0.0, dense / max(found.exchanged_bytes, LEAST) - 1)
    return noise, held


@lru_cache(maxsize=256)
def lost(codec: Codec) -> float:
    """Return the share of the energy of a Laplacian random array that the array's encoding leaves out; 1 if the codec
    cannot be tried.
    """
    array = np.random.default_rng(0).laplace(size=TRIED).astype(np.float32)
    try:
        fit = codec.bind_shapes(((TRIED,),)).bind_step(0)
        decoded = np.asarray(fit.decode(fit.encode(array, np.random.default_rng(1)), TRIED, "float32"))
    except (ConfigurationError, NotImplementedError):
        return 1.0
    return float(((decoded - array) ** 2).sum() / (array**2).sum())


def preference(found: StepPrediction, speed: float) -> float:
    """Return the figure by which strategies are recommended: the predicted speed, which counts `MARGIN` times as much
    for one worker.
    """
    return speed * MARGIN if found.workers == 1 else speed
