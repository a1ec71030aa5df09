"""Claim: an asynchronous pipeline computes the parameters of gradient descent whose gradients are delayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Job
from flockstep.partitions.pipeline import Pipeline
from flockstep.programs import GRADIENT
from flockstep.runtime.plan import Batches, Plan
from flockstep.simulation.compute import Lognormal
from flockstep.simulation.network import Link
from flockstep.strategies.local_sgd import LocalSGD
from flockstep.workloads.digits import Digits
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.small_run import distance, ran
from flockstep_lab.pipeline_timeline import most_versions

if TYPE_CHECKING:
    import torch

STAGES, STEPS, LR, BATCH = 4, 40, 0.2, 16
WIDTHS = (64, 32, 32, 32, 10)
CUTS = (2, 4, 6)
"""Indices of the first layers of the second, third and fourth stage."""
CLOSE, FAR = 1e-12, 1e-3
"""CLOSE: largest relative distance that rounding can explain. FAR: smallest relative distance between runs with
different delays.
"""
Delay = Callable[[int], int]


@dataclass(frozen=True)
class PublishedDelay:
    """A schedule with the published delay of each stage, in updates, and the number of weight versions that each stage
    stores.
    """

    schedule: str
    microbatches: int
    delay: Delay
    versions: Sequence[int]


PUBLISHED = (
    PublishedDelay("pipedream", 1, lambda stage: STAGES - 1 - stage, (4, 3, 2, 1)),
    PublishedDelay("pipedream(vertical_sync=True)", 1, lambda stage: STAGES - 1, (4, 4, 4, 4)),
    PublishedDelay("pipedream_2bw", STAGES, lambda stage: 1, (2, 2, 2, 2)),
    PublishedDelay("ddg", 1, lambda stage: STAGES - 1 - stage, (4, 3, 2, 1)),
)


@dataclass(frozen=True)
class PipelineDelays(Claim):
    """Claim: a pipeline without flushes is gradient descent in which each stage has a constant delay."""

    statement = (
        "In PipeDream, stage s of K computes gradients with weights that are K - 1 - s updates old, or K - 1 with "
        "vertical synchronization; in PipeDream-2BW, with weights that are one update old, and two versions are "
        "stored; in DDG, module k computes gradients with weights that are K - k updates old"
    )
    source = (
        "Narayanan et al. 2019 (PipeDream), section 3.3; Narayanan et al. 2021 (PipeDream-2BW), section 3.1; Huo et "
        "al. 2018 (DDG), algorithm 1"
    )
    setting = (
        f"a perceptron of {len(WIDTHS) - 1} layers on the digits, float64, in {STAGES} stages with lognormal "
        f"gradient times and links of 1 Gbit/s, {STEPS} steps of {BATCH} samples; compared with gradient descent on "
        "the unsplit network with the published delay of each layer"
    )
    tolerance = (
        f"parameters equal up to a relative distance of {CLOSE:g}; control: the distance from gradient descent "
        f"without delays is above {FAR:g}"
    )
    quick: ClassVar[bool] = True

    def check(self, say: Say) -> Verdict:
        rows = []
        for one in PUBLISHED:
            pipeline = Pipeline.parse(f"pipeline({STAGES}, {one.schedule}, {one.microbatches}, {CUTS})")
            model, plan = _trained(pipeline)
            apart = distance(model, _delayed(plan, one.delay))
            plain = distance(model, _delayed(plan, lambda stage: 0))
            delays = [one.delay(stage) for stage in range(STAGES)]
            held = [
                most_versions(pipeline.schedule.passes(stage, STAGES, one.microbatches, STEPS))
                for stage in range(STAGES)
            ]
            rows += [
                ClaimRow(
                    f"{one.schedule}: relative distance from gradient descent with delays {delays}",
                    0.0,
                    apart,
                    apart < CLOSE,
                ),
                ClaimRow(
                    f"{one.schedule}: versions of the weights stored by each stage",
                    str([*one.versions]),
                    str(held),
                    held == [*one.versions],
                ),
                ClaimRow(
                    f"control: {one.schedule}: relative distance from gradient descent without delays",
                    "not 0",
                    plain,
                    plain > FAR,
                ),
            ]
            say(
                f"{one.schedule}: relative distance {apart:.2g} from gradient descent with delays {delays}, "
                f"{plain:.2g} from gradient descent without delays"
            )
        return Verdict(tuple(rows))


def _network() -> torch.nn.Sequential:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for inputs, outputs in pairwise(WIDTHS):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
        return torch.nn.Sequential(*layers[:-1]).double()


def _job() -> Job:
    from torch.nn.functional import cross_entropy

    data = Digits().job(0).data()
    flat = replace(data, train_x=data.train_x.reshape(-1, WIDTHS[0]), test_x=data.test_x.reshape(-1, WIDTHS[0]))
    return Job(_network, lambda: flat, f"sgd(lr={LR})", cross_entropy, batch=BATCH, name="digits")


def _trained(pipeline: Pipeline) -> tuple[FlatArray, Plan]:
    """Train one replica split by `pipeline` in virtual time; return its parameters and the plan of the run."""
    from flockstep.split.torch_stages import split_torch

    split, strategy = split_torch(_job(), 0, pipeline), LocalSGD(period=STEPS + 1)
    run = ran(split, strategy, BATCH, STEPS, 0, Lognormal(0.01), Link("1gbit", "50us"))
    return run.params, run.plan


def _delayed(plan: Plan, delay: Delay) -> FlatArray:
    """Parameters of gradient descent on the unsplit network, where each layer's gradient is at weights of `delay`
    updates before.
    """
    import torch

    network, job, batches = _network(), _job(), Batches(plan, 0)
    assert job.loss is not None
    data, parameters = job.data(), list(network.parameters())
    stages = [index // 2 for index in range(len(parameters))]  # a weight and a bias in each stage
    history = [[one.detach().clone() for one in parameters]]
    for t in range(STEPS):
        samples = batches.next(GRADIENT)
        with torch.no_grad():
            for index, one in enumerate(parameters):
                one.copy_(history[max(0, t - delay(stages[index]))][index])
        x = torch.as_tensor(data.train_x[samples], dtype=torch.float64)
        loss = job.loss(network(x), torch.as_tensor(data.train_y[samples], dtype=torch.int64))
        slopes = torch.autograd.grad(loss, parameters)
        history.append([one - LR * slope for one, slope in zip(history[-1], slopes, strict=True)])
    return np.concatenate([one.numpy().reshape(-1) for one in history[-1]])
