"""Population-based training: Jaderberg, Dalibard, Osindero, Czarnecki, Donahue, Razavi, Vinyals, Green, Dunning,
Simonyan, Fernando, Kavukcuoglu, "Population Based Training of Neural Networks", 2017 (arXiv 1711.09846), algorithm 1
and section 4.

    exploit, truncation selection: rank all members; a member in the bottom 20 % takes the weights and hyperparameters
             of a member drawn uniformly from the top 20 %; others keep theirs
    explore, perturb: every hyperparameter is multiplied by 0.8 or 1.2, drawn at random; only after weights were taken

Left open, and settled here:
* The size of the bottom and the top: ⌈20 % of n⌉ members each, but never more than half, so that none is in both.
* Ties in the ranking: the member with the lower number ranks higher.
* In algorithm 1 every member acts on its own when it is ready, and sees the others' latest scores. `truncation` is that
  decision for one member. `generation` makes all members decide at once, from the scores before the generation.
* "Randomly perturbed by a factor of 1.2 or 0.8": the two factors have equal chances, independently per hyperparameter.
* How numbers are drawn: one `integers` for the donor, then one `integers(2)` per hyperparameter in the order of the
  mapping, members in the order of their numbers. Compare sets and frequencies rather than draws.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

Hyperparameters = Mapping[str, float]


def ranked(scores: Sequence[float]) -> list[int]:
    """Members from the best (highest score) to the worst."""
    return sorted(range(len(scores)), key=lambda member: (-scores[member], member))


def ends(scores: Sequence[float], fraction: float = 0.2) -> tuple[list[int], list[int]]:
    """Members of the top and of the bottom."""
    size = min(math.ceil(fraction * len(scores)), len(scores) // 2)
    order = ranked(scores)
    return order[:size], order[len(order) - size :]


def truncation(member: int, scores: Sequence[float], rng: np.random.Generator, fraction: float = 0.2) -> int:
    """The member whose weights and hyperparameters `member` goes on with; itself if it keeps its own."""
    top, bottom = ends(scores, fraction)
    return top[rng.integers(len(top))] if member in bottom else member


def perturb(
    values: Hyperparameters, rng: np.random.Generator, factors: tuple[float, float] = (0.8, 1.2)
) -> dict[str, float]:
    """Hyperparameters to go on with after exploiting."""
    return {name: value * factors[rng.integers(2)] for name, value in values.items()}


def generation(
    scores: Sequence[float], values: Sequence[Hyperparameters], rng: np.random.Generator, fraction: float = 0.2
) -> list[tuple[int, dict[str, float]]]:
    """For every member: the member whose weights it takes, and its hyperparameters afterwards."""
    out = []
    for member in range(len(scores)):
        donor = truncation(member, scores, rng, fraction)
        out.append((donor, dict(values[member]) if donor == member else perturb(values[donor], rng)))
    return out


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    scores = [0.1, 0.9, 0.5, 0.3, 0.8, 0.2, 0.7, 0.4, 0.6, 0.0]
    assert ends(scores) == ([1, 4], [0, 9])
    assert ends([1.0, 1.0, 1.0]) == ([0], [2])
    values = [{"lr": 0.1 * (i + 1), "decay": 1.0} for i in range(10)]
    donors = set()
    for _ in range(200):
        for member, (donor, after) in enumerate(generation(scores, values, rng)):
            if member in (0, 9):
                donors.add(donor)
                assert min(abs(after["lr"] / values[donor]["lr"] - f) for f in (0.8, 1.2)) < 1e-12
                assert after["decay"] in (0.8, 1.2)
            else:
                assert (donor, after) == (member, values[member])
    assert donors == {1, 4}
