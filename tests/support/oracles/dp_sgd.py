"""DP-SGD: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep Learning with Differential Privacy", CCS 2016,
algorithm 1.

    L_t: every example with probability L/N
    ḡ_t(x_i) = g_t(x_i) / max(1, ‖g_t(x_i)‖₂ / C),   g_t(x_i) = ∇L(θ_t, x_i)
    g̃_t = 1/L (Σ_i ḡ_t(x_i) + N(0, σ² C² I))
    θ_{t+1} = θ_t − η_t g̃_t

Left open, and settled here:
* L is the expected size of a lot, a constant, although the lot's size varies: dividing by the real size would tell it.
* The printed algorithm puts the noise inside the sum over i; it is added once per lot, as the analysis has it.
* `lots` is given; a lot may be empty. `sample_lots` draws lots by independent coins, as the analysis assumes.
* One draw of `normal(size = d)` per lot.
"""

from collections.abc import Callable, Sequence

import numpy as np

from support.oracles.interfaces import Array


def sample_lots(examples: int, L: float, steps: int, rng: np.random.Generator) -> list[list[int]]:
    """Lots of examples, each example in a lot with probability L/N."""
    return [np.flatnonzero(rng.random(examples) < L / examples).tolist() for _ in range(steps)]


def dp_sgd(
    theta: Array,
    gradient: Callable[[int, Array], Array],
    lots: Sequence[Sequence[int]],
    rng: np.random.Generator,
    *,
    L: float,
    eta: float,
    C: float,
    sigma: float,
) -> list[Array]:
    """Models after each lot. gradient(i, θ) is the gradient of example i alone."""
    models = []
    for lot in lots:
        total = np.zeros_like(theta)
        for i in lot:
            g = gradient(i, theta)
            total = total + g / max(1.0, float(np.linalg.norm(g)) / C)
        theta = theta - eta * (total + sigma * C * rng.normal(size=theta.shape)) / L
        models.append(theta)
    return models


if __name__ == "__main__":
    from support.oracles.quadratics import quadratics

    problem = quadratics(10, 3, np.random.default_rng(0))
    start, rng = np.zeros(3), np.random.default_rng(1)
    plain = dp_sgd(start, problem.gradient, [range(10)] * 400, rng, L=10, eta=0.3, C=1e9, sigma=0.0)
    np.testing.assert_allclose(plain[-1], problem.optimum(), atol=1e-9)
    # One example more changes the step by at most η C / L.
    (a,) = dp_sgd(start, problem.gradient, [[0, 1, 2]], rng, L=4, eta=0.3, C=0.2, sigma=0.0)
    (b,) = dp_sgd(start, problem.gradient, [[0, 1]], rng, L=4, eta=0.3, C=0.2, sigma=0.0)
    assert np.linalg.norm(a - b) <= 0.3 * 0.2 / 4 + 1e-15
    noise = [dp_sgd(start, problem.gradient, [[]], rng, L=4, eta=0.3, C=0.2, sigma=1.5)[0] for _ in range(20000)]
    np.testing.assert_allclose(np.std(noise, axis=0), 0.3 * 1.5 * 0.2 / 4, rtol=0.03)
    lots = sample_lots(10, 4, 20000, rng)
    assert abs(np.mean([len(lot) for lot in lots]) - 4) < 0.05
    assert abs(np.mean([3 in lot for lot in lots]) - 0.4) < 0.02
