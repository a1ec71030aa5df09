"""Wrong gradients: attacks are injected where they belong, and bad ones are stopped, skipped or lead to quarantine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flockstep.errors import CompositionError, ConfigurationError, Diverged
from flockstep.experiments.single import simulate
from flockstep.nodes import BadGradients
from flockstep.records.events import LostEvent, RefusedEvent, StepEvent
from flockstep.runtime.fault_injector import wrong_gradients
from flockstep.runtime.plan import Plan
from flockstep.simulation.faults import Fault
from flockstep.strategies.finite import norm_of
from flockstep.testing.strategies import GradientSource, Watched, equal_bits, run_strategy, small_job
from support.matrix import few
from support.processes import RealRun

STEPS = 12
NAN = "miscomputes(2, 4, element=3)"
"""Worker 2's fifth gradient contains a NaN."""


def policy(action, max_norm=None, strikes=3):
    class Checked(Watched):
        def __init__(self, engine, plan: Plan, *rest):
            super().__init__(engine, replace(plan, bad_gradients=BadGradients(action, max_norm, strikes)), *rest)

    return Checked


def oracle(bad, n=4, optimizer="sgd(lr=0.1)"):
    """Synchronous SGD, in which the gradients `bad`, pairs (step, rank), count as zeros."""
    source = GradientSource(n, small_job(optimizer))
    w = source.start()
    stepper = source.stepper(w)
    for step in range(STEPS):
        gradients = [source.gradient(rank, w) * ((step, rank) not in bad) for rank in range(n)]
        stepper.step(w, sum(gradients[1:], gradients[0]) / w.dtype.type(n))
    return w


# ---- attacks


def changed(text, gradients, hostile=True):
    change = wrong_gradients([Fault.parse(text)], 1)
    for step, gradient in enumerate(gradients):
        change.change(gradient, step, slice(0, len(gradient)), hostile)
    return gradients


def test_attacks_change_what_they_say():
    g = np.random.default_rng(0).normal(size=(30, 6))
    assert equal_bits(np.array(changed("flips_sign(1, begin=10, end=12)", g.copy()))[9:13],
                      np.array([g[9], -g[10], -g[11], g[12]]))  # fmt: skip
    assert equal_bits(np.array(changed("enlarges(1, 50)", g.copy())), 50 * g)
    mean, square = g[0], g[0] ** 2
    for each in g[1:]:
        mean, square = 0.9 * mean + 0.1 * each, 0.9 * square + 0.1 * each**2
    np.testing.assert_allclose(changed("little_is_enough(1, 1.5)", g.copy())[-1],
                               mean - 1.5 * np.sqrt(np.maximum(square - mean**2, 0)), rtol=1e-9)  # fmt: skip
    assert np.isnan(changed("miscomputes(1, 3, element=2)", g.copy(), hostile=False)).sum() == 1
    assert wrong_gradients([Fault.parse("flips_sign(1)")], 0) is None


@pytest.mark.parametrize("text", ["flips_sign(4)", "flips_sign(-1)", "enlarges(1, begin=5, end=5)"])
def test_an_attack_needs_a_worker_and_a_time(text):
    with pytest.raises(ConfigurationError, match=r"use 0 to 3|end=0 means forever"):
        run_strategy("ps(bsp)", 4, 2, faults=[text])


def test_an_attacker_in_a_run_sends_what_the_oracle_says():
    source = GradientSource(4)
    w = source.start()
    stepper = source.stepper(w)
    for _ in range(STEPS):
        gradients = [source.gradient(rank, w) for rank in range(4)]
        gradients[1] = -gradients[1]
        stepper.step(w, sum(gradients[1:], gradients[0]) / w.dtype.type(4))
    for strategy in ("ps(bsp)", "scatter_reduce"):
        assert equal_bits(run_strategy(strategy, 4, STEPS, faults=["flips_sign(1)"]).result, w), strategy


def test_a_restart_does_not_attack_twice():
    """A worker of local_sgd that is restarted in a step repeats the step with the gradient that it had."""
    strategy, faults = "local_sgd(4)", ["enlarges(1, 3)"]
    whole = run_strategy(strategy, 4, STEPS, faults=faults)
    times = [whole.seconds * share for share in np.linspace(0.05, 0.95, 12)]
    again = run_strategy(strategy, 4, STEPS, faults=faults, restarts=times)
    assert equal_bits(whole.result, again.result)


# ---- stop, skip, quarantine


