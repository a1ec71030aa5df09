"""Chooses a partition of the model together with a strategy: either every worker holds a whole replica, or several
workers hold a replica together.

Every prediction is a rehearsal of the split model on the event queue of virtual time, as `flockstep simulate
--partition` runs it, with a surrogate that computes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flockstep.costs.stages import pipedream_plan, units
from flockstep.errors import ConfigurationError, FlockstepError
from flockstep.partitions.base import Partition
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules import (
    GPipe,
    Interleaved,
    OneForwardOneBackward,
    PipeDream,
    PipelineSchedule,
    ZeroBubbleH1,
)
from flockstep.partitions.sharded import Sharded
from flockstep.partitions.tensor import TensorParallel
from flockstep.planning.advice import Advice, Recommendation, longer, uncertain, unfit
from flockstep.planning.criteria import preference, relative_samples
from flockstep.planning.job_profile import Site
from flockstep.planning.plan import Outlook
from flockstep.planning.split_surrogate import split_shape
from flockstep.planning.step_prediction import WHOLE, StepPrediction, as_steady, held_bytes, predict_step
from flockstep.planning.words import short
from flockstep.report.formatting import number, size
from flockstep.report.progress import ProgressCallback, silent
from flockstep.simulation.law import mean_of
from flockstep.strategies.base import Strategy

TOP_PARTITIONS, TOP_STRATEGIES = 3, 5
"""Numbers of partitions (TOP_PARTITIONS) and of strategies (TOP_STRATEGIES) whose combinations are all rehearsed in
full.
"""
SHORT = 6
"""Number of steps of the short rehearsals by which partitions are compared."""
AHEAD = 16
"""Largest number of micro-batches per pipeline stage that a plan considers."""
ONE_REPLICA = "all_reduce"
"""Strategy of a single replica: without other replicas it is the optimizer alone, and sends nothing."""
MARGIN = 1.01
"""Factor by which a schedule must be faster than 1F1B to be preferred."""
GAIN = 1.02
"""Factor by which a split model must train faster than whole replicas to be recommended."""


def parse_partitions(texts: Sequence[str]) -> tuple[Partition, ...]:
    """Return the partitions that a user asks a plan to consider.

    Raises:
        ConfigurationError: a partition does not split the model.
    """
    found = tuple(map(Partition.parse, texts))
    for partition in found:
        if partition == WHOLE:
            raise ConfigurationError(
                f"a plan of split models predicts partitions that split the model, got {partition}; write for example "
                "'pipeline(2, 1f1b, 4)', 'tensor(2)' or 'sharded(2)', or leave it out for whole replicas"
            )
    return found


@dataclass(frozen=True)
class HybridAdvice:
    """The choice between whole and split replicas, with the predictions on which it is based."""

    advice: Advice
    """The advice on whole replicas."""
    splits: tuple[StepPrediction, ...]
    """All combinations of partition and strategy that were rehearsed in full, highest speed-up first."""
    refused: tuple[tuple[str, str], ...]
    """Partitions and strategies that cannot be combined: the name and the reason."""
    planner: StepPrediction | None
    """The pipeline that PipeDream's planner chooses; None if this pipeline has only one stage."""
    imports: tuple[str, ...] = ()
    """Python files that register custom components, for the recommended command."""

    def speedup(self, found: StepPrediction) -> float:
        """Return the predicted speed of a combination of partition and strategy relative to one worker."""
        return _speedup(found, self.advice)

    @property
    def outlook(self) -> Outlook:
        """The predictions for whole replicas."""
        return self.advice.outlook

    @property
    def limit(self) -> float | None:
        """Bytes of memory on a worker; None if the cluster does not state them."""
        return self.outlook.site.cluster.memory

    @property
    def best(self) -> StepPrediction | None:
        """The split with the highest speed-up that fits into memory; None if none fits."""
        return next((one for one in self.splits if self.limit is None or one.memory <= self.limit), None)

    @cached_property
    def choice(self) -> StepPrediction | None:
        """The combination of partition and strategy with the highest speed-up that fits into memory; None if no
        combination fits.
        """
        whole, best = self.advice.choice, self.best
        if best is None or whole is None:
            return best or whole
        # Whole replicas, and one worker even more so, are simpler than a split that trains hardly faster.
        speedup = self.advice.speedups[whole.name]
        return best if self.speedup(best) > max(GAIN * speedup, preference(whole, speedup)) else whole

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences of advice: the recommended split, or why the model should not be split."""
        choice, best = self.choice, self.best
        if choice is None:
            least = f"a worker needs at least {size(self._least())}"
            return (f"Neither whole nor split replicas fit into the {size(self.limit or 0.0)} of a worker; {least}.",)
        if choice.split:
            return self._to_split(choice)
        if best is not None:
            speedup = self.advice.speedups[choice.name]
            why = (
                f"{choice.name} with whole replicas has a predicted speed-up of {number(speedup)}, the best split "
                f"({best.name}) of {number(self.speedup(best))}"
            )
            if choice.workers == 1 and self.speedup(best) > speedup:
                why += f", and {uncertain()}"
        elif self.splits:
            why = f"no split fits into the {size(self.limit or 0.0)} of a worker"
        else:
            told = (reason for name, reason in self.refused if name == "splitting")
            why = next(told, "no partition can be combined with a strategy")
        return (f"Do not split the model: {why}.",)

    def _to_split(self, choice: StepPrediction) -> tuple[str, str]:
        """How to split the model, and how much that is better than whole replicas."""
        whole, partition, speedup = self.advice.choice, choice.partition, self.speedup(choice)
        if choice.replicas == 1:
            said = (
                f"Split the model over all {partition.parts} workers with {partition}; there is one replica, so "
                "nothing is exchanged between replicas"
            )
        else:
            said = (
                f"Split each replica over {partition.parts} workers with {partition}, and coordinate the "
                f"{choice.replicas} replicas with {short(str(choice.strategy))}"
            )
        said += f": predicted speed-up {number(speedup)}, at most {size(choice.memory)} on a worker."
        if whole is None:
            need = min(one.memory for one in self.outlook.predictions)
            within = (
                "" if self.limit is None else f": a whole replica needs at least {size(need)} of {size(self.limit)}"
            )
            return said, f"No strategy with whole replicas meets the requirements{within}."
        other = self.advice.speedups[whole.name]
        compared = f"the best strategy with whole replicas, {whole.name} (speed-up {number(other)})"
        return said, f"This is {number(speedup / other)} times as fast as {compared}."

    def _least(self) -> float:
        """Bytes that a worker needs at least, over whole replicas and all partitions of the search."""
        site, whole = self.outlook.site, min(one.memory for one in self.outlook.predictions)
        try:
            options = [one for found in partitions(site, self.outlook.workers) for one in found]
            return min([whole, *(held_bytes(site.task, split_shape(site.task, one)) for one in options)])
        except FlockstepError:  # the model cannot be cut
            return whole

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence about the pipeline that PipeDream's planner chooses."""
        if self.planner is None:
            return ()
        figures = f"predicted speed-up {number(self.speedup(self.planner))}, {size(self.planner.memory)} on a worker"
        same = "with the same number of workers for each stage"
        return (f"PipeDream's planner, {same}, would choose {self.planner.partition}: {figures}.",)

    @property
    def command(self) -> str | None:
        """The command that trains with the recommended combination; None if no combination is recommended.

        A reference model has no data; JOB stands for the user's job.
        """
        task, choice = self.outlook.task, self.choice
        if choice is None:
            return None
        job = task.identity if task.file is None else str(task.file)
        words = ["flockstep", "train", "JOB" if task.job is None or job is None else job, *task.options]
        words += ["-s", short(str(choice.strategy or ONE_REPLICA))]
        words += ["--partition", str(choice.partition)] if choice.split else []
        words += ["-n", str(choice.workers), *([] if task.usual else ["--batch", str(task.batch)])]
        return shlex.join([*words, *(word for file in self.imports for word in ("--import", file))])

    @property
    def together(self) -> Recommendation:
        """The one recommendation that follows from this advice and from the advice on whole replicas."""
        whole = self.advice
        if self.choice is None or self.choice.split:
            return Recommendation(self.sentences, self.reasons, ())
        return Recommendation(whole.sentences + self.sentences, whole.reasons + self.reasons, whole.changes)

    def document(self) -> dict[str, Any]:
        """Return the advice as plain data, for JSON."""
        choice = self.choice
        return {
            "partition": str(WHOLE if choice is None else choice.partition),
            "strategy": None if choice is None else str(choice.strategy or choice.name),
            "command": self.command,
            "sentences": list(self.sentences),
            "reasons": list(self.reasons),
            "splits": list(map(self._row, self.splits)),
            "pipedream": None if self.planner is None else self._row(self.planner),
            "refused": [{"name": name, "why": why} for name, why in self.refused],
        }

    def _row(self, one: StepPrediction) -> dict[str, Any]:
        names = "replicas seconds utilization sent_bytes samples_per_second memory"
        return {
            "partition": str(one.partition),
            "strategy": str(one.strategy),
            **{name: getattr(one, name) for name in names.split()},
            "relative_samples": self.outlook.relative_samples(one),
            "layers": list(one.layers),
            "speedup": self.speedup(one),
        }


