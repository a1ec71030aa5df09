"""A torch module's trainable parameters and their gradients as two flat arrays."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch

from flockstep.arrays.memory import release
from flockstep.arrays.namespace import as_tensor
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import ConfigurationError

Named = dict[str, torch.Tensor]


RELEASED = 32 << 20
"""Bytes of parameters that move before the memory they leave is returned to the system."""


@dataclass(frozen=True, eq=False)
class Narrow:
    """Consecutive parameters whose dtype is narrower than the flat array's: where they lie in it, and their memory."""

    indices: range
    part: slice
    values: torch.Tensor
    slopes: torch.Tensor

    def views(self, memory: torch.Tensor, schema: Schema) -> list[torch.Tensor]:
        """The parameters' tensors inside `values` or `slopes`."""
        entries = [schema.entries[index] for index in self.indices]
        return [memory[e.offset - self.part.start :][: e.size].view(e.shape) for e in entries]


class FlatModule:
    """Makes the trainable parameters of `module` views of one buffer and their `.grad` views of another, in place.

    `params` and `grads` are those buffers, `schema.size` elements that are the module's memory, as `native` gives them;
    values and existing gradients are kept, and the parameters stay the same objects, so that an optimiser made before
    goes on working. The rules:

    - A frozen parameter (requires_grad=False) is not in the flat array and is not touched.
    - A tied parameter is in it once, under its first name; all its names keep working.
    - A parameter without a gradient after a backward pass has gradient zero: `gather_gradients`.
    - Non-trainable buffers (batch-norm statistics) are not in it; `buffers` names them.
    - Parameters narrower than the flat array (bfloat16, or float16 beside float32) have memory of their own, as have
      their gradients. The flat array is the master copy: `write_parameters` rounds its values into them, and `stepping`
      takes up what an optimizer makes of them.
    - A module that is flat already is taken as it is: a second `FlatModule` of it shares the first one's arrays, unless
      parameters are narrower.

    Freezing or unfreezing a parameter afterwards needs a new `FlatModule`.
    """

    def __init__(self, module: torch.nn.Module, gradients: bool = True):
        """Lay out the parameters of `module` in the order of `module.named_parameters()`.

        Without `gradients`, those have no buffer here, and no `.grad` is bound.

        Raises:
            ConfigurationError: no trainable parameter, a dtype that is not supported, several devices, a parameter that
                has no shape yet, or two parameters that overlap in memory.
        """
        self.module = module
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _check(module, named)
        self.parameters: list[torch.nn.Parameter] = list(named.values())
        dtypes = {name: str(p.dtype).removeprefix("torch.") for name, p in named.items()}
        self.schema = Schema.of({name: p.shape for name, p in named.items()}, dtypes)
        self.narrow = self._narrow(gradients)
        """Those of its parameters that are narrower than the flat array."""
        self._values, self.places = self._flatten([p.detach() for p in self.parameters], move=True)
        for parameter, place in zip(self.parameters, self.places, strict=True):
            parameter.data = place
        for each in self.narrow:
            self._values[each.part] = each.values
        self.params = native(self._values)
        self._slopes, self._grad_views = self._values[:0], list[torch.Tensor]()
        if gradients:
            self._slopes, self._grad_views = self._flatten([p.grad for p in self.parameters])
            self._widen(0, self.schema.size)
            self._bind()
        self.grads = native(self._slopes)
        self.absent: list[int] = []
        """Indices of the parameters that had no gradient after the last backward pass."""

    def write_parameters(self) -> None:
        """Let the parameters that are narrower than the flat array hold its values, rounded."""
        for each in self.narrow:
            each.values.copy_(self._values[each.part])

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around an optimizer's step on the parameters: the flat array takes up what the optimizer makes of them.

        What the flat array had beyond the narrower parameters it still has, added to what they hold after the step.
        """
        self.write_parameters()
        for each in self.narrow:
            self._values[each.part] -= each.values
        try:
            yield
        finally:
            for each in self.narrow:
                self._values[each.part] += each.values

    def write_gradients(self) -> None:
        """Let the gradients of the parameters that are narrower than the flat array be its gradients, rounded."""
        for each in self.narrow:
            each.slopes.copy_(self._slopes[each.part])

    def adopt(self) -> None:
        """Take up what a script has set parameters to.

        Elements of the flat array stay where narrower parameters hold them, rounded.
        """
        for parameter, place in zip(self.parameters, self.places, strict=True):
            if parameter.data_ptr() != place.data_ptr():
                place.copy_(parameter.detach())
                parameter.data = place
        for each in self.narrow:
            values = self._values[each.part]
            values.copy_(torch.where(values.to(each.values.dtype) == each.values, values, each.values))

    def master(self) -> Named:
        """Name → copy of what the flat array has for each parameter that is narrower."""
        views = self.views(self._values)
        return {self.schema.entries[i].name: views[i].clone() for each in self.narrow for i in each.indices}

    def load_master(self, values: Mapping[str, torch.Tensor]) -> None:
        """Let the flat array, and the parameters, have what `master` returned.

        Raises:
            ConfigurationError: other names or shapes than those of the parameters that are narrower.
        """
        own = {self.schema.entries[i].name: self.schema.entries[i].shape for each in self.narrow for i in each.indices}
        given = {name: tuple(value.shape) for name, value in values.items()}
        if own != given:
            wrong = next(name for name in [*own, *given] if own.get(name) != given.get(name))
            raise ConfigurationError(
                f"the loaded master copy must have {wrong} as {own.get(wrong, 'no parameter')}, as the model, got "
                f"{given.get(wrong, 'none')}; load the state of a model of the same shapes and dtypes"
            )
        for name, view in zip((e.name for e in self.schema.entries), self.views(self._values), strict=True):
            if name in values:
                view.copy_(values[name])
        self.write_parameters()

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
        self.write_gradients()
        self._bind()

    def move_gradients(self, home: FlatArray) -> None:
        """Let the gradients lie in `home` (K,) from now on; those that are there move along."""
        if home is self.grads:
            return
        home[:] = self.grads
        self.grads, self._slopes = home, as_tensor(home)
        self._grad_views = self._places(self._slopes, [each.slopes for each in self.narrow])
        self._bind()

    def gather_gradients(self, end: int | None = None) -> FlatArray:
        """The flat gradient after a backward pass.

        A gradient that lies elsewhere (after `zero_grad(set_to_none=True)`, autograd makes new ones) is copied in and
        bound again; a missing one is zero, which is what `zero_grad` would have left there. `absent` names those.
        Elements from `end` on have been gathered before.
        """
        self.absent = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
        for index in range(len(self.parameters)):
            self._bring(index)
        if self.narrow:
            self._widen(0, self.schema.size if end is None else end)
        return self.grads

    def gather_gradient(self, index: int) -> None:
        """The same for one of the parameters."""
        self._bring(index)
        if self.schema.entries[index].dtype:
            part = self.schema.slices[index]
            self._widen(part.start, part.stop)

    def _widen(self, start: int, stop: int) -> None:
        """Read the gradients of narrower parameters into that part of the flat array."""
        for each in self.narrow:
            first, last = max(start, each.part.start), min(stop, each.part.stop)
            if first < last:
                self._slopes[first:last] = each.slopes[first - each.part.start : last - each.part.start]

    def _bring(self, index: int) -> None:
        """Let a parameter's gradient lie where it belongs."""
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
        """Grows whenever torch writes to gradients that lie where they belong."""
        return sum(memory._version for memory in (self._slopes, *(each.slopes for each in self.narrow)))

    def buffers(self) -> Named:
        """Name → tensor of every non-trainable buffer (batch-norm statistics), not copied."""
        return dict(self.module.named_buffers())

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' tensors inside a flat tensor (K,), or the replicas' inside a matrix (R, K): (R, *shape)."""
        lead = flat.shape[:-1]
        return [flat[..., e.offset : e.offset + e.size].view(*lead, *e.shape) for e in self.schema.entries]

    def values(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The same as the module computes with them: copies in the parameters' own dtypes where these are narrower."""
        return [view.to(p.dtype) for view, p in zip(self.views(flat), self.parameters, strict=True)]

    def narrow_within(self, start: int, stop: int) -> list[torch.Tensor]:
        """The memory of narrower parameters that belongs to elements start..stop-1 of the flat array."""
        cut = [(each, max(start - each.part.start, 0), stop - each.part.start) for each in self.narrow]
        return [each.values[first:last] for each, first, last in cut if first < min(last, len(each.values))]

    def _narrow(self, gradients: bool) -> list[Narrow]:
        found = []
        for dtype, group in groupby(enumerate(self.schema.entries), key=lambda pair: pair[1].dtype):
            if dtype:
                pairs = list(group)
                part = slice(pairs[0][1].offset, pairs[-1][1].offset + pairs[-1][1].size)
                like = self.parameters[pairs[0][0]].detach()
                values = like.new_empty(part.stop - part.start)
                slopes = torch.empty_like(values if gradients else values[:0])
                found.append(Narrow(range(pairs[0][0], pairs[-1][0] + 1), part, values, slopes))
        return found

    def _places(self, flat: torch.Tensor, narrow: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The memory of each parameter (or its gradient): in the flat tensor, or in one of those that are narrower."""
        views = self.views(flat)
        for each, memory in zip(self.narrow, narrow, strict=True):
            views[each.indices.start : each.indices.stop] = each.views(memory, self.schema)
        return views

    def _bind(self) -> None:
        for parameter, view in zip(self.parameters, self._grad_views, strict=True):
            parameter.grad = view

    def _flatten(
        self, values: list[torch.Tensor | None], move: bool = False
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A flat tensor with those values (None: zeros) and where each lies; the one they lie in already, if they do.

        With `move` each parameter leaves its old memory at once, so that there are never two copies of the model.
        """
        flat = self._already_flat(values)
        if flat is not None:
            return flat, self.views(flat)
        flat = self.parameters[0].detach().new_empty(self.schema.size, dtype=getattr(torch, self.schema.dtype))
        places = self._places(flat, [each.values if move else each.slopes for each in self.narrow])
        moved = 0
        for index, place in enumerate(places):
            value, values[index] = values[index], None
            if value is None:
                place.zero_()
                continue
            copy_values(place, value)
            if move:
                self.parameters[index].data = place
                moved += place.nbytes
                del value
                if moved > RELEASED:
                    release(collect=False)
                    moved = 0
        return flat, places

    def _already_flat(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        first = values[0]
        if self.narrow or first is None or first.layout != torch.strided:
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
    device = None
    for name, parameter in trainable.items():
        device = device or parameter.device
        if parameter.device != device or device.type == "meta":
            raise ConfigurationError(
                f"all trainable parameters must be on one device, with values, {name!r} is on {parameter.device} where "
                f"others are on {device}; move the module with module.to(device)"
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