@pytest.mark.parametrize("strategy", few(["ps(bsp)", "all_reduce", "gossip"], "all_reduce"))
def test_by_default_a_bad_gradient_ends_the_run(strategy):
    with pytest.raises(Diverged, match=r"gradient of worker 2 must be finite, got nan in 'weight' at step 4"):
        run_strategy(strategy, 4, STEPS, faults=[NAN])


@pytest.mark.parametrize("strategy", ["ps(bsp)", "scatter_reduce", "all_reduce"])
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0.9)", "adam(lr=0.02)"])
def test_a_skipped_gradient_counts_as_zeros_in_the_mean(strategy, optimizer):
    """The others keep the weight 1/n, as with a rank that has no more batches in `join()`."""
    run = run_strategy(strategy, 4, STEPS, job=small_job(optimizer), faults=[NAN], simulation=policy("skip"))
    expected = oracle({(4, 2)}, optimizer=optimizer)
    np.testing.assert_allclose(run.result, expected, rtol=2e-5, atol=1e-6)
    assert not np.allclose(run.result, oracle(set(), optimizer=optimizer), rtol=1e-4, atol=1e-4)
    assert [(e.node, e.source) for e in run.of(RefusedEvent)] == [(2, 2)]
    assert "worker 2 must be finite" in run.of(RefusedEvent)[0].reason


EVERY = ["ps(asynchronous)", "ps(ssp(2))", "ps(bsp, aggregation=median)", "ps(bsp, codec=half)", "gossip", "dpsgd",
         "easgd(period=2)", "local_sgd(4)", "downpour", "hogwild", "partial(0.3)", "two_way", "powersgd"]  # fmt: skip


@pytest.mark.parametrize("strategy", few(EVERY, "ps(asynchronous)", "gossip"))
def test_every_kind_of_strategy_goes_on_after_a_skipped_gradient(strategy):
    run = run_strategy(strategy, 4, STEPS, faults=[NAN], simulation=policy("skip"))
    assert all(np.isfinite(params).all() for params in run.params.values())
    assert len(run.of(StepEvent)) == 4 * STEPS
    assert len(run.of(RefusedEvent)) == 1


def test_too_large_a_gradient_is_refused_by_the_worker():
    first = norm_of(GradientSource(1).gradient(0, GradientSource(1).start()))
    with pytest.raises(Diverged, match=rf"gradient of worker \d must have a norm <= {first / 100:.2g}"):
        run_strategy("ps(bsp)", 1, 1, simulation=policy("stop", float(f"{first / 100:.2g}")))
    run = run_strategy("ps(bsp)", 4, STEPS, simulation=policy("skip", 1e6))
    assert equal_bits(run.result, oracle(set()))
    assert run.of(RefusedEvent) == []


@pytest.mark.parametrize("strategy", few(["ps(bsp)", "ps(bsp, codec=half)", "ps(asynchronous, shards=2)"], "ps(bsp)"))
def test_a_server_refuses_what_a_hostile_worker_sends(strategy):
    """The worker's own check has seen nothing, because an attacker does not check itself."""
    run = run_strategy(strategy, 4, STEPS, faults=["enlarges(1)"], simulation=policy("skip", 50.0))
    refused = run.of(RefusedEvent)
    assert {(e.source, e.node < 0) for e in refused} == {(1, True)}
    if strategy == "ps(bsp)":
        assert len(refused) == STEPS
        assert equal_bits(run.result, oracle({(step, 1) for step in range(STEPS)}))
    with pytest.raises(Diverged, match=r"gradient that worker 1 sends to server 0 must have a norm <= 50"):
        run_strategy("ps(bsp)", 4, STEPS, faults=["enlarges(1)"], simulation=policy("stop", 50.0))


@pytest.mark.parametrize("strategy", few(["ps(ssp(3))", "ps(asynchronous)", "gossip", "easgd(period=2)"], "ps(ssp(3))"))
def test_after_three_strikes_a_worker_leaves_and_the_others_go_on(strategy):
    faults = ["miscomputes(2, 4, end=100)"]
    run = run_strategy(strategy, 4, STEPS, faults=faults, simulation=policy("quarantine"))
    assert [e.source for e in run.of(RefusedEvent)] == [2, 2, 2]
    [lost] = run.of(LostEvent)
    assert lost.node == 2
    assert "worker 2 is in quarantine after 3 bad gradients" in lost.reason
    taken = [sum(e.rank == rank for e in run.of(StepEvent)) for rank in range(4)]
    assert taken == [STEPS, STEPS, 7, STEPS]


