"""Checks of codecs with feedback: inputs do not change, the memory can be copied, and nothing is lost in the sum."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec
from flockstep.feedback.base import Feedback
from flockstep.feedback.sender import bound_codec, check_composition
from flockstep.testing.samples import ROUNDING, SHAPES, equal_bits, exact, samples, tensors

STEPS = 5
WORKERS = 3


def check_feedback(feedback: Feedback, codec: Codec) -> None:
    """Check over a few steps that the feedback leaves the array unchanged, sends the codec's bytes, and can be copied:
    a copy of its state leads to the same results.

    Raises:
        AssertionError: a check fails; the message names the violated rule.
        CompositionError: the codec and the feedback cannot be combined.
    """
    check_composition(codec, feedback)
    for dtype in ROUNDING:
        for array in samples(dtype):
            _check_sending(feedback.bind_workers(WORKERS), codec, ((array.size,),), array)
        for array in tensors(dtype):
            _check_sending(feedback.bind_workers(WORKERS), codec, SHAPES, array)


def _check_sending(feedback: Feedback, codec: Codec, shapes: tuple[tuple[int, ...], ...], array: FlatArray) -> None:
    dtype, what = array.dtype.name, f"{codec} with {feedback} on {array.size} {array.dtype.name}"
    memory: Any = None
    flat, before = array.reshape(-1).copy(), array.reshape(-1).copy()
    for step in range(STEPS):
        one = bound_codec(codec, feedback, shapes, step)
        saved = copy.deepcopy(memory)
        data, memory = feedback.encode(one, flat, memory, np.random.default_rng(step))
        assert equal_bits(flat, before), f"{what}: changes the array"
        again, copied = feedback.encode(one, flat, saved, np.random.default_rng(step))
        assert np.array_equal(data, again), (
            f"{what}: a copy of the feedback memory leads to different bytes at step {step}"
        )
        assert _alike(memory, copied), (
            f"{what}: a copy of the feedback memory leads to a different memory at step {step}"
        )
        promised = one.wire_bytes(len(flat), dtype)
        relation = data.size == promised if one.exact_size else data.size <= promised
        assert relation, f"{what}: wire_bytes promises {promised} bytes, but encode returns {data.size}"
        decoded = one.decode(data, len(flat), dtype)
        assert np.isfinite(exact(decoded)).all(), f"{what}: {decoded[~np.isfinite(exact(decoded))][0]} at step {step}"


def _alike(a: Any, b: Any) -> bool:
    """Whether two states are equal, with arrays compared bit for bit."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return equal_bits(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_alike(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def check_nothing_lost(feedback: Feedback, codec: Codec, steps: int = 12) -> None:
    """Check that all decoded arrays plus the stored error at the end are the sum of the inputs."""
    random = np.random.default_rng(3)
    memory: Any = None
    sent, wanted = np.zeros(256), np.zeros(256)
    for step in range(steps):
        one = bound_codec(codec, feedback, ((256,),), step)
        array = random.normal(size=256).astype(np.float32)
        data, memory = feedback.encode(one, array, memory, random)
        sent += one.decode(data, 256, "float32")
        wanted += array
    off = float(np.abs(sent + exact(memory) - wanted).max())
    largest = float(np.abs(sent).max() + np.abs(exact(memory)).max() + np.abs(wanted).max())
    assert off <= steps * 8 * ROUNDING["float32"] * largest, (
        f"{codec} with {feedback} loses {off:.3g} of the sum of all gradients in {steps} steps"
    )
