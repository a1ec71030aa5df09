"""Work, depth and bytes of a network's layers, and the layers for which data parallelism costs less than splitting.

Work W and depth D are those of Ben-Nun & Hoefler, "Demystifying Parallel and Distributed Deep Learning" (2019, sections
on the primer of parallelism and on layer types): W counts operations, D is the longest chain of dependent operations,
and W/D, the average parallelism, bounds the number of processing elements that a layer can keep busy. The paper counts
a multiply-add as one operation of W; flockstep counts two floating-point operations. The paper's D counts the ⌈log2 n⌉
rounds of a sum of n numbers; in flockstep, a chain has at least one operation. As in the paper, W and D leave out
biases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from flockstep.errors import ConfigurationError

Number = int | float
CountedBy = Literal["formula", "torch", "jax", "unknown"]
Parallelism = Literal["data", "split"]


def log2_ceil(count: Number) -> int:
    """Return ⌈log2 count⌉, the number of rounds in which `count` numbers are summed in pairs; 0 for at most one
    number.
    """
    return max(math.ceil(count) - 1, 0).bit_length()


@dataclass(frozen=True)
class Pass:
    """The operations of one pass of a layer: the forward pass, the gradient of its weights, or the gradient of its
    inputs.

    `products` are multiply-adds and `other` further operations, both per sample. The longest chain consists of `depth`
    operations and of `sums` successive sums, each over `summed` numbers from every sample of the batch.
    """

    products: Number = 0
    other: Number = 0
    depth: int = 0
    sums: int = 0
    summed: Number = 1

    def __post_init__(self) -> None:
        for name in ("products", "other", "depth", "sums", "summed"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigurationError(
                    f"{name} of a pass must be >= 0 and finite, got {value}; check the numbers of the layer"
                )

    def work(self, batch: int) -> Number:
        """Return the work W, the number of floating-point operations for `batch` samples. A multiply-add counts as two
        operations.
        """
        return batch * (2 * self.products + self.other)

    def chain(self, batch: int) -> int:
        """Return the depth D, the length of the longest chain of dependent operations; 0 without operations."""
        if not self.products and not self.other:
            return 0
        return max(1, self.depth + self.sums * log2_ceil(batch * self.summed))


NOTHING = Pass()
"""A pass without operations, for the gradient of the weights in a layer without weights, and for the gradient of the
data.
"""


@dataclass(frozen=True)
class Layer:
    """A layer, described by its shape. Counts are numbers of elements; counts of activations are per sample.

    A layer whose weights belong to another layer (`tied`), or that runs again, counts no parameters.
    """

    name: str
    kind: str
    parameters: int = 0
    """Number of parameters of the layer, without parameters that an earlier layer counts."""
    forward: Pass = NOTHING
    by_weight: Pass = NOTHING
    """The pass that computes the gradient of the weights."""
    by_input: Pass = NOTHING
    """The pass that computes the gradient of the inputs; empty if the inputs are the data."""
    reads: Number = 0
    """Number of elements of the layer's inputs, per sample."""
    writes: Number = 0
    """Number of elements of the layer's outputs, per sample."""
    trained: int | None = None
    """Number of the layer's parameters that have a gradient; None if all have one."""
    after: tuple[str, ...] | None = None
    """Names of the layers whose outputs this layer reads; None for the previous layer."""
    tied: str | None = None
    """Name of the layer that counts the weights which this layer shares; None if this layer has its own weights."""
    counted: CountedBy = "formula"
    """The way in which the work was counted: by the formulas of flockstep, by torch, from a trace of JAX, or not at
    all.
    """

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError("a layer needs a name, got ''; choose a name for its function, such as conv1")
        for name in ("parameters", "reads", "writes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(
                    f"{name} of layer {self.name!r} must be >= 0, got {getattr(self, name)}; check the shape of the "
                    "layer"
                )
        if self.trained is not None and not 0 <= self.trained <= self.parameters:
            raise ConfigurationError(
                f"trained of layer {self.name!r} must be <= its {self.parameters} parameters, got {self.trained}; "
                f"give at most {self.parameters}"
            )

    @property
    def gradients(self) -> int:
        """Number of elements of the gradient of the layer's parameters."""
        return self.parameters if self.trained is None else self.trained

    @property
    def multiply_adds(self) -> Number:
        """Number of multiply-adds of the forward pass of one sample, the number that papers about networks state."""
        return self.forward.products

    def work_forward(self, batch: int) -> Number:
        """Return the floating-point operations of the forward pass of `batch` samples."""
        return self.forward.work(batch)

    def work_backward(self, batch: int) -> Number:
        """Return the floating-point operations of the gradients of weights and inputs for `batch` samples."""
        return self.by_weight.work(batch) + self.by_input.work(batch)

    def work(self, batch: int) -> Number:
        """Return the work W, the floating-point operations of both passes of `batch` samples."""
        return self.work_forward(batch) + self.work_backward(batch)

    def depth_backward(self, batch: int) -> int:
        """Return the depth of the backward pass: the longer chain of the gradients of weights and inputs, which do not
        depend on each other.
        """
        return max(self.by_weight.chain(batch), self.by_input.chain(batch))

    def depth(self, batch: int) -> int:
        """Return the depth D, the length of the longest chain of dependent operations in both passes."""
        return self.forward.chain(batch) + self.depth_backward(batch)

    def parallelism(self, batch: int) -> float:
        """Return the average parallelism W/D, as of a network; 0 without operations."""
        depth = self.depth(batch)
        return self.work(batch) / depth if depth else 0.0

    def activation_bytes(self, batch: int, itemsize: int = 4) -> Number:
        """Return the bytes of the layer's outputs for `batch` samples."""
        return batch * self.writes * itemsize

    def gradient_bytes(self, itemsize: int = 4) -> int:
        """Return the bytes of the gradient of the layer's parameters."""
        return self.gradients * itemsize

    def data_bytes(self, workers: int, itemsize: int = 4) -> float:
        """Return the bytes that a worker sends per step to average the layer's gradient by an optimal all-reduce: 2
        (P-1)/P |∇w| for P workers.
        """
        return 2 * (workers - 1) / workers * self.gradient_bytes(itemsize)

    def pipeline_bytes(self, batch: int, itemsize: int = 4) -> Number:
        """Return the bytes per step on the link after this layer, if a pipeline stage ends with the layer: activations
        of `batch` samples, and gradients of the activations.
        """
        return 2 * self.activation_bytes(batch, itemsize)

    def split_bytes(self, batch: int, workers: int, itemsize: int = 4) -> float:
        """Return the bytes that a worker sends per step if the layer is split over P workers by the cheaper of two
        methods.

        Before and after the layer, each worker holds the activations of its own `batch` samples. If the layer is split
        by outputs, all workers gather the inputs of all P·batch samples, and each returns its outputs to the workers
        that hold the samples. If the layer is split by inputs, the inputs are exchanged and the outputs are summed and
        scattered. Gradients travel in the opposite direction; gradients of the data are not needed.
        """
        ways = 2 if self.by_input.work(1) else 1
        whole = (workers - 1) * batch * itemsize  # to gather, or to sum and scatter, one element per sample
        share = whole / workers  # to send one element per sample to one worker each
        by_outputs = ways * whole * self.reads + 2 * share * self.writes
        by_inputs = ways * share * self.reads + 2 * whole * self.writes
        return min(by_outputs, by_inputs)


