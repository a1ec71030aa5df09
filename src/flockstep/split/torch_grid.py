"""A torch module whose layers are divided into rectangles on a grid of workers (Coates et al. 2013, COTS HPC)."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, SupportsIndex, cast

import numpy as np
import torch
from torch import nn

from flockstep.arrays.schema import Schema
from flockstep.costs.layers import ModelShape
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Job
from flockstep.frameworks.torch import TorchEngine
from flockstep.frameworks.torch_layers import shape_of
from flockstep.frameworks.torch_local import LocallyConnected2d
from flockstep.partitions.grid import SpatialGrid
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules import GPipe
from flockstep.partitions.split_facts import SplitFacts
from flockstep.split.grid import NOWHERE, SINGLE, GridModel, HaloExchange, PlaneRectangle, rectangles
from flockstep.split.stages import PassShares, Tie
from flockstep.split.torch_blocks import Places, hooked, is_elementwise_layer, numbered, uses_of
from flockstep.split.torch_chain import ChainLayer, layers_within, work_of
from flockstep.split.torch_stages import (
    Chunk,
    SkeletonEngine,
    TorchPart,
    buffers_within,
    check_buffers,
    difference,
    passes_over,
    trained_within,
)
from flockstep.split.torch_ways import (
    Held,
    WayTensors,
    held_whole,
    hold_by_fewest,
    kind_of,
    opened_chain,
    trained_entries,
    ways_engine,
)


def split_grid(job: Job, seed: int, grid: SpatialGrid) -> GridModel:
    """Build the job's model, and split it spatially: each worker of a replica computes a rectangle of the outputs of
    each divided layer.

    The leading layers are divided, up to the first layer that does not slide a window over its inputs, or whose outputs
    have fewer rows or columns than the grid. If an nn.Flatten and an nn.Linear follow, the columns of the linear
    layer's weight are divided as its inputs are, and part 0 sums the partial results. Part 0 computes all further
    layers.

    Every worker reads whole samples, computes the layers before the first window on whole samples, and crops the result
    to the inputs of its rectangle. These layers draw the same random numbers on all workers of a replica. Dropout in a
    divided layer has its own random stream on each worker; dropout in the further layers has a stream on part 0.

    Raises:
        ConfigurationError: the model cannot be traced, its first layers cannot be divided, a worker would hold no
            parameters, or the parts together do not compute what the model computes.
    """
    whole, who = TorchEngine(job, seed), f"job {job.name!r}"
    chain = opened_chain(whole.module, who)
    check_buffers(whole, [chain], who)
    facts = SplitFacts((0,), tuple(whole.changing_buffers), whole.random, 0)
    shape = shape_of(whole.module, whole.samples(whole.trial_samples)[0], name=job.name)
    model = _assembled(whole, chain, grid, facts, who, shape, job.batch)
    with passes_over(who):
        if got := difference(model, model):
            raise ConfigurationError(
                f"the layers of {who}, divided into {grid.rows} x {grid.columns} rectangles, must compute what the "
                f"model computes, got {got}; move what the model does besides running its layers (a forward method of "
                "its own, hooks, state that layers share) into one layer, or use partition=none"
            )
    return model


def rectangles_without_values(job: Job, seed: int, grid: SpatialGrid, facts: SplitFacts) -> GridModel:
    """Return the parts of a model that another process has divided, without values until `ModelPart.take`."""
    whole = TorchEngine(job, seed) if facts.obstacle else SkeletonEngine(job, seed, facts)
    who = f"job {job.name!r}"
    return _assembled(whole, opened_chain(whole.module, who), grid, facts, who, None, job.batch)


@dataclass(frozen=True)
class ReceptiveField:
    """The inputs that one output of a layer reads; each field is for height and width."""

    size: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    fill: float = 0.0
    """Value of the places around the inputs."""

    def outputs(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the outputs, for inputs of the given height and width."""
        found = [(size[a] + 2 * self.padding[a] - self.size[a]) // self.stride[a] + 1 for a in (0, 1)]
        return found[0], found[1]

    def read(self, made: PlaneRectangle) -> PlaneRectangle:
        """Return the places of the inputs that a rectangle of outputs reads; they may lie outside of the plane."""
        spans = [
            (first * self.stride[a] - self.padding[a], (end - 1) * self.stride[a] - self.padding[a] + self.size[a])
            for a, (first, end) in enumerate([(made.top, made.bottom), (made.left, made.right)])
        ]
        return PlaneRectangle(*spans[0], *spans[1])


def receptive_field_of(module: nn.Module) -> ReceptiveField | None:
    """Return the receptive field of a layer that can be divided into rectangles; None for other layers."""
    if is_elementwise_layer(module):
        return ReceptiveField()
    plain, fill = False, 0.0
    match module:
        case LocallyConnected2d():
            plain = all(one.requires_grad for one in module.parameters())
        case nn.Conv2d():
            plain = module.padding_mode == "zeros" and set(module.dilation) == {1}
        case nn.MaxPool2d():
            plain, fill = _pair(module.dilation) == (1, 1) and not module.return_indices, -math.inf
        case nn.AvgPool2d():
            plain = module.count_include_pad or _pair(module.padding) == (0, 0)
    window: Any = module
    own = type(module) in (LocallyConnected2d, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d) and not hooked(module)
    if not (own and plain) or getattr(module, "ceil_mode", False) or isinstance(window.padding, str):
        return None
    found = ReceptiveField(_pair(window.kernel_size), _pair(window.stride), _pair(window.padding), fill)
    return found if all(map(operator.lt, found.padding, found.size)) else None


def _pair(value: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, int]:
    """The values for height and width; torch also takes one number, or a sequence of one number, for both."""
    both = [operator.index(one) for one in (value if isinstance(value, Sequence) else [value])]
    return both[0], both[-1]


class Crop(nn.Module):
    """The rectangle of a worker, taken out of whole samples."""

    def __init__(self, places: PlaneRectangle):
        super().__init__()
        self.places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the places of the rectangle, of samples (batch, channels, height, width)."""
        rows, columns = self.places.slices
        return x[..., rows, columns]


class BiasOfSum(nn.Module):
    """The bias of a fully connected layer whose terms have been added."""

    def __init__(self, bias: nn.Parameter):
        super().__init__()
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum (batch, outputs) plus the bias."""
        return x + self.bias


@dataclass(frozen=True, eq=False)
class PlacedLayer:
    """A layer of the model on the rectangle of one part."""

    layers: Sequence[ChainLayer]
    """The layer with the rectangle's own weights, behind a layer that adds the padding."""
    of: ChainLayer
    """The layer in the model."""
    share: float
    """Number of places of the rectangle, as a share of the places of the plane."""


@dataclass(frozen=True, eq=False)
class Slice:
    """The slice of a parameter that one part holds."""

    whole: nn.Parameter
    own: nn.Parameter
    """The slice, without values, in the layer of the part."""
    places: Callable[[], Places]
    """Function that returns the indices of the slice's elements in the whole parameter, in the shape of the slice."""


@dataclass(eq=False)
class GridLayers:
    """The layers of a model on the parts of a grid, and the exchanges between them."""

    grid: SpatialGrid
    chunks: list[list[list[PlacedLayer]]]
    """Layers of each chunk of each part."""
    exchanges: list[HaloExchange] = field(default_factory=list)
    slices: list[list[Slice]] = field(default_factory=list)
    """For each part: the slices of parameters that the part holds."""
    divided: list[str] = field(default_factory=list)
    """Names of the layers that are divided."""
    leading: int = 0
    """Number of layers before the first window, which all parts compute on whole samples."""

    def add(
        self, layer: ChainLayer, reads: ReceptiveField, plane: PlaneRectangle, made: Sequence[PlaneRectangle]
    ) -> None:
        """Add a layer that computes the rectangles `made` of its outputs from inputs on `plane`."""
        total = sum(one.places for one in made)
        for part, chunks in enumerate(self.chunks):
            read = reads.read(made[part])
            within = read.overlap(plane)
            pads = (
                within.left - read.left,
                read.right - within.right,
                within.top - read.top,
                read.bottom - within.bottom,
            )
            local = replace(layer, module=self._local(layer.module, part, read, made[part]))
            layers = [local]
            if any(pads):
                layers.insert(0, ChainLayer(f"{layer.name} padding", nn.ConstantPad2d(pads, reads.fill), "", ()))
            chunks[-1].append(PlacedLayer(layers, layer, made[part].places / total))
        self.divided.append(layer.name)

    def crop(self, leading: Sequence[ChainLayer], needed: Sequence[PlaneRectangle]) -> None:
        """Begin the first chunk of all parts: layers of whole samples, and the rectangle that the layer reads."""
        self.leading = len(leading)
        for part, places in enumerate(needed):
            self.whole([*leading, ChainLayer("rectangle", Crop(places), "", ())], part)

    def whole(self, layers: Sequence[ChainLayer], part: int) -> None:
        """Add layers that one part computes as they are."""
        self.chunks[part][-1] += [PlacedLayer([layer], layer, 1.0) for layer in layers]

    def exchange(self, exchange: HaloExchange) -> None:
        """End the chunks of all parts that need inputs of an exchange."""
        self.exchanges.append(exchange)
        for part, places in enumerate(exchange.needed):
            if places.places:
                self.chunks[part].append([])

    def _local(self, module: nn.Module, part: int, read: PlaneRectangle, made: PlaneRectangle) -> nn.Module:
        """The module without padding, on the places `made` of its outputs, which read the places `read`."""
        if is_elementwise_layer(module):
            return module
        local: Any = copy.copy(module)
        local.padding = 0 if isinstance(module, nn.MaxPool2d | nn.AvgPool2d) else (0, 0)
        local._parameters = dict(module._parameters)
        if isinstance(module, LocallyConnected2d):
            local.size = read.size
            for name, one in module.named_parameters():
                shape = (*made.size, *one.shape[2:])
                local._parameters[name] = self._slice(part, one, shape, partial(_of_rectangle, one, made))
        return cast(nn.Module, local)

    def columns(
        self,
        flatten: ChainLayer,
        linear: ChainLayer,
        channels: int,
        plane: PlaneRectangle,
        held: Sequence[PlaneRectangle],
    ) -> None:
        """Add a linear layer whose columns are divided as its inputs; part 0 adds all terms and the bias."""
        module = cast(nn.Linear, linear.module)
        weight, added, outputs = cast(nn.Parameter, module.weight), module._parameters["bias"], module.out_features
        for part, places in enumerate(held):
            local: Any = copy.copy(module)

            def indices(places: PlaneRectangle = places) -> Places:  # of the weights whose inputs are in the rectangle
                numbers = numbered(weight).reshape(outputs, channels, *plane.size)
                return numbers[(..., *places.slices)].reshape(outputs, -1)

            own = self._slice(part, weight, (outputs, channels * places.places), indices)
            local._parameters = {"weight": own, "bias": None}
            term = ChainLayer(f"{linear.name} term", nn.Unflatten(1, (outputs, 1, 1)), "", ())
            share = places.places / plane.places
            self.chunks[part][-1] += [
                PlacedLayer([flatten], flatten, share),
                PlacedLayer([replace(linear, module=local), term], linear, share),
            ]
        self.exchange(HaloExchange((SINGLE,) * len(held), (SINGLE, *[NOWHERE] * (len(held) - 1)), outputs))
        total = ChainLayer(f"{linear.name} sum", nn.Flatten(), "", ())
        bias = [] if added is None else [replace(linear, module=BiasOfSum(added))]
        self.chunks[0][-1].append(PlacedLayer([total, *bias], linear, 0.0))
        self.divided += [flatten.name, linear.name]

    def _slice(
        self, part: int, whole: nn.Parameter, shape: Sequence[int], places: Callable[[], Places]
    ) -> nn.Parameter:
        """Note that a part holds a slice of a parameter, and return the slice without values."""
        own = nn.Parameter(torch.empty(tuple(shape), dtype=whole.dtype, device="meta"))
        self.slices[part].append(Slice(whole, own, places))
        return own


def _of_rectangle(parameter: torch.Tensor, places: PlaneRectangle) -> Places:
    """Elements of a locally connected layer's parameter that belong to a rectangle of outputs."""
    return numbered(parameter)[places.slices]


def _grid_layers(
    chain: Sequence[ChainLayer], x: torch.Tensor, grid: SpatialGrid, changing: Container[str], who: str
) -> GridLayers:
    """Divide the layers of a chain whose first input is `x`, one sample; `changing`: names of changing buffers."""
    fields = [receptive_field_of(layer.module) for layer in chain]
    first = _first(chain, fields, changing)
    x = _after(chain[:first], x)
    division = GridLayers(grid, [[[]] for _ in range(grid.parts)], slices=[[] for _ in range(grid.parts)])
    reads = fields[first] if x.dim() == 4 and not _shared(chain[first].module, uses_of(chain)) else None
    if reads is None:
        raise ConfigurationError(
            f"the first layer of the model of {who} with parameters or changing buffers must be, or follow, a layer "
            f"over images that can be divided into {grid.rows} x {grid.columns} rectangles, got "
            f"{kind_of(chain[first].module)} {chain[first].name!r} for inputs of shape {tuple(x.shape[1:])}; "
            "flockstep.LocallyConnected2d, nn.Conv2d, nn.MaxPool2d and nn.AvgPool2d can be divided, without dilation, "
            "ceil_mode and hooks, and with a number of zeros as padding that is smaller than the window; use such a "
            "layer, tensor, sharded or partition=none"
        )
    end = _divide_planes(division, chain, fields, first, x)
    if not end:
        size = reads.outputs((x.shape[2], x.shape[3]))
        raise ConfigurationError(
            f"a layer that is divided into {grid.rows} x {grid.columns} rectangles must have at least as many outputs "
            f"along each axis, got {size[0]} x {size[1]} of {kind_of(chain[first].module)} {chain[first].name!r} of "
            f"{who}; use a smaller grid, tensor, sharded or partition=none"
        )
    division.whole(chain[end:], 0)
    return division


def _first(chain: Sequence[ChainLayer], fields: Sequence[ReceptiveField | None], changing: Container[str]) -> int:
    """Index of the first layer with a window, with parameters, or with changing buffers."""
    for at, layer in enumerate(chain):
        window = fields[at] is not None and not is_elementwise_layer(layer.module)
        changes = any(layer.named(name) in changing for name, _ in layer.module.named_buffers())
        if window or changes or any(True for _ in layer.module.parameters()):
            return at
    return len(chain) - 1


def _after(layers: Sequence[ChainLayer], x: torch.Tensor) -> torch.Tensor:
    """The outputs of layers without parameters; without values if the buffers of a layer have none."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for layer in layers:
            x = layer.module(x.to(next((one.device for one in layer.module.buffers()), x.device)))
    return x


def _divide_planes(
    division: GridLayers,
    chain: Sequence[ChainLayer],
    fields: Sequence[ReceptiveField | None],
    first: int,
    x: torch.Tensor,
) -> int:
    """Divide the layers from `first` on, for inputs like `x`; return the first that is not divided, or 0."""
    grid, uses, plane, channels = (
        division.grid,
        uses_of(chain),
        PlaneRectangle(0, x.shape[2], 0, x.shape[3]),
        x.shape[1],
    )
    held: tuple[PlaneRectangle, ...] = ()
    for at in range(first, len(chain) + 1):
        reads = fields[at] if at < len(chain) and not _shared(chain[at].module, uses) else None
        size = (0, 0) if reads is None else reads.outputs(plane.size)
        if reads is None or size[0] < grid.rows or size[1] < grid.columns:
            break
        made = rectangles(size, grid)
        needed = tuple(reads.read(one).overlap(plane) for one in made)
        if not held:
            division.crop(chain[:first], needed)
        elif needed != held:
            division.exchange(HaloExchange(held, needed, channels))
        division.add(chain[at], reads, plane, made)
        channels = int(getattr(chain[at].module, "out_channels", channels))
        plane, held = PlaneRectangle(0, size[0], 0, size[1]), made
    if not held:
        return 0
    if _is_head(chain[at : at + 2], uses):
        division.columns(chain[at], chain[at + 1], channels, plane, held)
        return at + 2
    division.exchange(HaloExchange(held, (plane, *[NOWHERE] * (grid.parts - 1)), channels))
    return at


def _is_head(layers: Sequence[ChainLayer], uses: Mapping[int, int]) -> bool:
    """Whether two layers flatten a plane, and compute a fully connected layer whose columns can be divided."""
    if [type(one.module) for one in layers] != [nn.Flatten, nn.Linear] or any(hooked(one.module) for one in layers):
        return False
    flatten, linear = cast(nn.Flatten, layers[0].module), cast(nn.Linear, layers[1].module)
    alone = linear.weight.requires_grad and uses[id(linear.weight)] == 1
    return alone and (flatten.start_dim, flatten.end_dim) == (1, -1)


def _shared(module: nn.Module, uses: Mapping[int, int]) -> bool:
    """Whether another layer uses the weights of a locally connected layer, whose places are divided among parts."""
    return isinstance(module, LocallyConnected2d) and any(uses[id(one)] > 1 for one in module.parameters())


def _assembled(
    whole: TorchEngine | SkeletonEngine,
    chain: Sequence[ChainLayer],
    grid: SpatialGrid,
    facts: SplitFacts,
    who: str,
    shape: ModelShape | None,
    batch: int,
) -> GridModel:
    """Return the parts of a model; `shape`: work of the layers, None if nobody asks for it."""
    division = _grid_layers(chain, whole.samples(np.arange(1))[0], grid, facts.changing, who)
    held = _held(division, whole, who)
    buffers = buffers_within([local.of for local in division.chunks[0][-1]], facts)
    engine = ways_engine(whole, held, buffers)
    parts, borrowed = list[TorchPart](), list[list[str]]()
    for part, tensors in enumerate(held):
        sliced = [f"{one.entry.name} (part {part})" for one in tensors.split]
        names_of = {id(one): name for name, one in whole.module.named_parameters()}
        names_of |= {id(one.own): name for one, name in zip(division.slices[part], sliced, strict=True)}
        shares = [_shares(chunk, shape, batch, number) for number, chunk in enumerate(division.chunks[part])]
        chunks = _chunks(division, part, names_of, engine.schema, shares)
        own = [*sliced, *(one.entry.name for one in tensors.copied)]
        used = dict.fromkeys(name for chunk in chunks for name in chunk.names)
        borrowed.append([name for name in used if name not in own])
        changing = () if part else buffers
        parts.append(TorchPart(engine, chunks, own, borrowed[-1], changing, True, "use a smaller grid"))
    largest = max(exchange.largest for exchange in division.exchanges) * np.dtype(whole.schema.dtype).itemsize
    return GridModel(
        engine,
        tuple(parts),
        _described(division),
        replace(facts, sample_bytes=largest, undivided=_undivided(division)),
        Pipeline(1, GPipe()),
        _ties(parts, held, borrowed),
        partition=grid,
        exchanges=division.exchanges,
    )


def _ties(parts: Sequence[TorchPart], held: Sequence[WayTensors], borrowed: Sequence[Sequence[str]]) -> tuple[Tie, ...]:
    """The parameters that each part borrows, given their names."""
    owners = {one.entry.name: part for part, tensors in enumerate(held) for one in tensors.copied}
    return tuple(
        Tie(owners[name], parts[owners[name]].place(name), user, parts[user].place(name))
        for user, names in enumerate(borrowed)
        for name in names
    )


def _chunks(
    division: GridLayers, part: int, names_of: Mapping[int, str], schema: Schema, shares: Sequence[PassShares]
) -> list[Chunk]:
    """The chunks of a part, numbered over all parts from 1, so that dropout draws for each."""
    count, found = len(division.exchanges) + 1, []
    for number, layers in enumerate(division.chunks[part]):
        chain = [layer for local in layers for layer in local.layers]
        names = trained_within(names_of, schema, chain)
        last = number == count - 1
        alike = 0 if number else division.leading
        found.append(Chunk(1 + part * count + number, chain, names, names_of, shares[number], last, alike))
    return found


def _held(division: GridLayers, whole: TorchEngine | SkeletonEngine, who: str) -> list[WayTensors]:
    """Divide the trained parameters among the parts; raise `ConfigurationError` if a part would train none. The weights
    of a convolution, which all parts use, are trained by the part that holds the fewest elements so far, largest
    tensors first; part 0 trains those of layers that are not divided.
    """
    entries, found = trained_entries(whole), list[WayTensors]()
    for slices in division.slices:
        own = [Held(entries[id(one.whole)], id(one.whole), tuple(one.own.shape), one.places) for one in slices]
        found.append(WayTensors(own))
    shared = _trained(division.chunks[1], (), entries)
    alone = _trained(division.chunks[0], shared, entries)
    found[0].copied += [held_whole(one, entries) for one in alone.values()]
    hold_by_fewest(found, [[held_whole(one, entries)] for one in shared.values()])
    for part, tensors in enumerate(found):
        if not tensors.size:
            raise ConfigurationError(
                f"every worker of {division.grid} must train parameters of {who}, got none for "
                f"{division.grid.part_name(part)}; use a smaller grid, or locally connected layers, whose weights are "
                "divided among all workers"
            )
    return found


def _trained(
    chunks: Sequence[Sequence[PlacedLayer]], known: Container[int], names: Container[int]
) -> dict[int, nn.Parameter]:
    """Identity → parameter, for the trained parameters of layers; without those that are `known`."""
    layers = (layer for chunk in chunks for local in chunk for layer in local.layers)
    every = (one for layer in layers for one in layer.module.parameters())
    return {id(one): one for one in every if id(one) in names and id(one) not in known}


def _shares(layers: Sequence[PlacedLayer], shape: ModelShape | None, batch: int, number: int) -> PassShares:
    """Work of the passes of a chunk, relative to the work W of the model; zeros if the work is unknown."""
    total = 0.0 if shape is None else float(shape.work(batch))
    if shape is None or not total:
        return PassShares(0.0, 0.0, 0.0)
    counted = [(one, local.share / total) for local in layers for one in layers_within(shape, local.of)]
    parts = [[share * work for work in work_of([one], batch)] for one, share in counted]
    forward, by_input, by_weight = (sum(one[kind] for one in parts) for kind in range(3))
    return PassShares(forward, by_input if number else 0.0, by_weight + (0.0 if number else by_input))


def _described(division: GridLayers) -> tuple[str, ...]:
    """The layers of each part, in words."""
    divided = ", ".join(division.divided)
    words = [f"{division.grid.part_name(part)} of {divided}" for part in range(division.grid.parts)]
    alone = ", ".join(local.of.name for local in division.chunks[0][-1] if local.share)
    return (f"{words[0]}{alone and f', and all of {alone}'}", *words[1:])


def _undivided(division: GridLayers) -> tuple[str, ...]:
    """The layers that are not divided, with the workers that compute them, in words."""
    leading = division.chunks[0][0][: division.leading]
    alone = [local for local in division.chunks[0][-1] if local.share]
    computing = (("every worker", leading), (f"only the worker of {division.grid.part_name(0)}", alone))
    found = []
    for who, layers in computing:
        names = [repr(one.of.name) for one in layers]
        several = f"the {len(names)} layers from {names[0]} to {names[-1]}" if len(names) > 1 else ""
        found += [f"{who} computes {several or f'layer {names[0]}'}"] if names else []
    return tuple(found)
