"""Claim: a transformer layer that is split over several workers needs four all-reduces per step."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.ring import Ring
from flockstep.frameworks.base import Data, Engine, Job
from flockstep.partitions.tensor import TensorParallel
from flockstep.simulation.compute import Lognormal
from flockstep.simulation.network import Link
from flockstep.split.stages import SplitModel
from flockstep.strategies.local_sgd import LocalSGD
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, same
from flockstep_lab.claims.small_run import SmallRun, distance, ran

if TYPE_CHECKING:
    import torch

WORDS, LENGTH, WIDTH, HEADS, BATCH = 24, 6, 16, 4, 8
STEPS, LR, SEED = 3, 0.5, 0
FEW, MANY = 1, 2
"""Numbers of layers of the two networks whose traffic is compared; their difference is the traffic of one layer."""
PASSES = 4
"""Published number of all-reduces per layer and step: two in the forward pass and two in the backward pass."""
CLOSE, FAR = 1e-12, 1e-3
"""CLOSE: largest relative distance that rounding can explain. FAR: smallest relative distance between a network before
training and the network after training.
"""


@dataclass(frozen=True)
class WayTraffic:
    """What each worker of a tensor-parallel run sends per step, and the final parameters."""

    sums: float
    """All-reduces of a gradient, as PyTorch's `CommDebugMode` counts them."""
    messages: list[float]
    elements: list[float]
    """Mean elements that each worker sends in all-reduces, without its copies of parameters that are not split."""
    params: FlatArray


@dataclass(frozen=True)
class MegatronSums(Claim):
    """Claim: a transformer layer split over several workers needs four all-reduces per step, and computes the same
    result.
    """

    statement = (
        "A transformer layer that is split over several ways needs two all-reduces in the forward pass and two in "
        "the backward pass, each of the batch's activations, and computes the same as the unsplit layer"
    )
    source = "Shoeybi et al. 2019 (Megatron-LM), section 3 and figure 4"
    setting = (
        f"an embedding, {FEW} or {MANY} layers of {HEADS} heads and width {WIDTH}, and a cross entropy over {WORDS} "
        f"words, float64, batches of {BATCH} sentences of {LENGTH} words, {STEPS} steps in virtual time, links of 1 "
        "Gbit/s; figures per layer are differences between both networks. Unlike in Megatron, each way trains a part "
        "of the weights of normalizations and of the biases added after an all-reduce, and copies it to the others "
        "once per step"
    )
    tolerance = (
        "numbers of messages and elements of ring all-reduces are exact; parameters equal up to a relative distance "
        f"of {CLOSE:g}; control: with fewer heads than ways only the perceptron needs all-reduces, one in each pass"
    )
    quick: ClassVar[bool] = True

    def check(self, say: Say) -> Verdict:
        rows, (whole, start) = [], _unsplit(MANY, HEADS)
        for ways in (2, 4):
            few, many = _trained(FEW, HEADS, ways), _trained(MANY, HEADS, ways)
            sums = (many.sums - few.sums) / (MANY - FEW)
            rings = _per_layer(few.messages, many.messages)[0] / Ring().rounds(ways)
            elements = _per_layer(few.elements, many.elements)
            ring = [Ring().sent_elements(ways, BATCH * LENGTH * WIDTH, way) for way in range(ways)]
            found = [each / one for each, one in zip(elements, ring, strict=True)]
            apart = distance(many.params, whole)
            rows += [
                same(f"{ways} ways: all-reduces per layer and step, counted by PyTorch", PASSES, sums),
                same(f"{ways} ways: all-reduces per layer and step in virtual time", PASSES, rings),
                ClaimRow(
                    f"{ways} ways: elements sent per layer and step ÷ elements of one all-reduce of the batch's "
                    "activations",
                    str([float(PASSES)] * ways),
                    str(found),
                    found == [PASSES] * ways,
                ),
                ClaimRow(
                    f"{ways} ways: relative distance of the parameters from the unsplit network",
                    0.0,
                    apart,
                    apart < CLOSE,
                ),
            ]
            say(
                f"{ways} ways: {sums:g} all-reduces per layer and step, relative distance {apart:.2g} from the "
                "unsplit network"
            )
        alone = (_trained(MANY, 1, 2).sums - _trained(FEW, 1, 2).sums) / (MANY - FEW)
        moved = distance(start, whole)
        rows += [
            ClaimRow(
                "control: all-reduces per step of a layer with one head, whose attention cannot be split over two ways",
                2.0,
                alone,
                alone == 2,
            ),
            ClaimRow(
                "control: relative distance between the initial and the trained parameters of the unsplit network",
                "not 0",
                moved,
                moved > FAR,
            ),
        ]
        return Verdict(tuple(rows))


def _per_layer(few: list[float], many: list[float]) -> list[float]:
    """What one layer adds, for each way."""
    return [(more - less) / (MANY - FEW) for less, more in zip(few, many, strict=True)]


def _network(layers: int, heads: int) -> torch.nn.Sequential:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        blocks = [
            torch.nn.TransformerEncoderLayer(WIDTH, heads, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        ]
        embedding, last = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS)
        return torch.nn.Sequential(embedding, *blocks, torch.nn.LayerNorm(WIDTH), last).double()


def _job(layers: int, heads: int) -> Job:
    from flockstep.workloads.models import cross_entropy, nats_per_character

    words = np.random.default_rng(SEED).integers(0, WORDS, (96, LENGTH + 1))
    data = Data(words[:80, :-1], words[:80, 1:], words[80:, :-1], words[80:, 1:])
    return Job(
        lambda: _network(layers, heads),
        lambda: data,
        f"sgd(lr={LR})",
        cross_entropy,
        nats_per_character,
        higher_is_better=False,
        batch=BATCH,
        name="sentences",
    )


def _ran(model: Engine | SplitModel) -> SmallRun:
    strategy = LocalSGD(period=STEPS + 1)
    return ran(model, strategy, BATCH, STEPS, SEED, Lognormal(0.01), Link("1gbit", "50us"))


def _trained(layers: int, heads: int, ways: int) -> WayTraffic:
    """Train one replica that is split over ways; return its traffic and its parameters, as those of the whole model."""
    from torch.distributed.tensor.debug import CommDebugMode

    from flockstep.split.torch_joint import DividedReplica, join_torch
    from flockstep.split.torch_recorder import pretended
    from flockstep.split.torch_stages import engine_of

    model = join_torch(_job(layers, heads), SEED, TensorParallel(ways))
    run = _ran(model)
    copied = max(sum(one.size for one in part if one.start is not None) for part in engine_of(model).held)
    elements = [one.sent_bytes / 8 / STEPS - (ways - 1) * copied for one in run.nodes]
    params = model.parts[0].initial()
    with pretended(ways) as mesh:
        replica = DividedReplica(model, copy.deepcopy(model.whole.module), mesh)
        with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
            replica.gradient(params, np.arange(BATCH), np.zeros_like(params))
    sums = sum(count for kind, count in counted.get_comm_counts().items() if "all_reduce" in str(kind))
    return WayTraffic(sums, [one.messages_sent / STEPS for one in run.nodes], elements, run.params)


def _unsplit(layers: int, heads: int) -> tuple[FlatArray, FlatArray]:
    """Parameters at the end, and at the start, of the same run of the unsplit network."""
    from flockstep.frameworks.torch import TorchEngine

    engine = TorchEngine(_job(layers, heads), SEED)
    return _ran(engine).params, engine.initial()
