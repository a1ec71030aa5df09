"""ScaleCom: Chen, Ni, Lu, Cui, Chen, Sun, Wang, Venkataramani, Srinivasan, Zhang, Gopalakrishnan, "ScaleCom: Scalable
Sparsified Gradient Compression for Communication-Efficient Distributed Training", NeurIPS 2020, algorithm 1.

    worker i:  v_i = m_i^t + ∇f_i(θ^t)
    leader of step t: worker t mod n;  I^t: the k largest |v_leader|, the same for every worker      (CLT-k)
    ĝ_i = v_i on I^t, 0 elsewhere
    θ^{t+1} = θ^t − α 1/n Σ_i ĝ_i
    m_i^{t+1} = (1 − β) m_i^t + β (m_i^t + ∇f_i(θ^t) − ĝ_i)                                         (low-pass filter)

β ∈ (0, 1]; β = 1 is ordinary error feedback. With β < 1, m_i^{t+1} = m_i^t + β (∇f_i(θ^t) − ĝ_i): an element that was
not sent takes only the part β of the new gradient, and an element that was sent keeps (1 − β) m_i^t.

Left open, and settled here:
* m_i^0 = 0. Steps are counted from 0, so worker 0 leads first.
* Ties between magnitudes: the lower index wins.
* k is a number of elements of the whole vector; the paper takes it per layer, with chunks to find the k fast.
* Steps without compression at the start of training, as in the experiments, are left out.
"""

from typing import NamedTuple

import numpy as np

from support.oracles.interfaces import Array, Gradient


class ScaleCom(NamedTuple):
    """Models after each step; the memories m_i at the end, of shape (n, d); the indices sent in each step, sorted."""

    models: list[Array]
    m: Array
    indices: list[list[int]]


def scalecom(
    theta: Array, gradient: Gradient, steps: int, *, n: int, k: int, alpha: float, beta: float = 1.0
) -> ScaleCom:
    """Run algorithm 1 with n workers."""
    models, indices = [], []
    m = np.zeros((n, *theta.shape))
    for t in range(steps):
        g = np.stack([gradient(i, theta, t) for i in range(n)])
        v = m + g
        chosen = np.argsort(-np.abs(v[t % n]), kind="stable")[:k]
        sent = np.zeros_like(v)
        sent[:, chosen] = v[:, chosen]
        theta = theta - alpha * sent.mean(axis=0)
        m = (1 - beta) * m + beta * (v - sent)
        models.append(theta)
        indices.append(sorted(int(index) for index in chosen))
    return ScaleCom(models, m, indices)


if __name__ == "__main__":
    from support.oracles.quadratics import quadratics

    problem = quadratics(3, 8, np.random.default_rng(0))
    start = np.zeros(8)
    run = scalecom(start, problem.gradient, 9, n=3, k=2, alpha=0.1)
    # With β = 1 nothing is lost: the model and the memories together hold the sum of all gradients.
    total = sum(problem.mean_gradient(w) for w in [start, *run.models[:-1]])
    np.testing.assert_allclose(start - 0.1 * (total - run.m.mean(axis=0)), run.models[-1])
    first = np.argsort(-np.abs(problem.gradient(0, start)))[:2]
    assert run.indices[0] == sorted(first.tolist()), "worker 0 leads step 0"
    filtered = scalecom(start, problem.gradient, 1, n=3, k=2, alpha=0.1, beta=0.3)
    rest = [j for j in range(8) if j not in filtered.indices[0]]
    for i in range(3):
        np.testing.assert_allclose(filtered.m[i][rest], 0.3 * problem.gradient(i, start)[rest])
    long = scalecom(start, problem.gradient, 20000, n=3, k=2, alpha=0.01, beta=0.3)
    np.testing.assert_allclose(np.mean(long.models[-600:], axis=0), problem.optimum(), atol=0.02)
