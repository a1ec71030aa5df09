"""The failure matrix against runs with injected faults: every strategy has a row, each cell is what is observed."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from flockstep import registry
from flockstep.arrays.schema import FlatArray
from flockstep.collectives.base import Collective
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.errors import PeerLost, ProtocolError
from flockstep.messages import Mailbox, Message, Wanted
from flockstep.nodes import Worker
from flockstep.strategies.all_reduce import AllReduce
from flockstep_lab import failures
from flockstep_lab.failure_matrix import CELLS, WORDS, FailureRow, as_toml, differences, observed, rows
from support.matrix import covering, each, few

ROWS = {row.strategy: row for row in rows()}


def rowless(noun, composed):
    """Registered names from which no composition of the matrix is made."""
    return set(registry.names(noun)) - {registry.name_of(type(one)) for one in composed}


def test_every_strategy_has_a_row():
    assert rowless("strategy", [row.composed for row in rows()]) == set(), "see flockstep_lab.failure_matrix"


def test_every_consistency_rule_has_a_row():
    rules = [row.composed.consistency for row in rows() if row.strategy.startswith("ps(")]
    assert rowless("consistency", rules) == set(), "see flockstep_lab.failure_matrix"


def test_a_strategy_without_a_row_is_noticed():
    assert "adpsgd" in rowless("strategy", [row.composed for row in rows() if row.strategy != "adpsgd"])


def test_no_row_is_there_twice():
    assert len({str(row.composed) for row in rows()}) == len(rows())


def each_word_once():
    """Few rows in which each column has every word that it has anywhere."""
    return [rows()[number] for number in sorted(covering([frozenset(enumerate(row.words())) for row in rows()]))]


@pytest.mark.parametrize("row", few(rows(), *each_word_once()), ids=lambda row: row.strategy)
def test_what_the_matrix_says_is_what_is_observed(row):
    assert differences(row) == []


def survived(word):
    """How many of the workers may die, by what the matrix says of deaths."""
    if word in (failures.ENDS, failures.STALLS):
        return 0
    limit = re.search(r", up to (\d+) of \d+$", word)
    return failures.WORKERS - 1 if limit is None else int(limit[1])


def test_a_row_agrees_with_the_traits():
    def check(row):
        traits = row.composed.traits
        assert traits.deaths(failures.WORKERS) == survived(row.dead)
        assert bool(traits.survives) == (survived(row.dead) > 0)
        if traits.delivery == "synchronous":
            assert row.equal in (failures.EVERY_STEP, failures.DRAINED)
        if traits.delivery == "partial":
            assert row.equal != failures.DRAINED

    each(check, rows())


def explained(word):
    """The entry that a word has among those explained, which say k steps and b of n."""
    word = re.sub(r", up to \d+ of \d+$", "", word)
    word = re.sub(r"\d+ of \d+", "b of n", word)
    return re.sub(r"\d+ steps", "k steps", word)


def test_every_word_is_explained():
    assert {explained(word) for row in rows() for word in row.words()} <= set(WORDS)


@pytest.mark.negative_control("strategy:all_reduce", "strategy:easgd", "strategy:gossip")
@pytest.mark.parametrize(
    ("strategy", "cell", "wrong"),
    [
        ("all_reduce", "equal", failures.DRAINED),
        ("all_reduce", "dead", failures.WAITS),
        ("gossip(p=0.5)", "lost", failures.NO_EFFECT),
        ("easgd(period=10)", "lost", failures.ONE_STALLS),
        ("gossip(p=0.5)", "slow", failures.EVERYONE),
    ],
)
def test_a_wrong_word_is_noticed(strategy, cell, wrong):
    (said,) = differences(msgspec.structs.replace(ROWS[strategy], **{cell: wrong}))
    assert said.startswith(f"{strategy}, {cell}: the matrix says {wrong!r}, observed ")


@dataclass(frozen=True)
class Trusting(Collective):
    """Recursive doubling that takes the next message for the one that it waits for, whatever got lost in between."""

    async def all_reduce(self, me: Worker, array: FlatArray) -> None:
        for distance in (1, 2):
            me.send(me.rank ^ distance, "double", array)
            array += (await me.receive("double", me.rank ^ distance)).payload


@pytest.mark.negative_control("collective:recursive_doubling")
def test_a_sum_of_what_does_not_belong_together_is_noticed():
    assert failures.lost_message(AllReduce(collective=RecursiveDoubling())) == failures.ENDS
    assert failures.lost_message(AllReduce(collective=Trusting())) == failures.LATE_STALL


@pytest.mark.parametrize("nth", range(10, 22, 3))
@pytest.mark.parametrize("collective", [Ring(), RecursiveDoubling()], ids=str)
def test_no_wrong_sum_is_used_whichever_message_is_lost(collective, nth):
    source, to = (1, 2) if isinstance(collective, Ring) else (1, 0)
    strategy = AllReduce(collective=collective)
    whole, run = failures.observe(strategy), failures.observe(strategy, faults=[f"drops({source}, {to}, {nth})"])
    assert run.failure is not None
    for right, read in zip(whole.simulation.read, run.simulation.read, strict=True):
        assert read == right[: len(read)]
        assert read


def test_a_fault_that_does_not_happen_is_noticed(monkeypatch):
    monkeypatch.setattr(failures, "DEATH", 1e6)
    with pytest.raises(AssertionError, match="never noticed"):
        failures.dead_worker("gossip(p=0.5)")


SERVED = [row.strategy for row in rows() if row.composed.servers_for(failures.WORKERS)]


@pytest.mark.parametrize("strategy", SERVED)
def test_a_dead_server_ends_every_run(strategy):
    run = failures.observe(strategy, faults=[f"dies(-1, {failures.DEATH})"])
    assert isinstance(run.failure, PeerLost)
    assert "server 0 died" in str(run.failure)


def test_a_gap_in_a_senders_numbers_is_noticed():
    mailbox = Mailbox()
    for source, number in ((0, 1), (1, 1), (0, 2), (1, 3), (1, 4)):
        mailbox.put(Message(source, "part", np.zeros(1), number=number))
    mailbox.put(Message(0, "leave"))  # made by the driver: it has no number
    mailbox.require_all(0)
    mailbox.require_all(2)
    with pytest.raises(ProtocolError, match="message 2 from worker 1 was lost"):
        mailbox.require_all(1)
    assert len(list(mailbox.take_all(Wanted("part")))) == 5


def test_a_row_can_be_pasted():
    row = observed("easgd(period=10)")
    assert differences(row) == []
    assert msgspec.toml.decode(as_toml(row)) == {"row": [msgspec.to_builtins(row)]}
    assert set(CELLS) < set(FailureRow.__struct_fields__)
