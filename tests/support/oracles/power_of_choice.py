"""Power-of-choice: Cho, Wang, Joshi, "Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice
Selection Strategies", 2020 (arXiv 2010.01243), section 4.

    π_pow-d:  A: d candidates out of K clients, drawn without replacement, client k with probability p_k = n_k/n
              S: the m = max(C·K, 1) candidates of the largest local loss F_k(w), m ≤ d ≤ K
              w^{t+1} = 1/m Σ_{k∈S} w_k
    π_rpow-d: F_k is replaced by the mean loss that client k saw in its latest local steps; clients that have not taken
              part yet count as infinite

d = m is sampling without replacement; a larger d leans more toward clients with large losses.

Left open, and settled here:
* Ties are broken at random (the paper): the candidates are in random order, and the sort keeps that order.
* "Without replacement with probabilities p_k": one client after another, with p renormalized over those left, which is
  what `Generator.choice` does.
* Averaging has equal weights, since large clients already come up more often.
"""

from collections.abc import Sequence

import numpy as np

from support.oracles.interfaces import Array


def candidates(p: Array, d: int, rng: np.random.Generator) -> list[int]:
    """A: d clients, in random order."""
    return [int(k) for k in rng.choice(len(p), size=d, replace=False, p=p)]


def largest_losses(chosen: Sequence[int], losses: Sequence[float], m: int) -> list[int]:
    """S: the m candidates of the largest losses; `losses` holds those of all clients."""
    return sorted(chosen, key=lambda k: -losses[k])[:m]


def power_of_choice(p: Array, losses: Sequence[float], rng: np.random.Generator, *, d: int, m: int) -> list[int]:
    """Clients of a round."""
    return largest_losses(candidates(p, d, rng), losses, m)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    p = np.array([0.1, 0.2, 0.3, 0.4])
    losses = [4.0, 1.0, 3.0, 2.0]
    assert power_of_choice(p, losses, rng, d=4, m=2) == [0, 2]
    mean = [np.mean([np.mean([losses[k] for k in power_of_choice(p, losses, rng, d=d, m=1)]) for _ in range(4000)])
            for d in (1, 2, 3, 4)]  # fmt: skip
    assert abs(mean[0] - p @ losses) < 0.1, "d = m: sampling by p"
    assert mean[0] < mean[1] < mean[2] < mean[3] == 4.0
    assert largest_losses([1, 3], [9.0, np.inf, 9.0, 5.0], 1) == [1]
    ties = {power_of_choice(np.full(3, 1 / 3), [1.0] * 3, rng, d=3, m=1)[0] for _ in range(100)}
    assert ties == {0, 1, 2}
