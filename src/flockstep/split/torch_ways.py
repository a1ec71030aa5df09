"""A torch module whose layers are split over ways: the passes that one way computes between sums over all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn

from flockstep.arrays.namespace import as_tensor
from flockstep.arrays.schema import Entry, FlatArray, Schema, slices
from flockstep.costs.layers import ModelShape
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Job
from flockstep.frameworks.torch import Tensors, TorchEngine
from flockstep.frameworks.torch_flat import native
from flockstep.frameworks.torch_layers import shape_of
from flockstep.partitions.base import check_samples
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules import GPipe
from flockstep.partitions.split_facts import SplitFacts
from flockstep.partitions.tensor import Product, TensorParallel
from flockstep.split.stages import MicroBatch
from flockstep.split.torch_blocks import (
    BlocksOfChain,
    LayerBlock,
    Passing,
    VocabularyOfOutputs,
    all_of_all_samples,
    numbered,
    uses_of,
)
from flockstep.split.torch_chain import ChainLayer, chunks_of, layers_named
from flockstep.split.torch_stages import (
    FLOATS,
    PartsEngine,
    SkeletonEngine,
    TorchHeldPart,
    add_gradients,
    buffers_within,
    check_buffers,
    check_loss,
    cut_at,
    difference,
    engine_of,
    model_chain,
    others_of,
    passes_over,
    slope_of,
    with_layers_of_batch,
)
from flockstep.split.torch_trace import opened
from flockstep.split.ways import BlockOutputs, BlockShares, ModelWay, TensorModel, WayWeights

Places = npt.NDArray[np.int64]
TRIALS = 64
"""Largest number of batches of targets with which a loss is compared with the cross entropy. An output layer with more
classes than these batches contain is not split.
"""


def split_layers(job: Job, seed: int, partition: TensorParallel | Product) -> TensorModel:
    """Build the job's model, cut it into stages if `partition` has any, and split its layers over ways.

    Dropout between split layers, and in divided layers, draws from a stream for each replica, step, micro-batch, block
    and way; all other dropout draws the same random numbers on every way.

    Raises:
        ConfigurationError: the model is neither an `nn.Sequential` nor can be traced, cannot be cut, no layer can be
            split, or the parts together do not compute what the model computes.
    """
    pipeline, tensor = _pipeline_of(partition)
    if tensor.convolutions == "divided":
        check_samples("tensor", tensor.ways, job.batch // pipeline.microbatches)
    whole = TorchEngine(job, seed)
    who = f"job {job.name!r}"
    layers = opened_chain(whole.module, who)
    shape = shape_of(whole.module, whole.samples(whole.trial_samples)[0], name=job.name)
    count = pipeline.stages * pipeline.schedule.chunks
    starts = chunks_of(layers, shape, count, [str(name) for name in pipeline.split_at], job.batch, who)
    check_buffers(whole, cut_at(starts, layers), who)
    changing = tuple(whole.changing_buffers)
    of_batch = all_of_all_samples(layers, changing)
    facts = SplitFacts(tuple(starts), changing, whole.random, 0, _classifies(whole), of_batch)
    model = _assembled(whole, partition, facts, who, shape, job.batch)
    with passes_over(who):
        loss = difference(model, model)
    if loss:
        raise ConfigurationError(
            f"the layers of {who}, split over {tensor.ways} ways, must compute what the model computes, got {loss}; "
            "move what the model does besides running its layers (a forward method of its own, hooks, state that "
            "layers share, random numbers other than dropout) into one layer, remove activation checkpointing, let a "
            "layer read parameters from its attributes only, or use partition=none"
        )
    check_loss(engine_of(model), whole, pipeline.microbatches, who)
    sent = [part.sent for part in model.parts if isinstance(part, TorchWay)]
    largest = max(nbytes for one in sent for _, nbytes in one.values())
    model = replace(model, facts=replace(facts, sample_bytes=largest), outputs=_outputs(model, sent[:: tensor.ways]))
    return model if of_batch else with_layers_of_batch(model, len(whole.trial_samples))


def ways_without_values(job: Job, seed: int, partition: TensorParallel | Product, facts: SplitFacts) -> TensorModel:
    """Return the parts of a model that another process has split, to one of which this process then gives its values by
    `ModelWay.take`. If `facts` names no obstacle, the parts have no values and take no memory before.
    """
    whole = TorchEngine(job, seed) if facts.obstacle else SkeletonEngine(job, seed, facts)
    return _assembled(whole, partition, facts, f"job {job.name!r}", None, job.batch)


def _pipeline_of(partition: TensorParallel | Product) -> tuple[Pipeline, TensorParallel]:
    """The pipeline, of one stage if the model is not cut, and the division of single layers."""
    if isinstance(partition, Product):
        return partition.pipeline, partition.tensor
    return Pipeline(1, GPipe()), partition


def opened_chain(module: nn.Module, who: str) -> list[ChainLayer]:
    """Return the layers of a model, with those modules of a traced model that a unit consists of."""
    return [opened(one) for one in model_chain(module, who)]


def _assembled(
    whole: TorchEngine | SkeletonEngine,
    partition: TensorParallel | Product,
    facts: SplitFacts,
    who: str,
    shape: ModelShape | None,
    batch: int,
) -> TensorModel:
    """Divide the layers among stages and ways; `shape`: work of the layers, None if nobody asks for it."""
    pipeline, tensor = _pipeline_of(partition)
    layers = opened_chain(whole.module, who)
    chains, uses, last = cut_at(facts.starts, layers), uses_of(layers), len(facts.starts) - 1
    chunks = [
        WayChunk(number, BlocksOfChain(tensor.ways, uses, number == last and facts.cross_entropy).of(chain), last)
        for number, chain in enumerate(chains)
    ]
    if all(len(chunk.blocks) == 1 for chunk in chunks):
        raise ConfigurationError(
            f"no layer of the model of {who} can be split over {tensor.ways} ways, got "
            f"{', '.join(dict.fromkeys(kind_of(one.module) for one in layers))}; two nn.Linear with activations "
            "between them, an nn.Embedding, an nn.TransformerEncoderLayer(batch_first=True) or an nn.Linear before a "
            "cross entropy can; use fewer ways, a pipeline, sharded, or partition=none"
        )
    if tensor.convolutions == "divided":
        first, *others = chunks[0].blocks
        chunks[0] = replace(chunks[0], blocks=[first.divided_by_samples(facts.changing, who), *others])
    stages = [chunks[stage :: pipeline.stages] for stage in range(pipeline.stages)]
    held = [_held([chunk.blocks for chunk in stage], whole, tensor.ways) for stage in stages]
    every = [one for stage in held for one in stage]
    within = [chains[stage :: pipeline.stages] for stage in range(pipeline.stages)]
    buffers = [[name for chain in one for name in buffers_within(chain, facts)] for one in within]
    engine = ways_engine(whole, every, [name for one in buffers for _ in range(tensor.ways) for name in one])
    parts = tuple(
        TorchWay(
            WayPlace(stage, way, tensor.ways),
            engine,
            stages[stage],
            every,
            buffers[stage],
            others_of([layer for chain in within[stage] for layer in chain]),
            [
                [BlockShares(0.0, 0.0, 0.0)] * len(chunk.blocks)
                if shape is None
                else _shares(chunk.blocks, shape, batch, way, held[stage])
                for chunk in stages[stage]
            ],
        )
        for stage in range(pipeline.stages)
        for way in range(tensor.ways)
    )
    itemsize = np.dtype(engine.schema.dtype).itemsize
    copied = max(sum(one.size for one in each.copied) for each in every) * itemsize
    words = []
    for stage in stages:
        split = [block.split for chunk in stage for block in chunk.blocks if block.split is not None]
        names = ", ".join(name for one in split for name in one.layers)
        words += [f"part {way} of {names}" for way in range(tensor.ways)]
    return TensorModel(engine, parts, tuple(words), facts, partition, pipeline, tensor, copied)


def _outputs(
    model: TensorModel, sent: Sequence[Mapping[tuple[str, int, int], tuple[float, int]]]
) -> list[list[BlockOutputs]]:
    """Elements of the outputs of each block of each chunk of the model, from what one way of each stage has sent."""
    places = [divmod(number, model.pipeline.stages) for number in range(len(model.facts.starts))]
    return [
        [
            BlockOutputs(
                *(sent[stage].get((kind, chunk, block), (0, 0))[0] for kind in ("forward", "backward", "divided"))
            )
            for block in range(len(model.parts[stage * model.tensor.ways].shares[chunk]))
        ]
        for chunk, stage in places
    ]


def kind_of(module: nn.Module) -> str:
    """Return what a layer is, in words."""
    return "traced operations" if isinstance(module, fx.GraphModule) else type(module).__name__


def ways_engine(whole: TorchEngine | SkeletonEngine, held: Sequence[WayTensors], buffers: Sequence[str]) -> PartsEngine:
    """Return the engine of a model whose parts hold the tensors `held`, one part after the other.

    `buffers`: names of the changing buffers, part by part, so that those of a stage appear once for each way.
    """
    named = [
        pair
        for part, tensors in enumerate(held)
        for pair in [
            *((f"{one.entry.name} (part {part})", one) for one in tensors.split),
            *((one.entry.name, one) for one in tensors.copied),
        ]
    ]
    schema = Schema.of({name: one.shape for name, one in named}, {name: one.entry.dtype for name, one in named})

    def order() -> Places:
        every = (one for tensors in held for one in tensors.every)
        return np.concatenate([one.entry.offset + one.places().reshape(-1) for one in every])

    return PartsEngine(whole, schema, buffers, order)


@dataclass(frozen=True)
class WayPlace:
    """The position of a part in a replica: its stage, and its way within the stage."""

    stage: int
    way: int
    ways: int

    @property
    def number(self) -> int:
        """Index of the part in its replica, from 0."""
        return self.stage * self.ways + self.way

    @property
    def of_stage(self) -> slice:
        """Range of the indices of the parts of the same stage, one part for each way."""
        return slice(self.stage * self.ways, (self.stage + 1) * self.ways)


@dataclass(frozen=True)
class WayChunk:
    """A chunk of the model: consecutive layers, divided into blocks."""

    number: int
    """Index of the chunk in the model."""
    blocks: Sequence[LayerBlock]
    last: int
    """Index of the model's last chunk."""


