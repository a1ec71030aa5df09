"""Claim: the compression ratio of PowerSGD follows from the shapes of a model's layers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.codecs.base import Shape
from flockstep.codecs.power import PowerSgdCodec
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, same

PUBLISHED = {"ResNet-18": (243, 136, 72), "LSTM": (310, 203, 120)}
PARAMETERS = {"ResNet-18": 11_173_962, "LSTM": 31_819_578}
FLOATS = {"ResNet-18": (45_935, 82_260, 154_910), "LSTM": (102_306, 155_734, 262_590)}
"""Model → number of floats that PowerSGD of rank 1, 2 and 4 sends: rank · (n + m) for every n × m matrix, plus all
vectors; summed by hand from the published architectures.
"""
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class PowerSgdBytes(Claim):
    """Claim: PowerSGD's published compression ratios follow from the shapes of the layers."""

    statement = (
        "PowerSGD of rank 1, 2 and 4 sends 243, 136 and 72 times fewer bytes than SGD for ResNet-18 on CIFAR-10, and "
        "310, 203 and 120 times fewer for an LSTM on WikiText-2"
    )
    source = "Vogels, Karimireddy & Jaggi 2019, section 4.3"
    setting = (
        "the tensor shapes of ResNet-18 for images of 32 × 32, and of an LSTM with 3 layers of 650 units and 33,278 "
        "words whose output layer shares the embedding; sizes of the codec's encodings in float32"
    )
    tolerance = "numbers of parameters and of floats sent are exact; ratios within 1 % of the published ratios"
    quick = True

    def check(self, say: Say) -> Verdict:
        """Count the floats that PowerSGD sends for both models at each rank."""
        rows = []
        for name, shapes in (("ResNet-18", resnet18()), ("LSTM", lstm())):
            total = sum(map(math.prod, shapes))
            rows.append(same(f"parameters, {name}", PARAMETERS[name], total))
            for rank, published, floats in zip(RANKS, PUBLISHED[name], FLOATS[name], strict=True):
                sent = PowerSgdCodec(rank).bind_shapes(shapes).wire_bytes(total, "float32") / 4
                rows.append(same(f"floats sent, {name}, rank {rank}", floats, sent))
                ratio = total / sent
                say(f"{name}, rank {rank}: {ratio:.2f} times less")
                near = abs(ratio - published) <= 0.01 * published
                rows.append(ClaimRow(f"compression, {name}, rank {rank}", published, round(ratio, 2), near))
        return Verdict(tuple(rows))


def resnet18() -> list[Shape]:
    """Return the layer shapes of ResNet-18 for images of 32 × 32 (He et al. 2016): 11,173,962 parameters.

    The first convolution is 3 × 3.
    """
    shapes: list[Shape] = _normalized(64, 3, 3)
    inputs = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            shapes += _normalized(width, inputs, 3) + _normalized(width, width, 3)
            if inputs != width:
                shapes += _normalized(width, inputs, 1)
            inputs = width
    return [*shapes, (10, inputs), (10,)]


def _normalized(outputs: int, inputs: int, side: int) -> list[Shape]:
    """Shapes of a convolution without bias, followed by batch normalization."""
    return [(outputs, inputs, side, side), (outputs,), (outputs,)]


def lstm() -> list[Shape]:
    """Return the layer shapes of an LSTM language model whose output layer shares the embedding's matrix: 31,819,578
    parameters.
    """
    words, units = 33278, 650
    layer: list[Shape] = [(4 * units, units), (4 * units, units), (4 * units,), (4 * units,)]
    return [(words, units), *layer * 3, (words,)]
