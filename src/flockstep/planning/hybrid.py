"""Chooses a partition of the model together with a strategy: either every worker holds a whole replica, or several
workers hold a replica together.

Every prediction is a rehearsal of the split model on the event queue of virtual time, as `flockstep simulate
--partition` runs it, with a surrogate that computes nothing.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flockstep.costs.cluster_file import memory_bytes
from flockstep.costs.stages import even_plan, units
from flockstep.errors import ConfigurationError, FlockstepError
from flockstep.partitions.base import Partition, Unsplit
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
from flockstep.partitions.tensor import Product, TensorParallel
from flockstep.planning.advice import Advice, slower, uncertain, unfit, waiting
from flockstep.planning.criteria import DOUBT, preference, relative_samples
from flockstep.planning.job_profile import JobProfile, Site
from flockstep.planning.plan import Outlook
from flockstep.planning.split_surrogate import SplitShape, split_shape
from flockstep.planning.step_prediction import StepPrediction, as_steady, at_most, has_versions, rehearsed
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
MOST = 64
"""Largest number of workers for which split models are planned."""
ALONE = "all_reduce"
"""Strategy of a single replica: without other replicas it is the optimizer alone, and sends nothing."""
MARGIN = 1.01
"""Factor by which a schedule must be faster than 1F1B to be preferred."""
GAIN = 1.02
"""Factor by which a split model must train faster than whole replicas to be recommended."""


@dataclass(frozen=True)
class HybridOptions:
    """The arguments of a plan that concern split models."""

    search: bool = True
    """Whether to look for the best partition together with the strategy."""
    partitions: tuple[Partition, ...] = ()
    """The partitions to consider; empty for the partitions that a search finds."""
    strategies: tuple[Strategy, ...] = ()
    """The strategies to consider; empty for the best strategies that meet the requirements and can train a split
    model.
    """
    memory: float | None = None
    """Memory of a worker in bytes; None for the memory that the cluster states."""
    imports: tuple[str, ...] = ()
    """Python files that register custom components, for the recommended command."""

    @classmethod
    def of(
        cls,
        search: bool,
        partitions: Sequence[str],
        memory: str | None,
        strategies: Sequence[str],
        imports: Sequence[str],
    ) -> HybridOptions:
        """Return the options that a user has written as text.

        Raises:
            ConfigurationError: a partition does not split the model, or the amount of memory has no unit.
        """
        known = tuple(map(Partition.parse, partitions))
        for partition in known:
            if partition.divides == "nothing":
                raise ConfigurationError(
                    f"a plan of split models predicts partitions that split the model, got {partition}; write for "
                    "example 'pipeline(2, 1f1b, 4)', 'tensor(2)' or 'sharded(2)', or leave it out for whole replicas"
                )
        limit = None if memory is None else memory_bytes(memory)
        return cls(search, known, tuple(map(Strategy.parse, strategies)), limit, tuple(imports))

    @property
    def wanted(self) -> bool:
        """Whether the user asked for predictions of split models."""
        return self.search or bool(self.partitions) or self.memory is not None


SEARCH = HybridOptions()
"""Options of a plan that searches for the best partition and strategy."""


@dataclass(frozen=True)
class SplitPrediction:
    """Predicted means of a step, for a strategy that coordinates replicas that are split over several workers."""

    partition: Partition
    strategy: Strategy
    replicas: int
    seconds: float
    """Seconds between two gradients of a replica."""
    utilization: float
    """Share of the time in which a worker computes."""
    sent_bytes: float
    """Bytes that a worker sends per step, including activations."""
    samples_per_second: float
    """Samples per second of all workers together."""
    memory: float
    """Bytes of memory on the worker that needs most memory, including activations."""
    relative_samples: float
    """Factor by which training needs more samples than on one worker for the same accuracy."""
    layers: tuple[str, ...]
    """The layers of each part of the model, as text."""

    @property
    def name(self) -> str:
        """Partition and strategy as text; a single replica has nothing to exchange, and is named without strategy."""
        return f"{self.partition} with {self.strategy if self.replicas > 1 else 'one replica'}"

    def document(self) -> dict[str, Any]:
        """Return the prediction as plain data, for JSON."""
        names = "replicas seconds utilization sent_bytes samples_per_second memory relative_samples"
        figures = {name: getattr(self, name) for name in names.split()}
        return {
            "partition": str(self.partition),
            "strategy": str(self.strategy),
            **figures,
            "layers": list(self.layers),
        }


@dataclass(frozen=True)
class HybridAdvice:
    """The choice between whole and split replicas, with the predictions on which it is based."""

    choice: SplitPrediction | StepPrediction | None
    """The combination of partition and strategy with the highest speed-up that fits into memory; None if no combination
    fits.
    """
    splits: tuple[SplitPrediction, ...]
    """All combinations of partition and strategy that were rehearsed in full, highest speed-up first."""
    speedups: dict[str, float]
    """Name of a combination of partition and strategy → predicted speed relative to one worker."""
    sentences: tuple[str, ...]
    """Sentences of advice: the recommended split, or why the model should not be split."""
    reasons: tuple[str, ...]
    command: str | None
    """The command that trains with the recommended combination; None if no combination is recommended."""
    refused: tuple[tuple[str, str], ...]
    """Partitions and strategies that cannot be combined: the name and the reason."""
    planner: SplitPrediction | None
    """The pipeline that PipeDream's planner chooses; None if this pipeline has only one stage."""

    @property
    def partition(self) -> Partition:
        """The partition of the recommended combination."""
        return self.choice.partition if isinstance(self.choice, SplitPrediction) else Unsplit()

    def together(self, advice: Advice) -> Advice:
        """Return the one recommendation that follows from this advice and from `advice`, which covers only whole
        replicas.
        """
        if isinstance(self.choice, StepPrediction):
            said, why = (*advice.sentences, *self.sentences), (*advice.reasons, *self.reasons)
            return replace(advice, sentences=said, reasons=why)
        return replace(advice, choice=None, sentences=self.sentences, reasons=self.reasons, changes=())

    def document(self) -> dict[str, Any]:
        """Return the advice as plain data, for JSON."""
        rows = [{**one.document(), "speedup": self.speedups[one.name]} for one in self.splits]
        planner = None
        if self.planner is not None:
            planner = {**self.planner.document(), "speedup": self.speedups[self.planner.name]}
        return {
            "partition": str(self.partition),
            "strategy": None if self.choice is None else str(self.choice.strategy or self.choice.name),
            "command": self.command,
            "sentences": list(self.sentences),
            "reasons": list(self.reasons),
            "splits": rows,
            "pipedream": planner,
            "refused": [{"name": name, "why": why} for name, why in self.refused],
        }


