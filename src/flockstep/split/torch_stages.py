"""Cuts a torch module into the stages of a pipeline, and computes passes over consecutive layers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from flockstep.arrays.namespace import as_tensor
from flockstep.arrays.schema import Entry, FlatArray, Schema, slices
from flockstep.costs.layers import ModelShape
from flockstep.errors import ConfigurationError, RunError, in_short
from flockstep.frameworks.base import Engine, Evaluation, Indices, Job
from flockstep.frameworks.torch import TensorData, Tensors, TorchEngine, fill, joined, seeded
from flockstep.frameworks.torch_call import Substituted
from flockstep.frameworks.torch_flat import native, schema_of
from flockstep.frameworks.torch_layers import shape_of
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.split_facts import SplitFacts
from flockstep.split.parts import computed_by_parts
from flockstep.split.stages import HeldPart, MicroBatch, ModelPart, PassShares, PipelineModel, SplitModel, Tie
from flockstep.split.torch_accumulation import AddedTogether, WeightGradient, fusible
from flockstep.split.torch_chain import ChainLayer, chunks_of, layers_within, pass_shares
from flockstep.split.torch_held import Held, model_chain, of_all_samples, order_of, schema_of_parts, trained_entries
from flockstep.split.torch_trace import writes_inputs

S = TypeVar("S", bound=SplitModel)
ROUNDING = 1e-6
"""Largest rounding error with which the micro-batches' shares of a batch may sum to one."""
SHARES_APART = 0.03
"""Largest relative distance of a batch's gradient from the sum over its shares that is rounding."""
FLOATS = (torch.float16, torch.float32, torch.float64)
"""Dtypes of activations that stages can send to each other."""
CHECKED = 64
"""Number of training samples, evenly spaced, whose values the processes of a split model compare."""
PIECE = 1 << 20
"""Number of elements of two gradients that are compared at a time."""
TRIAL_BATCHES = 16
"""Number of batches of targets for which the mean loss of the micro-batches is compared with the loss of the batch."""


def split_torch(job: Job, seed: int, pipeline: Pipeline, known: SplitFacts | None = None) -> PipelineModel:
    """Build the job's model and cut it into the stages of `pipeline`. With `known`, the facts that another process has
    found, the parts have no values before `ModelPart.take`, unless the facts name an obstacle.

    Dropout draws from a stream for each replica, step, micro-batch and chunk. Batch normalization uses the statistics
    of the micro-batch, and its running statistics belong to the replica and are updated with every micro-batch in
    order, as in GPipe.

    Raises:
        ConfigurationError: the model cannot be traced, cannot be cut into these stages, computes something other than
            its layers in sequence, or has a loss that is not the mean over samples.
    """
    whole, who = engine_for(job, seed, known), f"job {job.name!r}"
    chain = model_chain(whole.module, who)
    if known is not None:
        chunks = cut_at(known.starts, chain)
        return _assembled(whole, chunks, known, pipeline, _shares(chunks, None, job.batch))
    assert isinstance(whole, TorchEngine)
    samples, _ = whole.samples(whole.trial_samples)
    shape = shape_of(whole.module, samples, name=job.name)
    count = pipeline.stages * pipeline.schedule.chunks
    starts = chunks_of(
        chain, shape, count, [str(name) for name in pipeline.split_at], job.batch, who, ties=pipeline.delays is None
    )
    chunks = cut_at(starts, chain)
    check_buffers(whole, chunks, who)
    of_batch = of_all_samples(whole)
    facts = SplitFacts(tuple(starts), tuple(whole.changing_buffers), whole.random, 0, of_batch=of_batch)
    split = _assembled(whole, chunks, facts, pipeline, _shares(chunks, shape, job.batch))
    require_same_results(split, who, "run one after another")
    split = replace(split, facts=replace(facts, sample_bytes=engine_of(split).sample_bytes))
    check_loss(engine_of(split), whole, pipeline.microbatches, who)
    return split if of_batch else with_layers_of_batch(split, len(whole.trial_samples))


def engine_for(job: Job, seed: int, known: SplitFacts | None) -> WholeTorch:
    """Return the engine of a whole model; without values if the `known` facts of another process name no obstacle."""
    return TorchEngine(job, seed) if known is None or known.obstacle else SkeletonEngine(job, seed, known)


def with_layers_of_batch(split: S, samples: int) -> S:
    """Return `split`, with a text in the facts if micro-batches have other results than a batch of `samples`."""
    count = split.microbatches
    if not 1 < count <= samples or not (why := difference_in_shares(split, count)):
        return split
    return replace(split, facts=replace(split.facts, of_batch=(f"some layer, which gives {why}",)))


