"""Microscaling: sends elements as floats of 8 or 4 bits, in blocks that share a power of two as their scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.namespace import cast, first_not_finite, namespace, to_device_of, zeros
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes
from flockstep.codecs.quantizer import Quantizer
from flockstep.errors import ConfigurationError

BLOCK = 32
"""Number of elements that share a scale."""
BIAS = 127
"""The byte of the scale 2^e is e + 127; the byte 255 stands for NaN."""


class Format(NamedTuple):
    """A float format of few bits: a sign, an exponent, and a mantissa."""

    mantissa: int
    """Number of bits of the mantissa."""
    least: int
    """Exponent of the smallest normal number."""
    top: int
    """Exponent of the largest number."""
    largest: float
    bits: int = 8

    def magnitudes(self) -> FlatArray:
        """Return all finite magnitudes in ascending order, so that a magnitude's code is its index."""
        codes = np.arange(1 << self.bits - 1)
        exponents, fractions = np.divmod(codes, 1 << self.mantissa)
        normal = np.minimum(exponents, 1)  # exponent field 0 holds zero and the subnormal numbers
        digits = fractions + (normal << self.mantissa)
        values: FlatArray = np.ldexp(digits.astype(float), exponents - normal + self.least - self.mantissa)
        return values[values <= self.largest]

    def codes(self, magnitudes: Any) -> Any:
        """Return the codes of the numbers nearest to `magnitudes`, float32 or float64, ties to even; beyond the largest
        number, its code.
        """
        xp, (kind, bits, bias) = namespace(magnitudes), WORDS[kernels.name_of(magnitudes)]
        fields = (exponent_fields(magnitudes) - bias).clip(self.least, self.top) - self.least
        powers = ((self.mantissa - self.least + bias - fields) << bits).view(magnitudes.dtype)
        digits = cast(xp.round(magnitudes * powers).clip(max=2 << self.mantissa), kind)
        # Digits that were rounded up to the next power of two carry into the exponent.
        return ((fields << self.mantissa) + digits).clip(max=len(self.magnitudes()) - 1)

    def values(self, dtype: Any) -> FlatArray:
        """Return the number of every code, NaN for codes that stand for no finite number."""
        half = np.full(1 << self.bits - 1, np.nan)
        finite = self.magnitudes()
        half[: len(finite)] = finite
        return np.concatenate([half, -half]).astype(dtype)


WORDS = {"float32": ("int32", 23, 127), "float64": ("int64", 52, 1023)}
"""Name of a dtype → the integers of its size, the number of bits below the exponent field, and the exponent's bias."""


def exponent_fields(magnitudes: Any) -> Any:
    """Return the exponent fields of non-negative numbers, as integers."""
    kind, bits, _ = WORDS[kernels.name_of(magnitudes)]
    return magnitudes.view(getattr(namespace(magnitudes), kind)) >> bits


E4M3 = Format(mantissa=3, least=-6, top=8, largest=448.0)
E5M2 = Format(mantissa=2, least=-14, top=15, largest=57344.0)
E2M1 = Format(mantissa=1, least=0, top=2, largest=6.0, bits=4)


def scales(dtype: Any) -> FlatArray:
    """Return the number of every scale byte: 2⁻¹²⁷ to 2¹²⁷, and NaN."""
    powers: FlatArray = np.append(np.ldexp(1.0, np.arange(-BIAS, BIAS + 1)), np.nan).astype(dtype)
    return powers


