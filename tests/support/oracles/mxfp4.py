"""MXFP4: "OCP Microscaling Formats (MX) Specification", version 1.0, 2023, sections 5.1, 5.3.3, 5.4.1 and 6.3.

    block of k = 32 values V_i:  one scale X in E8M0 and 32 elements P_i in E2M1;  decoded value v_i = X P_i
    X = 2^(⌊log2 max|V_i|⌋ − emax),  emax = 2 for E2M1, the exponent of its largest number 6 = 1.5 · 2²
    P_i = V_i / X rounded to E2M1, to nearest with ties to even; beyond ±6: ±6
    E2M1 (bias 1): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, codes 0 to 7, sign in bit 3; no infinities, no NaN
    E8M0: code c is 2^(c − 127), c = 0 … 254; c = 255 is NaN; no zero, no sign

Left open, and settled here:
* X outside E8M0: clamped to 2^−127 … 2^127. Only small blocks can meet it (float32 has max ≥ 2^−149).
* A block of zeros: the smallest scale, code 0 (the specification leaves X open; all elements are ± 0 anyway).
* A block with NaN or infinity: scale code 255, so that all 32 values decode to NaN; element codes 0.
* A length that 32 does not divide: the last block is filled with zeros, which decoding cuts off.
* Elements are one code per byte here; how two are packed in a byte is left to the memory layout.
* max|V_i| is rounded down to a power of two, so elements between 6 X and 8 X become 6 X.
"""

import numpy as np
from numpy.typing import NDArray

from support.oracles.float8 import E2M1, Codes, magnitudes
from support.oracles.float8 import encode as encode_elements
from support.oracles.interfaces import Array

BLOCK = 32


def encode(x: NDArray[np.float32]) -> tuple[Codes, Codes]:
    """Scale codes of shape (blocks,) and element codes of shape (blocks, 32)."""
    V = np.zeros((-(-len(x) // BLOCK), BLOCK))
    V.ravel()[: len(x)] = x
    broken = ~np.isfinite(V).all(axis=1)
    V[broken] = 0.0
    largest = np.abs(V).max(axis=1)
    floor_log2 = np.frexp(largest)[1] - 1
    exponent = np.where(largest > 0, np.clip(floor_log2 - 2, -127, 127), -127)
    elements = encode_elements(V / 2.0 ** exponent[:, None], E2M1, saturate=True)
    return np.where(broken, 255, exponent + 127).astype(np.uint8), elements


def decode(scales: Codes, elements: Codes, length: int) -> Array:
    """The first `length` values."""
    X = np.where(scales == 255, np.nan, 2.0 ** (scales.astype(int) - 127))
    P = magnitudes(E2M1)[elements & 7] * np.where(elements >> 3, -1.0, 1.0)
    return (X[:, None] * P).ravel()[:length]


if __name__ == "__main__":
    import ml_dtypes

    np.testing.assert_array_equal(magnitudes(E2M1)[:8], [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = np.linspace(-9, 9, 3601)
    theirs = np.clip(grid, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    ours = encode_elements(grid, E2M1, saturate=True)
    np.testing.assert_array_equal(magnitudes(E2M1)[ours & 7] * np.where(ours >> 3, -1, 1), theirs)
    rng = np.random.default_rng(0)
    x = (rng.normal(size=1000) * 2.0 ** rng.uniform(-60, 60, size=1000)).astype(np.float32)
    scales, elements = encode(x)
    back = decode(scales, elements, 1000)
    twice = decode(*encode(back.astype(np.float32)), 1000)
    np.testing.assert_array_equal(twice, back)  # what has been decoded is encoded without loss
    step = np.repeat(2.0 ** (scales.astype(int) - 127), 32)[:1000]
    assert (np.abs(back - x) <= np.maximum(step, np.abs(x) - 6 * step)).all()
    assert encode(np.array([7.0], np.float32))[0][0] == 127
    assert decode(*encode(np.array([7.0, -0.3, 0.25, 0.75], np.float32)), 4).tolist() == [6.0, -0.5, 0.0, 1.0]
    assert np.isnan(decode(*encode(np.array([1.0, np.inf], np.float32)), 2)).all()
    assert decode(*encode(np.zeros(40, np.float32)), 40).tolist() == [0.0] * 40
    assert encode(np.array([2.0**-149], np.float32))[0][0] == 0
