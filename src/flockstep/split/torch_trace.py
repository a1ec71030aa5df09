"""Divides a torch module into a chain of units by tracing its forward pass. Each unit passes one tensor to the next."""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional

from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_layers import WHOLE
from flockstep.frameworks.torch_local import LocallyConnected2d
from flockstep.split.torch_chain import ChainLayer

ELEMENTWISE_FUNCTIONS = frozenset(
    [
        torch.relu,
        torch.tanh,
        torch.sigmoid,
        functional.relu,
        functional.tanh,
        functional.sigmoid,
        functional.gelu,
        functional.silu,
        functional.elu,
        functional.leaky_relu,
        functional.softplus,
    ]
)
ELEMENTWISE_METHODS = frozenset(["relu", "tanh", "sigmoid"])
"""Names of methods of tensors that treat every element in the same way."""


def traced_chain(module: nn.Module, who: str) -> list[ChainLayer]:
    """Return the units of a module, in order. A unit consists of consecutive operations with one tensor as input and
    one tensor as output.

    `torch.fx` traces the forward pass in the module's current mode. A submodule that cannot be traced, for example
    because its operations depend on values, on random numbers or on state from earlier calls, counts as one operation.

    Raises:
        ConfigurationError: the module cannot be traced, needs several inputs, or has parameters that it does not use.
    """
    graph = _traced(module, who)
    first, *others = [node for node in graph.nodes if node.op == "placeholder"]
    if others:
        raise ConfigurationError(
            f"a model that is cut into stages must have one input, got {len(others) + 1} for "
            f"{type(module).__name__} of {who}; give the other arguments of forward default values"
        )
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    places = _places(nodes, first)
    (output,) = next(node for node in graph.nodes if node.op == "output").args
    bounds = [0, *places, len(nodes)]
    between = [first, *places.values(), output]
    units, counted, names = [], set[str](), set[str]()
    for number, (source, target) in enumerate(pairwise(between)):
        part = nodes[bounds[number] : bounds[number + 1]]
        owners = list(dict.fromkeys(_owner(node) for node in part))
        whole = [node.target for node in part if node.op == "call_module"]
        name = _free(_title(part), names)
        own = tuple(one for one in owners if one not in counted)
        counted.update(owners)
        units.append(ChainLayer(name, _unit(module, part, source, target), "", tuple(map(str, whole)), own))
    used = {id(one) for unit in units for one in unit.module.parameters()}
    for name, one in module.named_parameters():
        if one.requires_grad and id(one) not in used:
            raise ConfigurationError(
                f"every trainable parameter of a model that is cut into stages must be used, but {name!r} of {who} is "
                "not; remove it, or freeze it with requires_grad_(False)"
            )
    return units


class _Tracer(fx.Tracer):
    """Traces a module with its required arguments as inputs; other arguments keep their default values."""

    def __init__(self, opaque: set[nn.Module]):
        """`opaque`: modules that are one operation."""
        super().__init__()
        self._opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = m in self._opaque or type(m) is LocallyConnected2d
        return known or super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Read buffers of modules that are one operation when the graph runs, as such modules may change them."""
        self.proxy_buffer_attributes = isinstance(attr_val, torch.Tensor) and any(
            attr_val is buffer
            for name, one in self.root.named_modules()
            if self.is_leaf_module(one, name)
            for buffer in one.buffers()
        )
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,
        concrete_args: dict[str, Any] | tuple[Any, ...] | None = None,
    ) -> tuple[Callable[..., Any], list[Any]]:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [
            name
            for name, one in inspect.signature(self.root.forward).parameters.items()
            if one.kind in kinds and one.default is inspect.Parameter.empty
        ]
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in names)]


class _Proxy(fx.Proxy):
    """A value while a module is traced; an attribute that is assigned to it would be missing in the graph."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("tracer", "node"):
            raise ConfigurationError(f"forward assigns the attribute {name!r} of a tensor")
        super().__setattr__(name, value)


def _traced(module: nn.Module, who: str) -> fx.Graph:
    """The operations of a module; modules inside that cannot be traced are one operation each."""
    opaque: set[nn.Module] = set()
    modules = dict(module.named_modules())
    for name, one in reversed(modules.items()):  # a module comes after the modules inside it
        if fx.Tracer().is_leaf_module(one, name) and one is not module:
            continue
        try:
            with _without_effects(one):
                graph = _Tracer(opaque).trace(one)
        except Exception as error:
            if one is module:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise ConfigurationError(
                    f"the model of {who} must be an nn.Sequential, or have a forward pass that torch.fx can trace, to "
                    f"be cut into stages, got {type(module).__name__}: {lines[0]}; build the model as an nn.Sequential "
                    "of its blocks, or use partition=none"
                ) from error
            opaque.add(one)
    return graph


