"""Clipping in a script's own loop: of the gradient that the optimizer steps along, as under PyTorch's DDP."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn.utils import clip_grad_norm_ as clip_now
from torch.utils.hooks import RemovableHandle

from flockstep.errors import CompositionError, ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.strategies.base import Strategy

WATCHED = 10
"""Steps of a run in which changes of gradients between backward and step are looked for."""

Parameters = torch.Tensor | Iterable[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Clip:
    """One call of `clip_grad_norm_`: it holds for one step."""

    parameters: list[torch.Tensor]
    max_norm: float
    norm_type: float
    strict: bool
    norm: torch.Tensor = field(default_factory=lambda: torch.tensor(float("nan")))
    """The combined gradient's norm, which is known once the optimizer steps along it."""

    def apply(self) -> None:
        """Clip the parameters' gradients as they are now."""
        self.norm.copy_(clip_now(self.parameters, self.max_norm, self.norm_type, error_if_nonfinite=self.strict))


class Clipping:
    """What a script asked to be clipped: kept from `clip_grad_norm_` until the optimizer steps."""

    live: ClassVar[weakref.WeakSet[Clipping]] = weakref.WeakSet()
    """Those of every distributed optimizer of this process."""

    def __init__(self, flat: FlatModule, strategy: Strategy):
        self.flat = flat
        self.strategy = strategy
        self._asked: list[Clip] = []
        self._due: list[Clip] = []
        self.live.add(self)

    def ask(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float, strict: bool) -> torch.Tensor:
        """Clip now where each worker's own gradient counts, otherwise once the gradients have been combined."""
        traits = self.strategy.traits
        if traits.clips == "none":
            raise CompositionError(
                f"{self.strategy} steps parts of the combined gradient in several places, and none knows its norm; use "
                f"a strategy with one place, such as all_reduce or bsp, or clip each worker's own gradient with "
                f"torch.nn.utils.clip_grad_norm_"
            )
        if traits.clips == "own":
            return clip_now(parameters, max_norm, norm_type, error_if_nonfinite=strict)
        if traits.server_optimizer:
            self._require_servable(parameters, norm_type, strict)
        clip = Clip(parameters, float(max_norm), float(norm_type), strict)
        self._asked.append(clip)
        return clip.norm

    def begin(self) -> None:
        """A step begins: what has been asked for since the last one holds for it."""
        self._due, self._asked = self._asked, []

    def apply(self) -> None:
        """The parameters' gradients are those that the optimizer is about to step along."""
        if self.strategy.traits.clips == "combined":
            for clip in self._due:
                clip.apply()

    @property
    def max_norm(self) -> float:
        """What a server has to clip the combined gradient of this step to; 0: nothing."""
        return self._due[-1].max_norm if self._due else 0.0

    def _require_servable(self, parameters: list[torch.Tensor], norm_type: float, strict: bool) -> None:
        whole = {id(p) for p in parameters} >= {id(p) for p in self.flat.parameters}
        if not whole or float(norm_type) != 2.0 or strict:
            raise CompositionError(
                f"the server of {self.strategy} clips the Euclidean norm of the whole gradient and goes on, got "
                f"{len(parameters)} of {len(self.flat.parameters)} parameters, norm_type={norm_type}, "
                f"error_if_nonfinite={strict}; use a strategy whose workers step, such as all_reduce"
            )


def clip_grad_norm_(
    of: object, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    """Clip the gradients of parameters, or of all that the optimizer `of` holds."""
    if not max_norm > 0:
        raise ConfigurationError(f"max_norm must be > 0, got {max_norm}; use inf to measure the norm alone")
    clipping = getattr(of, "clipping", None)
    if isinstance(clipping, Clipping):
        return clipping.ask(list(clipping.flat.parameters), max_norm, norm_type, error_if_nonfinite)
    wanted = _tensors(of)
    held = {id(tensor) for tensor in wanted}
    for candidate in Clipping.live:
        if held & {id(p) for p in candidate.flat.parameters}:
            return candidate.ask(wanted, max_norm, norm_type, error_if_nonfinite)
    return clip_now(wanted, max_norm, norm_type, error_if_nonfinite, foreach)  # nobody combines them with others


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


class Watch:
    """Warns once where a script changes gradients after backward, though a strategy combines them in `step`."""

    def __init__(self, flat: FlatModule, strategy: Strategy):
        self._flat = flat
        self._strategy = strategy
        self._left = WATCHED
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}
        self._hooks: list[RemovableHandle] = []
        for index, parameter in enumerate(flat.parameters):
            hook = parameter.register_post_accumulate_grad_hook(self._note(index))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def check(self, allowed: int = 0) -> None:
        """A step begins; `allowed` times each gradient may have been changed since backward."""
        if not self._hooks:
            return
        changed = self._changes() > allowed * len(self._seen)
        self._seen.clear()
        self._left -= 1
        if changed:
            warnings.warn(
                f"gradients were changed between backward() and step(): {self._strategy} combines them in step(), so "
                f"that each worker's own gradient was changed and not the combined one; if they were clipped, use "
                f"flockstep.clip_grad_norm_(optimizer, max_norm), which clips the combined gradient",
                UserWarning,
                stacklevel=4,
            )
        if changed or not self._left:
            self.end()

    def end(self) -> None:
        """Look no longer."""
        while self._hooks:
            self._hooks.pop().remove()

    def _note(self, index: int) -> object:
        def accumulated(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._seen[index] = parameter.grad, parameter.grad._version

        return accumulated

    def _changes(self) -> int:
        """How many writes to gradients were not backward's; those in the flat array count their writes together."""
        shared, alone, last = 0, 0, 0
        for index, (gradient, version) in self._seen.items():
            now = self._flat.parameters[index].grad
            if now is not gradient:
                continue
            if self._flat.in_place(index):
                shared, last = max(shared, version), gradient._version
            else:
                alone += gradient._version - version
        return alone + last - shared
