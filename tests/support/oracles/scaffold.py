"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh,
"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, algorithm 1.

    each client i ∈ S:  y_i ← x;  K times:  y_i ← y_i − η_l (g_i(y_i) − c_i + c)
        c_i⁺ ← (i) g_i(x),  or (ii) c_i − c + (x − y_i) / (K η_l)
        Δy_i = y_i − x,  Δc_i = c_i⁺ − c_i;  c_i ← c_i⁺
    x ← x + η_g/|S| Σ_{i∈S} Δy_i
    c ← c + 1/N Σ_{i∈S} Δc_i          (the paper: (|S|/N) times the mean of Δc_i)

Left open, and settled here:
* The initial c_i and c: zero unless given. The analysis needs c = 1/N Σ c_i, and the updates keep that equation.
* Option I needs one more pass at the server's model x; which batch is left open. `anchor(client, x)` computes the pass.
  Without `anchor`, option II is used.
* K may differ per client; each client divides by its own K.
* The mean over S has equal weights.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from support.oracles.interfaces import Array, Gradient, Rounds


class Scaffold(NamedTuple):
    """Models after each round; after the last round, the server's c and the clients' c_i of shape (N, d)."""

    models: list[Array]
    c: Array
    c_i: Array


def scaffold(
    x: Array,
    gradient: Gradient,
    rounds: Rounds,
    *,
    clients: int,
    eta_l: float,
    eta_g: float = 1.0,
    anchor: Callable[[int, Array], Array] | None = None,
) -> Scaffold:
    """Run algorithm 1 with N = `clients`."""
    models = []
    c, c_i = np.zeros_like(x), np.zeros((clients, *x.shape))
    step: Counter[int] = Counter()
    for S in rounds:
        dx, dc = np.zeros_like(x), np.zeros_like(x)
        for i, K in S.items():
            y_i = x.copy()
            for _ in range(K):
                y_i = y_i - eta_l * (gradient(i, y_i, step[i]) - c_i[i] + c)
                step[i] += 1
            c_plus = anchor(i, x) if anchor else c_i[i] - c + (x - y_i) / (K * eta_l)
            dx, dc = dx + (y_i - x) / len(S), dc + (c_plus - c_i[i]) / len(S)
            c_i[i] = c_plus
        x, c = x + eta_g * dx, c + len(S) / clients * dc
        models.append(x)
    return Scaffold(models, c, c_i)


if __name__ == "__main__":
    from support.oracles.quadratics import quadratics

    problem = quadratics(3, 4, np.random.default_rng(0))
    rounds = [{0: 9, 2: 5}, {1: 2, 0: 4}, {1: 3, 2: 6}] * 400
    best = problem.optimum()
    for anchor in (None, problem.gradient):
        run = scaffold(np.zeros(4), problem.gradient, rounds, clients=3, eta_l=0.05, eta_g=0.9, anchor=anchor)
        np.testing.assert_allclose(run.models[-1], best, atol=1e-8)  # no drift, despite 2 to 9 local steps
        np.testing.assert_allclose(run.c, run.c_i.mean(axis=0), atol=1e-12)
        at_best = [problem.gradient(i, best) for i in range(3)]
        np.testing.assert_allclose(run.c_i, at_best, atol=1e-7)  # c_i converges to ∇f_i(x*)