def test_a_hostile_worker_is_put_in_quarantine_by_the_server():
    run = run_strategy("ps(asynchronous)", 4, STEPS, faults=["enlarges(1)"],
                       simulation=policy("quarantine", 50.0, 2))  # fmt: skip
    assert [(e.source, e.node) for e in run.of(RefusedEvent)] == [(1, -1)] * 2
    assert [e.node for e in run.of(LostEvent)] == [1]


def test_buckets_of_a_gradient_are_skipped_together():
    run = run_strategy("bucketed(1e-5, 1e-5)", 4, STEPS, faults=[NAN], simulation=policy("skip"))
    np.testing.assert_allclose(run.result, oracle({(4, 2)}), rtol=2e-5, atol=1e-6)
    assert len(run.of(RefusedEvent)) == 1


@pytest.mark.full
def test_buckets_that_a_script_has_sent_cannot_be_taken_back(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT.format(strategy="bucketed(1e-5, 1e-5)", more=', on_bad_gradient="skip"'))
    ended = RealRun(["launch", "-n", "2", str(tmp_path / "script.py")], tmp_path / "run", torch=True).end()
    assert ended.code != 0
    assert "need whole gradients" in ended.err


def test_quarantine_is_refused_where_a_lost_worker_ends_the_run(tmp_path):
    for strategy in ("all_reduce", "ps(bsp)"):
        with pytest.raises(CompositionError, match=r"on 4 workers does not continue after the loss of a worker.*skip"):
            simulate("softmax", strategy, workers=4, on_bad_gradient="quarantine", out=tmp_path / "run")


@pytest.mark.parametrize("values", [{"on_bad_gradient": "ignore"}, {"max_gradient_norm": -1.0}, {"strikes": 0}])
def test_settings_are_checked(values, tmp_path):
    with pytest.raises(ConfigurationError, match=r"default|no limit"):
        simulate("softmax", "ps", workers=2, out=tmp_path / "run", **values)


def test_the_summary_names_the_worker(tmp_path):
    run = simulate(
        "softmax", "ps(bsp)", workers=4, steps=20, faults=[NAN], on_bad_gradient="skip", out=tmp_path / "run"
    )
    assert [each.refused for each in run.summary.per_worker] == [0, 0, 1, 0]
    assert run.summary.refusals == ["worker 2: 1 bad gradient refused; zeros were used instead"]
    assert run.config.on_bad_gradient == "skip"
    assert "--on-bad-gradient skip" in run.config.command


# ---- a loss that is not finite


BAD_SAMPLE = """
import numpy as np
from flockstep import Data, Job
from flockstep.frameworks.numpy import SoftmaxRegression

def data():
    random = np.random.default_rng(0)
    y = random.integers(0, 3, 300)
    x = (np.eye(3)[y] * 3 + random.standard_normal((300, 3))).astype("float32")
    x[40] = np.nan
    return Data(x[:240], y[:240], x[240:], y[240:])

def job():
    return Job(lambda: SoftmaxRegression(3, 3), data, "sgd(lr=0.1)", batch=8, epochs=3, name="bad")
"""


def with_a_bad_sample():
    """A job of which one training sample makes the loss and the whole gradient NaN."""
    names: dict = {}
    exec(BAD_SAMPLE, names)
    return names["job"]()


@pytest.mark.parametrize("strategy", few(["ps(bsp)", "all_reduce", "gossip", "bucketed(1e-5, 1e-5)"], "all_reduce"))
def test_a_loss_that_is_not_finite_is_skipped_with_its_gradient(strategy):
    with pytest.raises(Diverged, match=r"the loss of worker \d is nan at step"):
        run_strategy(strategy, 4, STEPS, job=with_a_bad_sample())
    run = run_strategy(strategy, 4, STEPS, job=with_a_bad_sample(), simulation=policy("skip"))
    refused, steps = run.of(RefusedEvent), run.of(StepEvent)
    assert refused
    assert all("the loss of worker" in e.reason for e in refused)
    assert [e.loss for e in steps].count(None) == len(refused)
    assert len(steps) == 4 * STEPS
    assert all(np.isfinite(params).all() for params in run.params.values())


def test_a_worker_of_bad_samples_is_put_in_quarantine():
    job = with_a_bad_sample()
    run = run_strategy("ps(asynchronous)", 4, 4 * STEPS, job=job, simulation=policy("quarantine", strikes=1))
    assert [e.node for e in run.of(LostEvent)] == [e.source for e in run.of(RefusedEvent)]
    assert len(run.of(LostEvent)) == 1


