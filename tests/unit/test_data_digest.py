"""Whether all workers read the same data is told by digests of what they read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flockstep.launchers.comparisons import Comparisons
from flockstep.messages import Message
from flockstep.runtime.epochs import MOST, digest_of

DIFFERENT: list[Any] = [
    torch.arange(4.0),
    torch.arange(4.0) + 1e-6,
    torch.arange(4),
    torch.arange(4.0).reshape(2, 2),
    torch.arange(4.0).bfloat16(),
    np.arange(4.0),
    [torch.arange(4.0), torch.tensor(1)],
    (torch.arange(4.0), torch.tensor(2)),
    {"x": torch.arange(4.0)},
    {"y": torch.arange(4.0)},
    "text",
    b"text",
    1,
    1.0,
    True,
    None,
    np.array(["a", "b"]),
]


def test_batches_that_differ_have_different_digests() -> None:
    assert len({digest_of(batch) for batch in DIFFERENT}) == len(DIFFERENT)
    assert all(digest_of(batch) == digest_of(batch) for batch in DIFFERENT)


class Opaque:
    """Whose text holds its address."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Opaque(), Opaque()),
        ([Opaque(), 1], [Opaque(), 1]),
        (torch.arange(4.0, requires_grad=True), torch.arange(4.0)),
        (torch.eye(4).T, torch.eye(4)),
        (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse()),
        (np.array([Opaque()]), np.array([Opaque()])),
        (torch.zeros(MOST), torch.cat([torch.zeros(MOST - 1), torch.ones(1)])),
    ],
)
def test_what_cannot_be_read_or_is_far_behind_does_not_matter(one: object, other: object) -> None:
    assert digest_of(one) == digest_of(other)


@pytest.mark.parametrize(
    ("digests", "other"), [("aa", None), ("ab", 1), ("aaa", None), ("aab", 2), ("abc", 1), ("abb", 1)]
)
def test_a_difference_is_reported_once(digests: str, other: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    heard = Comparisons(len(digests), lambda: None)
    for rank, digest in enumerate(digests):
        note = {"of": "batches of loader 0", "step": 0, "certain": 0, "digest": digest}
        heard.hear(Message(rank, "data", note=note))
    said = capsys.readouterr().err
    assert (said == "") if other is None else f"workers 0 and {other} read different data" in said
    assert said.count("flockstep:") == (other is not None)
