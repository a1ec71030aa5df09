"""Oort: Lai, Zhu, Madhyastha, Chowdhury, "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI
2021, equation 1, section 4.2 and algorithm 1.

    statistical utility    U(i) = |B_i| √(1/|B_i| Σ_{k∈B_i} Loss(k)²)
    utility of selection   Util(i) = (U(i) + √(0.1 log R / L(i))) · (T/t_i)^α if T < t_i, without that factor otherwise
    exploitation: clients with Util(i) ≥ c · (the (1−ε)K-th largest Util), c = 95 %; of these (1−ε)K are drawn with
                  probabilities proportional to Util
    exploration:  εK of the clients that have never taken part, drawn by speed
    pacer:        T ← T + Δ if Σ U over rounds R−2W … R−W exceeds Σ U over rounds R−W … R
    ε starts at 0.9 and is multiplied by 0.98 every round until 0.2

R: current round, L(i): the last round in which client i took part, t_i: its duration, T: preferred duration of a round,
α: penalty for slow clients (paper: 2), K: clients per round.

Left open, and settled here:
* Clipping "outlier" utilities: U(i) is limited to the 95th percentile; which element that is: index ⌊0.95 n⌋ of the
  ascending list, as in the authors' code. `clipped` does it; `util` takes what it is given.
* The authors' code scales U(i) to [0, 1] over the clients before adding the uncertainty; equation and algorithm do not.
* Admission: ≥ the cut-off (the paper says "greater"), so that at least (1−ε)K clients remain. The authors' code cuts
  off at the ((1−ε)K + 1)-th largest.
* (1−ε)K is rounded down and exploration gets the rest, as in the authors' code.
* "By speed": with probabilities proportional to 1/t_i. The authors' code uses an initial reward instead.
* log is the natural logarithm. Draws are without replacement.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from support.oracles.interfaces import Array


def statistical_utility(losses: Array) -> float:
    """U(i), from the losses of the samples that the client trained on."""
    return float(len(losses) * np.sqrt(np.mean(np.square(losses))))


def system_factor(duration: float, T: float, alpha: float = 2.0) -> float:
    """(T/t_i)^α if the client is slower than T, 1 otherwise."""
    return (T / duration) ** alpha if duration > T else 1.0


def util(U: float, last_round: int, R: int, *, duration: float, T: float, alpha: float = 2.0) -> float:
    """Util(i)."""
    return (U + math.sqrt(0.1 * math.log(R) / last_round)) * system_factor(duration, T, alpha)


def clipped(U: Mapping[int, float], percentile: float = 0.95) -> dict[int, float]:
    """U(i) limited to the percentile."""
    ascending = sorted(U.values())
    limit = ascending[min(int(percentile * len(ascending)), len(ascending) - 1)]
    return {i: min(value, limit) for i, value in U.items()}


def exploration_factor(R: int, start: float = 0.9, decay: float = 0.98, least: float = 0.2) -> float:
    """ε in round R = 1, 2, …"""
    return max(start * decay ** (R - 1), least)


def admitted(utils: Mapping[int, float], exploit: int, c: float = 0.95) -> list[int]:
    """Clients whose utility reaches c times the `exploit`-th largest."""
    cut_off = c * sorted(utils.values(), reverse=True)[exploit - 1]
    return [i for i, value in utils.items() if value >= cut_off]


def select(
    utils: Mapping[int, float], unexplored: Mapping[int, float], K: int, epsilon: float, rng: np.random.Generator
) -> list[int]:
    """Clients of a round: `utils` of explored clients, durations of `unexplored` ones."""
    exploit = min(int(K * (1 - epsilon)), len(utils))
    explore = min(K - exploit, len(unexplored))
    out: list[int] = []
    for count, pool in ((exploit, utils), (explore, {i: 1 / t for i, t in unexplored.items()})):
        if count:
            names = admitted(utils, exploit) if pool is utils else list(pool)
            share = np.array([pool[i] for i in names])
            out += [int(i) for i in rng.choice(names, size=count, replace=False, p=share / share.sum())]
    return out


def pacer(T: float, history: Sequence[float], W: int, delta: float) -> float:
    """T for the next round; `history` holds Σ U of the participants of every round so far."""
    return T + delta if len(history) >= 2 * W and sum(history[-2 * W : -W]) > sum(history[-W:]) else T


if __name__ == "__main__":
    assert statistical_utility(np.array([3.0, 4.0])) == 2 * np.sqrt(12.5)
    assert (system_factor(5.0, 10.0), system_factor(20.0, 10.0)) == (1.0, 0.25)
    np.testing.assert_allclose(util(2.0, 4, 10, duration=20.0, T=10.0), (2 + (0.1 * np.log(10) / 4) ** 0.5) / 4)
    assert util(2.0, 1, 50, duration=1.0, T=10.0) > util(2.0, 40, 50, duration=1.0, T=10.0), "long unseen counts more"
    assert [round(exploration_factor(R), 4) for R in (1, 2, 100)] == [0.9, 0.882, 0.2]
    assert sorted(clipped({i: float(i) for i in range(100)}).values())[-5:] == [95.0] * 5
    utils = {0: 10.0, 1: 9.6, 2: 9.1, 3: 5.0, 4: 9.3}
    assert admitted(utils, 2) == [0, 1, 4]  # 0.95 · 9.6 = 9.12
    rng = np.random.default_rng(0)
    counts = np.zeros(8)
    for _ in range(6000):
        chosen = select(utils, {5: 1.0, 6: 1.0, 7: 2.0}, 3, 1 / 3, rng)
        assert len(set(chosen)) == 3
        counts[chosen] += 1
    assert counts[2] == counts[3] == 0
    np.testing.assert_allclose(counts[5:] / 6000, [0.4, 0.4, 0.2], atol=0.03)
    assert (pacer(5.0, [9, 9, 1, 1], 2, 1.0), pacer(5.0, [1, 1, 9, 9], 2, 1.0), pacer(5.0, [9], 2, 1.0)) == (6, 5, 5)
