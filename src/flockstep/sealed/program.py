"""Builds the programs of a sealed job, which are lists of calls of PyTorch's operators, from JSON.

`torch.export.save` is not used: its archive holds source lines and paths, and its reader falls back to pickle and
evaluates expressions. A program here is data: each node names one operator of ATen, a comparison or a sum of sizes, or
a program inside. Reading one can call nothing else, and no operator that takes the name of a file.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from flockstep.errors import ConfigurationError
from flockstep.sealed.manifest import MOST_CALLS, OperatorProgram

OPERATORS: dict[str, Callable[..., Any]] = {"sym_float": torch.sym_float} | {
    name: getattr(operator, name)
    for name in (
        "getitem",
        "add",
        "sub",
        "mul",
        "floordiv",
        "truediv",
        "mod",
        "neg",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    )
}
"""Functions of sizes, and the choice of one result of several."""
BOUND: dict[str, Callable[..., Any]] = {
    "aten::sym_size.int": torch.Tensor.size,
    "aten::sym_stride.int": torch.Tensor.stride,
    "aten::sym_numel.default": torch.numel,
    "aten::linear.default": torch.nn.functional.linear,
    "aten::scaled_dot_product_attention.default": torch.nn.functional.scaled_dot_product_attention,
    "aten::lstm.input": torch.lstm,
    "aten::flatten.using_ints": torch.flatten,
    "aten::transpose.int": torch.transpose,
    "aten::select.int": torch.select,
    **{f"aten::{name}.Tensor": getattr(torch, name) for name in ("add", "sub", "mul")},
    **{
        f"aten::{name}.default": getattr(torch, name)
        for name in (
            *("conv1d", "conv2d", "relu", "tanh", "dropout", "embedding", "layer_norm", "batch_norm", "max_pool2d"),
            *("zeros", "mean", "square", "unsqueeze"),
        )
    },
}
"""Operator → PyTorch's own function for it, which takes a few microseconds less than the operator by its name, and
whose warnings Python sees: an engine chooses other kernels of attention by such a warning. Functions of sizes also work
for tensors of many replicas under `torch.func.vmap`."""
SIZES = ("aten::sym_size.int", "aten::sym_stride.int", "aten::sym_numel.default")
CHECKS = ("aten::_assert_scalar", "aten::_assert_tensor_metadata", "aten::sym_constrain_range_for_size")
"""Operators that only check; the job was tried when it was sealed, and their messages quote the source."""
INTERNAL = {
    "_convolution",
    "_embedding_bag",
    "_log_softmax",
    "_native_multi_head_attention",
    "_pack_padded_sequence",
    "_pad_packed_sequence",
    "_softmax",
    "_to_copy",
    "_transformer_encoder_layer_fwd",
    "_unsafe_view",
    "_weight_norm",
}
"""The operators with a leading underscore that a program may call. Others do not check what they are given."""
WORDS = {
    *("approximate", "driver", "equation", "indexing", "interpolation", "mode", "norm", "ord", "p", "pad_mode"),
    *("padding", "padding_side", "reduce", "rounding_mode", "side", "UPLO"),
}
"""Names of the arguments that may be text. No operator with another text is called, such as the name of a file."""
FORBIDDEN = re.compile(r"Dict|Storage|Stream|Future|RRef|Any|\bt\d?\b")
"""Types of arguments that no operator of a program has."""
TEXT = re.compile(r"[A-Za-z0-9_., \->]{0,200}")
CONSTANTS = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}
"""Name → dtype, layout or memory format."""
DEEPEST = 8
"""Largest depth of programs inside programs, and of lists inside lists."""
Call = Callable[..., Any]
_AGAIN = "ask its sender for a job of this version"
GRAD_MODE = "grad_mode"
"""Name of the call of a program inside, with gradients on or off."""


def name_of(target: Any) -> str | None:
    """Return the name by which a program calls a function; None if no program may call it."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        if name in CHECKS:
            return name
        name = f"{name}.{target._overloadname}"
        return name if _allowed(target) else None
    return next((name for name, one in OPERATORS.items() if one is target), None)


def _allowed(call: torch._ops.OpOverload) -> bool:
    """Whether a program may call an operator: one of ATen that neither takes text such as a file's name nor objects."""
    space, _, name = call._schema.name.partition("::")
    return (
        space == "aten"
        and (not name.startswith("_") or name in INTERNAL)
        and not any(
            FORBIDDEN.search(kind := str(one.type)) or ("str" in kind and one.name not in WORDS)
            for one in call._schema.arguments
        )
    )


def _operator(name: str) -> Any:
    """Return the function that a program calls by `name`; refuse every other name."""
    if name in OPERATORS:
        return OPERATORS[name]
    space, _, rest = name.partition("::")
    packet = getattr(torch.ops.aten, rest.partition(".")[0], None) if space == "aten" and rest[:2] != "__" else None
    call = getattr(packet, rest.partition(".")[2] or "default", None)
    if not isinstance(call, torch._ops.OpOverload) or not _allowed(call):
        raise ConfigurationError(f"a sealed job may not call {name[:80]!r}; {_AGAIN}")
    return call


