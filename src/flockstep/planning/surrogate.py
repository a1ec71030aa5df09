"""The surrogate of a model for rehearsals: arrays that stand for the model's arrays, without computation.

For a small model, the surrogate's arrays have the model's shapes. For a larger model, the surrogate has smaller
matrices, every byte of payload stands for several bytes, and the sizes in a strategy's settings shrink accordingly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from flockstep.arrays.factors import FactoredWeight, Packing
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec, Shape
from flockstep.collectives.base import Collective
from flockstep.errors import ConfigurationError
from flockstep.expression import Component
from flockstep.frameworks.base import Data, DistillationTargets, Evaluation, Indices, Job
from flockstep.frameworks.numpy import Model, NumpyEngine
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD

DTYPES = {2: "float16", 4: "float32", 8: "float64"}
"""Number of bytes of an element → name of the dtype that a surrogate uses."""
BATCHES = 16
"""Number of batches that each worker is assumed to have if the job's samples are unknown."""

C = TypeVar("C", bound=Component)


@dataclass(frozen=True)
class SurrogateBatches:
    """The properties of a job's samples that a rehearsal needs."""

    batch: int = 1
    samples: int | None = None
    """Number of training samples of the job; None if unknown."""
    layers: tuple[FactoredWeight, ...] | None = None
    """Layers whose gradients can be computed as factors; None if unknown."""


class SurrogateEngine(NumpyEngine):
    """The engine of a rehearsal, which stands for the engine of the job's model. Each byte of the surrogate stands for
    `factor` bytes of the model.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        model_bytes: float,
        dtype_bytes: int,
        surrogate_batches: SurrogateBatches,
        workers: int,
        optimizer: Optimizer | None,
        seed: int,
    ):
        batch = surrogate_batches.batch
        samples = max(surrogate_batches.samples or BATCHES * batch * workers, workers)
        x, y = np.zeros((samples, 1)), np.zeros(samples)
        data = Data(x, y, x[:1], y[:1])
        job = Job(lambda: None, lambda: data, optimizer or SGD(lr=0.01), metric=lambda *_: 0.0, batch=batch)
        super().__init__(job, seed, _Bowl(tuple(shapes), DTYPES.get(dtype_bytes, "float32")))
        self.slopes: FlatArray = np.linspace(1e-3, 2e-3, self.schema.size, dtype=self.schema.dtype)
        """Gradient at parameters of 1."""
        self.factor = model_bytes / self.schema.nbytes
        self._surrogate_batches = surrogate_batches
        self._asked, self._counted = 0, 0

    @property
    def batches(self) -> float:
        """Mean number of batches for which one gradient was computed."""
        return self._counted / (self._asked * self._surrogate_batches.batch) if self._asked else 1.0

    def gradients(
        self, params: FlatArray, indices: Indices, out: FlatArray, replicas: Sequence[int], steps: Sequence[int]
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Write gradients of a quadratic function of the parameters to `out`; the function needs no samples."""
        self._asked += len(indices)
        self._counted += indices.size
        np.multiply(self.slopes, params, out=out)
        return np.asarray(np.einsum("ij,ij->i", out, params) / 2, np.float64)

    def layers(self, batch: int) -> tuple[FactoredWeight, ...]:
        """The layers of the job whose gradients can be computed as factors.

        Raises:
            ConfigurationError: the layers are unknown, or the surrogate is smaller than the model.
        """
        if self._surrogate_batches.layers is None:
            raise ConfigurationError(
                "the strategy factors fully connected layers, but only the size of this model is known; plan for a "
                "job instead"
            )
        if self._surrogate_batches.layers and self.factor != 1:
            raise Shrunk(f"a small model of {self.schema.size} elements cannot represent the factors of layers")
        return self._surrogate_batches.layers

    def factored(
        self,
        params: FlatArray,
        indices: Indices,
        layers: Sequence[FactoredWeight],
        out: FlatArray,
        replica: int,
        step: int,
    ) -> float:
        """Write a gradient to `out`, packed together with factors that are zero."""
        dense = np.empty_like(params)
        loss = self.gradient(params, indices, dense, replica, step)
        empty = [
            (np.zeros((one.products, one.rows), dense.dtype), np.zeros((one.products, one.columns), dense.dtype))
            for one in sorted(layers)
        ]
        Packing(len(dense), layers).pack(dense, empty, out)
        return loss

    def distil(
        self, params: FlatArray, indices: Indices, out: FlatArray, targets: DistillationTargets, replica: int, step: int
    ) -> float:
        """Write a gradient to `out`, as without teachers. The predictions of teachers take no virtual time."""
        return self.gradient(params, indices, out, replica, step)

    def evaluate_together(self, members: FlatArray, replicas: Sequence[int]) -> Evaluation:
        """Return zeros, because a surrogate is not trained."""
        return Evaluation(0.0, 0.0)


