"""What a worker does with arrays that it sums in the memory of its host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flockstep.arrays.namespace import to_host
from flockstep.links.bus import Traffic
from flockstep.links.shared_group import SharedGroup, needed
from flockstep.links.shared_memory import SharedMemory
from flockstep.runtime import host_memory
from flockstep.runtime.host_memory import HostMemory, RunMemory
from flockstep.runtime.node_metrics import NodeMetrics

ROOM = 1 << 16


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arrays of which a copy in the host's memory was asked for."""
    asked: list[Any] = []

    def counted(array: Any) -> Any:
        asked.append(array)
        return to_host(array)

    monkeypatch.setattr(host_memory, "to_host", counted)
    return asked


def memories(in_background: bool) -> tuple[RunMemory, HostMemory]:
    worker: Any = SimpleNamespace(in_background=in_background, port=SimpleNamespace(turn=lambda: None))
    metrics = NodeMetrics(0, None, Traffic())
    groups = [SharedGroup(SharedMemory.create(needed(1, ROOM)), 0, 1, ROOM) for _ in range(2)]
    return RunMemory(groups[0], worker, metrics, list), HostMemory(groups[1], worker, metrics, list, 4000)


def test_a_background_task_sums_by_messages_and_copies_no_array(copied: list[Any]) -> None:
    for_run, for_host = memories(in_background=True)
    array = np.ones(1000, np.float32)
    assert not for_run.all_reduce(array)
    assert for_run.mean_of_slice(for_run.home(array)) is None
    assert for_host.reduce_scatter(array, 1) is None
    assert copied == []


def test_a_program_sums_arrays_of_any_place_in_shared_memory(copied: list[Any]) -> None:
    for_run, for_host = memories(in_background=False)
    array = np.full(1000, 3, np.float32)
    assert for_run.all_reduce(array, 2)
    assert array.tolist() == [1.5] * 1000
    summed = for_host.reduce_scatter(array, 1)
    assert summed is not None
    assert summed is not array
    assert for_host.corresponding(array) is None
    assert for_host.corresponding(summed) is not None
    array[:] = 0
    for_host.all_gather(summed, array, 1)
    assert array.tolist() == [1.5] * 1000
    assert len(copied) == 2


def test_an_array_that_is_larger_than_the_model_goes_by_messages() -> None:
    _, for_host = memories(in_background=False)
    assert for_host.reduce_scatter(np.ones(1001, np.float32), 1) is None
