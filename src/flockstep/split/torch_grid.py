"""A torch module whose layers are divided into rectangles on a grid of workers (Coates et al. 2013, COTS HPC)."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from flockstep.costs.layers import ModelShape
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Job
from flockstep.frameworks.torch_layers import shape_of
from flockstep.frameworks.torch_local import LocallyConnected2d
from flockstep.partitions.grid import SpatialGrid
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules import GPipe
from flockstep.partitions.split_facts import SplitFacts
from flockstep.split.grid import NOWHERE, GridModel, HaloExchange, PlaneRectangle, rectangles, whole_plane
from flockstep.split.torch_chain import ChainLayer, pass_shares
from flockstep.split.torch_held import Held, hooked, is_elementwise_layer, kind_of, opened_chain, trained_entries
from flockstep.split.torch_stages import Chunk, WholeTorch, engine_for, parts_of, require_same_results


def split_grid(job: Job, seed: int, grid: SpatialGrid, known: SplitFacts | None = None) -> GridModel:
    """Build the job's model, and divide its layers among the workers of `grid`, as `SpatialGrid` says. With `known`,
    the facts that another process has found, the parts have no values before `ModelPart.take`, unless the facts name
    an obstacle.

    Every worker reads whole samples, computes the layers before the first window, with the same random numbers, and
    crops the result to its rectangle. Dropout in a divided layer has its own random stream on each worker.

    Raises:
        ConfigurationError: the first layers cannot be traced and divided, a worker would hold no parameters, or the
            parts together do not compute what the model computes.
    """
    whole, who = engine_for(job, seed, known), f"job {job.name!r}"
    division = GridLayers(whole, opened_chain(whole.module, who), grid)
    division.divide(who)
    if known is not None:
        return division.model(known, None, job)
    shape = shape_of(whole.module, whole.samples(whole.trial_samples)[0], name=job.name)
    model = division.model(SplitFacts((0,), tuple(whole.changing_buffers), whole.random, 0), shape, job)
    require_same_results(model, who, f"divided into {grid.rows} x {grid.columns} rectangles")
    return model


@dataclass(frozen=True)
class ReceptiveField:
    """The inputs that one output of a layer reads; each field is for height and width."""

    size: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    fill: float = 0.0
    """Value of the places around the inputs."""

    def outputs(self, plane: PlaneRectangle) -> tuple[int, ...]:
        """Return height and width of the outputs for inputs on `plane`."""
        facts = zip(plane.size, self.size, self.stride, self.padding, strict=True)
        return tuple((places + 2 * pad - size) // step + 1 for places, size, step, pad in facts)

    def read(self, made: PlaneRectangle) -> PlaneRectangle:
        """Return the places of the inputs that a rectangle of outputs reads; they may lie outside of the plane."""
        facts = zip(made.axes, self.size, self.stride, self.padding, strict=True)
        return PlaneRectangle(tuple(range(a.start * step - pad, a[-1] * step - pad + k) for a, k, step, pad in facts))


def receptive_field_of(module: nn.Module, uses: Mapping[int, int]) -> ReceptiveField | None:
    """Return the receptive field of a layer that can be divided into rectangles; None for other layers, such as a
    locally connected layer whose weights another layer uses, too. `uses`: number of layers that use each parameter.
    """
    if is_elementwise_layer(module):
        return ReceptiveField()
    plain, fill = False, 0.0
    match module:
        case LocallyConnected2d():
            plain = all(one.requires_grad and uses[id(one)] == 1 for one in module.parameters())
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
    return found if all(pad < size for pad, size in zip(found.padding, found.size, strict=True)) else None


def _pair(value: Any) -> tuple[int, ...]:
    """The values for height and width; torch also takes one number, or a sequence of one number, for both."""
    return tuple(np.broadcast_to(value, 2).tolist())


class SumOfTerms(nn.Module):
    """The sum (batch, outputs, 1, 1) of the terms of a fully connected layer, flat and with the bias of the layer."""

    def __init__(self, bias: nn.Parameter | None):
        super().__init__()
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the layer."""
        return x.flatten(1) if self.bias is None else x.flatten(1) + self.bias


