"""Muon: Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein, "Muon: An optimizer for hidden layers in neural
networks", 2024 (kellerjordan.github.io/posts/muon); with weight decay: Liu, Su et al., "Muon is Scalable for LLM
Training" (Moonlight), 2025 (arXiv 2502.16982).

    B_t = μ B_{t−1} + G_t
    O_t = NewtonSchulz5(μ B_t + G_t) with Nesterov momentum, NewtonSchulz5(B_t) without
    W_t = W_{t−1} − η s O_t                         Jordan:    s = √max(1, rows/columns)
    W_t = W_{t−1} − η (s O_t + λ W_{t−1})           Moonlight: s = 0.2 √max(rows, columns)
    NewtonSchulz5:  X ← G/(‖G‖_F + ε);  5 times:  A = X Xᵀ,  X ← a X + (b A + c A A) X
    with (a, b, c) = (3.4445, −4.7750, 2.0315); a matrix with more rows than columns is transposed before and after

Left open, and settled here:
* The blog post's pseudocode has no s; the authors' repository multiplies by √max(1, rows/columns).
* The repository averages, B ← μ B + (1 − μ) G and (1 − μ) G + μ B; this is (1 − μ) times the above and gives the same
  O_t, as the iteration normalizes its input (up to ε = 1e-7).
* The iteration runs in bfloat16 in the repositories, in float64 here: compare with a tolerance of bfloat16 (2^−8).
* Weight decay is decoupled and is not multiplied by s.
* W_{t−1} in the decay is the matrix before the step.
"""

import numpy as np

from support.oracles.interfaces import Array


def newton_schulz5(G: Array, steps: int = 5) -> Array:
    """A matrix with the singular vectors of G and singular values of about 0.7 to 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.T if G.shape[0] > G.shape[1] else G
    X = X / (np.linalg.norm(X) + 1e-7)
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.shape[0] > G.shape[1] else X


def jordan_scale(rows: int, columns: int) -> float:
    """s of Jordan's repository."""
    return max(1, rows / columns) ** 0.5


def moonlight_scale(rows: int, columns: int) -> float:
    """s of Moonlight, which gives updates the root mean square of AdamW's, about 0.2."""
    return float(0.2 * max(rows, columns) ** 0.5)


def muon_step(
    W: Array, B: Array, G: Array, *, eta: float, mu: float = 0.95, nesterov: bool = True, decay: float | None = None
) -> tuple[Array, Array]:
    """W_t and B_t. `decay` None is Jordan's rule, a number λ Moonlight's."""
    B = mu * B + G
    O = newton_schulz5(mu * B + G if nesterov else B)  # noqa: E741
    if decay is None:
        return W - eta * jordan_scale(*W.shape) * O, B
    return W - eta * (moonlight_scale(*W.shape) * O + decay * W), B


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    for shape in ((6, 4), (4, 6), (5, 5)):
        G = rng.normal(size=shape)
        U, S, Vt = np.linalg.svd(G, full_matrices=False)
        O = newton_schulz5(G)  # noqa: E741
        singular = np.diag(U.T @ O @ Vt.T)
        np.testing.assert_allclose(U @ np.diag(singular) @ Vt, O, atol=1e-12)  # the singular vectors of G
        assert singular.min() > 0.5
        assert singular.max() < 1.3
        np.testing.assert_allclose(newton_schulz5(G.T), O.T)
        np.testing.assert_allclose(newton_schulz5(20 * G), O, atol=1e-6)  # the length of G does not matter
        W, B = muon_step(np.zeros(shape), np.zeros(shape), G, eta=0.1)
        np.testing.assert_allclose(W, -0.1 * max(1, shape[0] / shape[1]) ** 0.5 * newton_schulz5(1.95 * G))
        decayed, _ = muon_step(np.ones(shape), np.zeros(shape), G, eta=0.1, decay=0.5)
        undecayed, _ = muon_step(np.ones(shape), np.zeros(shape), G, eta=0.1, decay=0.0)
        np.testing.assert_allclose(undecayed - decayed, 0.1 * 0.5)
    # One step's root mean square is about 0.2 with Moonlight's scale.
    big, _ = muon_step(np.zeros((64, 32)), np.zeros((64, 32)), rng.normal(size=(64, 32)), eta=1.0, decay=0.1)
    assert 0.15 < np.sqrt(np.mean(big**2)) < 0.25
