"""Lays out a torch module's trainable parameters and their gradients in two flat arrays."""

from __future__ import annotations

import mmap
import sys
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from flockstep.arrays.memory import release
from flockstep.arrays.namespace import as_tensor
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_copies import Copies
from flockstep.frameworks.torch_dtensors import aligned, like, local

NamedTensors = dict[str, torch.Tensor]

LARGE = 1 << 20
"""Smallest size, in elements, of a flat gradient that is gathered while the backward pass runs."""

RELEASED = 32 << 20
"""Number of bytes of parameters that are moved at a time; after each move, the old memory is returned to the system."""
PIECE = 1 << 20
"""Number of elements of narrower parameters that are processed at a time, because torch copies them wider."""


@dataclass(frozen=True, eq=False)
class Narrow:
    """Consecutive parameters of a narrower dtype, or one DTensor: their slice of the flat array, and their own memory.

    A DTensor's local shard stays where it is, because FSDP2 gathers it from there.
    """

    indices: range
    part: slice
    values: torch.Tensor
    slopes: torch.Tensor | None
    """None if the gradients lie in the flat array, as those of a DTensor of the flat array's dtype do."""


class FlatModule:
    """The trainable parameters of a torch module in one flat array, and their gradients in another flat array. The
    parameters of `module` become views of the first array, and their `.grad` views of the second, in place.

    `params` and `grads` are these arrays of `schema.size` elements, which share the module's memory: numpy arrays on
    the CPU, tensors elsewhere. Values and existing gradients are kept, and the parameters remain the same objects, so
    that an optimizer created before continues to work. The rules:

    * A frozen parameter (requires_grad=False) is not in the flat array and does not change.
    * A tied parameter is in the flat array once, under its first name; all its names keep working.
    * A parameter without a gradient after a backward pass has gradient zero; see `gather_gradients` and `signs`.
    * Non-trainable buffers (batch-norm statistics) are not in the flat array; `buffers` returns them.
    * Parameters narrower than the flat array (bfloat16, or float16 in addition to float32) and their gradients have
      their own memory. The flat array is the master copy: `write_parameters` rounds its values into the parameters, and
      `stepping` applies an optimizer's changes to it.
    * Of a DTensor, the flat array holds the local shard, as a master copy too; its gradient is a DTensor over the flat
      array.
    * A parameter that another process trains (`copies`) is not in the flat array; `write_parameters` gives it the other
      process's values, and optimizers do not step along its gradient.
    * A module that is already flat does not change, unless it has narrower parameters: a second `FlatModule` of the
    same module shares the arrays of the first.

    After freezing or unfreezing a parameter, a new `FlatModule` is needed.
    """

    def __init__(self, module: torch.nn.Module, gradients: bool = True, copies: Copies | None = None):
        """Lay out the parameters of `module` in the order of `module.named_parameters()`.

        Without `gradients`, gradients have no buffer, and no `.grad` is bound. `copies`: the parameters that other
        processes hold, too; None if this process holds the whole module, or its DTensors, alone.

        Raises:
            ConfigurationError: no trainable parameter, a dtype that is not supported, several devices, a parameter
                without a shape yet, or two parameters that overlap in memory.
        """
        self.module = module
        self.trained = trained_in(module)
        """The trainable parameters by name, with those that another process trains."""
        self.copies = copies
        self.elsewhere = {} if copies is None else copies.elsewhere
        """The parameters that another process trains, by name."""
        held = {name: one for name, one in self.trained.items() if name not in self.elsewhere}
        self.parameters: list[torch.nn.Parameter] = list(held.values())
        self.schema = schema_of(self.trained).only(held)
        self.sharded = copies is not None or any(local(one) is not one for one in self.parameters)
        """Whether this process holds a part of the model: parameters, or shards of DTensors."""
        self.narrow = self._narrow(gradients)
        """The module's parameters that are narrower than the flat array, and its DTensors."""
        self._values, self.places = self._flatten([local(p).detach() for p in self.parameters], move=True)
        for parameter, place in zip(self.parameters, self.places, strict=True):
            if local(parameter) is parameter:
                parameter.data = place
        for each in self.narrow:
            self._values[each.part] = each.values
        self.params = native(self._values)
        self._slopes, self._grad_views, self._grads = self._values[:0], list[torch.Tensor](), list[torch.Tensor]()
        if gradients:
            given = [None if p.grad is None else local(aligned(p.grad, p)) for p in self.parameters]
            empty = all(gradient is None for gradient in given)
            self._slopes, views = self._flatten(given)
            if not empty:
                self._widen(0, self.schema.size)
            self._bind(views)
        self.grads = native(self._slopes)
        self._leaves = False
        self.left = False
        """Whether the last call of `gather_gradients` has left the gradients, which are known to be finite."""
        self._hooks: list[RemovableHandle] = []
        self.absent: list[int] = []
        """Indices of the parameters that had no gradient after the last backward pass."""
        self.signs = False
        """Whether the gradient of a parameter that had none is -0, and every other gradient begins with +0 in place of
        -0. A sum over ranks is then -0 exactly where no rank had a gradient."""
        self._offsets = [entry.offset for entry in self.schema.entries]
        firsts = [min(offset, self.schema.size - 1) for offset in self._offsets]  # the last parameter may be empty
        self._firsts = native(torch.tensor(firsts, device=self._values.device))

    def _bind(self, views: list[torch.Tensor]) -> None:
        """Let the gradients lie in the given memory."""
        self._grad_views = views
        self._grads = [like(view, p) for view, p in zip(views, self.parameters, strict=True)]
        for parameter, gradient in zip(self.parameters, self._grads, strict=True):
            parameter.grad = gradient

    def write_parameters(self) -> None:
        """Round the values of the flat array into the parameters of narrower dtypes. All processes that hold parameters
        together call this, and those that hold a copy of a parameter receive its values.
        """
        self._round()
        if self.copies is not None:
            self.copies.send()

    def _round(self) -> None:
        for each in self.narrow:
            each.values.copy_(self._values[each.part])

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Return a context in which an optimizer steps on the parameters; the step is then applied to the flat array.

        The flat array keeps the remainder beyond the narrower parameters' precision, and adds it to their values after
        the step. A value of exactly zero, such as a pruning hook sets, gets no remainder. If a hook sets or clamps
        parameters to other values, the flat array has these values up to the remainder, which is at most half the
        distance between two neighboring values of the dtype, at the value before the step.
        """
        self._round()
        for wide, narrow in self._narrow_pieces():
            wide.sub_(narrow)
        gradients = [(one, one.grad) for one in self.elsewhere.values()]
        for one, _ in gradients:
            one.grad = None
        try:
            yield
        finally:
            for one, gradient in gradients:
                one.grad = gradient
            for wide, narrow in self._narrow_pieces():
                wide.masked_fill_(narrow == 0, 0).add_(narrow)

    def _narrow_pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of the flat array with the values of the narrower parameters that belong to them."""
        for each in self.narrow:
            for start in range(0, len(each.values), PIECE):
                yield self._values[each.part][start : start + PIECE], each.values[start : start + PIECE]

    def write_gradients(self) -> None:
        """Round the gradients of the flat array into the gradients of the parameters of narrower dtypes."""
        for each in self.narrow:
            if each.slopes is not None:
                each.slopes.copy_(self._slopes[each.part])

    def adopt(self) -> None:
        """Copy the values that a script has assigned to parameters into the flat array.

        Elements of the flat array that equal a narrower parameter's value after rounding do not change.
        """
        for parameter, place in zip(self.parameters, self.places, strict=True):
            if (own := local(parameter)).data_ptr() != place.data_ptr():
                place.copy_(own.detach())
                if own is not parameter:
                    raise ConfigurationError(
                        "the shards of a DTensor were moved after flockstep.distribute, which knows where they were; "
                        "copy values into the parameters, as torch.distributed.checkpoint.load does"
                    )
                parameter.data = place
        for each in self.narrow:
            self._values[each.part].copy_(_unrounded(self._values[each.part], each.values))

    @property
    def rounds(self) -> bool:
        """Whether parameters are narrower than the flat array, and hold its values rounded."""
        return bool(self._rounded)

    @property
    def _rounded(self) -> list[int]:
        return [index for index, entry in enumerate(self.schema.entries) if entry.dtype]

    def master(self) -> NamedTensors:
        """Return the flat array's values of each narrower parameter, or those a script has assigned: name → copy."""
        views, names = self.views(self._values), [entry.name for entry in self.schema.entries]
        return {names[i]: _unrounded(views[i], local(self.parameters[i]).detach()) for i in self._rounded}

    def load_master(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the flat array to the values that `master` returned; raise `ConfigurationError` if names or shapes
        differ, or if the rounded values are not those of the module, which must be loaded before.
        """
        own = {self.schema.entries[i].name: self.schema.entries[i].shape for i in self._rounded}
        given = {name: tuple(value.shape) for name, value in values.items()}
        if own != given:
            wrong = next(name for name in [*own, *given] if own.get(name) != given.get(name))
            raise ConfigurationError(
                f"the loaded master copy must match the model, with {wrong} as {own.get(wrong, 'no parameter')}, got "
                f"{given.get(wrong, 'none')}; load the state of a model with the same shapes and dtypes"
            )
        pairs = list(zip((entry.name for entry in self.schema.entries), map(local, self.parameters), strict=True))
        for name, parameter in pairs:
            if name in values and not torch.allclose(
                values[name].to(parameter), parameter, rtol=0, atol=0, equal_nan=True
            ):
                raise ConfigurationError(
                    f"the loaded master copy must round to the parameters of the module, got other values for {name}; "
                    "load the model first, then the state from the same checkpoint, on every rank"
                )
        for (name, _), view in zip(pairs, self.views(self._values), strict=True):
            if name in values:
                view.copy_(values[name])

    def gather_in_backward(self, leave: bool = False) -> None:
        """Gather each gradient as soon as a backward pass has completed it, while the gradient is in the processor's
        cache, until `keep_gradients` is called. A second array of gradients is then never needed.

        With `leave`, gradients stay in the tensors that autograd creates as long as all of them are finite: the caller
        then steps along each `.grad`, and reads the flat array only otherwise. Gradients of narrower parameters, which
        the flat array holds in full precision, are gathered.
        """
        self._leaves = leave and not self.narrow
        if not self._leaves:
            self._hooks = on_gradients(self.parameters, self._completed)
            self._hooks += on_gradients(list(self.elsewhere.values()), self._completed_elsewhere)

    def gather_at_once(self) -> None:
        """Gather the gradients of a small model in `gather_gradients`, in one call, as they are in the cache still."""
        while self._hooks and self.schema.size < LARGE:
            self._hooks.pop().remove()

    def drop_gradients(self) -> None:
        """Remove the gradients: set every parameter's `.grad` to None."""
        for parameter in self.trained.values():
            parameter.grad = None

    def drop_absent(self) -> None:
        """Set `.grad` to None for parameters without a gradient of the last backward pass, if still zero."""
        for index in self.absent:
            if self.in_place(index) and not self._grad_views[index].any():
                self.parameters[index].grad = None

    def drop_absent_everywhere(self) -> None:
        """Set `.grad` to None for each parameter whose gradient is -0, because no rank had one; see `signs`."""
        firsts = self.grads[self._firsts]
        if firsts.all():  # the usual case: there is no zero
            return
        first = as_tensor(firsts)
        for index in ((first == 0) & first.signbit()).nonzero().flatten().tolist():
            if not self._grad_views[index].any():  # a mean that is too small for the dtype is -0, too
                self.parameters[index].grad = None

    def clear_signs(self, start: int, stop: int) -> None:
        """If `signs` is set, replace -0 by +0 at the first element of each gradient in [start, stop)."""
        if self.signs:
            first, last = bisect_left(self._offsets, start), bisect_left(self._offsets, stop)
            places = self._firsts[first:last]
            if not self.grads[places].all():
                self.grads[places] += 0

    def zero_grad(self) -> None:
        """Set every gradient to zero, except that a parameter without a gradient still has none, as in torch. Make each
        `.grad` a view of the flat array again if it was replaced.
        """
        self.grads[:] = 0
        self.write_gradients()
        for parameter, gradient in zip(self.parameters, self._grads, strict=True):
            parameter.grad = None if parameter.grad is None else gradient
        for parameter in self.elsewhere.values():
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def move_gradients(self, home: FlatArray) -> None:
        """Move the gradients, with their values, to the array `home` (K,)."""
        home[:] = self.grads
        self.put_gradients(home)

    def put_gradients(self, home: FlatArray) -> None:
        """Bind the gradients to the array `home` (K,), which holds their values."""
        self.grads, self._slopes = home, as_tensor(home)
        self._bind(self._places(self._slopes, [each.slopes for each in self.narrow]))

    @contextmanager
    def using(self, gradients: FlatArray) -> Iterator[None]:
        """Context manager in which the gradients are the array `gradients` (K,) instead of a copy of it.

        Afterwards each `.grad` remains a view of `gradients` until the parameter's next gradient, or until `zero_grad`;
        the caller must not change a parameter's elements of `gradients` before that.
        """
        home = self.grads, self._slopes, self._grad_views, self._grads
        self.put_gradients(gradients)
        try:
            yield
        finally:
            self.grads, self._slopes, self._grad_views, self._grads = home

    def return_gradients(self) -> None:
        """Copy gradients that lie outside of the flat array into the array."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.gather(index)

    def keep_gradients(self, home: FlatArray) -> None:
        """Bind the gradients of a run that has ended to the array `home` (K,), which holds their values. A parameter
        without a gradient still has none afterwards.
        """
        while self._hooks:
            self._hooks.pop().remove()
        without = [parameter for parameter in self.parameters if parameter.grad is None]
        if home is not self.grads:
            self.put_gradients(home)
        for parameter in without:
            parameter.grad = None

    def gather_gradients(self, end: int | None = None, leave: bool = True) -> FlatArray:
        """Return the flat gradient (K,) after a backward pass.

        A gradient outside the flat array (autograd creates new ones after `zero_grad(set_to_none=True)`) is copied into
        the array, and `.grad` becomes a view of the array again; a missing gradient counts as zero, as after
        `zero_grad`. `absent` lists the parameters without a gradient. Elements from `end` on were gathered earlier.
        Gradients that may be left and are finite stay where they are, unless `leave` is False.
        """
        self.absent = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
        self.left = leave and self._leaves and all_finite([p.grad for p in self.parameters if p.grad is not None])
        if self.left:
            return self.grads
        pairs = [(p, view, p.grad) for p, view in zip(self.parameters, self._grads, strict=True)]
        outside = [(p, view, given.detach()) for p, view, given in pairs if given is not None and given is not view]
        if self.sharded:  # one by one, below
            outside.clear()
            self.align()
        if outside and all(given.layout == torch.strided for _, _, given in outside):
            torch._foreach_copy_([view for _, view, _ in outside], [given for _, _, given in outside])
            for parameter, view, _ in outside:
                parameter.grad = view
        for index in range(len(self.parameters)):  # those that have none, or are sparse
            self.gather(index)
        if self.narrow:
            self._widen(0, self.schema.size if end is None else end)
        self.clear_signs(0, self.schema.size if end is None else end)
        for index in self.absent if self.signs else ():
            self.grads[self.schema.slices[index]] = -0.0
        return self.grads

    def gather_gradient(self, index: int) -> None:
        """Gather the gradient of one parameter into the flat array, as `gather_gradients` does for all parameters."""
        self.gather(index)
        if self.schema.entries[index].dtype:
            part = self.schema.slices[index]
            self._widen(part.start, part.stop)

    def _widen(self, start: int, stop: int) -> None:
        """Copy the gradients of narrower parameters into a slice of the flat array."""
        for each in self.narrow:
            first, last = max(start, each.part.start), min(stop, each.part.stop)
            if each.slopes is not None and first < last:
                self._slopes[first:last] = each.slopes[first - each.part.start : last - each.part.start]

    def gather(self, index: int) -> None:
        """Move a parameter's gradient to its place: in the flat array, or in the memory of narrower parameters."""
        parameter, gradient = self.parameters[index], self._grads[index]
        if parameter.grad is gradient:
            return
        if parameter.grad is None:
            self._grad_views[index].zero_()
        else:
            copy_values(self._grad_views[index], local(aligned(parameter.grad, parameter)))
        parameter.grad = gradient

    def _completed(self, index: int, parameter: torch.Tensor) -> None:
        """Gather a gradient that a backward pass has just completed."""
        if parameter.grad is not None and not parameter.grad.requires_grad:  # no gradient of the gradient follows
            self.gather(index)

    def _completed_elsewhere(self, _: int, parameter: torch.Tensor) -> None:
        """Complete the sum that a gradient may be, as the process does that trains the parameter."""
        if parameter.grad is not None and not parameter.grad.requires_grad:
            _align(parameter)

    def align(self) -> None:
        """Complete the gradients of DTensors that are sums over processes; all of these processes call this."""
        for parameter in self.trained.values():  # in the same order everywhere
            _align(parameter)

    def in_place(self, index: int) -> bool:
        """Return whether a parameter's `.grad` is a view of the flat array."""
        return self.parameters[index].grad is self._grads[index]

    @property
    def gradient_version(self) -> int:
        """A number that grows whenever torch writes to a gradient that lies in the flat array."""
        apart = [each.slopes for each in self.narrow if each.slopes is not None]
        return sum(memory._version for memory in (self._slopes, *apart))

    def buffers(self) -> NamedTensors:
        """Return the non-trainable buffers (batch-norm statistics) without copying them: name → tensor."""
        return dict(self.module.named_buffers())

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a flat tensor (K,) for each parameter, or of a matrix (R, K) for R replicas."""
        lead = flat.shape[:-1]
        return [flat[..., e.offset : e.offset + e.size].view((*lead, *e.shape)) for e in self.schema.entries]

    def values(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a flat tensor for each parameter; narrower parameters as copies in their dtypes."""
        return [view.to(p.dtype) for view, p in zip(self.views(flat), self.parameters, strict=True)]

    def narrow_within(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return the gradients of the narrower parameters among elements `start` to `stop` - 1 of the flat array."""
        cut = [
            (each.slopes, max(start - each.part.start, 0), stop - each.part.start)
            for each in self.narrow
            if each.slopes is not None
        ]
        return [memory[first:last] for memory, first, last in cut if first < min(last, len(memory))]

    def _narrow(self, gradients: bool) -> list[Narrow]:
        found, own = [], [local(parameter).detach() for parameter in self.parameters]
        apart = [index for index, parameter in enumerate(self.parameters) if local(parameter) is not parameter]
        kinds = [(entry.dtype, index if index in apart else -1) for index, entry in enumerate(self.schema.entries)]
        for (dtype, index), group in groupby(enumerate(self.schema.entries), key=lambda pair: kinds[pair[0]]):
            if dtype or index >= 0:
                pairs = list(group)
                part = slice(pairs[0][1].offset, pairs[-1][1].offset + pairs[-1][1].size)
                one = own[pairs[0][0]]
                values = one.view(-1) if index >= 0 else _zeros(one, part.stop - part.start, one.dtype)
                slopes = _zeros(one, len(values) if gradients else 0, one.dtype) if dtype else None
                found.append(Narrow(range(pairs[0][0], pairs[-1][0] + 1), part, values, slopes))
        return found

    def _places(self, flat: torch.Tensor, narrow: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the memory of each parameter or gradient: in the flat tensor, or in that of narrower ones."""
        views = self.views(flat)
        for each, memory in zip(self.narrow, narrow, strict=True):
            if memory is None:
                continue
            for index in each.indices:
                entry = self.schema.entries[index]
                views[index] = memory[entry.offset - each.part.start :][: entry.size].view(entry.shape)
        return views

    def _flatten(
        self, values: list[torch.Tensor | None], move: bool = False
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return a flat tensor with the given values (None: zeros) and the place of each; if they are flat already,
        their own. With `move`, each parameter leaves its old memory at once, so that there are never two copies.
        """
        flat = self._already_flat(values)
        if flat is not None:
            return flat, self.views(flat)
        flat = _zeros(local(self.parameters[0]).detach(), self.schema.size, getattr(torch, self.schema.dtype))
        places = self._places(flat, [each.values if move else each.slopes for each in self.narrow])
        moved = 0
        for index, place in enumerate(places):
            value, values[index] = values[index], None
            if value is None:
                continue
            copy_values(place, value)
            if move and local(self.parameters[index]) is self.parameters[index]:
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


def _align(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and (complete := aligned(parameter.grad, parameter)) is not parameter.grad:
        parameter.grad = complete


def trained_in(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters of a module by name; raise `ConfigurationError` if it cannot be made flat."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    _check(module, named)
    return named


def schema_of(named: Mapping[str, torch.Tensor]) -> Schema:
    """Return the layout of a flat array of the given parameters, name → parameter, of DTensors with the shapes of the
    local shards.
    """
    dtypes = {name: str(p.dtype).removeprefix("torch.") for name, p in named.items()}
    return Schema.of({name: local(p).shape for name, p in named.items()}, dtypes)


def _zeros(like: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros (size,) on the device of `like`; on the CPU they take memory only once they are written to."""
    if not like.is_cpu or not size:
        return like.new_zeros(size, dtype=dtype)
    memory = mmap.mmap(-1, size * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)


def _unrounded(wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
    """Return the elements of `wide` that equal those of `narrow` after rounding, elsewhere those of `narrow`."""
    return torch.where(wide.to(narrow.dtype) == narrow.to(wide.device), wide, narrow.to(wide))


def native(flat: torch.Tensor) -> FlatArray:
    """Return a flat tensor as strategies use it: on the CPU a numpy array of the same memory, elsewhere the tensor."""
    array: Any = flat.numpy() if flat.is_cpu else flat
    return array  # type: ignore[no-any-return]


def all_finite(gradients: list[torch.Tensor]) -> bool:
    """Return whether all elements of the gradients are known to be finite, in one pass, as `GradScaler` finds out."""
    if any(one.layout != torch.strided or one.requires_grad or 0 in one.stride() for one in gradients):
        return False  # torch cannot write where elements share memory
    if not gradients:
        return True
    found, scale = gradients[0].new_zeros((), dtype=torch.float32), gradients[0].new_ones((), dtype=torch.float32)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)  # multiplies by 1: no bit changes
    return not found


class FlatBackward:
    """Makes backward passes write each gradient into a flat array at once, so that there is no second array."""

    def __init__(self, flat: FlatModule):
        self._flat = flat
        self._targets: list[torch.Tensor] | None = None
        self._missing: set[int] = set()
        on_gradients(flat.parameters, self._take)

    def __call__(self, loss: torch.Tensor, out: FlatArray | None = None) -> None:
        """Write the gradient of `loss` to `out`, with zeros for unused parameters; None: discard it."""
        self._targets = [] if out is None else self._flat.views(as_tensor(out))
        self._missing = set(range(len(self._targets)))
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            for index in self._missing:
                self._targets[index].zero_()
        finally:
            self._targets = None

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """Copy the gradient that autograd has just completed for `parameter` to the flat array, and release it."""
        if self._targets is None or parameter.grad is None:
            return
        if self._targets:
            copy_values(self._targets[index], parameter.grad)
            self._missing.discard(index)
        parameter.grad = None


def on_gradients(
    parameters: Sequence[torch.nn.Parameter], completed: Callable[[int, torch.Tensor], None]
) -> list[RemovableHandle]:
    """Let backward passes call the method `completed(index, parameter)` for each gradient that they have completed.

    The hooks do not keep the method's object alive.
    """
    method = weakref.WeakMethod(completed)

    def call(index: int, parameter: torch.Tensor) -> None:
        if (found := method()) is not None:
            found(index, parameter)

    return [
        one.register_post_accumulate_grad_hook(partial(call, index))  # type: ignore[no-untyped-call]
        for index, one in enumerate(parameters)
    ]


def copy_values(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the values of one tensor to another; the source may be sparse."""
    source = source.detach()
    target.copy_(source.to_dense() if source.layout != torch.strided else source)


def _check(module: torch.nn.Module, trainable: dict[str, torch.nn.Parameter]) -> None:
    """Raise `ConfigurationError` if a module cannot be made flat."""
    device, sharding = None, sys.modules.get("torch.distributed.fsdp")
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigurationError(
                f"parameter {name!r} has no shape yet; run the module on one batch before flockstep.distribute"
            )
        own = local(parameter)
        if own is not parameter and not own.is_contiguous():
            raise ConfigurationError(
                f"the shard of parameter {name!r} that this process holds must be contiguous in memory; shard the "
                "parameter along its first dimension"
            )
    if sharding is not None and any(isinstance(one, sharding.FullyShardedDataParallel) for one in module.modules()):
        raise ConfigurationError(
            "the module is wrapped in FullyShardedDataParallel, whose parameters are no DTensors; use "
            "torch.distributed.fsdp.fully_shard(model, mesh=flockstep.replica().mesh())"
        )
    for name, parameter in trainable.items():
        device = device or parameter.device
        if parameter.device != device or device.type == "meta":
            raise ConfigurationError(
                f"all trainable parameters must be on one device and have values, got {name!r} on {parameter.device} "
                f"and others on {device}; move the module with module.to(device)"
            )
    # distinct tensors that share memory: the flat array would separate them
    named = [*module.named_parameters(), *module.named_buffers()]
    reached, owner = 0, ""
    for (start, end), name in sorted((_extent(local(tensor)), name) for name, tensor in named if local(tensor).numel()):
        if start < reached and (owner in trainable or name in trainable):
            raise ConfigurationError(
                f"{owner!r} and {name!r} must not share memory unless both are the same parameter; assign the same "
                "torch.nn.Parameter to both names"
            )
        if end > reached:
            reached, owner = end, name


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's elements, and the address after its last."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
