"""Claim: workers send fewest bytes with data parallelism for convolutions and split fully connected layers
(Krizhevsky).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flockstep.collectives.ring import Ring
from flockstep.costs.layers import Layer, ModelShape
from flockstep.costs.reference import alexnet
from flockstep.frameworks.base import Data, Engine, Job
from flockstep.partitions.tensor import TensorParallel
from flockstep.simulation.compute import ConstantTime
from flockstep.simulation.network import Link
from flockstep.split.stages import SplitModel
from flockstep.strategies.all_reduce import AllReduce
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, same
from flockstep_lab.claims.small_run import SmallRun, distance, ran

if TYPE_CHECKING:
    import torch

WORKERS, BATCH = (2, 4, 8), 128
"""WORKERS: numbers of workers in the paper's experiments. BATCH: number of samples per worker and step."""
MOST_WEIGHTS, LEAST_WORK = 0.06, 0.895
"""MOST_WEIGHTS: largest allowed share of the weights in convolutions ("about 5 %"). LEAST_WORK: smallest allowed share
of the work in convolutions ("about 90 to 95 %").
"""
WEIGHTED = ("convolution", "linear")
RUN_WORKERS, RUN_BATCH, STEPS, CLASSES, SEED = (2, 4), 6, 3, 10, 0
"""Settings of the executed runs; RUN_BATCH: number of samples per worker and step."""
CLOSE = 1e-12
"""Largest relative distance between parameters that rounding explains."""


@dataclass(frozen=True)
class HybridBytes(Claim):
    """Claim: splitting only the fully connected layers sends fewer bytes than data parallelism or splitting all
    layers.
    """

    statement = (
        "Convolutional layers have about 90 to 95 % of the computation and about 5 % of the parameters, so that "
        "workers send the fewest bytes if they use data parallelism for convolutional layers and split fully "
        "connected layers"
    )
    source = "Krizhevsky 2014 (One weird trick for parallelizing convolutional neural networks), sections 2 to 4"
    setting = (
        f"the layers of AlexNet, {', '.join(map(str, WORKERS))} workers with {BATCH} samples each; bytes of "
        "gradients in a ring, and bytes of the activations and their gradients that a split layer exchanges. Executed "
        "in virtual time: two convolutions and two fully connected layers in float64, "
        f"{' and '.join(map(str, RUN_WORKERS))} workers with {RUN_BATCH} samples each, with all_reduce, "
        "tensor(ways, convolutions=divided) (the hybrid), and tensor(ways), with which every worker computes all "
        "convolutions"
    )
    tolerance = (
        f"convolutions have at most {MOST_WEIGHTS:.0%} of the parameters and at least {LEAST_WORK:.1%} of the work; "
        "the layers for which splitting sends fewer bytes are exactly the fully connected ones; control: if "
        "convolutions are split instead, workers send more than with either parallelism alone. Executed: bytes of the "
        f"hybrid equal those of the formula, and parameters those of the unsplit model up to {CLOSE:g}; control: "
        "if every worker computes all convolutions, workers do not sum their gradients, and a step takes longer"
    )
    quick: ClassVar[bool] = True

    def check(self, say: Say) -> Verdict:
        model = alexnet()
        convolutions = [layer for layer in model.layers if layer.kind == "convolution"]
        connected = [layer for layer in model.layers if layer.kind == "linear"]
        weights = sum(layer.parameters for layer in convolutions) / model.parameters
        work = sum(layer.work(BATCH) for layer in convolutions) / sum(
            layer.work(BATCH) for layer in model.layers if layer.kind in WEIGHTED
        )
        rows = [
            ClaimRow("share of the parameters in convolutions", "about 0.05", weights, weights <= MOST_WEIGHTS),
            ClaimRow("share of the work in convolutions", "about 0.9 to 0.95", work, work >= LEAST_WORK),
        ]
        for workers in WORKERS:
            cheaper = list(model.split_layers(BATCH, workers))
            names = [layer.name for layer in connected]
            rows.append(
                ClaimRow(
                    f"{workers} workers: layers for which splitting sends fewer bytes",
                    str(names),
                    str(cheaper),
                    sorted(cheaper) == sorted(names),
                )
            )
            data, split = model.data_bytes(workers), self._sent(model, [], [*convolutions, *connected], workers)
            hybrid = self._sent(model, convolutions, connected, workers)
            rows.append(
                ClaimRow(
                    f"{workers} workers: megabytes sent per step with the hybrid",
                    f"< {data / 1e6:.4g} (data parallelism), < {split / 1e6:.4g} (all layers split)",
                    hybrid / 1e6,
                    hybrid < min(data, split),
                )
            )
            reverse = self._sent(model, connected, convolutions, workers)
            rows.append(
                ClaimRow(
                    f"control: {workers} workers: megabytes sent per step if convolutions are split and fully "
                    "connected layers are not",
                    f"> {max(data, split) / 1e6:.4g}",
                    reverse / 1e6,
                    reverse > max(data, split),
                )
            )
            say(
                f"{workers} workers: each sends {hybrid / 1e6:.4g} MB per step with the hybrid, {data / 1e6:.4g} MB "
                "with data parallelism"
            )
        for workers in RUN_WORKERS:
            rows += self._executed(workers, say)
        return Verdict(tuple(rows))

    def _executed(self, workers: int, say: Say) -> list[ClaimRow]:
        """Train a small network with data parallelism, the hybrid, and copied convolutions; compare their bytes."""
        model = _shape()
        layers = {layer.name: layer for layer in model.layers}
        convolutions, first, second = (layers["0"], layers["2"]), layers["5"], layers["7"]
        gradients = sum(layer.data_bytes(workers, model.itemsize) for layer in convolutions)
        formula = gradients + model.pair_bytes(first, second, RUN_BATCH, workers)
        all_split = self._sent(model, [], [*convolutions, first, second], workers, RUN_BATCH)
        _, data = _whole(workers, RUN_BATCH)
        whole, _ = _whole(1, workers * RUN_BATCH)
        hybrid, sent = _split(TensorParallel(workers, convolutions="divided"))
        copied, more = _split(TensorParallel(workers))
        apart = distance(hybrid.params, whole.params)
        say(
            f"{workers} workers, executed: each sends {sent:g} bytes per step with the hybrid, {data:g} with data "
            "parallelism"
        )
        name = f"{workers} workers, executed:"
        return [
            same(f"{name} bytes sent per step with the hybrid", formula, sent),
            ClaimRow(
                f"{name} bytes sent per step with the hybrid, compared",
                f"< {data:g} (data parallelism), < {all_split:g} (all layers split, by the formula)",
                sent,
                sent < min(data, all_split),
            ),
            ClaimRow(
                f"{name} relative distance of the hybrid's parameters from the unsplit model", 0.0, apart, apart < CLOSE
            ),
            ClaimRow(
                f"control: {name} bytes sent per step if every worker computes all convolutions",
                f"{formula - gradients / 2:g}, without sums of the convolutions' gradients",
                more,
                more == formula - gradients / 2,
            ),
            ClaimRow(
                f"control: {name} seconds if every worker computes all convolutions",
                f"> {hybrid.seconds:.4g} (hybrid)",
                copied.seconds,
                copied.seconds > hybrid.seconds,
            ),
        ]

    @staticmethod
    def _sent(
        model: ModelShape, data: Sequence[Layer], split: Sequence[Layer], workers: int, batch: int = BATCH
    ) -> float:
        """Return the bytes that a worker sends in a step."""
        gradients = sum(layer.data_bytes(workers, model.itemsize) for layer in data)
        return gradients + sum(layer.split_bytes(batch, workers, model.itemsize) for layer in split)


