"""A script's part in the checkpoints of its run: `flockstep.checkpoint` and `flockstep.resumed`.

A worker's program stops at the top of its loop, which it reaches inside `optimizer.step()`, where its state is copied.
The script completes the copy at its next call of `flockstep.checkpoint` with the state of the script at this call:
random streams, settings of the optimizer that a scheduler changes, buffers, and the values that the script itself has
to restore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import zip_longest
from typing import Any, Protocol

from flockstep.errors import ConfigurationError
from flockstep.runtime.checkpoints import NodeCheckpoints
from flockstep.runtime.cut import Cut
from flockstep.runtime.state import to_arrays, to_bytes

Extra = Mapping[str, Any]
SHOWN = 60
"""Largest number of characters of a value in an error message."""


class _Nothing:
    """Stands for a value that one of two collections does not have."""

    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


class Keeper(Protocol):
    """Saves and restores the state of a framework's objects in a script."""

    @property
    def refusal(self) -> str:
        """Reason why the script cannot be stopped between two steps; empty if it can be stopped."""

    def at_boundary(self) -> Any:
        """Return the state of the optimizer at the point where the worker's program has stopped; arrays are not
        copied.
        """

    def between_steps(self) -> Any:
        """Return all that the script may change between two steps: settings, buffers and random streams; arrays are not
        copied.
        """

    def restore_at_boundary(self, kept: Any) -> None:
        """Restore the optimizer's state that `at_boundary` returned; raise `ConfigurationError` if the state belongs to
        another model.
        """

    def restore_between_steps(self, kept: Any, random: bool) -> None:
        """Restore settings and buffers that `between_steps` returned; restore the random streams only if `random` is
        set.
        """


class ScriptCheckpoints:
    """The calls of `flockstep.checkpoint` and `flockstep.resumed` in a worker's script."""

    may_stop = False

    def __init__(self, checkpoints: NodeCheckpoints, keeper: Keeper, kept: Cut | None):
        """`kept`: the state from which the run goes on; None if it begins at its start."""
        self._checkpoints, self._keeper, self._kept = checkpoints, keeper, kept
        self._asked = self._begun = False
        """Whether the script has called `resumed`, and `checkpoint`."""
        self._steps = 0
        """Steps since the last call of `checkpoint`."""
        self.on_begin: Callable[[], None] = lambda: None
        """Function that the first call of `checkpoint` calls."""
        checkpoints.script = self

    def at_boundary(self) -> Any:
        """Return the state of the script's optimizer at the point where the worker's program has stopped; arrays are
        not copied.
        """
        return self._keeper.at_boundary()

    def resumed(self) -> dict[str, Any] | None:
        """Return the values that the script passed to `flockstep.checkpoint` when the checkpoint was taken; None in a
        run that was not resumed.
        """
        self._asked = True
        return None if self._kept is None else deepcopy(self._kept.script["extra"])

    def checkpoint(self, extra: Extra | Callable[[], Extra]) -> None:
        """Add the script's part to the copy of the worker's state, if the previous step made a copy.

        Raises:
            ConfigurationError: see `flockstep.checkpoint`.
        """
        if self._keeper.refusal:
            raise ConfigurationError(self._keeper.refusal)
        if not self._begun:
            self._begin(_values(extra))
        elif self._checkpoints.copied:
            self._complete(extra)
        self._steps = 0

    def before_step(self) -> None:
        """Check, at the start of a script's step, that the script calls `checkpoint` as required.

        Raises:
            ConfigurationError: the script has not called `checkpoint` since its last step.
        """
        self._require_begun("the script takes its first step")
        if self._begun and self._steps:
            raise ConfigurationError(
                "flockstep.checkpoint must be called once for every step, got two steps without a call between them; "
                "call it at the top of the body of the loop over batches"
            )
        self._steps += 1

    def before_restart(self) -> None:
        """Check that a script may continue from a model that it has loaded, and discard an incomplete copy of the
        state.

        Raises:
            ConfigurationError: the model of the checkpoint would be lost.
        """
        self._require_begun("optimizer.sync() replaces the model of the checkpoint")
        self._checkpoints.drop("the script has loaded another model since its last step")

    def _require_begun(self, what: str) -> None:
        if self._kept is not None and not self._begun:
            raise ConfigurationError(
                f"in a resumed run the script must call flockstep.checkpoint before {what}; run code for "
                "the first start only if flockstep.resumed() is None"
            )

    def _begin(self, extra: Extra) -> None:
        """The first call: a resumed run is where it was when the checkpoint was taken."""
        if not self._asked:
            raise ConfigurationError(
                "flockstep.checkpoint needs a script that can continue where it stopped; call flockstep.resumed() "
                "before the "
                "loop, and restore the values that it returns"
            )
        now = _encoded(extra)
        if self._kept is not None:
            kept = self._kept.script["extra"]
            before = _encoded(kept)
            if self._kept.mailbox is None:  # another number of workers may count batches in another way
                before = {name: now.get(name, one) for name, one in before.items()}
            for name in [*before, *now]:
                if before.get(name) != now.get(name):
                    part, got, wanted = _difference(extra.get(name, _NOTHING), kept.get(name, _NOTHING))
                    raise ConfigurationError(
                        f"extra[{name!r}]{part} of flockstep.checkpoint must be what it was when the checkpoint was "
                        f"taken, got {got} in place of {wanted}; restore extra[{name!r}] from flockstep.resumed() "
                        "before the loop, or leave it out of extra"
                    )
            self._keeper.restore_between_steps(self._kept.script["between_steps"], random=not self._kept.joins)
            self._kept.script = None
        self._begun = self.may_stop = True
        self._checkpoints.offer()
        self.on_begin()

    def _complete(self, extra: Extra | Callable[[], Extra]) -> None:
        try:
            arrays = to_arrays({"between_steps": self._keeper.between_steps(), "extra": dict(_values(extra))})
        except ConfigurationError as error:
            self._checkpoints.drop(str(error))
        else:
            self._checkpoints.complete(arrays)