def predict_split(
    strategy: Strategy, partition: Partition, site: Site, workers: int, *, short: bool = False
) -> SplitPrediction:
    """Predict the cost of a strategy whose replicas are split by `partition`. With `short`, predict from a few steps
    with constant gradient times.

    Raises:
        ConfigurationError: the model cannot be split, the strategy cannot run with this number of replicas, or the cost
            of a step is unknown.
        CompositionError: the strategy cannot train a split model.
    """
    shape, replicas, task = split_shape(site.task, partition), partition.replicas(workers), site.task
    law = as_steady(site.compute(workers)) if short else site.compute(workers)
    found = rehearsed(strategy, site, workers, law, steps=SHORT if short else None, split=shape)
    rate = at_most(found.used * task.batch * found.steps_per_second / partition.parts, site, workers)
    seconds, late = found.seconds_per_step, found.staleness if has_versions(strategy) else None
    between = max(0.0, found.sent_bytes_per_step - found.bytes_between_parts) * partition.parts
    whole = StepPrediction(str(strategy), strategy, replicas, seconds, 1.0, between, 0.0, late, None, rate, 0.0)
    return SplitPrediction(
        partition,
        strategy,
        replicas,
        seconds,
        found.utilization,
        found.sent_bytes_per_step,
        rate,
        memory_of(shape, task) + found.held,
        samples_needed(whole, partition, site),
        shape.layers,
    )


def samples_needed(whole: StepPrediction, partition: Partition, site: Site) -> float:
    """Return the factor by which split replicas need more samples than one worker for the same accuracy. The factor is
    that of whole replicas, increased for the delays of a pipeline schedule.

    `whole` is the prediction for the same number of whole replicas, with the step time of the split replicas and with
    the bytes that the split replicas send to each other.
    """
    relative, delay = relative_samples(whole, site), partition.mean_delay
    if not delay:
        return relative
    stable = 1 / math.sin(math.pi / (2 * (2 * delay + 1)))  # a delay costs samples as staleness does
    return DOUBT * (relative + whole.workers * (stable - 1) / (1 + site.task.noise))


def memory_of(shape: SplitShape, task: JobProfile) -> float:
    """Return the bytes of memory on the worker that needs most memory, for parameters, copies of parameters, gradient,
    optimizer and activations.
    """
    return shape.elements_held(task.slots) * task.itemsize


