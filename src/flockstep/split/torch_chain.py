"""A torch module as a chain of layers, and the search for the places at which the chain is cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from flockstep.costs.layers import Layer, ModelShape
from flockstep.costs.stages import cut
from flockstep.errors import ConfigurationError
from flockstep.split.stages import PassShares


@dataclass(frozen=True, eq=False)
class ChainLayer:
    """One layer of a chain, with its name in the model."""

    name: str
    module: nn.Module
    path: str
    """Name of `module` in the model; empty if the tensors in `module` have their names in the model."""
    whole: tuple[str, ...]
    """Names of the model's modules that lie entirely in this layer."""
    own: tuple[str, ...] = ()
    """Names of modules whose own work counts for this layer, without the work of the modules inside them."""
    share: float = 1.0
    """Share of the layer's work that one part of the model computes."""

    def named(self, name: str) -> str:
        """Return the name in the model of a tensor that has the name `name` in `module`."""
        return f"{self.path}.{name}" if self.path else name

    @property
    def trained(self) -> list[nn.Parameter]:
        """The trainable parameters of the layer."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


def chain_of(module: nn.Module, who: str, path: str = "") -> list[ChainLayer]:
    """Return the layers of an `nn.Sequential`, in order; a Sequential inside is replaced by its own layers, and a
    module that appears twice counts as two layers. `path` is its name in the model. Raise `ConfigurationError` if a
    Sequential has hooks, which would not run.
    """
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        raise ConfigurationError(
            f"an nn.Sequential that is cut into stages must have no hooks, got hooks on "
            f"{f'layer {path!r} of ' if path else ''}the model of {who}; put what they do into a layer"
        )
    layers: list[ChainLayer] = []
    for name, child in module._modules.items():  # named_children() leaves out a second appearance
        assert child is not None
        full = f"{path}.{name}" if path else name
        layers += chain_of(child, who, full) if is_chain(child) else [ChainLayer(full, child, full, (full,))]
    return layers


def is_chain(module: nn.Module) -> bool:
    """Return whether a module runs its children one after another."""
    return type(module).forward is nn.Sequential.forward


def layers_within(shape: ModelShape, layer: ChainLayer) -> list[Layer]:
    """Return the layers of `shape`, the counted layers of the model, that lie in one layer of the chain."""
    inside = tuple(start for name in layer.whole for start in (f"{name}.", f"{name} ("))
    exact = {*layer.whole, *layer.own}
    return [one for one in shape.layers if one.name in exact or one.name.startswith(inside)]


def pass_shares(
    layers: Sequence[ChainLayer], shape: ModelShape | None, batch: int, total: float, first: bool
) -> PassShares:
    """Return the work of the passes over consecutive layers for `batch` samples, relative to `total`; zeros if the work
    is unknown. If the layers are the `first` of the model, all backward work is for the gradient of the weights,
    because data have no gradient.
    """
    if shape is None or not total:
        return PassShares(0.0, 0.0, 0.0)
    counted = [(layer.share, one) for layer in layers for one in layers_within(shape, layer)]
    forward = sum(share * one.work_forward(batch) for share, one in counted) / total
    by_input = sum(share * one.by_input.work(batch) for share, one in counted) / total
    by_weight = sum(share * one.by_weight.work(batch) for share, one in counted) / total
    return PassShares(forward, 0.0 if first else by_input, by_weight + (by_input if first else 0.0))


def chunks_of(
    chain: Sequence[ChainLayer],
    shape: ModelShape,
    count: int,
    split_at: Sequence[str],
    batch: int,
    who: str,
    ties: bool = False,
) -> list[int]:
    """Return the first layer of each of `count` chunks.

    A chunk begins with a layer that has trainable parameters, except the first. Without `split_at`, the names of the
    layers at which the second and every later chunk begins, the chunks are those of `cut`. `ties`: layers that share
    weights may be in different chunks; without `split_at` they are only if the chain cannot be cut into `count` chunks
    otherwise.

    Raises:
        ConfigurationError: the chain of the model `who` cannot be cut in this way.
    """
    places = places_of(chain)
    if ties and (split_at or len(places) < count):
        places = places_of(chain, together=False)
    if split_at:
        return [0, *_given(chain, places, count, split_at, ties)]
    if len(places) < count:
        shared = None if ties else _shared(chain)
        why = f", and because {shared[0]} and {shared[1]} share weights and stay together," if shared else ","
        raise ConfigurationError(
            f"the model of {who} can be cut into at most {len(places)} chunks, because a chunk begins with a layer "
            f"that has trainable parameters and takes one tensor from the chunk before{why} got {count}; use fewer "
            f"stages{', or give each layer its own weights' if shared else ''}"
        )
    ends = [*places[1:], len(chain)]
    units = [
        [one for layer in chain[start:end] for one in layers_within(shape, layer)]
        for start, end in zip(places, ends, strict=True)
    ]
    return [places[first] for first in cut(units, batch, shape.itemsize, count)]


def places_of(chain: Sequence[ChainLayer], together: bool = True) -> list[int]:
    """Return the layers at which a chunk may begin.

    With `together`, layers that share weights stay in one chunk; otherwise, a chunk begins with a layer that has
    weights which no earlier layer has.
    """
    uses: dict[int, list[int]] = {}
    for index, layer in enumerate(chain):
        for parameter in layer.trained:
            uses.setdefault(id(parameter), []).append(index)
    if not together:
        return [0, *sorted({use[0] for use in uses.values()})[1:]]
    begins = [index for index, layer in enumerate(chain) if layer.trained]
    return [0, *(place for place in begins[1:] if not any(use[0] < place <= use[-1] for use in uses.values()))]


def _shared(chain: Sequence[ChainLayer]) -> tuple[str, str] | None:
    """Names of the first two layers that share a parameter; None if none do."""
    owners: dict[int, str] = {}
    for layer in chain:
        for parameter in layer.trained:
            if owners.setdefault(id(parameter), layer.name) != layer.name:
                return owners[id(parameter)], layer.name
    return None


def _given(
    chain: Sequence[ChainLayer], places: Sequence[int], count: int, split_at: Sequence[str], ties: bool
) -> list[int]:
    """The layers of `split_at`, after all checks."""
    names = [layer.name for layer in chain]
    known = ", ".join(names[place] for place in places[1:])
    if len(split_at) != count - 1:
        raise ConfigurationError(
            f"split_at must name {count - 1} layers for {count} chunks, got {len(split_at)}; choose among {known}"
        )
    found = []
    for name in split_at:
        if name not in names or names.index(name) not in places[1:]:
            shared = _shared(chain)
            own = "weights of its own, which no layer before it has" if ties else "trainable parameters"
            which = f" ({shared[0]} and {shared[1]})" if shared else ""
            stay = f", and layers that share weights stay together{which}"
            raise ConfigurationError(
                f"split_at must name layers at which a chunk can begin: {known}, got {name!r}; a chunk begins with a "
                f"layer that has {own}{'' if ties else stay}"
            )
        found.append(names.index(name))
    if found != sorted(set(found)):
        raise ConfigurationError(
            f"split_at must name layers in the order of the model, got {', '.join(split_at)}; sort them"
        )
    return found
