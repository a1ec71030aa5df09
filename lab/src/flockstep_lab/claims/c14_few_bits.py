"""Claim: codecs that send one, two or four bits per element of a gradient train as well as with 32 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.codecs.one_bit import OneBit
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, same
from flockstep_lab.claims.compressed_digits import EPOCHS, LR, WORKERS, trained, with_progress
from flockstep_lab.claims.digits_perceptron import Perceptron

BATCH = 16
SIDE = 1024
"""Number of rows and columns of a matrix whose 1-bit encoding is measured; the columns are about as long as in the
paper.
"""


@dataclass(frozen=True)
class FewBits(Claim):
    """Claim: 1-bit SGD, TernGrad and QSGD with four levels train as well as dense gradients, with few bits per
    element.
    """

    seeds: int = 5
    statement = (
        "1-bit SGD with error feedback, TernGrad and QSGD with 4 levels send 1.06, 2 and about 4 bits per element, "
        "and train as well as with 32 bits"
    )
    source = (
        "Seide et al. 2014; Wen et al. 2017 (AlexNet: no loss of accuracy); Alistarh et al. 2017 (ResNet-50 with 4 "
        "bits: no loss of accuracy)"
    )
    setting = (
        f"digits on a perceptron 64-64-64-10, {WORKERS} workers, batches of {BATCH}, learning rate {LR}, {EPOCHS} "
        "epochs, gradients sent to a parameter server in virtual time; median test error of 5 seeds; bits counted "
        "in the workers' messages"
    )
    tolerance = (
        "test error <= dense + 1.5 points; bits within 1e-9 of the formulas: 1 bit per element plus 64 per column "
        "or bias (1-bit SGD), 2 per element plus 32 per tensor (TernGrad), 4 per element plus 32 per bucket of 512 "
        "(QSGD), each tensor rounded up to whole bytes"
    )

    def check(self, say: Say) -> Verdict:
        dense = with_progress(say, "dense", trained("identity", seeds=self.seeds, batch=BATCH))
        rows = [
            ClaimRow("dense, test error in %", "", round(dense.median, 2), True),
            same("dense, bits per element", 32, float(dense.bits[0])),
        ]
        published = {"one_bit": "1.06", "terngrad": "2", "qsgd(levels=4, bucket=512)": "4"}
        for codec, feedback in (("one_bit", "residual"), ("terngrad", "none"), ("qsgd(levels=4, bucket=512)", "none")):
            finals = with_progress(say, codec, trained(codec, feedback, seeds=self.seeds, batch=BATCH))
            bits, formula = float(finals.bits.max()), expected_bits(codec)
            held = finals.median <= dense.median + 1.5
            rows += [
                ClaimRow(f"{codec}, test error in %", f"<= {dense.median + 1.5:.2f}", round(finals.median, 2), held),
                ClaimRow(
                    f"{codec}, bits per element",
                    f"{published[codec]}; here {formula:.4g}",
                    bits,
                    math.isclose(bits, formula),
                ),
            ]
        long = 8 * OneBit().bind_shapes([(SIDE, SIDE)]).wire_bytes(SIDE * SIDE, "float32") / SIDE**2
        rows.append(ClaimRow(f"one_bit: bits per element in columns of {SIDE}", 1.06, long, abs(long - 1.06) < 0.005))
        reason = (
            "the two means of a column take 64 bits: 1.06 bits per element are sent for columns of about 1,000 "
            "elements, and 2 bits per element for this small network's columns of 64 elements"
        )
        return Verdict(tuple(rows), reason)


def expected_bits(codec: str) -> float:
    """Return the bits per element of the perceptron's encoded gradient, computed from the shapes of the parameters.

    Every tensor is rounded up to whole bytes.
    """
    shapes = list(Perceptron().shapes.values())
    sizes = [math.prod(shape) for shape in shapes]
    if codec == "one_bit":
        means = sum(shape[1] if len(shape) == 2 else 1 for shape in shapes)
        nbytes = sum(8 * math.ceil(size / 8) for size in sizes) / 8 + 8 * means
    elif codec == "terngrad":
        nbytes = sum(math.ceil(2 * size / 8) + 4 for size in sizes)
    else:
        nbytes = math.ceil(4 * sum(sizes) / 8) + 4 * math.ceil(sum(sizes) / 512)
    return 8 * nbytes / sum(sizes)
