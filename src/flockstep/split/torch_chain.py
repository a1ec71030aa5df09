"""A torch module as a chain of layers, and the search for the places at which the chain is cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from flockstep.costs.layers import Layer, ModelShape
from flockstep.errors import ConfigurationError
from flockstep.partitions.cutting import balanced


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
    return layers_named(shape, layer.whole, layer.own)


def layers_named(shape: ModelShape, whole: Sequence[str], own: Sequence[str] = ()) -> list[Layer]:
    """Return the counted layers that have these names, and those inside of the layers `whole`."""
    inside = tuple(start for name in whole for start in (f"{name}.", f"{name} ("))
    exact = {*whole, *own}
    return [one for one in shape.layers if one.name in exact or one.name.startswith(inside)]


def work_of(layers: Sequence[Layer], batch: int) -> tuple[float, float, float]:
    """Return the work of layers for `batch` samples: forward, by input, and by weight."""
    return (
        float(sum(one.work_forward(batch) for one in layers)),
        float(sum(one.by_input.work(batch) for one in layers)),
        float(sum(one.by_weight.work(batch) for one in layers)),
    )


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
    layers at which the second and every later chunk begins, the cut is the one whose slowest chunk has the least work W
    (of `shape`, for `batch` samples), and, of several such cuts, the one whose largest chunk needs the least memory for
    parameters and activations. `ties`: layers that share weights may be in different chunks; without `split_at` they
    are only if the chain cannot be cut into `count` chunks otherwise.

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
    work = [sum(one.work(batch) for one in unit) for unit in units]
    nbytes = [
        sum(one.parameters * shape.itemsize + one.activation_bytes(batch, shape.itemsize) for one in unit)
        for unit in units
    ]
    return [places[first] for first in balanced(work, nbytes, count)]


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
