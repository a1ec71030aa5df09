"""Clips the gradient that the optimizer uses in a script's own loop, as PyTorch's DDP does."""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.utils import clip_grad_norm_ as clip_now
from torch.utils.hooks import RemovableHandle

from flockstep.drivers.node_spec import place_of_script
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.strategies.base import Strategy

WATCHED = 10
"""Number of first steps in which a gradient that changes between the backward pass and the optimizer's step is
detected.
"""

Parameters = torch.Tensor | Iterable[torch.Tensor]


class Norm(torch.Tensor):
    """Gradient norm that a script receives before its value is known. Until then it is NaN, and reading it calls
    `read_early`.
    """

    read_early: Callable[[], None] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` on plain tensors; `func` reads the value unless it is `shape` or similar."""
        of = getattr(func, "__self__", None)  # the descriptor, of an attribute that is read
        looks = func is not torch.Tensor.copy_ and (func.__name__ != "__get__" or of is torch.Tensor.data)
        with torch._C.DisableTorchFunctionSubclass():
            named = {name: _plain(each, looks) for name, each in (kwargs or {}).items()}
            return func(*(_plain(each, looks) for each in args), **named)

    def know(self, value: torch.Tensor) -> None:
        """Set the value of the norm, which is known from now on."""
        self.copy_(value)
        self.read_early = None


def _plain(value: Any, looks: bool) -> Any:
    """A norm, or a list of norms, as plain tensors; `looks`: whether the values are read."""
    if isinstance(value, list | tuple) and any(isinstance(each, Norm) for each in value):
        return [_plain(each, looks) for each in value]
    if not isinstance(value, Norm):
        return value
    if looks and value.read_early is not None:
        value.read_early()
    return value.as_subclass(torch.Tensor)


def _script_level() -> int:
    """The `stacklevel` with which the caller warns about a line of the script."""
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), str(copy.__file__))
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


def _unknown() -> Norm:
    return torch.tensor(float("nan")).as_subclass(Norm)


@dataclass(frozen=True, eq=False)
class Clip:
    """One call of `clip_grad_norm_`, which is valid for one step."""

    parameters: list[torch.Tensor]
    max_norm: float
    norm_type: float
    strict: bool
    norm: Norm = field(default_factory=_unknown)
    """Norm of the combined gradient, which is known once the optimizer steps."""

    def apply(self) -> None:
        """Clip the current gradients of the parameters, with the norm and the limit of this call."""
        self.norm.know(clip_now(self.parameters, self.max_norm, self.norm_type))

    def measure(self) -> None:
        """Measure the norm of the current gradients without changing them."""
        slopes = [p.grad for p in self.parameters if p.grad is not None]
        norms = [torch.linalg.vector_norm(slope.detach(), self.norm_type) for slope in slopes]
        self.norm.know(torch.linalg.vector_norm(torch.stack(norms), self.norm_type) if norms else torch.tensor(0.0))

    @property
    def refused(self) -> bool:
        """Whether the script has asked for an error in place of a step with this norm, because the norm is not
        finite.
        """
        return self.strict and not bool(torch.isfinite(self.norm))

    def check(self) -> None:
        """Raise the error that torch raises for a norm that is not finite, if the script has asked for the error."""
        if self.refused:
            raise RuntimeError(
                f"the total norm of order {self.norm_type} of the gradients is non-finite ({float(self.norm)}), so it "
                "cannot be clipped; to clip anyway, pass error_if_nonfinite=False"
            )

    def same(self, other: Clip) -> bool:
        """Whether both calls clip the same gradients in the same way."""
        return (self.max_norm, self.norm_type, self.strict) == (other.max_norm, other.norm_type, other.strict) and (
            list(map(id, self.parameters)) == list(map(id, other.parameters))
        )


class Clipping:
    """Clipping that a script has requested by `clip_grad_norm_`, until the optimizer steps."""

    live: ClassVar[weakref.WeakSet[Clipping]] = weakref.WeakSet()
    """The `Clipping` of each distributed optimizer of this process."""

    def __init__(self, flat: FlatModule, strategy: Strategy, alone: bool):
        """`alone`: there is no other worker whose gradients would be combined with this worker's."""
        self.flat = flat
        self.strategy = strategy
        self._alone = alone
        self._warned = False
        self._asked: list[Clip] = []
        self._due: list[Clip] = []
        self.live.add(self)

    def ask(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float, strict: bool) -> torch.Tensor:
        """Clip now if each worker uses its own gradient; otherwise store the request until the gradients have been
        combined.
        """
        if self not in self.live:  # the run is over: gradients are not combined
            return clip_now(parameters, max_norm, norm_type, error_if_nonfinite=strict)
        traits = self.strategy.traits
        if traits.clips == "none":
            raise CompositionError(
                f"{self.strategy} updates parts of the parameters on several nodes, and no node knows the norm of the "
                "whole gradient; use a strategy that updates all parameters on one node, such as all_reduce or bsp, "
                "or clip each worker's own gradient with torch.nn.utils.clip_grad_norm_"
            )
        if traits.clips == "own":
            return clip_now(parameters, max_norm, norm_type, error_if_nonfinite=strict)
        if traits.server_optimizer:
            self._require_servable(parameters, norm_type, strict)
        clip = Clip(parameters, float(max_norm), float(norm_type), strict)
        if any(map(clip.same, self._asked)):  # by a script that skips steps with the module's zero_grad
            self.skip()
        if self._alone:
            clip.measure()
            clip.check()
        elif not self._warned:
            clip.norm.read_early = self._tell
        self._asked.append(clip)
        return clip.norm

    def skip(self) -> None:
        """Cancel the requested clipping, because the script skips the step."""
        self._asked = []

    def _tell(self) -> None:
        """Warn once that the script has read a norm that is not known yet."""
        if self._warned:
            return
        self._warned = True
        if self.strategy.traits.server_optimizer:
            how = (
                f"stays NaN on workers because the server of {self.strategy} clips; remove the code that reads the norm"
            )
        else:
            how = (
                f"was read before step(), in which {self.strategy} combines the gradients of all workers; read "
                "the norm after step()"
            )
        warnings.warn(
            f"the norm that clip_grad_norm_ returned {how}, and do not skip steps because of this norm: the run ends "
            "if a gradient is not finite",
            UserWarning,
            stacklevel=_script_level(),
        )

    def end(self) -> None:
        """Stop clipping combined gradients, because the run has ended."""
        self.live.discard(self)

    def begin(self) -> None:
        """Start a step, to which all clipping applies that was requested since the previous step."""
        self._due, self._asked = self._asked, []

    def apply(self) -> bool:
        """Clip the gradients that the optimizer is about to use; return whether the step may be taken."""
        if self.strategy.traits.clips == "combined":
            for clip in self._due:
                clip.apply()
            return not any(clip.refused for clip in self._due)
        return True

    def check(self) -> None:
        """Raise an error at the end of a step that was refused for its norm; every other worker raises the same
        error.
        """
        if self.strategy.traits.clips == "combined":
            for clip in self._due:
                clip.check()

    @property
    def max_norm(self) -> float:
        """Norm to which a server clips the combined gradient of this step; 0 for no clipping."""
        return self._due[-1].max_norm if self._due else 0.0

    def _require_servable(self, parameters: list[torch.Tensor], norm_type: float, strict: bool) -> None:
        whole = {id(p) for p in parameters} >= {id(p) for p in self.flat.parameters}
        if not whole or float(norm_type) != 2.0 or strict:
            raise CompositionError(
                f"the server of {self.strategy} can clip only the Euclidean norm of the whole gradient, without an "
                f"error for non-finite norms, got {len(parameters)} of {len(self.flat.parameters)} parameters, "
                f"norm_type={norm_type}, error_if_nonfinite={strict}; use a strategy whose workers update the "
                "parameters, such as all_reduce"
            )


def clip_grad_norm_(
    of: object, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    """Clip the norm of the gradients of parameters, or of all parameters that the optimizer `of` holds; return the
    norm.
    """
    if not max_norm > 0:
        raise ConfigurationError(f"max_norm must be > 0, got {max_norm}; use inf to compute the norm without clipping")
    clipping = getattr(of, "clipping", None)
    if isinstance(clipping, Clipping):
        return clipping.ask(list(clipping.flat.parameters), max_norm, norm_type, error_if_nonfinite)
    wanted = _tensors(of)
    held = {id(tensor) for tensor in wanted}
    for candidate in Clipping.live:
        if held & {id(p) for p in candidate.flat.parameters}:
            return candidate.ask(wanted, max_norm, norm_type, error_if_nonfinite)
    return clip_now(wanted, max_norm, norm_type, error_if_nonfinite, foreach)  # of one worker alone


def clip_values(parameters: Parameters, limit: float, strategy: Strategy) -> None:
    """Clip each element of the gradients, if the strategy does not combine gradients.

    Raises:
        CompositionError: the strategy combines gradients after this call.
    """
    if place_of_script()[1] > 1 and strategy.traits.clips != "own":
        raise CompositionError(
            f"{strategy} combines gradients in step(), so clipping values before step() would not clip the combined "
            f"gradient; clip by norm instead"
        )
    torch.nn.utils.clip_grad_value_(parameters, limit)


def _tensors(of: object) -> list[torch.Tensor]:
    if isinstance(of, torch.Tensor):
        return [of]
    if isinstance(of, torch.optim.Optimizer):
        return [p for group in of.param_groups for p in group["params"]]
    given = list(of) if isinstance(of, Iterable) else [of]
    tensors = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
    if len(tensors) != len(given):
        raise ConfigurationError(
            f"clip_grad_norm_ takes an optimizer or parameters, got {type(of).__name__}; use the optimizer that "
            "flockstep.distribute returned"
        )
    return tensors


class GradientChangeDetector:
    """Warns once if a script changes gradients between backward and `step`, although the strategy combines the
    gradients in `step`.
    """

    def __init__(self, flat: FlatModule, strategy: Strategy):
        self._flat = flat
        self._strategy = strategy
        self._left = WATCHED
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}
        self._hooks: list[RemovableHandle] = []
        for index, parameter in enumerate(flat.parameters):
            hook = parameter.register_post_accumulate_grad_hook(self._note(index))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def check(self, allowed: int = 0) -> bool:
        """Look for changed gradients at the start of a step, and return whether there are any.

        Each gradient may have been changed `allowed` times since backward.
        """
        if not self._hooks:
            return False
        changed = self._replaced() or self._changes() > allowed * len(self._seen)
        self._seen.clear()
        self._left -= 1
        if changed:
            warnings.warn(
                f"gradients were changed between backward() and step(), but {self._strategy} combines the gradients "
                "in step(), so the change affected only each worker's own gradient; if the gradients were clipped, "
                "use flockstep.clip_grad_norm_(optimizer, max_norm), which clips the combined gradient",
                UserWarning,
                stacklevel=_script_level(),
            )
        if changed or not self._left:
            self.end()
        return changed

    def end(self) -> None:
        """Remove the hooks that watch the gradients."""
        while self._hooks:
            self._hooks.pop().remove()

    def _note(self, index: int) -> object:
        def accumulated(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._seen[index] = parameter.grad, parameter.grad._version

        return accumulated

    def _replaced(self) -> bool:
        """Whether the script has replaced the gradient of a parameter since backward."""
        return any(
            now is not None and now is not gradient and not self._flat.in_place(index)
            for index, (gradient, _) in self._seen.items()
            for now in [self._flat.parameters[index].grad]
        )

    def _changes(self) -> int:
        """Number of writes to gradients after backward; gradients in the same memory count their writes together."""
        alone, shared, last = 0, dict[int, int](), dict[int, int]()
        for index, (gradient, version) in self._seen.items():
            now = self._flat.parameters[index].grad
            if now is not gradient:
                continue
            if self._flat.in_place(index):
                memory = gradient.untyped_storage().data_ptr()
                shared[memory], last[memory] = max(shared.get(memory, 0), version), gradient._version
            else:
                alone += gradient._version - version
        return alone + sum(last.values()) - sum(shared.values())
