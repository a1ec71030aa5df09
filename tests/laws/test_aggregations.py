"""Aggregations against the papers in plain numpy, their invariants and bounds, and parameter servers that use them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.errors import ConfigurationError, PeerLost
from flockstep.records.events import UpdateEvent
from flockstep.strategies.aggregations import Aggregation
from flockstep.strategies.aggregations.order import ascending, comparators
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import GradientSource, check_strategy, equal_bits, run_strategy, small_job
from support.matrix import few

STEPS = 10
RULES = ["median", "trimmed_mean(2)", "krum(2)", "multi_krum(2)", "geometric_median", "centered_clipping(0.5)"]


def rule(text):
    return Aggregation.parse(text)


def combined(text, vectors, previous=None):
    return rule(text).combine(list(vectors), previous).vector


def sample(n=9, size=50, seed=0):
    return np.random.default_rng(seed).normal(1, 1, (n, size))


# ---- the papers, in plain numpy


def krum_scores(vectors, f):
    """Blanchard et al. 2017, section 4."""
    n = len(vectors)
    return [sum(sorted(((v - u) ** 2).sum() for j, u in enumerate(vectors) if j != i)[: n - f - 2])
            for i, v in enumerate(vectors)]  # fmt: skip


def weiszfeld(vectors, iterations=200, nu=1e-6):
    z = vectors.mean(0)
    for _ in range(iterations):
        beta = 1 / np.maximum(nu, np.linalg.norm(vectors - z, axis=1))
        z = (beta[:, None] * vectors).sum(0) / beta.sum()
    return z


def clipped(vectors, v, tau, iterations):
    """Karimireddy et al. 2021, algorithm 2."""
    for _ in range(iterations):
        v = v + np.mean([(x - v) * min(1, tau / np.linalg.norm(x - v)) for x in vectors], axis=0)
    return v


@pytest.mark.oracle("aggregation:mean")
def test_the_mean_is_summed_in_order():
    x = sample(3).astype(np.float32)
    assert equal_bits(combined("mean", x), (x[0] + x[1] + x[2]) / np.float32(3))


@pytest.mark.negative_control("aggregation:mean")
def test_one_worker_moves_the_mean_anywhere():
    x = sample()
    x[3] = 1e9
    assert np.linalg.norm(combined("mean", x)) > 1e8


@pytest.mark.oracle("aggregation:median")
@pytest.mark.parametrize("n", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_median_is_numpys(n, dtype):
    x = sample(n, 3 * 32768 + 5).astype(dtype)  # several blocks
    assert equal_bits(combined("median", x), np.median(x, axis=0))


@pytest.mark.oracle("aggregation:trimmed_mean")
@pytest.mark.parametrize(("n", "b"), [(1, 0), (3, 1), (8, 1), (8, 3), (9, 4)])
def test_the_trimmed_mean_leaves_out_both_ends(n, b):
    x = sample(n)
    np.testing.assert_allclose(combined(f"trimmed_mean({b})", x), np.sort(x, axis=0)[b : n - b].mean(0), rtol=1e-14)


@pytest.mark.oracle("aggregation:krum", "aggregation:multi_krum")
@pytest.mark.parametrize("n", [5, 8, 11])
@pytest.mark.parametrize("f", [0, 1])
def test_krum_chooses_by_the_papers_score(n, f):
    for seed in range(5):
        x = sample(n, seed=seed)
        order = np.argsort(krum_scores(x, f), kind="stable")
        assert equal_bits(combined(f"krum({f})", x), x[order[0]])
        for m in (2, n - f - 2):
            np.testing.assert_allclose(combined(f"multi_krum({f}, {m})", x), x[order[:m]].mean(0), rtol=1e-12)
        assert equal_bits(combined(f"multi_krum({f})", x), combined(f"multi_krum({f}, {n - f - 2})", x))


@pytest.mark.oracle("aggregation:geometric_median")
def test_the_geometric_median_is_weiszfelds():
    x = sample()
    for iterations in (1, 3, 100):
        ours = combined(f"geometric_median(iterations={iterations})", x)
        np.testing.assert_allclose(ours, weiszfeld(x, iterations), rtol=1e-9)
    pull = sum((v - ours) / np.linalg.norm(v - ours) for v in x)
    assert np.linalg.norm(pull) < 1e-6, "unit vectors toward the points cancel at the geometric median"


@pytest.mark.oracle("aggregation:centered_clipping")
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("tau", [0.5, 8.0, 1e6])
def test_centered_clipping_is_the_papers(iterations, tau):
    x, v = sample(), sample(1, seed=1)[0]
    text = f"centered_clipping({tau}, {iterations})"
    np.testing.assert_allclose(combined(text, x, v), clipped(x, v, tau, iterations), rtol=1e-9)
    np.testing.assert_allclose(combined(text, x), clipped(x, 0 * v, tau, iterations), rtol=1e-9)


@pytest.mark.negative_control(
    "aggregation:median", "aggregation:trimmed_mean", "aggregation:krum", "aggregation:multi_krum",
    "aggregation:geometric_median", "aggregation:centered_clipping",
)  # fmt: skip
@pytest.mark.parametrize("text", RULES)
def test_no_rule_is_the_mean_or_its_neighbor(text):
    """Another parameter, or the mean, gives another result, so that the oracles above can fail."""
    wrong = {
        "median": "trimmed_mean(1)", "trimmed_mean(2)": "trimmed_mean(3)", "krum(2)": "krum(0)",
        "multi_krum(2)": "multi_krum(2, 4)", "geometric_median": "geometric_median(iterations=1)",
        "centered_clipping(0.5)": "centered_clipping(0.6)",
    }  # fmt: skip
    x = sample(seed=1)
    for other in (wrong[text], "mean"):
        assert not np.allclose(combined(text, x), combined(other, x), rtol=1e-6), other


# ---- invariants


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("size", [1e3, 1e30])
def test_two_of_nine_do_not_move_the_result_far(text, size):
    """Also where the attack is so large that float32 holds nothing beside it."""
    x = sample().astype(np.float32)
    honest = x[2:]
    x[:2] = size * np.sign(sample(2, seed=5))
    start = honest.mean(0)
    for _ in range(3):
        start = combined(text, x, start)
    assert np.isfinite(start).all()
    assert np.linalg.norm(start - honest.mean(0)) <= 1.1 * max(np.linalg.norm(v - honest.mean(0)) for v in honest)


@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_network_sorts(n, seed):
    rows = np.random.default_rng(seed).integers(0, 5, (n, 16)).astype(np.float32)
    assert np.array_equal(ascending(list(rows.copy())), np.sort(rows, axis=0))
    assert len(comparators(n)) <= n * (n - 1) / 2


@pytest.mark.parametrize("text", [*RULES, "mean"])
def test_inputs_do_not_change_and_tensors_give_the_same(text):
    torch = pytest.importorskip("torch")
    x = list(sample().astype(np.float32))
    before = [v.copy() for v in x]
    ours = combined(text, x)
    assert equal_bits(np.stack(x), np.stack(before))
    theirs = combined(text, [torch.from_numpy(v) for v in x])
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-6)


# ---- bounds and compositions


@pytest.mark.parametrize(
    ("text", "n", "words"),
    [
        ("trimmed_mean(4)", 8, "b <= 3"),
        ("krum(3)", 8, "f <= 2"),
        ("krum(0)", 2, "more workers"),
        ("multi_krum(1, 6)", 8, "m <= 5"),
        ("multi_krum(3)", 8, "f <= 2"),
    ],
)
def test_bounds_are_checked_before_anything_starts(text, n, words):
    rule(text).check(n + 1 if text != "krum(0)" else 3)
    with pytest.raises(ConfigurationError, match=words):
        Strategy.parse(f"ps(bsp, aggregation={text})").check(n)


# ---- parameter servers


def oracle(n, aggregate, optimizer="sgd(lr=0.1)", steps=STEPS):
    source = GradientSource(n, small_job(optimizer))
    w, previous = source.start(), None
    stepper = source.stepper(w)
    for _ in range(steps):
        previous = aggregate(np.stack([source.gradient(rank, w) for rank in range(n)]), previous)
        stepper.step(w, previous)
    return w


@pytest.mark.parametrize("name", few(["ps(bsp, aggregation={})", "ps(bsp, shards=3, aggregation={})",
                                      "scatter_reduce(aggregation={})"], "ps(bsp, aggregation={})"))  # fmt: skip
def test_a_server_steps_along_the_median(name):
    result = run_strategy(name.format("median"), 5, STEPS, job=small_job("adam(lr=0.02)")).result
    assert equal_bits(result, oracle(5, lambda x, _: np.median(x, axis=0), "adam(lr=0.02)"))
    assert not equal_bits(result, run_strategy(name.format("mean"), 5, STEPS, job=small_job("adam(lr=0.02)")).result)


def test_a_server_clips_around_its_previous_result():
    result = run_strategy("ps(bsp, aggregation=centered_clipping(0.5))", 5, STEPS).result

    def aggregate(x, v):
        return clipped(x.astype(float), np.zeros(x.shape[1]) if v is None else v, 0.5, 1)

    np.testing.assert_allclose(result, oracle(5, aggregate), rtol=1e-5, atol=1e-6)
    forgets = oracle(5, lambda x, _: aggregate(x, None))
    assert not np.allclose(result, forgets, rtol=1e-4, atol=1e-5)


PROMISES = ["ps(bsp, aggregation=median)", "ps(bsp, shards=2, aggregation=trimmed_mean(1))",
            "ps(bsp, aggregation=krum(1))", "ps(backup(1), aggregation=median)", "ps(k_sync(5), aggregation=krum(1))",
            "ps(k_async(4), aggregation=multi_krum(0))", "ps(bsp, aggregation=geometric_median)",
            "ps(bsp, aggregation=centered_clipping(1))", "scatter_reduce(aggregation=median)",
            "ps(bsp, codec=half, server_update=with_optimizer(adagrad(0.05)), aggregation=median)",
            "ps(bsp, codec=topk(0.2), feedback=residual, aggregation=multi_krum(1))",
            "dpsgd(aggregation=median)"]  # fmt: skip


@pytest.mark.parametrize("text", few(PROMISES, "ps(bsp, aggregation=centered_clipping(1))"))
def test_every_promise_of_a_strategy(text):
    check_strategy(Strategy.parse(text), (5, 6), steps=10)


def test_the_record_says_which_gradients_krum_chose():
    run = run_strategy("ps(bsp, aggregation=krum(1))", 5, STEPS)
    weights = [[e.weight for e in run.of(UpdateEvent)][i : i + 5] for i in range(0, 5 * STEPS, 5)]
    assert all(sorted(each) == [0, 0, 0, 0, 1] for each in weights)
    assert {e.weight for e in run_strategy("ps(bsp, aggregation=median)", 5, STEPS).of(UpdateEvent)} == {None}


def test_a_step_with_too_few_gradients_is_skipped():
    """40 gradients are 13 steps of 3; the gradients left at the end have no others to be compared with."""
    run = run_strategy("ps(k_async(3), aggregation=trimmed_mean(1))", 4, STEPS)
    weights = [event.weight for event in run.of(UpdateEvent)]
    skipped = weights.count(0.0)
    assert 0 < skipped < 5
    assert weights == [None] * (40 - skipped) + [0.0] * skipped
    mean = run_strategy("ps(k_async(3))", 4, STEPS)
    assert {event.weight for event in mean.of(UpdateEvent)} == {1 / 3}


def test_deaths_are_survived_while_a_majority_is_left():
    deaths = [f"dies({rank}, 0.1)" for rank in range(3)]
    run = run_strategy("ps(k_async(5), aggregation=median)", 5, STEPS, faults=deaths[:2])
    assert sum(event.weight is None for event in run.of(UpdateEvent)) > 20
    with pytest.raises(PeerLost, match=r"3 of 5 workers are lost.*needs the gradients of 3"):
        run_strategy("ps(k_async(5), aggregation=median)", 5, STEPS, faults=deaths)


# ---- neighbors


def neighbors_oracle(n, mix, steps=STEPS):
    """On a ring: w_i ← mix(own, left, right) - lr g_i at the old w_i."""
    source = GradientSource(n)
    w = np.stack([source.start() for _ in range(n)])
    for _ in range(steps):
        g = np.stack([source.gradient(rank, w[rank]) for rank in range(n)])
        w = np.stack([mix(w[i], w[i - 1], w[(i + 1) % n]) for i in range(n)]) - np.float32(0.1) * g
    return w


def self_centered(tau, share=1 / 3):
    def mix(own, *others):
        return own + share * sum((x - own) * min(1, tau / max(np.linalg.norm(x - own), 1e-30)) for x in others)

    return mix


@pytest.mark.parametrize(
    ("text", "mix", "wrong"),
    [
        ("centered_clipping(0.05)", self_centered(0.05), self_centered(0.06)),
        ("median", lambda *models: np.median(models, axis=0), lambda *models: np.mean(models, axis=0)),
    ],
)
def test_neighbors_are_combined_as_the_papers_say(text, mix, wrong):
    replicas = run_strategy(f"dpsgd(aggregation={text})", 5, STEPS).replicas
    np.testing.assert_allclose(replicas, neighbors_oracle(5, mix), rtol=1e-4, atol=1e-5)
    assert not np.allclose(replicas, neighbors_oracle(5, wrong), rtol=1e-4, atol=1e-5)


def test_an_attackers_model_pulls_its_neighbors_by_a_bounded_step():
    """The attacker's own model runs away; each neighbor moves by at most W_ij tau per step toward it."""
    far = {
        text: np.linalg.norm(
            run_strategy(f"dpsgd(aggregation={text})", 6, STEPS, faults=["flips_sign(0, 1e6)"]).replicas[1:]
        )
        for text in ("mean", "centered_clipping(0.05)", "trimmed_mean(1)")
    }
    assert far["mean"] > 1e4
    assert far["centered_clipping(0.05)"] < 20
    assert far["trimmed_mean(1)"] < 20