@dataclass(frozen=True)
class Held:
    """A parameter, or a slice of a parameter, that one way (one worker of a stage) holds."""

    entry: Entry
    """The whole parameter in the flat array of the unsplit model, with the dtype of the parameter."""
    identity: int
    """Identity (`id`) of the module's parameter."""
    shape: tuple[int, ...]
    """Shape of the part of the parameter that the way holds."""
    places: Callable[[], Places]
    """Function that returns the way's flat indices within the whole parameter, in the shape `shape`."""
    role: tuple[int, int, str] = (0, 0, "")
    """Chunk in the stage, block in the chunk, and role of the parameter in the block's split layers."""
    divided: bool = False
    """Whether the parameter belongs to layers that are divided by samples."""

    @property
    def size(self) -> int:
        """Number of elements of the parameter that the way holds."""
        return math.prod(self.shape)


@dataclass
class WayTensors:
    """The tensors that one way holds: its parts of split layers, then parameters that all ways compute with."""

    split: list[Held] = field(default_factory=list)
    copied: list[Held] = field(default_factory=list)
    """The parameters of divided layers come first."""

    @property
    def every(self) -> list[Held]:
        """All tensors that the way holds."""
        return [*self.split, *self.copied]

    @property
    def divided(self) -> list[Held]:
        """The parameters of divided layers that the way holds."""
        return [one for one in self.copied if one.divided]

    @property
    def size(self) -> int:
        """Number of elements of all tensors that the way holds."""
        return sum(one.size for one in self.every)


