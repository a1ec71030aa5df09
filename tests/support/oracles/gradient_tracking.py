"""Gradient tracking: DIGing of Nedić, Olshevsky, Shi, "Achieving Geometric Convergence for Distributed Optimization
over Time-Varying Graphs", SIAM J. Optim. 2017, and its stochastic form GNSD of Lu, Zhang, Sun, Hong, "GNSD: a
Gradient-Tracking Based Nonconvex Stochastic Algorithm for Decentralized Optimization", IEEE DSW 2019.

    y(0) = g(x(0))
    x(k+1) = W(k) x(k) − α y(k)
    y(k+1) = W(k) y(k) + g(x(k+1)) − g(x(k))
    adapt-then-combine (ATC-DIGing of Nedić, Olshevsky, Shi, Uribe, ACC 2017):
    x(k+1) = W(k) (x(k) − α y(k)),   y(k+1) = W(k) (y(k) + g(x(k+1)) − g(x(k)))

x, y and g have one row per worker. W(k) is doubly stochastic, so that the mean of y is the mean of g at all times.

Left open, and settled here:
* With stochastic gradients, g(x(k)) in the difference is the value that was computed in the step before, on the batch
  of that step: every worker computes one gradient per step, and the mean of y stays the mean of the newest g.
* The first y is the first (stochastic) gradient; step k of `gradient` is g(x(k)).
* A step needs y(k) before x(k+1): after T steps T+1 gradients have been computed, the last one for the final y.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from support.oracles.interfaces import Array, Gradient


class Tracking(NamedTuple):
    """Models x(1), …, x(T) of shape (n, d); y(T); and g(x(T))."""

    models: list[Array]
    y: Array
    g: Array


def gradient_tracking(
    x: Array, gradient: Gradient, mixing: Sequence[Array], *, alpha: float, adapt_then_combine: bool = False
) -> Tracking:
    """Run one step per matrix W(k) of `mixing`, from the rows of `x`."""
    models = []
    g = np.stack([gradient(i, x_i, 0) for i, x_i in enumerate(x)])
    y = g.copy()
    for k, W in enumerate(mixing):
        x = W @ (x - alpha * y) if adapt_then_combine else W @ x - alpha * y
        g_new = np.stack([gradient(i, x_i, k + 1) for i, x_i in enumerate(x)])
        y = W @ (y + g_new - g) if adapt_then_combine else W @ y + g_new - g
        g = g_new
        models.append(x)
    return Tracking(models, y, g)


if __name__ == "__main__":
    from support.oracles.quadratics import quadratics

    problem = quadratics(4, 3, np.random.default_rng(0))
    pairs = [np.kron(np.eye(2), np.full((2, 2), 0.5)), np.eye(4)[[2, 1, 0, 3]] * 0.5 + np.eye(4) * 0.5]
    noise = np.random.default_rng(1).normal(size=(4, 5001, 3))
    for atc in (False, True):
        run = gradient_tracking(np.zeros((4, 3)), problem.gradient, pairs * 1000, alpha=0.05, adapt_then_combine=atc)
        np.testing.assert_allclose(run.models[-1], [problem.optimum()] * 4, atol=1e-9)  # exact, on a changing graph
        noisy = gradient_tracking(
            np.zeros((4, 3)),
            lambda i, w, k: problem.gradient(i, w) + noise[i, k],
            pairs * 50,
            alpha=0.05,
            adapt_then_combine=atc,
        )
        np.testing.assert_allclose(noisy.y.mean(axis=0), noisy.g.mean(axis=0), atol=1e-12)
