"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas,
"Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, algorithm 1.

    m ← max(C·K, 1);  S_t ← random set of m clients
    for each client k in S_t:  w^k_{t+1} ← ClientUpdate(k, w_t)
    w_{t+1} ← Σ_{k∈S_t} (n_k / m_t) w^k_{t+1},   m_t = Σ_{k∈S_t} n_k
    ClientUpdate(k, w):  B ← (split P_k into batches of size B)
        for each local epoch i from 1 to E, for batch b ∈ B:  w ← w − η ∇l(w; b)

Left open, and settled here:
* The proceedings' version prints Σ_{k=1..K} n_k/n over all K clients, which does not sum to 1 over S_t. The authors'
  erratum (arXiv v4, 2023) normalizes by m_t, the number of examples of the participants. So do we.
* The number of updates u_k = E n_k / B is a fraction if B does not divide n_k: the last batch is smaller, so ⌈n_k/B⌉.
* The batches are split once, before the epochs: every epoch visits the same batches in the same order.
* C·K is rounded down (the paper's values of C·K are whole).
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from support.oracles.interfaces import Array, Gradient, Rounds


def participants_per_round(fraction: float, clients: int) -> int:
    """m = max(C·K, 1)."""
    return max(math.floor(fraction * clients), 1)


def batches(examples: int, batch: int | None, epochs: int) -> list[range]:
    """Indices of the examples of each local step. `batch` None is the paper's B = ∞: one batch with all examples."""
    size = examples if batch is None else batch
    split = [range(start, min(start + size, examples)) for start in range(0, examples, size)]
    return split * epochs


def local_steps(examples: int, batch: int | None, epochs: int) -> int:
    """u_k = E ⌈n_k/B⌉ updates."""
    return epochs * (1 if batch is None else math.ceil(examples / batch))


def fedavg(w: Array, gradient: Gradient, rounds: Rounds, *, eta: float, sizes: Sequence[int]) -> list[Array]:
    """Models after each round. `sizes` holds n_k, the number of examples of every client."""
    models = []
    step: Counter[int] = Counter()
    for participants in rounds:
        m_t = sum(sizes[k] for k in participants)
        total = np.zeros_like(w)
        for k, u_k in participants.items():
            w_k = w.copy()
            for _ in range(u_k):
                w_k = w_k - eta * gradient(k, w_k, step[k])
                step[k] += 1
            total = total + sizes[k] / m_t * w_k
        w = total
        models.append(w)
    return models


if __name__ == "__main__":
    from support.oracles.quadratics import quadratics

    problem = quadratics(3, 4, np.random.default_rng(0))
    sizes = [1, 2, 5]
    best = problem.optimum(np.array(sizes, float))
    one = fedavg(np.zeros(4), problem.gradient, [{0: 1, 1: 1, 2: 1}] * 400, eta=0.2, sizes=sizes)[-1]
    many = fedavg(np.zeros(4), problem.gradient, [{0: 9, 1: 1, 2: 5}] * 400, eta=0.2, sizes=sizes)[-1]
    np.testing.assert_allclose(one, best, atol=1e-9)  # one local step: gradient descent on Σ n_k/n F_k
    assert np.linalg.norm(many - best) > 1e-2, "several local steps drift away from the optimum"
    alone = fedavg(np.zeros(4), problem.gradient, [{1: 3}], eta=0.2, sizes=sizes)[0]
    three = fedavg(np.zeros(4), problem.gradient, [{1: 1}] * 3, eta=0.2, sizes=sizes)[-1]
    np.testing.assert_allclose(alone, three)  # the weights are normalized over the participants
    assert [len(b) for b in batches(7, 3, 2)] == [3, 3, 1] * 2
    assert (local_steps(7, 3, 2), local_steps(7, None, 2), participants_per_round(0.0, 10)) == (6, 2, 1)
