"""What each consistency rule promises: about time, staleness, values and the dead."""

from __future__ import annotations

import pytest

from flockstep.errors import PeerLost
from flockstep.messages import MASTER
from flockstep.records.events import StepEvent
from flockstep.testing.strategies import run_strategy


def test_a_cache_spares_reads():
    asked, always = (run_strategy(f"ps({rule}(8))", 4, 40) for rule in ("cached_ssp", "ssp"))
    reads = [entry for entry in asked.sent("read") if not entry.message.reply_to]
    assert 0 < len(reads) < 0.6 * 4 * 40
    assert asked.totals[MASTER].sent_bytes < 0.6 * always.totals[MASTER].sent_bytes
    assert asked.totals[MASTER].received_bytes == always.totals[MASTER].received_bytes


@pytest.mark.parametrize("rule", ["ssp(2)", "bounded_delay(2)", "essp(2)", "value_bound(0.01)", "k_async(3)"])
def test_the_dead_are_taken_out(rule):
    run = run_strategy(f"ps({rule})", 4, 30, faults=["dies(1, 0.3)"])
    steps = {rank: max(event.step for event in run.of(StepEvent) if event.rank == rank) for rank in range(4)}
    assert steps[1] < 30
    assert {steps[rank] for rank in (0, 2, 3)} == {30}


def test_as_many_may_die_as_there_are_backups():
    run = run_strategy("ps(backup(2))", 5, 30, faults=["dies(1, 0.3)", "dies(2, 0.4)"])
    assert max(event.step for event in run.of(StepEvent) if event.rank == 0) == 30
    with pytest.raises(
        PeerLost, match="a step takes the gradients of 4 workers, but 2 of 5 workers are lost; configure fewer"
    ):
        run_strategy("ps(backup(1))", 5, 30, faults=["dies(1, 0.3)", "dies(2, 0.4)"])
