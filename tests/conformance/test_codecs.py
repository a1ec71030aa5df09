"""Every registered codec in several settings, alone and with every feedback, passes the shipped checks."""

from __future__ import annotations

import importlib.util

import pytest

from flockstep import registry
from flockstep.codecs.base import Codec
from flockstep.errors import CompositionError
from flockstep.feedback.base import Feedback
from flockstep.feedback.sender import check_composition
from flockstep.testing.codecs import check_codec, check_tensors
from flockstep.testing.expressions import check_component
from flockstep.testing.feedback import check_feedback
from support.matrix import few

SETTINGS: dict[str, tuple[str, ...]] = {
    "fp8": ("fp8", "fp8(format=e5m2)"),
    "topk": (
        "topk",
        "topk(ratio=0.3)",
        "topk(ratio=1.0)",
        "topk(sampled=true)",
        "topk(bucket=64)",
        "topk(values=half)",
    ),
    "random_k": ("random_k", "random_k(ratio=0.5)", "random_k(ratio=0.25, scaled=true)", "random_k(values=half)"),
    "threshold": ("threshold", "threshold(t=1.0)", "threshold(t=100.0)", "threshold(values=half)"),
    "adaptive_threshold": ("adaptive_threshold", "adaptive_threshold(ratio=0.5)"),
    "dgc": ("dgc", "dgc(ratio=0.1)", "dgc(warmup=20)"),
    "adacomp": ("adacomp", "adacomp(bin=7)"),
    "by_size": ("by_size", "by_size(limit=10)", "by_size(large=half, small=topk, limit=100)"),
    "powersgd": ("powersgd", "powersgd(rank=1)", "powersgd(rank=4)"),
    "dct": ("dct", "dct(k=3, chunk=8)"),
}
"""Name → how to write it in the settings to try; a codec that is not here is tried as it is."""
PUSHED = [
    *registry.names("codec"),
    "topk(sampled=true)",
    "topk(bucket=64)",
    "topk(values=half)",
    "random_k(ratio=0.25, scaled=true)",
    "threshold(t=100.0)",
    "by_size(large=half, small=topk, limit=100)",
    "dct(k=3, chunk=8)",
]
"""At every push: each codec as it is, and each setting that takes another way through its code."""
EXAMPLES = [text for name in registry.names("codec") for text in SETTINGS.get(name, (name,))]
MULTIPLY = {"powersgd", "dct"}
"""They multiply matrices, whose sums each library orders as it likes."""
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.mark.parametrize("text", few(EXAMPLES, *PUSHED))
def test_a_codec_keeps_what_it_promises(text: str) -> None:
    codec = Codec.parse(text)
    check_codec(codec)
    check_component(codec)


@needs_torch
@pytest.mark.parametrize("text", few(EXAMPLES, *registry.names("codec")))
def test_tensors_give_the_same_bytes(text: str) -> None:
    check_tensors(Codec.parse(text), same_bytes=text.partition("(")[0] not in MULTIPLY)


@pytest.mark.parametrize("feedback", registry.names("feedback"))
@pytest.mark.parametrize("text", EXAMPLES)
def test_a_codec_goes_with_a_feedback_or_is_refused(text: str, feedback: str) -> None:
    codec, memory = Codec.parse(text), Feedback.parse(feedback)
    if memory.needs_contraction and not (codec.contraction or codec.lossless or codec.variance(1) is not None):
        with pytest.raises(CompositionError, match=feedback):
            check_composition(codec, memory)
        return
    check_feedback(memory, codec)


@pytest.mark.parametrize("name", registry.names("feedback"))
def test_feedback_is_a_component(name: str) -> None:
    check_component(registry.load("feedback", name)())


def test_every_setting_belongs_to_a_codec() -> None:
    assert set(SETTINGS) <= set(registry.names("codec"))
