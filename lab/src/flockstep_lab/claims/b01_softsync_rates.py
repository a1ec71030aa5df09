"""Claim: a learning rate that suits fresh gradients diverges with stale gradients, and converges if divided by the
staleness.
"""

from __future__ import annotations

from dataclasses import dataclass

from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.spans import Training, errors_of, median, ranged

WORKERS, BATCH, EPOCHS = 30, 4, 20
OPTIMIZER = "sgd(lr=0.02, momentum=0.9)"
LEARNS = 6.0
"""Test error, in percent, above which synchronous training counts as failed; in the pilot run the error was 3.3 %."""


@dataclass(frozen=True)
class SoftsyncRates(Claim):
    """Claim: n-softsync needs the learning rate α / n where synchronous training uses α."""

    seeds: int = 5
    statement = (
        "15-softsync and 30-softsync do not learn with the learning rate alpha of few workers; with alpha / n every "
        "n-softsync reaches the error of synchronous training"
    )
    source = (
        "Zhang, Gupta, Lian & Liu 2016, figure 3 (CIFAR-10, 30 learners: 90 % against 18 %); Gupta, Zhang & Wang "
        "2016, section 3.2. The figures are compared with a pilot run in plain numpy"
    )
    setting = (
        f"digits on a perceptron, {WORKERS} workers in virtual time, batches of {BATCH}, {EPOCHS} epochs (the pilot "
        f"run: 40), {OPTIMIZER} on the server, normal gradient times (coefficient of variation 0.1); alpha / n by "
        "staleness_scaled(mean, known=n); 5 seeds"
    )
    tolerance = (
        f"median test errors: <= {LEARNS:g} % for synchronous training and for the fixed rate with n = 1; >= 80 % "
        "for the fixed rate with n >= 15; at most 2.5 points above synchronous training for the rate divided by n"
    )

    def check(self, say: Say) -> Verdict:
        """Train synchronously with learning rate α, and with n-softsync at learning rates α and α / n."""
        sync = self._errors("ps", say)
        learns = median(sync) <= LEARNS
        bound = min(median(sync), LEARNS) + 2.5
        rows = [ClaimRow("synchronous, error in %", f"3.3 in 40 epochs, <= {LEARNS:g}; paper 18", ranged(sync), learns)]
        fixed = (
            (1, f"3.1 in 40 epochs, <= {LEARNS:g}", 0.0, LEARNS),
            (15, "92.8 in 40 epochs, >= 80; paper 90", 80.0, 100.0),
            (30, "87.8 in 40 epochs, >= 80; paper 90", 80.0, 100.0),
        )
        for n, published, least, most in fixed:
            errors = self._errors(f"ps(softsync({n}))", say)
            rows.append(ClaimRow(f"{n}-softsync, alpha", published, ranged(errors), least <= median(errors) <= most))
        for n, published in ((1, "3.3"), (15, "3.1"), (30, "2.5")):
            errors = self._errors(f"ps(softsync({n}), server_update=staleness_scaled(mean, known={n}))", say)
            published_error = f"{published} in 40 epochs"
            rows.append(
                ClaimRow(f"{n}-softsync, alpha / {n}", published_error, ranged(errors), median(errors) <= bound)
            )
        return Verdict(tuple(rows))

    def _errors(self, strategy: str, say: Say) -> list[float]:
        return errors_of(strategy, Training(WORKERS, OPTIMIZER, BATCH, EPOCHS), self.seeds, say)
