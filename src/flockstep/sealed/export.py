"""Records functions of a job as programs, by way of `torch.export`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from flockstep.errors import ConfigurationError, in_short
from flockstep.sealed.manifest import OperatorProgram
from flockstep.sealed.program import CHECKS, GRAD_MODE, OPERATORS, SIZES, name_of, quiet


class Exporter:
    """Exports functions of one job, and keeps the tensors that the functions use: parameters, buffers and constants."""

    def __init__(self, names: Mapping[int, str]):
        """`names`: id of each parameter and buffer of the model → the name of the tensor in the sealed job."""
        self._names = names
        self.constants: dict[str, torch.Tensor] = {}

    def export(
        self,
        module: torch.nn.Module,
        inputs: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        strict: bool = False,
    ) -> OperatorProgram:
        """Export a module for inputs of any number of samples.

        Args:
            module: the module, in the mode in which it is called.
            inputs: inputs of one call.
            others: inputs with another number of samples; an axis whose length differs is free.
            strict: whether to interpret the function's bytecode, which follows a tensor into a Python number.

        Raises:
            ConfigurationError: PyTorch cannot export the module.
        """
        arguments = _Called(module)
        try:
            with quiet():
                free = free_axes(inputs, others)
                found = torch.export.export(arguments, tuple(inputs), dynamic_shapes=(free,), strict=strict)
        except Exception as error:
            raise ConfigurationError(
                f"PyTorch cannot export this job, so that the job cannot be sealed: {in_short(error)}; change the "
                "model or the loss as PyTorch says"
            ) from error
        tensors: dict[str, torch.Tensor] = {
            f"module.{name}": one for name, one in module.named_parameters(remove_duplicate=False)
        }
        tensors |= {f"module.{name}": one for name, one in module.named_buffers(remove_duplicate=False)}
        tensors |= {name: one for name, one in found.constants.items() if name not in tensors}
        targets = [self._state(spec, tensors) for spec in found.graph_signature.input_specs]
        return _Recorder(found.graph_module, targets).program()

    def _state(self, spec: Any, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Return the name of the tensor that an input of the graph stands for; None for an input of the function."""
        if spec.kind == InputKind.USER_INPUT:
            return None
        tensor = tensors.get(spec.target)
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(f"a sealed job holds tensors only, got {spec.kind.name.lower()} {spec.target!r}")
        if (name := self._names.get(id(tensor))) is None:
            same = (key for key, one in self.constants.items() if one is tensor)
            name = next(same, f"constant.{len(self.constants)}")
            self.constants[name] = tensor
        return name


def free_axes(inputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[dict[int, Any], ...]:
    """Return the axes of each input that are free, because their length differs from that of the other input."""
    return tuple(
        {axis: torch.export.Dim.DYNAMIC for axis in range(a.dim()) if a.shape[axis] != b.shape[axis]}
        for a, b in zip(inputs, others, strict=True)
    )


class _Called(torch.nn.Module):
    """Calls a module, and returns the tensors of its outputs in a tuple."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        return tuple(pytree.tree_leaves(self.module(*inputs)))


class OfOutputs(torch.nn.Module):
    """Calls a function of outputs and targets with the tensors of the outputs, and then the targets."""

    def __init__(self, function: Callable[[Any, Any], Any], spec: pytree.TreeSpec):
        super().__init__()
        self.function, self._spec = function, spec

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the value of the function."""
        return self.function(pytree.tree_unflatten(tensors[:-1], self._spec), tensors[-1])


class _Recorder:
    """Writes the graph of one exported function as a program."""

    def __init__(self, module: GraphModule, targets: Sequence[str | None] | None):
        self._module, self._targets = module, targets
        self._numbers: dict[Node, int] = {}
        self._inner: list[OperatorProgram] = []
        self._calls: list[tuple[str, list[Any], dict[str, Any]]] = []

    def program(self) -> OperatorProgram:
        nodes = list(self._module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        targets = [None] * len(inputs) if self._targets is None else self._targets
        held = {node: name for node, name in zip(inputs, targets, strict=True) if name is not None and node.users}
        given = [node for node, name in zip(inputs, targets, strict=True) if name is None]
        for node in (*held, *given):
            self._numbers[node] = len(self._numbers)
        outputs: list[Any] = []
        for node in nodes:
            if node.op == "output":
                outputs = [self._argument(one) for one in node.args[0]]
            elif node.op == "call_function" and (_whole_slice(node) or _last_item(node)):
                self._numbers[node] = self._numbers[node.args[0]]
            elif node.op == "call_function" and not _idle(node):
                self._numbers[node] = len(held) + len(given) + len(self._calls)
                self._calls.append(self._call(node))
        return OperatorProgram(tuple(held.values()), len(given), tuple(self._calls), outputs, tuple(self._inner))

    def _call(self, node: Node) -> tuple[str, list[Any], dict[str, Any]]:
        target: Any = node.target
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, inside, *args = tuple[Any, ...](node.args)
            self._inner.append(_Recorder(getattr(self._module, inside.target), None).program())
            return GRAD_MODE, [enabled, len(self._inner) - 1, *map(self._argument, args)], {}
        name = name_of(target)
        if name is None:
            raise ConfigurationError(
                f"a sealed job calls operators of PyTorch only, got {getattr(target, '__name__', target)}; write the "
                "model without it"
            )
        kwargs = {key: self._argument(value) for key, value in node.kwargs.items() if value is not None}
        return name, [self._argument(one) for one in node.args], kwargs

    def _argument(self, value: Any) -> Any:
        """Return an argument of a call as JSON."""
        match value:
            case None | bool() | int():
                return value
            case Node():
                return {"v": self._numbers[value]}
            case float():
                return value if math.isfinite(value) else {"f": str(value)}
            case str():
                return {"t": value}
            case list() | tuple():
                return [self._argument(one) for one in value]
            case torch.device(type="cpu"):
                return {"c": "cpu"}
            case torch.dtype() | torch.layout() | torch.memory_format():
                return {"c": str(value).removeprefix("torch.")}
        raise ConfigurationError(f"a sealed job cannot hold an argument of type {type(value).__name__}; leave it out")


def _whole_slice(node: Node) -> bool:
    """Whether a call takes the whole of a tensor, for which an index such as `x[:, 0]` makes no call in Python."""
    return name_of(node.target) == "aten::slice.Tensor" and node.args[2:] == (0, sys.maxsize) and not node.kwargs


def _last_item(node: Node) -> bool:
    """Whether a call makes a Python number of the result of a function, which its caller can do."""
    return name_of(node.target) == "aten::item.default" and all(user.op == "output" for user in node.users)


def _idle(node: Node) -> bool:
    """Whether leaving a call out changes nothing: it only checks, or computes a size that nothing else uses."""
    name = name_of(node.target)
    return name in CHECKS or ((name in OPERATORS or name in SIZES) and all(_idle(user) for user in node.users))
