"""Checks of arguments that the functions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from flockstep.errors import ConfigurationError

T = TypeVar("T")


def listed(name: str, values: Sequence[T]) -> tuple[T, ...]:
    """The values of an argument that is a list; a text, which Python would read letter by letter, is refused.

    Raises:
        ConfigurationError: `values` is one text.
    """
    if isinstance(values, str):
        raise ConfigurationError(f"{name} must be a list, got {values!r}; write [{values!r}]")
    return tuple(values)
