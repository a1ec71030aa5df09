"""Trials in virtual time, the search over hyper-parameters, and what is kept of them."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest

from flockstep import registry
from flockstep.cli.app import run as run_command
from flockstep.collectives.costs import LinkModel
from flockstep.costs.cluster import ClusterShape
from flockstep.costs.cluster_reading import read_cluster
from flockstep.errors import ConfigurationError
from flockstep.expression import ranges
from flockstep.frameworks.base import Engine
from flockstep.launchers.simulate import simulate
from flockstep.messages import HEADER_BYTES
from flockstep.planning import search as searching
from flockstep.planning.advice import advise
from flockstep.planning.job_profile import JobProfile, Site, task_of
from flockstep.planning.plan import Outlook, plan
from flockstep.planning.search import Found, Search, SearchProgress, most_promising
from flockstep.planning.search_space import changed, knobs
from flockstep.planning.step_prediction import ALONE
from flockstep.planning.trial_store import FILE, TrialStore, trial_settings
from flockstep.planning.trials import Trial, TrialContext, averaging, goal_of, trial
from flockstep.records.config import RunConfig
from flockstep.strategies.all_reduce import AllReduce
from flockstep.strategies.base import Strategy
from support.matrix import few

TARGET = 0.9
JOB = "softmax"


def cluster(compute: str = "constant(0.02)", bandwidth: str = "100mbit", count: int = 4) -> ClusterShape:
    text = f'compute = "{compute}"\n[nodes.machines]\ncount = {count}\n[[links]]\ninside = "machines"\n'
    return read_cluster(text + f'bandwidth = "{bandwidth}"\nlatency = "1ms"\n', name="test")


@pytest.fixture(scope="module")
def task() -> JobProfile:
    return task_of(JOB)


@pytest.fixture(scope="module")
def site(task: JobProfile) -> Site:
    return Site(task, cluster())


@pytest.fixture(scope="module")
def outlook(task: JobProfile) -> Outlook:
    strategies = "all_reduce", "local_sgd(period=8)", "ps(consistency=backup(1))"
    return plan(task, cluster("exponential(0.02)"), strategies=strategies, further=False)


def closed_form(site: Site, text: str, workers: int) -> float:
    """A gradient, the optimizer, and the messages: a collective's cost, or n - 1 models through the card of a
    server's machine.
    """
    strategy, (latency, bandwidth), nbytes = Strategy.parse(text), site.link, site.task.nbytes
    if isinstance(strategy, AllReduce):
        moving = strategy.collective.cost(workers, nbytes, LinkModel(latency, 1 / bandwidth, HEADER_BYTES))
    else:
        moving = 2 * latency + workers * (nbytes + HEADER_BYTES) / bandwidth
    return 0.02 + site.work(strategy, workers).step + moving


@pytest.mark.parametrize("text", ["all_reduce", "all_reduce(collective=recursive_doubling)", "ps"])
def test_time_to_target_is_steps_times_the_closed_form(text: str, site: Site) -> None:
    found = trial(site, Strategy.parse(text), 4, target=TARGET)
    assert found.end == "target"
    assert found.steps > 1
    assert found.seconds_to_target == pytest.approx(found.steps * closed_form(site, text, 4), rel=2e-3)
    assert found.seconds == found.seconds_to_target


@pytest.mark.parametrize(
    "text", few(["all_reduce", "ps(consistency=asynchronous)", "easgd(period=3)"], "ps(consistency=asynchronous)")
)
def test_a_trial_is_the_run_that_simulate_records(text: str, task: JobProfile, tmp_path: Path) -> None:
    compute = "exponential(0.02)"
    found = trial(Site(task, cluster(compute)), Strategy.parse(text), 4, target=TARGET, seed=3)
    config = RunConfig(
        kind="simulate",
        job=JOB,
        strategy=text,
        workers=4,
        seed=3,
        steps=1536,
        evaluate_every=7,
        target=TARGET,
        network=str(cluster(compute).network(4)),
        compute=compute,
    )
    summary = simulate(config, tmp_path / "run")
    # Only the optimizer's step, 0.2 µs of 20 ms, is not in the record.
    assert found.seconds_to_target == pytest.approx(summary.seconds_to_target, rel=1e-4)
    assert found.sent_bytes == summary.bytes_to_target


def test_another_step_would_be_noticed(site: Site) -> None:
    found = trial(site, Strategy.parse("all_reduce"), 4, target=TARGET)
    assert found.seconds_to_target != pytest.approx((found.steps + 1) * closed_form(site, "all_reduce", 4), rel=2e-3)


def test_one_worker_has_the_fastest_machine_to_itself(task: JobProfile) -> None:
    text = 'compute = "constant(0.02)"\n[nodes.slow]\nspeed = 0.5\n[nodes.fast]\nspeed = 4\n[[links]]\n'
    uneven = read_cluster(text + 'inside = ["slow", "fast"]\nbandwidth = "1gbit"\nlatency = "1ms"\n', name="test")
    site = Site(task, uneven)
    found = trial(site, None, 2, target=TARGET)
    assert (found.strategy, found.workers, found.sent_bytes) == (ALONE, 1, 0)
    assert found.seconds_to_target == pytest.approx(found.steps * (0.02 / 4 + task.elements / 1e9), rel=1e-9)


@pytest.mark.parametrize("every", [1, 7])
def test_evaluating_takes_no_virtual_time(site: Site, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.planning.trials._every", lambda job, workers, steps: every)
    found = trial(site, Strategy.parse("all_reduce"), 4, target=TARGET)
    assert found.steps % every == 0
    assert found.seconds_to_target == pytest.approx(found.steps * closed_form(site, "all_reduce", 4), rel=2e-3)


def test_models_that_never_met_are_averaged_before_they_count(site: Site) -> None:
    never = trial(site, Strategy.parse("local_sgd(period=1000)"), 4, target=TARGET)
    assert never.end == "target"
    seconds, sent = averaging(site, 4)
    assert seconds > site.task.nbytes / 125e6, "a model crosses a link of 1 Gbit/s"
    assert never.sent_bytes == sent >= site.task.nbytes
    assert never.seconds == pytest.approx(never.steps * (0.02 + site.task.elements / 1e9) + seconds, rel=1e-6)
    assert averaging(site, 1) == (0, 0)


def test_a_trial_ends_after_the_time_it_was_given(site: Site) -> None:
    whole = trial(site, Strategy.parse("all_reduce"), 4, target=TARGET)
    assert whole.seconds_to_target is not None
    found = trial(site, Strategy.parse("all_reduce"), 4, target=TARGET, within=whole.seconds_to_target / 2)
    assert (found.end, found.seconds_to_target) == ("time", None)
    assert found.seconds <= whole.seconds_to_target / 2
    short = trial(site, Strategy.parse("all_reduce"), 4, target=1.0, steps=3)
    assert (short.end, short.seconds_to_target, short.steps) == ("steps", None, 3)


def test_a_learning_rate_that_is_too_high_ends_a_trial(site: Site) -> None:
    found = trial(site, None, 1, target=1.0, lr=1e30)
    assert found.seconds_to_target is None
    assert found.end in ("diverged", "steps")


def test_a_shared_bench_changes_nothing(site: Site) -> None:
    context = TrialContext(site)
    first = [trial(site, Strategy.parse("ps"), 4, target=TARGET, context=context) for _ in range(2)]
    assert first[0] == first[1] == trial(site, Strategy.parse("ps"), 4, target=TARGET)
    assert trial(site, Strategy.parse("ps"), 4, target=TARGET, context=context, seed=1) != first[0]


def test_what_cannot_be_tried_is_refused(site: Site) -> None:
    reference = Site(task_of("vgg-a"), cluster())
    with pytest.raises(
        ConfigurationError, match="vgg-a describes only sizes and has no data, so no model can be trained; give"
    ):
        trial(reference, None, 1)
    with pytest.raises(ConfigurationError, match="time to target needs a finite target, got nan"):
        trial(site, None, 1, target=math.nan)
    with pytest.raises(ConfigurationError, match="workers"):
        trial(site, Strategy.parse("ps(consistency=backup(9))"), 4, target=TARGET)


@pytest.mark.parametrize(
    "noun", ["strategy", "consistency", "server_update", "outer_optimizer", "synchronization_schedule", "codec"]
)
def test_declared_ranges_can_be_searched(noun: str) -> None:
    declared = [one for name in registry.names(noun) for one in ranges(registry.load(noun, name)).values()]
    assert declared
    for one in declared:
        assert one.low < one.high
        assert not (one.log and one.low <= 0 and not one.whole)


def test_knobs_of_a_strategy_and_of_its_parts() -> None:
    strategy = Strategy.parse("ps(consistency=ssp(20), codec=topk(ratio=0.5), feedback=residual)")
    found = {one.name: one for one in knobs(strategy, 8)}
    assert set(found) == {"consistency.s", "codec.ratio"}
    assert (found["consistency.s"].low, found["consistency.s"].high) == (0, 20)
    assert found["codec.ratio"].high == 0.5
    other = changed(strategy, ("consistency", "s"), 2)
    assert str(other) == "ps(consistency=ssp(s=2), codec=topk(ratio=0.5), feedback=residual)"
    assert list(knobs(Strategy.parse("all_reduce"), 8)) == []


class Counting:
    """Trials that are made up, and counted: time to target is least at a learning rate of 0.3 and a period of 4."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        self.stop_after = 10**9

    def __call__(self, site: Site, strategy: Strategy | None, workers: int, **given: object) -> Trial:
        if len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        lr, seed = given["lr"], given["seed"]
        assert isinstance(lr, float)
        assert isinstance(seed, int)
        name = ALONE if strategy is None else str(strategy)
        self.calls.append((name, lr))
        period = getattr(strategy, "period", 4)
        seconds = 1 + math.log(lr / 0.3) ** 2 + math.log(period / 4) ** 2
        return Trial(name, workers, lr, seed, TARGET, "target", seconds, seconds, 10, 100, TARGET, TARGET)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Counting:
    pytest.importorskip("optuna")
    counting = Counting()
    monkeypatch.setattr(searching, "trial", counting)
    return counting


