"""Rules that take the first gradients of a version: who was late has skipped versions, and must come to its end too."""

from __future__ import annotations

import pytest

from flockstep.messages import LEAVE, Address, Message
from flockstep.records.events import StepEvent
from flockstep.testing.strategies import Watched, run_strategy


@pytest.mark.parametrize("rule", ["backup(6)", "k_sync(2)", "k_batch_sync(2)"])
@pytest.mark.parametrize("seed", range(4))
def test_late_workers_finish_when_too_few_are_left(rule: str, seed: int) -> None:
    """Messages queue up at the server for as long as gradients take, while versions come and go."""
    network = "link(bandwidth=1e5, latency=0.0001)"
    run = run_strategy(f"ps({rule})", 8, 40, compute="lognormal(0.01, sigma=1)", network=network, seed=seed)
    assert len(run.of(StepEvent)) == 8 * 40
    assert all(node.step == 40 for address, node in run.nodes.items() if address >= 0)


@pytest.mark.parametrize("rule", ["backup(1)", "k_sync(2)", "k_batch_sync(4)"])
@pytest.mark.parametrize("lost", ["drops(1, -1, 3)", "drops(-1, 1, 3)"])
def test_who_loses_a_push_or_an_answer_is_late(rule: str, lost: str) -> None:
    run = run_strategy(f"ps({rule})", 4, 20, faults=[lost])
    assert all(node.step == 20 for address, node in run.nodes.items() if address >= 0)


class Releases(Watched):
    """Servers hear twice of whoever leaves, as in processes: that it leaves, and that they must do without it."""

    def send(self, to: Address, message: Message) -> None:
        super().send(to, message)
        if message.tag == LEAVE and to < 0:
            super().send(to, Message(message.source, LEAVE, note={"lost": 1}))


@pytest.mark.parametrize(
    "text",
    [
        "ps(backup(1))",
        "ps(k_sync(2))",
        "ps(k_async(2))",
        "ps(softsync(1))",
        "ps(ssp(2))",
        "gradient_coding(scheme=cyclic)",
        "epoch_server(length=7)",
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_who_has_left_is_not_lost(text: str, seed: int) -> None:
    runs = [run_strategy(text, 3, 20, simulation=kind, seed=seed) for kind in (Watched, Releases)]
    steps = [[node.step for address, node in run.nodes.items() if address >= 0] for run in runs]
    assert steps[0] == steps[1]