def _held(chunks: Sequence[Sequence[LayerBlock]], whole: TorchEngine | SkeletonEngine, ways: int) -> list[WayTensors]:
    """Divide the trained parameters of a stage among its ways.

    A layer that every way computes is held by the way that holds the fewest elements so far, largest layers first.
    """
    entries, found = trained_entries(whole), [WayTensors() for _ in range(ways)]
    layers: list[list[Held]] = []
    known: set[int] = set()
    blocks = [(at, number, block) for at, chunk in enumerate(chunks) for number, block in enumerate(chunk)]
    for at, number, block in blocks:
        if block.split is not None:
            for role, parameter in block.split.parameters.items():
                entry = entries[id(parameter)]
                for way in range(ways):
                    shape, places = block.split.shape(role, way), partial(block.split.places, role, way)
                    found[way].split.append(Held(entry, id(parameter), shape, places, (at, number, role)))
        for one in block.whole:
            new = {id(each): each for each in one.parameters if id(each) in entries and id(each) not in known}
            known.update(new)
            layers.append([replace(held_whole(each, entries), divided=block.divided) for each in new.values()])
    hold_by_fewest(found, layers)
    for tensors in found:
        tensors.copied.sort(key=lambda one: not one.divided)
    return found


def trained_entries(whole: TorchEngine | SkeletonEngine) -> dict[int, Entry]:
    """Return identity → place and dtype of every trained parameter of a module."""
    entries = {entry.name: replace(entry, dtype=entry.dtype or whole.schema.dtype) for entry in whole.schema.entries}
    return {id(one): entries[name] for name, one in whole.module.named_parameters() if name in entries}