@contextmanager
def _without_effects(module: nn.Module) -> Iterator[None]:
    """Raise `ConfigurationError` after tracing that has drawn random numbers, assigned attributes of modules or written
    to buffers; random streams and attributes become as before.

    What tracing computes is not in the graph: every call of the graph would have the random numbers and the counts of
    the trace. Changes of lists, of other objects and of global variables are not noticed.
    """
    streams = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - a model may draw from it
    attributes = {one: dict(vars(one)) for one in module.modules()}
    buffers = [(name, buffer, buffer._version, buffer.clone()) for name, buffer in module.named_buffers()]
    try:
        yield
    finally:
        drawn = (
            random.getstate() != streams[0]
            or repr(np.random.get_state()) != repr(streams[1])  # noqa: NPY002
            or not torch.equal(torch.get_rng_state(), streams[2])
        )
        random.setstate(streams[0])
        np.random.set_state(streams[1])  # noqa: NPY002
        torch.set_rng_state(streams[2])
        changed = [
            name
            for one, before in attributes.items()
            for name, value in vars(one).items()
            if value is not before.get(name)
        ]
        for one, before in attributes.items():
            vars(one).clear()
            vars(one).update(before)
        for name, buffer, version, values in buffers:
            if buffer._version != version:
                changed.append(name)
                with torch.no_grad():
                    buffer.copy_(values)
    name = f"forward of {type(module).__name__}"
    if drawn:
        raise ConfigurationError(f"{name} draws random numbers while it is traced")
    if changed:
        raise ConfigurationError(f"{name} changes {', '.join(changed)} while it is traced")


def _places(nodes: Sequence[fx.Node], first: fx.Node) -> dict[int, fx.Node]:
    """Return each place before which one value passes on → that value; parameters do not pass, as units hold them."""
    index = {node: number for number, node in enumerate(nodes)}
    last = {node: max((index.get(user, len(nodes)) for user in node.users), default=-1) for node in [first, *nodes]}
    alive, places = {first}, dict[int, fx.Node]()
    for number, node in enumerate(nodes):
        alive = {one for one in alive if last[one] >= number}
        if number and len(alive) == 1:
            (value,) = alive
            several = any(user.target is operator.getitem for user in value.users)
            if value is not first and not several and places.get(max(places, default=0)) is not value:
                places[number] = value
        if node.op != "get_attr":
            alive.add(node)
    return places


def _owner(node: fx.Node) -> str:
    """Name of the innermost module that computes an operation."""
    stack = list(node.meta.get("nn_module_stack", {}))
    return str(stack[-1]).partition("@")[0] if stack else WHOLE


def _title(part: Sequence[fx.Node]) -> str:
    """Name of the first module or parameter that operations use, otherwise of the first operation."""
    used = (one for node in part for one in (*node.all_input_nodes, node) if one.op in ("call_module", "get_attr"))
    return next((str(one.target) for one in used if one.op == "get_attr" or one in part), part[0].name)


def _free(name: str, names: set[str]) -> str:
    """Return a name that no earlier unit has."""
    choices = (f"{name}#{number}" if number > 1 else name for number in count(1))
    found = next(one for one in choices if one not in names)
    names.add(found)
    return found


def _unit(module: nn.Module, part: Sequence[fx.Node], source: fx.Node, target: Any) -> nn.Module:
    """Return a module that computes `target` from `source`, and shares its parameters with `module`."""
    graph = fx.Graph()
    copies = {source: graph.placeholder("x")}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in part:
        if node.op != "get_attr" or any(user in part for user in node.users):
            copied(node)
    graph.output(fx.map_arg(target, copied))
    return fx.GraphModule(module, graph)


def opened(unit: ChainLayer) -> ChainLayer:
    """Return the module of the model that a unit calls, if the unit does nothing else; otherwise the unit."""
    node = _only_operation(unit.module)
    if node is None or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return unit
    name = str(node.target)
    return ChainLayer(unit.name, unit.module.get_submodule(name), name, unit.whole, unit.own)


def is_elementwise(module: nn.Module) -> bool:
    """Return whether a unit only calls a function that treats every element of its input in the same way."""
    node = _only_operation(module)
    if node is None or len(node.all_input_nodes) != 1:
        return False
    return node.target in ELEMENTWISE_METHODS if node.op == "call_method" else node.target in ELEMENTWISE_FUNCTIONS


def writes_inputs(modules: Iterable[nn.Module]) -> bool:
    """Return whether consecutive layers may write to the inputs of the first, as nn.ReLU(inplace=True) does."""
    for module in modules:
        if any(map(_is_in_place, module.modules())):
            return True
        if any(True for _ in module.parameters()):  # the outputs of such a layer have memory of their own
            return False
    return False


def _is_in_place(module: nn.Module) -> bool:
    """Whether a module, without the modules inside, has an operation that writes to its input."""
    nodes = list(module.graph.nodes) if isinstance(module, fx.GraphModule) else []
    names = [str(getattr(node.target, "__name__", node.target)) for node in nodes]
    given = any(node.kwargs.get("inplace") for node in nodes)
    return bool(getattr(module, "inplace", False)) or given or any(name.endswith("_") for name in names)


def _only_operation(module: nn.Module) -> fx.Node | None:
    """The operation that computes a unit's output from its input; None if there are several, or it is no unit."""
    if not isinstance(module, fx.GraphModule):
        return None
    inputs, *between, output = module.graph.nodes
    if len(between) != 1 or between[0].args[:1] != (inputs,) or output.args != (between[0],):
        return None
    operation: fx.Node = between[0]
    return operation
