"""Positions of tensors in a model's flat array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.arrays.schema import DTYPES, Entry, Schema, slices
from flockstep.errors import ConfigurationError, SchemaMismatch

GOLDEN = "4036ce9e7b74c0c4"
SHAPES = {"weight": (3, 4), "bias": (3,), "scale": ()}
shapes = st.dictionaries(
    st.text(st.characters(codec="ascii", categories=["Ll"]), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    min_size=1,
    max_size=5,
)


def test_tensors_lie_one_after_the_other():
    schema = Schema.of(SHAPES)
    assert schema.entries == (Entry("weight", (3, 4), 0), Entry("bias", (3,), 12), Entry("scale", (), 15))
    assert (schema.size, schema.nbytes) == (16, 64)
    assert Schema.of(SHAPES, "float64").nbytes == 128


@given(shapes, st.sampled_from(DTYPES))
def test_views_cover_the_array_once_and_share_its_memory(table, dtype):
    schema = Schema.of(table, dtype)
    flat = np.zeros(schema.size, dtype)
    views = schema.views(flat)
    assert {name: view.shape for name, view in views.items()} == table
    for view in views.values():
        assert np.shares_memory(view, flat)
        view += 1
    assert (flat == 1).all()


def test_views_are_in_row_major_order():
    flat = np.arange(16)
    assert Schema.of(SHAPES).views(flat)["weight"][1].tolist() == [4, 5, 6, 7]


def test_an_empty_tensor_takes_no_room():
    schema = Schema.of({"none": (0, 3), "bias": (2,)})
    assert schema.size == 2
    assert schema.views(np.zeros(2))["none"].shape == (0, 3)


@pytest.mark.parametrize("dtype", ["int64", "complex64", "bfloat16", ""])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(
        ConfigurationError, match=f"'weight' must be one of float16, float32, float64, got {dtype}; convert"
    ):
        Schema.of(SHAPES, dtype)


@pytest.mark.parametrize(
    ("dtypes", "whole", "narrower"),
    [
        ("float32 float32 float32", "float32", ["", "", ""]),
        ("float16 float16 float16", "float16", ["", "", ""]),
        ("bfloat16 bfloat16 bfloat16", "float32", ["bfloat16"] * 3),
        ("float16 bfloat16 float16", "float32", ["float16", "bfloat16", "float16"]),
        ("float32 bfloat16 float64", "float64", ["float32", "bfloat16", ""]),
    ],
)
def test_the_array_of_several_dtypes_has_the_widest(dtypes, whole, narrower):
    schema = Schema.of(SHAPES, dict(zip(SHAPES, dtypes.split(), strict=True)))
    assert (schema.dtype, [entry.dtype for entry in schema.entries]) == (whole, narrower)
    assert (schema == Schema.of(SHAPES, whole)) == (schema.hash == Schema.of(SHAPES, whole).hash) == (not any(narrower))


def test_models_of_other_dtypes_mismatch():
    mine = Schema.of(SHAPES)
    theirs = Schema.of(SHAPES, dict(zip(SHAPES, ["float32", "bfloat16", "float32"], strict=True)))
    with pytest.raises(SchemaMismatch, match=r"\('bias', \(3,\), 'bfloat16'\) instead of \('bias', \(3,\)\)"):
        mine.require(theirs, "worker 3")


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        Schema.of({})


def test_the_hash_is_16_digits_and_lasts():
    # Nodes of two versions compare it: it may change only with the wire format.
    assert Schema.of(SHAPES).hash == GOLDEN
    assert Schema.of({k: list(v) for k, v in SHAPES.items()}).hash == GOLDEN


@pytest.mark.parametrize(
    ("other", "dtype", "difference"),
    [
        ({"weight": (4, 3), "bias": (3,), "scale": ()}, "float32", r"\('weight', \(4, 3\)\) instead of"),
        ({"weight": (3, 4), "bios": (3,), "scale": ()}, "float32", "'bios'"),
        ({"bias": (3,), "weight": (3, 4), "scale": ()}, "float32", "'bias'"),
        (SHAPES, "float64", "float64 instead of float32"),
        ({"weight": (3, 4), "bias": (3,)}, "float32", "has 2 tensors, but the models of other workers have 3"),
        (SHAPES | {"more": (1,)}, "float32", "has 4 tensors, but the models of other workers have 3"),
    ],
)
def test_a_mismatch_names_who_and_the_first_difference(other, dtype, difference):
    mine, theirs = Schema.of(SHAPES), Schema.of(other, dtype)
    assert mine.hash != theirs.hash
    with pytest.raises(SchemaMismatch, match=difference) as caught:
        mine.require(theirs, "worker 3")
    assert "the model of worker 3" in str(caught.value)
    assert "build the same model on every worker" in str(caught.value)


@given(shapes, shapes)
def test_hashes_are_equal_only_for_equal_tables(a, b):
    first, second = Schema.of(a), Schema.of(b)
    assert (first.hash == second.hash) == (first == second)


@given(st.integers(0, 1000), st.integers(1, 40))
def test_slices_partition_and_are_nearly_equal(size, parts):
    cut = slices(size, parts)
    assert len(cut) == parts
    assert [i for s in cut for i in range(size)[s]] == list(range(size))
    lengths = [s.stop - s.start for s in cut]
    assert max(lengths) - min(lengths) <= 1


def test_longer_slices_come_first():
    assert [(s.start, s.stop) for s in slices(5, 3)] == [(0, 2), (2, 4), (4, 5)]
    assert [s.stop - s.start for s in slices(2, 3)] == [1, 1, 0]
