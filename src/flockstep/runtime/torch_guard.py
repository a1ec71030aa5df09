"""Detects changes that a script makes between two steps to the parameters and to the structure of a module."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parallel import DistributedDataParallel

from flockstep.arrays.kernels.torch_basics import as_bytes
from flockstep.arrays.namespace import first_not_finite, namespace
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_dtensors import local
from flockstep.frameworks.torch_flat import FlatModule, on_gradients
from flockstep.runtime.settings import compared_at

COMPARED = 1 << 8
"""Number of elements, at equal distances, that are compared before a step, besides each parameter's first."""


class Compared:
    """Some elements of an array of parameters, whose bits after the previous step are kept."""

    def __init__(self, memory: Any, places: npt.NDArray[np.int64], start: int):
        """`memory`: array (K,) whose first element has number `start`; `places`: positions of the elements in it."""
        self._floats = memory.dtype
        self._bits = memory.view(getattr(namespace(memory), f"int{8 * memory.itemsize}"))
        self._places = places if isinstance(memory, np.ndarray) else torch.from_numpy(places).to(memory.device)
        self._start = start
        self.keep()

    def keep(self) -> None:
        """Keep the elements as they are now."""
        self._kept = self._bits.take(self._places)

    def changed(self) -> int:
        """Number of the first element whose bits are others than those kept, so that NaN equals NaN; -1: none is."""
        differs = self._bits.take(self._places) != self._kept
        return self._start + int(self._places[differs][0]) if differs.any() else -1

    def finite(self) -> bool:
        """Whether no kept element is NaN or infinite."""
        return first_not_finite(self._kept.view(self._floats)) < 0


