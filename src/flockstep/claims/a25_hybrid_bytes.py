"""Claim: Krizhevsky's hybrid of data parallelism for convolutions and split fully connected layers; the bytes of each
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flockstep.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep.costs.layers import Layer, ModelShape
from flockstep.costs.models.alexnet import alexnet

WORKERS, BATCH = (2, 4, 8), 128
"""WORKERS: numbers of workers in the paper's experiments. BATCH: samples of each worker."""
MOST_WEIGHTS, LEAST_WORK = 0.06, 0.895
"""Bounds on the convolutions' share of the weights ("about 5 %") and of the work ("about 90 to 95 %"), up to
rounding.
"""
WEIGHTED = ("convolution", "linear")


@dataclass(frozen=True)
class HybridBytes(Claim):
    """Claim: convolutions have most of the work and few of the weights; fully connected layers have the reverse."""

    statement = (
        "Convolutional layers have about 90 to 95 % of the computation and about 5 % of the parameters, so that "
        "workers send least if they split the data in convolutions and the layers where these are fully connected"
    )
    source = "Krizhevsky 2014 (One weird trick for parallelizing convolutional neural networks), sections 2 to 4"
    setting = (
        f"AlexNet by its layers, {', '.join(map(str, WORKERS))} workers of {BATCH} samples; bytes of gradients in a "
        "ring, and bytes of the activations and their gradients that a split layer exchanges"
    )
    tolerance = (
        f"at most {MOST_WEIGHTS:.0%} of the parameters and at least {LEAST_WORK:.1%} of the work in convolutions; the "
        "layers that are cheaper split are exactly the fully connected ones; with layers assigned the other way round, "
        "workers send more than with either parallelism alone"
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
                    f"{workers} workers: layers to split", str(names), str(cheaper), sorted(cheaper) == sorted(names)
                )
            )
            data, split = model.data_bytes(workers), self._sent(model, [], [*convolutions, *connected], workers)
            hybrid = self._sent(model, convolutions, connected, workers)
            rows.append(
                ClaimRow(
                    f"{workers} workers: megabytes sent per step, hybrid",
                    f"< {data / 1e6:.4g} (data), < {split / 1e6:.4g} (all layers split)",
                    hybrid / 1e6,
                    hybrid < min(data, split),
                )
            )
            reverse = self._sent(model, connected, convolutions, workers)
            rows.append(
                ClaimRow(
                    f"control: {workers} workers: megabytes sent per step, the other way round",
                    f"> {max(data, split) / 1e6:.4g}",
                    reverse / 1e6,
                    reverse > max(data, split),
                )
            )
            say(f"{workers} workers send {hybrid / 1e6:.4g} MB, {data / 1e6:.4g} MB with data parallelism")
        return Verdict(tuple(rows))

    @staticmethod
    def _sent(model: ModelShape, data: Sequence[Layer], split: Sequence[Layer], workers: int) -> float:
        """Return the bytes that a worker sends in a step."""
        gradients = sum(layer.data_bytes(workers, model.itemsize) for layer in data)
        return gradients + sum(layer.split_bytes(BATCH, workers, model.itemsize) for layer in split)