def _network() -> torch.nn.Sequential:
    """Two convolutions and two fully connected layers; the last has no bias, which one worker would send to others."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        convolutions = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten()
        connected = nn.Linear(128, 400), nn.ReLU(), nn.Linear(400, CLASSES, bias=False)
        return nn.Sequential(*convolutions, *connected).double()


def _shape() -> ModelShape:
    import torch

    from flockstep.frameworks.torch_layers import shape_of

    return shape_of(_network(), torch.zeros(1, 1, 12, 12, dtype=torch.float64))


def _job(batch: int) -> Job:
    from flockstep.workloads.models import cross_entropy, nats_per_character

    random = np.random.default_rng(SEED)
    x, y = random.standard_normal((160, 1, 12, 12)), random.integers(0, CLASSES, 160)
    data = Data(x[:120], y[:120], x[120:], y[120:])
    return Job(
        _network,
        lambda: data,
        "sgd(lr=0.1)",
        cross_entropy,
        nats_per_character,
        higher_is_better=False,
        batch=batch,
        name="images",
    )


def _ran(model: Engine | SplitModel, replicas: int, batch: int) -> tuple[SmallRun, float]:
    """Carry out the run; return it, and the mean bytes that a worker sent per step."""
    link = Link("1gbit", "50us")
    run = ran(model, AllReduce(Ring()), batch, STEPS, SEED, ConstantTime(0.01), link, replicas)
    return run, fmean(one.sent_bytes for one in run.nodes) / STEPS


def _split(partition: TensorParallel) -> tuple[SmallRun, float]:
    """Train one replica whose layers are split over ways."""
    from flockstep.split.torch_joint import join_torch

    batch = partition.ways * RUN_BATCH
    return _ran(join_torch(_job(batch), SEED, partition), 1, batch)


def _whole(replicas: int, batch: int) -> tuple[SmallRun, float]:
    """Train whole replicas, one on each worker."""
    from flockstep.frameworks.torch import TorchEngine

    return _ran(TorchEngine(_job(batch), SEED), replicas, batch)