def partitions(site: Site, workers: int) -> Iterator[list[Partition]]:
    """Yield the partitions to consider, in lists whose members differ only in the number of micro-batches, which is a
    power of two: 1F1B with each number of stages, layers split over ways, both together, and sharded parameters.

    Layers are split over ways, and parameters stored in shards, only for a job, because only a job's model shows which
    layers a run can split. A model with convolutions is also split with its convolutions divided by samples.
    """
    model, job = site.task.shape, site.task.job is not None
    places = 0 if model is None else len(units(model))
    numbers = [one for one in range(2, workers + 1) if not workers % one]
    for stages in [1, *numbers]:
        if stages > max(1, places):
            continue
        most = min(site.task.batch, AHEAD * stages)
        counts = [2**power for power in range(most.bit_length()) if 2**power <= most]
        pipelines = [Pipeline(stages, OneForwardOneBackward(), count) for count in counts]
        if stages > 1:
            yield list(pipelines)
        for ways in [one for one in numbers if job and not workers % (stages * one)]:
            yield [TensorParallel(ways)] if stages == 1 else [each * TensorParallel(ways) for each in pipelines]
    convolutions = model is not None and any(layer.kind == "convolution" for layer in model.layers)
    for ways in numbers if job and convolutions else ():
        yield [TensorParallel(ways, convolutions="divided")]
    for ways in numbers if job else ():
        yield [Sharded(ways)]


def _search(
    site: Site, workers: int, strategy: Strategy, limit: float | None, refused: list[tuple[str, str]]
) -> Iterator[SplitPrediction]:
    """Yield the best partition of each list of `partitions`, by short rehearsals: first the number of micro-batches of
    1F1B, then, from this number on, that of the other synchronous schedules. Partitions that a run would refuse are
    added to `refused`, once for each reason.

    1F1B holds fewer activations than GPipe, but a stage waits for a message from each neighbor between two passes, so
    that the latency of a link counts once for each micro-batch.
    """
    reasons: set[str] = set()

    def fastest(options: Sequence[Partition], count: int | None) -> SplitPrediction | None:
        """Uphill from the first partition with `count` micro-batches, or as many as stages, in both directions."""
        enough = [one for one, option in enumerate(options) if _microbatches(option) >= (count or _stages(option))]
        start, best = enough[0] if enough else len(options) - 1, None
        for way in (options[start:], options[:start][::-1]):
            for option in way:
                try:
                    if not fits(option, site, limit):
                        continue
                    found = predict_split(strategy, option, site, workers, short=True)
                except FlockstepError as error:
                    # Other schedules than 1F1B may need more layers than there are, which tells nothing.
                    if count is None and str(error) not in reasons:
                        refused.append((str(option), str(error)))
                        reasons.add(str(error))
                    continue
                if best is not None and found.seconds >= best.seconds:
                    break
                best = found
        return best

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
        yield best


def _pipeline_of(partition: Partition) -> Pipeline | None:
    """The pipeline of a partition; None if there is none."""
    found = partition.pipeline if isinstance(partition, Product) else partition
    return found if isinstance(found, Pipeline) else None


def _microbatches(partition: Partition) -> int:
    pipeline = _pipeline_of(partition)
    return 1 if pipeline is None else pipeline.microbatches


def _stages(partition: Partition) -> int:
    pipeline = _pipeline_of(partition)
    return 1 if pipeline is None else pipeline.stages


def _scheduled(option: Partition, schedule: PipelineSchedule) -> Partition | None:
    """A partition with another schedule; None if the schedule does not allow the number of micro-batches."""
    pipeline = _pipeline_of(option)
    assert pipeline is not None
    try:
        other = replace(pipeline, schedule=schedule)
    except ConfigurationError:
        return None
    return Product(other, option.tensor) if isinstance(option, Product) else other


def fits(partition: Partition, site: Site, limit: float | None) -> bool:
    """Return whether the memory of the worker that needs most memory is at most `limit` bytes. A limit of None stands
    for no limit.
    """
    return limit is None or memory_of(split_shape(site.task, partition), site.task) <= limit


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
    found = even_plan(seconds, outputs, weights, workers, site.link[1])
    if len(found.stages) == 1:
        return None
    names = tuple(chain[stage.first][0].name for stage in found.stages[1:])
    return Pipeline(len(found.stages), PipeDream(), 1, names)