def _values(extra: Extra | Callable[[], Extra]) -> Extra:
    values: Any = extra() if callable(extra) else extra
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ConfigurationError(
            f"extra must be a dict of names and values, or a function that returns one, got {type(values).__name__}; "
            'pass for example extra={"epoch": epoch, "batch": batch}'
        )
    return values


def _encoded(extra: Extra) -> dict[str, bytes]:
    """Name → the value as bytes, equal for equal values only."""
    return {name: to_bytes(value, f"extra[{name!r}]") for name, value in extra.items()}


def _difference(now: Any, kept: Any) -> tuple[str, str, str]:
    """Where two values first differ, as the keys that lead there, and what each has there."""
    for key, ours, theirs in _parts(now, kept):
        if ours is _NOTHING or theirs is _NOTHING or to_bytes(ours) != to_bytes(theirs):
            part, got, wanted = _difference(ours, theirs)
            return f"[{key!r}]{part}", got, wanted
    return "", *_shown(repr(now), repr(kept))


def _parts(now: Any, kept: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Key, and the two values, of each part of two dicts, two lists or two tuples."""
    if isinstance(now, Mapping) and isinstance(kept, Mapping):
        for key in dict.fromkeys((*kept, *now)):
            yield key, now.get(key, _NOTHING), kept.get(key, _NOTHING)
    elif type(now) is type(kept) and isinstance(now, list | tuple):
        for index, (ours, theirs) in enumerate(zip_longest(now, kept, fillvalue=_NOTHING)):
            yield index, ours, theirs


def _shown(now: str, kept: str) -> tuple[str, str]:
    """Two different values for an error message: long ones from shortly before their first difference."""
    if now == kept:  # of large arrays, whose middle is left out
        return "other elements", _cut(kept, 0)
    if max(len(now), len(kept)) <= SHOWN:
        return now, kept
    same = next((place for place, pair in enumerate(zip(now, kept, strict=False)) if len(set(pair)) > 1), 0)
    start = max(0, same - SHOWN // 3)
    return _cut(now, start), _cut(kept, start)


def _cut(text: str, start: int) -> str:
    """At most `SHOWN` characters of a text from `start` on."""
    part = text[start : start + SHOWN]
    return "..." * (start > 0) + part + "..." * (start + SHOWN < len(text))
