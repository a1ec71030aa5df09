"""A network as a pipeline: the places where the network is cut, the balance of the work, the bytes that cross links,
and PipeDream's planner (Narayanan et al., PipeDream, SOSP 2019, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flockstep.costs.layers import Layer, ModelShape, Number
from flockstep.errors import ConfigurationError
from flockstep.partitions.cutting import balanced

Chain = tuple[Layer, ...]
"""Type of a list of consecutive layers."""


@dataclass(frozen=True)
class StageCut:
    """A network that is cut into pipeline stages of consecutive layers."""

    first: tuple[str, ...]
    """Name of the first layer of each stage."""
    shares: tuple[float, ...]
    """Each stage's share of the work W of a gradient."""
    link_bytes: tuple[Number, ...]
    """Bytes per step on the link after each stage except the last, for activations and their gradients."""

    @property
    def speedup(self) -> float:
        """Upper bound on the speed-up of the pipeline over one worker, reached if the slowest stage never waits."""
        return 1 / max(self.shares)


def cut(model: ModelShape, stages: int, batch: int) -> StageCut:
    """Return the cut into `stages` stages whose slowest stage has the least work for `batch` samples.

    Raises:
        ConfigurationError: the layers do not form a chain, or the network has too few places to cut.
    """
    found = chunks(model, stages, batch)
    total = model.work(batch)
    return StageCut(
        tuple(chunk[0].name for chunk in found),
        tuple(sum(layer.work(batch) for layer in chunk) / total if total else 1 / stages for chunk in found),
        tuple(chunk[-1].pipeline_bytes(batch, model.itemsize) for chunk in found[:-1]),
    )


def chunks(model: ModelShape, count: int, batch: int, split_at: Sequence[str] = ()) -> list[Chain]:
    """Return the layers of each of `count` chunks of consecutive layers.

    The cut is the one whose slowest chunk has the least work for `batch` samples, and, of several such cuts, the one
    whose largest chunk needs the least memory. Every chunk after the first begins with a layer that has trained
    parameters, and layers that share weights are in one chunk, as `partition=pipeline(…)` requires. `split_at` names
    the first layer, or the module around it, of the second and every later chunk instead.

    Raises:
        ConfigurationError: the layers do not form a chain, the network has too few places to cut, or a name in
            `split_at` is not at such a place.
    """
    found = units(model)
    if not 1 <= count <= len(found):
        raise ConfigurationError(
            f"{model.name} can be cut into 1 to {len(found)} stages, because every stage after the first begins with a "
            f"layer that has trained parameters, got {count}; use at most {len(found)} workers"
        )
    if split_at:
        firsts = [0, *(_unit_of(name, found, model.name) for name in split_at)]
        if len(firsts) != count or firsts != sorted(set(firsts)):
            raise ConfigurationError(
                f"split_at must name {count - 1} layers of {model.name} in their order for {count} chunks, got "
                f"{', '.join(split_at)}; name the first layer of each chunk but the first"
            )
    else:
        work = [sum(layer.work(batch) for layer in unit) for unit in found]
        nbytes = [
            sum(layer.parameters * model.itemsize + layer.activation_bytes(batch, model.itemsize) for layer in unit)
            for unit in found
        ]
        firsts = balanced(work, nbytes, count)
    return [tuple(layer for unit in found[one:end] for layer in unit) for one, end in pairwise([*firsts, len(found)])]


def units(model: ModelShape) -> list[Chain]:
    """Divide the network at every place where it can be cut, and return the layers of each part.

    Raises:
        ConfigurationError: the layers do not form a chain.
    """
    before = [(), *((layer.name,) for layer in model.layers)]
    if any(layer.after not in (None, known) for layer, known in zip(model.layers, before, strict=False)):
        raise ConfigurationError(
            f"{model.name} has branches, so its layers do not form a chain that can be cut into stages; split single "
            f"layers, or use data parallelism"
        )
    return [model.layers[start:end] for start, end in pairwise([*_places(model), len(model.layers)])]


def _unit_of(name: str, found: Sequence[Chain], model: str) -> int:
    """The unit that begins with the layer, or with the module, `name`."""
    for place, unit in enumerate(found):
        if unit[0].name == name or unit[0].name.startswith(f"{name}."):
            return place
    known = ", ".join(unit[0].name for unit in found[1:])
    raise ConfigurationError(
        f"split_at must name layers of {model} at which a chunk can begin: {known}, got {name!r}; choose among them"
    )


