"""Trials in virtual time, races of strategies, and what is kept of them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flockstep.cli.app import run as run_command
from flockstep.collectives.costs import LinkModel
from flockstep.costs.cluster import ClusterShape
from flockstep.costs.cluster_file import read_cluster
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Engine
from flockstep.launchers.simulate import simulate
from flockstep.messages import HEADER_BYTES
from flockstep.planning import search as searching
from flockstep.planning.advice import advise
from flockstep.planning.job_profile import JobProfile, Site, task_of
from flockstep.planning.plan import Outlook, plan
from flockstep.planning.search import RUSH, Found, Race, measured, promising
from flockstep.planning.step_prediction import ALONE
from flockstep.planning.trial_store import FILE, TrialStore, trial_settings
from flockstep.planning.trials import Trial, TrialContext, TrialSettings, averaging, goal_of
from flockstep.planning.trials import trial as run_trial
from flockstep.records.config import RunConfig
from flockstep.strategies.all_reduce import AllReduce
from flockstep.strategies.base import Strategy
from support.clusters import equal_machines
from support.matrix import few

TARGET = 0.9
JOB = "softmax"


def cluster(compute: str = "constant(0.02)", bandwidth: str = "100mbit", count: int = 4) -> ClusterShape:
    return equal_machines(bandwidth, compute, count, latency="1ms")


@pytest.fixture(scope="module")
def task() -> JobProfile:
    return task_of(JOB)


@pytest.fixture(scope="module")
def site(task: JobProfile) -> Site:
    return Site(task, cluster())


@pytest.fixture(scope="module")
def outlook(task: JobProfile) -> Outlook:
    strategies = "all_reduce", "local_sgd(period=8)", "ps(consistency=backup(1))"
    return plan(task, cluster("exponential(0.02)"), strategies=strategies)


def trial(
    site: Site, strategy: Strategy | None, workers: int, context: TrialContext | None = None, **settings: Any
) -> Trial:
    return run_trial(site, strategy, workers, TrialSettings(**settings), context=context)


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


class MadeUp:
    """Trials that are made up and counted: each strategy is fastest at a learning rate of its own."""

    best: ClassVar = {ALONE: (1.0, 4.8), "all_reduce": (4.0, 4.5), "local_sgd(period=8)": (0.25, 3.2)}
    """Name of a strategy → its best learning rate, and its seconds with this rate and seed 0."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, int]] = []
        self.within: dict[tuple[str, float, int], float | None] = {}
        self.stop_after = 10**9

    def __call__(self, site: Site, strategy: Strategy | None, workers: int, given: TrialSettings, **more: Any) -> Trial:
        name, lr, seed = ALONE if strategy is None else str(strategy), given.lr, given.seed
        assert lr is not None
        assert given.target is not None
        if given.steps is None:
            if len(self.calls) >= self.stop_after:
                raise KeyboardInterrupt
            self.calls.append((name, lr, seed))
            self.within[self.calls[-1]] = given.within
        rate, seconds = self.best.get(name, (0.5, 50.0))
        seconds *= (1 + abs(math.log2(lr / rate))) * (1 + seed / 100)
        within = given.within or math.inf
        hit = seconds <= within
        reached = seconds if hit else None
        return Trial(
            name,
            workers,
            lr,
            seed,
            given.target,
            "target" if hit else "time",
            reached,
            min(seconds, within),
            10,
            100,
            0.1,
            0.1 if hit else seconds,
            loss=seconds,
        )


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    trials = MadeUp()
    monkeypatch.setattr(searching, "trial", trials)
    monkeypatch.setattr(Race, "_step", lambda self: 1e-6)
    return trials


def race(outlook: Outlook, keep: Path | None = None, seed: int = 0, target: float | None = TARGET, **more: Any) -> Race:
    kept = TrialStore(trial_settings(TrialContext(outlook.site), outlook.workers, TARGET, seed, "iid"), keep)
    return Race(outlook, promising(outlook), target, seed=seed, kept=kept, **more)


