"""NoLoCo: Kolehmainen, Blagoev, Donaghy, Ersoy, Nies, "NoLoCo: No-all-reduce Low Communication Training Method for
Large Models", 2025 (arXiv 2506.10911), the modified Nesterov outer step.

    θ_{t,i}: worker i's fast weights after its inner steps from its slow weights φ_{t,i};  Δ_{t,i} = φ_{t,i} − θ_{t,i}
    for every worker i of a randomly drawn group of n workers (pairs: n = 2):
    δ_{t,i} = α δ_{t−1,i} − β/n Σ_j Δ_{t,j} − γ (φ_{t,i} − 1/n Σ_j φ_{t,j})
    φ_{t+1,i} = φ_{t,i} + δ_{t,i}

α: outer momentum; β: outer learning rate; γ: strength of the pull toward the group's mean. Sums are over the group. The
next inner steps start from φ_{t+1,i}.

Left open, and settled here:
* γ is an argument. The authors' code (gensyn-ai/noloco, `sparse_optimizer_c`) takes γ = β.
* Despite the name, the step is heavy-ball momentum: δ is added once, without Nesterov's look-ahead (code and equation).
* δ stays with the worker: momenta are never exchanged. δ_{−1} = 0.
* Inner optimizer: the paper uses Adam; this uses gradient steps with learning rate `lr`.
* A worker that is in no group of a round makes the step with a group of its own (n = 1).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from support.oracles.interfaces import Array, Gradient


class NoLoCo(NamedTuple):
    """Slow weights φ after each round, of shape (workers, d); the momenta δ after the last round."""

    models: list[Array]
    delta: Array


def noloco(
    phi: Array,
    gradient: Gradient,
    groups: Sequence[Sequence[tuple[int, ...]]],
    *,
    inner_steps: int,
    lr: float,
    alpha: float,
    beta: float,
    gamma: float,
) -> NoLoCo:
    """Run one outer step per entry of `groups`, which partitions the workers of that step."""
    models = []
    delta = np.zeros_like(phi)
    for t, partition in enumerate(groups):
        theta = phi.copy()
        for i in range(len(phi)):
            for h in range(inner_steps):
                theta[i] = theta[i] - lr * gradient(i, theta[i], t * inner_steps + h)
        alone = set(range(len(phi))) - {i for group in partition for i in group}
        phi_new = phi.copy()
        for group in [*partition, *((i,) for i in alone)]:
            members = list(group)
            mean_phi, mean_change = phi[members].mean(axis=0), (phi - theta)[members].mean(axis=0)
            for i in members:
                delta[i] = alpha * delta[i] - beta * mean_change - gamma * (phi[i] - mean_phi)
                phi_new[i] = phi[i] + delta[i]
        phi = phi_new
        models.append(phi)
    return NoLoCo(models, delta)


if __name__ == "__main__":
    from support.oracles.quadratics import quadratics

    problem = quadratics(4, 3, np.random.default_rng(0))
    start = np.random.default_rng(1).normal(size=(4, 3))
    rng = np.random.default_rng(2)
    pairs = [[tuple(order[:2]), tuple(order[2:])] for order in (rng.permutation(4) for _ in range(4000))]
    run = noloco(start, problem.gradient, pairs, inner_steps=3, lr=0.01, alpha=0.5, beta=0.7, gamma=0.7)
    late = np.stack(run.models[-1000:])
    assert np.abs(late.mean(axis=(0, 1)) - problem.optimum()).max() < 0.05
    free = noloco(start, problem.gradient, pairs, inner_steps=3, lr=0.01, alpha=0.5, beta=0.7, gamma=0.0)
    spread = [np.std(np.stack(models[-1000:]), axis=1).mean() for models in (run.models, free.models)]
    assert spread[0] < 0.5 * spread[1], "γ holds the workers together"
    # γ does not move the mean of the slow weights, and without gradients it brings the workers together.
    still = noloco(start, lambda i, w, k: 0 * w, pairs[:200], inner_steps=1, lr=1.0, alpha=0.5, beta=0.7, gamma=0.7)
    np.testing.assert_allclose(still.models[-1], np.tile(start.mean(axis=0), (4, 1)), atol=1e-6)
    # One group of all workers from one start: DiLoCo with heavy-ball momentum, all workers equal.
    everyone = [[(0, 1, 2, 3)]] * 5
    equal = noloco(np.zeros((4, 3)), problem.gradient, everyone, inner_steps=1, lr=0.1, alpha=0.5, beta=0.7, gamma=0.3)
    theta, v = np.zeros(3), np.zeros(3)
    for model in equal.models:
        v = 0.5 * v - 0.7 * 0.1 * problem.mean_gradient(theta)
        theta = theta + v
        np.testing.assert_allclose(model, np.tile(theta, (4, 1)))
