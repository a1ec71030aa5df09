"""Detects changes that a script makes between two steps: to the parameters and structure of a module, and to gradients
that were already sent.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from flockstep.arrays.kernels.torch_basics import as_bytes
from flockstep.arrays.namespace import as_tensor
from flockstep.drivers.torch_clipping import Clipping
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule

COMPARED = 1 << 20
"""Maximum size of a model, in elements, that is compared completely before every step."""
SMALL = 1 << 12
"""Maximum size of a tensor, in elements, that is compared completely in a larger model."""
STRIDE = 1021
"""Distance, in elements, between the single elements that are compared in the larger tensors of a larger model."""
SENT = 1 << 16
"""Number of elements that are compared in each part of a gradient."""


class Guard:
    """Compares a module before a step with its state after the previous step.

    A model of at most `COMPARED` elements is compared completely. In a larger model all tensors of at most `SMALL`
    elements are compared, such as biases, and every `STRIDE`-th element of the others: what happens to scripts (loading
    a model, clamping, averaging, another optimizer) changes a whole tensor. Values count: a tensor with the same values
    at another address is accepted, and returns to the flat array.

    The guard also notices that another optimizer steps, from a change of the model between two backward passes.
    """

    def __init__(self, flat: FlatModule, optimizer: torch.optim.Optimizer | None = None, server_side: bool = False):
        """`server_side`: servers or other ranks step in place of the optimizer."""
        self._flat = flat
        self._optimizer = optimizer
        self._server_side = server_side
        for each in Clipping.live:
            if each.flat is not flat:
                both = {id(p) for p in flat.parameters} & {id(p) for p in each.flat.parameters}
                flat.shared |= both
                each.flat.shared |= both
        self._dtypes, self._device = [p.dtype for p in flat.parameters], flat.parameters[0].device
        self._all = {id(parameter): parameter for parameter in flat.module.parameters()}
        self._trained = {id(parameter) for parameter in flat.parameters}
        self._versions: list[int] = []
        self._places = _compared(flat)
        """Positions of the compared elements in the flat array; None: all elements are compared."""
        self._backward: dict[int, int] = {}
        """Index of a parameter → torch's count of writes to it when it first received a gradient after the previous
        step.
        """
        self.unsent = False
        """Whether the script has loaded an optimizer state that servers or other ranks may lack."""
        self._warned = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_completed, weakref.ref(self), index)
            )
            for index, parameter in enumerate(flat.parameters)
        ]
        self.note()

    def end(self) -> None:
        """Stop watching backward passes, because the run has ended."""
        while self._hooks:
            self._hooks.pop().remove()

    def completed(self, index: int) -> None:
        """Handle the gradient of a parameter in a backward pass.

        Raises:
            ConfigurationError: the model has changed since an earlier backward pass, without a step.
        """
        version = self._flat.parameters[index]._version
        if self._backward.setdefault(index, version) != version:
            self.require_own_steps()
            self._backward[index] = version

    def require_own_steps(self) -> None:
        """Raise `ConfigurationError` if the model has changed after a backward pass without a step of the strategy:
        another optimizer has stepped.
        """
        if not self._backward or (changed := self.changed()) is None:
            return
        if any(id(p) in self._flat.shared for p in self._flat.parameters):
            return  # another call of `distribute` trains the parameter
        raise ConfigurationError(
            f"parameter {changed} was changed after backward() without step() of the optimizer that "
            "flockstep.distribute returned, so the optimizer that was distributed is not the one that steps; call "
            "step() of the returned optimizer and change its settings in optimizer.param_groups, or call finish() and "
            "then flockstep.distribute again for each new optimizer"
        )

    def require_no_own_step(self, call: str) -> None:
        """Refuse the method of the optimizer that has just returned from `call` and has changed the parameters.

        Raises:
            ConfigurationError: other ranks lack the change.
        """
        if self._server_side:
            raise ConfigurationError(
                f"{call} changed the parameters, which servers or other ranks update under this strategy; take a "
                "strategy whose workers step, such as all_reduce or local_sgd"
            )
        if self._backward:
            raise ConfigurationError(
                f"{call} stepped with the gradients of this rank alone, because ranks exchange gradients in step(); "
                "let the optimizer make all its passes in step(self, closure), without a default, which flockstep "
                "evaluates on all ranks under all_reduce"
            )

    def check(self) -> None:
        """Compare the module with its state after the previous step.

        Raises:
            ConfigurationError: a parameter was unfrozen, frozen, replaced, converted or changed; the message names the
                parameter and what to change.
        """
        self.check_structure()
        if self.unsent:
            raise ConfigurationError(
                "optimizer.load_state_dict() loaded a state that servers or other ranks do not have; call "
                "optimizer.sync() on every rank before the next step, so that all ranks continue with the state of "
                "rank 0"
            )
        changed = self.changed()
        if changed is not None:
            self._tell_changed(changed)

    def changed(self) -> str | None:
        """Name of a parameter whose values have changed since the last call of `note`; None if no change is found.

        A parameter that has the same values at another address returns to its place in the flat array.
        """
        flat = self._flat
        for entry, parameter, place in zip(flat.schema.entries, flat.parameters, flat.places, strict=True):
            if parameter.data_ptr() != place.data_ptr():
                if id(parameter) in flat.shared or not _same(parameter.detach(), place):
                    return entry.name
                parameter.data = place
        now = _bits(self._elements())
        if not torch.equal(now, self._kept):  # one truth value leaves the device
            return self._name_of(int((now != self._kept).nonzero()[0]))
        self._warn_of_unknown()
        return None

    def check_structure(self) -> None:
        """Compare the set of parameters, which of them are trained, their dtypes, and the optimizer's parameters with
        those at `distribute`.

        Raises:
            ConfigurationError: something differs from the state at `distribute`.
        """
        if _trained(self._flat.module) != self._trained:
            self._tell_difference(
                {id(p): (name, p) for name, p in self._flat.module.named_parameters() if p.requires_grad}
            )
        if self._optimizer is not None:
            require_same_parameters(self._flat, self._optimizer)
        for entry, parameter, dtype in zip(self._flat.schema.entries, self._flat.parameters, self._dtypes, strict=True):
            if parameter.dtype is not dtype or parameter.device != self._device or parameter.shape != entry.shape:
                before, now = (str(each).removeprefix("torch.") for each in (dtype, parameter.dtype))
                raise ConfigurationError(
                    f"parameter {entry.name} must stay {before} {entry.shape} on {self._device}, as at "
                    f"flockstep.distribute, got {now} {tuple(parameter.shape)} on {parameter.device}; convert the "
                    "module before distribute, or convert a copy of the module"
                )

    def note(self) -> None:
        """Accept the current flat array as the module's state, and write its values to the parameters of narrower
        dtypes.
        """
        self._flat.write_parameters()
        self._versions = [parameter._version for parameter in self._flat.parameters]
        self._backward.clear()
        elements = self._elements()
        self._kept = _bits(elements)
        self._finite = torch.stack([torch.isfinite(part).all() for part in elements]).all()

    def _elements(self) -> list[torch.Tensor]:
        """The compared elements of the flat array, and those of the memory of narrower parameters."""
        params, places = as_tensor(self._flat.params), self._places
        if places is None:
            return [params, *(each.values for each in self._flat.narrow)]
        narrow = [(each.values, each.part.start, each.part.stop) for each in self._flat.narrow]
        inside = [memory[places[(places >= start) & (places < stop)] - start] for memory, start, stop in narrow]
        return [params[places], *inside]

    def not_finite(self) -> str | None:
        """Return the name of the first parameter that contained NaN or infinity at the last call of `note`; None if all
        values were finite.
        """
        if self._finite:
            return None
        named = zip(self._flat.schema.entries, self._flat.parameters, strict=True)
        return next(entry.name for entry, parameter in named if not torch.isfinite(parameter.detach()).all())

    def _name_of(self, byte: int) -> str:
        """Name of the parameter to which a byte of the compared elements belongs."""
        whole = torch.arange(len(self._flat.params), device=self._device) if self._places is None else self._places
        parts = [slice(0, len(self._flat.params)), *(each.part for each in self._flat.narrow)]
        for part, elements in zip(parts, self._elements(), strict=True):
            if byte < elements.nbytes:
                within = whole[(whole >= part.start) & (whole < part.stop)]
                place = int(within[byte // elements.element_size()])
                return next(e.name for e in self._flat.schema.entries if place < e.offset + e.size)
            byte -= elements.nbytes
        raise AssertionError("no such element")

    def _warn_of_unknown(self) -> None:
        """Warn once if torch has counted a write to a tensor that was not compared as a whole."""
        if self._places is None or self._warned:
            return
        moved = zip(self._flat.schema.entries, self._flat.parameters, self._versions, strict=True)
        names = [entry.name for entry, p, old in moved if p._version != old and entry.size > SMALL]
        self._warned = bool(names)
        if names:
            warnings.warn(
                f"parameter {names[0]} was written to between two steps; the elements that flockstep compares are "
                "unchanged, but others may have changed; if you changed the parameter's values, call optimizer.sync() "
                "on every rank after each such change",
                RuntimeWarning,
                stacklevel=6,
            )

    def _tell_changed(self, name: str) -> NoReturn:
        """Raise the error about the changed parameter `name`, which another call of `distribute` may have too."""
        named = zip(self._flat.schema.entries, self._flat.parameters, strict=True)
        if any(entry.name == name and id(parameter) in self._flat.shared for entry, parameter in named):
            raise ConfigurationError(
                f"parameter {name} was changed between two steps, and it also belongs to another call of "
                "flockstep.distribute, one of which began before finish() of the other; if two models share the "
                "parameter, make one call with one module that holds both models, such as a torch.nn.ModuleList; if "
                "one phase follows another, call finish() before the next call of distribute; if the other call is not "
                "used any more, call optimizer.sync() on every rank, so that all ranks continue with the parameters of "
                "rank 0"
            )
        how = "take a strategy whose workers step, such as all_reduce or local_sgd, and " if self._server_side else ""
        raise ConfigurationError(
            f"parameter {name} was changed between two steps outside the strategy; after loading parameters, call "
            "optimizer.sync() on every rank, so that all ranks continue with the parameters of rank 0; to change "
            f"parameters after every step, such as to clamp them, {how}register the change with "
            "optimizer.register_step_post_hook"
        )

    def _tell_difference(self, trained: dict[int, tuple[str, torch.nn.Parameter]]) -> None:
        for key, (name, _) in trained.items():
            if key in self._trained:
                continue
            if key in self._all:
                raise ConfigurationError(
                    f"parameter {name} was unfrozen after flockstep.distribute, so it is not exchanged; make the "
                    "parameter trainable before distribute, and keep it in a parameter group with lr=0 while it is "
                    "frozen"
                )
            raise ConfigurationError(
                f"the module got a new parameter {name} after flockstep.distribute; replace layers before distribute, "
                "or copy new weights to the old parameters and call optimizer.sync() on every rank"
            )
        here = {id(parameter) for parameter in self._flat.module.parameters()}
        for entry, parameter in zip(self._flat.schema.entries, self._flat.parameters, strict=True):
            if id(parameter) not in trained:
                how = "was frozen" if id(parameter) in here else "was removed from the module"
                raise ConfigurationError(
                    f"parameter {entry.name} {how} after flockstep.distribute, which still exchanges the parameter; "
                    "make this change before distribute, or keep the parameter in a parameter group with lr=0"
                )


class SentParts:
    """Detects changes of gradient parts that the strategy has already received.

    The comparison detects writes through `.data` and numpy, which torch does not count.
    """

    def __init__(self, flat: FlatModule):
        self._flat = flat
        self._parts: list[slice] = []
        self._kept: list[torch.Tensor] = []

    def begin(self) -> None:
        """Forget the parts of the previous gradient."""
        self._parts, self._kept = [], []

    def note(self, start: int, stop: int) -> None:
        """Keep some of the gradient elements start to stop-1, which are passed to the strategy now."""
        self._parts.append(slice(start, stop))
        self._kept.append(self._elements(self._parts[-1]))

    def changed(self) -> bool:
        """Return whether one of the kept elements has changed since `note`."""
        now = [self._elements(part) for part in self._parts]
        return bool(now) and not torch.equal(torch.cat(now), torch.cat(self._kept))

    def _elements(self, part: slice) -> torch.Tensor:
        step = max(1, (part.stop - part.start) // SENT)
        narrow = self._flat.narrow_within(part.start, part.stop, gradients=True)
        return _bits([each[::step] for each in (as_tensor(self._flat.grads[part]), *narrow)])


def _compared(flat: FlatModule) -> torch.Tensor | None:
    """Positions of the elements that are compared; None for all."""
    if len(flat.params) <= COMPARED:
        return None
    entries = flat.schema.entries
    ranges = [torch.arange(e.offset, e.offset + e.size, 1 if e.size <= SMALL else STRIDE) for e in entries]
    return torch.cat(ranges).to(flat.parameters[0].device)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same bits."""
    return one.dtype == other.dtype and torch.equal(as_bytes(one.reshape(-1)), as_bytes(other.reshape(-1)))