class Microscaled(Quantizer):
    """Encodes every block as one scale byte and one code per element: all scales, then all codes, packed."""

    contraction = True
    """The codec is a contraction for arrays whose blocks have their largest magnitude within 2⁻¹²⁷ and 2¹²⁸: the
    element of this magnitude arrives with a relative error of at most 1/4, and no error exceeds its element.
    """

    @property
    def form(self) -> Format:
        """The format of the elements."""
        raise NotImplementedError

    def coded_bytes(self, size: int, dtype: str) -> int:
        return -(-size // BLOCK) + (size * self.form.bits + 7) // 8

    def coded(self, floats: FlatArray, random: np.random.Generator) -> Bytes:
        k, xp, form = kernels.of(floats), namespace(floats), self.form
        self.refuse(floats, first_not_finite(floats) >= 0)
        padded: Any = zeros(floats, -(-len(floats) // BLOCK) * BLOCK)
        padded[: len(floats)] = floats
        rows = padded.reshape(-1, BLOCK)
        _, bits, bias = WORDS[kernels.name_of(floats)]
        # Subnormal numbers have the field 0; their blocks get the smallest scale.
        exponents = (exponent_fields(xp.amax(xp.abs(rows), 1)) - bias - form.top).clip(-BIAS, BIAS)
        rows *= ((bias - exponents) << bits).view(floats.dtype)[:, None]
        codes = cast(form.codes(xp.abs(padded)), "uint8")[: len(floats)]
        codes += cast(xp.signbit(padded), "uint8")[: len(floats)] << form.bits - 1
        data: Bytes = k.join(cast(exponents + BIAS, "uint8"), k.pack(codes, form.bits))
        return data

    def uncoded(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        k, xp, form, head = kernels.of(data), namespace(data), self.form, -(-size // BLOCK)
        values = to_device_of(form.values(dtype), data)
        powers = to_device_of(scales(dtype), data)
        array = xp.take(values, cast(k.unpack(data[head:], size, form.bits), "int64"))
        spread = xp.take(powers, cast(data[:head], "int64"))[:, None] + zeros(values, 1, BLOCK)
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            array *= spread.reshape(-1)[:size]
        self.require(first_not_finite(array) < 0, size, dtype)
        decoded: FlatArray = array
        return decoded

    def error_bound(self, array: FlatArray) -> float:
        """Return an upper bound on the squared error: for every element half the distance between its neighbors in the
        block's scale, or the excess over the largest number.
        """
        if self.as_it_is(array.size, kernels.name_of(array)):
            return 0.0
        form, x = self.form, np.abs(array.reshape(-1).astype(np.float64))
        tops = np.maximum.reduceat(x, np.arange(0, len(x), BLOCK))
        scale = np.ldexp(1.0, np.clip(np.frexp(tops)[1] - 1 - form.top, -BIAS, BIAS)).repeat(BLOCK)[: len(x)]
        y, half = x / scale, 2.0 ** -(form.mantissa + 1)
        off = np.maximum(np.minimum(y, np.maximum(y, 2.0**form.least) * half), y - form.largest)
        return float(np.sum(np.square(off * scale)))


@dataclass(frozen=True)
class Fp8(Microscaled):
    """MXFP8 (Rouhani et al. 2023; Open Compute Project, Microscaling Formats 1.0, sections 5 and 6): floats of 8 bits,
    in blocks of 32 elements with one scale.

    A block whose largest magnitude lies in [2^e, 2^(e+1)) is divided by 2^(e-8) for the format e4m3, which has 4
    significant bits and the largest number 448, or by 2^(e-15) for e5m2, which has 3 significant bits and the largest
    number 57344. Elements are rounded to the nearest number of the format, ties to even, and beyond the largest number
    to it. The scale, a power of two from 2⁻¹²⁷ to 2¹²⁷, is sent as a byte: 8.25 bits per element. A tensor's small
    elements survive in blocks whose elements are all small. Rounding is deterministic, hence biased; use residual
    feedback for gradients.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"

    def __post_init__(self) -> None:
        if self.format not in ("e4m3", "e5m2"):
            raise ConfigurationError(
                f"format of fp8 must be e4m3 or e5m2, got {self.format}; e4m3 is usual, and e5m2 has the wider range"
            )

    @property
    def form(self) -> Format:
        """The format of the elements."""
        return E4M3 if self.format == "e4m3" else E5M2


@dataclass(frozen=True)
class Fp4(Microscaled):
    """MXFP4 (Rouhani et al. 2023; Open Compute Project, Microscaling Formats 1.0, sections 5 and 6): floats of 4 bits,
    in blocks of 32 elements with one scale.

    A block whose largest magnitude lies in [2^e, 2^(e+1)) is divided by 2^(e-2), and every element rounded to the
    nearest of 0, ±0.5, ±1, ±1.5, ±2, ±3, ±4 and ±6 (E2M1), ties to the number with an even code, and beyond 6 to 6. The
    scale, a power of two from 2⁻¹²⁷ to 2¹²⁷, is sent as a byte: 4.25 bits per element. Rounding is deterministic, hence
    biased; use residual feedback for gradients.
    """

    @property
    def form(self) -> Format:
        """The format of the elements."""
        return E2M1