def _places(model: ModelShape) -> list[int]:
    """The layers at which a stage may begin."""
    number = {layer.name: index for index, layer in enumerate(model.layers)}
    shared = [(number[layer.tied], index) for index, layer in enumerate(model.layers) if layer.tied in number]
    begins = [index for index, layer in enumerate(model.layers) if layer.gradients or layer.tied]
    return [0, *(place for place in begins[1:] if not any(first < place <= last for first, last in shared))]


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a pipeline: the consecutive layers `first` to `last`, held by `replicas` workers."""

    first: int
    last: int
    replicas: int


Stages = tuple[PlannedStage, ...]
"""Type of the stages of a pipeline, in the order of their layers."""


@dataclass(frozen=True)
class PipeDreamPlan:
    """The stages that PipeDream's planner chooses, and the predicted time."""

    stages: Stages
    seconds: float
    """Predicted seconds that the slowest stage or link takes for a mini-batch."""


def pipedream_plan(
    seconds: Sequence[float],
    outputs: Sequence[float],
    weights: Sequence[float],
    workers: int,
    bandwidth: float,
    replicas: int | None = None,
) -> PipeDreamPlan:
    """Return the stages of the pipeline whose slowest stage or link takes the least time for a mini-batch.

    A stage of the layers i to j on m workers takes T(i, j, m) = max(Σ T_l, 2 (m - 1) Σ |w_l| / B) / m, and a link
    between two stages 2 a_l / B. With A(j, m) for the best pipeline of the layers up to j on m workers:

        A(j, m) = min(T(0, j, m), min over i, m' of max(A(i, m - m'), 2 a_i / B, T(i + 1, j, m')))

    Args:
        seconds: T_l, seconds of the forward and backward pass of each layer over a mini-batch.
        outputs: a_l, bytes of the outputs of each layer for a mini-batch.
        weights: |w_l|, bytes of the weights of each layer.
        workers: number of workers; the plan uses all of them.
        bandwidth: B, bytes per second of every link.
        replicas: number of workers of every stage; None lets every stage have a different number.

    Raises:
        ConfigurationError: there are no layers, or no pipeline of these layers uses all workers.
    """
    layers = len(seconds)
    if not layers or workers < 1:
        raise ConfigurationError(
            f"a plan needs layers and workers, got {layers} and {workers}; give at least one of each"
        )
    time, size = [0.0, *accumulate(seconds)], [0.0, *accumulate(weights)]

    def stage(first: int, last: int, count: int) -> float:
        if replicas not in (None, count):
            return math.inf
        sent = 2 * (count - 1) * (size[last + 1] - size[first]) / bandwidth
        return max(time[last + 1] - time[first], sent) / count

    best: dict[tuple[int, int], tuple[float, Stages]] = {}
    for last in range(layers):
        for count in range(1, workers + 1):
            whole: Stages = (PlannedStage(0, last, count),)
            options = [(stage(0, last, count), whole)]
            for before in range(last):
                link = 2 * outputs[before] / bandwidth
                for mine in range(1, count):
                    earlier, stages = best[before, count - mine]
                    slowest = max(earlier, link, stage(before + 1, last, mine))
                    options.append((slowest, (*stages, PlannedStage(before + 1, last, mine))))
            best[last, count] = min(options, key=lambda option: (option[0], len(option[1])))
    found, stages = best[layers - 1, workers]
    if not found < math.inf:
        raise ConfigurationError(
            f"{layers} layers on {workers} workers do not form a pipeline of stages with {replicas} workers each; "
            f"use a "
            "divisor of the number of workers, and at most as many stages as layers"
        )
    return PipeDreamPlan(stages, found)


def even_plan(
    seconds: Sequence[float], outputs: Sequence[float], weights: Sequence[float], workers: int, bandwidth: float
) -> PipeDreamPlan:
    """Return the best pipeline whose stages all have the same number of workers, as the stages of every `pipeline(…)`
    have.

    The arguments have the same meaning as in `pipedream_plan`.
    """
    counts = [count for count in range(1, workers + 1) if not workers % count and workers // count <= len(seconds)]
    plans = [pipedream_plan(seconds, outputs, weights, workers, bandwidth, count) for count in counts]
    return min(plans, key=lambda plan: (plan.seconds, len(plan.stages)))