def _speedup(found: StepPrediction, advice: Advice) -> float:
    outlook, rate = advice.outlook, found.samples_per_second / longer(found, advice.requirements)
    return rate / outlook.relative_samples(found) / outlook.alone.samples_per_second


def partitions(site: Site, workers: int) -> list[list[Partition]]:
    """Return the partitions to consider, in lists whose members differ only in the number of micro-batches, which is a
    power of two: 1F1B with each number of stages, layers split over ways, and sharded parameters.

    Layers are split over ways, and parameters stored in shards, only for a job, because only a job's model shows which
    layers a run can split. A model with convolutions is also split with its convolutions divided by samples.

    Raises:
        ConfigurationError: the layers do not form a chain, or there is no partition for the number of workers.
    """
    model, job, found = site.task.shape, site.task.job is not None, list[list[Partition]]()
    places = 0 if model is None else len(units(model))
    numbers = [one for one in range(2, workers + 1) if not workers % one]
    for stages in numbers:
        if stages > max(1, places):
            continue
        most = min(site.task.batch, AHEAD * stages)
        counts = [2**power for power in range(most.bit_length()) if 2**power <= most]
        pipelines = [Pipeline(stages, OneForwardOneBackward(), count) for count in counts]
        found.append(list(pipelines))
    convolutions = model is not None and any(layer.kind == "convolution" for layer in model.layers)
    if job and convolutions:
        found += [[TensorParallel(ways, convolutions="divided")] for ways in numbers]
    if job:
        found += [[kind(ways)] for kind in (TensorParallel, Sharded) for ways in numbers]
    if not found:
        raise ConfigurationError(
            f"no pipeline of {site.task.name} has stages for {workers} workers; use another number of workers"
        )
    return found


