"""Activations that travel as differences from those of the same sample in the previous epoch (AQ-SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import flockstep
from flockstep.codecs.base import Codec
from flockstep.errors import FlockstepError
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import bound_codec
from flockstep.partitions.base import Partition
from flockstep.programs import GRADIENT
from flockstep.records.events import NodeEvent
from flockstep.runtime.plan import Batches
from flockstep.split.stage_program import ActivationDifferences
from support.split_jobs import BATCH, chain, job_of, simulated

EPOCH, STEPS = 10, 25
"""Steps of an epoch of the job, and of a run."""
CODEC = "int8(block=8)"


def pipeline(codec: str = CODEC, microbatches: int = 1, differences: bool = True) -> str:
    return f"pipeline(2, 1f1b, {microbatches}, (4,), {codec}, {differences})"


def quantized(array: torch.Tensor, codec: Codec) -> torch.Tensor:
    bound = bound_codec(codec, NoFeedback(), (tuple(array.shape),), 0)
    data = bound.encode(array.numpy().reshape(-1), np.random.default_rng(0))
    return torch.tensor(bound.decode(data, array.numel(), "float64")).reshape(array.shape)


def aq_sgd(batches: Sequence[list[int]], codec: Codec, forgets: bool = False) -> npt.NDArray[np.float64]:
    """The oracle: algorithm 1 of Wang et al. (2022) between two halves of the chain; with `forgets`, activations are
    compared with those of the first epoch for ever.
    """
    job, model, known = job_of(), chain(), dict[int, torch.Tensor]()
    data, optimizer = job.data(), torch.optim.SGD(model.parameters(), lr=0.2)
    x, y = torch.tensor(data.train_x), torch.tensor(data.train_y)
    for batch in batches:
        optimizer.zero_grad()
        outputs = model[:4](x[batch])
        heard = outputs.detach().clone()
        seen = [place for place, sample in enumerate(batch) if sample in known]
        if seen:
            old = torch.stack([known[batch[place]] for place in seen])
            heard[seen] = old + quantized(heard[seen] - old, codec)
        if not (forgets and seen):
            known.update(zip(batch, heard.clone(), strict=True))
        heard.requires_grad_()
        job.loss(model[4:](heard), y[batch]).backward()
        assert heard.grad is not None
        outputs.backward(quantized(heard.grad, codec))
        optimizer.step()
    return np.concatenate([one.detach().numpy().reshape(-1) for one in model.parameters()])


@pytest.mark.parametrize("codec", [CODEC, "topk(0.25)"])
def test_a_run_equals_aq_sgd(codec: str) -> None:
    ran = simulated(job_of(), "local_sgd(period=100)", pipeline(codec), replicas=1, steps=STEPS)
    batches = Batches(ran.simulation.plan, 0)
    samples = [batches.next(GRADIENT).tolist() for _ in range(STEPS)]
    np.testing.assert_allclose(ran.result, aq_sgd(samples, Codec.parse(codec)), rtol=0, atol=1e-12)
    wrong = aq_sgd(samples, Codec.parse(codec), forgets=True)
    assert np.abs(ran.result - wrong).max() > 1e-6, "negative control: both ends follow the activations"


def test_the_first_epoch_travels_whole_and_the_others_encoded() -> None:
    """Of three micro-batches of four samples, 8 numbers each; gradients travel back encoded in every step."""
    ran = simulated(job_of(), "local_sgd(period=100)", pipeline(microbatches=3), replicas=1, steps=STEPS)
    each = BATCH // 3 * 8
    encoded = Codec.parse(CODEC).wire_bytes(each, "float64")
    sent = [e.sent_bytes for e in sorted((e for e in ran.events if isinstance(e, NodeEvent)), key=lambda e: e.node)]
    assert sent == [3 * (EPOCH * each * 8 + (STEPS - EPOCH) * encoded), 3 * STEPS * encoded]


def test_samples_that_are_new_known_or_twice_in_a_batch() -> None:
    """The receiver has what the sender has; a sample that is twice in a batch has the later activations."""
    random, codec = np.random.default_rng(3), Codec.parse("half")
    ends = ActivationDifferences(), ActivationDifferences()
    for samples in ([3, 5], [5, 7], [7, 7, 9], [3, 7, 5]):
        array = random.standard_normal((len(samples), 4, 2))
        data = ends[0].encode(array, samples, lambda _: codec, random)
        found = ends[1].decode(data, array.shape, "float64", samples, lambda _: codec)
        np.testing.assert_allclose(found, array, atol=0.01)
        for sample, row in dict(zip(samples, found, strict=True)).items():
            assert all(end._known[sample].tobytes() == row.tobytes() for end in ends)


@pytest.mark.parametrize(
    ("partition", "given", "message"),
    [
        (
            pipeline("identity"),
            {},
            "need a lossy codec that is a contraction, got identity; use for example codec=int8",
        ),
        (pipeline("qsgd"), {}, "need a lossy codec that is a contraction, got qsgd"),
        (
            pipeline(),
            {"checkpoint_every": 2},
            "do not contain the activations that differences are taken from, got checkpoint_every=2 with",
        ),
    ],
)
def test_what_is_refused(partition: str, given: dict[str, Any], message: str, tmp_path: Path) -> None:
    facts: dict[str, Any] = {"workers": 2, **given}
    with pytest.raises(FlockstepError, match=message):
        flockstep.run("digits", "all_reduce", partition=partition, steps=4, out=tmp_path, **facts)


def test_a_partition_with_differences_is_written_and_read() -> None:
    assert str(Partition.parse(pipeline())) == str(Partition.parse(str(Partition.parse(pipeline()))))
    assert "differences=True" in str(Partition.parse(pipeline()))
