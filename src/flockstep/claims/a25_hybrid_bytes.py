"""Claim: workers send fewest bytes with data parallelism for convolutions and split fully connected layers
(Krizhevsky).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flockstep.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep.costs.layers import Layer, ModelShape
from flockstep.costs.models.alexnet import alexnet

WORKERS, BATCH = (2, 4, 8), 128
"""WORKERS: numbers of workers in the paper's experiments. BATCH: number of samples per worker and step."""
MOST_WEIGHTS, LEAST_WORK = 0.06, 0.895
"""MOST_WEIGHTS: largest allowed share of the weights in convolutions ("about 5 %"). LEAST_WORK: smallest allowed share
of the work in convolutions ("about 90 to 95 %").
"""
WEIGHTED = ("convolution", "linear")


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
        "gradients in a ring, and bytes of the activations and their gradients that a split layer exchanges"
    )
    tolerance = (
        f"convolutions have at most {MOST_WEIGHTS:.0%} of the parameters and at least {LEAST_WORK:.1%} of the work; "
        "the layers for which splitting sends fewer bytes are exactly the fully connected ones; control: if "
        "convolutions are split instead, workers send more than with either parallelism alone"
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
        return Verdict(tuple(rows))

    @staticmethod
    def _sent(model: ModelShape, data: Sequence[Layer], split: Sequence[Layer], workers: int) -> float:
        """Return the bytes that a worker sends in a step."""
        gradients = sum(layer.data_bytes(workers, model.itemsize) for layer in data)
        return gradients + sum(layer.split_bytes(BATCH, workers, model.itemsize) for layer in split)
