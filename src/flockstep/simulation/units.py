"""Reads bandwidths and durations written as text: "100mbit", "12.5MB/s", "50us"."""

from __future__ import annotations

import math
import re

from flockstep.errors import ConfigurationError

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+\.)\s*(\S*)\s*")

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BYTES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}

_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0}


def bandwidth(value: str | float, name: str = "bandwidth") -> float:
    """Convert a bandwidth to bytes per second; a plain number is already in bytes per second.

    Bits: "100mbit", "1gbit", "10Gbit/s", "10gbps" (any case). Bytes: "12.5MB/s", "1GiB/s" (capital B).

    Raises:
        ConfigurationError: the value is not a bandwidth or not positive; the message calls it `name`.
    """
    number, unit = _split(value)
    scale = _bandwidth_scale(unit)
    if number is None or scale is None or not number * scale > 0:
        raise ConfigurationError(
            f"{name} must be a number of bytes per second > 0, or text with a unit, got {value!r}; "
            "write '100mbit', '1gbit' or '12.5MB/s'"
        )
    return number * scale


def duration(value: str | float, name: str = "duration") -> float:
    """Convert a duration to seconds; a plain number is already in seconds. Units: ns, us, ms, s, min.

    Raises:
        ConfigurationError: the value is not a duration, infinite, or negative; the message calls it `name`.
    """
    number, unit = _split(value)
    scale = _SECONDS.get(unit)
    if number is None or scale is None or not 0 <= number < math.inf:
        raise ConfigurationError(
            f"{name} must be a finite number of seconds >= 0, or text with a unit, got {value!r}; "
            "write '50us', '1ms' or '0.2s'"
        )
    return number * scale


def with_unit(text: str, name: str, example: str) -> str:
    """Return `text` if it is a quantity with a unit.

    Raises:
        ConfigurationError: `text` has no unit; the message calls it `name` and shows `example`.
    """
    number, unit = _split(text)
    if number is not None and not unit:
        raise ConfigurationError(f"{name} must have a unit, got {text!r}; write it like {example!r}")
    return text


def _split(value: object) -> tuple[float | None, str]:
    """Split text into number and unit; the number is None if there is none."""
    if not isinstance(value, str):
        return (float(value), "") if isinstance(value, (int, float)) and not isinstance(value, bool) else (None, "")
    found = _NUMBER.fullmatch(value)
    return (float(found[1]), found[2]) if found else (None, "")


def _bandwidth_scale(unit: str) -> float | None:
    """Bytes per second of one `unit`; None if the unit is ambiguous, as "mb/s", which names neither bits nor bytes."""
    if not unit:
        return 1.0
    if unit.endswith("B/s"):
        return _BYTES.get(unit[:-3])
    word = unit.lower().removesuffix("/s")
    prefix = word.removesuffix("bps") if word.endswith("bps") else word.removesuffix("bit")
    bits = _BITS.get(prefix) if prefix != word else None
    return None if bits is None else bits / 8.0
