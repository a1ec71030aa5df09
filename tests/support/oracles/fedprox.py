"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith,
"Federated Optimization in Heterogeneous Networks", MLSys 2020, algorithm 2.

    S_t: K devices, device k chosen with probability p_k
    each k ∈ S_t finds w_k^{t+1}, a γ_k^t-inexact minimizer of h_k(w; w^t) = F_k(w) + μ/2 ‖w − w^t‖²
    w^{t+1} = 1/K Σ_{k∈S_t} w_k^{t+1}

Left open, and settled here:
* The inexact solver. The experiments use SGD on h_k: w ← w − η (∇F_k(w) + μ (w − w^t)). Partial work is a smaller
  number of these steps; such a device's model counts like the others'.
* The average. Devices that are sampled with probabilities p_k are averaged with equal weights (algorithm 2). The
  experiments sample uniformly and weigh by n_k, as FedAvg does (appendix C). `sizes` None is the former; a list of n_k,
  normalized over the participants, is the latter.
* With μ = 0 and the second average, FedProx is FedAvg with different numbers of steps.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from support.oracles.interfaces import Array, Gradient, Rounds


def fedprox(
    w: Array, gradient: Gradient, rounds: Rounds, *, eta: float, mu: float, sizes: Sequence[int] | None = None
) -> list[Array]:
    """Models after each round."""
    models = []
    step: Counter[int] = Counter()
    for participants in rounds:
        shares = {k: 1.0 if sizes is None else float(sizes[k]) for k in participants}
        total = np.zeros_like(w)
        for k, steps in participants.items():
            w_k = w.copy()
            for _ in range(steps):
                w_k = w_k - eta * (gradient(k, w_k, step[k]) + mu * (w_k - w))
                step[k] += 1
            total = total + shares[k] / sum(shares.values()) * w_k
        w = total
        models.append(w)
    return models


if __name__ == "__main__":
    from support.oracles.fedavg import fedavg
    from support.oracles.quadratics import quadratics

    problem = quadratics(3, 4, np.random.default_rng(0))
    rounds = [{0: 9, 1: 1, 2: 5}, {0: 2, 2: 4}] * 5
    plain = fedavg(np.zeros(4), problem.gradient, rounds, eta=0.2, sizes=[1, 2, 5])
    without = fedprox(np.zeros(4), problem.gradient, rounds, eta=0.2, mu=0.0, sizes=[1, 2, 5])
    np.testing.assert_allclose(plain, without)
    (exact,) = fedprox(np.zeros(4), problem.gradient, [{0: 2000}], eta=0.1, mu=0.7)
    prox = np.linalg.solve(problem.A[0] + 0.7 * np.eye(4), problem.A[0] @ problem.b[0])
    np.testing.assert_allclose(exact, prox, atol=1e-9)  # many steps reach the minimizer of h_k
    drift = [
        np.linalg.norm(fedprox(np.zeros(4), problem.gradient, [{0: 9, 1: 9, 2: 9}] * 500, eta=0.1, mu=mu)[-1] - best)
        for best in [problem.optimum()]
        for mu in (0.0, 2.0)
    ]
    assert drift[1] < drift[0], "a larger μ drifts less"
