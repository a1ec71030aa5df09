"""Unbiased sampling of clients: Li, Huang, Yang, Wang, Zhang, "On the Convergence of FedAvg on Non-IID Data", ICLR
2020, section 3.3 (schemes I and II).

    objective F(w) = Σ_k p_k F_k(w), p_k = n_k/n, N clients, K of them take part
    scheme I:   S: K draws with replacement, client k with probability p_k;   w = 1/K Σ_{k∈S} w_k      (with repetition)
    scheme II:  S: K clients, uniformly without replacement;                  w = N/K Σ_{k∈S} p_k w_k
    both:       E_S[w] = Σ_k p_k w_k
    FedAvg:     S as in scheme II;   w = Σ_{k∈S} p_k w_k / Σ_{k∈S} p_k        biased unless the p_k are equal

Left open, and settled here:
* The weights of scheme II sum to 1 only on average, N/K Σ_{k∈S} p_k. The paper averages models as printed (and rescales
  the clients' functions so that p_k = 1/N). `remainder` gives the rest of the weight to the old model w_t, which
  makes an average of updates w_k − w_t; its expectation is the same.
* A client drawn twice in scheme I trains once and counts twice.
* Expectations are exact here: sums over all samples.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product

import numpy as np

from support.oracles.interfaces import Array


def scheme_one(sample: Sequence[int], N: int) -> Array:
    """Weights of all N clients, for a sample with repetition."""
    return np.bincount(sample, minlength=N) / len(sample)


def scheme_two(sample: Sequence[int], p: Array) -> Array:
    """Weights of all N clients, for a sample without repetition."""
    weights = np.zeros(len(p))
    weights[list(sample)] = len(p) / len(sample) * p[list(sample)]
    return weights


def normalized(sample: Sequence[int], p: Array) -> Array:
    """FedAvg's weights over the participants."""
    weights = scheme_two(sample, p)
    return weights / weights.sum()


def remainder(weights: Array) -> float:
    """Weight of the old model if the weights are applied to updates w_k − w_t."""
    return float(1 - weights.sum())


def samples_one(p: Array, K: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """All samples of scheme I in order of drawing, each with its probability."""
    for sample in product(range(len(p)), repeat=K):
        yield sample, float(np.prod(p[list(sample)]))


def samples_two(N: int, K: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """All samples of scheme II, each with its probability."""
    every = list(combinations(range(N), K))
    for sample in every:
        yield sample, 1 / len(every)


def expectation(
    samples: Iterator[tuple[tuple[int, ...], float]], weights: Callable[[tuple[int, ...]], Array]
) -> tuple[Array, Array]:
    """Mean and covariance of the weights, exact."""
    pairs = [(weights(sample), probability) for sample, probability in samples]
    mean = np.sum([probability * w for w, probability in pairs], axis=0)
    covariance = np.sum([probability * np.outer(w - mean, w - mean) for w, probability in pairs], axis=0)
    return mean, covariance


if __name__ == "__main__":
    p = np.array([0.1, 0.2, 0.3, 0.4])
    for K in (1, 2, 3):
        one, spread_one = expectation(samples_one(p, K), lambda sample: scheme_one(sample, 4))
        two, _ = expectation(samples_two(4, K), lambda sample: scheme_two(sample, p))
        biased, _ = expectation(samples_two(4, K), lambda sample: normalized(sample, p))
        np.testing.assert_allclose(one, p)
        np.testing.assert_allclose(two, p)
        assert np.abs(biased - p).max() > 0.005
        np.testing.assert_allclose(spread_one, (np.diag(p) - np.outer(p, p)) / K)  # multinomial
    twice, _ = expectation(samples_one(p, 2), lambda sample: normalized(sample, p))
    assert np.abs(twice - p).max() > 0.01, "sampling by p and weighing by p again is biased"
    uniform, _ = expectation(samples_two(4, 2), lambda sample: normalized(sample, np.full(4, 0.25)))
    np.testing.assert_allclose(uniform, 0.25)
    assert abs(remainder(scheme_two((0, 1), p)) - 0.4) < 1e-12
