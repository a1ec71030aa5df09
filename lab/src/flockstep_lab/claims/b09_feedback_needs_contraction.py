"""Claim: error feedback needs a codec that is a contraction; an unbiased codec is not enough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.codecs.damped import Damped
from flockstep.codecs.qsgd import Qsgd
from flockstep.feedback.residual import Residual
from flockstep.feedback.sender import bound_codec
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, bounded
from flockstep_lab.claims.compressed_digits import EPOCHS, LEARNS, LR, WORKERS, Finals, trained, with_progress

BATCH, BUCKET = 16, 512
LEVELS = (1, 4, 16)
DIVERGE = (1, 4)
"""Numbers of quantization levels of QSGD for which undamped error feedback diverged in the pilot run."""


@dataclass(frozen=True)
class Raw(Residual):
    """Error feedback that accepts any codec, even one that is not a contraction; the negative control of the claim."""

    needs_contraction = False
    """False, so that flockstep accepts codecs that are not contractions and does not damp them."""


@dataclass(frozen=True)
class FeedbackNeedsContraction(Claim):
    """Claim: with error feedback, QSGD diverges unless its output is divided by 1 + ω."""

    seeds: int = 5
    statement = (
        "With error feedback, training with an unbiased codec of large variance diverges; if the codec's values are "
        "divided by 1 + omega, training converges as well as without feedback"
    )
    source = (
        "Alistarh et al. 2017, lemma 3.1 (omega); Richtarik, Sokolov & Fatkhullin 2021, lemma 8 (C / (1 + omega)). "
        "The figures are compared with a pilot run in plain numpy"
    )
    setting = (
        f"digits on a perceptron 64-64-64-10, {WORKERS} workers, batches of {BATCH}, learning rate {LR}, {EPOCHS} "
        f"epochs, gradients sent to a parameter server in virtual time; QSGD with buckets of {BUCKET}; median of 5 "
        "seeds"
    )
    tolerance = (
        f"test errors: dense gradients <= {LEARNS:g} %; feedback without damping diverges to NaN with 1 and 4 levels "
        "on every seed; with the damping that flockstep adds, at most 2 points above dense gradients"
    )

    def check(self, say: Say) -> Verdict:
        """For each number of levels, train without feedback, with feedback on undamped QSGD, and with feedback on
        damped QSGD.
        """
        dense = with_progress(say, "dense", trained("identity", seeds=self.seeds, batch=BATCH)).median
        rows, figures = (
            [bounded("dense, error in %", f"2.8 to 3.3, <= {LEARNS:g}", dense, round(dense, 2))],
            {},
        )
        for levels in LEVELS:
            codec = Qsgd(levels, BUCKET)
            omega = codec.variance(1 << 20) or 0.0
            composed = bound_codec(codec, Residual(), (), 0)
            bare, raw, ours = (self._finals(codec, feedback, say) for feedback in ("none", Raw(), "residual"))
            factor = composed.factor(1 << 20) if isinstance(composed, Damped) else 1.0
            exact = bool(np.isclose(factor, 1 / (1 + omega)))
            rows += [
                ClaimRow(
                    f"qsgd({levels}), no feedback, %", "2.5 to 3.1", round(bare.median, 2), bare.median <= dense + 2
                ),
                self._raw(levels, raw, dense),
                ClaimRow(
                    f"qsgd({levels}), with feedback: damping factor", round(1 / (1 + omega), 4), round(factor, 4), exact
                ),
                ClaimRow(
                    f"qsgd({levels}), feedback, damped, %",
                    "3.1 to 4.7, <= dense + 2",
                    round(ours.median, 2),
                    ours.median <= dense + 2 and not ours.diverged,
                ),
            ]
            figures[f"qsgd({levels}), omega"] = omega
        return Verdict(tuple(rows), "", figures)

    def _raw(self, levels: int, raw: Finals, dense: float) -> ClaimRow:
        seen = f"diverges on {raw.diverged} of {self.seeds} seeds" if raw.diverged else f"{raw.median:.2f} %"
        if levels in DIVERGE:
            return ClaimRow(f"qsgd({levels}), raw feedback", "diverges", seen, raw.diverged == self.seeds)
        return ClaimRow(f"qsgd({levels}), raw feedback", "fine", seen, not raw.diverged and raw.median <= dense + 2)

    def _finals(self, codec: Qsgd, feedback: str | Residual, say: Say) -> Finals:
        return with_progress(
            say, f"{codec}, feedback {feedback}", trained(codec, feedback, seeds=self.seeds, batch=BATCH)
        )
