"""SparseLoCo: Sarfi, Thérien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", 2025
(arXiv 2508.15706), algorithm 1.

    θ_r: replica r after H inner steps from θ;  Δ_r = θ − θ_r                   pseudo-gradient
    e_r ← β e_r + Δ_r                                                          error feedback in the place of momentum
    Δ̂_r = Q(TopK(e_r))                                                         the k largest |e_r| of every chunk
    e_r ← e_r − Δ̂_r
    θ ← θ − α 1/R Σ_r Δ̂_r

Left open, and settled here:
* Chunks. Matrices are cut into tiles of 64 × 64 in the authors' code, vectors into pieces; here the model is a vector
  and chunks are consecutive pieces, the last may be shorter (`tiles` brings a matrix into that order). Ties: the lower
  index wins.
* Q. The paper says 2 bits. The authors' code (tplr-ai/templar, `compress.py`) centers the kept values of a tensor by
  their mean, cuts 6 standard deviations (divisor: number − 1) into 2^bits bins, with
  code = clip(round(v/scale + 2^(bits−1))), scale = 6 std / 2^bits, halves rounded to even. A code is decoded as the
  mean of the values that have it, plus the mean that was taken off. `quantize` is that; scale 1 if all values are
  equal. One table serves all chunks of a tensor.
* What quantization loses stays in e_r, since e_r − Δ̂_r is taken after Q.
* The authors' code scales Δ_r by the outer learning rate before it enters e_r, and averages every element over only the
  replicas that sent it, after clipping norms to their median; algorithm 1 does neither, so neither does this.
* Inner optimizer: AdamW in the paper, gradient steps with learning rate `lr` here.
"""

from typing import NamedTuple

import numpy as np

from support.oracles.interfaces import Array, Gradient


class SparseLoCo(NamedTuple):
    """Models θ after each round; error feedback e_r after the last round, of shape (replicas, d)."""

    models: list[Array]
    e: Array


def tiles(matrix: Array, height: int, width: int) -> Array:
    """The matrix as a vector, tile after tile; a chunk of height · width elements is then one tile."""
    rows, columns = matrix.shape
    cut = matrix.reshape(rows // height, height, columns // width, width)
    return cut.transpose(0, 2, 1, 3).ravel()


def top_k(x: Array, chunk: int, k: int) -> Array:
    """Mask of the k largest magnitudes of every chunk."""
    mask = np.zeros(len(x), dtype=bool)
    for start in range(0, len(x), chunk):
        largest = np.argsort(-np.abs(x[start : start + chunk]), kind="stable")[:k]
        mask[start + largest] = True
    return mask


def quantize(values: Array, bits: int, sigmas: float = 6.0) -> Array:
    """The values after encoding with `bits` bits each and decoding."""
    centered = values - values.mean()
    scale = sigmas * np.std(centered, ddof=1) / 2**bits if np.ptp(values) > 0 else 1.0
    codes = np.clip(np.round(centered / scale + 2 ** (bits - 1)), 0, 2**bits - 1)
    table = {code: centered[codes == code].mean() for code in np.unique(codes)}
    return np.array([table[code] for code in codes]) + values.mean()


def sparseloco(
    theta: Array,
    gradient: Gradient,
    rounds: int,
    *,
    shape: tuple[int, int],
    lr: float,
    outer: tuple[float, float],
    compression: tuple[int, int, int | None],
) -> SparseLoCo:
    """Run algorithm 1. `shape`: R and H; `outer`: α and β; `compression`: chunk, k and bits (None: exact)."""
    (R, H), (alpha, beta), (chunk, k, bits) = shape, outer, compression
    models, e = [], np.zeros((R, *theta.shape))
    for t in range(rounds):
        sent = np.zeros_like(e)
        for r in range(R):
            theta_r = theta.copy()
            for h in range(H):
                theta_r = theta_r - lr * gradient(r, theta_r, t * H + h)
            e[r] = beta * e[r] + theta - theta_r
            mask = top_k(e[r], chunk, k)
            sent[r, mask] = e[r, mask] if bits is None else quantize(e[r, mask], bits)
        e = e - sent
        theta = theta - alpha * sent.mean(axis=0)
        models.append(theta)
    return SparseLoCo(models, e)


if __name__ == "__main__":
    from support.oracles.quadratics import quadratics

    problem = quadratics(3, 12, np.random.default_rng(0))
    start = np.zeros(12)
    dense = sparseloco(start, problem.gradient, 5, shape=(3, 2), lr=0.1, outer=(0.8, 0.9), compression=(6, 6, None))
    assert not dense.e.any(), "nothing is left if all is sent"
    theta = start
    for model in dense.models:
        once = [theta - 0.1 * problem.gradient(r, theta) for r in range(3)]
        twice = [w - 0.1 * problem.gradient(r, w) for r, w in enumerate(once)]
        theta = theta - 0.8 * (theta - np.mean(twice, axis=0))
        np.testing.assert_allclose(model, theta)
    run = sparseloco(start, problem.gradient, 1, shape=(3, 2), lr=0.1, outer=(1.0, 0.9), compression=(6, 2, 2))
    change = np.stack([0.1 * problem.gradient(r, start) for r in range(3)])
    change += [0.1 * problem.gradient(r, start - change[r]) for r in range(3)]
    np.testing.assert_allclose(run.e.mean(axis=0) - run.models[0] + start, change.mean(axis=0))  # nothing is lost
    assert (np.count_nonzero(run.e == change, axis=1) >= 12 - 2 * 2).all(), "elements not sent stay whole"
    values = np.random.default_rng(1).normal(size=1000)
    for bits in (2, 4, 8):
        assert len(np.unique(quantize(values, bits))) <= 2**bits
        assert abs(quantize(values, bits).mean() - values.mean()) < 1e-12, "means of bins keep the mean"
    long = sparseloco(start, problem.gradient, 6000, shape=(3, 2), lr=0.01, outer=(0.3, 1.0), compression=(6, 2, 2))
    assert np.linalg.norm(np.mean(long.models[-2000:], axis=0) - problem.optimum()) < 0.1
    assert (tiles(np.arange(16.0).reshape(4, 4), 2, 2)[:4] == [0, 1, 4, 5]).all()
