"""The hyper-parameters of a strategy and its components that a search varies, and their ranges."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from flockstep.expression import WORKERS, Component, fields_of, ranges

C = TypeVar("C", bound=Component)
FACTOR = 8.0
"""Factor by which a search varies the learning rate above and below the job's learning rate."""


@dataclass(frozen=True)
class Knob:
    """A hyper-parameter of a strategy: its path, its current value, and its range."""

    path: tuple[str, ...]
    value: float
    low: float
    high: float
    whole: bool
    log: bool

    @property
    def name(self) -> str:
        """Dotted path of the hyper-parameter, for example `consistency.s`."""
        return ".".join(self.path)


def knobs(part: Component, workers: int, path: tuple[str, ...] = ()) -> Iterator[Knob]:
    """Return the searched hyper-parameters of a component and of the components in it, outermost first.

    Ranges are widened to contain current values.
    """
    for name, one in ranges(type(part)).items():
        value = getattr(part, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        high = workers if one.high == WORKERS else one.high
        ends = min(one.low, value), max(high, value)
        yield Knob((*path, name), value, *ends, one.whole, one.log and ends[0] > 0)
    for name in fields_of(type(part)):
        value = getattr(part, name)
        if isinstance(value, Component):
            yield from knobs(value, workers, (*path, name))


def learning_rate(lr: float) -> Knob:
    """Return the learning rate of the job's optimizer as a hyper-parameter."""
    return Knob(("lr",), lr, lr / FACTOR, lr * FACTOR, whole=False, log=True)


def changed(part: C, path: tuple[str, ...], value: Any) -> C:
    """Return a copy of the component with another value at `path`.

    Raises:
        ConfigurationError: the value is not allowed.
    """
    name, *rest = path
    inner = changed(getattr(part, name), tuple(rest), value) if rest else value
    return dataclasses.replace(part, **{name: inner})  # type: ignore[type-var]
