"""A torch module's trainable parameters and their gradients as two flat arrays."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from flockstep.arrays.memory import release
from flockstep.arrays.namespace import as_tensor
from flockstep.arrays.schema import DTYPES, FlatArray, Schema
from flockstep.errors import ConfigurationError

Named = dict[str, torch.Tensor]


RELEASED = 32 << 20
"""Bytes of parameters that move before the memory they leave is returned to the system."""


class FlatModule:
    """Makes the trainable parameters of `module` views of one buffer and their `.grad` views of another, in place.

    `params` and `grads` are those buffers, `schema.size` elements that are the module's memory, as `native` gives them;
    values and existing gradients are kept, and the parameters stay the same objects, so that an optimiser made before
    goes on working. The rules:

    - A frozen parameter (requires_grad=False) is not in the flat array and is not touched.
    - A tied parameter is in it once, under its first name; all its names keep working.
    - A parameter without a gradient after a backward pass has gradient zero: `gather_gradients`.
    - Non-trainable buffers (batch-norm statistics) are not in it; `buffers` names them.
    - A module that is flat already is taken as it is: a second `FlatModule` of it shares the first one's arrays.

    Freezing or unfreezing a parameter afterwards needs a new `FlatModule`.
    """

    def __init__(self, module: torch.nn.Module, gradients: bool = True):
        """Lay out the parameters of `module` in the order of `module.named_parameters()`.

        Without `gradients`, those have no buffer here, and no `.grad` is bound.

        Raises:
            ConfigurationError: no trainable parameter, several dtypes or one that is not supported, several
                devices, a parameter that has no shape yet, or two parameters that overlap in memory.
        """
        self.module = module
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _check(module, named)
        self.parameters: list[torch.nn.Parameter] = list(named.values())
        dtype = str(self.parameters[0].dtype).removeprefix("torch.") if named else "float32"
        self.schema = Schema.of({name: p.shape for name, p in named.items()}, dtype)
        flat, views = self._flatten([p.detach() for p in self.parameters], move=True)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self.params = native(flat)
        self.grads = native(flat[:0])
        if gradients:
            flat_slopes, self._grad_views = self._flatten([p.grad for p in self.parameters])
            self.grads = native(flat_slopes)
            self._bind()
        self.absent: list[int] = []
        """Indices of the parameters that had no gradient after the last backward pass."""

    def drop_gradients(self) -> None:
        """Let no parameter have a gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def drop_absent(self) -> None:
        """Let the parameters that had no gradient, and got none from elsewhere, have none."""
        for index in self.absent:
            if not self._grad_views[index].any():
                self.parameters[index].grad = None

    def zero_grad(self) -> None:
        """Set every gradient to zero, and bind `.grad` to the flat buffer again where it was replaced."""
        self.grads[:] = 0
        self._bind()

    def move_gradients(self, home: FlatArray) -> None:
        """Let the gradients lie in `home` (K,) from now on; those that are there move along."""
        if home is self.grads:
            return
        home[:] = self.grads
        self.grads = home
        self._grad_views = self.views(as_tensor(home))
        self._bind()

    def gather_gradients(self) -> FlatArray:
        """The flat gradient after a backward pass.

        A gradient that lies elsewhere (after `zero_grad(set_to_none=True)`, autograd makes new ones) is copied in and
        bound again; a missing one is zero, which is what `zero_grad` would have left there. `absent` names those.
        """
        self.absent = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
        for index in range(len(self.parameters)):
            self.gather_gradient(index)
        return self.grads

    def gather_gradient(self, index: int) -> None:
        """The same for one of the parameters."""
        parameter, view = self.parameters[index], self._grad_views[index]
        if parameter.grad is view:
            return
        if parameter.grad is None:
            view.zero_()
        else:
            copy_values(view, parameter.grad)
        parameter.grad = view

    def in_place(self, index: int) -> bool:
        """Whether a parameter's `.grad` lies in the flat array."""
        return self.parameters[index].grad is self._grad_views[index]

    @property
    def gradient_version(self) -> int:
        """Grows whenever torch writes to the flat gradient."""
        return self._grad_views[0]._version

    def missing_gradients(self) -> list[str]:
        """Names of the parameters whose `.grad` is None now."""
        return [e.name for e, p in zip(self.schema.entries, self.parameters, strict=True) if p.grad is None]

    def buffers(self) -> Named:
        """Name → tensor of every non-trainable buffer (batch-norm statistics), not copied."""
        return dict(self.module.named_buffers())

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' tensors inside a flat tensor (K,), or the replicas' inside a matrix (R, K): (R, *shape)."""
        lead = flat.shape[:-1]
        return [flat[..., e.offset : e.offset + e.size].view(*lead, *e.shape) for e in self.schema.entries]

    def _bind(self) -> None:
        for parameter, view in zip(self.parameters, self._grad_views, strict=True):
            parameter.grad = view

    def _flatten(
        self, values: list[torch.Tensor | None], move: bool = False
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A flat tensor with those values (None: zeros) and its views; the one they lie in already, if they do.

        With `move` each parameter leaves its old memory at once, so that there are never two copies of the model.
        """
        flat = self._already_flat(values)
        if flat is not None:
            return flat, self.views(flat)
        flat = self.parameters[0].detach().new_empty(self.schema.size)
        views, moved = self.views(flat), 0
        for index, view in enumerate(views):
            value, values[index] = values[index], None
            if value is None:
                view.zero_()
                continue
            copy_values(view, value)
            if move:
                self.parameters[index].data = view
                moved += view.nbytes
                del value
                if moved > RELEASED:
                    release(collect=False)
                    moved = 0
        return flat, views

    def _already_flat(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        first = values[0]
        if first is None or first.layout != torch.strided:
            return None
        base, start = first.untyped_storage().data_ptr(), first.storage_offset()
        for entry, value in zip(self.schema.entries, values, strict=True):
            if value is None or value.layout != torch.strided or not value.is_contiguous():
                return None
            if value.untyped_storage().data_ptr() != base or value.storage_offset() != start + entry.offset:
                return None
        return first.detach().as_strided((self.schema.size,), (1,), start)


def native(flat: torch.Tensor) -> FlatArray:
    """A flat tensor as strategies have it: on the CPU as a numpy array that shares its memory, elsewhere as it is."""
    array: Any = flat.numpy() if flat.is_cpu else flat
    return array  # type: ignore[no-any-return]


class Backward:
    """Backward passes whose gradients go into a flat array part by part: no second one of that size ever exists."""

    def __init__(self, flat: FlatModule):
        self._flat = flat
        self._targets: list[torch.Tensor] | None = None
        self._missing: set[int] = set()
        for index, parameter in enumerate(flat.parameters):
            take = partial(_take, weakref.ref(self), index)  # a module's hooks must not keep alive what made them
            parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def __call__(self, loss: torch.Tensor, out: FlatArray | None = None) -> None:
        """Write the gradient of `loss` to `out`, zeros where it does not depend on a parameter; None: drop it."""
        self._targets = [] if out is None else self._flat.views(as_tensor(out))
        self._missing = set(range(len(self._targets)))
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            for index in self._missing:
                self._targets[index].zero_()
        finally:
            self._targets = None

    def take(self, index: int, parameter: torch.Tensor) -> None:
        """The gradient of that parameter is complete."""
        if self._targets is None or parameter.grad is None:
            return
        if self._targets:
            copy_values(self._targets[index], parameter.grad)
            self._missing.discard(index)
        parameter.grad = None


def _take(of: weakref.ref[Backward], index: int, parameter: torch.Tensor) -> None:
    backward = of()
    if backward is not None:
        backward.take(index, parameter)


def copy_values(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor's values, of a sparse one too."""
    source = source.detach()
    target.copy_(source.to_dense() if source.layout != torch.strided else source)


def _check(module: torch.nn.Module, trainable: dict[str, torch.nn.Parameter]) -> None:
    """Raise `ConfigurationError` for a module that cannot be made flat."""
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigurationError(f"parameter {name!r} has no shape yet; run the module on one batch before")
    first, device = "", None
    for name, parameter in trainable.items():
        dtype = str(parameter.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ConfigurationError(
                f"parameter {name!r} must be one of {', '.join(DTYPES)}, is {dtype}; convert the module "
                f"with module.float()"
            )
        first, device = first or dtype, device or parameter.device
        if parameter.device != device or device.type == "meta":
            raise ConfigurationError(
                f"all trainable parameters must be on one device, with values, {name!r} is on {parameter.device} where "
                f"others are on {device}; move the module with module.to(device)"
            )
        if dtype != first:
            raise ConfigurationError(
                f"all trainable parameters must have one dtype, {name!r} is {dtype} where others are {first}; convert "
                f"the module with module.float()"
            )
    _check_overlaps(module, trainable)


def _check_overlaps(module: torch.nn.Module, trainable: dict[str, torch.nn.Parameter]) -> None:
    """Refuse distinct tensors that share memory with a trainable parameter: the flat array would part them."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    ranges = sorted((*_extent(tensor), name) for name, tensor in tensors if tensor.numel())
    for (_, end, one), (start, _, other) in _neighbours(ranges):
        if start < end and (one in trainable or other in trainable):
            raise ConfigurationError(
                f"{one!r} and {other!r} must not share memory unless they are one parameter; assign the same "
                f"torch.nn.Parameter to both names"
            )


def _neighbours(ranges: list[tuple[int, int, str]]) -> Iterator[tuple[tuple[int, int, str], tuple[int, int, str]]]:
    """Each range with the one before it that reaches furthest."""
    furthest = ranges[0] if ranges else (0, 0, "")
    for current in ranges[1:]:
        yield furthest, current
        furthest = max(furthest, current, key=lambda r: r[1])


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements and the one after its last."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
