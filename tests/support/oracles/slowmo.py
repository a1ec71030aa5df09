"""SlowMo: Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
ICLR 2020, algorithm 1.

    for t = 0 … T−1:
        reset, maintain or average the base optimizer's buffers
        for k = 0 … τ−1:  x^{(i)}_{t,k+1} = x^{(i)}_{t,k} − γ_t d^{(i)}_{t,k}        base optimizer
        x_{t,τ} = 1/m Σ_i x^{(i)}_{t,τ}                                             exact average
        u_{t+1} = β u_t + (x_{t,0} − x_{t,τ}) / γ_t
        x_{t+1,0} = x_{t,0} − α γ_t u_{t+1}

Left open, and settled here:
* The base optimizer is local SGD, with momentum ρ if given: h ← ρ h + g, d = h, or d = g + ρ h with Nesterov momentum
  (the paper's experiments use Nesterov momentum of 0.9 and weight decay).
* u_0 = 0, h_0 = 0.
* γ_t may change with t; the same γ_t divides and multiplies. All local steps of t use γ_t.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from support.oracles.interfaces import Array, Gradient


class SlowMo(NamedTuple):
    """x_{t+1,0} after each t; the slow momentum u and the workers' buffers h, of shape (m, d), at the end."""

    models: list[Array]
    u: Array
    h: Array


def slowmo(
    x: Array,
    gradient: Gradient,
    gammas: Sequence[float],
    *,
    shape: tuple[int, int],
    slow: tuple[float, float],
    rho: float = 0.0,
    nesterov: bool = False,
    buffers: Literal["reset", "maintain", "average"] = "reset",
) -> SlowMo:
    """Run one outer iteration per γ_t of `gammas`. `shape`: m and τ; `slow`: α and β."""
    (m, tau), (alpha, beta) = shape, slow
    models = []
    u, h = np.zeros_like(x), np.zeros((m, *x.shape))
    for t, gamma in enumerate(gammas):
        if buffers == "reset":
            h = np.zeros_like(h)
        elif buffers == "average":
            h = np.tile(h.mean(axis=0), (m, 1))
        local = np.tile(x, (m, 1))
        for k in range(tau):
            for i in range(m):
                g = gradient(i, local[i], t * tau + k)
                h[i] = rho * h[i] + g
                local[i] = local[i] - gamma * (g + rho * h[i] if nesterov else h[i])
        u = beta * u + (x - local.mean(axis=0)) / gamma
        x = x - alpha * gamma * u
        models.append(x)
    return SlowMo(models, u, h)


if __name__ == "__main__":
    from support.oracles.fedavg import fedavg
    from support.oracles.quadratics import quadratics

    problem = quadratics(3, 4, np.random.default_rng(0))
    start = np.full(4, 2.0)
    plain = slowmo(start, problem.gradient, [0.1] * 5, shape=(3, 4), slow=(1.0, 0.0))
    average = fedavg(start, problem.gradient, [{0: 4, 1: 4, 2: 4}] * 5, eta=0.1, sizes=[1, 1, 1])
    np.testing.assert_allclose(plain.models, average)  # α = 1 and β = 0: local SGD
    single = slowmo(start, problem.gradient, [0.1] * 5, shape=(3, 1), slow=(1.0, 0.6))
    x, u = start, np.zeros(4)
    for model in single.models:  # τ = 1 and α = 1: momentum SGD on the mean
        u = 0.6 * u + problem.mean_gradient(x)
        x = x - 0.1 * u
        np.testing.assert_allclose(model, x)
    kept, reset, mean = (
        slowmo(start, problem.gradient, [0.1] * 3, shape=(3, 2), slow=(1.0, 0.5), rho=0.9, buffers=choice).models
        for choice in ("maintain", "reset", "average")
    )
    np.testing.assert_allclose(kept[0], reset[0])
    assert np.abs(kept[1] - reset[1]).max() > 1e-3
    assert np.abs(kept[2] - mean[2]).max() > 1e-6
