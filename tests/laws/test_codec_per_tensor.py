"""What AdaComp sends of every bin, and which tensors `by_size` leaves alone, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.codecs.ada_comp import AdaComp
from flockstep.codecs.by_size import BySize
from flockstep.codecs.identity import Identity
from flockstep.codecs.parts import Parts
from flockstep.codecs.top import TopK
from flockstep.errors import ConfigurationError, ProtocolError
from support.codecs import normal, rng, squared, top, trip

pytest.importorskip("numba")


def adacomp_by_hand(residue, change, width):
    """AdaComp's algorithm 2 in plain loops."""
    g, h = (residue + change).astype(np.float64), (residue + change).astype(np.float32) + change
    sent, maxima = [], []
    for start in range(0, len(g), width):
        bin_ = range(start, min(start + width, len(g)))
        most = max(abs(g[j]) for j in bin_)
        hits = [j for j in bin_ if abs(h[j]) >= most and g[j] != 0]
        sent += hits or [max(bin_, key=lambda j: abs(g[j]))] * (most > 0)
        maxima.append(most)
    out = np.zeros(len(g), np.float32)
    out[sent] = np.sign(g[sent]) * np.float32(np.mean(maxima))
    return out


def follows_algorithm_2(codec):
    residue, change = normal(1013), normal(1013, 1)
    error = residue.copy()
    sent = codec.decode(codec.encode_residual(change, error, rng()), 1013, "float32")
    wanted = adacomp_by_hand(residue, change, 50)
    kept = np.array_equal(error, (residue + change) - wanted)
    return np.allclose(sent, wanted, rtol=1e-6, atol=0) and (kept or np.allclose(error, residue + change - wanted))


@pytest.mark.oracle("codec:adacomp")
def test_adacomp_is_algorithm_2():
    assert follows_algorithm_2(AdaComp(50))


class WithoutH(AdaComp):
    """Wrong codec: compares G instead of H with the largest magnitude."""

    def _sent(self, total, change):
        return super()._sent(total, np.zeros_like(change))


@pytest.mark.negative_control("codec:adacomp")
def test_an_adacomp_without_the_newest_gradient_is_noticed():
    assert not follows_algorithm_2(WithoutH(50))


def test_adacomp_sends_of_every_bin_that_is_not_zero_and_all_of_bins_of_one():
    x = normal(1000) * np.repeat(10.0 ** np.arange(-10, 10), 50).astype(np.float32)
    x[100:150] = 0
    sent = trip(AdaComp(50), x).reshape(20, 50)
    assert (np.flatnonzero(sent.any(axis=1)) == np.delete(np.arange(20), 2)).all()
    assert squared(x - sent.reshape(-1)) < squared(x), "also where bins differ by orders of magnitude"
    y = np.where(np.arange(60) % 3 == 0, 0, normal(60)).astype(np.float32)
    decoded = trip(AdaComp(1), y)
    assert np.array_equal(decoded != 0, y != 0)
    assert np.array_equal(np.sign(decoded), np.sign(y))


SHAPES = ((40, 30), (40,), (5, 5), (2000,), (3, 20, 20))


def leaves_small_tensors(codec):
    size = sum(int(np.prod(s)) for s in SHAPES)
    x, bound = normal(size), codec.bind_shapes(SHAPES)
    decoded = trip(bound, x)
    large = [slice(0, 1200), slice(3265, 4465)]
    wanted = x.copy()
    for part in large:
        wanted[part] = top(x[part], 12)
    exact = [(1200, 1240), (1240, 1265), (1265, 3265)]
    parts = [(p.start, p.stop) for p in bound.exact_parts(size)]
    return np.array_equal(decoded, wanted) and parts == exact


@pytest.mark.oracle("codec:by_size")
def test_by_size_leaves_small_tensors_and_vectors_as_they_are():
    assert leaves_small_tensors(BySize())
    assert BySize().bind_shapes([(10,), (5, 5)]) == Identity()
    assert BySize().wire_bytes(2000, "float32") == TopK().wire_bytes(2000, "float32")
    assert BySize().wire_bytes(1000, "float32") == 4000


@pytest.mark.negative_control("codec:by_size")
def test_a_by_size_that_compresses_vectors_is_noticed():
    class Blind(BySize):
        def _for(self, shape):
            return self.of(int(np.prod(shape)))

    assert not leaves_small_tensors(Blind())


def test_parts_refuse_arrays_of_other_tensors():
    bound = BySize().bind_shapes(SHAPES)
    assert isinstance(bound, Parts)
    with pytest.raises(ConfigurationError, match="encodes 4465 elements, got 7"):
        bound.encode(normal(7), rng())
    with pytest.raises(ProtocolError, match=r"needs \d+ bytes"):
        bound.decode(np.zeros(10, np.uint8), 4465, "float32")
