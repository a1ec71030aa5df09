"""Measures the throughput of codecs and optimizers, in elements per second, in one process of this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from flockstep.codecs.base import Codec, Shape
from flockstep.costs.machines import Rates
from flockstep.errors import ConfigurationError
from flockstep.optimizers.base import Optimizer

ELEMENTS = 1 << 20
"""Number of elements of the arrays on which rates are measured, equal to that of a model of 4 MB."""
ROUNDS = 5
PRODUCT = 512
"""Number of rows and columns of the square matrices whose product measures floating-point operations per second."""
CODECS = ("half",)
OPTIMIZERS = ("sgd(lr=0.1)", "adam(lr=0.001)")


def measure_rates(
    codecs: Sequence[str] = CODECS,
    optimizers: Sequence[str] = OPTIMIZERS,
    elements: int = ELEMENTS,
    rounds: int = ROUNDS,
    shapes: Sequence[Shape] = (),
) -> Rates:
    """Measure the elements per second of codecs and optimizers on float32 arrays: medians over rounds, after a warm-up
    that includes compilation.

    `shapes` gives the shapes of a model's tensors, instead of one matrix of `elements` elements.

    Raises:
        ConfigurationError: a codec or optimizer does not exist.
    """
    if elements < 1 or rounds < 1:
        raise ConfigurationError(f"elements and rounds must be >= 1, got {elements} and {rounds}; 5 rounds are usual")
    rows = math.gcd(elements, 1024)
    shapes = tuple(shapes) or ((rows, elements // rows),)
    elements = sum(map(math.prod, shapes))
    random = np.random.default_rng(0)
    array, out = random.standard_normal(elements, np.float32), np.zeros(elements, np.float32)
    encode: dict[str, float] = {}
    decode: dict[str, float] = {}
    steps: dict[str, float] = {}
    for text in codecs:
        codec = Codec.parse(text).bind_shapes(shapes).bind_step(0)
        data = codec.encode(array, random)
        encode[text] = _rate(elements, _encoding(codec, array, random), rounds)
        decode[text] = _rate(elements, _decoding(codec, data, out), rounds)
    for text in optimizers:
        steps[text.partition("(")[0]] = _rate(elements, _stepping(Optimizer.parse(text), array, out), rounds)
    return Rates(encode, decode, steps)


def measure_operations(size: int = PRODUCT, rounds: int = ROUNDS) -> float:
    """Return the floating-point operations per second of a product of two square float32 matrices: the median over
    rounds.
    """
    one, other = np.random.default_rng(0).standard_normal((2, size, size), np.float32)
    out = np.empty((size, size), np.float32)
    return _rate(2 * size**3, lambda: np.matmul(one, other, out=out), rounds)


def _encoding(codec: Codec, array: np.ndarray, random: np.random.Generator) -> Callable[[], object]:
    return lambda: codec.encode(array, random)


def _decoding(codec: Codec, data: np.ndarray, out: np.ndarray) -> Callable[[], object]:
    return lambda: codec.add_decoded(data, out, 0.5)


def _stepping(optimizer: Optimizer, params: np.ndarray, gradient: np.ndarray) -> Callable[[], object]:
    state = optimizer.init(params)
    state.tensors = (slice(0, len(params)),)
    return lambda: optimizer.step(params, gradient, state, 1e-3)


def _rate(elements: int, action: Callable[[], object], rounds: int) -> float:
    """Elements per second, rounded to four digits."""
    spent = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        action()
        if number:
            spent.append(time.perf_counter() - start)
    return float(f"{elements / statistics.median(spent):.4g}")