@dataclass(frozen=True)
class ModelShape:
    """The shape of a network: its layers in the order of execution. `itemsize` is the number of bytes of one
    element.
    """

    name: str
    layers: tuple[Layer, ...]
    itemsize: int = 4
    note: str = ""
    """Text that says which variant of the network the shape describes, or where the layers come from."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigurationError(f"the model {self.name!r} needs at least one layer, got none; add a layer")
        if self.itemsize < 1:
            raise ConfigurationError(f"itemsize must be >= 1 byte, got {self.itemsize}; float32 has 4")
        known: set[str] = set()
        for layer in self.layers:
            if layer.name in known:
                raise ConfigurationError(f"two layers of {self.name!r} are called {layer.name!r}; rename one")
            missing = [name for name in layer.after or () if name not in known]
            if missing:
                raise ConfigurationError(
                    f"layer {layer.name!r} needs the output of {missing[0]!r}, which is not among the layers before "
                    "it; list the layers in the order in which they run"
                )
            known.add(layer.name)

    @property
    def parameters(self) -> int:
        """Number of parameters of the network, with shared parameters counted once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def gradients(self) -> int:
        """Number of elements of the network's gradient, equal to the number of trained parameters."""
        return sum(layer.gradients for layer in self.layers)

    @property
    def multiply_adds(self) -> Number:
        """Number of multiply-adds of the network's forward pass of one sample."""
        return sum(layer.multiply_adds for layer in self.layers)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the layers whose work is unknown."""
        return tuple(layer.name for layer in self.layers if layer.counted == "unknown")

    def work_forward(self, batch: int) -> Number:
        """Return the floating-point operations of the network's forward pass of `batch` samples."""
        return sum(layer.work_forward(batch) for layer in self.layers)

    def work_backward(self, batch: int) -> Number:
        """Return the floating-point operations of the network's backward pass of `batch` samples."""
        return sum(layer.work_backward(batch) for layer in self.layers)

    def work(self, batch: int) -> Number:
        """Return the work W, the floating-point operations of both passes of `batch` samples."""
        return self.work_forward(batch) + self.work_backward(batch)

    def depth(self, batch: int) -> int:
        """Return the depth D, the length of the longest chain of dependent operations through the layers, forward and
        backward. Branches run in parallel.
        """
        forward = self._longest([layer.forward.chain(batch) for layer in self.layers])
        return forward + self._longest([layer.depth_backward(batch) for layer in self.layers])

    def _longest(self, depths: Sequence[int]) -> int:
        """The longest path through the layers, with a depth for each layer."""
        reached: dict[str, int] = {}
        before: tuple[str, ...] = ()
        for layer, depth in zip(self.layers, depths, strict=True):
            start = max((reached[name] for name in (before if layer.after is None else layer.after)), default=0)
            reached[layer.name] = start + depth
            before = (layer.name,)
        return max(reached.values())

    def parallelism(self, batch: int) -> float:
        """Return the average parallelism W/D, the mean number of operations that can run at the same time."""
        depth = self.depth(batch)
        return self.work(batch) / depth if depth else 0.0

    def gradient_bytes(self) -> int:
        """Number of bytes of the gradient of all parameters of the network."""
        return self.gradients * self.itemsize

    def activation_bytes(self, batch: int) -> Number:
        """Return the bytes of the outputs of all layers for `batch` samples, which backpropagation keeps."""
        return sum(layer.activation_bytes(batch, self.itemsize) for layer in self.layers)

    def data_bytes(self, workers: int) -> float:
        """Return the bytes that a worker sends per step of data parallelism with `workers` workers."""
        return sum(layer.data_bytes(workers, self.itemsize) for layer in self.layers)

    def split_bytes(self, layer: Layer, batch: int, workers: int) -> float:
        """Return the bytes that a worker sends per step if `layer`, together with all layers that share its weights, is
        split over the workers.
        """
        users = [one for one in self.layers if one is layer or one.tied == layer.name]
        return sum(one.split_bytes(batch, workers, self.itemsize) for one in users)

    def pair_bytes(self, first: Layer, second: Layer, batch: int, workers: int) -> float:
        """Return the bytes that a worker sends per step if `first` is split by outputs and `second`, which follows, by
        inputs (Shoeybi et al. 2019), where each worker holds the inputs of its own `batch` samples.

        All workers gather the inputs of `first`, and sum and scatter their gradients; the outputs of `second` are
        summed on all workers. Between the two layers, nothing is sent.
        """
        ways = 2 if first.by_input.work(1) else 1
        return (workers - 1) * batch * self.itemsize * (ways * first.reads + 2 * second.writes)

    def cheaper(self, layer: Layer, batch: int, workers: int) -> Parallelism:
        """Return the method that sends fewer bytes for a layer with `batch` samples per worker: "data" sends the
        gradient, "split" sends activations.
        """
        sent = layer.data_bytes(workers, self.itemsize)
        return "split" if sent and self.split_bytes(layer, batch, workers) < sent else "data"

    def break_even_batch(self, layer: Layer, workers: int) -> float:
        """Return the number of samples per worker above which data parallelism sends fewer bytes for `layer` than
        splitting; 0 if data parallelism always sends fewer.
        """
        sent, each = layer.data_bytes(workers, self.itemsize), self.split_bytes(layer, 1, workers)
        return sent / each if each else 0.0

    def cheapest_bytes(self, batch: int, workers: int) -> float:
        """Return the bytes that a worker sends per step if each layer uses data parallelism or splitting, whichever
        sends fewer bytes.
        """
        return sum(
            min(layer.data_bytes(workers, self.itemsize), self.split_bytes(layer, batch, workers))
            for layer in self.layers
            if layer.gradients
        )

    def split_layers(self, batch: int, workers: int) -> tuple[str, ...]:
        """Return the names of the layers for which splitting sends fewer bytes than data parallelism."""
        return tuple(layer.name for layer in self.layers if self.cheaper(layer, batch, workers) == "split")