class Unrehearsed(ConfigurationError):
    """Error: no rehearsal can predict the cost of the strategy with the given model."""


class Shrunk(Unrehearsed):
    """Error: the surrogate is smaller than the model, and therefore cannot predict the cost of the strategy."""


class _Bowl(Model):
    """Half the sum of h w², with a different h for every w, so that a second-order method has something to do."""

    def __init__(self, shapes: tuple[Shape, ...], dtype: str):
        self.dtype = dtype
        self._shapes = shapes

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {f"w{i}": shape for i, shape in enumerate(self._shapes)}

    def initial(self, random: np.random.Generator) -> dict[str, FlatArray]:
        return {name: random.standard_normal(size=shape, dtype=np.float32) for name, shape in self.shapes.items()}

    def gradients(
        self, params: Mapping[str, FlatArray], x: FlatArray, y: FlatArray, out: Mapping[str, FlatArray]
    ) -> FlatArray:
        raise NotImplementedError("a surrogate computes only gradients of the whole array")

    def outputs(self, params: Mapping[str, FlatArray], x: FlatArray) -> FlatArray:
        return x

    def loss(self, params: Mapping[str, FlatArray], outputs: FlatArray, y: FlatArray) -> float:
        return 0.0


def elements_in(shapes: Iterable[Shape]) -> int:
    """Return the number of elements of tensors with the given shapes."""
    return sum(map(math.prod, shapes))


def shrunk(shapes: Sequence[Shape], elements: int) -> tuple[Shape, ...]:
    """Return shapes with the given numbers of axes and similar proportions, and about `elements` elements in total. Of
    a matrix or a stack of kernels, the two longest axes shrink.
    """
    share, result = elements / max(1, elements_in(shapes)), list[Shape]()
    if share >= 1:
        return tuple(shapes)
    for shape in shapes:
        sides, longest = list(shape), sorted(range(len(shape)), key=lambda axis: -shape[axis])[:2]
        for axis in longest:
            sides[axis] = max(1, round(shape[axis] * share ** (1 / len(longest))))
        result.append(tuple(sides))
    return tuple(result)


def scaled(component: C, factor: float) -> C:
    """Return a copy of the component in which the sizes in its settings, and in those of its components, are divided by
    `factor`.
    """
    if factor == 1:
        return component
    changed: dict[str, Any] = {}
    for one in dataclasses.fields(component):  # type: ignore[arg-type]
        value = getattr(component, one.name)
        if isinstance(value, Component):
            value = scaled(value, factor)
        elif "sized" in one.metadata:
            value = round(value / factor) if isinstance(value, int) else value / factor
        if one.init and value != getattr(component, one.name):
            changed[one.name] = value
    return dataclasses.replace(component, **changed) if changed else component  # type: ignore[type-var]


def longest_cycle(component: Component, most: int) -> int:
    """Return an upper bound of a strategy's period: the largest setting, up to `most`, that may count steps in a
    component and the components in it.

    A bound that is too large does no harm. Settings that count elements or pieces are ignored.
    """
    found = 1
    for one in dataclasses.fields(component):  # type: ignore[arg-type]
        value = getattr(component, one.name)
        if one.metadata.keys() & {"counts", "sized"}:
            continue
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Component) and not isinstance(part, (Codec, Collective)):
                found = max(found, longest_cycle(part, most))
            elif isinstance(part, int) and not isinstance(part, bool) and part <= most:
                found = max(found, part)
    return found
