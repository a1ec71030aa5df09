"""Which process of a replicated server continues when another one is lost."""

from __future__ import annotations

import pytest

from flockstep.launchers.backups import is_replaced, replaced
from flockstep.nodes import Cluster

CLUSTER = Cluster(2, 2, replicas=2)
"""Two servers, each with two backups."""


def test_a_worker_is_replaced_by_nobody() -> None:
    assert not is_replaced(CLUSTER, 1, {1})


def test_a_server_is_replaced_while_one_of_its_processes_is_left() -> None:
    head, first, second = CLUSTER.chain(-1)
    assert is_replaced(CLUSTER, head, {head})
    assert is_replaced(CLUSTER, first, {head, first})
    assert not is_replaced(CLUSTER, second, {head, first, second})
    assert is_replaced(CLUSTER, head, {head, *CLUSTER.chain(-2)}), "the other server's processes do not count"


@pytest.mark.parametrize(
    ("lost", "gone", "promoted", "text"),
    [
        (0, (0,), 1, "it died; server {1}, its backup, continues in its place"),
        (1, (0, 1), 2, "it died; server {2}, its backup, continues in its place"),
        (1, (1,), None, "it died; server {0}, whose backup it was, continues"),
        (2, (0, 2), None, "it died; server {1}, whose backup it was, continues"),
    ],
)
def test_the_next_process_of_the_chain_takes_the_place_of_the_head(
    lost: int, gone: tuple[int, ...], promoted: int | None, text: str
) -> None:
    chain = CLUSTER.chain(-1)
    found = replaced(CLUSTER, chain[lost], {chain[at] for at in gone}, "it died")
    assert found.promoted == (None if promoted is None else chain[promoted])
    assert found.text == text.format(*(-1 - one for one in chain))
