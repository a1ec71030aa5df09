"""Adaptive clipping: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive Clipping",
NeurIPS 2021, algorithm 1 (DP-FedAvg-M with adaptive clipping).

    z_Δ = (z^{−2} − (2 σ_b)^{−2})^{−1/2}
    Q^t: m users, drawn uniformly
    user i:  Δ = θ_i − θ^t after local steps;  b_i = 1 if ‖Δ‖ ≤ C^t else 0;  Δ_i = Δ min(1, C^t/‖Δ‖)
    Δ̃^t = 1/m (Σ_i Δ_i + N(0, (z_Δ C^t)² I))
    Δ̄^t = β Δ̄^{t−1} + Δ̃^t;   θ^{t+1} = θ^t + η_s Δ̄^t
    b̃^t = 1/m (Σ_i b_i + N(0, σ_b²))
    C^{t+1} = C^t exp(−η_C (b̃^t − γ))

γ is the quantile of the norms that C follows: the fraction of updates that are not clipped. z is the noise multiplier
that both releases together amount to.

Left open, and settled here:
* σ_b must exceed z/2, else no z_Δ exists; the paper takes σ_b = m/20. With z = 0, z_Δ = 0.
* b counts norms of at most C (≤, as in algorithm 1 and in TensorFlow Privacy).
* TensorFlow Privacy limits b̃ to [0, 1] before the update of C; algorithm 1 does not, so neither does this.
* Δ̄^{−1} = 0. Δ̃ and b̃ of one round are made with C^t; C^{t+1} serves the next round.
* m is the number of users that algorithm 1 asks for, also if fewer come.
* Draws per round: `normal(size = d)` for Δ̃, then `normal()` for b̃.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from support.oracles.interfaces import Array, Gradient, Rounds


class AdaptiveClipping(NamedTuple):
    """Models after each round; the clipping bounds C^1, C^2, …; the server's momentum Δ̄ at the end."""

    models: list[Array]
    bounds: list[float]
    momentum: Array


def update_noise(z: float, sigma_b: float) -> float:
    """z_Δ."""
    return 0.0 if z == 0 else float((z**-2 - (2 * sigma_b) ** -2) ** -0.5)


def next_bound(C: float, b_noised: float, *, gamma: float, eta_C: float) -> float:
    """C^{t+1}."""
    return float(C * np.exp(-eta_C * (b_noised - gamma)))


def adaptive_clipping(
    theta: Array,
    gradient: Gradient,
    rounds: Rounds,
    rng: np.random.Generator,
    *,
    m: int,
    rates: tuple[float, float, float],
    noise: tuple[float, float],
    quantile: tuple[float, float, float],
) -> AdaptiveClipping:
    """Run algorithm 1. `rates`: η_c, η_s and β; `noise`: z and σ_b; `quantile`: C^0, γ and η_C."""
    (eta_c, eta_s, beta), (z, sigma_b), (C, gamma, eta_C) = rates, noise, quantile
    models, bounds = [], []
    momentum = np.zeros_like(theta)
    step: Counter[int] = Counter()
    for users in rounds:
        total, below = np.zeros_like(theta), 0.0
        for i, steps in users.items():
            theta_i = theta.copy()
            for _ in range(steps):
                theta_i = theta_i - eta_c * gradient(i, theta_i, step[i])
                step[i] += 1
            norm = float(np.linalg.norm(theta_i - theta))
            below += norm <= C
            total = total + (theta_i - theta) * min(1.0, C / max(norm, 1e-300))
        noised = (total + update_noise(z, sigma_b) * C * rng.normal(size=theta.shape)) / m
        momentum = beta * momentum + noised
        theta = theta + eta_s * momentum
        C = next_bound(C, (below + sigma_b * rng.normal()) / m, gamma=gamma, eta_C=eta_C)
        models.append(theta)
        bounds.append(C)
    return AdaptiveClipping(models, bounds, momentum)


if __name__ == "__main__":
    from support.oracles.fedavg import fedavg
    from support.oracles.quadratics import quadratics

    np.testing.assert_allclose(update_noise(1.0, 5.0) ** -2 + 10.0**-2, 1.0)
    problem = quadratics(8, 3, np.random.default_rng(0))
    everyone = [dict.fromkeys(range(8), 1)]
    silent = {"m": 8, "rates": (0.1, 1.0, 0.0), "noise": (0.0, 0.0)}
    free = adaptive_clipping(
        np.zeros(3), problem.gradient, everyone * 4, np.random.default_rng(1), quantile=(1e9, 0.5, 0.2), **silent
    )
    average = fedavg(np.zeros(3), problem.gradient, everyone * 4, eta=0.1, sizes=[1] * 8)
    np.testing.assert_allclose(free.models, average)
    np.testing.assert_allclose(free.bounds, 1e9 * np.exp(-0.2 * 0.5 * np.arange(1, 5)))
    # C goes to the quantile of norms that do not change: gradients 1, 2, …, 8 of constant length.
    for gamma in (0.3, 0.8):
        still = adaptive_clipping(
            np.zeros(1),
            lambda i, w, k: np.array([i + 1.0]),
            everyone * 400,
            np.random.default_rng(1),
            m=8,
            rates=(1.0, 0.0, 0.0),
            noise=(0.0, 0.0),
            quantile=(0.1, gamma, 0.2),
        )
        target = np.quantile(np.arange(1.0, 9.0), gamma)
        assert abs(np.mean(still.bounds[-100:]) - target) < 1.0
    noisy = adaptive_clipping(
        np.zeros(3),
        lambda i, w, k: 0 * w,
        everyone * 20000,
        np.random.default_rng(2),
        m=8,
        rates=(1.0, 1.0, 0.0),
        noise=(1.0, 3.0),
        quantile=(1.0, 1.0, 0.2),
    )
    steps = np.diff([np.zeros(3), *noisy.models], axis=0) / np.array([1.0, *noisy.bounds[:-1]])[:, None]
    np.testing.assert_allclose(np.std(steps, axis=0), update_noise(1.0, 3.0) / 8, rtol=0.03)
