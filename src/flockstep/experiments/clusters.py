"""Functions that run training on the machines of a cluster manager, Ray or Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from flockstep.experiments.folders import folder
from flockstep.experiments.options import STRATEGY, RecordOptions, TrainedJob, configured, takes
from flockstep.experiments.single import RunResult, carry_out
from flockstep.options import (
    BadGradientOptions,
    CheckpointOptions,
    DistributionOptions,
    Opt,
    TimeoutOptions,
    TrainingOptions,
    Workers,
)

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame

    from flockstep.strategies.base import Strategy

    Rows: TypeAlias = DataFrame | RDD[Any]
else:
    Rows, Strategy = Any, str

Timeout = Annotated[float, Opt("Seconds to wait for all nodes or tasks.")]


@dataclass(frozen=True)
class RayOptions(
    RecordOptions,
    CheckpointOptions,
    TimeoutOptions,
    BadGradientOptions,
    DistributionOptions,
    TrainingOptions,
    TrainedJob,
):
    """Options of a run on a Ray cluster."""

    workers: Workers = 4
    _: KW_ONLY
    nodes: int | None = Opt(
        "Number of nodes that share the workers (default: all nodes of the cluster, but at most `workers`)."
    ).default()
    cpus_per_worker: float = Opt("Number of cores that each worker reserves.").default(1.0)
    gpus_per_worker: float = Opt("Number of GPUs that each worker reserves.").default(0.0)
    timeout: Timeout = 600.0


@takes(RayOptions)
def on_ray(options: RayOptions) -> RunResult:
    """Train on the nodes of a Ray cluster, as `flockstep train --on ray` does.

    This process coordinates and writes the record. The process must be a driver on a node of the cluster. A placement
    group reserves a bundle of cores and GPUs on each node for the workers of that node; if a node is lost, its workers
    are lost. The file of a job is copied to the nodes. A script must guard the call with
    `if __name__ == "__main__":`.

    Returns:
        The finished run.

    Raises:
        ConfigurationError: an argument is invalid, or no cluster has enough free cores and GPUs; nothing was started.
        MissingDependency: Ray is not installed.
        RunError: the run failed; the record is complete up to the failure.
    """
    from flockstep.launchers.ray import ray_cluster

    config = configured("train", options)
    reserved = options.cpus_per_worker, options.gpus_per_worker
    with ray_cluster(options.workers, options.nodes, *reserved, options.timeout) as gathering:
        place = folder(options.out, f"{options.job}-{options.strategy}")
        return carry_out(config, place, options.overwrite, gathering=gathering)


@dataclass(frozen=True)
class SparkOptions(RecordOptions, TimeoutOptions, TrainingOptions):
    """Options of a run on the partitions of a Spark DataFrame or RDD."""

    rows: Annotated[Rows, Opt("A DataFrame, or an RDD of pairs (x, y) of numbers or arrays.")]
    job: Annotated[
        str | Path,
        Opt(
            "A built-in workload, or the path of a Python file with a function `job()`, which is copied to the "
            "executors. Everything but the training data is taken from the job."
        ),
    ]
    strategy: Annotated[str | Strategy, STRATEGY]
    _: KW_ONLY
    x: str | Sequence[str] = Opt(
        "Columns of the inputs in a DataFrame: names of columns of numbers, or one column of arrays or vectors."
    ).default("features")
    y: str = Opt("Column of the target in a DataFrame.").default("label")
    test: Rows | None = Opt(
        "Rows of the same kind for evaluations, which the driver collects (default: the test set of the job)."
    ).default()
    timeout: Timeout = 600.0


@takes(SparkOptions)
def on_spark(options: SparkOptions) -> RunResult:
    """Train on the partitions of a Spark DataFrame or RDD: one worker for each partition, on the partition's rows,
    which stay on their executor.

    The driver coordinates, evaluates and writes the record. The workers are the tasks of a barrier stage, so the
    cluster must be able to run one task for each partition at the same time. The stage ends with its first lost
    executor, under every strategy; a worker process that dies on a living executor is a lost worker.

    Every worker takes the same number of batches from its own partition, in a new random order in each pass, so that
    all workers together make `epochs` passes over all rows. The rows of a small partition are therefore used more often
    than those of a large one. The run depends on the order of the rows within the partitions; the record's facts hold a
    hash of the rows in this order.

    Returns:
        The finished run.

    Raises:
        ConfigurationError: an argument is invalid, a partition is empty, or the cluster has too few slots.
        CompositionError: workers of the strategy compute on samples of other workers.
        MissingDependency: pyspark is not installed.
        RunError: the run failed; the record is complete up to the failure.
    """
    from flockstep.launchers.spark import spark_stage
    from flockstep.launchers.train import train

    data = options.rows, options.x, options.y, options.test
    with spark_stage(*data, str(options.job), options.seed, options.timeout) as (gathering, held_out):
        config = configured("train", options)
        config = replace(config, workers=gathering.nodes, facts=held_out.facts)
        place = folder(options.out, f"{Path(str(options.job)).stem}-{options.strategy}")
        train(config, place, overwrite=options.overwrite, gathering=gathering, test=held_out)
    return RunResult.read(place)
