"""Every registered claim says what it claims and how it is tried; the quick ones hold."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep import registry
from flockstep.records.events import StepEvent, UpdateEvent
from flockstep_lab.claims.a03_geometric_staleness import chi_squared_above
from flockstep_lab.claims.a04_asynchrony_begets_momentum import fitted
from flockstep_lab.claims.a14_pipeline_schedules import PipelineSchedules, idle_share_of
from flockstep_lab.claims.a17_consensus_rate import PUBLISHED, as_steep
from flockstep_lab.claims.base import Claim
from flockstep_lab.claims.c13_hogwild import rate
from flockstep_lab.claims.sparse_logistic import COEFFICIENTS, SparseLogistic
from flockstep_lab.claims.update_trace import timed, trace_of
from support.matrix import each, few

NAMES = registry.names("claim")
QUICK = [name for name in NAMES if Claim.parse(name).quick]


def test_a_claim_says_what_it_is() -> None:
    def check(name: str) -> None:
        claim = Claim.parse(name)
        for text in (claim.statement, claim.source, claim.setting, claim.tolerance):
            assert text
            assert text == text.strip()
        assert isinstance(claim.quick, bool)

    each(check, NAMES)


@pytest.mark.parametrize("name", few(QUICK, "A6", "A9", "A12", "A13", "A15", "A17"))  # those of a second
def test_a_quick_claim_holds(name: str) -> None:
    said: list[str] = []
    verdict = Claim.parse(name).check(said.append)
    assert verdict.rows
    short = [f"{row.what}: published {row.published}, ours {row.ours}" for row in verdict.rows if not row.holds]
    assert not short


def test_the_tail_of_chi_squared() -> None:
    """The tail probabilities equal tabulated quantiles."""
    for x, freedom, probability in ((5.991, 2, 0.05), (18.307, 10, 0.05), (63.691, 40, 0.01), (29.051, 40, 0.90)):
        assert chi_squared_above(x, freedom) == pytest.approx(probability, rel=2e-3)


@pytest.mark.parametrize("rho", PUBLISHED.values())
def test_a_ring_that_agrees_five_per_cent_too_slowly_is_noticed(rho: float) -> None:
    assert as_steep(rho, rho)
    assert not as_steep(rho**0.95, rho)


def test_momentum_is_found_in_a_course_that_has_it() -> None:
    w = [1.0, 0.9]
    for _ in range(58):
        w.append(w[-1] + 0.8 * (w[-1] - w[-2]) - 0.05 * w[-1])
    assert fitted(np.array(w)) == pytest.approx((0.8, 0.05))


def test_a_trace_ends_where_the_first_worker_does() -> None:
    updates = [UpdateEvent(float(t), -1, rank, 1, t) for t, rank in enumerate((0, 1, 1, 0, 1, 0))]
    cut = trace_of(updates).until_first_end(steps=3)
    assert cut.rank.tolist() == [0, 1, 1, 0, 1]
    assert cut.staleness.tolist() == [0, 1, 2, 3, 4]


def test_free_messages_leave_the_times_of_gradients() -> None:
    trace, _ = timed("ps(bsp)", workers=3, steps=4, compute="constant(2)")
    assert trace.t.tolist() == [2.0] * 3 + [4.0] * 3 + [6.0] * 3 + [8.0] * 3
    assert not trace.staleness.any()


def test_the_bubbles_of_schedules_are_the_published_ones() -> None:
    rows = PipelineSchedules().computed(lambda line: None)
    assert len(rows) == 25
    assert [row.what for row in rows if not row.holds] == []


def test_the_bubble_of_real_stages_is_the_time_without_passes() -> None:
    """Two stages that compute for 2 and 1 of each 3 seconds; the second step and the last wait for 100 seconds."""
    steps = [
        StepEvent(100 * (at > 0) + 100 * (at == 6) + 3.0 * at, rank, at, None, busy, *[0] * 6)
        for rank, busy in enumerate((2.0, 1.0))
        for at in range(7)
    ]
    assert idle_share_of(steps) == pytest.approx(0.5)


def test_steps_are_counted_while_all_workers_run() -> None:
    """Two steps a second each; one starts a second late, and the other ends one early."""
    steps = [
        StepEvent(late + at / 2, rank, at, None, *[0] * 7) for rank, late in enumerate((0.0, 1.0)) for at in range(9)
    ]
    assert rate(steps, 2) == pytest.approx(4)
    assert rate(steps[:9], 1) == pytest.approx(2)
    assert rate(steps[:9] + steps[:9], 1) == pytest.approx(4), "twice as many steps in the same time"


def test_the_slope_of_sparse_logistic_regression() -> None:
    """Against differences of the loss; and no slope where no sample has a category, unless there is a penalty."""
    random = np.random.default_rng(3)
    x, y = random.integers(0, 200, (4, 20)), random.integers(0, 2, 4)
    w = random.standard_normal(COEFFICIENTS)
    out, model = np.zeros((1, COEFFICIENTS)), SparseLogistic()
    model.gradients({"w": w[None]}, x[None], y[None], {"w": out})
    for code in range(0, 200, 7):
        apart = 1e-6 * (np.arange(COEFFICIENTS) == code)
        high, low = (model.loss({}, model.outputs({"w": at}, x), y) for at in (w + apart, w - apart))
        assert out[0, code] == pytest.approx((high - low) / 2e-6, abs=1e-8)
    assert set(np.flatnonzero(out[0])) == set(x.ravel())
    SparseLogistic(l2=0.1).gradients({"w": w[None]}, x[None], y[None], {"w": out})
    assert out[0].all()