def with_obstacle(split: S, build: Callable[[], S]) -> S:
    """Return `split`, with the reason why its parts cannot be built without the values of the whole model, if there is
    one: `build`, which builds them so, fails, or has built parts that compute something else.
    """
    try:
        bare = build()
        for part, known in zip(bare.parts, split.parts, strict=True):
            part.take(known.values())
        found = difference(bare, split)
        obstacle = found and (
            "the model does not give the same results when it is built with uninitialized parameters and filled in "
            f"later, got {found}; do not compute with values or random numbers in constructors"
        )
    except ConfigurationError as error:
        obstacle = str(error)
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises is the reason
        obstacle = (
            f"building the model without values raised {in_short(error.__cause__ or error)}; do not compute with "
            "values in constructors"
        )
    return replace(split, facts=replace(split.facts, obstacle=obstacle))


def cut_at(starts: Sequence[int], chain: Sequence[ChainLayer]) -> list[Sequence[ChainLayer]]:
    """Return the parts of a chain that begin at the layers `starts`."""
    return [chain[start:end] for start, end in pairwise([*starts, len(chain)])]


def _assembled(
    whole: WholeTorch,
    chunks: Sequence[Sequence[ChainLayer]],
    facts: SplitFacts,
    pipeline: Pipeline,
    shares: Sequence[PassShares],
) -> PipelineModel:
    """Return the parts that hold the chunks; the stage of the first chunk that uses a parameter trains it."""
    count, stages = len(chunks), pipeline.stages
    names_of = {id(one): name for name, one in whole.module.named_parameters()}
    entries, held = trained_entries(whole.schema), [list[Held]() for _ in range(stages)]
    made = [list[Chunk]() for _ in range(stages)]
    for number, (layers, share) in enumerate(zip(chunks, shares, strict=True)):
        chunk = Chunk(number, layers, names_of, share, last=number == count - 1)
        made[number % stages].append(chunk)
        held[number % stages] += [Held.whole(entries.pop(name)) for name in chunk.names if name in entries]
    passes = pipeline.schedule.passes(0, stages, pipeline.microbatches, 1)
    whole_backward = not any(work.kind == "input_backward" for work in passes)
    engine, parts, ties = parts_of(whole, held, made, facts, whole_backward)
    words = [f"{chunk[0].name}-{chunk[-1].name}" if len(chunk) > 1 else chunk[0].name for chunk in chunks]
    described = tuple(" and ".join(words[part::stages]) for part in range(stages))
    return PipelineModel(engine, parts, described, facts, pipeline, pipeline, ties)


def parts_of(
    whole: WholeTorch,
    held: Sequence[Sequence[Held]],
    chunks: Sequence[Sequence[Chunk]],
    facts: SplitFacts,
    whole_backward: bool,
) -> tuple[PartsEngine, tuple[TorchPart, ...], tuple[Tie, ...]]:
    """Return the engine of all parts, the parts, and the parameters that a part computes with and another part trains.

    `held` and `chunks` are what each part trains and computes. `whole_backward`: no backward pass is divided into the
    gradients of inputs and of weights.
    """
    buffers = [[name for chunk in part for name in chunk.others if name in facts.changing] for part in chunks]
    engine = PartsEngine(whole, held, [name for part in buffers for name in part])
    parts = tuple(
        TorchPart(engine, number, own, changing, whole_backward)
        for number, (own, changing) in enumerate(zip(chunks, buffers, strict=True))
    )
    owners = {one.name: part for part, tensors in enumerate(held) for one in tensors}
    ties = tuple(
        Tie(owners[name], parts[owners[name]].place(name), user, part.place(name))
        for user, part in enumerate(parts)
        for name in part.borrows
    )
    return engine, parts, ties


class Chunk:
    """Consecutive layers of the model, which one part holds."""

    def __init__(
        self,
        number: int,
        layers: Sequence[ChainLayer],
        names_of: Mapping[int, str],
        shares: PassShares,
        *,
        last: bool,
        alike: int = 0,
    ):
        """`number`: index of the chunk in the model. `names_of`: identity of every parameter → its first name in the
        model. `last`: the loss follows. `alike`: number of first layers that all parts of a replica compute, with the
        same random numbers.
        """
        self.number, self.shares, self.last, self.alike = number, shares, last, alike
        self.module = nn.Sequential(*(layer.module for layer in layers))
        self.leading, self.rest = self.module[:alike], self.module[alike:]
        self.names = list(dict.fromkeys(names_of[id(one)] for layer in layers for one in layer.trained))
        """Names of the trained parameters in the model, in order."""
        self.local: dict[str, str] = {}
        """Name in the model → name in `module`, for every parameter and buffer."""
        self.others: Tensors = {}
        """Name in the model → tensor, for every frozen parameter and buffer."""
        for at, layer in enumerate(layers):
            for name, tensor in [*layer.module.named_parameters(), *layer.module.named_buffers()]:
                self.local.setdefault(names_of.get(id(tensor), layer.named(name)), f"{at}.{name}")
                if not tensor.requires_grad:
                    self.others[layer.named(name)] = tensor
        self.writes_inputs = writes_inputs(list(self.module))
        self.call, self.fusible = Substituted(self.module), fusible(self.module)
        self._end = layers[-1].name

    def check(self, outputs: Any, samples: int) -> None:
        """Raise `ConfigurationError` unless the outputs can be sent to another part."""
        if isinstance(outputs, torch.Tensor) and outputs.dtype in FLOATS and outputs.shape[:1] == (samples,):
            return
        got = f"shape {tuple(outputs.shape)} of {outputs.dtype}" if isinstance(outputs, torch.Tensor) else type(outputs)
        raise ConfigurationError(
            f"the output of layer {self._end!r} must be one tensor of floats with the {samples} samples on its first "
            f"axis to be sent to the next stage, got {got}; cut elsewhere with split_at, or use partition=none"
        )


