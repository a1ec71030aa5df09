"""Clips the gradient that the optimizer uses in a script's own loop, as PyTorch's DDP does."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn.utils import clip_grad_norm_ as clip_now

from flockstep.errors import CompositionError, ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.runtime.node_spec import place_of_script
from flockstep.runtime.torch_shards import clip_shards
from flockstep.strategies.base import Strategy

SKIPPED = 3
"""Number of skipped steps in sequence, each with clipping, at which a script is told what the norm is meanwhile."""

Parameters = torch.Tensor | Iterable[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Clip:
    """One call of `clip_grad_norm_`, which is valid for one step."""

    parameters: list[torch.Tensor]
    max_norm: float
    norm_type: float
    strict: bool
    norm: torch.Tensor = field(default_factory=lambda: torch.tensor(float("nan")))
    """Norm of the combined gradient; NaN until the optimizer steps."""

    def check(self) -> None:
        """Raise the error that torch raises for a norm that is not finite, if the script has asked for the error."""
        if self.strict and not bool(torch.isfinite(self.norm)):
            raise RuntimeError(
                f"the total norm of order {self.norm_type} of the gradients is non-finite ({float(self.norm)}), so it "
                "cannot be clipped; to clip anyway, pass error_if_nonfinite=False"
            )


class Clipping:
    """Clipping that a script has requested by `clip_grad_norm_`, until the optimizer steps."""

    live: ClassVar[weakref.WeakSet[Clipping]] = weakref.WeakSet()
    """The `Clipping` of each distributed optimizer of this process."""

    def __init__(self, flat: FlatModule, strategy: Strategy, alone: bool):
        """`alone`: there is no other worker whose gradients would be combined with this worker's."""
        self.flat, self.strategy, self._alone = flat, strategy, alone
        self._asked: dict[tuple[object, ...], Clip] = {}
        """Calls since the previous step, by their parameters and arguments."""
        self._due: list[Clip] = []
        self._skipped = 0
        """Steps in sequence that the script has skipped after it had asked for clipping."""
        self.live.add(self)

    def ask(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float, strict: bool) -> torch.Tensor:
        """Clip now if each worker uses its own gradient; otherwise when the gradients have been combined."""
        traits = self.strategy.traits
        if self not in self.live or traits.clips == "own":  # the run is over, or gradients are not combined
            return self._clip_now(parameters, max_norm, norm_type, strict)
        if traits.clips == "none":
            raise CompositionError(
                f"{self.strategy} updates parts of the parameters on several nodes, and no node knows the norm of the "
                "whole gradient; use a strategy that updates all parameters on one node, such as all_reduce or bsp, "
                "or clip each worker's own gradient with torch.nn.utils.clip_grad_norm_"
            )
        whole = {id(p) for p in parameters} >= {id(p) for p in self.flat.trained.values()}
        if traits.server_optimizer and self.flat.sharded:
            raise CompositionError(
                f"a server of {self.strategy} holds one part of each replica, and does not know the norm of the whole "
                "gradient; use a strategy whose workers update the parameters, such as all_reduce"
            )
        if traits.server_optimizer and (not whole or float(norm_type) != 2.0 or strict):
            raise CompositionError(
                f"the server of {self.strategy} can clip only the Euclidean norm of the whole gradient, without an "
                f"error for non-finite norms, got {len(parameters)} of {len(self.flat.parameters)} parameters, "
                f"norm_type={norm_type}, error_if_nonfinite={strict}; use a strategy whose workers update the "
                "parameters, such as all_reduce"
            )
        clip = Clip(parameters, float(max_norm), float(norm_type), strict)
        call = (*map(id, parameters), max_norm, norm_type, strict)
        if call in self._asked:  # by a script that skips steps with the module's zero_grad
            self.skip()
        if self._alone:  # measured now, for scripts that read it; clipped in the step, as parts may be sent already
            if self.flat.sharded:
                clip.norm.copy_(clip_shards(self.flat, parameters, math.inf, norm_type))
            else:
                gradients = [p.grad for p in parameters if p.grad is not None]
                clip.norm.copy_(torch.nn.utils.get_total_norm(gradients, norm_type))
            clip.check()
        self._asked[call] = clip
        return clip.norm

    def _clip_now(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float, strict: bool
    ) -> torch.Tensor:
        """Clip the gradients as they are, of a DTensor over all of its processes; return the norm before clipping."""
        if not self.flat.sharded:
            return clip_now(parameters, max_norm, norm_type, error_if_nonfinite=strict)
        clip = Clip(parameters, max_norm, norm_type, strict, clip_shards(self.flat, parameters, max_norm, norm_type))
        clip.check()
        return clip.norm

    def skip(self) -> None:
        """Cancel the requested clipping, because the script skips the step."""
        self._skipped += bool(self._asked)
        if self._asked and self._skipped == SKIPPED:
            warnings.warn(
                f"the script has called flockstep.clip_grad_norm_ {SKIPPED} times without optimizer.step(): "
                "the norm that it returns is NaN until step(), so a condition on it, such as isfinite(norm), skips "
                "every step; decide after step(), or pass error_if_nonfinite=True",
                stacklevel=2,
            )
        self._asked.clear()

    def begin(self) -> None:
        """Start a step, to which all clipping applies that was requested since the previous step."""
        self._due, self._skipped = list(self._asked.values()), 0
        self._asked.clear()

    def apply(self) -> bool:
        """Clip the gradients that the optimizer is about to use; return whether the step may be taken."""
        if self.strategy.traits.clips == "combined":
            for clip in self._due:
                clip.norm.copy_(self._clip_now(clip.parameters, clip.max_norm, clip.norm_type, False))
            return not any(clip.strict and not bool(torch.isfinite(clip.norm)) for clip in self._due)
        return True

    def check(self) -> None:
        """Raise an error at the end of a step that was refused for its norm, as every other worker does."""
        if self.strategy.traits.clips == "combined":
            for clip in self._due:
                clip.check()

    @property
    def max_norm(self) -> float:
        """Norm to which a server clips the combined gradient of this step; 0 for no clipping."""
        return self._due[-1].max_norm if self._due else 0.0


