"""DP-FedAvg: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018,
algorithm 1.

    w_k = min(n_k / ŵ, 1),  W = Σ_k w_k over all users;  C^t: every user with probability q
    Δ_k: θ ← θ^t;  for every batch: θ ← θ − η ∇l(θ; b), θ ← θ^t + ClipFn(θ − θ^t);  Δ_k = θ − θ^t
    flat clipping:  ClipFn(Δ) = Δ min(1, S/‖Δ‖);  per layer: every layer j with S_j, S = √(Σ_j S_j²)
    fixed denominator f̃_f:    Δ = Σ_{k∈C} w_k Δ_k / (q W),                          σ = z S / (q W)
    clipped denominator f̃_c:  Δ = Σ_{k∈C} w_k Δ_k / max(q W_min, Σ_{k∈C} w_k),      σ = 2 z S / (q W_min)
    θ^{t+1} = θ^t + Δ + N(0, σ² I)

The sum of all w_k Δ_k thus gets noise of standard deviation z S: one user changes that sum by at most S.

Left open, and settled here:
* ClipFn is applied after every local step (algorithm 1), not only to Δ_k at the end; for one local step both are equal.
  `clip_at_end` clips once at the end, as later work does.
* Who takes part is given. A round without participants is noise alone; q W does not depend on who came.
* One draw of `normal(size = d)` per round. z = 0 draws too, so that random states stay comparable.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from support.oracles.interfaces import Array, Gradient, Rounds


def clip(delta: Array, S: float) -> Array:
    """Δ min(1, S/‖Δ‖)."""
    norm = float(np.linalg.norm(delta))
    return delta * min(1.0, S / norm) if norm > 0 else delta


def clip_per_layer(delta: Array, ends: Sequence[int], S: Sequence[float]) -> Array:
    """Each layer clipped on its own; `ends` holds the index after the last element of every layer."""
    starts = [0, *ends[:-1]]
    return np.concatenate([clip(delta[a:b], S_j) for a, b, S_j in zip(starts, ends, S, strict=True)])


def user_weights(sizes: Sequence[int], cap: float) -> Array:
    """w_k for all users, with ŵ = `cap`."""
    return np.array([min(n_k / cap, 1.0) for n_k in sizes])


def dp_fedavg(
    theta: Array,
    gradient: Gradient,
    rounds: Rounds,
    rng: np.random.Generator,
    *,
    weights: Array,
    rates: tuple[float, float, float, float],
    W_min: float | None = None,
    clip_at_end: bool = False,
) -> list[Array]:
    """Models after each round. `weights`: w_k of all users; `rates`: η, S, z and q; W_min selects f̃_c."""
    eta, S, z, q = rates
    models = []
    step: Counter[int] = Counter()
    for participants in rounds:
        total = np.zeros_like(theta)
        for k, steps in participants.items():
            delta = np.zeros_like(theta)
            for _ in range(steps):
                delta = delta - eta * gradient(k, theta + delta, step[k])
                delta = delta if clip_at_end else clip(delta, S)
                step[k] += 1
            total = total + weights[k] * clip(delta, S)
        if W_min is None:
            denominator, sigma = q * weights.sum(), z * S / (q * weights.sum())
        else:
            here = sum(weights[k] for k in participants)
            denominator, sigma = max(q * W_min, here), 2 * z * S / (q * W_min)
        theta = theta + total / denominator + sigma * rng.normal(size=theta.shape)
        models.append(theta)
    return models


if __name__ == "__main__":
    from support.oracles.fedavg import fedavg
    from support.oracles.quadratics import quadratics

    problem = quadratics(4, 3, np.random.default_rng(0))
    start, rng = np.zeros(3), np.random.default_rng(1)
    w = user_weights([10, 20, 40, 80], 40)
    np.testing.assert_allclose(w, [0.25, 0.5, 1.0, 1.0])
    full = [{0: 3, 1: 2, 2: 1, 3: 2}] * 5
    free = dp_fedavg(start, problem.gradient, full, rng, weights=w, rates=(0.1, 1e9, 0.0, 1.0))
    average = fedavg(start, problem.gradient, full, eta=0.1, sizes=[1, 2, 4, 4])
    np.testing.assert_allclose(free, average)  # all take part, no clipping, no noise: FedAvg
    for W_min in (None, 2.0):  # one user more changes the model by at most S / denominator
        rates = (0.5, 0.1, 0.0, 0.5)
        with_it = dp_fedavg(start, problem.gradient, [{0: 3, 2: 4}], rng, weights=w, rates=rates, W_min=W_min)[0]
        without = dp_fedavg(start, problem.gradient, [{0: 3}], rng, weights=w, rates=rates, W_min=W_min)[0]
        bound = 0.1 / (0.5 * w.sum()) if W_min is None else 2 * 0.1 / (0.5 * W_min)
        assert np.linalg.norm(with_it - without) <= bound * (1 + 1e-12)
    noise = [
        dp_fedavg(start, problem.gradient, [{}], rng, weights=w, rates=(0.5, 0.1, 1.3, 0.5))[0] for _ in range(20000)
    ]
    np.testing.assert_allclose(np.std(noise, axis=0), 1.3 * 0.1 / (0.5 * w.sum()), rtol=0.03)
    layers = clip_per_layer(np.array([3.0, 4.0, 0.1]), [2, 3], [1.0, 1.0])
    np.testing.assert_allclose(layers, [0.6, 0.8, 0.1])
