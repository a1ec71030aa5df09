"""FedNova: Wang, Liu, Liang, Joshi, Poor,
"Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020, equations 4 to 7.

    client i, τ_i local steps:  Δ_i = x_i^{(t,τ_i)} − x^{(t,0)} = −η G_i a_i
        G_i = [g_i(x^{(t,0)}), …, g_i(x^{(t,τ_i−1)})]
    d_i = G_i a_i / ‖a_i‖₁
    x^{(t+1,0)} = x^{(t,0)} − τ_eff Σ_i p_i η d_i
    a_i of plain SGD: [1, …, 1]
        of the proximal term:  [(1−α)^{τ_i−1}, …, (1−α), 1],  α = η μ
        of momentum ρ:  [1−ρ^{τ_i}, 1−ρ^{τ_i−1}, …, 1−ρ] / (1−ρ)

Left open, and settled here:
* τ_eff is a free choice. The default is Σ p_i ‖a_i‖₁. The authors' code takes Σ p_i τ_i if there is a proximal term
  (`count_steps`); both are the same for plain SGD.
* Momentum: u ← ρ u + g, x ← x − η u, with u zero at the start of every round (as in the authors' code; the vector a_i
  above is that of a zero start).
* Momentum and a proximal term together: x ← x − η (u + μ (x − x^{(t,0)})), where u does not contain the proximal term.
  `normalizing_vector` is the coefficient of each gradient in −Δ_i/η, which gives all three vectors above.
* p_i = n_i / Σ n over the participants of the round.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from support.oracles.interfaces import Array, Gradient, Rounds


def normalizing_vector(tau: int, *, rho: float = 0.0, alpha: float = 0.0) -> Array:
    """a_i: element j is Σ_{k≥j} (1−α)^{τ−1−k} ρ^{k−j}, the weight of gradient j in the client's change."""
    return np.array([sum((1 - alpha) ** (tau - 1 - k) * rho ** (k - j) for k in range(j, tau)) for j in range(tau)])


def fednova(
    x: Array,
    gradient: Gradient,
    rounds: Rounds,
    *,
    eta: float,
    sizes: Sequence[int],
    rho: float = 0.0,
    mu: float = 0.0,
    count_steps: bool = False,
) -> list[Array]:
    """Models after each round."""
    models = []
    step: Counter[int] = Counter()
    for participants in rounds:
        total = sum(sizes[i] for i in participants)
        tau_eff, direction = 0.0, np.zeros_like(x)
        for i, tau in participants.items():
            x_i, u = x.copy(), np.zeros_like(x)
            for _ in range(tau):
                u = rho * u + gradient(i, x_i, step[i])
                x_i = x_i - eta * (u + mu * (x_i - x))
                step[i] += 1
            a = normalizing_vector(tau, rho=rho, alpha=eta * mu)
            p = sizes[i] / total
            direction = direction + p * (x - x_i) / a.sum()
            tau_eff += p * (tau if count_steps else a.sum())
        x = x - tau_eff * direction
        models.append(x)
    return models


if __name__ == "__main__":
    from support.oracles.fedavg import fedavg
    from support.oracles.quadratics import quadratics

    np.testing.assert_allclose(normalizing_vector(4), np.ones(4))
    np.testing.assert_allclose(normalizing_vector(3, alpha=0.1), [0.81, 0.9, 1.0])
    np.testing.assert_allclose(normalizing_vector(3, rho=0.9), (1 - 0.9 ** np.array([3, 2, 1])) / (1 - 0.9))
    problem = quadratics(3, 4, np.random.default_rng(0))
    sizes = [1, 2, 5]
    best = problem.optimum(np.array(sizes, float))
    equal, unequal = [{0: 4, 1: 4, 2: 4}] * 50, [{0: 9, 1: 1, 2: 5}] * 3000
    average = fedavg(np.zeros(4), problem.gradient, equal, eta=0.1, sizes=sizes)
    np.testing.assert_allclose(fednova(np.zeros(4), problem.gradient, equal, eta=0.1, sizes=sizes), average)
    # With small η, FedNova's fixed point is the optimum up to O(η); FedAvg's is that of another objective.
    for rho, mu in ((0.0, 0.0), (0.5, 0.0), (0.0, 1.0), (0.5, 1.0)):
        nova = fednova(np.zeros(4), problem.gradient, unequal, eta=0.005, sizes=sizes, rho=rho, mu=mu)[-1]
        drift = fedavg(np.zeros(4), problem.gradient, unequal, eta=0.005, sizes=sizes)[-1]
        assert np.linalg.norm(nova - best) < 0.2 * np.linalg.norm(drift - best)
