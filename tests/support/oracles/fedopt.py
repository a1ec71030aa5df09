"""FedAdagrad, FedYogi, FedAdam: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan,
"Adaptive Federated Optimization", ICLR 2021, algorithm 2.

    Initialization: x_0, v_{−1} ≥ τ², β1, β2 ∈ [0, 1)
    each client i ∈ S:  x_{i,0}^t = x_t;  x_{i,k+1}^t = x_{i,k}^t − η_l g_{i,k}^t for k < K;  Δ_i^t = x_{i,K}^t − x_t
    Δ_t = 1/|S| Σ_{i∈S} Δ_i^t
    m_t = β1 m_{t−1} + (1 − β1) Δ_t
    v_t = v_{t−1} + Δ_t²                                         FedAdagrad
    v_t = v_{t−1} − (1 − β2) Δ_t² sign(v_{t−1} − Δ_t²)           FedYogi
    v_t = β2 v_{t−1} + (1 − β2) Δ_t²                             FedAdam
    x_{t+1} = x_t + η m_t / (√v_t + τ)

Left open, and settled here:
* v_{−1} is any vector of at least τ²; this takes τ² (the paper's experiments do). m_{−1} = 0.
* There is no bias correction: the first step of FedAdam has m_0 = (1 − β1) Δ_0 and v_0 = β2 τ² + (1 − β2) Δ_0².
* FedAdagrad has m_t too (algorithm 2 shares the line); the experiments set β1 = 0 for it. The argument decides.
* The mean over S has equal weights in algorithm 2; the experiments weigh by the numbers of examples: `sizes`.
* sign(0) = 0 in FedYogi.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from support.oracles.interfaces import Array, Gradient, Rounds


class FedOpt(NamedTuple):
    """Models after each round; m and v after the last round."""

    models: list[Array]
    m: Array
    v: Array


def adagrad(v: Array, square: Array, beta2: float) -> Array:
    """v_t of FedAdagrad, which has no β2."""
    return v + square


def yogi(v: Array, square: Array, beta2: float) -> Array:
    """v_t of FedYogi."""
    return v - (1 - beta2) * square * np.sign(v - square)


def adam(v: Array, square: Array, beta2: float) -> Array:
    """v_t of FedAdam."""
    return beta2 * v + (1 - beta2) * square


def server_step(
    x: Array,
    delta: Array,
    m: Array,
    v: Array,
    second_moment: Callable[[Array, Array, float], Array],
    *,
    eta: float,
    betas: tuple[float, float],
    tau: float,
) -> tuple[Array, Array, Array]:
    """x_{t+1}, m_t and v_t."""
    m = betas[0] * m + (1 - betas[0]) * delta
    v = second_moment(v, delta**2, betas[1])
    return x + eta * m / (np.sqrt(v) + tau), m, v


def fedopt(
    x: Array,
    gradient: Gradient,
    rounds: Rounds,
    second_moment: Callable[[Array, Array, float], Array],
    *,
    rates: tuple[float, float],
    betas: tuple[float, float] = (0.9, 0.99),
    tau: float = 1e-3,
    sizes: Sequence[int] | None = None,
) -> FedOpt:
    """Run algorithm 2. `rates` are η_l and η; `second_moment` is `adagrad`, `yogi` or `adam`."""
    models = []
    m, v = np.zeros_like(x), np.full_like(x, tau**2)
    step: Counter[int] = Counter()
    for S in rounds:
        shares = {i: 1.0 if sizes is None else float(sizes[i]) for i in S}
        delta = np.zeros_like(x)
        for i, K in S.items():
            x_i = x.copy()
            for _ in range(K):
                x_i = x_i - rates[0] * gradient(i, x_i, step[i])
                step[i] += 1
            delta = delta + shares[i] / sum(shares.values()) * (x_i - x)
        x, m, v = server_step(x, delta, m, v, second_moment, eta=rates[1], betas=betas, tau=tau)
        models.append(x)
    return FedOpt(models, m, v)


if __name__ == "__main__":
    from support.oracles.quadratics import quadratics

    problem = quadratics(3, 4, np.random.default_rng(0))
    start = np.full(4, 3.0)
    delta = -0.1 * problem.mean_gradient(start)
    for rule, second in ((adagrad, 1e-6 + delta**2), (adam, 0.99e-6 + 0.01 * delta**2), (yogi, 1e-6 + 0.01 * delta**2)):
        first = fedopt(start, problem.gradient, [{0: 1, 1: 1, 2: 1}], rule, rates=(0.1, 0.5))
        np.testing.assert_allclose(first.models[0], start + 0.5 * 0.1 * delta / (np.sqrt(second) + 1e-3))
        run = fedopt(start, problem.gradient, [{0: 1, 1: 1, 2: 1}] * 2000, rule, rates=(0.1, 0.5), tau=0.1)
        np.testing.assert_allclose(run.models[-1], problem.optimum(), atol=1e-4)
