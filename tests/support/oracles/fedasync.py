"""FedAsync: Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", OPT 2020 (arXiv 1903.03934), algorithm 1.

    worker, from x_τ with time stamp τ:  minimize g_{x_τ}(x; z) = f(x; z) + ρ/2 ‖x − x_τ‖²
        x_{τ,0} ← x_τ;  x_{τ,h} ← x_{τ,h−1} − γ ∇g_{x_τ}(x_{τ,h−1}; z_h);  push (x_new = x_{τ,H}, τ)
    server, in epoch t:  α_t ← α · s(t − τ);  x_t ← (1 − α_t) x_{t−1} + α_t x_new
    constant:    s(t − τ) = 1
    polynomial:  s_a(t − τ) = (t − τ + 1)^{−a}
    hinge:       s_{a,b}(t − τ) = 1 if t − τ ≤ b, else 1 / (a (t − τ − b) + 1)

Left open, and settled here:
* The staleness of a fresh update. Read literally, epoch t mixes into x_{t−1}, so that an update computed from the
  newest model has t − τ = 1. The paper also asks for s(0) = 1 for fresh updates, and the authors' code counts the
  models made since the worker's model: 0 for a fresh update. We count as their code does; `fresh` = 1 is the literal
  reading.
* H differs per update: `arrivals` holds it, and says from which version each worker started.
* The decay of α over time in the experiments is left out.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from support.oracles.interfaces import Array, Arrival, Gradient


def constant(staleness: int) -> float:
    """s = 1."""
    return 1.0


def polynomial(a: float) -> Callable[[int], float]:
    """s_a, for a > 0."""
    return lambda staleness: (staleness + 1) ** -a


def hinge(a: float, b: float) -> Callable[[int], float]:
    """s_{a,b}, for a > 0 and b ≥ 0."""
    return lambda staleness: 1.0 if staleness <= b else 1 / (a * (staleness - b) + 1)


def fedasync(
    x: Array,
    gradient: Gradient,
    arrivals: Sequence[Arrival],
    *,
    gamma: float,
    alpha: float,
    rho: float = 0.0,
    s: Callable[[int], float] = constant,
    fresh: int = 0,
) -> list[Array]:
    """Models after each arrival."""
    versions = [x]
    step: Counter[int] = Counter()
    for i, tau, H in arrivals:
        x_new = versions[tau].copy()
        for _ in range(H):
            x_new = x_new - gamma * (gradient(i, x_new, step[i]) + rho * (x_new - versions[tau]))
            step[i] += 1
        alpha_t = alpha * s(len(versions) - 1 - tau + fresh)
        versions.append((1 - alpha_t) * versions[-1] + alpha_t * x_new)
    return versions[1:]


if __name__ == "__main__":
    from support.oracles.interfaces import arrivals_in_order
    from support.oracles.quadratics import quadratics

    assert [hinge(10, 4)(d) for d in (0, 4, 5, 6)] == [1, 1, 1 / 11, 1 / 21]
    assert [polynomial(0.5)(d) for d in (0, 3)] == [1, 0.5]
    problem = quadratics(3, 4, np.random.default_rng(0))
    start = np.zeros(4)
    (one,) = fedasync(start, problem.gradient, [Arrival(1, 0, 3)], gamma=0.1, alpha=1.0, s=polynomial(0.5))
    alone = start.copy()
    for _ in range(3):
        alone = alone - 0.1 * problem.gradient(1, alone)
    np.testing.assert_allclose(one, alone)  # α = 1 and fresh: the server takes the worker's model
    order = list(np.random.default_rng(1).integers(3, size=20000))
    arrivals = arrivals_in_order(order, [1, 1, 1])
    far = fedasync(start, problem.gradient, arrivals, gamma=0.05, alpha=0.05, s=hinge(10, 4))
    wide = fedasync(start, problem.gradient, arrivals, gamma=0.05, alpha=0.05, s=constant)
    for run in (far, wide):
        assert np.linalg.norm(np.mean(run[-5000:], axis=0) - problem.optimum()) < 0.1
    stale = [Arrival(0, 0, 1)] * 3
    runs = fedasync(start, problem.gradient, stale, gamma=0.1, alpha=0.5, s=polynomial(1.0))
    new = start - 0.1 * problem.gradient(0, start)
    np.testing.assert_allclose(runs[2], runs[1] + 0.5 / 3 * (new - runs[1]))
