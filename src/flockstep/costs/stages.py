"""A network as a pipeline: the places where the network is cut, and PipeDream's planner (Narayanan et al., SOSP 2019,
section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from flockstep.costs.layers import Layer, ModelShape
from flockstep.errors import ConfigurationError

Chain = tuple[Layer, ...]
"""Type of a list of consecutive layers."""
Stages = tuple[float, tuple[int, ...]]
"""Seconds of the slowest stage or link of a pipeline, and the first layer of each stage."""


def chunks(model: ModelShape, count: int, batch: int, split_at: Sequence[str] = ()) -> list[Chain]:
    """Return the layers of each of `count` chunks of consecutive layers.

    The chunks are those of `cut`. Every chunk after the first begins with a layer that has trained
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
        firsts = cut(found, batch, model.itemsize, count)
    return [tuple(layer for unit in found[one:end] for layer in unit) for one, end in pairwise([*firsts, len(found)])]


def cut(units: Sequence[Sequence[Layer]], batch: int, itemsize: int, count: int) -> list[int]:
    """Return the first unit of each of `count` chunks: the cut whose slowest chunk has the least work for `batch`
    samples, and, of several such cuts, the one whose largest chunk needs the least memory for parameters and
    activations.
    """
    work = [sum(layer.work(batch) for layer in unit) for unit in units]
    nbytes = [sum(one.parameters * itemsize + one.activation_bytes(batch, itemsize) for one in unit) for unit in units]
    return balanced(work, nbytes, count)


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


def pipedream_plan(
    seconds: Sequence[float], outputs: Sequence[float], weights: Sequence[float], workers: int, bandwidth: float
) -> tuple[int, ...]:
    """Return the first layer of each stage of the pipeline whose slowest stage or link takes the least time for a
    mini-batch, of those whose stages all have the same number of workers, as the stages of every `pipeline(…)` have.

    A stage of the layers i to j on m workers takes T(i, j) = max(Σ T_l, 2 (m - 1) Σ |w_l| / B) / m, and a link between
    two stages 2 a_l / B. With A(j, k) for the best pipeline of the layers up to j in k stages:

        A(j, k) = min over i of max(A(i, k - 1), 2 a_i / B, T(i + 1, j)), and A(j, 1) = T(0, j)

    Args:
        seconds: T_l, seconds of the forward and backward pass of each layer over a mini-batch.
        outputs: a_l, bytes of the outputs of each layer for a mini-batch.
        weights: |w_l|, bytes of the weights of each layer.
        workers: number of workers; the plan uses all of them.
        bandwidth: B, bytes per second of every link.
    """
    layers, plans = len(seconds), list[Stages]()
    time, size = [0.0, *accumulate(seconds)], [0.0, *accumulate(weights)]

    def stage(first: int, last: int, count: int) -> float:
        sent = 2 * (count - 1) * (size[last + 1] - size[first]) / bandwidth
        return max(time[last + 1] - time[first], sent) / count

    for stages in (one for one in range(1, min(workers, layers) + 1) if not workers % one):
        count = workers // stages
        best: dict[int, Stages] = {last: (stage(0, last, count), (0,)) for last in range(layers)}
        for number in range(1, stages):
            longer: dict[int, Stages] = {}
            for last in range(number, layers):
                options = []
                for before in range(number - 1, last):
                    earlier, firsts = best[before]
                    slowest = max(earlier, 2 * outputs[before] / bandwidth, stage(before + 1, last, count))
                    options.append((slowest, (*firsts, before + 1)))
                longer[last] = min(options, key=lambda option: option[0])
            best = longer
        plans.append(best[layers - 1])
    return min(plans, key=lambda plan: plan[0])[1]


def balanced(seconds: Sequence[float], nbytes: Sequence[float], parts: int) -> list[int]:
    """Return the first unit of each part of the best cut of a chain into `parts` parts of at least one unit.

    The best cut has the least time of its slowest part, and, of several such cuts, the least memory of its largest
    part; both are found by dynamic programming over the ends of the parts (Narayanan et al. 2019, section 3.1, without
    replication).

    Args:
        seconds: time of each unit, in any unit of time.
        nbytes: memory of each unit, in bytes.
        parts: number of parts.

    Raises:
        ConfigurationError: there are fewer units than parts.
    """
    if not 1 <= parts <= len(seconds):
        raise ConfigurationError(
            f"the number of parts must be >= 1 and <= {len(seconds)}, the number of units in the chain, got {parts}; "
            "use at most one part per unit"
        )
    slowest, _ = _bottleneck(seconds, [0] * len(seconds), parts, math.inf)
    return _bottleneck(nbytes, seconds, parts, slowest)[1]


def _bottleneck(loads: Sequence[float], limited: Sequence[float], parts: int, limit: float) -> tuple[float, list[int]]:
    """Return the least largest load of a part, and the parts' first units, with sums of `limited` within `limit`."""
    units = len(loads)
    load, bound = [0.0, *accumulate(map(float, loads))], [0.0, *accumulate(map(float, limited))]
    most = limit * (1 + 1e-9)
    best = [0.0] + [math.inf] * units
    """Least largest load of the first parts if they end before unit i."""
    starts: list[list[int]] = []
    for _ in range(parts):
        after, begin = [math.inf] * (units + 1), [0] * (units + 1)
        for end in range(1, units + 1):
            for start in range(end):
                if bound[end] - bound[start] > most:
                    continue
                worst = max(best[start], load[end] - load[start])
                if worst < after[end]:
                    after[end], begin[end] = worst, start
        best = after
        starts.append(begin)
    cut, end = [], units
    for begin in reversed(starts):
        end = begin[end]
        cut.append(end)
    return best[units], cut[::-1]
