"""Momentum correction: the published recursion, what it conserves, and what masking clears."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.codecs.by_size import BySize
from flockstep.codecs.damped import Damped
from flockstep.codecs.half import Half
from flockstep.codecs.identity import Identity
from flockstep.codecs.one_bit import OneBit
from flockstep.codecs.qsgd import Qsgd
from flockstep.codecs.top import TopK
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.feedback.base import Feedback
from flockstep.feedback.momentum import Momentum
from flockstep.feedback.sender import check_composition

pytest.importorskip("numba")
SIZE, STEPS = 500, 30


def gradients(size=SIZE):
    random = np.random.default_rng(0)
    return [random.normal(size=size).astype(np.float32) for _ in range(STEPS)]


def run(codec, feedback, size=SIZE):
    """What arrives in every step, and the memory after it."""
    memory, arrived = None, []
    for gradient in gradients(size):
        data, memory = feedback.encode(codec, gradient, memory, np.random.default_rng(1))
        arrived.append((codec.decode(data, size, "float32"), memory.u.copy(), memory.v.copy()))
    return arrived


def by_hand(count, m, nesterov, masking):
    """Algorithms 1 and 4 of the paper's appendix, for top-k."""
    u, v = np.zeros((2, SIZE), np.float32)
    m, steps = np.float32(m), []
    for g in gradients():
        if nesterov:
            u = m * (u + g)
            v = v + (u + g)
        else:
            u = m * u + g
            v = v + u
        kept = np.lexsort((np.arange(SIZE), -np.abs(v)))[:count]
        sent = np.zeros(SIZE, np.float32)
        sent[kept] = v[kept]
        v[kept] = 0
        if masking:
            u[kept] = 0
        steps.append((sent, u.copy(), v.copy()))
    return steps


def agrees(feedback, codec=None):
    ours = run(codec or TopK(0.02), feedback)
    theirs = by_hand(10, feedback.m, feedback.nesterov, feedback.masking)
    pairs = ((a, b) for step in zip(ours, theirs, strict=True) for a, b in zip(*step, strict=True))
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.oracle("feedback:momentum")
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_it_is_the_published_recursion(nesterov, masking):
    assert agrees(Momentum(0.9, nesterov, masking))


class KeepsMomentum(Momentum):
    """Wrong feedback: does not mask u."""

    def encode(self, codec, array, memory, random):
        before = None if memory is None else memory.u.copy()
        data, memory = super().encode(codec, array, memory, random)
        memory.u[:] = array if before is None else np.float32(self.m) * before + array
        return data, memory


@pytest.mark.negative_control("feedback:momentum")
def test_a_feedback_that_does_not_mask_is_noticed():
    assert not agrees(KeepsMomentum(0.9))


@pytest.mark.parametrize("codec", [Half(), OneBit(), Damped(Qsgd(1))], ids=str)
def test_masking_leaves_what_a_codec_sends_of_every_element(codec):
    for masked, unmasked in zip(run(codec, Momentum()), run(codec, Momentum(masking=False)), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(masked, unmasked, strict=True))
    assert np.abs(masked[2]).max() > 0


def test_masking_clears_tensors_of_which_some_is_sent_and_leaves_others():
    codec = BySize(TopK(0.01), OneBit(), limit=100).bind_shapes([(20, 20), (100,)])
    for sent, u, v in run(codec, Momentum()):
        assert np.count_nonzero(sent[:400]) == 4
        assert not u[:400][sent[:400] != 0].any()
        assert not v[:400][sent[:400] != 0].any()
        assert u[400:].all()
        assert v[400:].any()


def test_elements_that_always_arrive_have_plain_momentum():
    codec, u = BySize(TopK(0.01), limit=100).bind_shapes([(20, 20), (100,)]), np.zeros(100, np.float32)
    for (sent, kept, v), g in zip(run(codec, Momentum()), gradients(), strict=True):
        u = np.float32(0.9) * u + g[400:]
        assert np.array_equal(sent[400:], u)
        assert np.array_equal(kept[400:], u)
        assert not v[400:].any()
        assert np.count_nonzero(sent[:400]) == 4


def test_gradients_are_clipped_to_their_senders_share():
    feedback = Momentum(m=0.0, clip=1.0).bind_workers(4)
    long, short = np.full(16, 10.0, np.float32), np.full(16, 0.01, np.float32)
    for gradient, norm in ((long, 0.5), (short, 0.04)):
        before = gradient.copy()
        data, _ = feedback.encode(Identity(), gradient, None, np.random.default_rng(0))
        assert np.linalg.norm(data.view(np.float32)) == pytest.approx(norm, rel=1e-6)
        assert np.array_equal(gradient, before)
    assert Momentum().bind_workers(4) == Momentum()


def test_composition_and_settings():
    class Wild(Half):
        @property
        def contraction(self):
            return False

    with pytest.raises(CompositionError, match="momentum"):
        check_composition(Wild(), Momentum())
    for wrong, rule in (
        ("momentum(1.0)", "0 <= m < 1, got 1.0"),
        ("momentum(-0.1)", "0 <= m < 1, got -0.1"),
        ("momentum(clip=0.0)", "clip > 0, got 0.0"),
    ):
        with pytest.raises(ConfigurationError, match=f"momentum needs {rule}"):
            Feedback.parse(wrong)
    assert str(Feedback.parse("momentum(m=0.8, clip=2)")) == "momentum(m=0.8, clip=2.0)"