class GridLayers:
    """The layers of a model on the parts of a grid, and the exchanges between them."""

    def __init__(self, whole: WholeTorch, chain: Sequence[ChainLayer], grid: SpatialGrid):
        self.whole, self.chain, self.grid, self.exchanges = whole, chain, grid, list[HaloExchange]()
        self.first = self.end = 0
        """The layers of the chain from `first` to `end` - 1 are divided."""
        self.chunks: list[list[list[ChainLayer]]] = [[[]] for _ in range(grid.parts)]
        """Layers of each chunk of each part."""
        self.held = [list[Held]() for _ in range(grid.parts)]
        """What each part trains."""
        self.entries = trained_entries(whole.schema)
        self.names_of = {id(one): name for name, one in whole.module.named_parameters()}
        """Identity of every parameter, and of every slice of a parameter → its name."""

    def divide(self, who: str) -> None:
        """Divide the layers; raise `ConfigurationError` if none can be divided."""
        chain, grid, x = self.chain, self.grid, self.whole.samples(np.arange(1))[0]
        uses = Counter(id(one) for layer in chain for one in set(layer.module.parameters()))
        fields = [receptive_field_of(layer.module, uses) for layer in chain]
        windows = [field not in (None, ReceptiveField()) for field in fields]
        self.first = at = next(at for at, one in enumerate(chain) if windows[at] or [*one.module.parameters()])
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for layer in chain[:at]:  # without values if the buffers of a layer have none
                x = layer.module(x.to(next((one.device for one in layer.module.buffers()), x.device)))
        for chunks in self.chunks:
            chunks[0] += chain[:at]
        plane, channels = whole_plane(x.shape[2:]), x.shape[1]
        has = (plane,) * grid.parts
        while at < len(chain) and x.dim() == 4 and (reads := fields[at]) is not None:
            size = reads.outputs(plane)
            if size[0] < grid.rows or size[1] < grid.columns:
                break
            made = rectangles(size, grid)
            needed = tuple(reads.read(one).overlap(plane) for one in made)
            if at > self.first and needed != has:
                self.exchange(HaloExchange(has, needed, channels))
                has = needed
            self.add(chain[at], reads, has, made)
            channels = int(getattr(chain[at].module, "out_channels", channels))
            plane, has, at = whole_plane(size), made, at + 1
        if at == self.first:
            raise ConfigurationError(
                f"the first layer of the model of {who} with a window or parameters must be a layer over images with "
                f"at least {grid.rows} x {grid.columns} outputs that can be divided into rectangles, got "
                f"{kind_of(chain[at].module)} {chain[at].name!r} for inputs of shape {tuple(x.shape[1:])}; "
                "flockstep.LocallyConnected2d, nn.Conv2d, nn.MaxPool2d and nn.AvgPool2d can be divided, without "
                "dilation, ceil_mode and hooks, and with a number of zeros as padding that is smaller than the window; "
                "use such a layer, a smaller grid, tensor, sharded or partition=none"
            )
        if _is_head(chain[at : at + 2], uses):
            self.columns(chain[at], chain[at + 1], plane, has)
            at += 2
        else:
            self.exchange(HaloExchange(has, (plane, *[NOWHERE] * (grid.parts - 1)), channels))
        self.chunks[0][-1] += chain[at:]
        self.end = at

    def exchange(self, exchange: HaloExchange) -> None:
        """End the chunks of all parts that need inputs of an exchange."""
        self.exchanges.append(exchange)
        for part, places in enumerate(exchange.needed):
            if places.places:
                self.chunks[part].append([])

    def add(
        self, layer: ChainLayer, reads: ReceptiveField, has: Sequence[PlaneRectangle], made: Sequence[PlaneRectangle]
    ) -> None:
        """Add a layer that computes the rectangles `made` of its outputs from inputs at the places `has`."""
        total = sum(one.places for one in made)
        for part, (held, one) in enumerate(zip(has, made, strict=True)):
            read = reads.read(one)
            pairs = list(zip(read.axes, held.axes, strict=True))
            pads = [pad for a, b in reversed(pairs) for pad in (b.start - a.start, a.stop - b.stop)]
            if any(pads):  # zeros or -inf around the plane; a negative number crops whole samples
                padded = ChainLayer(
                    f"{layer.name} padding", nn.ConstantPad2d(cast(Any, tuple(pads)), reads.fill), "", ()
                )
                self.chunks[part][-1].append(padded)
            local = self._local(layer.module, part, read, one)
            self.chunks[part][-1].append(replace(layer, module=local, share=one.places / total))

    def _local(self, module: nn.Module, part: int, read: PlaneRectangle, made: PlaneRectangle) -> nn.Module:
        """The module without padding, on the places `made` of its outputs, which read the places `read`."""
        if is_elementwise_layer(module):
            return module
        local: Any = copy.copy(module)
        local.padding, local._parameters = (0, 0), dict(module._parameters)
        if isinstance(module, LocallyConnected2d):
            local.size = read.size
            for name, one in module.named_parameters():
                index, shape = made.within(whole_plane(one.shape[:2]))[1:], (*made.size, *one.shape[2:])
                local._parameters[name] = self._slice(part, one, shape, index)
        return cast(nn.Module, local)

    def columns(
        self, flatten: ChainLayer, linear: ChainLayer, plane: PlaneRectangle, held: Sequence[PlaneRectangle]
    ) -> None:
        """Add a linear layer whose columns are divided as its inputs; part 0 adds all terms and the bias."""
        module, single = cast(nn.Linear, linear.module), whole_plane((1, 1))
        outputs, channels = module.out_features, module.in_features // plane.places
        for part, places in enumerate(held):
            local: Any = copy.copy(module)
            shape, index = (outputs, channels * places.places), places.within(plane)
            own = self._slice(part, module.weight, shape, index, (outputs, channels, *plane.size))
            local._parameters = {"weight": own, "bias": None}
            term = ChainLayer(f"{linear.name} term", nn.Unflatten(1, (outputs, 1, 1)), "", ())
            self.chunks[part][-1] += [flatten, replace(linear, module=local, share=places.places / plane.places), term]
        self.exchange(HaloExchange((single,) * len(held), (single, *[NOWHERE] * (len(held) - 1)), outputs))
        self.chunks[0][-1].append(replace(linear, module=SumOfTerms(module._parameters["bias"]), share=0.0))

    def _slice(
        self, part: int, whole: torch.Tensor, shape: tuple[int, ...], index: tuple[Any, ...], view: tuple[int, ...] = ()
    ) -> nn.Parameter:
        """Let a part hold a slice of a parameter, as `Held` describes it, and return the slice without values."""
        own = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta"))
        entry = self.entries[self.names_of[id(whole)]]
        self.names_of[id(own)] = name = f"{entry.name} (part {part})"
        self.held[part].append(Held(name, entry, shape, index, view))
        return own

    def model(self, facts: SplitFacts, shape: ModelShape | None, job: Job) -> GridModel:
        """Return the parts of the divided model; `shape`: work of the layers, None if nobody asks for it."""
        grid, first, last, made = self.grid, self.first, len(self.exchanges), list[list[Chunk]]()
        total = 0.0 if shape is None else float(shape.work(job.batch))
        for part, chunks in enumerate(self.chunks):  # numbered over all parts, so that dropout draws for each
            shares = [pass_shares(one, shape, job.batch, total, first=not at) for at, one in enumerate(chunks)]
            begin = 1 + part * (last + 1)
            facts_of = [(begin + at, one, self.names_of, shares[at]) for at, one in enumerate(chunks)]
            made.append([Chunk(*one, last=at == last, alike=0 if at else first) for at, one in enumerate(facts_of)])
        self._train(made, f"job {job.name!r}")
        engine, parts, ties = parts_of(self.whole, self.held, made, facts, whole_backward=True)
        divided, behind = self.chain[first : self.end], self.chain[self.end :]
        words = [f"{grid.part_name(part)} of {', '.join(one.name for one in divided)}" for part in range(grid.parts)]
        words[0] += f", and all of {', '.join(one.name for one in behind)}" if behind else ""
        undivided = (("every worker", self.chain[:first]), (f"only the worker of {grid.part_name(0)}", behind))
        said = tuple(f"{who} computes {_named(layers)}" for who, layers in undivided if layers)
        most = max(one.largest for one in self.exchanges) * np.dtype(engine.schema.dtype).itemsize
        facts, pipeline = replace(facts, sample_bytes=most, undivided=said), Pipeline(1, GPipe())
        lines = tuple(words)
        return GridModel(engine, parts, lines, facts, pipeline, ties, partition=grid, exchanges=self.exchanges)

    def _train(self, chunks: Sequence[Sequence[Chunk]], who: str) -> None:
        """Let parts train what is not divided. The weights of a convolution, which all parts use, are trained by the
        part that holds the fewest elements so far, largest tensors first; part 0 trains those of layers that it alone
        computes.
        """
        names = [dict.fromkeys(name for one in own for name in one.names if name in self.entries) for own in chunks[:2]]
        self.held[0] += [Held.whole(self.entries[name]) for name in names[0] if name not in names[1]]
        for entry in sorted((self.entries[name] for name in names[1]), key=lambda one: -one.size):
            min(self.held, key=lambda tensors: sum(one.size for one in tensors)).append(Held.whole(entry))
        if [] in self.held:
            none = self.grid.part_name(self.held.index([]))
            raise ConfigurationError(
                f"every worker of {self.grid} must train parameters of {who}, got none for {none}; use a smaller grid, "
                "or locally connected layers, whose weights are divided among all workers"
            )


def _is_head(layers: Sequence[ChainLayer], uses: Mapping[int, int]) -> bool:
    """Whether two layers flatten a plane, and compute a fully connected layer whose columns can be divided."""
    if [type(one.module) for one in layers] != [nn.Flatten, nn.Linear] or any(hooked(one.module) for one in layers):
        return False
    flatten, linear = cast(nn.Flatten, layers[0].module), cast(nn.Linear, layers[1].module)
    alone = linear.weight.requires_grad and uses[id(linear.weight)] == 1
    return alone and (flatten.start_dim, flatten.end_dim) == (1, -1)


def _named(layers: Sequence[ChainLayer]) -> str:
    """Names of layers, in words."""
    first, last = layers[0].name, layers[-1].name
    return f"layer {first!r}" if len(layers) == 1 else f"the {len(layers)} layers from {first!r} to {last!r}"
