"""Federated averaging against oracles from the papers, on unequal quadratics, and what it promises of its rounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flockstep.errors import CompositionError, ConfigurationError, RunError
from flockstep.records.events import UpdateEvent
from flockstep.strategies.base import Strategy
from flockstep.strategies.client_samplings.base import ClientReport, Clients, ClientSampling
from flockstep.strategies.federated import Federated
from flockstep.testing.strategies import equal_bits, run_strategy, small_job
from support.bowls import bowls, drawn
from support.oracles import fedopt
from support.oracles.fedasync import fedasync, hinge, polynomial
from support.oracles.fedavg import fedavg
from support.oracles.fedbuff import fedbuff
from support.oracles.feddyn import feddyn
from support.oracles.fednova import fednova
from support.oracles.fedprox import fedprox
from support.oracles.interfaces import Arrival
from support.oracles.scaffold import scaffold

LR = 0.1


def least(optima, curvatures):
    """The minimum of the mean of all bowls."""
    return (curvatures * optima).sum(0) / curvatures.sum(0)


def biased(optima, curvatures, period):
    """Where FedAvg stops: the mean of the clients' moves toward their own optima is zero there."""
    pull = 1 - (1 - LR * curvatures) ** period
    return (pull * optima).sum(0) / pull.sum(0)


def end(text, steps=4000, clients=6, seed=0):
    """The model with which a run on drawn bowls ends, and the bowls."""
    optima, curvatures = drawn(clients, seed=seed)
    job, parts = bowls(optima, curvatures)
    return run_strategy(text, clients, steps, job=job, parts=parts).server, optima, curvatures


def gradient(optima, curvatures):
    """The gradient of a client's bowl, as the oracles ask for it."""
    return lambda client, w, step: curvatures[client] * (w - optima[client])


CORRECTED = {
    "uncorrected, epochs=2": lambda *given, sizes: fedavg(*given, eta=LR, sizes=sizes),
    "prox(mu=0.5), epochs=2": lambda *given, sizes: fedprox(*given, eta=LR, mu=0.5, sizes=sizes),
    "nova, epochs=2": lambda *given, sizes: fednova(*given, eta=LR, sizes=sizes),
    "scaffold, weighting=equal": lambda *given, sizes: scaffold(*given, clients=4, eta_l=LR).models,
    "dyn(alpha=0.5), weighting=equal": lambda *given, sizes: feddyn(*given, clients=4, eta=LR, alpha=0.5).models,
}
"""Drift and weighting → the oracle."""


@pytest.mark.oracle("strategy:federated")
@pytest.mark.oracle("drift:uncorrected")
@pytest.mark.oracle("drift:prox")
@pytest.mark.oracle("drift:nova")
@pytest.mark.oracle("drift:scaffold")
@pytest.mark.oracle("drift:dyn")
@pytest.mark.oracle("privacy:exposed")
@pytest.mark.parametrize("participants", [2, 4])
@pytest.mark.parametrize("text", CORRECTED)
def test_equals_the_oracle(text, participants):
    bowl, sizes = drawn(4), (4, 8, 12, 32)
    job, parts = bowls(*bowl, sizes, lr=LR)
    run = run_strategy(f"federated({participants}, drift={text})", 4, 60, job=job, parts=parts)
    rounds = {}
    for sent in run.sent("change"):
        rounds.setdefault(sent.message.note.round, {})[sent.message.source] = sent.message.note.steps
    models = CORRECTED[text](np.zeros(3), gradient(*bowl), [rounds[t] for t in sorted(rounds)], sizes=sizes)
    assert len(models) > 5
    assert run.server == pytest.approx(models[-1], abs=1e-12)


