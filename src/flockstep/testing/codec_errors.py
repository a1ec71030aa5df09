"""Checks that a codec's errors are as declared: bounds, means, sums and contraction.

Means over random encodings must agree within four standard errors. A mean that does not agree is computed again over
four times as many draws, so that a correct codec fails by chance only about once in a billion means.
"""

from __future__ import annotations

import numpy as np

from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec
from flockstep.testing.samples import ROUNDING, SMALLEST, exact, samples

DRAWS = 400
FEW = 24
"""Number of random encodings for checks that only test an upper bound."""
SIGMAS = 4.0


def draw(codec: Codec, array: FlatArray, seed: int) -> FlatArray:
    """Return the array, as flat float64, that a receiver decodes from the encoding of `array`.

    `seed` determines the random numbers. A codec whose workers share random numbers is bound to step `seed`.
    """
    one = codec.bind_step(seed) if codec.shares_seed else codec
    data = one.encode(array, np.random.default_rng((seed, 1)))
    return exact(one.decode(data, array.size, array.dtype.name))


def check_error_bound(codec: Codec, array: FlatArray) -> None:
    """Check that the mean squared error ||x - decode(encode(x))||² is at most `error_bound(x)` and, if the codec
    declares a `variance`, at most variance · ||x||².

    The bound covers the encoding; the rounding of the result to the array's dtype may add to the error.
    """
    norm, size, dtype = float(np.sum(exact(array) ** 2)), array.size, array.dtype.name
    bounds = {"error_bound": codec.error_bound(array)}
    omega = codec.variance(size)
    if omega is not None:
        bounds["variance"] = omega * norm
    for what, bound in bounds.items():
        # Rounding moves a decoded vector by at most its length times the dtype's relative error.
        rounding = ROUNDING[dtype] * 2 * (np.sqrt(norm) + np.sqrt(bound)) + SMALLEST[dtype] * np.sqrt(size)
        allowed = (np.sqrt(bound) + rounding) ** 2 * (1 + 1e-9)
        mean, error = _squared_error(codec, array, allowed)
        assert mean <= allowed + SIGMAS * error, (
            f"{codec} on {size} elements of {dtype}: {what} promises a squared error of at most {bound:.4g}, got "
            f"{mean:.4g}"
        )


def _squared_error(codec: Codec, array: FlatArray, limit: float) -> tuple[float, float]:
    """Mean and standard error of ||x - decode(encode(x))||², over more draws if a few of them exceed `limit`."""
    x = exact(array)

    def one(seed: int) -> float:
        return float(np.sum((x - draw(codec, array, seed)) ** 2))

    if one(0) == one(1) == one(2) <= limit:  # not random, or of no consequence; a few elements may agree by chance
        return one(0), 0.0
    for begin, count in ((0, FEW), (FEW, 4 * FEW)):
        values = np.array([one(seed) for seed in range(begin, begin + count)])
        mean, error = float(values.mean()), float(values.std() / np.sqrt(count))
        if mean <= limit + SIGMAS * error:
            break
    return mean, error


def check_unbiased(codec: Codec) -> None:
    """Check that the mean over many draws equals the array, element by element and in several random directions."""
    random = np.random.default_rng(1)
    for dtype in ("float32", "float64"):
        array = random.normal(size=64).astype(numpy_dtype(dtype))
        x = exact(array)
        directions = np.vstack([x, np.ones(64), np.sign(x), random.normal(size=(3, 64)), np.eye(64)])
        wanted = directions @ x
        for begin, count in ((0, DRAWS), (DRAWS, 4 * DRAWS)):
            drawn = np.stack([draw(codec, array, seed) for seed in range(begin, begin + count)])
            seen = drawn @ directions.T
            # An element that was never drawn shows no variance, so it may be as far off as a typical element.
            spread = seen.std(axis=0)
            spread[6:] = np.maximum(spread[6:], np.sqrt((spread[6:] ** 2).mean()))
            allowed = SIGMAS * spread / np.sqrt(count) + (1e-10 + 4 * ROUNDING[dtype]) * np.abs(directions) @ np.abs(x)
            off = np.abs(seen.mean(axis=0) - wanted)
            worst = int(np.argmax(off - allowed))
            if off[worst] <= allowed[worst]:
                break
        assert off[worst] <= allowed[worst], (
            f"{codec} is declared unbiased, but the mean of {count} draws of {wanted[worst]:.6g} is "
            f"{seen.mean(axis=0)[worst]:.6g}, which is off by more than {allowed[worst]:.2g}"
        )


def check_linear(codec: Codec, array: FlatArray) -> None:
    """Check that encodings with equal random draws can be added: the sum of their `terms` decodes to the sum of the
    decoded arrays.
    """
    dtype, random = array.dtype.name, np.random.default_rng(2)
    first = array.reshape(-1)
    second = (exact(array) * random.normal(size=array.size)).astype(array.dtype)
    one, other = (codec.encode(part, np.random.default_rng(9)).copy() for part in (first, second))
    parts = [exact(codec.decode(part, array.size, dtype)) for part in (one, other)]
    apart, operands = parts[0] + parts[1], np.abs(parts[0]) + np.abs(parts[1])
    total = codec.terms(one, array.size, dtype)
    total += codec.terms(other, array.size, dtype)
    together = exact(codec.decode(one, array.size, dtype))
    largest = float(np.abs([exact(first), exact(second)]).max(initial=0)) if array.size else 0.0
    allowed = 64 * ROUNDING[dtype] * (operands + largest * (not codec.sparse)) + 4 * SMALLEST[dtype]
    off = np.abs(apart - together)
    assert (off <= allowed).all(), (
        f"{codec} is declared linear, but on {array.size} elements of {dtype} the sum of two encodings decodes to "
        f"{together[np.argmax(off - allowed)]:.6g} instead of {apart[np.argmax(off - allowed)]:.6g}"
    )


def check_contraction(codec: Codec) -> None:
    """Check that the mean squared error is below the squared norm at several scales, and that zeros stay zero."""
    assert not draw(codec, np.zeros(33), 0).any(), f"{codec} is declared a contraction, but changes zeros"
    for array in samples("float32"):
        for scale in (1e-3, 1.0, 1e3):
            scaled = exact(array) * scale
            norm = float(np.sum(scaled**2))
            # A random choice of elements may miss a single one in every draw, never half of many.
            several = np.count_nonzero(scaled) > 1
            mean, error = _squared_error(codec, scaled, norm)
            low = mean - SIGMAS * error
            assert low < norm if several else low <= norm, (
                f"{codec} is declared a contraction, but the mean squared error {mean:.3g} of {scaled.size} elements "
                f"is not below their squared norm {norm:.3g}"
            )