def test_skip_ends_a_run_whose_parameters_are_not_finite():
    with np.errstate(all="ignore"), pytest.raises(Diverged, match="its parameters are not finite"):
        run_strategy("ps(bsp)", 2, 60, job=small_job("sgd(lr=1e39)"), simulation=policy("skip"))


def test_a_search_takes_no_zeros(tmp_path):
    with pytest.raises(CompositionError, match=r"sandblaster.*on_bad_gradient=stop"):
        simulate("softmax", "sandblaster", workers=2, on_bad_gradient="skip", out=tmp_path / "run")


# ---- on real processes

SCRIPT = """
import torch, flockstep
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
optimizer = flockstep.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), strategy={strategy!r}{more})
for step in range(12):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    if flockstep.rank() == 1 and step in (3, 5):
        model[1].weight.grad[0, 2] = float("nan")
    optimizer.step()
optimizer.finish()
assert all(p.isfinite().all() for p in model.parameters())
"""


@pytest.mark.parametrize(("strategy", "more", "options"), few([
    ("all_reduce", "", ["--on-bad-gradient", "skip"]),
    ("asgd", ', on_bad_gradient="skip"', []),
    ("gossip", ', on_bad_gradient="skip"', []),
], ("all_reduce", "", ["--on-bad-gradient", "skip"])))  # fmt: skip
def test_a_script_goes_on_without_the_bad_gradients(strategy, more, options, tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT.format(strategy=strategy, more=more))
    ended = RealRun(["launch", "-n", "2", *options, str(tmp_path / "script.py")], tmp_path / "run", torch=True).end()
    assert ended.code == 0, ended.err
    assert ended.summary is not None
    assert [each["refused"] for each in ended.summary["per_worker"]] == [0, 2]


@pytest.mark.full
def test_a_search_of_a_script_takes_no_zeros(tmp_path: Path):
    text = SCRIPT.format(strategy="all_reduce", more="").replace(
        "SGD(model.parameters(), lr=0.01)", "LBFGS(model.parameters())"
    )
    (tmp_path / "script.py").write_text(text)
    command = ["launch", "-n", "2", "--on-bad-gradient", "skip", str(tmp_path / "script.py")]
    ended = RealRun(command, tmp_path / "run", torch=True).end()
    assert ended.code != 0
    assert "LBFGS compares losses and gradients" in ended.err


@pytest.mark.parametrize("how", few(["own", "hostile"], "hostile"))
def test_a_worker_in_quarantine_leaves_real_processes(how, tmp_path: Path):
    fault = {"own": "miscomputes(1, 4, end=1000)", "hostile": "enlarges(1, 1e6)"}[how]
    command = ["train", "softmax", "-s", "ps(asynchronous)", "-n", "3", "--steps", "60", "--fault", fault,
               "--on-bad-gradient", "quarantine", "--max-gradient-norm", "1000"]  # fmt: skip
    ended = RealRun(command, tmp_path / "run").end()
    assert ended.code == 0, ended.err
    assert ended.summary is not None
    assert [each["node"] for each in ended.summary["lost"]] == [1]
    assert "worker 1 is in quarantine after 3 bad gradients" in ended.summary["lost"][0]["reason"]
    assert ended.summary["per_worker"][1]["refused"] >= 3
    assert "worker 1: " in ended.err
    assert "bad gradients refused; zeros were used instead" in ended.err


def test_a_real_run_takes_wrong_gradients_only(tmp_path: Path):
    ended = RealRun(["train", "softmax", "-s", "ps", "-n", "2", "--fault", "dies(1, 1)"], tmp_path / "run").end()
    assert ended.code == 2
    assert "virtual time only" in ended.err
    assert "flips_sign" in ended.err


def test_a_bad_sample_is_skipped_on_real_processes(tmp_path: Path):
    (tmp_path / "bad.py").write_text(BAD_SAMPLE)
    command = ["train", str(tmp_path / "bad.py"), "-s", "all_reduce", "-n", "2", "--on-bad-gradient", "skip"]
    ended = RealRun(command, tmp_path / "run").end()
    assert ended.code == 0, ended.err
    assert ended.summary is not None
    assert sorted(each["refused"] for each in ended.summary["per_worker"]) == [0, 3]  # once per epoch