@pytest.mark.oracle("drift:nova")
def test_nova_with_momentum_equals_the_oracle():
    bowl, sizes = drawn(4), (4, 8, 12, 32)
    job, parts = bowls(*bowl, sizes, lr=f"{LR}, momentum=0.8")
    run = run_strategy("federated(4, epochs=2, drift=nova)", 4, 60, job=job, parts=parts)
    rounds = [{k: 2 * size // 4 for k, size in enumerate(sizes)}] * run.nodes[-1].version
    models = fednova(np.zeros(3), gradient(*bowl), rounds, eta=LR, sizes=sizes, rho=0.8)
    assert run.server == pytest.approx(models[-1], abs=1e-12)


class Unweighted(Federated):
    """Negative control: all changes count alike."""

    def weights(self, counts, clients):
        return {rank: 1 / len(counts) for rank in counts}


@pytest.mark.negative_control("strategy:federated")
@pytest.mark.negative_control("drift:uncorrected")
@pytest.mark.negative_control("privacy:exposed")
def test_the_oracle_notices_other_weights():
    job, parts = bowls(*drawn(4), [4, 8, 12, 32])
    right, wrong = (
        run_strategy(kind(participants=2, epochs=1), 4, 30, job=job, parts=parts).server
        for kind in (Federated, Unweighted)
    )
    assert np.abs(right - wrong).max() > 1e-3


@pytest.mark.oracle("outer_optimizer:adam")
@pytest.mark.oracle("outer_optimizer:yogi")
@pytest.mark.oracle("outer_optimizer:adagrad")
@pytest.mark.parametrize(
    ("text", "moment", "beta1"),
    [
        ("adam(beta1=0.8", fedopt.adam, 0.8),
        ("yogi(beta1=0.8", fedopt.yogi, 0.8),
        ("adagrad(beta1=0", fedopt.adagrad, 0),
    ],
)
def test_adaptive_servers_equal_the_oracle(text, moment, beta1):
    bowl = drawn(4)
    job, parts = bowls(*bowl, lr=LR)
    outer = f"{text}, beta2=0.9, lr=0.2, eps=0.01)"
    run = run_strategy(f"federated(4, 5, outer_optimizer={outer})", 4, 25, job=job, parts=parts)
    given = np.zeros(3), gradient(*bowl), [dict.fromkeys(range(4), 5)] * 5, moment
    right = fedopt.fedopt(*given, rates=(LR, 0.2), betas=(beta1, 0.9), tau=0.01)
    assert run.server == pytest.approx(right.models[-1], abs=1e-12)


@pytest.mark.negative_control("outer_optimizer:yogi")
@pytest.mark.negative_control("outer_optimizer:adagrad")
def test_adaptive_servers_differ():
    job, parts = bowls(*drawn(4))
    texts = ("adam(beta1=0)", "yogi(beta1=0)", "adagrad")
    ends = [
        run_strategy(f"federated(4, 5, outer_optimizer={one})", 4, 25, job=job, parts=parts).server for one in texts
    ]
    assert min(np.abs(a - b).max() for a, b in itertools.combinations(ends, 2)) > 1e-5


def asynchronous(text):
    """A run of asynchronous clients, and what an oracle needs: initial model, gradient and order of arrival."""
    bowl = drawn(4)
    job, parts = bowls(*bowl, lr=LR)
    run = run_strategy(text, 4, 30, job=job, parts=parts, compute="exponential(1)")
    changes = [sent.message for sent in run.sent("change")]
    order = [Arrival(one.source, one.note.round, one.note.steps) for one in changes]
    return run, np.zeros(3), gradient(*bowl), order


@pytest.mark.oracle("strategy:fedbuff")
def test_fedbuff_equals_the_oracle():
    run, *given = asynchronous("fedbuff(3, 5, buffer=2)")
    assert max(event.staleness for event in run.of(UpdateEvent)) > 0
    assert run.server == pytest.approx(fedbuff(*given, K=2, eta_l=LR, eta_g=1)[-1], abs=1e-12)


@pytest.mark.oracle("strategy:fedasync")
@pytest.mark.parametrize(
    ("more", "right"),
    [
        ("power=1", {"s": polynomial(1)}),
        ("power=2, bound=1", {"s": hinge(2, 1)}),
        ("power=1, drift=prox(mu=0.3)", {"s": polynomial(1), "rho": 0.3}),
    ],
)
def test_fedasync_equals_the_oracle(more, right):
    run, *given = asynchronous(f"fedasync(3, 5, alpha=0.5, {more})")
    assert max(event.staleness for event in run.of(UpdateEvent)) > 1
    assert run.server == pytest.approx(fedasync(*given, gamma=LR, alpha=0.5, **right)[-1], abs=1e-12)


@pytest.mark.negative_control("strategy:fedbuff")
@pytest.mark.negative_control("strategy:fedasync")
@pytest.mark.parametrize("text", ["fedbuff(3, 5, buffer=2{})", "fedasync(3, 5{})"])
def test_the_staleness_of_a_change_matters(text):
    plain, scaled = (asynchronous(text.format(more))[0].server for more in (", power=0", ", power=2"))
    assert np.abs(plain - scaled).max() > 1e-3


@pytest.mark.negative_control("drift:scaffold")
@pytest.mark.negative_control("drift:dyn")
@pytest.mark.negative_control("drift:prox")
def test_fedavg_stops_at_its_bias():
    model, optima, curvatures = end("federated(6, 10)")
    assert model == pytest.approx(biased(optima, curvatures, 10), abs=1e-9)
    assert np.abs(model - least(optima, curvatures)).max() > 0.01


@pytest.mark.parametrize("drift", ["scaffold", "dyn(alpha=0.5)"])
@pytest.mark.parametrize("participants", [6, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_corrected_drift_has_no_bias(drift, participants, seed):
    model, optima, curvatures = end(f"federated({participants}, 10, drift={drift})", seed=seed)
    assert model == pytest.approx(least(optima, curvatures), abs=1e-6)


def test_prox_without_mu_is_fedavg_bit_for_bit_and_with_it_less_biased():
    plain, without = (run_strategy(f"federated(2, 5, drift={text})", 4, 40) for text in ("uncorrected", "prox(mu=0)"))
    assert equal_bits(plain.server, without.server)
    ends = [end(f"federated(6, 10, drift=prox(mu={mu}))") for mu in (0, 1, 5)]
    errors = [np.linalg.norm(model - least(*bowl)) for model, *bowl in ends]
    assert errors[1] < 0.9 * errors[0]
    assert errors[2] < 0.6 * errors[0]


@pytest.mark.negative_control("drift:nova")
def test_nova_counts_directions_where_clients_take_unequal_steps():
    optima, curvatures = drawn(4)[0], np.ones((4, 3))
    sizes = np.array([4, 8, 16, 40])
    job, parts = bowls(optima, curvatures, sizes.tolist(), lr=0.01)
    right = sizes @ optima / sizes.sum()
    errors = [
        np.linalg.norm(
            run_strategy(f"federated(4, epochs=2, drift={text})", 4, 2000, job=job, parts=parts).server - right
        )
        for text in ("uncorrected", "nova")
    ]
    assert errors[1] < 0.1 * errors[0]


def mean_weights(text, draws=20_000):
    """The mean weight of each of five clients of unequal size over many rounds, with its standard error."""
    strategy, clients, random = Strategy.parse(text), Clients(), np.random.default_rng(3)
    assert isinstance(strategy, Federated)
    for rank, size in enumerate((4, 8, 12, 16, 20)):
        clients.add(rank, size)
    found = np.zeros((draws, 5))
    for row in found:
        for rank, weight in strategy.weights(strategy.sampling.choose(random, clients, 2), clients).items():
            row[rank] = weight
    return found.mean(0), found.std(0) / draws**0.5


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ("weighting=equal", [0.2] * 5),
        ("weighting=expected", np.arange(1, 6) / 15),
        ("weighting=equal, sampling=proportional", np.arange(1, 6) / 15),
    ],
)
@pytest.mark.oracle("client_sampling:uniform")
@pytest.mark.oracle("client_sampling:proportional")
def test_rounds_of_some_clients_are_unbiased_estimates_of_those_of_all(arguments, right):
    """Li et al. 2020, section 3.2, schemes I and II."""
    mean, error = mean_weights(f"federated(2, {arguments})")
    assert np.abs(mean - right).max() < 5 * error.max()


@pytest.mark.negative_control("client_sampling:uniform")
@pytest.mark.negative_control("client_sampling:proportional")
def test_weights_by_samples_are_a_biased_estimate():
    mean, error = mean_weights("federated(2, weighting=samples)")
    assert np.abs(mean - np.arange(1, 6) / 15).max() > 20 * error.max()


def reported(losses, seconds, sizes=(10, 10, 10, 10, 10)):
    """Clients with reports, but the last one."""
    clients = Clients()
    for rank, size in enumerate(sizes):
        clients.add(rank, size)
    for rank, (loss, took) in enumerate(zip(losses, seconds, strict=True)):
        clients.reports[rank] = ClientReport(1, loss, took)
    return clients


def how_often(text, clients, count=2, draws=4000):
    """Share of the rounds in which each client takes part."""
    sampling, random = ClientSampling.parse(text), np.random.default_rng(1)
    chosen = [rank for _ in range(draws) for rank in sampling.choose(random, clients, count)]
    return np.bincount(chosen, minlength=len(clients.samples)) / draws


@pytest.mark.oracle("client_sampling:power_of_choice")
@pytest.mark.negative_control("client_sampling:power_of_choice")
def test_power_of_choice_takes_the_candidates_with_the_highest_loss():
    clients = reported([1, 4, 3, 2], [1, 1, 1, 1])
    assert how_often("power_of_choice(candidates=2.5)", clients).tolist() == [0, 1, 0, 0, 1]
    # Of three of the five all but the lowest: client 0 never, 3 if 0 is among them, 2 if 0 or 3 is, 1 and 4 always.
    often = how_often("power_of_choice(candidates=1.5)", clients)
    assert often == pytest.approx([0, 0.6, 0.5, 0.3, 0.6], abs=0.04)
    assert how_often("power_of_choice(candidates=1)", clients) == pytest.approx([0.4] * 5, abs=0.05)


@pytest.mark.oracle("client_sampling:oort")
@pytest.mark.negative_control("client_sampling:oort")
def test_oort_prefers_loss_and_speed_and_explores():
    clients = reported([1, 2, 1, 1], [1, 1, 2, 1], (10, 10, 10, 20, 10))
    often = how_often("oort(preferred=1, explore=0)", clients, count=1)
    assert often == pytest.approx(np.array([4, 8, 1, 8, 0]) / 21, abs=0.05)
    assert how_often("oort(explore=0.5)", clients)[4] == 1


def test_a_client_that_dies_costs_its_round_its_share_alone():
    job, parts = bowls(*drawn(4))
    given = {"job": job, "parts": parts, "compute": "constant(1)"}
    whole, run = (run_strategy("federated(4, 5)", 4, 20, faults=faults, **given) for faults in ([], ["dies(1, 7.5)"]))
    rounds = [[event.source for event in one.of(UpdateEvent)] for one in (whole, run)]
    assert rounds[0] == [0, 1, 2, 3] * 4
    assert rounds[1][:7] == [0, 1, 2, 3, 0, 2, 3]
    assert 1 not in rounds[1][4:]


def test_late_changes_are_dropped_at_the_deadline_and_their_clients_chosen_again():
    optima, curvatures = drawn(3)
    job, parts = bowls(optima, curvatures)
    given = {"job": job, "parts": parts, "compute": "constant(1)", "faults": ["slows(2, 3, until=9)"]}
    run = run_strategy("federated(3, 5, deadline=6, weighting=equal)", 3, 20, **given)
    updates = [event.source for event in run.of(UpdateEvent)]
    assert updates[:6] == [0, 1, 0, 1, 0, 1]  # client 2 is busy for 15 seconds, which are rounds of 5 for the others
    assert updates[-3:] == [0, 1, 2]


def test_a_deadline_that_nobody_meets_ends_the_run_with_the_reason():
    job, parts = bowls(*drawn(3))
    said = r"no client's change has arrived within deadline=2 seconds in 3 rounds in a row; raise the deadline"
    with pytest.raises(RunError, match=said):
        run_strategy("federated(1, 5, deadline=2)", 3, 20, job=job, parts=parts, compute="constant(1)")


def test_clients_send_what_they_have_when_their_time_is_over():
    job, parts = bowls(*drawn(2))
    given = {"job": job, "parts": parts, "compute": "constant(1)", "faults": ["slows(1, 2)"]}
    run = run_strategy("federated(2, 6, seconds=4)", 2, 12, **given)
    steps = {sent.message.source: sent.message.note.steps for sent in run.sent("change")}
    assert steps == {0: 4, 1: 2}


def test_the_first_changes_count_where_clients_are_to_spare():
    job, parts = bowls(*drawn(4))
    given = {"job": job, "parts": parts, "compute": "constant(1)", "faults": ["slows(3, 50)"]}
    run = run_strategy("federated(3, 5, spare=0.3)", 4, 20, **given)
    assert [event.source for event in run.of(UpdateEvent)][:6] == [0, 1, 2] * 2
    assert run.of(UpdateEvent)[5].seconds < 11


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("federated(1.5)", r"participants must be a share in \(0, 1\) or a whole number of clients, got 1.5"),
        ("federated(2, 0)", "period must be >= 1 local steps, got 0"),
        ("federated(2, epochs=0)", "epochs must be > 0 and finite, got 0"),
        ("federated(2, deadline=0)", "deadline must be > 0 seconds, got 0"),
        ("federated(2, spare=-1)", "spare must be >= 0 and finite, got -1"),
        ("federated(2, sampling=proportional)", "would count the samples twice; use weighting=equal"),
        ("fedbuff(2, drift=scaffold)", "clients of fedbuff begin at any time; use drift=prox, or federated"),
        ("fedasync(2, alpha=0)", r"alpha must be in \(0, 1\], got 0"),
        ("fedbuff(2, buffer=0)", "buffer must be >= 1 changes, got 0"),
    ],
)
def test_bad_settings_are_refused(text, said):
    with pytest.raises((ConfigurationError, CompositionError), match=said):
        Strategy.parse(text)


def test_more_participants_than_clients_are_refused():
    with pytest.raises(ConfigurationError, match="participants must be <= the 3 workers, which are the clients, got 4"):
        run_strategy("federated(4)", 3, 20)


def test_nova_needs_sgd():
    with pytest.raises(
        ConfigurationError, match=r"nova counts the steps of sgd, got adam\(lr=0.02\); use sgd, or another"
    ):
        run_strategy("federated(2, drift=nova)", 3, 20, job=small_job("adam(lr=0.02)"))