class Guard:
    """Compares a module before a step with its state after the previous step: the address of each parameter, some of
    its values, and which parameters are trained.

    What happens to scripts (loading a model, clamping, averaging, another optimizer) changes whole parameters. Values
    count, and not torch's count of writes: weights that are swapped for an evaluation and put back are accepted, and
    writes through `.data` are found. The guard also notices that another optimizer steps, from a change of the model
    between two backward passes, unless a later call of `distribute` has taken over a parameter.
    """

    live: ClassVar[weakref.WeakSet[Guard]] = weakref.WeakSet()
    """Guards of this process that watch backward passes."""

    def __init__(self, flat: FlatModule, optimizer: torch.optim.Optimizer | None = None, server_side: bool = False):
        """`server_side`: servers or other ranks step in place of the optimizer."""
        self._flat, self._optimizer, self._server_side = flat, optimizer, server_side
        self._names = {id(p): name for name, p in flat.trained.items()}
        self._all = list(flat.module.parameters())
        names = [name.rpartition(".") for name in flat.trained]
        self._owners = [(flat.module.get_submodule(owner), name) for owner, _, name in names]
        """Where the module holds each parameter."""
        self._structure, self._checks = self._seen(), 0
        firsts = [entry.offset for entry in flat.schema.entries if entry.size]
        places = np.unique([*range(0, flat.schema.size, max(1, flat.schema.size // COMPARED)), *firsts])
        self._compared = [Compared(flat.params, places, 0)]
        for each in flat.narrow:
            inside = places[(places >= each.part.start) & (places < each.part.stop)]
            self._compared.append(Compared(each.values, inside - each.part.start, each.part.start))
        self._backward: int | None = None
        """Torch's count of writes to the last parameter at its first gradient after the previous step."""
        self.unsent = False
        """Whether the script has loaded an optimizer state that servers or other ranks may lack."""
        for earlier in list(self.live):
            if not self._names.keys().isdisjoint(earlier._names):
                earlier.end()
        self.live.add(self)
        (self._hook,) = on_gradients(flat.parameters[-1:], self._completed)
        self.note()

    def _completed(self, _: int, parameter: torch.Tensor) -> None:
        """Notice at the last parameter's gradient that the parameter was written to since its last gradient."""
        if self._backward is not None and self._backward != parameter._version:
            self.require_own_steps()
        self._backward = parameter._version

    def end(self) -> None:
        """Stop watching backward passes, because the run has ended or another call trains a parameter."""
        self.live.discard(self)
        self._backward = None
        self._hook.remove()

    def note(self) -> None:
        """Accept the flat array as the module's state, and write it to the parameters of narrower dtypes."""
        self._flat.write_parameters()
        self._backward = None
        self._addresses = [place.data_ptr() for place in self._flat.places]
        for each in self._compared:
            each.keep()

    def changed(self) -> str | None:
        """Name of a parameter whose values have changed since the last call of `note`; None if no change is found.

        A parameter that has the same values at another address returns to its place in the flat array.
        """
        flat = self._flat
        if [local(parameter).data_ptr() for parameter in flat.parameters] != self._addresses:
            for entry, parameter, place in zip(flat.schema.entries, flat.parameters, flat.places, strict=True):
                own = local(parameter)
                one = own.detach()
                alike = (one.dtype, one.device, one.shape) == (place.dtype, place.device, place.shape)
                if not alike or not torch.equal(as_bytes(one.reshape(-1)), as_bytes(place.reshape(-1))):
                    return entry.name
                if own is parameter:
                    parameter.data = place
                elif own.data_ptr() != place.data_ptr():  # FSDP2 reads the shard where it is now
                    return entry.name
        for each in self._compared:
            if (first := each.changed()) >= 0:
                return next(entry.name for entry in flat.schema.entries if first < entry.offset + entry.size)
        return None

    def not_finite(self) -> str | None:
        """Return the first parameter with NaN or infinity at the last `note`; None if all compared were finite."""
        if all(each.finite() for each in self._compared):
            return None
        named = zip(self._flat.schema.entries, self._flat.parameters, strict=True)
        return next(entry.name for entry, parameter in named if not torch.isfinite(local(parameter).detach()).all())

    def check(self) -> None:
        """Raise `ConfigurationError` if a parameter was unfrozen, frozen, replaced or changed since the last step."""
        self._checks += 1
        if self._seen() != self._structure or compared_at(self._checks):
            self.check_structure()  # walks through the module's tree
        if self.unsent:
            raise ConfigurationError(
                "optimizer.load_state_dict() loaded a state that servers or other ranks do not have; call "
                "optimizer.sync() on every rank before the next step, so that all ranks continue with the state of "
                "rank 0"
            )
        if (changed := self.changed()) is not None:
            how = "take a strategy whose workers step, such as all_reduce or local_sgd, and " * self._server_side
            raise ConfigurationError(
                f"parameter {changed} was changed between two steps outside the strategy; after loading parameters, "
                "call optimizer.sync() on every rank, so that all ranks continue with the parameters of rank 0; to "
                f"change parameters after every step, such as to clamp them, {how}register the change "
                "with optimizer.register_step_post_hook; if another call of flockstep.distribute trains the "
                "parameter, too, call finish() before that call, or make one call with one torch.nn.ModuleList of all "
                "models"
            )

    def _seen(self) -> list[int]:
        """Which of the first parameters are trained now, and which objects the module and the optimizer hold."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        held = [id(one) for group in groups for one in group["params"]]
        return [one.requires_grad for one in self._all] + [id(getattr(*place)) for place in self._owners] + held

    def check_structure(self) -> None:
        """Raise `ConfigurationError` if the trained or the optimizer's parameters differ from the first ones."""
        before = self._names
        if {id(p) for p in self._flat.module.parameters() if p.requires_grad} != before.keys():
            here = {id(p): name for name, p in self._flat.module.named_parameters() if p.requires_grad}
            new, old = (
                [one[key] for key in one if key not in other] for one, other in ((here, before), (before, here))
            )
            raise ConfigurationError(
                f"parameter {(new or old)[0]} was {'added or unfrozen' if new else 'removed or frozen'} after "
                "flockstep.distribute, which exchanges the parameters that were trainable then; make this change "
                "before distribute, keep a parameter that is frozen for a time trainable in a parameter group with "
                "lr=0, and copy new weights to the old parameters, followed by optimizer.sync() on every rank"
            )
        if self._optimizer is not None:
            require_same_parameters(self._flat, self._optimizer)

    def require_own_steps(self) -> None:
        """Raise `ConfigurationError` if another optimizer has stepped: the model changed after a backward pass."""
        if self._backward is not None and (changed := self.changed()) is not None:
            raise ConfigurationError(
                f"parameter {changed} was changed after backward() without step() of the optimizer that "
                "flockstep.distribute returned, so the optimizer that was distributed is not the one that steps; call "
                "step() of the returned optimizer and change its settings in optimizer.param_groups, or call finish() "
                "and then flockstep.distribute again for each new optimizer"
            )

    def require_no_own_step(self, call: str) -> None:
        """Refuse the method of the optimizer that has just returned from `call` and has changed the parameters."""
        if self._server_side:
            raise ConfigurationError(
                f"{call} changed the parameters, which servers or other ranks update under this strategy; take a "
                "strategy whose workers step, such as all_reduce or local_sgd"
            )
        if self._backward is not None:
            raise ConfigurationError(
                f"{call} stepped with the gradients of this rank alone, because ranks exchange gradients in step(); "
                "let the optimizer make all its passes in step(self, closure), without a default, which flockstep "
                "evaluates on all ranks under all_reduce"
            )


def require_same_parameters(flat: FlatModule, optimizer: torch.optim.Optimizer) -> None:
    """Raise `ConfigurationError` unless `optimizer` holds exactly the parameters that the module trains."""
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p) for p in flat.trained.values()}
    for name, parameter in flat.trained.items():
        if id(parameter) not in held:
            raise ConfigurationError(
                f"the optimizer must hold every trainable parameter, but {name} is missing; pass "
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
    """Raise `ConfigurationError` for DistributedDataParallel, which averages gradients before the strategy."""
    if workers > 1 and isinstance(module, DistributedDataParallel):
        raise ConfigurationError(
            "the module is wrapped in DistributedDataParallel, which averages gradients before the strategy sees them; "
            "pass the unwrapped module, and call the unwrapped module in the training loop"
        )
