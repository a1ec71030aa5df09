"""The state of a process whose replica is held by another number of processes than before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from flockstep.arrays.schema import Schema
from flockstep.errors import ConfigurationError
from flockstep.frameworks.shard_layout import Box, ShardLayout
from flockstep.optimizers.base import OptimizerState
from flockstep.runtime.cut import Cut
from flockstep.runtime.resharding import resharded, why_not_resharded
from flockstep.runtime.torch_keeper import OptimizerContent

WHOLE = {"matrix": (7, 6), "bias": (5,), "norm": (3,), "scalar": ()}


@dataclass
class Memory:
    """A strategy's state: arrays as long as the model at any depth, and what belongs to no element."""

    model: Any
    outer: OptimizerState
    queue: deque[tuple[int, Any]]
    mass: float
    count: Any


def layout(rows: int, columns: int, part: int) -> ShardLayout:
    """Of a mesh of `rows` × `columns` processes, process `part`: the matrix is cut along both dimensions, the bias
    along the first, and the last process trains the others.
    """
    row, column = divmod(part, columns)

    def span(size: int, parts: int, index: int) -> tuple[int, int]:
        chunk = -(-size // parts)  # as torch.chunk: the last ones may be smaller, or empty
        first = min(index * chunk, size)
        return first, min(first + chunk, size) - first

    cuts = {"matrix": (span(7, rows, row), span(6, columns, column))}
    if column == 0:
        cuts |= {"bias": (span(5, rows, row),)}
    if part == rows * columns - 1:
        cuts |= {"norm": (span(3, 1, 0),), "scalar": ()}
    schema = Schema.of({name: [size for _, size in cut] for name, cut in cuts.items()})
    boxes = tuple(Box(WHOLE[name], tuple(first for first, _ in cut)) for name, cut in cuts.items())
    names = [entry.name for entry in schema.entries]
    order = tuple(names.index(name) if name in names else -1 for name in ("scalar", "frozen", "norm", "bias", "matrix"))
    return ShardLayout(schema, boxes, tuple(WHOLE), order)


def held(own: ShardLayout, whole: dict[str, Any]) -> Any:
    """The flat array of a process, given whole tensors."""
    parts = zip(own.schema.entries, own.boxes, strict=True)
    return np.concatenate(
        [whole[e.name][tuple(map(slice, b.offsets, np.add(b.offsets, e.shape)))].ravel() for e, b in parts]
    )


def cut(own: ShardLayout, name: int) -> Cut:
    """The state of a process: array i of the whole model has the values i·1000, i·1000 + 1, …."""

    def array(number: int) -> Any:
        sizes = [int(np.prod(shape)) for shape in WHOLE.values()]
        flat = np.arange(sum(sizes), dtype=np.float32) + 1000 * number
        tensors = np.split(flat, np.cumsum(sizes)[:-1])
        return held(own, {name: one.reshape(WHOLE[name]) for name, one in zip(WHOLE, tensors, strict=True)})

    moments = list(own.schema.views(array(5)).values())
    states = [
        {} if index < 0 else {"step": torch.tensor(7.0), "exp_avg": torch.from_numpy(moments[index].copy())}
        for index in own.order
    ]
    memory = Memory(
        array(1),
        OptimizerState(3, {"momentum": array(2)}, own.schema.slices),
        deque([(4, np.stack([array(3), array(4)]))], 3),
        0.5,
        np.array([9.0]),
    )
    content = OptimizerContent(own.schema, "AdamW", states, "sgd", own)
    return Cut(
        params=array(0), step=4, state=memory, random={"process": name}, optimizer=OptimizerState(), at_boundary=content
    )


@pytest.mark.parametrize("before", [(1, 1), (3, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("after", [(1, 1), (4, 1), (2, 2), (2, 3)])
def test_every_array_of_a_process_has_the_elements_that_it_holds(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    size = before[0] * before[1]
    former = [layout(*before, part) for part in range(size)]
    for part in range(after[0] * after[1]):
        own, first = layout(*after, part), part % size
        found = resharded(
            (cut(former[(first + number) % size], (first + number) % size) for number in range(size)), own
        )
        wanted = cut(own, first)
        assert found.params.tolist() == wanted.params.tolist()
        assert found.state.model.tolist() == wanted.state.model.tolist()
        assert found.state.outer.slots["momentum"].tolist() == wanted.state.outer.slots["momentum"].tolist()
        assert found.state.outer.tensors == own.schema.slices
        assert found.state.queue[0][1].tolist() == wanted.state.queue[0][1].tolist()
        assert (found.state.queue.maxlen, found.state.mass, found.state.count.tolist()) == (3, 0.5, [9.0])
        assert found.random == {"process": first}
        assert (found.at_boundary.schema, found.at_boundary.layout) == (own.schema, own)
        for ours, theirs in zip(found.at_boundary.states, wanted.at_boundary.states, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_model_and_missing_shards_are_refused() -> None:
    own, half = layout(1, 1, 0), layout(2, 1, 0)
    with pytest.raises(ConfigurationError, match="holds only some of the shards of the model"):
        resharded([cut(half, 0)], own)
    for other, why in (
        (replace(own, boxes=(Box((8, 6), (0, 0)), *own.boxes[1:])), r"matrix has shape \(7, 6\) instead of \(8, 6\)"),
        (
            replace(own, model=(*WHOLE, "head")),
            "its tensors are matrix, bias, norm, scalar instead of .*, scalar, head",
        ),
    ):
        with pytest.raises(ConfigurationError, match=why):
            resharded([cut(own, 0)], other)


def test_arrays_whose_elements_are_not_those_of_the_model_are_told() -> None:
    whole = cut(layout(2, 2, 1), 0)
    assert why_not_resharded(whole) == ""
    whole.state.count = np.zeros(2)
    assert why_not_resharded(whole) == ("its workers keep an array of shape (2,), whose elements are no parameters'")
    whole.state.count = np.zeros(1)
    whole.at_boundary.states[4]["row"] = torch.zeros(4, 1)
    assert why_not_resharded(whole) == "AdamW keeps row of shape (4, 1), which is not the parameter's"