def test_each_strategy_is_measured_at_its_own_best_learning_rate(outlook: Outlook, made_up: MadeUp) -> None:
    found = {one.strategy: one for one in race(outlook).run()}
    for name, (rate, seconds) in made_up.best.items():
        assert found[name].best is not None
        assert found[name].best.lr == rate
        assert found[name].range[0] == seconds
    assert found[ALONE].seconds == pytest.approx(4.8 * 1.01)  # the median of three seeds
    assert measured(outlook, tuple(found.values())).relative_samples(outlook.alone) == 1.0


def test_a_trial_ends_when_it_takes_longer_than_its_strategy_or_the_fastest_allow(
    outlook: Outlook, made_up: MadeUp
) -> None:
    race(outlook).run()
    fastest = math.inf
    for name, lr, seed in made_up.calls:
        within = made_up.within[name, lr, seed]
        assert name == ALONE or (within is not None and within <= RUSH * 1.01 * fastest)
        rate, seconds = made_up.best.get(name, (0.5, 50.0))
        fastest = min(fastest, seconds * (1 + abs(math.log2(lr / rate)))) if seed == 0 else fastest
    seeds = {name: {seed for one, _, seed in made_up.calls if one == name} for name, _, _ in made_up.calls}
    assert seeds[ALONE] == seeds["local_sgd(period=8)"] == {0, 1, 2}
    assert seeds["all_reduce"] == {0}  # 4.5 s are more than 1.25 times 3.2 s


def test_a_strategy_that_cannot_win_with_as_many_samples_as_one_worker_is_not_tried(
    outlook: Outlook, made_up: MadeUp
) -> None:
    slow = tuple(
        dataclasses.replace(one, samples_per_second=outlook.alone.samples_per_second / 2) if one.strategy else one
        for one in outlook.predictions
    )
    run = race(dataclasses.replace(outlook, predictions=slow))
    assert [one.strategy for one in run.run()] == [ALONE]
    assert run.asked == (ALONE,)


def test_the_first_loss_is_that_of_one_worker_at_its_best_learning_rate(site: Site, outlook: Outlook) -> None:
    run = Race(outlook, promising(outlook), budget=None)
    best = run._first_loss()
    assert run.goal is not None
    reached = {
        rate: trial(site, None, 1, target=run.goal, by_loss=True, lr=rate * run._lr, within=10.0)
        for rate in (best / 4, best, best * 4)
    }
    assert min(reached, key=lambda rate: reached[rate].seconds_to_target or math.inf) == best


def test_a_race_is_the_same_again(outlook: Outlook, made_up: MadeUp) -> None:
    assert race(outlook).run() == race(outlook).run()


def test_kept_trials_are_not_run_again(outlook: Outlook, made_up: MadeUp, tmp_path: Path) -> None:
    first, count = race(outlook, tmp_path).run(), len(made_up.calls)
    assert len((tmp_path / FILE).read_text().splitlines()) == count + 1
    assert race(outlook, tmp_path).run() == first
    assert len(made_up.calls) == count


def test_an_interrupted_race_goes_on_as_if_it_had_not_been(outlook: Outlook, made_up: MadeUp, tmp_path: Path) -> None:
    whole = race(outlook).run()
    made_up.calls.clear()
    made_up.stop_after = 7
    broken = race(outlook, tmp_path)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        broken.run()
    assert sum(len(one.trials) for one in broken.found) == 7
    with (tmp_path / FILE).open("a") as file:
        file.write('{"trial": {"strat')  # what a process that is killed may leave
    made_up.stop_after = 10**9
    assert race(outlook, tmp_path).run() == whole
    assert made_up.calls[7] not in made_up.calls[:7]


