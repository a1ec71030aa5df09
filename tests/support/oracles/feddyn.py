"""FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama,
"Federated Learning Based on Dynamic Regularization", ICLR 2021, algorithm 1.

    θ_k^t = argmin_θ L_k(θ) − ⟨∇L_k(θ_k^{t−1}), θ⟩ + α/2 ‖θ − θ^{t−1}‖²            for k ∈ P_t
    ∇L_k(θ_k^t) = ∇L_k(θ_k^{t−1}) − α (θ_k^t − θ^{t−1})                            for k ∈ P_t; others keep theirs
    h^t = h^{t−1} − α/m Σ_{k∈P_t} (θ_k^t − θ^{t−1})
    θ^t = 1/|P_t| Σ_{k∈P_t} θ_k^t − h^t / α

Left open, and settled here:
* The minimizer. The paper minimizes approximately with SGD from θ^{t−1}:
  θ ← θ − η (∇L_k(θ) − ∇L_k(θ_k^{t−1}) + α (θ − θ^{t−1})). `minimizer(k, linear, anchor)` may replace it.
* "∇L_k(θ_k^t)" is the client's state, updated by the second line even if the minimizer is approximate; it is the
  gradient itself only if the minimizer is exact. It starts at 0, and so does h.
* The paper's h subtracts Σ_{k∈P_t} θ_k^t − θ^{t−1} without brackets: the sum is over the differences, since h^t is the
  mean over all m clients of their states. The mean of the participants is not weighted.
* The authors' code also divides α by n_k m / n for each client; algorithm 1 does not, so neither does this.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from support.oracles.interfaces import Array, Gradient, Rounds


class FedDyn(NamedTuple):
    """Models θ after each round; after the last, the server's h and the clients' states of shape (m, d)."""

    models: list[Array]
    h: Array
    gradients: Array


def feddyn(
    theta: Array,
    gradient: Gradient,
    rounds: Rounds,
    *,
    clients: int,
    eta: float,
    alpha: float,
    minimizer: Callable[[int, Array, Array], Array] | None = None,
) -> FedDyn:
    """Run algorithm 1 with m = `clients`. `minimizer` replaces the local steps with step size `eta`."""
    models = []
    h, state = np.zeros_like(theta), np.zeros((clients, *theta.shape))
    step: Counter[int] = Counter()
    for P in rounds:
        local = {}
        for k, steps in P.items():
            theta_k = minimizer(k, state[k], theta) if minimizer else theta.copy()
            for _ in range(0 if minimizer else steps):
                theta_k = theta_k - eta * (gradient(k, theta_k, step[k]) - state[k] + alpha * (theta_k - theta))
                step[k] += 1
            local[k] = theta_k
            state[k] = state[k] - alpha * (theta_k - theta)
        h = h - alpha / clients * np.sum([theta_k - theta for theta_k in local.values()], axis=0)
        theta = np.mean(list(local.values()), axis=0) - h / alpha
        models.append(theta)
    return FedDyn(models, h, state)


if __name__ == "__main__":
    from support.oracles.quadratics import quadratics

    problem = quadratics(3, 4, np.random.default_rng(0))
    best = problem.optimum()

    def exact(k: int, linear: Array, anchor: Array, alpha: float = 0.5) -> Array:
        """Minimizer of L_k(θ) − ⟨linear, θ⟩ + α/2 ‖θ − anchor‖²."""
        A = problem.A[k]
        return np.linalg.solve(A + alpha * np.eye(4), A @ problem.b[k] + linear + alpha * anchor)

    some = [{0: 60, 2: 5}, {1: 20, 0: 4}, {1: 30, 2: 6}] * 800
    for minimizer in (None, exact):
        run = feddyn(np.zeros(4), problem.gradient, some, clients=3, eta=0.1, alpha=0.5, minimizer=minimizer)
        np.testing.assert_allclose(run.models[-1], best, atol=1e-7)
        np.testing.assert_allclose(run.h, run.gradients.mean(axis=0), atol=1e-10)  # h is the mean of the states
        np.testing.assert_allclose(run.gradients, [problem.gradient(k, best) for k in range(3)], atol=1e-6)