@dataclass(eq=False)
class ForwardPass:
    """The tensors that a forward pass stores for its backward passes."""

    inputs: torch.Tensor | None
    outputs: torch.Tensor
    weights: list[torch.Tensor]
    errors: torch.Tensor | None = None


class TorchHeldPart(HeldPart):
    """The parameters, the other values and the buffers of a part of a torch module."""

    def __init__(self, engine: PartsEngine, number: int, others: Tensors, buffers: Sequence[str]):
        """`others`: every frozen parameter and buffer of part `number`, by its name in the model. `buffers`: names in
        the model of its changing buffers.
        """
        names = [one.name for one in engine.held[number]]
        self._engine, self.schema, self.train_size = engine, engine.schema.only(names), engine.train_size
        self._start = sum(one.size for tensors in engine.held[:number] for one in tensors)
        """First element of the part's parameters in the array of the engine."""
        self._others, self._buffer_names = others, buffers
        self.held_bytes = self.schema.nbytes + sum(one.nbytes for one in others.values())

    def initial(self) -> FlatArray:
        return self._engine.initial()[self._start : self._start + self.schema.size].copy()

    def values(self) -> npt.NDArray[np.uint8]:
        first = self._engine.whole.changing_buffers
        others = [first.get(name, one).detach().cpu().reshape(-1) for name, one in self._others.items()]
        return np.concatenate([super().values(), *(one.view(torch.uint8).numpy() for one in others)])

    def take(self, values: npt.NDArray[np.uint8]) -> FlatArray:
        if len(values) != self.held_bytes:
            raise ConfigurationError(
                f"the values of a part must have {self.held_bytes} bytes, got {len(values)}; build the same model in "
                "every process"
            )
        start = self.schema.nbytes
        for name, one in self._others.items():
            if isinstance(self._engine.whole, SkeletonEngine):
                kept = torch.from_numpy(values[start : start + one.nbytes].copy())
                self._engine.whole.constants[name] = kept.view(one.dtype).reshape(one.shape)
            start += one.nbytes
        return super().take(values)

    def buffers(self, replica: int) -> FlatArray:
        return joined(self._engine.named_buffers(replica, self._buffer_names))

    def restore_buffers(self, replica: int, values: FlatArray) -> None:
        fill(self._engine.named_buffers(replica, self._buffer_names), values)