def test_a_changed_setting_is_noticed(outlook: Outlook, made_up: MadeUp, tmp_path: Path) -> None:
    race(outlook, tmp_path).run()
    with pytest.raises(ConfigurationError, match=r"seed must be 0, as in the trials stored in .*; give another folder"):
        race(outlook, tmp_path, seed=1)
    slower = dataclasses.replace(outlook, site=Site(outlook.task, cluster("exponential(0.03)")))
    with pytest.raises(ConfigurationError, match=r"cluster's description must be"):
        race(slower, tmp_path)
    (tmp_path / FILE).write_text("[]\n")
    with pytest.raises(ConfigurationError, match="must hold saved trials, got something else"):
        race(outlook, tmp_path)


def test_a_budget_ends_a_race_once_one_worker_was_tried(outlook: Outlook) -> None:
    short = race(outlook, budget=1e-9)
    assert [one.strategy for one in short.run()] == [ALONE]
    assert short.out_of_budget
    assert len(short.found[0].trials) == 1


def test_a_strategy_that_cannot_be_tried_does_not_end_the_race(outlook: Outlook, made_up: MadeUp) -> None:
    def refusing(site: Site, strategy: Strategy | None, workers: int, given: TrialSettings, **more: Any) -> Trial:
        if str(strategy) == "all_reduce":
            raise ConfigurationError("not today; come back tomorrow")
        return made_up(site, strategy, workers, given, **more)

    searching.trial = refusing  # made_up restores it
    found = {one.strategy: one for one in race(outlook).run()}
    assert found["all_reduce"].refused == "not today; come back tomorrow"
    assert found["all_reduce"].best is None
    assert found["local_sgd(period=8)"].seconds is not None


def test_races_that_make_no_sense_are_refused(outlook: Outlook) -> None:
    with pytest.raises(ConfigurationError, match="a budget must be > 0 s of CPU time, got 0"):
        race(outlook, budget=0)
    with pytest.raises(ConfigurationError, match="top must be >= 1 strategy, got 0"):
        promising(outlook, 0)


def test_the_time_of_a_strategy_is_the_median_of_its_seeds() -> None:
    def made(seconds: float | None, best: float | None) -> Trial:
        return Trial("x", 4, 0.1, 0, TARGET, "time", seconds, 5, 10, 100, best, best)

    assert Found("x", (made(None, 0.89), made(3, 0.9), made(2, 0.9))).seconds == 3
    assert Found("x", (made(3, 0.9), made(2, 0.9))).range == (2, 3)
    near = Found("x", (made(None, 0.8),))
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
    return ["plan", JOB, "-c", "lab-1gbit", "-n", "4", "-s", "all_reduce", "-s", "local_sgd", *more]


def test_the_command_measures_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(plan_command()) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "in trials on the job, " in said
    assert "of a budget of 120 s, which --budget changes" in said
    assert run_command(plan_command("--budget", "0")) == 0
    assert "is assumed to need" in " ".join(capsys.readouterr().out.split())


def test_the_command_prints_and_keeps_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--simulate", "--keep", str(tmp_path / "k"), "--target", "0.8"]
    assert run_command(plan_command(*options, "--json")) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert trials["target"] == 0.8
    kept = (tmp_path / "k" / FILE).read_bytes()
    assert kept.count(b"\n") == 1 + sum(len(one["trials"]) for one in trials["found"])
    assert run_command(plan_command(*options)) == 0
    assert (tmp_path / "k" / FILE).read_bytes() == kept
    assert "learning rate" in capsys.readouterr().out


def test_an_interrupted_command_prints_what_was_measured(
    made_up: MadeUp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up.stop_after = 4
    assert run_command(plan_command("--simulate", "--keep", str(tmp_path))) == 130
    said = capsys.readouterr()
    assert f"interrupted; finished trials were saved: repeat the command with --keep {tmp_path} to continue" in said.err
    assert "virtual time until the goal of 0.9" in said.out
    assert (tmp_path / FILE).read_bytes().count(b"\n") == 5


def test_options_of_trials_without_trials_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", JOB, "--target", "0.3"]) == 2
    assert "--target 0.3 has an effect on trials to a target only; add --simulate" in capsys.readouterr().err
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
    assert context.engine(0) is not context.engine(0)