def advise_hybrid(
    outlook: Outlook,
    advice: Advice,
    asked: HybridOptions = SEARCH,
    say: ProgressCallback = silent,
) -> HybridAdvice:
    """Choose partition and strategy together, based on the predictions and the advice for whole replicas.

    Args:
        outlook: the predictions for whole replicas; the memory of the cluster is the limit.
        advice: the advice on whole replicas, whose requirements also apply to split replicas.
        asked: the partitions and strategies to consider.
        say: function that is called with the partition and strategy that are predicted next.

    Raises:
        ConfigurationError: a partition of `asked` does not divide the number of workers, or cannot split the model.
    """
    site, workers = outlook.site, outlook.workers
    for partition in asked.partitions:
        partition.replicas(workers)
        split_shape(site.task, partition)
    refused: list[tuple[str, str]] = []
    found: list[SplitPrediction] = []
    planner = None

    def predict(strategy: Strategy, partition: Partition, name: str) -> SplitPrediction | None:
        try:
            return predict_split(strategy, partition, site, workers)
        except FlockstepError as error:
            refused.append((name, str(error)))
            return None

    try:
        if workers > MOST:
            raise ConfigurationError(
                f"a plan of split models takes at most {MOST} workers, got {workers:,}; give fewer with --workers"
            )
        wanted = _splittable(outlook, advice, asked.strategies, refused)
        tried = list(asked.partitions)
        if wanted and not tried:
            say("partitions")
            tried = _searched(site, workers, wanted[0], refused)
        for done, partition in enumerate(tried):
            # A single replica has nothing to exchange.
            alone = [Strategy.parse(ALONE)] if wanted else []
            for strategy in wanted if partition.parts < workers else alone:
                name = f"{partition} with {strategy}"
                say(name, done, len(tried))
                if (prediction := predict(strategy, partition, name)) is not None:
                    found.append(prediction)
        if wanted and (pipeline := planned_by_pipedream(site, workers)) is not None:
            # The replicas of a stage average their gradients.
            planner = predict(Strategy.parse(ALONE), pipeline, f"PipeDream's plan {pipeline}")
    except FlockstepError as error:
        refused.append(("splitting", str(error)))
    return _concluded(outlook, advice, found, planner, refused, asked.imports)


def _concluded(
    outlook: Outlook,
    advice: Advice,
    found: list[SplitPrediction],
    planner: SplitPrediction | None,
    refused: list[tuple[str, str]],
    imports: Sequence[str],
) -> HybridAdvice:
    """The choice between whole replicas and the predicted splits."""
    single, longer, limit = outlook.alone.samples_per_second, slower(advice.requirements), outlook.site.cluster.memory
    speedups = {
        one.name: one.samples_per_second / waiting(one.utilization, longer) / one.relative_samples / single
        for one in [*found, *([planner] if planner is not None else [])]
    }
    ranked = sorted(found, key=lambda one: -speedups[one.name])
    fitting = [one for one in ranked if limit is None or one.memory <= limit]
    whole: StepPrediction | None = advice.choice
    choice: SplitPrediction | StepPrediction | None = whole
    if fitting:
        best = fitting[0]
        if whole is None or speedups[best.name] > _to_beat(advice.speedups[whole.name], whole):
            choice = best
    if choice is None:
        least = f"a worker needs at least {size(_least(outlook))}"
        sentences: tuple[str, ...] = (
            f"Neither whole nor split replicas fit into the {size(limit or 0.0)} of a worker; {least}.",
        )
    elif isinstance(choice, SplitPrediction):
        sentences = _to_split(outlook, advice, choice, speedups[choice.name])
    else:
        speedup = advice.speedups[choice.name]
        if fitting:
            why = (
                f"{choice.name} with whole replicas has a predicted speed-up of {number(speedup)}, the best split "
                f"({fitting[0].name}) of {number(speedups[fitting[0].name])}"
            )
            if choice.workers == 1 and speedups[fitting[0].name] > speedup:
                why += f", and {uncertain()}"
        elif ranked:
            why = f"no split fits into the {size(limit or 0.0)} of a worker"
        else:
            told = [reason for name, reason in refused if name == "splitting"]
            why = told[0] if told else "no partition can be combined with a strategy"
        sentences = (f"Do not split the model: {why}.",)
    reasons: tuple[str, ...] = ()
    if planner is not None:
        figures = f"predicted speed-up {number(speedups[planner.name])}, {size(planner.memory)} on a worker"
        same = "with the same number of workers for each stage"
        reasons = (f"PipeDream's planner, {same}, would choose {planner.partition}: {figures}.",)
    command = None if choice is None else _command(outlook, choice, imports)
    return HybridAdvice(choice, tuple(ranked), speedups, sentences, reasons, command, tuple(refused), planner)


