"""A torch module's trainable parameters and their gradients as two flat arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flockstep.arrays.schema import DTYPES, FlatArray, Schema
from flockstep.errors import ConfigurationError

Named = dict[str, torch.Tensor]


class FlatModule:
    """Makes the trainable parameters of `module` views of one buffer and their `.grad` views of another, in place.

    `params` and `grads` are those buffers as numpy arrays of `schema.size` elements that share the module's memory;
    values and existing gradients are kept, and the parameters stay the same objects, so that an optimiser made before
    goes on working. The rules:

    - A frozen parameter (requires_grad=False) is not in the flat array and is not touched.
    - A tied parameter is in it once, under its first name; all its names keep working.
    - A parameter without a gradient after a backward pass has gradient zero: `gather_gradients`.
    - Non-trainable buffers (batch-norm statistics) are not in it; `buffers` names them.
    - A module that is flat already is taken as it is: a second `FlatModule` of it shares the first one's arrays.

    Freezing or unfreezing a parameter afterwards needs a new `FlatModule`.
    """

    def __init__(self, module: torch.nn.Module):
        """Lay out the parameters of `module` in the order of `module.named_parameters()`.

        Raises:
            ConfigurationError: no trainable parameter, several dtypes or one that is not supported, a parameter that
                is not on the CPU or has no shape yet, or two parameters that overlap in memory.
        """
        self.module = module
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _check(module, named)
        self.parameters: list[torch.nn.Parameter] = list(named.values())
        dtype = str(self.parameters[0].dtype).removeprefix("torch.") if named else "float32"
        self.schema = Schema.of({name: p.shape for name, p in named.items()}, dtype)
        values = [p.detach() for p in self.parameters]
        flat, views = self._flatten(values)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        slopes = [p.grad for p in self.parameters]
        flat_slopes, self._grad_views = self._flatten(slopes)
        self._bind()
        self.params: FlatArray = flat.numpy()
        self.grads: FlatArray = flat_slopes.numpy()
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
        self.grads.fill(0)
        self._bind()

    def move_gradients(self, home: FlatArray) -> None:
        """Let the gradients lie in `home` (K,) from now on; those that are there move along."""
        if home is self.grads:
            return
        home[:] = self.grads
        self.grads = home
        self._grad_views = self.views(torch.from_numpy(home))
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
            _copy(view, parameter.grad)
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

    def _flatten(self, values: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A flat tensor with those values (None: zeros) and its views; the one they lie in already, if they do."""
        flat = self._already_flat(values)
        if flat is not None:
            return flat, self.views(flat)
        flat = torch.zeros(self.schema.size, dtype=self.parameters[0].dtype)
        views = self.views(flat)
        for view, value in zip(views, values, strict=True):
            if value is not None:
                _copy(view, value)
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


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    source = source.detach()
    target.copy_(source.to_dense() if source.layout != torch.strided else source)


def _check(module: torch.nn.Module, trainable: dict[str, torch.nn.Parameter]) -> None:
    """Raise `ConfigurationError` for a module that cannot be made flat."""
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigurationError(f"parameter {name!r} has no shape yet; run the module on one batch before")
        if parameter.device.type != "cpu":
            raise ConfigurationError(
                f"parameter {name!r} must be on the CPU, is on {parameter.device}; use module.cpu()"
            )
    first = ""
    for name, parameter in trainable.items():
        dtype = str(parameter.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ConfigurationError(
                f"parameter {name!r} must be one of {', '.join(DTYPES)}, is {dtype}; convert the module "
                f"with module.float()"
            )
        first = first or dtype
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
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
