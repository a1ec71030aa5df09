"""Is the advice on partition and strategy right? Ten pairs of model and cluster, drawn by a seed.

For each pair `flockstep plan --hybrid` chooses a partition and one of five strategies before anything runs. Then every
partition of a grid runs with every strategy in virtual time: whole replicas, for each number of stages four
schedules with two numbers of micro-batches, layers split over each number of ways, also within the stages of a
pipeline of three schedules, and parameters in shards. Models have their full size there, and so have all messages, but
gradients are those of a quadratic function, because only the time counts.
The value of a run is its samples per second, the sum of the
workers' own rates while all of them train, divided by the factor by which it needs more samples (the planner's model,
evaluated at the run's own figures). The advice is right if its own run is worth at least 90 % of the best run.

    python benchmarks/hybrid_advice.py --pairs 10 --seed 99 --out hybrid_advice.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flockstep.costs.cluster_file import read_cluster
from flockstep.errors import ConfigurationError
from flockstep.launchers.threads import limit_threads
from flockstep.partitions.base import Partition
from flockstep.planning.advice import advise
from flockstep.planning.criteria import relative_samples
from flockstep.planning.hybrid import advise_hybrid
from flockstep.planning.job_profile import Site, task_of
from flockstep.planning.plan import plan
from flockstep.planning.split_surrogate import split_shape
from flockstep.planning.step_prediction import WHOLE, StepPrediction, has_versions
from flockstep.planning.surrogate import SurrogateBatches, SurrogateEngine
from flockstep.records.events import Event, StepEvent, UpdateEvent
from flockstep.runtime.plan import Plan
from flockstep.runtime.setup import load_job
from flockstep.runtime.virtual import Simulation
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.simulation.handling import Handled, Longer
from flockstep.strategies.base import Strategy, choose_result

STRATEGIES = ("all_reduce", "local_sgd(period=4)", "ps(shards=2)", "ps(consistency=asynchronous)", "easgd(period=4)")
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved(2)")
STEPS, LEFT_OUT = 10, 2
"""Steps of a run, and steps at its beginning that are not counted."""
RIGHT = 0.9
"""Least share of the best run's value at which the advice is right."""

JOB = '''"""A perceptron on the digits."""
import torch
from torch import nn

import flockstep

WIDTHS = {widths}


def model():
    torch.manual_seed(0)
    layers = [nn.Flatten()]
    for before, after in zip(WIDTHS, WIDTHS[1:]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def job():
    from flockstep.runtime.setup import load_job
    from dataclasses import replace

    return replace(load_job("digits", 0), model=model, batch={batch}, name="perceptron")
'''
CLUSTER = """compute = "lognormal({seconds}, sigma={sigma})"
[nodes.machines]
count = {machines}
workers = {each}
[[links]]
inside = "machines"
bandwidth = "{bandwidth}mbit"
latency = "{latency}us"
[[links]]
node = "machines"
bandwidth = "4GB/s"
latency = "20us"
"""


@dataclass(frozen=True)
class Pair:
    """A model and a cluster."""

    widths: tuple[int, ...]
    batch: int
    cluster: str

    def site(self, folder: Path) -> Site:
        """Return the job's task on the cluster."""
        file = folder / "model.py"
        file.write_text(JOB.format(widths=self.widths, batch=self.batch))
        job = load_job(str(file), 0)
        return Site(task_of(str(file), None, job), read_cluster(self.cluster, name="drawn"))


