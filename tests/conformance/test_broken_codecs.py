"""Codecs with one promise broken, each of which the shipped checks have to notice."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from flockstep.codecs.base import Codec
from flockstep.codecs.half import Half
from flockstep.codecs.identity import Identity
from flockstep.errors import Diverged
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.residual import Residual
from flockstep.testing.codecs import check_codec, check_tensors
from flockstep.testing.feedback import check_feedback


class WrongSize(Identity):
    def wire_bytes(self, size, dtype):
        return super().wire_bytes(size, dtype) + 1

    def decode(self, data, size, dtype):
        return data.view(dtype)


class AboveItsLimit(WrongSize):
    exact_size: ClassVar[bool] = False

    def wire_bytes(self, size, dtype):
        return max(0, 2 * size - 1)


class Grows(Identity):
    def wire_bytes(self, size, dtype):
        return super().wire_bytes(size, dtype) + 65

    def encode(self, array, random):
        return np.concatenate([super().encode(array, random), np.zeros(65, np.uint8)])


class Words(Identity):
    def encode(self, array, random):
        return super().encode(array, random).astype(np.int16)


class OtherType(Half):
    def decode(self, data, size, dtype):
        return super().decode(data, size, "float32" if dtype == "float64" else "float64")


class Scribbles(Identity):
    def encode(self, array, random):
        if array.flags.writeable:
            array *= array.dtype.type(2)
        return super().encode(array, random)


class Aliases(Identity):
    def encode(self, array, random):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Unseeded(Half):
    source: ClassVar[np.random.Generator] = np.random.default_rng(0)

    def encode(self, array, random):
        return super().encode(array.reshape(-1) * self.source.uniform(0.5, 1, array.size), random)


class AsItLies(Half):
    def encode(self, array, random):
        return super().encode(array.T, random)


class TakesAnything(Half):
    def decode(self, data, size, dtype):
        return np.zeros(size, dtype)


class Crashes(Half):
    def decode(self, data, size, dtype):
        return super().decode(data.view("<f2").view(np.uint8), size, dtype)


class AddsOnce(Half):
    def add_decoded(self, data, out, scale=1.0):
        super().add_decoded(data, out)


class AddsAnything(Half):
    def add_decoded(self, data, out, scale=1.0):
        super().add_decoded(data[: 2 * len(out)], out, scale)


class Forgets(Half):
    def encode_residual(self, array, error, random):
        data = super().encode_residual(array, error, random)
        error *= error.dtype.type(0.5)
        return data


class KeepsAll(Identity):
    lossless: ClassVar[bool] = False

    def encode_residual(self, array, error, random):
        error += array.reshape(-1)
        return self.encode(error, random)


class Claims(Half):
    def error_bound(self, array):
        return super().error_bound(array) / 5


class Varies(Half):
    def variance(self, size):
        return 2.0**-30


class NotLossless(Half):
    lossless: ClassVar[bool] = True


class NotUnbiased(Half):
    unbiased: ClassVar[bool] = True


class Bound(Half):
    """Wrong codec: rounds only if it is bound to tensors."""

    def exact_parts(self, size):
        return [slice(0, 2)]


class Negates(Half):
    def decode(self, data, size, dtype):
        decoded = super().decode(data, size, dtype)
        return np.where(np.isfinite(decoded), -decoded, decoded)

    def add_decoded(self, data, out, scale=1.0):
        Codec.add_decoded(self, data, out, scale)

    def error_bound(self, array):
        return 1e300


class Shifts(Half):
    def decode(self, data, size, dtype):
        decoded = super().decode(data, size, dtype)
        return np.where(decoded == 0, decoded.dtype.type(1), decoded)

    def encode_residual(self, array, error, random):
        return Half().encode_residual(array, error, random)

    def error_bound(self, array):
        return 1e300


class NotLinear(Half):
    linear: ClassVar[bool] = True

    def terms(self, data, size, dtype):
        return data


class Mute(Half):
    def encode(self, array, random):
        with np.errstate(invalid="ignore"):
            return super().encode(np.nan_to_num(array), random)


class Vague(Half):
    def encode(self, array, random):
        if not np.isfinite(array).all():
            raise Diverged("there is a nan or inf somewhere")
        return super().encode(array, random)


class Descends(Identity):
    sparse: ClassVar[bool] = True

    def stream(self, data, size, dtype):
        return np.arange(size, dtype=np.uint32)[::-1], self.decode(data, size, dtype)[::-1]


class Elsewhere(Identity):
    sparse: ClassVar[bool] = True

    def stream(self, data, size, dtype):
        return np.arange(size, dtype=np.uint32), np.roll(self.decode(data, size, dtype), 1)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (WrongSize, "wire_bytes promises 1 bytes, but encode returns 0"),
        (AboveItsLimit, "wire_bytes promises 1 bytes, but encode returns 2"),
        (Grows, "takes 65 bytes, but the array itself only 0"),
        (Words, "instead of bytes"),
        (OtherType, "decoded to float64"),
        (Scribbles, "changes the input"),
        (Aliases, "returns the memory"),
        (Unseeded, "encodings with the same seed differ"),
        (AsItLies, "the encoding depends on how the array lies"),
        (TakesAnything, "decodes .* bytes"),
        (Crashes, "damaged bytes for .* raises ValueError"),
        (AddsOnce, "add_decoded with scale 0.5"),
        (AddsAnything, "add_decoded accepts .* that decode refuses"),
        (Forgets, "encode_residual loses part of a value|the kept error"),
        (KeepsAll, "keeps an error of"),
        (Claims, "error_bound promises"),
        (Varies, "variance promises"),
        (NotLossless, "declared lossless|encode_residual loses|the kept error"),
        (NotUnbiased, "declared unbiased"),
        (NotLinear, "declared linear"),
        (Bound, "although the codec sends them exactly"),
        (Negates, "not below their squared norm"),
        (Shifts, "changes zeros|loses part of a value"),
        (Mute, "instead of raising Diverged"),
        (Vague, "does not name 'element 0'"),
        (Descends, "not in ascending order"),
        (Elsewhere, "the values from stream differ from those of decode"),
    ],
)
def test_a_wrong_codec_is_caught(wrong, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_codec(wrong())


class Coin(Identity):
    """Rounds up or down to a whole number, at random, so that the mean stays."""

    lossless: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    contraction: ClassVar[bool] = False

    def encode(self, array, random):
        wide = array.astype(np.float64)
        small = np.abs(wide) < 1024  # where adding a fraction changes something
        rounded = np.floor(wide + random.random(array.size).reshape(array.shape))
        return super().encode(np.where(small, rounded, wide).astype(array.dtype), random)

    def error_bound(self, array):
        return array.size / 4


class LoadedCoin(Coin):
    """Wrong codec: shrinks every value by a fiftieth."""

    def encode(self, array, random):
        return super().encode(array * array.dtype.type(0.98), random)

    def error_bound(self, array):
        return array.size / 4 + float(np.sum(np.square(array.astype(np.float64))))


def test_an_unbiased_random_codec_passes_and_a_shrinking_one_does_not():
    check_codec(Coin())
    with pytest.raises(AssertionError, match="declared unbiased"):
        check_codec(LoadedCoin())


class Touches(NoFeedback):
    def encode(self, codec, array, memory, random):
        data = codec.encode(array, random)
        array += array.dtype.type(1)
        return data, None


class Counts(NoFeedback):
    seen: ClassVar[list[int]] = []

    def encode(self, codec, array, memory, random):
        self.seen.append(0)
        return codec.encode(array * array.dtype.type(len(self.seen) % 2), random), None


class Explodes(Residual):
    def encode(self, codec, array, memory, random):
        factor = array.dtype.type(1 if memory is None else memory * 4)
        return Half().encode(array * factor + array.dtype.type(np.inf if factor > 100 else 0), random), float(factor)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (Touches, "changes the array"),
        (Counts, "a copy of the feedback memory leads to different bytes"),
        (Explodes, "inf at step"),
    ],
)
def test_a_wrong_feedback_is_caught(wrong, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_feedback(wrong(), Half())


class OtherBytes(Half):
    def encode(self, array, random):
        data = super().encode(array, random)
        return data if isinstance(data, np.ndarray) else data.flip(0)


class NumpyOnly(Half):
    def encode(self, array, random):
        return super().encode(np.asarray(array.reshape(-1)), random)


@pytest.mark.parametrize(
    ("wrong", "complaint"), [(OtherBytes, "between the tensor and the equal array"), (NumpyOnly, "returns ndarray")]
)
def test_a_codec_that_treats_tensors_otherwise_is_caught(wrong, complaint):
    pytest.importorskip("torch", reason="torch is not installed")
    check_tensors(Half())
    with pytest.raises(AssertionError, match=complaint):
        check_tensors(wrong())
