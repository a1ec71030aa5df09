"""What a step's cost depends on besides the strategy, and what it comes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import slices
from flockstep.codecs.base import Codec, Shape
from flockstep.codecs.identity import Identity
from flockstep.collectives.costs import Link
from flockstep.costs import order_statistics
from flockstep.errors import ConfigurationError
from flockstep.feedback.base import Feedback
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import fitted
from flockstep.messages import HEADER_BYTES
from flockstep.simulation.compute import ComputeModel

CORES = "utilisation counts waiting for a shared core as waiting, where a run's record has it under computing"


@dataclass(frozen=True)
class Rates:
    """How fast a node does what is not computing gradients, in elements per second; infinite costs nothing."""

    encode: float = math.inf
    decode: float = math.inf
    optimizer: float = math.inf
    reduce: float = math.inf

    def __post_init__(self) -> None:
        for name in ("encode", "decode", "optimizer", "reduce"):
            if not (got := getattr(self, name)) > 0:
                raise ConfigurationError(
                    f"rate {name} must be > 0 elements per second, got {got}; leave it out for inf"
                )


@dataclass(frozen=True)
class Setting:
    """A model by its size, workers, and what joins them.

    Every node has a full-duplex card of `bandwidth` bytes per second, as with `simulation.network.Link`: messages leave
    one after the other, arrive one after the other, and take `latency` seconds and their bytes over the bandwidth in
    between. A message has `header` bytes besides its payload.
    """

    workers: int
    elements: int
    compute: ComputeModel
    """Seconds that a gradient takes."""
    latency: float
    bandwidth: float
    dtype: str = "float32"
    tensors: tuple[Shape, ...] = ()
    """Shapes of the model's tensors, which codecs and buckets look at; none: one flat tensor."""
    batch: int = 1
    """Samples in a gradient."""
    slots: int = 0
    """Arrays of the model's size that the optimiser keeps: 1 for momentum, 2 for Adam."""
    rates: Rates = field(default_factory=Rates)
    header: int = HEADER_BYTES
    forward: float = 1 / 3
    """Share of a gradient's time after which backward begins, and buckets can be complete."""
    turns: int = 2000
    """Rounds that a recurrence over random times is followed for, at the most; fewer are quicker and less exact."""

    def __post_init__(self) -> None:
        for name in ("workers", "elements", "batch", "turns"):
            if (got := getattr(self, name)) < 1:
                raise ConfigurationError(f"{name} of a setting must be >= 1, got {got}; 1 is the least")
        if not 0 <= self.latency < math.inf or not self.bandwidth > 0:
            raise ConfigurationError(
                f"a setting needs a latency >= 0 s and a bandwidth > 0 bytes per second, got {self.latency} and "
                f"{self.bandwidth}; 5e-5 and 1.25e9 are those of 10 Gbit Ethernet"
            )
        held = sum(map(math.prod, self.tensors))
        if self.tensors and held != self.elements:
            raise ConfigurationError(
                f"tensors must hold the {self.elements} elements of the model, got {held}; leave them out for one flat "
                "tensor"
            )
        if self.slots < 0 or not 0 <= self.forward <= 1 or self.header < 0:
            raise ConfigurationError(
                f"slots and header must be >= 0 and forward in [0, 1], got {self.slots}, {self.header} and "
                f"{self.forward}; 0, 64 and 1/3 are usual"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(numpy_dtype(self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the model."""
        return self.elements * self.itemsize

    @property
    def link(self) -> Link:
        """The network as the collectives' costs know it."""
        return Link(self.latency, 1 / self.bandwidth, self.header)

    @property
    def mean_compute(self) -> float:
        """Mean seconds of a gradient, over the workers."""
        return order_statistics.mean(self.compute, self.workers)

    def among(self, workers: int) -> Setting:
        """The same with another number of workers."""
        return replace(self, workers=workers)

    def busy(self, nbytes: float) -> float:
        """Seconds for which a message of that payload keeps a card busy."""
        return (nbytes + self.header) / self.bandwidth

    def message(self, nbytes: float) -> float:
        """Seconds that a message of that payload takes on idle cards."""
        return self.latency + self.busy(nbytes)

    def encoded(self, codec: Codec, feedback: Feedback | None = None, part: slice | None = None) -> int:
        """Payload bytes of a part of the gradient (None: all of it), encoded for the tensors in it."""
        shapes = self.shapes(part)
        size = sum(map(math.prod, shapes))
        return fitted(codec, feedback or NoFeedback(), shapes, 0).wire_bytes(size, self.dtype)

    def parts(self, count: int) -> list[slice]:
        """The model in so many parts."""
        return slices(self.elements, count)

    def shapes(self, part: slice | None = None) -> tuple[Shape, ...]:
        """Shapes of the tensors in a part of the model, in order; of one that is cut, a flat piece."""
        start, stop = (0, self.elements) if part is None else (part.start, part.stop)
        found, at = list[Shape](), 0
        for shape in self.tensors or ((self.elements,),):
            size = math.prod(shape)
            low, high = max(start, at), min(stop, at + size)
            if low < high:
                found.append(shape if high - low == size else (high - low,))
            at += size
        return tuple(found)

    def coding(self, codec: Codec, elements: float, decodes: float = 1.0) -> float:
        """Seconds of encoding so many elements once and decoding them `decodes` times; none for identity."""
        if isinstance(codec, Identity):
            return 0.0
        return elements / self.rates.encode + decodes * elements / self.rates.decode

    def updating(self, elements: float) -> float:
        """Seconds of an optimiser's step on so many elements."""
        return elements / self.rates.optimizer

    def reducing(self, elements: float) -> float:
        """Seconds of adding so many elements to others."""
        return elements / self.rates.reduce


@dataclass(frozen=True)
class StepCost:
    """What a step, one gradient of each worker, costs in the mean. Seconds and bytes; bytes are payloads."""

    seconds: float
    """Between two gradients of a worker."""
    sent: float
    """Bytes that a worker sends."""
    messages: float | None
    """Messages that a worker sends; None where the form does not count them."""
    utilisation: float
    """Share of its time that a worker computes; waiting for a core that others use does not count."""
    samples_per_second: float
    """Of all workers, whose gradients are used."""
    memory: float
    """Bytes on a worker: parameters, gradient, optimiser, what the strategy keeps, and buffers for messages."""
    server_sent: float = 0.0
    """Bytes that the busiest server sends; 0 without servers."""
    server_received: float = 0.0
    staleness: float | None = None
    """Mean number of versions by which an update is late; None where there are no versions."""
    staleness_bound: int | None = None
    """What it cannot exceed; None where nothing bounds it."""
    notes: tuple[str, ...] = ()
    """What the form leaves out."""

    @property
    def server_bytes(self) -> float:
        """Bytes through the busiest server."""
        return self.server_sent + self.server_received

    @property
    def steps_per_second(self) -> float:
        """Gradients of one worker."""
        return 1 / self.seconds if self.seconds else math.inf


def step(
    setting: Setting,
    seconds: float,
    sent: float,
    messages: float | None,
    *,
    copies: float = 0.0,
    slots: float | None = None,
    computes: float = 1.0,
    used: float = 1.0,
    servers: tuple[float, float] = (0.0, 0.0),
    staleness: tuple[float | None, int | None] = (None, None),
    notes: Sequence[str] = (),
) -> StepCost:
    """A cost whose utilisation, samples and memory follow from the rest.

    `copies` of the model besides parameters and gradient; `slots` of the optimiser on a worker (None: the setting's);
    a step `computes` so many gradients, of which the share `used` counts; `servers`: what the busiest sends and gets.
    """
    busy = computes * setting.mean_compute
    kept = setting.slots if slots is None else slots
    return StepCost(
        seconds=seconds,
        sent=sent,
        messages=messages,
        utilisation=min(1.0, busy / seconds) if seconds else 1.0,
        samples_per_second=setting.workers * setting.batch * used / seconds if seconds else math.inf,
        memory=setting.nbytes * (2 + kept + copies),
        server_sent=servers[0],
        server_received=servers[1],
        staleness=staleness[0],
        staleness_bound=staleness[1],
        notes=(*notes, CORES) if setting.compute.sharing else tuple(notes),
    )
