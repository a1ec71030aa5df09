"""Claim: deep gradient compression keeps the accuracy when one thousandth of the elements is sent, and every part of
the method contributes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.errors import Diverged
from flockstep.records.events import StepEvent
from flockstep.testing.strategies import run_strategy
from flockstep.workloads.sampler import steps_for
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, bounded
from flockstep_lab.claims.compressed_digits import WORKERS
from flockstep_lab.claims.digits_perceptron import digits_job
from flockstep_lab.claims.spans import GUESSING, SAMPLES

BATCH, LR, EPOCHS, WARM_EPOCHS = 64, 0.1, 450, 4
STEPS, WARMUP = (steps_for(epochs, SAMPLES, WORKERS, BATCH) for epochs in (EPOCHS, WARM_EPOCHS))
WARM = f"dgc(ratio=0.001, warmup={WARMUP})"
RECEIVER = ", momentum=0.9"
"""Text that is added to the optimizer's arguments to give it momentum, if gradients are sent without momentum
correction.
"""
WHOLE = (WARM, "momentum(clip=1.0)", "")
WITHOUT = {
    "momentum correction": (WARM, "residual", RECEIVER),
    "warm-up": ("dgc(ratio=0.001)", "momentum(clip=1.0)", ""),
    "factor masking": (WARM, "momentum(masking=false, clip=1.0)", ""),
    "clipping": (WARM, "momentum", ""),
}
"""Part of DGC that is left out → (codec, feedback, further arguments of the optimizer) of DGC without this part."""
HURTS = ("momentum correction", "warm-up")
LEARNED = 10.0
"""Largest median test error, in percent, of dense gradients that have learned."""
HIGHER, FEW = 0.4, 3
"""HIGHER: a second, higher learning rate that is tried. FEW: number of seeds with this learning rate."""


@dataclass(frozen=True)
class Final:
    """Final test error in percent, mean loss and compression ratio of a run.

    `ratio` is 32 bits ÷ bits sent per element over the whole run, `warm_ratio` after the warm-up.
    """

    error: float
    loss: float
    ratio: float
    warm_ratio: float


class SeedResults(list[Final]):
    """Final results of several runs that differ only in their seed."""

    def median(self, what: str) -> float:
        """Return the median over the seeds of the field `what` of `Final`."""
        return float(np.median([getattr(final, what) for final in self]))

    @property
    def error(self) -> float:
        """Median over the seeds of the final test error, in percent."""
        return self.median("error")

    def worse(self, than: SeedResults) -> str:
        """Return a text: on how many seeds the error is higher, and on how many lower, than the error of `than` on the
        same seed.
        """
        pairs = [(mine.error, other.error) for mine, other in zip(self, than, strict=True)]
        return (
            f"the error is higher on {sum(a > b for a, b in pairs)} and lower on {sum(a < b for a, b in pairs)} of "
            f"{len(pairs)} seeds"
        )


@dataclass(frozen=True)
class DeepGradientCompression(Claim):
    """Claim: deep gradient compression (DGC) sends one thousandth of the elements without loss of accuracy."""

    seeds: int = 5
    statement = (
        "Deep gradient compression sends one thousandth of the elements, which reduces the bytes 270 to 600 times "
        "without loss of accuracy, because of momentum correction, warm-up, masking and clipping"
    )
    source = (
        "Lin, Han, Mao, Wang & Dally 2018, abstract (ResNet-50: 97 to 0.35 MB, 277 times; DeepSpeech: 488 to 0.74 MB, "
        "608 times), section 3"
    )
    setting = (
        f"digits on a perceptron 64-64-64-10, of whose 8,970 elements 9 are sent, {WORKERS} workers, batches of "
        f"{BATCH}, learning rate {LR}, momentum 0.9, {EPOCHS} epochs including {WARM_EPOCHS} of warm-up ({WARMUP} of "
        f"{STEPS} steps), gradients sent to a parameter server in virtual time; median of 5 seeds"
    )
    tolerance = (
        "compression (32 bits per element ÷ bits sent, including indices of 32 bits) over the whole run >= 270; "
        f"median test error <= dense + 1 point, and of dense gradients <= {LEARNED:g} %; "
        "larger without momentum correction, and larger without warm-up"
    )

    def check(self, say: Say) -> Verdict:
        """Train with dense gradients, with complete DGC, and with DGC without each of its parts."""
        dense = self._outcome("dense", ("identity", "none", RECEIVER), say)
        whole = self._outcome("DGC", WHOLE, say)
        ratio, warm = whole.median("ratio"), whole.median("warm_ratio")
        rows = [
            bounded("dense, error in %", f"<= {LEARNED}", dense.error, round(dense.error, 2)),
            ClaimRow(
                "DGC, error in %", f"<= {dense.error + 1:.2f}", round(whole.error, 2), whole.error <= dense.error + 1
            ),
            bounded("compression ratio over the whole run", "277 to 608, >= 270", ratio, round(ratio, 1)),
        ]
        figures = {"compression after warm-up": warm, "dense, mean loss": dense.median("loss")}
        figures["DGC, mean loss"] = whole.median("loss")
        said = []
        for name, parts in WITHOUT.items():
            less = self._outcome(f"without {name}", parts, say)
            figures |= {f"without {name}, error in %": less.error, f"without {name}, mean loss": less.median("loss")}
            said.append(f"without {name} {less.error:.2f} % ({less.worse(whole)})")
            if name in HURTS:
                worse = less.error > whole.error
                rows.append(
                    ClaimRow(f"without {name}, error in %", f"> {whole.error:.2f}", round(less.error, 2), worse)
                )
        extra = EPOCHS * (1 / ratio - 1 / warm)
        reason = (
            f"Median errors: {', '.join(said)}. {self._higher(say)}. One wrong sample of 360 is a test error of 0.28 "
            f"points. The bytes sent during the warm-up equal {extra:.2f} epochs of dense gradients, so a "
            f"compression of 270 over the whole run takes {extra / (1 / 270 - 1 / warm):.0f} epochs; after the "
            f"warm-up the compression is {warm:.0f}"
        )
        return Verdict(tuple(rows), reason, figures)

    def _higher(self, say: Say) -> str:
        """Text that compares deep gradient compression with dense gradients at a higher learning rate."""
        dense = self._outcome("dense", ("identity", "none", RECEIVER), say, HIGHER)
        whole = self._outcome("DGC", WHOLE, say, HIGHER)
        said = []
        for name in HURTS:
            less = self._outcome(f"without {name}", WITHOUT[name], say, HIGHER)
            said.append(f"without {name} {less.error:.2f} % ({less.worse(whole)})")
        return (
            f"Median errors with learning rate {HIGHER}: dense {dense.error:.2f} %, DGC {whole.error:.2f} %, "
            f"{', '.join(said)}"
        )

    def _outcome(self, name: str, parts: tuple[str, str, str], say: Say, lr: float = LR) -> SeedResults:
        seeds = self.seeds if lr == LR else min(FEW, self.seeds)
        finals = SeedResults(_trained(*parts, lr, seed) for seed in range(seeds))
        say(f"{name}, lr {lr}: " + " ".join(f"{final.error:.1f} ({final.loss:.3f})" for final in finals))
        return finals


def _trained(codec: str, feedback: str, momentum: str, lr: float, seed: int) -> Final:
    job = digits_job(f"sgd(lr={lr}{momentum})", BATCH)
    strategy = f"ps(codec={codec}, feedback={feedback})"
    try:
        run = run_strategy(strategy, WORKERS, STEPS, job=job, compute="constant(1)", network="ideal", seed=seed)
    except Diverged:
        return Final(GUESSING, np.inf, np.nan, np.nan)
    steps, dense = run.of(StepEvent), 4 * len(run.result)
    warm = [dense / event.sent_bytes for event in steps if event.step > WARMUP]
    losses = [event.loss for event in steps if event.loss is not None]
    ratio = dense * len(steps) / sum(event.sent_bytes for event in steps)
    return Final(100 * (1 - run.evaluation.metric), float(np.mean(losses)), ratio, float(np.median(warm)))
