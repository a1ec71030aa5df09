"""Claim: codecs have the declared mean, variance and contraction, and error feedback loses no part of a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from flockstep import registry
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec
from flockstep.codecs.damped import Damped
from flockstep.codecs.natural import Natural
from flockstep.codecs.qsgd import Qsgd
from flockstep.codecs.random_subset import RandomK
from flockstep.codecs.top import TopK
from flockstep.errors import FlockstepError
from flockstep.feedback.residual import Residual
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, bounded

SIZE = 256
"""Number of elements of the encoded arrays."""
SIGMAS = 4.0
STEPS = 300
"""Number of steps in the runs with error feedback."""

Channel = Callable[[FlatArray, np.random.Generator], FlatArray]
"""Function from (array, random generator) to the array that a receiver decodes."""


class Moments(NamedTuple):
    """Statistics of many encodings C(x) of one array x.

    `off` is the largest deviation of an element's mean from x, in standard errors; `error` is the mean of ||x -
    C(x)||² / ||x||², and `uncertainty` its standard error.
    """

    off: float
    error: float
    uncertainty: float


@dataclass(frozen=True)
class CodecErrors(Claim):
    """Claim: every registered codec has its declared mean, variance and contraction, in several settings."""

    draws: int = 100_000
    arrays: int = 10_000
    statement = (
        "Unbiased codecs have the declared mean and variance; contractions reduce the error as declared, top-k to 1 "
        "- k/d; with error feedback every element is sent eventually, and the stored error stays bounded"
    )
    source = (
        "Alistarh et al. 2017, lemma 3.1 (QSGD); Wen et al. 2017 (TernGrad); Horvath et al. 2019 (natural); Stich, "
        "Cordonnier & Jaggi 2018, section 2 (top-k, random-k); Karimireddy et al. 2019, lemma 3 (error feedback)"
    )
    setting = (
        "every codec of the registry with its defaults, with each switch toggled, and with each number set to 1 and "
        f"to infinity; {SIZE} elements; 100,000 draws if the codec is random, otherwise 10,000 arrays; error "
        f"feedback: {STEPS} steps"
    )
    tolerance = (
        f"means of all elements within {SIGMAS:.0f} standard errors; mean squared errors at most {SIGMAS:.0f} "
        "standard errors above the bound; controls: decoded values that are one percent too small, and a codec "
        "without its damping, fail the check"
    )

    def check(self, say: Say) -> Verdict:
        """Encode and decode many times with each codec; check the means, the squared errors, and the errors stored by
        feedback.
        """
        rows: list[ClaimRow] = []
        for name in registry.names("codec"):
            lossy = [codec for codec in settings(name) if not codec.lossless]
            contracting: list[tuple[float, Codec]] = []
            for codec in lossy:
                wanted = codec.unbiased or codec.contraction
                moments = self._moments(channel(codec)) if wanted and draws(codec) else None
                if codec.unbiased:
                    assert moments is not None
                    rows += unbiased_rows(codec, moments)
                if codec.contraction:
                    contracting.append((self._contraction(codec, moments), codec))
            if contracting:
                ratio, worst = max(contracting, key=lambda each: each[0])
                rows.append(bounded(f"{worst}: ||x - C(x)||² ÷ declared bound", "<= 1", ratio))
            for codec in [codec for codec in lossy if codec.contraction or codec.unbiased][:1]:
                rows += feedback_rows(codec)
            say(f"{name}: {len(lossy)} settings, {len(contracting)} of them contractions")
        return Verdict((*rows, *self._controls()))

    def _contraction(self, codec: Codec, moments: Moments | None) -> float:
        """Squared error over its bound; for a random codec, the mean minus four standard errors."""
        if moments is not None:
            return (moments.error - SIGMAS * moments.uncertainty) * _squared(example()) / bound(codec, example())
        random, through, worst = np.random.default_rng(21), channel(codec), 0.0
        for index in range(self.arrays):
            # Light and heavy tails; every tenth array has few nonzero elements.
            array = random.standard_t(1 + 5 * (index % 3), SIZE).astype(np.float32)
            if index % 10 == 9:
                array[random.random(SIZE) < 0.95] = 0
            allowed = bound(codec, array) + 1e-6 * _squared(array)  # rounding of float32
            worst = max(worst, _squared(array - through(array, random)) / allowed)
        return worst

    def _moments(self, through: Channel) -> Moments:
        random, array = np.random.default_rng(20), example()
        total, squares, errors = np.zeros(SIZE), np.zeros(SIZE), np.empty(self.draws)
        for draw in range(self.draws):
            off = np.subtract(through(array, random), array, dtype=np.float64)
            total += off
            off *= off
            squares += off
            errors[draw] = off.sum()
        mean = total / self.draws
        spread = np.sqrt(np.maximum(squares / self.draws - mean**2, 0) / self.draws)
        # An element that was hardly ever rounded to the other side shows no variance.
        spread = np.maximum(spread, 0.1 * np.sqrt(np.mean(spread**2)))
        errors /= _squared(array)
        off = np.abs(mean) / (spread + 1e-7 * np.abs(array))  # rounding of float32
        return Moments(float(off.max()), float(errors.mean()), float(errors.std() / self.draws**0.5))

    def _controls(self) -> list[ClaimRow]:
        """Negative controls: errors that the checks must detect."""
        codec = Qsgd(levels=4)
        short = self._moments(lambda array, random: channel(codec)(array, random) * np.float32(0.99))
        bare = self._moments(channel(Qsgd(levels=1)))
        return [
            bounded(
                f"control: {codec}, with decoded values one percent too small: |mean - x| in standard errors",
                f"> {SIGMAS:.0f}",
                short.off,
            ),
            bounded("control: qsgd(levels=1) without damping: ||x - C(x)||² / ||x||²", "> 1", bare.error),
        ]


def example() -> FlatArray:
    """Return the array that is encoded many times: normally distributed values, each moved away from zero by 0.1.

    Values near zero would be sent too rarely to measure their mean.
    """
    x = np.random.default_rng(20).normal(size=SIZE)
    return (x + np.copysign(0.1, x)).astype(np.float32)


def draws(codec: Codec) -> bool:
    """Whether the codec encodes at random, so that two encodings of one array differ."""
    random = np.random.default_rng(0)
    return len({codec.encode(example(), random).tobytes() for _ in range(4)}) > 1


def unbiased_rows(codec: Codec, moments: Moments) -> list[ClaimRow]:
    """Return the rows on an unbiased codec: its mean, its variance, and the variance bound that the paper publishes."""
    omega, paper = codec.variance(SIZE), published(codec)
    assert omega is not None
    low = moments.error - SIGMAS * moments.uncertainty
    return [
        bounded(f"{codec}: |mean - x| in standard errors", f"<= {SIGMAS:.0f}", moments.off),
        ClaimRow(f"{codec}: variance", f"<= {omega if paper is None else paper:.4g}", moments.error, low <= omega),
        *([] if paper is None else [ClaimRow(f"{codec}: declared variance", paper, omega, math.isclose(paper, omega))]),
    ]


def settings(name: str) -> Iterator[Codec]:
    """Yield a codec with its defaults, then with one parameter changed at a time: switches toggled, numbers set to 1
    and to infinity.
    """
    usual = Codec.parse(name)
    yield usual
    for each in fields(usual):  # type: ignore[arg-type]  # every registered codec is a dataclass
        value = getattr(usual, each.name)
        others: tuple[Any, ...] = ()
        if isinstance(value, bool):
            others = (not value,)
        elif isinstance(value, int | float):
            others = (type(value)(1), *([math.inf] if isinstance(value, float) else []))
        for other in others:
            try:
                yield replace(usual, **{each.name: other})  # type: ignore[type-var]
            except FlockstepError:
                continue


def channel(codec: Codec) -> Channel:
    """Return a function that encodes an array with `codec`, decodes the encoding and returns the decoded array."""
    return lambda array, random: codec.decode(codec.encode(array, random), len(array), array.dtype.name)


def published(codec: Codec) -> float | None:
    """Return the published ω of a codec C, the bound in E||x - C(x)||² ≤ ω ||x||²; None if no paper gives a bound."""
    match codec:
        case Qsgd(levels=s, bucket=bucket):
            d = float(min(SIZE, bucket))
            return min(d / s**2, math.sqrt(d) / s)
        case Natural():
            return 1 / 8
        case RandomK(scaled=True, ratio=ratio):
            return SIZE / max(1, round(ratio * SIZE)) - 1
    return None


def bound(codec: Codec, array: FlatArray) -> float:
    """Upper bound on the squared error ||x - C(x)||² of a contraction C: ||x||², or (1 - k/d) ||x||² if k of d elements
    are sent.
    """
    match codec:
        case TopK(ratio=ratio, sampled=False) | RandomK(ratio=ratio, scaled=False):
            share = 1 - max(1, round(ratio * len(array))) / len(array)
        case _:
            share = 1.0
    return min(codec.error_bound(array), share * _squared(array))


def feedback_rows(codec: Codec) -> list[ClaimRow]:
    """Return the rows on error feedback: the gradients equal what was sent plus the stored error e.

    Also ||e||² ≤ 4 (1 - δ) / δ² · max ||gradient||², with δ measured (Karimireddy et al. 2019, lemma 3).
    """
    used, feedback = codec if codec.contraction else Damped(codec), Residual()
    name = str(codec) if codec.contraction else f"{codec}, damped"
    random, memory = np.random.default_rng(22), np.zeros(SIZE)
    balance, kept, largest, delta, worst = np.zeros(SIZE), 0.0, 0.0, 1.0, 0.0
    for _ in range(STEPS):
        gradient = random.normal(size=SIZE)
        wanted = memory + gradient
        data, memory = feedback.encode(used, gradient, memory, random)
        balance += gradient - used.decode(data, SIZE, "float64")
        worst = max(worst, float(np.abs(balance - memory).max()))
        kept, largest = max(kept, _squared(memory)), max(largest, _squared(gradient))
        delta = min(delta, 1 - max(_squared(memory), bound(used, wanted)) / _squared(wanted))
    ratio = kept * delta**2 / (4 * (1 - delta) * largest) if 0 < delta < 1 else float(kept > 0 and delta > 0)
    return [
        bounded(f"{name}, error feedback: |gradients - sent - stored error|", "<= 1e-9", worst),
        bounded(f"{name}, error feedback: ||stored error||² ÷ declared bound", "<= 1", ratio),
    ]


def _squared(array: FlatArray) -> float:
    flat = array.astype(np.float64)
    return float(flat @ flat)