def require_scale(batch: int, workers: int) -> None:
    """Check that a batch size and a number of workers are at least 1.

    Raises:
        ConfigurationError: the batch size or the number of workers is below 1.
    """
    for name, value in (("batch", batch), ("workers", workers)):
        if value < 1:
            raise ConfigurationError(f"{name} must be >= 1, got {value}; give at least 1")


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


def _of_data_parallel(layer: Layer, batch: int, workers: int) -> Concurrency:
    # The gradient of the weights is summed over the samples of a worker, and then over P workers in ⌈log2 P⌉ rounds.
    # The additions of both sums are those of one sum over all samples.
    by_weight = layer.by_weight.chain(batch) + (log2_ceil(workers) if layer.gradients else 0)
    return Concurrency(layer.work(batch), layer.forward.chain(batch) + max(by_weight, layer.by_input.chain(batch)))


def _of_model_parallel(layer: Layer, batch: int, workers: int) -> Concurrency:
    everything = batch * workers  # each worker computes a P-th of the layer on the samples of all
    return Concurrency(layer.work(everything) / workers, layer.depth(everything))


def _of_pipeline_parallel(layer: Layer, batch: int, workers: int) -> Concurrency:
    # The stage computes one micro-batch for each worker, one after the other.
    return Concurrency(layer.work(batch * workers), workers * layer.depth(batch))


CONCURRENCY: dict[str, Callable[[Layer, int, int], Concurrency]] = {
    "data": _of_data_parallel,
    "model": _of_model_parallel,
    "pipeline": _of_pipeline_parallel,
}
"""Kind of parallelism → function that returns a worker's share of a layer, given (layer, samples per worker, number of
workers), if P workers divide the samples (data parallelism), divide each layer (model parallelism), or divide the
network into groups of layers (pipeline parallelism).

The three ways compute the same step: the gradient of P·N samples, N for each worker. Their W, D and W/D can therefore
be compared (Ben-Nun & Hoefler 2019, sections on the primer of parallelism and on data, model and pipeline parallelism).
"""
