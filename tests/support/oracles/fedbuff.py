"""FedBuff: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba,
"Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, algorithms 1 and 2.

    client, from the model w^t that it was sent:  y_0 ← w^t;  y_q ← y_{q−1} − η_l g_q(y_{q−1}), q = 1…Q;  Δ ← y_0 − y_Q
    server, when Δ_i arrives:  Δ ← Δ + s(τ_i) Δ_i;  k ← k + 1
        if k = K:  w^{t+1} ← w^t − η_g Δ / K;  Δ ← 0;  k ← 0;  t ← t + 1
    staleness τ_i = t − (version that client i started from);  s(τ) = 1/√(1 + τ)

Left open, and settled here:
* Algorithm 1 has no s(τ); the experiments scale each update by it. `scale` may be None for algorithm 1 as printed.
* The divisor with s(τ): algorithm 1 divides by K, and we keep K, so stale updates make a shorter step. The authors'
  simulator FLSim can also divide by Σ s(τ_i), its weighted average: `normalize`.
* t in τ_i: the server's version when the update arrives. All updates of one buffer meet the same t, so counting when
  the buffer is used gives the same number.
* The sign: the paper's Δ is y_0 − y_Q, a descent direction that the server subtracts.
* When clients start: `arrivals` says it (`interfaces.arrivals_in_order` makes the usual case).
* A buffer that is not full at the end is not used.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from support.oracles.interfaces import Array, Arrival, Gradient


def inverse_root(tau: int) -> float:
    """s(τ) = 1/√(1 + τ)."""
    return float(1 / np.sqrt(1 + tau))


def fedbuff(
    w: Array,
    gradient: Gradient,
    arrivals: Sequence[Arrival],
    *,
    K: int,
    eta_l: float,
    eta_g: float,
    scale: Callable[[int], float] | None = inverse_root,
    normalize: bool = False,
) -> list[Array]:
    """Models after each update of the server."""
    versions = [w]
    step: Counter[int] = Counter()
    buffer, weights = np.zeros_like(w), list[float]()
    for i, version, Q in arrivals:
        y = versions[version].copy()
        for _ in range(Q):
            y = y - eta_l * gradient(i, y, step[i])
            step[i] += 1
        weights.append(scale(len(versions) - 1 - version) if scale else 1.0)
        buffer = buffer + weights[-1] * (versions[version] - y)
        if len(weights) == K:
            versions.append(versions[-1] - eta_g * buffer / (sum(weights) if normalize else K))
            buffer, weights = np.zeros_like(w), []
    return versions[1:]


if __name__ == "__main__":
    from support.oracles.fedavg import fedavg
    from support.oracles.interfaces import arrivals_in_order
    from support.oracles.quadratics import quadratics

    problem = quadratics(3, 4, np.random.default_rng(0))
    start = np.zeros(4)
    rounds = fedavg(start, problem.gradient, [{0: 2, 1: 1, 2: 5}] * 6, eta=0.1, sizes=[1, 1, 1])
    together = arrivals_in_order([0, 1, 2, 2, 0, 1, 1, 2, 0, 0, 1, 2, 0, 1, 2, 2, 1, 0], [2, 1, 5], every=3)
    fresh = [Arrival(i, position // 3, steps) for position, (i, _, steps) in enumerate(together)]
    buffered = fedbuff(start, problem.gradient, fresh, K=3, eta_l=0.1, eta_g=1.0)
    np.testing.assert_allclose(buffered, rounds)  # all fresh, each client once per buffer: FedAvg
    assert [a.version for a in arrivals_in_order([0, 1, 0, 0, 2], [1, 1, 1], every=2)] == [0, 0, 0, 1, 0]
    stale = [Arrival(0, 0, 1), Arrival(1, 0, 1)]
    first, second = fedbuff(start, problem.gradient, stale, K=1, eta_l=0.1, eta_g=0.5)
    np.testing.assert_allclose(first - second, 0.5 * 0.1 * problem.gradient(1, start) / np.sqrt(2))
    second = fedbuff(start, problem.gradient, stale, K=1, eta_l=0.1, eta_g=0.5, normalize=True)[1]
    np.testing.assert_allclose(first - second, 0.5 * 0.1 * problem.gradient(1, start))  # Σ s cancels s if K = 1
    order = list(np.random.default_rng(1).integers(3, size=30000))
    far = fedbuff(start, problem.gradient, arrivals_in_order(order, [1, 1, 1], every=10), K=10, eta_l=0.002, eta_g=1.0)
    np.testing.assert_allclose(np.mean(far[-1000:], axis=0), problem.optimum(), atol=0.05)