def drawn(seed: int, count: int) -> list[Pair]:
    """Draw pairs; equal seeds give equal pairs."""
    random, found = np.random.default_rng(seed), []
    for _ in range(count):
        hidden = [int(2 ** random.uniform(5, 9)) for _ in range(random.integers(7, 10))]
        workers, each = int(random.choice([4, 8])), int(random.choice([1, 2]))
        facts = {
            "seconds": float(f"{10 ** random.uniform(-2.7, -1):.3g}"),
            "sigma": float(f"{random.uniform(0.05, 0.3):.2g}"),
            "bandwidth": float(f"{10 ** random.uniform(1.3, 4):.3g}"),
            "latency": int(10 ** random.uniform(1.3, 2.5)),
        }
        cluster = CLUSTER.format(machines=workers // each, each=each, **facts)
        if each == 1:
            cluster = cluster.rpartition("[[links]]")[0]
        found.append(Pair((64, *hidden, 10), int(random.choice([16, 32, 64])), cluster))
    return found


def grid(workers: int, batch: int) -> Iterator[Partition | None]:
    """Yield whole replicas (None), every number of stages with every schedule and several micro-batches, and every
    number of ways.
    """
    yield None
    numbers = [one for one in range(2, workers + 1) if not workers % one]
    for ways in numbers:
        yield Partition.parse(f"tensor({ways})")
        if ways <= batch:
            yield Partition.parse(f"sharded({ways})")
    for stages in numbers:
        for schedule in SCHEDULES:
            for count in (stages, 2 * stages):
                if count > batch or (schedule == "interleaved(2)" and 2 * stages > 8):
                    continue
                yield Partition.parse(f"pipeline({stages}, {schedule}, {count})")


def value(site: Site, strategy: Strategy, partition: Partition | None) -> float:
    """Samples per second of a run in virtual time, divided by the factor of samples that it needs more.

    The model has its full size, so that every message has; its gradient is that of a quadratic function.
    """
    workers, task = site.cluster.workers, site.task
    shape = None if partition is None else split_shape(task, partition)
    replicas = workers if partition is None else partition.replicas(workers)
    tensors = task.tensors if shape is None else shape.tensors
    batches = SurrogateBatches(task.batch)
    engine = SurrogateEngine(tensors, task.nbytes, task.itemsize, batches, replicas, task.optimizer, 0)
    assert engine.factor == 1
    work, parts = site.work(strategy, replicas), np.array_split(np.arange(engine.train_size), replicas)
    policy, cluster = choose_result(strategy, None), strategy.cluster(replicas)
    todo = Plan(strategy, cluster, engine.optimizer, parts, task.batch, STEPS, 0, policy, STEPS)
    network = Handled(site.cluster.network(workers), work.message, work.receive, work.serve)
    compute, events = Longer(site.compute(workers), work.step), list[Event]()
    run: Simulation | SplitSimulation
    if shape is None:
        run = Simulation(engine, todo, compute, network, events.append)
    else:
        run = SplitSimulation(shape.model(engine), todo, compute, network, events.append)
    run.run()
    run.close()
    steps = [one for one in events if isinstance(one, StepEvent)]
    all_train = min(one.seconds for one in steps if one.step == STEPS)
    took: dict[int, list[float]] = {}
    for one in steps:
        if one.step == LEFT_OUT + 1 or (one.step > LEFT_OUT and one.seconds <= all_train):
            took.setdefault(one.rank, []).append(one.compute_seconds + one.wait_seconds + one.comm_seconds)
    means = [statistics.fmean(each) for each in took.values()]
    late = [one.staleness for one in events if isinstance(one, UpdateEvent) and one.staleness is not None]
    seconds, sent = statistics.fmean(means), statistics.fmean(one.sent_bytes for one in steps)
    rate = sum(task.batch / each for each in means) * replicas / workers
    staleness = statistics.fmean(late) if late and has_versions(strategy) else None
    found = StepPrediction(
        str(strategy), strategy, workers, seconds, 1.0, sent, 0.0, staleness, None, rate, 0.0,
        partition=partition or WHOLE,
        bytes_between_parts=run.bytes_between_parts / len(steps) if isinstance(run, SplitSimulation) else 0.0,
    )  # fmt: skip
    return rate / relative_samples(found, site)


def tried(pair: Pair, folder: Path) -> dict[str, Any]:
    """Advise on a pair, run the grid, and compare."""
    site = pair.site(folder)
    workers, strategies = site.cluster.workers, [Strategy.parse(text) for text in STRATEGIES]
    begun = time.perf_counter()
    outlook = plan(site.task, site.cluster, strategies=STRATEGIES)
    advice = advise(outlook)
    found = advise_hybrid(advice, strategies=strategies)
    took = time.perf_counter() - begun
    runs: dict[str, float] = {}
    for partition in grid(workers, pair.batch):
        for strategy in strategies:
            if partition is not None and partition.parts == workers and strategy != strategies[0]:
                continue  # a single replica exchanges nothing
            try:
                runs[f"{partition or 'none'} with {strategy}"] = value(site, strategy, partition)
            except ConfigurationError as error:
                print(f"  left out: {partition} with {strategy}: {error}", flush=True)
    assert found.choice is not None
    chosen = found.choice.partition if found.choice.split else None
    mine = f"{chosen or 'none'} with {found.choice.strategy}" if found.choice.strategy else "one worker"
    if found.choice.strategy is None:  # one worker alone
        runs[mine] = outlook.alone.samples_per_second
    elif mine not in runs:
        runs[mine] = value(site, found.choice.strategy, chosen)
    best = max(runs, key=runs.__getitem__)
    result: dict[str, Any] = {
        "widths": pair.widths,
        "batch": pair.batch,
        "cluster": pair.cluster,
        "advice": mine,
        "best": best,
        "share_of_best": runs[mine] / runs[best],
        "whole_all_reduce": runs[f"none with {strategies[0]}"] / runs[best],
        "seconds_of_advice": took,
        "runs": runs,
    }
    if found.planner is not None:
        worth = value(site, strategies[0], found.planner.partition)
        result["pipedream"] = {"partition": str(found.planner.partition), "share_of_best": worth / runs[best]}
    return result


def main() -> None:
    """Try the pairs and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="number of pairs")
    parser.add_argument("--seed", type=int, default=99, help="seed of the pairs")
    parser.add_argument("--first", type=int, default=0, help="number of the first pair to try")
    parser.add_argument("--out", type=Path, help="JSON file with all figures; pairs that it has are not tried again")
    asked = parser.parse_args()
    limit_threads(1)
    known: list[dict[str, Any]] = []
    if asked.out is not None and asked.out.exists():
        known = json.loads(asked.out.read_text())["pairs"]
    with tempfile.TemporaryDirectory() as folder:
        for number, pair in enumerate(drawn(asked.seed, asked.pairs)):
            if number < max(asked.first, len(known)):
                continue
            found = tried(pair, Path(folder))
            known.append(found)
            share = f"{100 * found['share_of_best']:.0f} % of the best, {found['best']}"
            print(f"{number}: advice {found['advice']}: {share}; {len(found['runs'])} runs", flush=True)
            if asked.out is not None:
                asked.out.write_text(json.dumps({"seed": asked.seed, "pairs": known}, indent=1))
    right = sum(one["share_of_best"] >= RIGHT for one in known)
    plain = sum(one["whole_all_reduce"] >= RIGHT for one in known)
    cut = [one["pipedream"]["share_of_best"] for one in known if "pipedream" in one]
    print(f"within 10 % of the best: {right} of {len(known)}; whole replicas with all_reduce: {plain} of {len(known)}")
    print(f"PipeDream's plan, where it has several stages: {[round(one, 2) for one in cut]} of the best")


if __name__ == "__main__":
    main()
