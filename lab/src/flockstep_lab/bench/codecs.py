"""Encoding and decoding rates of every codec, relative to a copy of the same float32 array, with torch.topk for
comparison.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flockstep import registry
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec
from flockstep.errors import FlockstepError
from flockstep.report.progress import ProgressCallback, silent

SIZE = 4 << 20
"""Number of elements of the measured array."""
ROUNDS = 20
SHAPE = (2048, -1)
"""Shape of the array for codecs that depend on the shapes of tensors."""
COPY = "numpy.copyto"
TOPK = "torch.topk of magnitudes, 1 %"
ALSO = ("topk(sampled=true)",)
"""Codecs that are measured in addition, with settings other than their defaults."""


@dataclass
class CodecFigure:
    """Rates of one codec, as multiples of the rate of copying the array; medians over the rounds."""

    codec: str
    bits: float | None = None
    """Mean number of encoded bits per element."""
    encode: float | None = None
    encode_residual: float | None = None
    add_decoded: float | None = None
    seconds: float | None = None
    """Seconds that the encoding of one array takes."""
    missing: str = ""


def measure(
    codecs: Sequence[str] | None = None,
    size: int = SIZE,
    rounds: int = ROUNDS,
    say: ProgressCallback = silent,
) -> list[CodecFigure]:
    """Measure every codec in turn in each round, and return the medians. Each round also times a copy of the array."""
    array = np.random.default_rng(0).standard_normal(size, np.float32)
    actions: dict[str, dict[str, Callable[[], object]]] = {COPY: {"encode": _copy_of(array)}}
    found: dict[str, CodecFigure] = {COPY: CodecFigure(COPY, 32.0)}
    for text in [*registry.names("codec"), *ALSO] if codecs is None else codecs:
        for name, shape in _shapes(text, array):
            found[name] = CodecFigure(name)
            try:
                actions[name] = _actions(Codec.parse(text).bind_shapes((shape,)).bind_step(0), array, found[name])
            except FlockstepError as error:
                found[name].missing = str(error)
    if importlib.util.find_spec("torch") is None:
        found[TOPK] = CodecFigure(TOPK, missing="pip install torch")
    else:
        found[TOPK] = CodecFigure(TOPK)
        actions[TOPK] = {"encode": _topk_of(array)}
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(-1, rounds):  # the first round warms up
        say(f"round {number + 1} of {rounds}", number + 1, rounds + 1)
        for name, mine in actions.items():
            for what, action in mine.items():
                start = time.perf_counter()
                action()
                if number >= 0:
                    times.setdefault((name, what), []).append(time.perf_counter() - start)
    copying = times[COPY, "encode"]
    for (name, what), spent in times.items():
        setattr(found[name], what, statistics.median(a / b for a, b in zip(copying, spent, strict=True)))
        if what == "encode":
            found[name].seconds = statistics.median(spent)
    return list(found.values())


def _shapes(text: str, array: FlatArray) -> list[tuple[str, tuple[int, ...]]]:
    """The codec on the array as one vector; if the codec treats a matrix differently, also on the array as a matrix."""
    codec, flat, rows = Codec.parse(text), (array.size,), math.gcd(array.size, SHAPE[0])
    matrix = (rows, array.size // rows)
    if codec.bind_shapes((flat,)) == codec.bind_shapes((matrix,)):
        return [(text, flat)]
    return [(text, flat), (f"{text}, as a matrix of {rows:,} rows", matrix)]


def _actions(codec: Codec, array: FlatArray, figure: CodecFigure) -> dict[str, Callable[[], object]]:
    random, error, out = np.random.default_rng(0), np.zeros_like(array), np.zeros_like(array)
    data = codec.encode(array, random)
    figure.bits = 8 * data.size / max(array.size, 1)
    return {
        "encode": lambda: codec.encode(array, random),
        "encode_residual": lambda: codec.encode_residual(array, error, random),
        "add_decoded": lambda: codec.add_decoded(data, out, 0.5),
    }


def _copy_of(array: FlatArray) -> Callable[[], object]:
    to = np.empty_like(array)
    return lambda: np.copyto(to, array)


def _topk_of(array: FlatArray) -> Callable[[], object]:
    import torch

    torch.set_num_threads(1)  # one thread, as for all others here
    tensor, k = torch.from_numpy(array), max(1, array.size // 100)
    return lambda: tensor.abs().topk(k)
