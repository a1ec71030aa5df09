"""Which process of a replicated server continues when another one is lost."""

from __future__ import annotations

import pytest

from flockstep.launchers.peers import successor
from flockstep.nodes import Cluster

CLUSTER = Cluster(2, 2, replicas=2)
"""Two servers, each with two backups."""


def test_a_worker_is_replaced_by_nobody() -> None:
    assert successor(CLUSTER, 1, {1}) is None


def test_a_server_is_replaced_while_one_of_its_processes_is_left() -> None:
    head, first, second = CLUSTER.chain(-1)
    assert successor(CLUSTER, head, {head})
    assert successor(CLUSTER, first, {head, first})
    assert successor(CLUSTER, second, {head, first, second}) is None
    assert successor(CLUSTER, head, {head, *CLUSTER.chain(-2)}), "the other server's processes do not count"


@pytest.mark.parametrize(
    ("lost", "gone", "leads", "promoted"),
    [(0, (0,), 1, True), (1, (0, 1), 2, True), (1, (1,), 0, False), (2, (0, 2), 1, False)],
)
def test_the_next_process_of_the_chain_takes_the_place_of_the_head(
    lost: int, gone: tuple[int, ...], leads: int, promoted: bool
) -> None:
    chain = CLUSTER.chain(-1)
    assert successor(CLUSTER, chain[lost], {chain[at] for at in gone}) == (chain[leads], promoted)
