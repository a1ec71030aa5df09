"""Detects changes that a script makes between two steps: to the parameters and structure of a module, and to gradients
that were already sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from flockstep.arrays.kernels.torch_basics import as_bytes
from flockstep.arrays.schema import Entry
from flockstep.drivers.torch_clipping import Clipping
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule

BLOCK = 1 << 16
"""Number of elements that one checksum covers."""
SMALL = 16
"""Maximum size of a model, in blocks of `BLOCK` elements, that is compared completely before every step."""
WINDOW = 4
"""Number of blocks of a larger model that are compared before each step; the next step compares the following blocks.
"""
STRIDE = 1021
"""Minimum distance, in elements, between the single elements of a large model that are also compared; each step starts
at another element.
"""
SENT = 4
"""Number of blocks that are compared in each part of a gradient; the next gradient is compared in the following blocks.
"""


class Guard:
    """Compares a module before a step with its state after the previous step.

    A model of at most a million parameters is compared completely. In a larger model, a digest of all parameters would
    take as long as a copy of them. The guard therefore compares the digests of all tensors of at most `BLOCK` elements,
    such as biases, the digests of `WINDOW` other blocks, which change from step to step, and single elements at least
    `STRIDE` apart. torch counts writes to each tensor, except writes through `.data` and numpy. If torch has counted a
    write although all compared elements are equal, as when averaged weights are swapped in and out again, the guard
    digests the whole model from then on, and warns if it had not compared the whole tensor.
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
        self._blocks = [slice(at, min(at + BLOCK, len(flat.params))) for at in range(0, len(flat.params), BLOCK)]
        self._count = len(self._blocks)
        self._whole = self._small = self._count <= SMALL
        """Whether every block is digested after each step."""
        if not self._small:
            self._blocks += _runs([entry for entry in flat.schema.entries if entry.size <= BLOCK])
        self._bounds = np.array([(block.start, block.stop) for block in self._blocks])
        self._written = False
        """Whether torch has counted a write to a large model after which the compared parts were equal."""
        self._sums: Any = []
        """Digest of each block, or of each block of the window and of `_kept`: numbers, or a tensor on the parameters'
        device.
        """
        self._kept: list[Any] = []
        """Copies of the single elements that are compared; empty if every block is digested."""
        self._stride = max(STRIDE, -(-len(flat.params) // BLOCK))
        self._turn = 0
        self.unsent = False
        """Whether the script has loaded an optimizer state that servers or other ranks may lack."""
        self._finite: Any = True
        self.note()

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
        flat = self._flat
        for entry, parameter, place in zip(flat.schema.entries, flat.parameters, flat.places, strict=True):
            if parameter.data_ptr() != place.data_ptr():
                self._tell_changed(entry.name)
        moved = self._moved()
        if moved is not None:
            self._tell_changed(next(e.name for e in flat.schema.entries if moved < e.offset + e.size))

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
        self._turn += 1
        self._whole = self._whole or self._written
        self._kept = [] if self._whole else self._elements()
        self._sums, self._finite = self._digests(range(self._count) if self._whole else self._window(), self._kept)

    def _window(self) -> list[int]:
        """Numbers of the blocks whose turn it is, then of those that hold the small tensors of a large model."""
        if self._small:
            return list(range(self._count))
        turn = sorted((self._turn * WINDOW + i) % self._count for i in range(WINDOW))
        return [*turn, *range(self._count, len(self._blocks))]

    def _elements(self) -> list[Any]:
        """Copies of every `_stride`-th element of the flat array, and of the memory of narrower parameters."""
        part = slice(self._turn % self._stride, None, self._stride)
        return [_copied(self._flat.params[part]), *(_copied(each.values[part]) for each in self._flat.narrow)]

    def _digests(self, numbers: Sequence[int], elements: list[Any]) -> tuple[Any, Any]:
        """Digests of the blocks of the given numbers and of `elements`, if any, and whether what was read is finite;
        tensors for parameters on a device.
        """
        params: Any = self._flat.params
        last = [_digest(elements)] if elements else []
        if isinstance(params, np.ndarray) and params.dtype == np.float32 and not self._flat.narrow:
            from flockstep.arrays.kernels.numpy_digest import digests

            sums, known = digests(params, self._bounds[list(numbers)])
            return sums + [one for one, _ in last], known and all(each for _, each in last)
        found, finite = map(list, zip(*map(_digest, map(self._block, numbers)), *last, strict=True))
        return _together(found), torch.stack(finite).all() if isinstance(finite[0], torch.Tensor) else all(finite)

    def not_finite(self) -> str | None:
        """Return the name of the first parameter that contained NaN or infinity at the last call of `note`; None if all
        values were finite.
        """
        if self._finite:
            return None
        named = zip(self._flat.schema.entries, self._flat.parameters, strict=True)
        return next(entry.name for entry, parameter in named if not _finite(parameter.detach()))

    def _moved(self) -> int | None:
        """Position at or after the first detected change of the flat array; None if no change was detected."""
        every = any(p._version != old for p, old in zip(self._flat.parameters, self._versions, strict=True))
        looked = self._looked(every)
        elements = self._elements() if self._kept else []
        found, _ = self._digests(looked, elements)
        known = _chosen(self._sums, looked) if self._whole else self._sums
        if _equal(found, known):  # one truth value leaves the device
            if every and not self._whole:
                self._tell_unknown()
                self._written = True
            return None
        differs = [one != other for one, other in zip(_numbers(found), _numbers(known), strict=True)].index(True)
        if differs == len(looked):
            return self._moved_element(elements)
        start = self._blocks[looked[differs]].start
        return self._first_written(start) if every else start

    def _looked(self, every: bool) -> list[int]:
        """Numbers of the blocks to compare; `every`: torch has counted a write."""
        if not self._whole:
            return self._window()
        return list(range(self._count)) if every else [one for one in self._window() if one < self._count]

    def _tell_unknown(self) -> None:
        """Warn if torch has counted a write to a tensor that was not compared as a whole."""
        moved = zip(self._flat.schema.entries, self._flat.parameters, self._versions, strict=True)
        names = [entry.name for entry, p, old in moved if p._version != old and entry.size > BLOCK]
        if names:
            warnings.warn(
                f"parameter {names[0]} was written to between two steps; the elements that flockstep compares are "
                "unchanged, but others may have changed; if you changed the parameter's values, call optimizer.sync() "
                "on every rank after each such change; from now on flockstep compares every parameter in full",
                RuntimeWarning,
                stacklevel=6,
            )

    def _moved_element(self, elements: list[Any]) -> int:
        """Position of the first of the single elements that has changed."""
        starts = [0, *(each.part.start for each in self._flat.narrow)]
        firsts = map(_first_difference, self._kept, elements)
        start, first = next((start, first) for start, first in zip(starts, firsts, strict=True) if first is not None)
        return int(start + self._turn % self._stride + first * self._stride)

    def _first_written(self, start: int) -> int:
        """First element of the first tensor, in or after a block, that torch has written to; `start`: of the block."""
        for entry, parameter, old in zip(self._flat.schema.entries, self._flat.parameters, self._versions, strict=True):
            if parameter._version != old and entry.offset + entry.size > start:
                return entry.offset
        return start

    def _block(self, index: int) -> list[Any]:
        """A part of the flat array, and what narrower parameters hold of it."""
        part = self._blocks[index]
        return [self._flat.params[part], *self._flat.narrow_within(part.start, part.stop)]

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
        self._turn = 0
        self._blocks: list[slice] = []
        self._sums: list[Any] = []

    def begin(self) -> None:
        """Forget the parts of the previous gradient."""
        self._turn, self._blocks, self._sums = self._turn + SENT, [], []

    def note(self, start: int, stop: int) -> None:
        """Store checksums of gradient elements start to stop-1, which are passed to the strategy now."""
        begins = range(start, stop, BLOCK)
        for number in range(min(len(begins), SENT)):
            begin = begins[(self._turn + number) % len(begins)]
            self._blocks.append(slice(begin, min(begin + BLOCK, stop)))
            self._sums.append(self._digest(self._blocks[-1]))

    def changed(self) -> bool:
        """Return whether one of the blocks with a stored checksum has changed since `note`."""
        found = list(map(self._digest, self._blocks))
        return bool(found) and not _equal(_together(found), _together(self._sums))

    def _digest(self, block: slice) -> Any:
        narrow = self._flat.narrow_within(block.start, block.stop, gradients=True)
        return _digest([self._flat.grads[block], *narrow])[0]


def _runs(entries: Sequence[Entry]) -> list[slice]:
    """The places of tensors in the flat array, where neighbors are one place of at most `BLOCK` elements."""
    found: list[slice] = []
    for entry in entries:
        stop = entry.offset + entry.size
        if found and found[-1].stop == entry.offset and stop - found[-1].start <= BLOCK:
            found[-1] = slice(found[-1].start, stop)
        else:
            found.append(slice(entry.offset, stop))
    return found


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


def _digest(block: list[Any]) -> tuple[Any, Any]:
    """Digest of the bits and positions of a block's arrays, and whether all their elements are finite.

    A changed block has the same digest only by chance. The digest of tensors is computed on the tensors' device.
    """
    if not isinstance(block[0], np.ndarray):
        return sum(_weighed(as_bytes(part)) for part in block), torch.stack(list(map(_finite, block))).all()
    from flockstep.arrays.kernels.numpy_digest import digest

    found, finite = 0, True
    for part in block:
        array = isinstance(part, np.ndarray)
        found, known = digest(part.view(np.uint8) if array else as_bytes(part).numpy(), found)
        finite &= known if array and part.dtype == np.float32 else bool(_finite(part))
    return found, finite


def _copied(part: Any) -> Any:
    """The elements of an array or tensor one after another, in memory of their own."""
    return part.clone() if isinstance(part, torch.Tensor) else np.array(part)


def _first_difference(one: Any, other: Any) -> int | None:
    """Number of the first element whose bits differ between two arrays or tensors; None if none does."""
    tensors = isinstance(one, torch.Tensor)
    differ = as_bytes(one) != as_bytes(other) if tensors else one.view(np.uint8) != other.view(np.uint8)
    return int(differ.nonzero()[0].min()) // one.itemsize if differ.any() else None


def _weighed(bits: torch.Tensor) -> torch.Tensor:
    return (bits * _weights(bits.device)[: len(bits)]).sum()


@lru_cache(maxsize=4)
def _weights(device: torch.device) -> torch.Tensor:
    """Odd 32-bit random numbers, the weights of the digest, one for each byte of the largest block."""
    return torch.from_numpy(np.random.default_rng(BLOCK).integers(1 << 32, size=BLOCK * 8) | 1).to(device)


def _together(values: Sequence[Any]) -> Any:
    """The values as a list of numbers, or as a tensor on their device."""
    return torch.stack(list(values)) if isinstance(values[0], torch.Tensor) else list(map(int, values))


def _chosen(sums: Any, blocks: Sequence[int]) -> Any:
    """The digests of the given blocks."""
    if isinstance(sums, torch.Tensor):
        return sums if len(blocks) == len(sums) else sums[list(blocks)]
    return [sums[index] for index in blocks]


def _equal(found: Any, known: Any) -> bool:
    return torch.equal(found, known) if isinstance(found, torch.Tensor) else bool(found == known)


def _numbers(values: Any) -> list[int]:
    """Digests as plain numbers."""
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def _finite(part: Any) -> Any:
    """Whether every element is finite; the sum of squares tells it unless it overflows."""
    if not isinstance(part, np.ndarray):
        return torch.isfinite(part).all()
    if part.dtype == np.float16:  # numpy converts float16 element by element; testing the exponent's bits is faster
        return not bool(((part.view(np.uint16) & 0x7C00) == 0x7C00).any())
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(part, part))) or bool(np.isfinite(part).all())