def search(outlook: Outlook, keep: Path | None = None, trials: int = 6, seed: int = 0, **more: float) -> Search:
    kept = TrialStore(trial_settings(TrialContext(outlook.site), outlook.workers, TARGET, seed, "iid"), keep)
    return Search(outlook, most_promising(outlook, 3), kept, trials, more.get("budget"), TARGET, seed)


def test_a_search_begins_with_what_is_written(outlook: Outlook, made_up: Counting) -> None:
    found = search(outlook, trials=2).run()
    assert found[0].strategy == ALONE
    assert {one.strategy for one in found} == {
        ALONE,
        "all_reduce",
        "local_sgd(period=8)",
        "ps(consistency=backup(b=1))",
    }
    optimizer = outlook.task.optimizer
    assert optimizer is not None
    for one in found:
        assert (one.trials[0].strategy, one.trials[0].lr) == (one.strategy, optimizer.lr)
        assert len(one.trials) == 2


def test_a_search_is_the_same_again_and_another_with_another_seed(outlook: Outlook, made_up: Counting) -> None:
    first, second = search(outlook).run(), search(outlook).run()
    assert first == second
    assert search(outlook, seed=1).run() != first


def test_a_search_finds_better_than_what_is_written(outlook: Outlook, made_up: Counting) -> None:
    found = {one.strategy: one for one in search(outlook, trials=25).run()}
    local = found["local_sgd(period=8)"]
    assert local.best is not None
    assert local.seconds is not None
    assert local.trials[0].seconds_to_target is not None
    assert local.seconds < local.trials[0].seconds_to_target
    assert local.seconds < 1.3


