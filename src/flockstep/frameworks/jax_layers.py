"""Finds the layers of a JAX model, with their parameters, products and bytes, by tracing it once on samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from flockstep.costs.layers import NOTHING, Layer, ModelShape, Pass, log2_ceil
from flockstep.errors import ConfigurationError, in_short
from flockstep.frameworks.jax import JaxModel
from flockstep.frameworks.jax_tree import FlatTree

NOTE = (
    "found by tracing apply: matrix products and convolutions are counted, elementwise operations are not; layers are "
    "assumed to run one after the other"
)
WHOLE = "(model)"
"""Name of the layer that counts products of activations alone, such as the products of attention."""


@dataclass(frozen=True)
class _Origin:
    """What a traced value is computed from: one tensor of parameters alone, parameters and data, or data alone."""

    tensor: str | None = None
    trained: bool = False
    """Whether the value depends on parameters, so that it has a gradient."""


@dataclass(frozen=True)
class _Product:
    """A matrix product or convolution of a traced function; counts are of all samples."""

    tensor: str | None
    """The tensor of parameters that is multiplied; None for a product of activations."""
    kind: str
    multiply_adds: int
    summed: int
    """Number of products in each output."""
    reads: int
    writes: int
    data: bool
    """Whether no other factor depends on parameters, so that no gradient of it is needed."""


@dataclass
class _LayerTensors:
    """The tensors of one layer and the products with them."""

    tensors: dict[str, int] = field(default_factory=dict)
    products: list[_Product] = field(default_factory=list)


def shape_of(model: JaxModel, samples: Any, name: str) -> ModelShape:
    """Return the layers of `model`, found by tracing the model with a numpy array of samples, whose first axis counts
    the samples.

    Tensors whose names have the same beginning, such as `hidden.w` and `hidden.b`, are one layer. A layer without a
    product, such as an embedding, is marked as unknown.

    Raises:
        ConfigurationError: `apply` fails on these samples, or its products depend on data.
    """
    params = model.init(jax.random.key(0))
    schema = FlatTree(params).schema
    x = samples if samples.dtype.kind in "iu" else samples.astype(schema.dtype)

    def apply(tree: Any, x: Any) -> Any:
        return model.apply(tree, x, jax.random.key(0)) if model.random else model.apply(tree, x)

    try:
        traced = jax.make_jaxpr(apply)(params, x)
    except Exception as error:
        raise ConfigurationError(
            f"{name} failed on the sample batch: {in_short(error)}; fix the model or its data"
        ) from error
    origins = [*(_Origin(entry.name, trained=True) for entry in schema.entries), _Origin()]
    groups: dict[str, _LayerTensors] = {}
    for product in _walk(traced.jaxpr, origins, []):
        groups.setdefault(_layer(product.tensor), _LayerTensors()).products.append(product)
    for entry in schema.entries:
        groups.setdefault(_layer(entry.name), _LayerTensors()).tensors[entry.name] = entry.size
    layers = tuple(_counted(key, group, len(x)) for key, group in groups.items())
    return ModelShape(name, layers, np.dtype(schema.dtype).itemsize, NOTE)


def _layer(tensor: str | None) -> str:
    """Return the name of the layer that a tensor of parameters belongs to."""
    return WHOLE if tensor is None else tensor.rpartition(".")[0] or tensor


def _counted(name: str, group: _LayerTensors, batch: int) -> Layer:
    products = sum(one.multiply_adds for one in group.products) / batch
    depth = sum(log2_ceil(one.summed) for one in group.products)
    weighed = bool(group.tensors)
    kinds = sorted({one.kind for one in group.products}) or ["other"]
    back = Pass(products if weighed else 2 * products, depth=depth)
    return Layer(
        name,
        " and ".join(kinds),
        parameters=sum(group.tensors.values()),
        forward=Pass(products, depth=depth),
        by_weight=Pass(products, sums=1) if weighed and products else NOTHING,
        by_input=NOTHING if all(one.data for one in group.products) else back,
        reads=sum(one.reads for one in group.products) / batch,
        writes=sum(one.writes for one in group.products) / batch,
        counted="jax" if group.products else "unknown",
    )


def _walk(jaxpr: Any, origins: Sequence[_Origin], results: list[_Origin], times: int = 1) -> Iterator[_Product]:
    """Yield the products of a traced function with these arguments; `results` receives the origins of its results.

    `times`: how often the function runs.
    """
    known: dict[Any, _Origin] = dict(zip(jaxpr.invars, origins, strict=True))

    def origin(value: Any) -> _Origin:
        return _Origin() if hasattr(value, "val") else known.get(value, _Origin())  # literals and constants: data

    for step in jaxpr.eqns:
        given = [origin(value) for value in step.invars]
        inner = step.params.get("jaxpr", step.params.get("call_jaxpr"))
        if inner is None:
            _require_no_products(step)
            found = _product(step, given, times)
            if found is not None:
                yield found
            known |= dict.fromkeys(step.outvars, _combined(step, given))
            continue
        ends: list[_Origin] = []
        often = times * int(step.params.get("length", 1))
        yield from _walk(getattr(inner, "jaxpr", inner), given, ends, often)
        known |= dict(zip(step.outvars, ends, strict=True))
    results += [origin(value) for value in jaxpr.outvars]


def _require_no_products(step: Any) -> None:
    """Refuse a loop or a branch with products, because the data decide how often they are computed."""
    parts = [*step.params.get("branches", ()), *filter(None, map(step.params.get, ("cond_jaxpr", "body_jaxpr")))]
    for part in parts:
        for _ in _walk(part.jaxpr, [_Origin()] * len(part.jaxpr.invars), []):
            raise ConfigurationError(
                f"{step.primitive.name} in apply computes a number of products that depends on the data, so the "
                f"products cannot be counted; use jax.lax.scan, or a loop in Python"
            )


def _combined(step: Any, given: Sequence[_Origin]) -> _Origin:
    """Return the origin of the results of an operation on these values."""
    values = [one for one, value in zip(given, step.invars, strict=True) if not hasattr(value, "val")]
    tensors = {one.tensor for one in values}
    return _Origin(tensors.pop() if len(tensors) == 1 else None, any(one.trained for one in values))


def _product(step: Any, given: Sequence[_Origin], times: int) -> _Product | None:
    """Return the matrix product or convolution that an operation computes; None for another operation."""
    name = step.primitive.name
    if name not in ("dot_general", "conv_general_dilated"):
        return None
    shapes = [value.aval.shape for value in step.invars]
    writes = math.prod(step.outvars[0].aval.shape)
    if name == "dot_general":
        (contracted, _), _ = step.params["dimension_numbers"]
        kind, summed = "linear", math.prod(shapes[0][axis] for axis in contracted)
    else:
        outputs = shapes[1][step.params["dimension_numbers"].rhs_spec[0]]
        kind, summed = "convolution", math.prod(shapes[1]) // outputs
    weights = [place for place, one in enumerate(given) if one.tensor is not None]
    others = [place for place in range(len(given)) if place != (weights[0] if weights else None)]
    tensor = given[weights[0]].tensor if weights else None
    return _Product(
        tensor,
        kind if weights else "product",
        times * writes * summed,
        summed,
        times * sum(math.prod(shapes[place]) for place in others),
        times * writes,
        not any(given[place].trained for place in others),
    )
