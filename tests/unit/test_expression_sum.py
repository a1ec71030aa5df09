"""Sums of components in text: what a `+` means, and what it refuses."""

from __future__ import annotations

import pytest

from flockstep.codecs.base import Codec
from flockstep.codecs.half import Half
from flockstep.codecs.top import TopK
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.feedback.base import Feedback
from flockstep.strategies.base import Strategy


def test_a_sum_sets_how_values_travel():
    codec = Codec.parse("topk(0.02) + half")
    assert codec == TopK(0.02) + Half() == TopK(ratio=0.02, values=Half())
    assert str(codec) == "topk(ratio=0.02, values=half)"
    assert Codec.parse(str(codec)) == codec


def test_a_sum_may_stand_inside_an_expression():
    strategy = Strategy.parse("all_reduce(codec=topk(0.02) + half, feedback=residual)")
    assert strategy.codec == TopK(0.02, values=Half())
    assert Codec.parse("by_size(large=topk(0.02) + half)").large == TopK(0.02, values=Half())


def test_a_sum_of_three_refines_the_innermost():
    assert Codec.parse("topk(0.1) + random_k(0.5) + half") == Codec.parse("topk(0.1) + random_k(0.5, values=half)")


def test_what_cannot_be_refined_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"codec must be a codec, got half \+ topk; only a sparse codec can be followed"
    ):
        Codec.parse("half + topk")
    with pytest.raises(ConfigurationError, match=r"must be a feedback, got residual \+ none"):
        Feedback.parse("residual + none")
    with pytest.raises(CompositionError, match=r"so no second codec can be added; write topk"):
        Codec.parse("topk(values=half) + half")
    with pytest.raises(ConfigurationError, match="codec must be given by name, got topk - half; write it like"):
        Codec.parse("topk - half")
    with pytest.raises(TypeError, match="'TopK' and 'int'"):
        TopK() + 3