def best_partitions(
    site: Site, workers: int, strategy: Strategy, refused: list[tuple[str, str]]
) -> list[StepPrediction]:
    """Return the best partition of each list of `partitions`, best first, by short rehearsals: first the number of
    micro-batches of 1F1B, then, from this number on, that of the other synchronous schedules. Partitions that a run
    would refuse are added to `refused`, once for each reason.

    1F1B holds fewer activations than GPipe, but a stage waits for a message from each neighbor between two passes, so
    that the latency of a link counts once for each micro-batch.

    Raises:
        ConfigurationError: the number of workers has no partition.
    """
    limit, failed, law = site.cluster.memory, dict[str, str](), as_steady(site.compute(workers))

    def fastest(options: Sequence[Partition], count: int | None) -> StepPrediction | None:
        """Uphill from the first partition with `count` micro-batches, or as many as stages, in both directions."""
        enough = [
            place
            for place, pipeline in enumerate(map(_pipeline_of, options))
            if pipeline is None or pipeline.microbatches >= (count or pipeline.stages)
        ]
        start, best = enough[0] if enough else len(options) - 1, None
        for way in (options[start:], options[:start][::-1]):
            for option in way:
                try:
                    if limit is not None and held_bytes(site.task, split_shape(site.task, option)) > limit:
                        continue
                    found = predict_step(strategy, site, workers, SHORT, partition=option, law=law)
                except FlockstepError as error:
                    # Other schedules than 1F1B may need more layers than there are, which tells nothing.
                    if count is None:
                        failed.setdefault(str(error), str(option))
                    continue
                if best is not None and found.seconds >= best.seconds:
                    break
                best = found
        return best

    found = list[StepPrediction]()
    for options in partitions(site, workers):
        best = fastest(options, None)
        if best is None:
            continue
        if (pipeline := _pipeline_of(best.partition)) is not None:
            for schedule in (GPipe(), ZeroBubbleH1(), Interleaved(2)):
                others = [one for option in options if (one := _scheduled(option, schedule)) is not None]
                other = fastest(others, pipeline.microbatches) if others else None
                if other is not None and other.seconds * MARGIN < best.seconds:
                    best = other
        found.append(best)
    reasons = [(option, why) for why, option in failed.items()]
    if not found and reasons:
        reasons[0] = ("splitting", reasons[0][1])
    refused += reasons
    return sorted(found, key=lambda one: -one.samples_per_second / relative_samples(one, site))


def _pipeline_of(partition: Partition) -> Pipeline | None:
    return partition if isinstance(partition, Pipeline) else None