def _in_grad_mode(function: Call, enabled: bool, *values: Any) -> Any:
    """Call a program with gradients on or off."""
    with torch.set_grad_enabled(enabled):
        return function(*values)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which torch's warnings and logs, which quote the source, are not shown."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def built(program: OperatorProgram, depth: int = 0, device: str = "cpu") -> Call:
    """Return a program as a function, which is called with the tensors of `state` and then the inputs; refuse a program
    with a call that is not allowed or a value that does not exist. The function makes its own tensors on `device`.

    The function is compiled from a text that consists of numbers and of names made here: everything that the program
    states is a value behind such a name, so that no text of a file becomes code.
    """
    first = len(program.state) + program.inputs
    if max(len(program.calls), first) > MOST_CALLS or program.inputs < 0 or depth > DEEPEST:
        raise ConfigurationError(f"a program of a sealed job must have at most {MOST_CALLS} calls; seal a smaller job")
    writer = _ProgramWriter(device)
    for number, (name, args, kwargs) in enumerate(program.calls, first):
        if name == GRAD_MODE and not kwargs:
            enabled, inside, *args = args if len(args) > 1 else (None, None)
            function: Any = partial(
                _in_grad_mode, built(_chosen(program.inner, inside), depth + 1, device), bool(enabled)
            )
        else:
            call = _operator(name)
            function = BOUND.get(name, call)
            known = call._schema.arguments if isinstance(call, torch._ops.OpOverload) else ()
            # Other names could be code.
            if not set(kwargs) <= {one.name for one in known}:
                raise ConfigurationError(f"a sealed job names arguments that {name} does not have; {_AGAIN}")
            if name in BOUND:
                left = [one for one in known[len(args) :] if not one.kwarg_only and one.name not in kwargs]
                args = [*args, *((one.default_value,) for one in left)]
        given = [writer.shown(one, number) for one in args]
        given += [f"{key}={writer.shown(one, number)}" for key, one in kwargs.items()]
        writer.lines.append(f"v{number} = {writer.named(function)}({', '.join(given)})")
    return writer.function(first, program.outputs)


class _ProgramWriter:
    """Writes the text of a function, and the values of the names in it."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self.lines: list[str] = []
        self._names: dict[str, Any] = {}
        self._last: dict[int, int] = {}
        """Number of a value → the line that uses it last."""

    def named(self, value: Any) -> str:
        """Return a new name that stands for a value."""
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def shown(self, raw: Any, count: int, depth: int = 0) -> str:
        """Return the text of an argument that JSON describes; `count`: number of values that exist."""
        match raw:
            case tuple():  # a default value, which no JSON has
                return self.named(raw[0])
            case {"v": number, **rest} if not rest:
                if type(number) is not int or not 0 <= number < count:
                    raise ConfigurationError(f"a sealed job uses value {number!r}, which does not exist; {_AGAIN}")
                self._last[number] = len(self.lines)
                return f"v{number}"
            case list() if depth < DEEPEST:
                return f"[{', '.join(self.shown(one, count, depth + 1) for one in raw)}]"
        return self.named(self._device if raw == {"c": "cpu"} else _constant(raw))

    def function(self, inputs: int, outputs: list[Any]) -> Call:
        """Return the function, which lets go of each value after its last use."""
        count = inputs + len(self.lines)
        results = "".join(f"{self.shown(one, count)}, " for one in outputs)
        for number, line in self._last.items():
            if line < len(self.lines):
                self.lines[line] += f"; v{number} = None"
        head = f"def program({', '.join(f'v{number}' for number in range(inputs))}):"
        text = "\n    ".join([head, *self.lines, f"return ({results})"])
        exec(compile(text, "<sealed job>", "exec"), self._names)  # noqa: S102 - see `built`
        found: Call = self._names["program"]
        return found


def _chosen(programs: Sequence[OperatorProgram], number: Any) -> OperatorProgram:
    """Return the program of a number; refuse a number without one."""
    if type(number) is not int or not 0 <= number < len(programs):
        raise ConfigurationError(f"a sealed job calls program {number!r}, which does not exist; {_AGAIN}")
    return programs[number]


def _constant(raw: Any) -> Any:
    """Return the constant that JSON describes."""
    match raw:
        case None | bool() | int() | float():
            return raw
        case {"t": str(text), **rest} if not rest and TEXT.fullmatch(text):
            return text
        case {"f": ("inf" | "-inf" | "nan") as number, **rest} if not rest:
            return float(number)
        case {"c": str(name), **rest} if not rest and name in CONSTANTS:
            return CONSTANTS[name]
    raise ConfigurationError(f"a sealed job has the argument {str(raw)[:80]}; {_AGAIN}")