def test_kept_trials_are_not_run_again(outlook: Outlook, made_up: Counting, tmp_path: Path) -> None:
    first = search(outlook, tmp_path).run()
    count = len(made_up.calls)
    assert len((tmp_path / FILE).read_text().splitlines()) >= count + 1 - made_up.calls.count(made_up.calls[0])
    said: list[SearchProgress] = []
    assert search(outlook, tmp_path).run(said.append) == first
    assert len(made_up.calls) == count
    assert all(step.again for step in said if step.trial is not None)
    more = search(outlook, tmp_path, trials=7).run()
    assert count < len(made_up.calls) <= count + len(more)
    assert [one.trials[:6] for one in more] == [one.trials for one in first]


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(
    outlook: Outlook, made_up: Counting, tmp_path: Path
) -> None:
    whole = search(outlook).run()
    made_up.calls.clear()
    made_up.stop_after = 7
    broken = search(outlook, tmp_path)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        broken.run()
    assert sum(len(one.trials) for one in broken.found()) == 7
    with (tmp_path / FILE).open("a") as file:
        file.write('{"trial": {"strat')  # what a process that is killed may leave
    made_up.stop_after = 10**9
    assert search(outlook, tmp_path).run() == whole
    assert made_up.calls[7] not in made_up.calls[:7]


def test_a_changed_setting_is_noticed(outlook: Outlook, made_up: Counting, tmp_path: Path) -> None:
    search(outlook, tmp_path, trials=1).run()
    with pytest.raises(ConfigurationError, match=r"seed must be 0, as in the trials stored in .*; give another folder"):
        search(outlook, tmp_path, seed=1)
    slower = dataclasses.replace(outlook, site=Site(outlook.task, cluster("exponential(0.03)")))
    with pytest.raises(ConfigurationError, match=r"cluster's description must be"):
        search(slower, tmp_path)
    (tmp_path / FILE).write_text("[]\n")
    with pytest.raises(ConfigurationError, match="must hold saved trials, got something else"):
        search(outlook, tmp_path)


