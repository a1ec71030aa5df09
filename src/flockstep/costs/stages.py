"""A network as a pipeline: where it is cut, how evenly the work is divided, and which bytes cross links."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from flockstep.costs.layers import ModelShape, Number
from flockstep.errors import ConfigurationError
from flockstep.partitions.cutting import balanced


@dataclass(frozen=True)
class StageCut:
    """A network cut into stages of consecutive layers."""

    first: tuple[str, ...]
    """Name of the first layer of each stage."""
    shares: tuple[float, ...]
    """Share of each stage in the work W of a gradient."""
    link_bytes: tuple[Number, ...]
    """Bytes that cross the link behind each stage but the last per step: activations, and their gradients."""

    @property
    def speedup(self) -> float:
        """Upper bound of the speed-up of these stages over one worker: the slowest stage never waits."""
        return 1 / max(self.shares)


def cut(model: ModelShape, stages: int, batch: int) -> StageCut:
    """Return the cut into `stages` stages whose slowest stage has the least work for `batch` samples.

    Among those cuts it is the one whose largest stage has the least memory. A stage begins with a layer that has
    trained parameters, and layers that share weights are in one stage, as `partition=pipeline(…)` requires.

    Raises:
        ConfigurationError: the layers are no chain, or the network has fewer places to cut.
    """
    before = [(), *((layer.name,) for layer in model.layers)]
    if any(layer.after not in (None, known) for layer, known in zip(model.layers, before, strict=False)):
        raise ConfigurationError(
            f"{model.name} has branches, so that its layers are no chain to be cut into stages; split single layers, "
            "or the data"
        )
    places = _places(model)
    if not 1 <= stages <= len(places):
        raise ConfigurationError(
            f"{model.name} can be cut into 1 to {len(places)} stages, each beginning with trained parameters, got "
            f"{stages}; use at most {len(places)} workers"
        )
    units = [model.layers[start:end] for start, end in pairwise([*places, len(model.layers)])]
    work = [sum(layer.work(batch) for layer in unit) for unit in units]
    nbytes = [
        sum(layer.parameters * model.itemsize + layer.activation_bytes(batch, model.itemsize) for layer in unit)
        for unit in units
    ]
    starts = [places[unit] for unit in balanced(work, nbytes, stages)]
    chunks = [model.layers[start:end] for start, end in pairwise([*starts, len(model.layers)])]
    total = sum(work)
    return StageCut(
        tuple(chunk[0].name for chunk in chunks),
        tuple(sum(layer.work(batch) for layer in chunk) / total if total else 1 / stages for chunk in chunks),
        tuple(chunk[-1].pipeline_bytes(batch, model.itemsize) for chunk in chunks[:-1]),
    )


def _places(model: ModelShape) -> list[int]:
    """The layers at which a stage may begin."""
    number = {layer.name: index for index, layer in enumerate(model.layers)}
    shared = [(number[layer.tied], index) for index, layer in enumerate(model.layers) if layer.tied in number]
    begins = [index for index, layer in enumerate(model.layers) if layer.gradients or layer.tied]
    return [0, *(place for place in begins[1:] if not any(first < place <= last for first, last in shared))]
