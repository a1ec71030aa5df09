"""Claims about errors do not hold where nothing learns: references have bounds of their own."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest

from flockstep_lab.claims.base import Claim, Verdict
from flockstep_lab.claims.c06_deep_gradient_compression import Final
from flockstep_lab.claims.compressed_digits import Finals
from flockstep_lab.claims.digit_clients import RoundsTo
from flockstep_lab.claims.sorted_digits import RunErrors
from flockstep_lab.claims.spans import GUESSING

GUESSED = Finals(np.full(5, GUESSING), np.full(5, math.log(10)), 0)
RUNS = {
    "B1": ("spans", {"error_of": GUESSING}),
    "B2": ("spans", {"error_of": GUESSING}),
    "B3": ("spans", {"error_of": GUESSING}),
    "B4": ("b04_error_feedback", {"trained": GUESSED}),
    "B5": ("b05_delay_compensation", {"errors_of": [GUESSING] * 5, "_alone": np.zeros(3, np.float32)}),
    "B6": ("b06_sync_async_time", {"seconds_to_target": math.inf}),
    "B7": ("b07_data_that_differ", {"ends_of": [RunErrors(GUESSING, GUESSING, 1.0, True, 1)] * 5}),
    "B8": ("b08_partial_communication", {"ends_of": [RunErrors(GUESSING, GUESSING, 1.0, True, 1)] * 5}),
    "B9": ("b09_feedback_needs_contraction", {"trained": GUESSED}),
    "C23": ("c23_federated_averaging", {"trained": RoundsTo(math.inf, math.inf, 10.0)}),
    "C24": ("c24_scaffold", {"trained": RoundsTo(math.inf, math.inf, 10.0)}),
    "C25": ("c25_buffered_clients", {"trained": RoundsTo(math.inf, math.inf, 10.0)}),
    "C26": ("c26_partial_work", {"trained": RoundsTo(math.inf, math.inf, 10.0)}),
    "C6": ("c06_deep_gradient_compression", {"_trained": Final(GUESSING, math.log(10), 300.0, 300.0)}),
}
"""What runs a claim's training, and what that would give if every model guessed."""
REFERENCES = {
    "B1": ["synchronous", "1-softsync, alpha", "15-softsync, alpha / 15", "30-softsync, alpha / 30"],
    "B2": ["EASGD, tau 1:", "EASGD, tau 16", "EASGD, tau 64", "Downpour, tau 1:"],
    "B3": ["mean test error in %, small batch"],
    "B4": ["dense"],
    "B7": ["synchronous, mixed", "synchronous, sorted", "sgp", "dpsgd", "local_sgd(10)", "local_sgd(50)"],
    "B8": ["full", "updates deferred, share 0.5", "updates deferred, share 0.05"],
    "B9": ["dense"],
    "C6": ["dense"],
}
"""Rows about what has to learn, by how they begin."""


def guessing(name: str, patch: pytest.MonkeyPatch) -> Verdict:
    """The verdict on a claim whose every model guesses."""
    module, runs = RUNS[name]
    for function, gives in runs.items():
        patch.setattr(
            importlib.import_module(f"flockstep_lab.claims.{module}"), function, lambda *_, gives=gives, **__: gives
        )
    return Claim.parse(name).check(lambda line: None)


@pytest.mark.parametrize("name", RUNS)
def test_a_claim_does_not_hold_where_nothing_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = guessing(name, monkeypatch)
    assert not verdict.holds
    for begins in REFERENCES.get(name, []):
        rows = [row for row in verdict.rows if row.what.startswith(begins)]
        assert rows, begins
        assert not any(row.holds for row in rows), begins


def test_replicas_that_just_met_do_not_show_that_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of B7: a worst worker as good as the mean model says nothing about replicas."""
    module = importlib.import_module("flockstep_lab.claims.b07_data_that_differ")
    monkeypatch.setattr(module, "ends_of", lambda *_, **__: [RunErrors(6.0, 6.0, 0.0, True, 1)] * 5)
    rows = {row.what.split(",")[0]: row.holds for row in Claim.parse("B7").check(lambda line: None).rows}
    assert not rows["dpsgd"]
    assert not rows["local_sgd(10)"]
    monkeypatch.setattr(module, "ends_of", lambda *_, **__: [RunErrors(6.0, 20.0, 1.0, False, 1)] * 5)
    rows = {row.what.split(",")[0]: row.holds for row in Claim.parse("B7").check(lambda line: None).rows}
    assert rows["dpsgd"]
    assert rows["local_sgd(10)"]
    assert not rows["easgd(10)"]  # far from the pilot's 42 to 48
