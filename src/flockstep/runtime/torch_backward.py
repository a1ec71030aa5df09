"""Watches backward passes: passes parts of the gradient to the strategy as soon as torch has computed them, and finds
changes that a script makes to gradients between the backward pass and `step`.
"""

from __future__ import annotations

import warnings

import torch
from torch.utils.hooks import RemovableHandle

from flockstep.arrays.kernels.torch_basics import as_bytes
from flockstep.arrays.namespace import as_tensor
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule, on_gradients
from flockstep.runtime.loop import Loop
from flockstep.strategies.base import Strategy

SENT = 1 << 16
"""Number of elements, at equal distances, that are compared in each part of a gradient."""
WATCHED = 10
"""Number of first steps in which a gradient that changes between backward pass and step is detected."""


class BackwardHooks:
    """Watches the backward pass for a strategy that requests the gradient in parts, from the end of the flat array.

    As soon as every parameter of the awaited part has its gradient, the part is passed to the strategy, from within the
    backward pass and without waiting; messages that have arrived are handled. The last part, and parts delayed by a
    parameter without a gradient, are left to `optimizer.step()`. For other strategies no hook is registered.

    A script that changes its gradients after a part of them was passed on is refused; a strategy that takes parts
    tentatively is told instead, and uses the gradients of `optimizer.step()`.
    """

    def __init__(self, flat: FlatModule, loop: Loop):
        self._flat, self._loop = flat, loop
        loop.know_finite(lambda: flat.left)
        self._hooks: list[RemovableHandle] = []
        self._offsets = [entry.offset for entry in flat.schema.entries]
        self.handed_from = flat.schema.size
        """First element of the part of this gradient that the strategy has used."""
        self.handed = False
        """Whether a part of this gradient has been passed to the strategy."""
        self._revised = False
        """Whether the script has changed a part since; nothing more is passed on before `step()`."""
        self._version = 0
        self.paused = False
        """Whether backward passes only accumulate gradients, inside `no_sync`."""
        self.begin()

    def begin(self) -> None:
        """Start to watch the next backward pass."""
        if self._loop.awaited and not self._hooks:
            self._hooks = on_gradients(self._flat.parameters, self._completed)
        if self._hooks:
            self._sent: list[tuple[int, int, torch.Tensor]] = []
            """Begin and end of each part that was passed on, and some of its bytes, because torch does not count
            writes through `.data` and numpy."""
            self._complete = [False] * len(self._offsets)
            self._next = len(self._offsets) - 1
            self.handed_from, self.handed, self._revised = self._flat.schema.size, False, False

    def check(self) -> None:
        """Raise `ConfigurationError` if the script has changed a part that the strategy has used."""
        if not self.handed or self._revised:
            return
        gone = range(self._next + 1, len(self._offsets))
        counted = self._flat.gradient_version != self._version or not all(map(self._flat.in_place, gone))
        if counted or not all(torch.equal(self._bytes(start, stop), kept) for start, stop, kept in self._sent):
            self.revise(
                "gradients were changed between backward() and step(), after bucketed had sent part of the "
                "gradients; clip with flockstep.clip_grad_norm_(optimizer, max_norm), or use all_reduce, which reads "
                "the gradients in step()"
            )

    def revise(self, refusal: str) -> None:
        """Tell the strategy that gradients have changed after it may have received parts of them; raise
        `ConfigurationError` with the message `refusal` if it cannot take a part back.
        """
        if self._loop.tentative:
            self._loop.revise()
            self._revised, self.handed_from = True, self._flat.schema.size
        elif self.handed:
            raise ConfigurationError(refusal)

    def skip(self) -> None:
        """Start to watch the next backward pass, because the script takes no step with the current gradient; raise
        `ConfigurationError` if other workers wait for the rest of it.
        """
        if self.handed:
            raise ConfigurationError(
                f"a gradient overflowed under GradScaler after {self._loop.strategy} had sent part of the gradients; "
                "use the scaler from the first step on"
            )
        self.begin()

    def end(self) -> None:
        """Remove the hooks because the run has ended."""
        while self._hooks:
            self._hooks.pop().remove()

    def _bytes(self, start: int, stop: int) -> torch.Tensor:
        """A copy of some of the gradient elements start to stop-1."""
        step = max(1, (stop - start) // SENT)
        parts = as_tensor(self._flat.grads[start:stop]), *self._flat.narrow_within(start, stop)
        return torch.cat([as_bytes(part[::step]) for part in parts])

    def _completed(self, index: int, parameter: torch.Tensor) -> None:
        """Handle a parameter that has received its gradient."""
        loop, entry = self._loop, self._flat.schema.entries[index]
        if entry.offset + entry.size > self.handed_from:
            self.revise(
                f"{entry.name} got a second gradient before step(), after bucketed had sent the first gradient; put "
                "every backward() except the last before step() into 'with optimizer.no_sync():', and for a layer that "
                "runs twice under torch.utils.checkpoint pass use_reentrant=False, or use all_reduce, which reads the "
                "gradients in step()"
            )
        graph = parameter.grad is not None and parameter.grad.requires_grad  # for a gradient of the gradient
        if self.paused or self._revised or graph:
            loop.listen()
            return
        self._flat.gather_gradient(index)
        self._complete[index] = True
        while self._next >= 0 and self._complete[self._next]:
            self._next -= 1
        reached = self._offsets[self._next + 1] if self._next + 1 < len(self._offsets) else self.handed_from
        while 0 < loop.awaited < self.handed_from and reached <= loop.awaited:
            self._flat.clear_signs(loop.awaited, self.handed_from)
            self._sent.append((loop.awaited, self.handed_from, self._bytes(loop.awaited, self.handed_from)))
            self.handed_from, self.handed = loop.awaited, True
            loop.hand_over()
        loop.listen()
        self._version = self._flat.gradient_version


class GradientChangeDetector:
    """Warns once if a script changes gradients between backward and `step`, where the strategy combines them."""

    def __init__(self, flat: FlatModule, strategy: Strategy, combined: bool):
        """`combined`: the strategy combines gradients; otherwise a change is as good as in plain torch."""
        self._flat, self._strategy, self._left = flat, strategy, WATCHED
        self._seen = set[int]()
        """Indices of the parameters that backward has given a gradient."""
        self._version = 0
        """Torch's count of writes to the gradients, after the last gradient of backward."""
        self._hooks = on_gradients(flat.parameters, self._note)
        if not combined:
            self.end()

    def check(self, allowed: int = 0) -> bool:
        """Look for changed gradients at the start of a step, and return whether there are any.

        Each gradient may have been changed `allowed` times since backward.
        """
        if not self._hooks:
            return False
        parameters = self._flat.parameters
        replaced = any(parameters[i].grad is not None and not self._flat.in_place(i) for i in self._seen)
        written = bool(self._seen) and self._flat.gradient_version - self._version > allowed * len(self._seen)
        self._seen.clear()
        self._left -= 1
        if replaced or written:
            warnings.warn(
                f"gradients were changed between backward() and step(), but {self._strategy} combines the gradients "
                "in step(), so the change affected only each worker's own gradient; if the gradients were clipped, "
                "use flockstep.clip_grad_norm_(optimizer, max_norm), which clips the combined gradient",
                UserWarning,
                stacklevel=4,
            )
        if replaced or written or not self._left:
            self.end()
        return replaced or written

    def end(self) -> None:
        """Stop looking for changed gradients, for which each gradient lies in its place as soon as it is computed."""
        while self._hooks:
            self._hooks.pop().remove()
        self._flat.gather_at_once()

    def _note(self, index: int, parameter: torch.Tensor) -> None:
        if self._flat.in_place(index):  # not if the script computes a gradient of the gradient
            self._seen.add(index)
            self._version = self._flat.gradient_version
