"""What share of the time workers compute that meet periodically."""

from __future__ import annotations

from flockstep.errors import ConfigurationError

ONE_TO_FIVE = 5 / 6
"""Communication for a fifth of the time of computation (Langer et al. 2020, section 3.3.2)."""


def periodic(period: float, compute: float, communication: float) -> float:
    """τ T_c / (τ T_c + T_comm): steps of `compute` seconds, `communication` seconds after every `period` of them."""
    busy = period * compute
    return busy / (busy + communication) if busy + communication else 1.0


def period_for(utilisation: float, compute: float, communication: float) -> float:
    """τ with which workers compute for that share of the time: u/(1-u) · T_comm/T_c; not rounded.

    Raises:
        ConfigurationError: the share is not in [0, 1), or gradients take no time.
    """
    if not 0 <= utilisation < 1 or not compute > 0 or communication < 0:
        raise ConfigurationError(
            f"a period is found for a utilisation in [0, 1), seconds > 0 a gradient and >= 0 of communication, got "
            f"{utilisation}, {compute} and {communication}; use 0.833 for five parts of computing to one"
        )
    return utilisation / (1 - utilisation) * communication / compute