def test_a_neighborhood_must_be_large_enough():
    with pytest.raises(ConfigurationError, match="n=3 and f=1"):
        Strategy.parse("dpsgd(aggregation=krum(1))").check(6)
    Strategy.parse("dpsgd(complete, aggregation=krum(1))").check(6)


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("size", [1e30, 1e76, 1e200])
def test_vectors_whose_squares_overflow_do_not_move_the_result_far(text, size):
    """Two of nine vectors are huge, in opposite or equal directions; the inner products of the others are right."""
    for sign in (1, -1):
        vectors = sample()
        vectors[2], vectors[5] = size, sign * size
        honest = np.delete(vectors, [2, 5], axis=0)
        found = combined(text, vectors)
        assert np.isfinite(found).all()
        assert np.linalg.norm(found - honest.mean(0)) <= 2 * np.linalg.norm(honest - honest.mean(0), axis=1).max()


@pytest.mark.parametrize("size", [1e76, 1e200])
def test_a_huge_vector_has_no_weight(size):
    """The geometric median is that of the others, and centered clipping counts the difference as zeros."""
    vectors = sample()
    vectors[2] = size
    honest = np.delete(vectors, 2, axis=0)
    np.testing.assert_allclose(combined("geometric_median", vectors), combined("geometric_median", honest), rtol=1e-6)
    np.testing.assert_allclose(
        combined("centered_clipping(0.5)", vectors), combined("centered_clipping(0.5)", honest) * 8 / 9, rtol=1e-12
    )
    own = combined("centered_clipping(0.5)", honest)
    moved = rule("centered_clipping(0.5)").mix(own, [honest[0], np.full(50, size)], [0.3, 0.3])
    without = rule("centered_clipping(0.5)").mix(own, [honest[0], own], [0.3, 0.3])
    np.testing.assert_allclose(moved, without, rtol=1e-12)