def held_whole(parameter: torch.Tensor, entries: Mapping[int, Entry]) -> Held:
    """Return a parameter that a part holds as a whole; `entries` are the `trained_entries`."""
    return Held(entries[id(parameter)], id(parameter), tuple(parameter.shape), partial(numbered, parameter))


def hold_by_fewest(found: Sequence[WayTensors], layers: Sequence[Sequence[Held]]) -> None:
    """Let the part that holds the fewest elements so far hold each layer, largest layers first."""
    for layer in sorted(layers, key=lambda layer: -sum(one.size for one in layer)):
        min(found, key=lambda part: part.size).copied.extend(layer)


Key = tuple[int, int, int, int, int]
"""Key of a pass: replica, step, micro-batch, chunk and block."""


@dataclass(eq=False)
class BlockPass:
    """The tensors that the forward pass of a block stores for its backward passes."""

    inputs: list[torch.Tensor]
    """The sum of the terms of the previous block, and the residual connection that continues from that block. For the
    first block of a chunk, the inputs of the chunk if they are not data.
    """
    outputs: list[torch.Tensor]
    """Inputs of the split layers and the residual connection; at the end the chunk's outputs, or the loss."""
    trained: list[tuple[Held, torch.Tensor]]
    """The parameters of layers that every way computes, for which this way holds the gradient."""
    into: torch.Tensor | None = None
    """Inputs of the block's split layers."""
    term: torch.Tensor | None = None
    split: list[tuple[Held, torch.Tensor]] = field(default_factory=list)
    error: FlatArray | None = None
    """Gradient of the chunk's outputs, or of the split layers' inputs, over all ways; None after the loss."""
    residual_error: torch.Tensor | None = None
    """Gradient with respect to the residual connection after the block."""
    term_error: torch.Tensor | None = None
    """Gradient with respect to the sum of the terms."""

    @property
    def slopes(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The outputs that need a gradient, each with its gradient; None for the loss."""
        if self.into is None and self.error is None:
            return [(self.outputs[0], None)]
        given = [None if self.error is None else torch.from_numpy(self.error.copy()), self.residual_error]
        pairs = zip(self.outputs, given, strict=False)
        return [(output, error) for output, error in pairs if error is not None and output.requires_grad]

    @property
    def term_slopes(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The term of the split layers, with its gradient; empty if there are no split layers."""
        return [] if self.term is None else [(self.term, self.term_error)]

    @property
    def below(self) -> list[torch.Tensor]:
        """The inputs of the split layers if they need a gradient."""
        return [self.into] if self.into is not None and self.into.requires_grad else []


class TorchWay(TorchHeldPart, ModelWay):
    """One way (worker) of one stage of a torch module. Autograd stores the activations of each forward pass."""

    def __init__(
        self,
        place: WayPlace,
        engine: PartsEngine,
        chunks: Sequence[WayChunk],
        held: Sequence[WayTensors],
        buffers: Sequence[str],
        others: Tensors,
        shares: Sequence[Sequence[BlockShares]],
    ):
        """`held`: tensors of each part of the model. `buffers`, `others`: names of the stage's changing buffers; its
        frozen parameters and buffers by name. `shares`: this way's work for each block of each chunk.
        """
        own = held[place.number]
        start = sum(one.size for one in held[: place.number])
        super().__init__(engine, _part_of(engine.schema, place, held), start, others, buffers)
        self.shares = shares
        self.copies = any(one.copied for one in held[place.of_stage])
        self._way, self._chunks, self._own = place.way, chunks, own
        self._ways = held[place.of_stage]
        lent = [one for each in self._ways if each is not own for one in each.divided]
        self._offsets = dict(zip(map(id, [*own.every, *lent]), _starts([*own.every, *lent]), strict=True))
        """Identity of a parameter's `Held` → first element of the parameter in the gradient (K + B,)."""
        self.borrowed = sum(one.size for one in lent)
        if chunks[0].blocks[0].divided:
            held_apart = [each.divided for each in self._ways]
            starts = [self._offsets[id(one[0])] if one else 0 for one in held_apart]
            self.divided_parameters = [
                slice(start, start + sum(one.size for one in apart))
                for start, apart in zip(starts, held_apart, strict=True)
            ]
        self._kept: dict[Key, BlockPass] = {}
        self.sent: dict[tuple[str, int, int], tuple[float, int]] = {}
        """Kind of pass, chunk and block → elements and bytes per sample of the array that the pass returned last."""

    @property
    def kept(self) -> int:
        return len({key[:4] for key in self._kept})

    def copied(self, params: FlatArray) -> FlatArray:
        return params[sum(one.size for one in self._own.split) :]

    def divided(self, weights: WayWeights, batch: MicroBatch) -> FlatArray:
        # a stream that no term draws from, because ways have other samples
        outputs = self._compute(0, 0, weights, batch, None, 1 + len(self._ways) + self._way).x
        return self._sent("divided", 0, 0, batch, self._floats(outputs, self._chunks[0], len(batch.indices)))

    def forward(
        self, chunk: int, block: int, weights: WayWeights, batch: MicroBatch, given: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        of, engine = self._chunks[chunk], self._engine
        one, way = of.blocks[block], self._way
        targets = engine.whole.samples(batch.indices)[1]
        if one.divided:
            assert given is not None
            x = torch.from_numpy(given.copy())
        else:
            x = self._compute(chunk, block, weights, batch, given).x
        kept = self._kept[_key(chunk, block, batch)]
        if one.split is None and of.number == of.last:
            loss = self._loss(of, x, targets) * batch.share
            kept.outputs = [loss]
            return None, float(loss.item())
        if one.split is None:
            return self._sent("forward", chunk, block, batch, self._floats(x, of, len(batch.indices))), 0.0
        kept.into = x.detach().requires_grad_(kept.outputs[0].requires_grad)
        kept.split = [
            (held, _leaf_of(held, weights.own, self._offsets[id(held)]))
            for held in self._own.split
            if held.role[:2] == (chunk, block)
        ]
        with engine.stream(batch, of.number, block, 1 + way):
            kept.term = one.split.term(way, kept.into, {held.role[2]: tensor for held, tensor in kept.split}, targets)
        return self._sent("forward", chunk, block, batch, self._floats(kept.term, of)), 0.0

    def _compute(
        self,
        chunk: int,
        block: int,
        weights: WayWeights,
        batch: MicroBatch,
        given: FlatArray | None,
        stream: int = 0,
    ) -> Passing:
        """Compute the layers of a block before its split layers. `stream`: number of the stream of random numbers."""
        of, engine = self._chunks[chunk], self._engine
        one = of.blocks[block]
        before = self._kept[_key(chunk, block - 1, batch)] if block else None
        begun = _begun(engine.whole.samples(batch.indices)[0], before, given)
        copies = self._copies(one, weights)
        fixed = {id(self._others[name]): value for name, value in engine.constants.items() if name in self._others}
        changing = engine.buffers_of(batch.replica, self._way).items()  # each way has its own, all of equal values
        buffers = {id(engine.whole.module.get_buffer(name)): buffer for name, buffer in changing}
        tensors = {**fixed, **{held.identity: tensor for held, tensor in copies}, **buffers}
        with engine.stream(batch, of.number, block, stream):
            passing = replace(begun, x=begun.x.clone()) if one.writes_inputs else begun
            for computation in one.whole:
                passing = computation.run(passing, tensors)
        mine = {id(held) for held in self._own.copied}
        self._kept[_key(chunk, block, batch)] = BlockPass(
            [one for one in (begun.x, begun.residual) if one is not None and one.is_leaf and one.requires_grad],
            [one for one in (passing.x, passing.residual) if one is not None],
            [(held, tensor) for held, tensor in copies if one.divided or id(held) in mine],
        )
        return passing

    def backward(
        self, chunk: int, block: int, batch: MicroBatch, errors: FlatArray | None, out: FlatArray | None
    ) -> FlatArray | None:
        key = _key(chunk, block, batch)
        kept = self._kept[key] if out is None else self._kept.pop(key)
        kept.error = errors
        self._add(kept.slopes, kept.inputs, kept.trained, out)
        inputs = [slope_of(one) for one in kept.inputs]
        if not block:
            return self._sent("backward", chunk, 0, batch, native(inputs[0])) if inputs else None
        before = self._kept[_key(chunk, block - 1, batch)]
        before.term_error = inputs[0]
        if len(inputs) > 1:
            before.residual_error = inputs[1]
        self._add(before.term_slopes, before.below, before.split, out)
        return self._sent("backward", chunk, block, batch, native(slope_of(*before.below))) if before.below else None

    def weight_backward(self, chunk: int, batch: MicroBatch, out: FlatArray) -> None:
        for block in range(len(self._chunks[chunk].blocks)):
            kept = self._kept.pop(_key(chunk, block, batch))
            self._add(kept.slopes, [], kept.trained, out)
            self._add(kept.term_slopes, [], kept.split, out)

    def _sent(self, kind: str, chunk: int, block: int, batch: MicroBatch, array: FlatArray) -> FlatArray:
        samples = len(batch.indices)
        self.sent[kind, chunk, block] = array.size / samples, array.nbytes // samples
        return array

    def _floats(self, tensor: torch.Tensor, chunk: WayChunk, samples: int | None = None) -> FlatArray:
        """The values that a part sends to other parts; `samples`: length that the first axis must have."""
        if tensor.dtype not in FLOATS or (samples is not None and tensor.shape[:1] != (samples,)):
            raise ConfigurationError(
                "the parts of a split model must send one tensor of floats, between stages with the "
                f"samples on its first axis, got shape {tuple(tensor.shape)} of {tensor.dtype} in chunk "
                f"{chunk.number}; cut elsewhere with split_at, or use partition=none"
            )
        return native(tensor.detach())

    def _loss(self, chunk: WayChunk, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss, from the outputs of the model or from the terms of its last layer."""
        if len(chunk.blocks) > 1 and isinstance(chunk.blocks[-2].split, VocabularyOfOutputs):
            return VocabularyOfOutputs.cross_entropy(outputs)
        loss: torch.Tensor = self._engine.whole.loss(outputs, targets)
        return loss

    def _copies(self, block: LayerBlock, weights: WayWeights) -> list[tuple[Held, torch.Tensor]]:
        """The tensors of the parameters that every way computes with in a block, whichever way holds them."""
        wanted = {id(one) for computation in block.whole for one in computation.parameters}
        return [
            (one, _leaf_of(one, copied, start))
            for tensors, copied in zip(self._ways, weights.copied, strict=False)
            for one, start in zip(tensors.copied, _starts(tensors.copied), strict=True)
            if one.identity in wanted
        ]

    def _add(
        self,
        outputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        below: Sequence[torch.Tensor],
        trained: Sequence[tuple[Held, torch.Tensor]],
        out: FlatArray | None,
    ) -> None:
        """Add the gradients of `trained` to `out` (K + B,), if given, and those of `below` to their `grad`."""
        if out is None:  # the graph is needed again, for the other half of the backward pass
            add_gradients(outputs, below, [], [], retain=True)
        else:
            places = [_view(held, out, self._offsets[id(held)]) for held, _ in trained]
            add_gradients(outputs, below, [tensor for _, tensor in trained], places)


def _key(chunk: int, block: int, batch: MicroBatch) -> Key:
    return batch.replica, batch.step, batch.number, chunk, block


def _begun(samples: torch.Tensor, before: BlockPass | None, given: FlatArray | None) -> Passing:
    """What a block begins with: samples, the last chunk's outputs, or the last block's sum and residual."""
    if given is None:
        return Passing(samples)
    x = torch.from_numpy(given.copy()).requires_grad_()
    residual = before.outputs[1].detach().requires_grad_() if before is not None and len(before.outputs) > 1 else None
    return Passing(x, residual)


def _leaf_of(held: Held, flat: FlatArray, start: int) -> torch.Tensor:
    """The tensor of a parameter at its place in a flat array, with the dtype in which the model computes."""
    leaf: torch.Tensor = _view(held, flat, start).detach().to(getattr(torch, held.entry.dtype)).requires_grad_()
    return leaf


def _view(held: Held, flat: FlatArray, start: int) -> torch.Tensor:
    view: torch.Tensor = as_tensor(flat)[start : start + held.size].view(held.shape)
    return view


def _starts(held: Sequence[Held]) -> list[int]:
    return list(accumulate((one.size for one in held[:-1]), initial=0)) if held else []


def _part_of(whole: Schema, place: WayPlace, held: Sequence[WayTensors]) -> Schema:
    """The tensors of one part, from the schema of all parts."""
    first = sum(len(one.every) for one in held[: place.number])
    entries = whole.entries[first : first + len(held[place.number].every)]
    if not entries:
        raise ConfigurationError(
            f"every way must hold a parameter, got none for way {place.way} of stage {place.stage}, because no layer "
            "of the stage can be split over the ways; use fewer stages or ways, or cut elsewhere with split_at"
        )
    if not any(not entry.dtype for entry in entries):
        raise ConfigurationError(
            f"every part of a split model must hold a parameter of the widest dtype {whole.dtype}, and part "
            f"{place.number} holds none; use fewer ways, or convert the model with model.float()"
        )
    start = entries[0].offset
    return Schema(whole.dtype, tuple(Entry(e.name, e.shape, e.offset - start, e.dtype) for e in entries))


def _classifies(whole: TorchEngine) -> bool:
    """Whether the loss is the mean cross entropy of the outputs, tried on the outputs of a batch with every class.

    Each trial has class 0 besides others, so that a loss in which classes have different weights is noticed.
    """
    samples, targets = whole.samples(whole.trial_samples)
    if targets.dtype != torch.int64:
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = whole.buffers(0)
        outputs = whole.module(samples)
        whole.restore_buffers(0, before)
        if not isinstance(outputs, torch.Tensor) or outputs.shape[:-1] != targets.shape:
            return False
        others, classes = targets.numel() - 1, outputs.shape[-1]
        if classes > TRIALS * others:
            return False
        for trial in range(-(-classes // others)):
            tried = torch.zeros(targets.numel(), dtype=torch.int64)
            tried[1:] = (torch.arange(others) + trial * others) % classes
            tried = tried.reshape(targets.shape)
            mean = float(nn.functional.cross_entropy(outputs.flatten(0, -2), tried.flatten()))
            if not math.isclose(float(whole.loss(outputs, tried)), mean, rel_tol=whole.tolerance):
                return False
    return True


def _shares(
    blocks: Sequence[LayerBlock], shape: ModelShape, batch: int, way: int, held: Sequence[WayTensors]
) -> list[BlockShares]:
    """Work of one way for each block, relative to the work W of the model; of equal size if W is unknown.

    All ways compute the outputs of layers that are not split, and the gradients of their inputs; the way that holds the
    weights computes the gradient of the weights. Each way computes divided layers for its own samples.
    """
    total = float(shape.work(batch))
    if not total:
        return [BlockShares(*[1 / (3 * len(blocks))] * 3) for _ in blocks]
    mine = {one.identity for one in held[way].copied}
    forward, divided, holds = ([0.0] * len(blocks) for _ in range(3))
    by_input, by_weight = [0.0] * (len(blocks) + 1), [0.0] * (len(blocks) + 1)
    own = slices(batch, len(held))[way]
    for number, block in enumerate(blocks):
        samples = (own.stop - own.start) / batch if block.divided else 1.0
        for one in block.whole:
            layers = one.layers(shape)
            (divided if block.divided else forward)[number] += samples * sum(one.work_forward(batch) for one in layers)
            by_input[number] += samples * sum(layer.by_input.work(batch) for layer in layers)
            holds[number] += samples * sum(layer.writes for layer in layers)
            if block.divided or any(id(each) in mine for each in one.parameters):
                by_weight[number] += samples * sum(layer.by_weight.work(batch) for layer in layers)
        if block.split is not None:
            layers, share = layers_named(shape, block.split.layers), block.split.share(way)
            forward[number] += share * sum(layer.work_forward(batch) for layer in layers)
            by_input[number + 1] += share * sum(layer.by_input.work(batch) for layer in layers)
            by_weight[number + 1] += share * sum(layer.by_weight.work(batch) for layer in layers)
            holds[number] += share * sum(layer.writes for layer in layers)
    return [
        BlockShares(forward[n] / total, by_input[n] / total, by_weight[n] / total, divided[n] / total, holds[n])
        for n in range(len(blocks))
    ]