def _scheduled(option: Partition, schedule: PipelineSchedule) -> Partition | None:
    """A partition with another schedule; None if the schedule does not allow the number of micro-batches."""
    pipeline = _pipeline_of(option)
    assert pipeline is not None
    try:
        return replace(pipeline, schedule=schedule)
    except ConfigurationError:
        return None


def planned_by_pipedream(site: Site, workers: int) -> Pipeline | None:
    """Return the pipeline that PipeDream's planner chooses with the same number of workers for every stage; None if the
    pipeline has only one stage.

    Raises:
        ConfigurationError: the layers are unknown, or do not form a chain.
    """
    task = site.task
    if task.shape is None:
        raise ConfigurationError(f"the layers of {task.name} are unknown; plan for a job or a reference model")
    chain, batch = units(task.shape), task.batch
    gradient, total = mean_of(site.compute(workers)), float(task.shape.work(batch)) or 1.0
    seconds = [gradient * sum(layer.work(batch) for layer in unit) / total for unit in chain]
    outputs = [float(unit[-1].activation_bytes(batch, task.itemsize)) for unit in chain]
    weights = [float(sum(layer.gradient_bytes(task.itemsize) for layer in unit)) for unit in chain]
    firsts = pipedream_plan(seconds, outputs, weights, workers, site.link[1])
    if len(firsts) == 1:
        return None
    return Pipeline(len(firsts), PipeDream(), 1, tuple(chain[first][0].name for first in firsts[1:]))


def advise_hybrid(
    advice: Advice,
    asked: Sequence[Partition] = (),
    strategies: Sequence[Strategy] = (),
    imports: Sequence[str] = (),
    say: ProgressCallback = silent,
) -> HybridAdvice:
    """Choose partition and strategy together.

    Args:
        advice: the advice on whole replicas; its requirements and the memory of its cluster also limit split replicas.
        asked: the partitions to consider; empty for the partitions that a search finds.
        strategies: the strategies to consider; empty for the best strategies that meet the requirements and can train
            a split model.
        imports: Python files that register custom components, for the recommended command.
        say: function that is called with the partition and strategy that are predicted next.

    Raises:
        ConfigurationError: a partition of `asked` does not divide the number of workers, or cannot split the model.
    """
    site, workers = advice.outlook.site, advice.outlook.workers
    for partition in asked:
        partition.replicas(workers)
        split_shape(site.task, partition)
    refused: list[tuple[str, str]] = []
    found: list[StepPrediction] = []
    planner = None

    def predict(strategy: Strategy, partition: Partition, name: str) -> StepPrediction | None:
        try:
            return predict_step(strategy, site, workers, partition=partition)
        except FlockstepError as error:
            refused.append((name, str(error)))
            return None

    try:
        wanted = list(strategies) or _splittable(advice, refused)
        tried = list(asked)
        if wanted and not tried:
            say("partitions")
            best = best_partitions(site, workers, wanted[0], refused)
            tried = [one.partition for one in best[:TOP_PARTITIONS]]
        for done, partition in enumerate(tried):
            # A single replica has nothing to exchange.
            alone = [Strategy.parse(ONE_REPLICA)] if wanted else []
            for strategy in wanted if partition.parts < workers else alone:
                name = f"{partition} with {strategy}"
                say(name, done, len(tried))
                if (prediction := predict(strategy, partition, name)) is not None:
                    found.append(prediction)
        if wanted and (pipeline := planned_by_pipedream(site, workers)) is not None:
            # The replicas of a stage average their gradients.
            planner = predict(Strategy.parse(ONE_REPLICA), pipeline, f"PipeDream's plan {pipeline}")
    except FlockstepError as error:
        refused.append(("splitting", str(error)))
    found.sort(key=lambda one: -_speedup(one, advice))
    return HybridAdvice(advice, tuple(found), tuple(refused), planner, tuple(imports))


def _splittable(advice: Advice, refused: list[tuple[str, str]]) -> list[Strategy]:
    """The strategies to combine with partitions, the best with whole replicas first."""
    site = advice.outlook.site
    free = replace(advice.outlook, site=replace(site, cluster=site.cluster.with_memory(None)))
    wanted: list[Strategy] = []
    for one in advice.ranked:
        if one.strategy is None or len(wanted) == TOP_STRATEGIES or unfit(one, free, advice.requirements) is not None:
            continue
        if one.strategy.traits.fixed_steps and one.strategy.traits.plain_gradients:
            wanted.append(one.strategy)
        else:
            why = "the workers request more than the gradient of their next batch, which stages cannot compute"
            refused.append((one.name, why))
    return wanted
