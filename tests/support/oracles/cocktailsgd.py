"""CocktailSGD: Wang, Lu, Yuan, Chen, Liang, De Sa, Ré, Zhang, "CocktailSGD: Fine-tuning Foundation Models over 500Mbps
Networks", ICML 2023; the algorithm as in the authors' code (DS3Lab/CocktailSGD, `dist_dp_cocktail_sgd.py`).

    every worker has its model x_i and all share the reference x̄; x_i = x̄ + (what worker i has not yet told)
    M: random set of elements, the same for all workers          random sparsification
    C(v) = Q(TopK(v))                                            top-k among M, then quantization
    c_i = C((x_i − x̄)_M);   x_i,M ← x_i,M − c_i
    s = 1/n Σ_i c_i + e_M;  ŝ = C(s);   e_M ← s − ŝ              the server compresses the mean, with error feedback
    x_i,M ← x_i,M + ŝ;      x̄_M ← x̄_M + ŝ
    x_i ← x_i − γ ∇f_i                                           local step

Differences of models are compressed, so each worker's error feedback is x_i − x̄ itself; only the server keeps an e.

Left open, and settled here:
* When the local step happens. The code exchanges models while the gradient is computed: ∇f_i is taken at x_i before the
  exchange, and applied after it. `overlap` False computes it after the exchange.
* M: any of the code's three rules (rolling stride, with or without replacement); the caller gives the masks.
* k: the fraction of M given, at least 1 element. Ties: the lower index wins.
* Q, in buckets of consecutive kept values (in the code the buckets are strided and the scale is rounded to float16):
  scale = max |v|;  q = clip(round(v/scale · 2^(bits−1)), −2^(bits−1), 2^(bits−1) − 1);  decoded q / 2^(bits−1) · scale.
  Halves are rounded to even. The largest positive value of a bucket therefore loses one step to clipping.
* Every worker is the server of one part of the model in the code; one server here. With top-k over the whole model
  instead of over each part, the results differ unless k is all.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from support.oracles.interfaces import Array, Gradient


class CocktailSGD(NamedTuple):
    """Models x_i after each step, of shape (n, d); x̄ and the server's error e at the end."""

    models: list[Array]
    reference: Array
    error: Array


def quantize(v: Array, bits: int, bucket: int) -> Array:
    """The values after encoding with `bits` bits and decoding."""
    out = np.zeros_like(v)
    levels = 2 ** (bits - 1)
    for start in range(0, len(v), bucket):
        part = v[start : start + bucket]
        scale = np.abs(part).max()
        if scale > 0:
            out[start : start + bucket] = np.clip(np.round(part / scale * levels), -levels, levels - 1) / levels * scale
    return out


def compress(v: Array, fraction: float, bits: int | None, bucket: int) -> Array:
    """C(v): quantized values of the largest elements, kept in the order of their indices; zeros elsewhere."""
    kept = np.sort(np.argsort(-np.abs(v), kind="stable")[: max(int(fraction * len(v)), 1)])
    out = np.zeros_like(v)
    out[kept] = v[kept] if bits is None else quantize(v[kept], bits, bucket)
    return out


def cocktailsgd(
    x: Array,
    gradient: Gradient,
    masks: Sequence[NDArray[np.bool_]],
    *,
    n: int,
    gamma: float,
    compression: tuple[float, int | None, int],
    overlap: bool = True,
) -> CocktailSGD:
    """Run one step per mask. `compression`: fraction of top-k, bits (None keeps values) and bucket."""
    models = []
    x_i, reference, error = np.tile(x, (n, 1)), x.copy(), np.zeros_like(x)
    for t, M in enumerate(masks):
        g = np.stack([gradient(i, x_i[i], t) for i in range(n)])
        c = np.stack([compress((x_i[i] - reference)[M], *compression) for i in range(n)])
        s = c.mean(axis=0) + error[M]
        told = compress(s, *compression)
        error[M] = s - told
        x_i[:, M] = x_i[:, M] - c + told
        reference[M] = reference[M] + told
        if not overlap:
            g = np.stack([gradient(i, x_i[i], t) for i in range(n)])
        x_i = x_i - gamma * g
        models.append(x_i.copy())
    return CocktailSGD(models, reference, error)


if __name__ == "__main__":
    from support.oracles.quadratics import quadratics

    problem = quadratics(3, 12, np.random.default_rng(0))
    start = np.zeros(12)
    everything = np.ones(12, dtype=bool)
    run = cocktailsgd(start, problem.gradient, [everything] * 6, n=3, gamma=0.1, compression=(1.0, None, 4))
    # Without compression the models agree before the last local step, and x̄ holds the mean of all steps before it.
    np.testing.assert_allclose(run.reference, np.mean(run.models[-2], axis=0))
    rng = np.random.default_rng(1)
    masks = [rng.permutation(12) < 6 for _ in range(8000)]
    short = cocktailsgd(start, problem.gradient, masks[:50], n=3, gamma=0.01, compression=(0.5, 4, 4))
    # Nothing is lost: mean(x_i) + e is the start minus all local steps.
    steps = 0.01 * sum(
        np.mean([problem.gradient(i, x[i]) for i in range(3)], axis=0)
        for x in [np.tile(start, (3, 1)), *short.models[:-1]]
    )
    np.testing.assert_allclose(short.models[-1].mean(axis=0) + short.error, start - steps, atol=1e-12)
    for overlap in (True, False):
        far = cocktailsgd(start, problem.gradient, masks, n=3, gamma=0.003, compression=(0.5, 4, 4), overlap=overlap)
        late = np.mean(far.models[-2000:], axis=(0, 1))
        assert np.linalg.norm(late - problem.optimum()) < 0.1
    np.testing.assert_allclose(quantize(np.array([1.0, -1.0, 0.3, 0.0]), 3, 4), [0.75, -1.0, 0.25, 0.0])
