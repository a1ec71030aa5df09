"""The state of a script's process whose replica is held by another number of processes than before."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from flockstep.arrays.namespace import is_tensor, zeros
from flockstep.arrays.schema import Entry, FlatArray
from flockstep.errors import ConfigurationError, SchemaMismatch
from flockstep.frameworks.shard_layout import ShardLayout
from flockstep.runtime.cut import Cut


def why_not_resharded(cut: Cut) -> str:
    """Return why the state of a process cannot be distributed over another number of processes, as the end of a
    sentence; empty if it can: every array has an element for each element of the model, or a single one.
    """
    content, found = cut.at_boundary, list[str]()

    def look(array: FlatArray) -> FlatArray:
        if not _spans(array, content.layout) and math.prod(array.shape) > 1:
            found.append(f"its workers keep an array of shape {tuple(array.shape)}, whose elements are no parameters'")
        return array

    _with_arrays(_elementwise(cut), look, content.layout, content.layout)
    for index, one in zip(content.layout.order, content.states, strict=False):
        for name, value in one.items():
            single = index < 0 or math.prod(getattr(value, "shape", ())) <= 1
            if not single and not _belongs(value, content.layout.schema.entries[index]):
                found.append(f"{content.kind} keeps {name} of shape {tuple(value.shape)}, which is not the parameter's")
    return found[0] if found else ""


def resharded(parts: Iterable[Cut], own: ShardLayout) -> Cut:
    """Return the state of a process that holds the elements of `own`, from the states of all processes that held the
    replica, of which one at a time is in memory; see `why_not_resharded`. What belongs to no element is taken from the
    first of them.

    Raises:
        ConfigurationError: the script's model is another one.
    """
    made = None
    covered = np.zeros(own.schema.size, bool)
    for part in parts:
        of = part.at_boundary.layout
        try:
            own.copy(covered, np.ones(of.schema.size, bool), of)
        except SchemaMismatch as error:
            raise ConfigurationError(
                f"the script's model differs from the model of the checkpoint: {error}; restore the script as it was"
            ) from None
        made = _Resharding(part, of, own) if made is None else made
        made.take(part, of)
    if made is None or not covered.all():
        raise ConfigurationError(
            "the checkpoint holds only some of the shards of the model; delete it to resume from the one before"
        )
    return made.cut


class _Resharding:
    """The state of a process, `cut`, which takes its elements from the states of others."""

    def __init__(self, first: Cut, of: ShardLayout, own: ShardLayout):
        self._own = own
        self._targets: list[FlatArray] = []

        def target(array: FlatArray) -> FlatArray:
            if not _spans(array, of):
                return array
            self._targets.append(zeros(array, *array.shape[:-1], own.schema.size))
            return self._targets[-1]

        params, state, optimizer = _with_arrays(_elementwise(first), target, of, own)
        states: list[dict[str, Any]] = [{} for _ in first.at_boundary.states]
        again = dataclasses.replace(first.at_boundary, schema=own.schema, layout=own, states=states)
        self.cut = msgspec.structs.replace(first, params=params, state=state, optimizer=optimizer, at_boundary=again)

    def take(self, part: Cut, of: ShardLayout) -> None:
        """Take the elements that a process has held."""
        targets = iter(self._targets)

        def taken(array: FlatArray) -> FlatArray:
            if _spans(array, of):
                self._own.copy(next(targets), array, of)
            return array

        _with_arrays(_elementwise(part), taken, of, of)
        pieces = {mine.name: piece for mine, *piece in self._own.pieces(of)}
        states = zip(self._own.order, of.order, self.cut.at_boundary.states, part.at_boundary.states, strict=False)
        for index, there, one, given in states:
            if index < 0 or there < 0:
                continue
            mine = self._own.schema.entries[index]
            for name, value in given.items():
                if not _belongs(value, of.schema.entries[there]):
                    one.setdefault(name, value)
                    continue
                target = one.setdefault(name, zeros(value, *mine.shape))
                if mine.name in pieces:
                    own, _, theirs = pieces[mine.name]
                    target[own] = value[theirs]


def _elementwise(cut: Cut) -> list[Any]:
    return [cut.params, cut.state, cut.optimizer]


def _spans(array: FlatArray, of: ShardLayout) -> bool:
    """Whether an array has one element, or one column, for each element that a process holds."""
    return tuple(array.shape[-1:]) == (of.schema.size,)


def _belongs(value: Any, entry: Entry) -> bool:
    """Whether a value has one element for each element of a process's part of a parameter."""
    return is_tensor(value) and value.ndim > 0 and tuple(value.shape) == entry.shape


def _with_arrays(value: Any, change: Callable[[FlatArray], FlatArray], of: ShardLayout, own: ShardLayout) -> Any:
    """Return a copy of a value of containers and data classes with `change(array)` in place of each array."""

    def again(one: Any) -> Any:
        return _with_arrays(one, change, of, own)

    if isinstance(value, np.ndarray) or is_tensor(value):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)({key: again(one) for key, one in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and value and value == of.schema.slices:
        return own.schema.slices
    if isinstance(value, deque):
        return deque(map(again, value), value.maxlen)
    if isinstance(value, list | tuple):
        return type(value)(map(again, value)) if type(value) in (list, tuple) else type(value)(*map(again, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(made, field.name, again(getattr(value, field.name)))
        return made
    return value