def _splittable(
    outlook: Outlook, advice: Advice, given: Sequence[Strategy], refused: list[tuple[str, str]]
) -> list[Strategy]:
    """The strategies to combine with partitions, the best with whole replicas first."""
    if given:
        return list(given)
    free = replace(outlook, site=replace(outlook.site, cluster=outlook.site.cluster.with_memory(None)))
    wanted: list[Strategy] = []
    for one in advice.ranked(outlook):
        if one.strategy is None or len(wanted) == TOP_STRATEGIES or unfit(one, free, advice.requirements) is not None:
            continue
        if one.strategy.traits.fixed_steps and one.strategy.traits.plain_gradients:
            wanted.append(one.strategy)
        else:
            why = "the workers request more than the gradient of their next batch, which stages cannot compute"
            refused.append((one.name, why))
    return wanted


def _searched(site: Site, workers: int, strategy: Strategy, refused: list[tuple[str, str]]) -> list[Partition]:
    """The best partitions that a search finds.

    Raises:
        ConfigurationError: the number of workers has no partition.
    """
    failed: list[tuple[str, str]] = []
    found = sorted(
        _search(site, workers, strategy, site.cluster.memory, failed),
        key=lambda one: -one.samples_per_second / one.relative_samples,
    )
    if not found and failed:
        refused.append(("splitting", failed.pop(0)[1]))
    refused += failed
    if not any(partitions(site, workers)):
        raise ConfigurationError(
            f"no pipeline of {site.task.name} has stages for {workers} workers; use another number of workers"
        )
    return [one.partition for one in found[:TOP_PARTITIONS]]


def _to_beat(speedup: float, whole: StepPrediction) -> float:
    """Speed-up that a split model must exceed to be recommended instead of whole replicas, or of one worker."""
    return max(GAIN * speedup, preference(whole, speedup))


def _command(outlook: Outlook, choice: SplitPrediction | StepPrediction, imports: Sequence[str]) -> str:
    """The command that trains with a combination. A reference model has no data; JOB stands for the user's job."""
    task = outlook.task
    if isinstance(choice, SplitPrediction):
        workers, split = outlook.workers, ["--partition", str(choice.partition)]
    else:
        workers, split = choice.workers, []
    job = task.identity if task.file is None else str(task.file)
    words = ["flockstep", "train", "JOB" if task.job is None or job is None else job]
    words += ["-s", short(str(choice.strategy or ALONE)), *split]
    words += ["-n", str(workers), *([] if task.usual else ["--batch", str(task.batch)])]
    return shlex.join([*words, *(word for file in imports for word in ("--import", file))])


def _least(outlook: Outlook) -> float:
    """Bytes that a worker needs at least, over whole replicas and all partitions of the search."""
    task, whole = outlook.task, min(one.memory for one in outlook.predictions)
    try:
        options = [one for found in partitions(outlook.site, outlook.workers) for one in found]
        return min([whole, *(memory_of(split_shape(task, one), task) for one in options)])
    except FlockstepError:  # the model cannot be cut
        return whole


def _to_split(outlook: Outlook, advice: Advice, choice: SplitPrediction, speedup: float) -> tuple[str, str]:
    """How to split the model, and how much that is better than whole replicas."""
    whole, limit, partition = advice.choice, outlook.site.cluster.memory, choice.partition
    if choice.replicas == 1:
        said = (
            f"Split the model over all {partition.parts} workers with {partition}; there is one replica, so nothing is "
            "exchanged between replicas"
        )
    else:
        said = (
            f"Split each replica over {partition.parts} workers with {partition}, and coordinate the {choice.replicas} "
            f"replicas with {short(str(choice.strategy))}"
        )
    said += f": predicted speed-up {number(speedup)}, at most {size(choice.memory)} on a worker."
    if whole is None:
        need = min(one.memory for one in outlook.predictions)
        within = "" if limit is None else f": a whole replica needs at least {size(need)} of {size(limit)}"
        return said, f"No strategy with whole replicas meets the requirements{within}."
    other = advice.speedups[whole.name]
    compared = f"the best strategy with whole replicas, {whole.name} (speed-up {number(other)})"
    return said, f"This is {number(speedup / other)} times as fast as {compared}."