class TorchPart(TorchHeldPart, ModelPart):
    """One part of a torch module. Autograd stores the activations of each forward pass."""

    def __init__(
        self,
        engine: PartsEngine,
        number: int,
        chunks: Sequence[Chunk],
        buffers: Sequence[str],
        whole_backward: bool,
    ):
        """`chunks`: what part `number` computes; `buffers`: its changing buffers."""
        others = {name: one for chunk in chunks for name, one in chunk.others.items()}
        super().__init__(engine, number, others, buffers)
        if all(entry.dtype for entry in self.schema.entries):
            narrow = ", ".join(dict.fromkeys(entry.dtype for entry in self.schema.entries))
            raise ConfigurationError(
                f"every part of a model must hold a parameter of the widest dtype {engine.schema.dtype}, got a part "
                f"with parameters of {narrow}; divide it elsewhere or less, or convert it with model.float()"
            )
        entries = {entry.name: entry for entry in engine.schema.entries}
        own = [entry.name for entry in self.schema.entries]
        used = dict.fromkeys(name for chunk in chunks for name in chunk.names)
        self.borrows = [name for name in used if name not in own]
        """Parameters with which the part computes and which another part trains."""
        self._places_of: dict[str, Entry] = {}
        """Name → place in the array (K + B,) with which the part computes."""
        offset = 0
        for name in [*own, *self.borrows]:
            self._places_of[name] = replace(entries[name], offset=offset)
            offset += entries[name].size
        self.borrowed = offset - self.schema.size
        self.shares = [chunk.shares for chunk in chunks]
        self._chunks, self._whole_backward = chunks, whole_backward
        self._leaves: dict[int, tuple[FlatArray, list[torch.Tensor]]] = {}
        """Chunk → parameters (K + B,) of its last forward pass, and their tensors."""
        self._sums: dict[tuple[int, int], list[WeightGradient]] = {}
        """Replica and chunk → gradients of weights that are added together."""
        self._done: dict[tuple[int, int], tuple[int, dict[int, float]]] = {}
        """Replica and chunk → step, and shares of its micro-batches whose backward passes are complete."""
        self._kept: dict[tuple[int, int, int, int], ForwardPass] = {}

    def place(self, name: str) -> slice:
        """Return the position of a parameter's elements in the array (K + B,) with which the part computes."""
        entry = self._places_of[name]
        return slice(entry.offset, entry.offset + entry.size)

    def forward(
        self, chunk: int, params: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        one, engine = self._chunks[chunk], self._engine
        weights = self._weights(chunk, params)
        begun = None if inputs is None else torch.from_numpy(inputs.copy()).requires_grad_()
        x = engine.whole.samples(batch.indices)[0] if begun is None else begun
        with self._computing(chunk, batch, weights):
            if one.alike:
                with engine.stream_of_all(batch, one.number):
                    x = one.leading(x)
            with engine.stream(batch, one.number):
                outputs = one.rest(x.clone() if one.writes_inputs else x)
        if not one.last:
            one.check(outputs, len(batch.indices))
        else:
            outputs = engine.whole.loss(outputs, engine.whole.samples(batch.indices)[1]) * batch.share
        self._kept[self._key(chunk, batch)] = ForwardPass(begun, outputs, weights)
        if one.last:
            return None, float(outputs.item())
        engine.sample_bytes = max(engine.sample_bytes, outputs.nbytes // max(1, len(outputs)))
        return native(outputs.detach().clone()), 0.0  # a layer may return its weight, or memory that it uses again

    def backward(
        self, chunk: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray | None
    ) -> FlatArray | None:
        key = self._key(chunk, batch)
        kept = self._kept[key] if out is None else self._kept.pop(key)
        kept.errors = None if errors is None else torch.from_numpy(errors.copy())
        below = [] if kept.inputs is None else [kept.inputs]
        if out is not None:
            self._add(chunk, batch, kept, out, below)
        elif below:
            with self._computing(chunk, batch, kept.weights):
                add_gradients(kept, below, [], [], retain=True)
        if kept.inputs is None:
            return None
        return native(torch.zeros_like(kept.inputs) if kept.inputs.grad is None else kept.inputs.grad)

    def weight_backward(self, chunk: int, batch: MicroBatch, out: FlatArray) -> None:
        self._add(chunk, batch, self._kept.pop(self._key(chunk, batch)), out, [])

    def _add(
        self, chunk: int, batch: MicroBatch, kept: ForwardPass, out: FlatArray, below: Sequence[torch.Tensor]
    ) -> None:
        """Add the gradient of the weights to `out` (K + B,), and that of `below` to its `grad`."""
        if not below and not kept.weights:
            return
        places = [place for place, _ in self._places(chunk, as_tensor(out))]
        sums = self._sums.get((batch.replica, chunk), [])
        of = batch.replica, chunk
        step, before = self._done.get(of, (batch.step, ()))
        if step != batch.step or batch.number in before:  # an earlier step, or attempt of this one, was not completed
            del self._done[of]
            for one in sums:
                one.clear()
        for one, weight, place in zip(sums, kept.weights, places, strict=False):
            one.tensor = place if place.dtype == weight.dtype else None
        with self._computing(chunk, batch, kept.weights):
            add_gradients(kept, below, kept.weights, places)
        done = self._completes(chunk, batch)
        for one in sums:
            if done:
                one.complete()
            one.tensor = None

    @contextmanager
    def _computing(self, chunk: int, batch: MicroBatch, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context in which a chunk's layers compute with `weights`, forward and in recomputation."""
        one, engine = self._chunks[chunk], self._engine
        given = engine.constants | engine.buffers_of(batch.replica)
        values = dict(zip((one.local[name] for name in one.names), weights, strict=True))
        values.update({one.local[name]: tensor for name, tensor in given.items() if name in one.local})
        together: AbstractContextManager[None] = nullcontext()
        if self._whole_backward:  # the gradients of weights are added together for the micro-batches of a step
            sums = self._sums.setdefault((batch.replica, chunk), [WeightGradient() for _ in weights])
            together = AddedTogether(one.fusible, weights, sums)
        with one.call.holding(values), together:
            yield

    def _completes(self, chunk: int, batch: MicroBatch) -> bool:
        """Whether a backward pass is the last of its step, so that the gradient must be complete behind it."""
        _, done = self._done.setdefault((batch.replica, chunk), (batch.step, {}))
        done[batch.number] = batch.share
        if sum(done.values()) < 1 - ROUNDING:
            return False
        del self._done[batch.replica, chunk]
        return True

    def _weights(self, chunk: int, params: FlatArray) -> list[torch.Tensor]:
        """The tensors with which a chunk computes; they share the memory of `params` (K + B,) of equal dtype."""
        places = self._places(chunk, as_tensor(params))
        if any(view.dtype != dtype for view, dtype in places):
            return [view.detach().to(dtype).requires_grad_() for view, dtype in places]
        known, leaves = self._leaves.get(chunk, (None, []))
        if known is not params:
            leaves = [view.detach().requires_grad_() for view, _ in places]
            if not self._engine.in_trial:  # after a trial, its parameters and gradients are freed
                self._leaves[chunk] = params, leaves
        return leaves

    def _places(self, chunk: int, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.dtype]]:
        """The tensors of a chunk's parameters inside a flat tensor (K + B,), and the dtype with which it computes."""
        entries = [self._places_of[name] for name in self._chunks[chunk].names]
        return [
            (
                flat[entry.offset : entry.offset + entry.size].view(entry.shape),
                getattr(torch, entry.dtype or self.schema.dtype),
            )
            for entry in entries
        ]

    @staticmethod
    def _key(chunk: int, batch: MicroBatch) -> tuple[int, int, int, int]:
        return batch.replica, batch.step, batch.number, chunk


def add_gradients(
    kept: ForwardPass,
    below: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    retain: bool = False,
) -> None:
    """Compute a backward pass. Add the gradients of the leaves `weights` to the tensors `places`, and those of the
    leaves `below` to their `grad`. `retain`: the graph is needed again.
    """
    for weight, place in zip(weights, places, strict=True):
        weight.grad = place if place.dtype == weight.dtype else None
    if below or weights:
        torch.autograd.backward(kept.outputs, kept.errors, retain, inputs=[*below, *weights])
    for weight, place in zip(weights, places, strict=True):
        if weight.grad is not None and place.dtype != weight.dtype:
            place.add_(weight.grad)


class SkeletonEngine(TensorData):
    """The engine of a job whose torch model has shapes but no values (torch's meta device). The part that this process
    holds gets its values from a process that has built the whole model. The memory of this engine does not grow with
    the model.
    """

    def __init__(self, job: Job, seed: int, facts: SplitFacts):
        """Build the model without values, and load the data; raise `ConfigurationError` if the data are drawn from the
        random numbers that the model draws from.
        """
        assert job.loss is not None
        self._seed, self._facts, self.random = seed, facts, facts.random
        with seeded(seed):
            with torch.device("meta"):
                module: torch.nn.Module = job.model()
            before = torch.get_rng_state()
            data = job.data()
            if not torch.equal(torch.get_rng_state(), before):
                raise ConfigurationError(
                    "data drawn with torch's random numbers depend on the numbers that the model has drawn before; "
                    "draw the data with a separate torch.Generator"
                )
        self.module, self.loss = module.train(), job.loss
        named = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self.schema = schema_of(named)
        self._use(job, data, list(named.values()))
        self.constants: Tensors = {}
        """Name → value of the tensors of this process's part that are not trained."""

    @property
    def changing_buffers(self) -> Tensors:
        """Name → initial value of every buffer of this process's part that changes in training."""
        return {name: self.constants[name] for name in self._facts.changing if name in self.constants}


WholeTorch = TorchEngine | SkeletonEngine
"""The engine of an unsplit model, with or without values."""


class PartsEngine(Engine):
    """A torch engine whose flat array holds the parts one after another; each replica has its buffers."""

    def __init__(self, whole: WholeTorch, held: Sequence[Sequence[Held]], buffers: Sequence[str]) -> None:
        """`held`: what each part trains; `buffers`: the changing buffers in the order of the parts."""
        self.whole, self.held, self.schema, self._buffer_names = whole, held, schema_of_parts(held), buffers
        self.optimizer, self.higher_is_better = whole.optimizer, whole.higher_is_better
        self.train_size, self.labels, self.classes = whole.train_size, whole.labels, whole.classes
        self._buffers: dict[int, Tensors] = {}
        self.in_trial = False
        """Whether all chunks draw random numbers as the unsplit model does."""
        self.sample_bytes = 0
        """Size of the largest output of a chunk so far, for one sample."""

    @property
    def unsplit(self) -> TorchEngine:
        """The engine of the unsplit model; raise `RunError` in a process that does not have the model's values."""
        if isinstance(self.whole, TorchEngine):
            return self.whole
        raise RunError("this process holds only one part of the model; use a process that holds the whole model")

    @cached_property
    def order(self) -> npt.NDArray[np.int64] | None:
        """Place of each element in the flat array of `whole`; None if the places are the same."""
        return order_of(self.held)

    @property
    def constants(self) -> Tensors:
        """Name → value of tensors that the chunks' modules lack, because they belong to no module."""
        return self.whole.constants if isinstance(self.whole, SkeletonEngine) else {}

    @cached_property
    def facts(self) -> dict[str, str]:
        """Facts of the data that must be equal in all processes, with hashes of samples, which several read."""
        x, y = self.whole.samples(np.unique(np.linspace(0, self.train_size - 1, CHECKED).astype(np.int64)))
        return self.whole.facts | {"inputs": _digest(x), "targets": _digest(y)}

    @property
    def batching(self) -> str:
        """Text that says that gradients are computed one by one, because the model is split."""
        return "one by one: the model is split"

    def buffers_of(self, replica: int) -> Tensors:
        """Return a replica's changing buffers: name in the model → tensor. Training changes the tensors in place."""
        if replica not in self._buffers:
            self._buffers[replica] = {n: b.detach().clone() for n, b in self.whole.changing_buffers.items()}
        return self._buffers[replica]

    def named_buffers(self, replica: int, names: Sequence[str]) -> list[torch.Tensor]:
        """Return those of a replica's changing buffers that have the given names, in this order."""
        held = self.buffers_of(replica)
        return [held[name] for name in names]

    def stream(self, batch: MicroBatch, *place: int) -> AbstractContextManager[None]:
        """Return a context with random numbers seeded for a micro-batch at one place; nothing in a trial."""
        return nullcontext() if self.in_trial else self.whole.stream(batch.replica, batch.step, batch.number, *place)

    def stream_of_all(self, batch: MicroBatch, chunk: int) -> AbstractContextManager[None]:
        """Return a context in which layers that all parts compute draw the same random numbers. In a trial, these are
        the first that the unsplit model draws; only the part with chunk number 1 takes them from the trial's stream.
        """
        if self.in_trial and chunk > 1:
            return self.whole.stream(batch.replica, batch.step)
        return self.stream(batch, 0)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Return a context in which all chunks draw random numbers from the stream of step 0 of replica 0, as the
        unsplit model does. The replica's buffers are restored afterwards.
        """
        whole, self.in_trial = self.whole, True
        before = whole.buffers(0) if isinstance(whole, TorchEngine) else None
        try:
            with self.whole.stream(0, 0):
                yield
        finally:
            self.in_trial = False
            self._buffers.clear()
            if before is not None:
                self.unsplit.restore_buffers(0, before)

    def initial(self) -> FlatArray:
        whole = self.unsplit.initial()
        return whole if self.order is None else whole[self.order]

    def gradient(self, params: FlatArray, indices: Indices, out: FlatArray, replica: int = 0, step: int = 0) -> float:
        """Write the gradient of the unsplit model into `out` (K,); return the mean loss."""
        slope = out if self.order is None else np.empty_like(out)
        loss = self.unsplit.gradient(self.in_order(params), indices, slope, replica, step)
        if self.order is not None:
            out[:] = slope[self.order]
        return loss

    def gradients(
        self, params: FlatArray, indices: Indices, out: FlatArray, replicas: Sequence[int], steps: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        """Write the gradients of unsplit replicas into `out` (R, K); return the mean losses (R,)."""
        rows = range(len(params))
        return np.array([self.gradient(params[r], indices[r], out[r], replicas[r], steps[r]) for r in rows])

    def buffers(self, replica: int) -> FlatArray:
        return joined(self.named_buffers(replica, self._buffer_names))

    def restore_buffers(self, replica: int, values: FlatArray) -> None:
        fill(self.named_buffers(replica, self._buffer_names), values)

    def evaluate(self, params: FlatArray, replicas: Sequence[int] = (0,)) -> Evaluation:
        for replica in replicas:
            self.bring_buffers(replica)
        return self.unsplit.evaluate(self.in_order(params), replicas)

    def evaluate_together(self, members: FlatArray, replicas: Sequence[int]) -> Evaluation:
        for replica in replicas:
            self.bring_buffers(replica)
        return self.unsplit.evaluate_together(np.stack([self.in_order(one) for one in members]), replicas)

    def mean_buffers(self, replicas: Sequence[int]) -> dict[str, FlatArray]:
        for replica in replicas:
            self.bring_buffers(replica)
        return self.unsplit.mean_buffers(replicas)

    def bring_buffers(self, replica: int) -> None:
        """Give the unsplit model the buffers of a replica, for an evaluation."""
        self.unsplit.restore_buffers(replica, joined(self.buffers_of(replica).values()))

    def as_saved(self, params: FlatArray) -> tuple[FlatArray, Schema]:
        return self.in_order(params), self.whole.schema

    def in_order(self, params: FlatArray) -> FlatArray:
        """Return parameters, (K,) or (M, K), of the parts reordered as in the unsplit model."""
        if self.order is None:
            return params
        whole = np.empty_like(params)
        whole[..., self.order] = params
        return whole


def _digest(values: torch.Tensor) -> str:
    plain = values.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tuple(values.shape)} {values.dtype}".encode() + plain.tobytes()).hexdigest()[:16]


@contextmanager
def passes_over(who: str) -> Iterator[None]:
    """Return a context for trial passes; raise `ConfigurationError` if torch raises an error in a pass."""
    try:
        yield
    except RuntimeError as error:
        raise ConfigurationError(
            f"forward and backward passes over the layers of {who}, one after another, must work on its first batch, "
            f"got {in_short(error)}; change the model, or use partition=none"
        ) from error


def require_same_results(split: SplitModel, who: str, how: str) -> None:
    """Raise `ConfigurationError` unless the parts together compute what the model computes; `how`: what the partition
    does with the layers.
    """
    with passes_over(who):
        if got := difference(split, split):
            raise ConfigurationError(
                f"the layers of {who}, {how}, must compute what the model computes, got {got}; move what the model "
                "does besides running its layers (a forward method of its own, hooks, state that layers share) into "
                "one layer, let a layer read parameters from its attributes only, or use partition=none"
            )


def difference(model: SplitModel, known: SplitModel) -> str:
    """Let the programs of all parts of `model` compute one batch, from the parameters of `known`, as in a run; return
    how loss, gradient and changing buffers differ from those of the unsplit model of `known`, in words; empty if by
    rounding only, or if the gradient is not finite.

    The parts draw random numbers as the unsplit model does. Only in a pipeline do units drop out, because parts that
    share a layer draw for different elements.
    """
    assert isinstance(model, PipelineModel)
    engine, whole, dropout = engine_of(known), engine_of(known).unsplit, model.partition.divides == "layers"
    indices, expected = whole.trial_samples, np.empty_like(engine.initial())
    with trial_of(known, dropout):
        loss = engine.gradient(engine.initial(), indices, expected)
        buffers = whole.buffers(0)
    with trial_of(model, dropout), whole.displaced():
        own, found = computed_by_parts(model, (part.initial() for part in known.parts), indices)
        held = joined(engine_of(model).buffers_of(0).values())
    parts, tolerance = np.split(expected, np.cumsum(model.sizes)[:-1]), whole.tolerance
    size, distance = _norm(expected), math.hypot(*map(_norm, found, parts))
    if not math.isfinite(size):
        return ""
    if not (distance <= tolerance * size and abs(own - loss) <= tolerance * abs(loss)):
        return _apart(own, loss, distance, size)
    level = tolerance * np.abs(buffers).max(initial=0)
    if np.allclose(held, buffers, rtol=tolerance, atol=level, equal_nan=True):
        return ""
    return f"changing buffers that differ by {np.abs(held - buffers).max():.2g}"


def difference_in_shares(split: SplitModel, count: int) -> str:
    """How a batch whose samples the unsplit model computes in `count` shares differs from the batch as a whole, in
    words; empty if by rounding only, or if the model draws random numbers besides those of dropout, because each share
    draws its own.

    A distance is relative to the gradients of the shares, which may cancel in the sum, and may be as large as
    `SHARES_APART`, because a model may compute in fewer digits than its parameters have.
    """
    whole, params = engine_of(split).unsplit, engine_of(split).unsplit.initial()
    with trial_of(split), torch.no_grad(), torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        whole.module(whole.samples(whole.trial_samples)[0])
        if not torch.equal(state, torch.get_rng_state()):
            return ""

    expected, total, slope = np.empty_like(params), np.zeros_like(params), np.empty_like(params)
    own = level = size = 0.0
    with trial_of(split):
        loss = whole.gradient(params, whole.trial_samples, expected)
        for one in slices(len(whole.trial_samples), count):
            share = (one.stop - one.start) / len(whole.trial_samples)
            part = share * whole.gradient(params, whole.trial_samples[one], slope)
            slope *= share
            total += slope
            own, level, size = own + part, level + abs(part), size + _norm(slope)
    distance, tolerance = _norm(total, expected), max(SHARES_APART, whole.tolerance)
    if not math.isfinite(size) or (distance <= tolerance * size and abs(own - loss) <= tolerance * level):
        return ""
    return _apart(own, loss, distance, _norm(expected))


def _norm(one: FlatArray, other: FlatArray | None = None) -> float:
    """The Euclidean norm of an array or of a difference, in float64 without a whole array of float64."""
    pieces = slices(len(one), 1 + len(one) // PIECE)
    wide = (one[piece].astype(np.float64) - (0 if other is None else other[piece]) for piece in pieces)
    return math.hypot(*(float(np.linalg.norm(piece)) for piece in wide))


def _apart(own: float, loss: float, distance: float, size: float) -> str:
    apart = f"a gradient at a distance of {distance:.2g} from one of size {size:.2g}"
    return f"a loss of {own:.6g} instead of {loss:.6g} and {apart}"


def engine_of(model: SplitModel) -> PartsEngine:
    """Return the torch engine of a split model."""
    assert isinstance(model.engine, PartsEngine)
    return model.engine


class _WithoutDropout(TorchFunctionMode):
    """Lets a model's own calls of dropout do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "dropout" in getattr(func, "__name__", ""):
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Return a context in which no unit drops out."""
    drops: list[tuple[nn.Module, str]] = [(one, "p") for one in module.modules() if isinstance(one, _DropoutNd)]
    drops += [(one, "dropout") for one in module.modules() if isinstance(one, nn.MultiheadAttention)]
    before = [getattr(one, name) for one, name in drops]
    try:
        for one, name in drops:
            setattr(one, name, 0.0)
        with _WithoutDropout():
            yield
    finally:
        for (one, name), value in zip(drops, before, strict=True):
            setattr(one, name, value)


@contextmanager
def trial_of(model: SplitModel, dropout: bool = False) -> Iterator[None]:
    """Return a context in which all parts draw as the unsplit model, without dropout unless `dropout` is set."""
    engine = engine_of(model)
    with engine.trial(), nullcontext() if dropout else without_dropout(engine.whole.module):
        yield


def check_loss(engine: PartsEngine, whole: TorchEngine, count: int, who: str, way_out: str = "microbatches=1") -> None:
    """Raise `ConfigurationError` unless the loss of a batch is the mean loss of its `count` micro-batches, given
    outputs of the whole model for one batch, and the targets of `TRIAL_BATCHES` batches. `way_out` names, for
    errors, a setting with which a batch is computed as a whole.
    """
    batch = whole.trial_samples
    if not 1 < count <= len(batch):
        return
    with torch.no_grad(), engine.trial():
        outputs = whole.module(whole.samples(batch)[0])
        for number in range(TRIAL_BATCHES):
            targets = whole.samples((batch + number) % whole.train_size)[1]
            loss = whole.loss(outputs, targets).item()
            parts = [
                whole.loss(_rows(outputs, part, len(batch)), targets[part]).item() * (part.stop - part.start)
                for part in slices(len(batch), count)
            ]
            mean, size = sum(parts) / len(batch), sum(map(abs, parts)) / len(batch)
            if math.isfinite(loss) and not abs(mean - loss) <= whole.tolerance * max(abs(loss), size):
                raise ConfigurationError(
                    f"the loss of {who} must be the mean over the samples to be computed in {count} micro-batches, got "
                    f"{loss:.6g} for a batch and {mean:.6g} as the mean over its micro-batches; use {way_out}, or "
                    "a loss that is the mean over the samples (not their sum, nor a mean weighted by class)"
                )


def _rows(outputs: Any, part: slice, count: int) -> Any:
    """The outputs of some of `count` samples."""
    return tree_map_only(torch.Tensor, lambda one: one[part] if one.shape[:1] == (count,) else one, outputs)


def check_buffers(whole: TorchEngine, chunks: Sequence[Sequence[ChainLayer]], who: str) -> None:
    """Raise `ConfigurationError` if a buffer that changes in training is in several chunks."""
    for name in whole.changing_buffers:
        shared = whole.module.get_buffer(name)
        users = [[one.name for one in chunk if any(b is shared for b in one.module.buffers())] for chunk in chunks]
        names = [found[0] for found in users if found]
        if len(names) > 1:
            raise ConfigurationError(
                f"layers that share a buffer which changes in training must be in one stage, got {names[0]} and "
                f"{names[1]} of {who}, which share {name!r}; cut elsewhere with split_at, or use a separate layer "
                f"for each"
            )


def _shares(chunks: Sequence[Sequence[ChainLayer]], shape: ModelShape | None, batch: int) -> list[PassShares]:
    """Work of the passes of each chunk, relative to the work W of the model; of equal size if W is unknown."""
    layers = (
        [] if shape is None else [one for chunk in chunks for layer in chunk for one in layers_within(shape, layer)]
    )
    total = float(sum(one.work(batch) for one in layers))
    if not total:
        return [PassShares(*[1 / (3 * len(chunks))] * 3) for _ in chunks]
    return [pass_shares(chunk, shape, batch, total, first=not number) for number, chunk in enumerate(chunks)]
