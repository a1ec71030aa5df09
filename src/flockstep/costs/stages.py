"""A network as a pipeline: the places where the network is cut, and PipeDream's planner (Narayanan et al., SOSP 2019,
section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from flockstep.costs.layers import Layer, ModelShape
from flockstep.errors import ConfigurationError
from flockstep.partitions.cutting import balanced

Chain = tuple[Layer, ...]
"""Type of a list of consecutive layers."""
Stages = tuple[float, tuple[int, ...]]
"""Seconds of the slowest stage or link of a pipeline, and the first layer of each stage."""


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
