"""D²: Tang, Lian, Yan, Zhang, Liu, "D²: Decentralized Training over Decentralized Data", ICML 2018, algorithm 1; and
exact diffusion: Yuan, Ying, Zhao, Sayed, "Exact Diffusion for Distributed Optimization and Learning, Part I:
Algorithm Development", IEEE Trans. Signal Process. 2019, algorithm 1.

    D²:               t = 0:  X_{1/2} = X_0 − γ G(X_0; ξ_0)
                      t ≥ 1:  X_{t+1/2} = 2 X_t − X_{t−1} − γ G(X_t; ξ_t) + γ G(X_{t−1}; ξ_{t−1})
                      X_{t+1} = W X_{t+1/2}
    exact diffusion:  ψ_{k,i} = w_{k,i−1} − μ ∇J_k(w_{k,i−1})        adapt, with ψ_{k,0} = w_{k,0}
                      φ_{k,i} = ψ_{k,i} + w_{k,i−1} − ψ_{k,i−1}      correct
                      w_{k,i} = Σ_l ā_{lk} φ_{l,i}                   combine, with Ā = (I + A) / 2

They are the same recursion: since ψ_i + w_{i−1} − ψ_{i−1} = 2 w_{i−1} − w_{i−2} − μ ∇J(w_{i−1}) + μ ∇J(w_{i−2}), exact
diffusion with combination matrix A is D² with W = (I + A)/2, also in the first step. The differences are in what the
papers assume: D² takes any symmetric doubly stochastic W whose eigenvalues exceed −1/3; exact diffusion halves A, which
makes every eigenvalue positive, and also allows left-stochastic A (with step sizes per worker, left out here). D² is
stated with stochastic gradients, exact diffusion (part I) with full ones.

Left open, and settled here:
* The gradient at X_{t−1} is the value computed in step t−1, on ξ_{t−1}: one gradient per worker and step.
* D² returns the mean of the rows at the end; the models here are the rows.
"""

from collections.abc import Sequence

import numpy as np

from support.oracles.interfaces import Array, Gradient


def d_squared(X: Array, gradient: Gradient, mixing: Sequence[Array], *, gamma: float) -> list[Array]:
    """X_1, …, X_T of shape (n, d), one step per matrix W of `mixing` (the paper has one W for all steps)."""
    models, before, G_before = [], X, np.zeros_like(X)
    for t, W in enumerate(mixing):
        G = np.stack([gradient(i, X_i, t) for i, X_i in enumerate(X)])
        half = X - gamma * G if t == 0 else 2 * X - before - gamma * G + gamma * G_before
        before, G_before, X = X, G, W @ half
        models.append(X)
    return models


def exact_diffusion(w: Array, gradient: Gradient, A: Array, steps: int, *, mu: float) -> list[Array]:
    """w_1, …, w_steps of shape (n, d). `A` is symmetric and doubly stochastic; the function halves it to Ā."""
    models = []
    A_bar = (np.eye(len(A)) + A) / 2
    psi = w.copy()
    for i in range(steps):
        psi_new = np.stack([w_k - mu * gradient(k, w_k, i) for k, w_k in enumerate(w)])
        phi = psi_new + w - psi
        w, psi = A_bar.T @ phi, psi_new
        models.append(w)
    return models


if __name__ == "__main__":
    from support.oracles.quadratics import quadratics

    problem = quadratics(4, 3, np.random.default_rng(0))
    ring = sum(np.roll(np.eye(4), shift, axis=1) for shift in (-1, 0, 1)) / 3  # eigenvalues 1, 1/3, 1/3, −1/3
    start = np.random.default_rng(1).normal(size=(4, 3))
    W = (np.eye(4) + ring) / 2
    run = d_squared(start, problem.gradient, [W] * 3000, gamma=0.1)
    np.testing.assert_allclose(run[-1], [problem.optimum()] * 4, atol=1e-9)  # exact with a constant step size
    np.testing.assert_allclose(exact_diffusion(start, problem.gradient, ring, 3000, mu=0.1), run, atol=1e-12)
    # Gossip gradient descent does not: its fixed point keeps the workers apart.
    X = start
    for _ in range(3000):
        X = W @ (X - 0.1 * np.stack([problem.gradient(i, X_i) for i, X_i in enumerate(X)]))
    assert np.abs(X - problem.optimum()).max() > 1e-2
