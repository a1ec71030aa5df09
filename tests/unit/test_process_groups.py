"""What a process group counts, without the devices that its backend needs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flockstep.arrays.namespace import DEVICE_COPIES
from flockstep.links.process_groups import ProcessGroup, private_store


class Done:
    """An operation that has ended."""

    def __init__(self, *_: Any):
        pass

    def is_completed(self) -> bool:
        return True

    def wait(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(("backend", "share"), [("nccl", 1), ("gloo", 0)])
def test_copies_to_a_device_and_back_are_counted(backend: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum is copied to the device and back; of parts that are added up, only the sum comes back."""
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    group: Any = ProcessGroup.__new__(ProcessGroup)
    group.backend, group._group = backend, SimpleNamespace(allreduce=Done, reduce_scatter=Done)
    array = np.ones(100, np.float32)
    before = DEVICE_COPIES.nbytes
    operation = group.sum_up(array)
    assert DEVICE_COPIES.nbytes - before == 400 * share
    assert operation.wait(1.0)
    assert DEVICE_COPIES.nbytes - before == 800 * share
    assert group.scatter_sum(array[:50], [array[:50], array[50:]]).wait(1.0)
    assert DEVICE_COPIES.nbytes - before == 800 * share + (3 + 1) * 200 * share


def test_only_its_user_can_write_the_file_by_which_a_process_group_meets(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        private_store(tmp_path / "store").set("key", "value")
    finally:
        os.umask(before)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o600
