"""Differential privacy of clients: the model's moves against the oracle, the noise, and what epsilon counts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flockstep.errors import CompositionError, ConfigurationError
from flockstep.records.events import ScalarEvent, UpdateEvent
from flockstep.strategies.base import Strategy
from flockstep.strategies.privacy.dp import DifferentialPrivacy
from flockstep.testing.strategies import run_strategy
from support.bowls import bowls, drawn
from support.oracles.dp_fedavg import dp_fedavg

dp_accounting = pytest.importorskip("dp_accounting")
LR = 0.1
PRIVATE = "federated({}, 5, weighting=equal, sampling=poisson, privacy={})"


def rounds_of(run):
    """The clients of each round, of which some are empty, each with its number of steps."""
    rounds = [{} for _ in run.of(ScalarEvent)]
    for sent in run.sent("change"):
        rounds[sent.message.note.round - 1][sent.message.source] = sent.message.note.steps
    return rounds


@pytest.mark.oracle("privacy:dp")
@pytest.mark.oracle("client_sampling:poisson")
def test_equals_the_oracle_up_to_its_noise():
    optima, curvatures = drawn(5)
    job, parts = bowls(optima, curvatures, lr=LR)
    run = run_strategy(PRIVATE.format(2, "dp(clip=0.2, noise=1e-9)"), 5, 60, job=job, parts=parts)
    rounds = rounds_of(run)
    assert {len(one) for one in rounds} > {0, 1, 2}, "a round of nobody is a round"

    def gradient(client, w, step):
        return curvatures[client] * (w - optima[client])

    given = {"weights": np.ones(5), "rates": (LR, 0.2, 1e-9, 0.4), "clip_at_end": True}
    models = dp_fedavg(np.zeros(3), gradient, rounds, np.random.default_rng(0), **given)
    assert run.server == pytest.approx(models[-1], abs=1e-7)


@pytest.mark.negative_control("privacy:dp")
@pytest.mark.negative_control("client_sampling:poisson")
def test_the_noise_has_its_variance():
    job, parts = bowls(np.zeros((4, 500)), np.ones((4, 500)))  # clients have nothing to change
    runs = {
        noise: run_strategy(PRIVATE.format(2, f"dp(clip=0.5, noise={noise})"), 4, 10, job=job, parts=parts)
        for noise in (1, 3)
    }
    for noise, run in runs.items():
        first = run.sent("task", -1)
        number = min(one.message.note.round for one in first if one.message.note.round > 1)
        model = next(one.message.payload for one in first if one.message.note.round == number)
        # Clients pull the model back to zero after the first round; until then there is noise alone.
        assert number > 1
        assert np.std(model) == pytest.approx(noise * 0.5 / 2 * math.sqrt(number - 1), rel=0.25)
    assert np.std(runs[3].server) > 2 * np.std(runs[1].server)


def test_epsilon_is_the_accountants_and_ends_the_run():
    job, parts = bowls(*drawn(5))
    run = run_strategy(PRIVATE.format(1, "dp(noise=2, epsilon=3, delta=1e-3)"), 5, 2000, job=job, parts=parts)
    spent = [event.value for event in run.of(ScalarEvent) if event.name == "epsilon"]
    event = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(2.0))

    def right(rounds):
        accountant = dp_accounting.rdp.RdpAccountant()
        return accountant.compose(event, rounds).get_epsilon(1e-3)

    assert spent[::9] == pytest.approx([right(number) for number in range(1, len(spent) + 1, 9)])
    assert spent[-1] <= 3 < right(len(spent) + 1)
    assert len(run.of(UpdateEvent)) < 2000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("federated(2, privacy=dp)", "drawn independently, weigh alike and tell nothing else; use weighting=equal and"),
        ("federated(2, weighting=equal, sampling=poisson, privacy=dp, drift=scaffold)", "drift=uncorrected or prox"),
        ("federated(2, weighting=equal, sampling=poisson, privacy=dp(clip=0))", "clip must be > 0 and finite, got 0"),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(text, said):
    with pytest.raises((ConfigurationError, CompositionError), match=said):
        Strategy.parse(text)


def test_epsilon_that_cannot_be_had_is_refused_before_the_run():
    said = (
        "epsilon=0.1 cannot be had: one round with noise=0.5 and 2 of 5 clients costs .*; raise noise, or choose fewer"
    )
    with pytest.raises(ConfigurationError, match=said):
        Strategy.parse(PRIVATE.format(2, "dp(noise=0.5, epsilon=0.1)")).check(5)


def test_changes_are_scaled_to_the_clip():
    rule = DifferentialPrivacy(clip=2.0)
    assert np.linalg.norm(rule.limited(np.full(4, 5.0))) == pytest.approx(2)
    assert rule.limited(np.full(4, 0.5)).tolist() == [0.5] * 4