def clip_grad_norm_(
    of: object, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """Clip the gradients that the optimizer uses, as `torch.nn.utils.clip_grad_norm_` does under PyTorch's DDP.

    Call `clip_grad_norm_` between `backward()` and `step()`. If the strategy combines gradients, the combined gradient
    is clipped in `step()`; otherwise each worker's own gradient is clipped at once. docs/explanation/strategies.md has
    the behavior of each strategy.

    Args:
        of: the optimizer returned by `distribute`, or parameters.
        max_norm: largest norm after clipping.
        norm_type: order of the norm; inf for the largest magnitude.
        error_if_nonfinite: raise torch's RuntimeError, in `step()` if gradients are combined, if the norm is not
            finite.
        foreach: use torch's implementation for lists of tensors; None lets torch choose.

    Returns:
        The norm before clipping. With several workers, the norm of a combined gradient is NaN until `step()` has
        computed it, and stays NaN if a server clips.

    Raises:
        CompositionError: no node of the strategy holds the whole combined gradient, or the server cannot clip in this
            way.
        ConfigurationError: `max_norm` is not > 0, or `of` is neither an optimizer nor parameters.
        MissingDependency: PyTorch is not installed.
    """
    if not max_norm > 0:
        raise ConfigurationError(f"max_norm must be > 0, got {max_norm}; use inf to compute the norm without clipping")
    if isinstance(clipping := getattr(of, "clipping", None), Clipping):
        return clipping.ask(list(clipping.flat.trained.values()), max_norm, norm_type, error_if_nonfinite)
    if isinstance(of, torch.optim.Optimizer):
        of = [p for group in of.param_groups for p in group["params"]]
    given = list(of) if isinstance(of, Iterable) and not isinstance(of, torch.Tensor) else [of]
    wanted = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
    if len(wanted) != len(given):
        raise ConfigurationError(
            f"clip_grad_norm_ takes an optimizer or parameters, got {type(of).__name__}; use the optimizer that "
            "flockstep.distribute returned"
        )
    held = set(map(id, wanted))
    for candidate in Clipping.live:
        if not held.isdisjoint(map(id, candidate.flat.trained.values())):
            return candidate.ask(wanted, max_norm, norm_type, error_if_nonfinite)
    return clip_now(wanted, max_norm, norm_type, error_if_nonfinite, foreach)  # of one worker alone


def clip_values(parameters: Parameters, limit: float, strategy: Strategy) -> None:
    """Clip each gradient element; raise `CompositionError` if the strategy combines gradients afterwards."""
    if place_of_script()[1] > 1 and strategy.traits.clips != "own":
        raise CompositionError(
            f"{strategy} combines gradients in step(), so clipping values before step() would not clip the combined "
            f"gradient; clip by norm instead"
        )
    torch.nn.utils.clip_grad_value_(parameters, limit)
