"""Which errors of a node say that there is no memory left."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from flockstep.errors import ConfigurationError
from flockstep.runtime.member import lacks_memory


def test_torch_and_the_system_say_that_there_is_no_memory() -> None:
    with pytest.raises(RuntimeError, match="memory") as found:
        torch.empty(1 << 58)
    assert lacks_memory(found.value)
    assert lacks_memory(MemoryError())
    assert lacks_memory(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    error = ConfigurationError("the job must work on its first batch")
    error.__cause__ = MemoryError()
    assert lacks_memory(error)


@pytest.mark.parametrize("kind", [ConfigurationError, ValueError])
def test_other_errors_with_the_same_words_keep_their_sentence(kind: type[Exception]) -> None:
    error = kind("not enough memory cells in row 7 of data.csv")
    assert not lacks_memory(error)
    error.__cause__ = error  # raised from itself
    assert not lacks_memory(error)