def _bits(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of the bytes of all parts."""
    return torch.cat([as_bytes(part) for part in parts])


def _completed(of: weakref.ref[Guard], index: int, _: torch.Tensor) -> None:
    guard = of()  # a module's hooks must not keep this object alive
    if guard is not None:
        guard.completed(index)


def require_same_parameters(flat: FlatModule, optimizer: torch.optim.Optimizer) -> None:
    """Raise `ConfigurationError` unless `optimizer` holds exactly the parameters that the module trains."""
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p) for p in flat.parameters}
    for entry, parameter in zip(flat.schema.entries, flat.parameters, strict=True):
        if id(parameter) not in held:
            raise ConfigurationError(
                f"the optimizer must hold every trainable parameter, but {entry.name} is missing; pass "
                "model.parameters() to the optimizer, or freeze the parameter with requires_grad_(False); if another "
                "optimizer trains it, call distribute once for each optimizer, with a submodule or a "
                "torch.nn.ParameterList that holds what the optimizer trains"
            )
    for key, parameter in held.items():
        if key not in trained and parameter.requires_grad:
            raise ConfigurationError(
                f"the optimizer holds a trainable parameter of shape {tuple(parameter.shape)} that does not belong to "
                "the module, so no worker would exchange it; pass to distribute a module that holds all parameters, "
                "such as a torch.nn.ModuleList"
            )


def require_unwrapped(module: torch.nn.Module, workers: int) -> None:
    """Raise `ConfigurationError` if the module is wrapped in DistributedDataParallel, which averages gradients before
    the strategy receives them.
    """
    if workers > 1 and isinstance(module, DistributedDataParallel):
        raise ConfigurationError(
            "the module is wrapped in DistributedDataParallel, which averages gradients before the strategy sees them; "
            "pass the unwrapped module, and call the unwrapped module in the training loop"
        )


def _trained(module: torch.nn.Module) -> set[int]:
    """Ids of the trainable parameters; faster than `named_parameters`, which also builds names."""
    found, modules = set[int](), [module]
    while modules:
        each = modules.pop()
        found.update(id(p) for p in each._parameters.values() if p is not None and p.requires_grad)
        modules += [child for child in each._modules.values() if child is not None]
    return found
