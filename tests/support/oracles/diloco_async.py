"""Delayed Nesterov (DN) and dynamic local updates (DyLU): Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam, Ranzato,
"Asynchronous Local-SGD Training for Language Modeling", 2024 (arXiv 2401.09135), algorithm 3 and section 5.

    g_t: pseudo-gradient that arrives as number t, the model sent to the worker minus the worker's model
    Δ ← Δ + g_t
    if (t + 1) mod N = 0:  m_{t+1} ← β m_t + Δ/N
                           θ_{t+1} ← θ_t − ε ((1 − cN + c) β m_{t+1} + g_t/N);  Δ ← 0
    else:                  m_{t+1} ← m_t
                           θ_{t+1} ← θ_t − ε (c β m_{t+1} + g_t/N)
    DyLU:  steps of worker w = ⌊v(w) / max_{w'} v(w') · H⌋,  v(w) its measured speed in steps per second

m_0 = 0, Δ = 0, momentum activation c ∈ [0, 1/N]; c = 0 by default. Over N arrivals the momentum is applied with
total weight (N − 1) c + (1 − cN + c) = 1, and with N = 1 the rule is Nesterov's.

Left open, and settled here:
* Which optimizer works inside: the paper uses AdamW; this uses gradient steps w ← w − lr · g.
* The paper's server waits for a grace period before it sends models; here `arrivals` says which version a worker got.
* Every arrival makes a version. Staleness does not scale g_t.
* DyLU as printed can give 0 steps to a worker slower than 1/H of the fastest; this does too.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from support.oracles.interfaces import Array, Arrival, Gradient


class DelayedNesterov(NamedTuple):
    """Models after each arrival; the momentum m and the buffer Δ at the end."""

    models: list[Array]
    m: Array
    buffer: Array


def dynamic_local_updates(speeds: Sequence[float], H: int) -> list[int]:
    """Local steps of every worker, from speeds in steps per second."""
    return [math.floor(v / max(speeds) * H) for v in speeds]


def delayed_nesterov(
    theta: Array,
    gradient: Gradient,
    arrivals: Sequence[Arrival],
    *,
    lr: float,
    epsilon: float,
    beta: float,
    N: int,
    c: float = 0.0,
) -> DelayedNesterov:
    """Run algorithm 3 with inner learning rate `lr` and outer learning rate `epsilon`."""
    versions = [theta]
    m, delta = np.zeros_like(theta), np.zeros_like(theta)
    step: Counter[int] = Counter()
    for t, (worker, version, steps) in enumerate(arrivals):
        local = versions[version].copy()
        for _ in range(steps):
            local = local - lr * gradient(worker, local, step[worker])
            step[worker] += 1
        g = versions[version] - local
        delta = delta + g
        activation = c
        if (t + 1) % N == 0:
            m, delta, activation = beta * m + delta / N, np.zeros_like(theta), 1 - c * N + c
        versions.append(versions[-1] - epsilon * (activation * beta * m + g / N))
    return DelayedNesterov(versions[1:], m, delta)


if __name__ == "__main__":
    from support.oracles.interfaces import arrivals_in_order
    from support.oracles.quadratics import quadratics

    assert dynamic_local_updates([4.0, 2.0, 1.0, 3.0], 10) == [10, 5, 2, 7]
    problem = quadratics(3, 4, np.random.default_rng(0))
    start = np.zeros(4)
    # With N = 1 and fresh models, Nesterov momentum on the pseudo-gradients.
    fresh = [Arrival(t % 3, t, 2) for t in range(6)]
    run = delayed_nesterov(start, problem.gradient, fresh, lr=0.1, epsilon=0.7, beta=0.9, N=1)
    theta, v = start, np.zeros(4)
    for t, (i, _, _) in enumerate(fresh):
        local = theta - 0.1 * problem.gradient(i, theta)
        local = local - 0.1 * problem.gradient(i, local)
        v = 0.9 * v + theta - local
        theta = theta - 0.7 * (theta - local + 0.9 * v)
        np.testing.assert_allclose(run.models[t], theta)
    # From one version, N arrivals together make one Nesterov step with the mean pseudo-gradient, for every c.
    pseudo = np.mean([0.1 * problem.gradient(i, start) for i in range(3)], axis=0)
    for c in (0.0, 0.2, 1 / 3):
        together = [Arrival(i, 0, 1) for i in range(3)]
        run = delayed_nesterov(start, problem.gradient, together, lr=0.1, epsilon=0.7, beta=0.9, N=3, c=c)
        expected = start - 0.7 * (pseudo + (1 - c * 3 + c) * 0.9 * pseudo)
        np.testing.assert_allclose(run.models[-1], expected)
        np.testing.assert_allclose(run.m, pseudo)
    order = list(np.random.default_rng(1).integers(3, size=9000))
    arrivals = arrivals_in_order(order, [1, 1, 1])
    far = delayed_nesterov(start, problem.gradient, arrivals, lr=0.01, epsilon=0.5, beta=0.9, N=3)
    assert np.linalg.norm(np.mean(far.models[-3000:], axis=0) - problem.optimum()) < 0.1