def test_a_budget_ends_a_search_once_one_worker_was_tried(outlook: Outlook, made_up: Counting) -> None:
    short = search(outlook, budget=1e-9)
    assert [one.strategy for one in short.run()] == [ALONE]
    assert short.out_of_budget
    assert len(made_up.calls) == 1


def test_a_strategy_that_cannot_be_tried_does_not_end_the_search(outlook: Outlook, made_up: Counting) -> None:
    broken = searching.trial

    def refusing(site: Site, strategy: Strategy | None, workers: int, **given: object) -> Trial:
        if str(strategy) == "all_reduce":
            raise ConfigurationError("not today; come back tomorrow")
        return broken(site, strategy, workers, **given)  # type: ignore[arg-type]

    searching.trial = refusing  # type: ignore[assignment]  # made_up restores it
    found = {one.strategy: one for one in search(outlook, trials=2).run()}
    assert found["all_reduce"].refused == "not today; come back tomorrow"
    assert found["all_reduce"].best is None
    assert len(found[ALONE].trials) == 2


def test_searches_that_make_no_sense_are_refused(outlook: Outlook, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="trials must be >= 1 and a budget > 0 s, got 0 and None"):
        search(outlook, trials=0)
    with pytest.raises(ConfigurationError, match="top must be >= 1 strategy, got 0"):
        most_promising(outlook, 0)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigurationError, match=r"needs optuna, .* pip install 'flockstep\[search\]'"):
        search(outlook)


def test_the_best_is_the_first_to_reach_the_target_or_the_nearest() -> None:
    def made(seconds: float | None, best: float | None) -> Trial:
        return Trial("x", 4, 0.1, 0, TARGET, "time", seconds, 5, 10, 100, best, best)

    assert Found("x", (made(None, 0.89), made(3, 0.9), made(2, 0.9))).seconds == 2
    near = Found("x", (made(None, None), made(None, 0.5), made(None, 0.8)))
    assert near.seconds is None
    assert near.best == made(None, 0.8)
    assert Found("x", ()).best is None


def test_advice_follows_trials(outlook: Outlook) -> None:
    def reached(name: str, seconds: float) -> Found:
        return Found(name, (Trial(name, 4, 0.1, 0, TARGET, "target", seconds, seconds, 10, 100, TARGET, TARGET),))

    for first in (one.name for one in outlook.predictions):
        found = [reached(one.name, 1 if one.name == first else 9) for one in outlook.predictions]
        assert advise(outlook, (), found).choice.name == first


def plan_command(*more: str) -> list[str]:
    return ["plan", JOB, "-c", "lab-1gbit", "-n", "4", "-s", "all_reduce", "-s", "local_sgd", "--simulate", *more]


def test_the_command_prints_and_keeps_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    options = ["--trials", "2", "--keep", str(tmp_path / "k"), "--target", "0.8"]
    assert run_command(plan_command(*options, "--json")) == 0
    captured = capsys.readouterr()
    trials = json.loads(captured.out)["trials"]
    assert trials["target"] == 0.8
    assert [len(one["trials"]) for one in trials["found"]] == [2, 2, 2]
    assert "1 of 6: one worker, trial 1 of 2: one worker, lr" in captured.err
    assert run_command(plan_command(*options)) == 0
    captured = capsys.readouterr()
    assert captured.err.count("kept from before") == 6
    assert "best found" in captured.out
    assert "In trials" in captured.out


def test_options_of_trials_without_trials_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", JOB, "--trials", "3"]) == 2
    assert "--trials 3 has an effect on trials only; add --simulate" in capsys.readouterr().err
    assert run_command(["plan", "vgg-a", "-c", "edge", "--simulate", "-s", "all_reduce"]) == 2
    assert "vgg-a describes only sizes and has no data" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["2", "0", "-0.5"])
def test_a_target_that_is_no_accuracy_is_refused(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", JOB, "--simulate", "-s", "all_reduce", "--target", target]) == 2
    assert f"must be an accuracy > 0 and <= 1, got {target}" in capsys.readouterr().err


def test_a_target_of_another_metric_may_be_any(site: Site) -> None:
    job = TrialContext(site).job(0)
    assert goal_of(job, 1.0) == 1.0
    assert goal_of(dataclasses.replace(job, metric=lambda outputs, targets: 3.0), 2.0) == 2.0


def test_gradients_that_leave_something_behind_get_a_bench_of_their_own(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "buffers", lambda self, replica: [0.0])
    context = TrialContext(site)
    job = context.job(0)
    assert context.engine(job, 0) is not context.engine(job, 0)
