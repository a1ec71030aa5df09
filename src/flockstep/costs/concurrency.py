"""Work and depth of one worker's share of a layer, if P workers divide the samples (data parallelism), divide each
layer (model parallelism), or divide the network into groups of layers (pipeline parallelism).

The three ways compute the same step: the gradient of P·N samples, N for each worker. Their W, D and W/D can therefore
be compared: W/D bounds the number of processing elements that a worker can keep busy (Ben-Nun & Hoefler 2019, sections
on the primer of parallelism and on data, model and pipeline parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flockstep.costs.layers import Layer, Number, log2_ceil


@dataclass(frozen=True)
class Concurrency:
    """Work and depth of one worker in a step, for the forward and the backward pass together."""

    work: Number
    """Work W: the number of floating-point operations of the worker."""
    depth: int
    """Depth D: the length of the longest chain of dependent operations in which the worker takes part."""

    @property
    def parallelism(self) -> float:
        """Average parallelism W/D: the mean number of the worker's operations that can run at the same time; 0 without
        operations.
        """
        return self.work / self.depth if self.depth else 0.0


def of_data_parallel(layer: Layer, batch: int, workers: int) -> Concurrency:
    """Return the work and depth of a worker that computes the layer on its own `batch` samples.

    The gradient of the weights is summed over the samples of a worker, and then over `workers` workers in ⌈log2 P⌉
    rounds. The additions of both sums are those of one sum over all samples.
    """
    rounds = log2_ceil(workers) if layer.gradients else 0
    by_weight = layer.by_weight.chain(batch) + rounds
    depth = layer.forward.chain(batch) + max(by_weight, layer.by_input.chain(batch))
    return Concurrency(layer.work(batch), depth)


def of_model_parallel(layer: Layer, batch: int, workers: int) -> Concurrency:
    """Return the work and depth of a worker that computes a P-th of the layer on the samples of all P = `workers`
    workers.
    """
    everything = batch * workers
    return Concurrency(layer.work(everything) / workers, layer.depth(everything))


def of_pipeline_parallel(layer: Layer, batch: int, workers: int) -> Concurrency:
    """Return the work and depth of the worker whose pipeline stage contains the layer.

    In a step, the stage computes `workers` micro-batches of `batch` samples, one after the other.
    """
    return Concurrency(layer.work(batch * workers), workers * layer.depth(batch))


CONCURRENCY: dict[str, Callable[[Layer, int, int], Concurrency]] = {
    "data": of_data_parallel,
    "model": of_model_parallel,
    "pipeline": of_pipeline_parallel,
}
"""Kind of parallelism → function that returns a worker's share of a layer, given (layer, samples per worker, number of
workers).
"""
