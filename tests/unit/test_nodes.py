"""Requests and replies of one node, whose program and network are driven by hand."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from flockstep.errors import PeerLost
from flockstep.messages import LEAVE, Message, Note, Wanted, server
from flockstep.nodes import Cluster, Node, deliver, lose
from support.matrix import each

TARGETS = [server(0), server(1), server(0), 2]
"""Whom the node asks, one of them twice."""


class Hand:
    """A driver whose network delivers what the test says; keeps what was sent."""

    def __init__(self, program=None):
        self.sent = []
        self.node = Node(0, Cluster(3, 2), np.zeros(1), np.random.default_rng(0))
        self.node.port = self
        self.waiting = self.result = None
        self.program = program(self.node) if program else None
        if self.program:
            self.resume(None)

    def send(self, to, message):
        self.sent.append((to, message))

    def collect(self):
        pass

    def updates(self, source, count, staleness):
        pass

    def resume(self, value):
        try:
            self.waiting = self.program.send(value)
        except StopIteration as end:
            self.waiting, self.result = None, end.value

    def deliver(self, message):
        deliver(self.node, message)
        found = self.waiting and self.node.mailbox.take(self.waiting)
        if found:
            self.resume(found)

    def answer(self, index):
        """Deliver the reply to the index-th request; its array says which."""
        to, request = self.sent[index]
        self.deliver(Message(to, request.tag, np.array([index]), number=9, reply_to=request.number))


def asks(targets):
    requests = [(to, np.array([10 * i]), {"i": i}) for i, to in enumerate(targets)]
    return lambda node: node.ask_all("push", requests)


def told(replies):
    return [int(reply.payload[0]) for reply in replies]


def test_replies_come_in_the_order_of_the_requests_whatever_the_order_of_arrival():
    def check(*order):
        hand = Hand(asks(TARGETS))
        for index in order:
            assert hand.result is None
            hand.answer(index)
        assert told(hand.result) == [0, 1, 2, 3]
        assert [reply.source for reply in hand.result] == TARGETS
        assert len(hand.node.mailbox) == 0

    each(check, permutations(range(4)))


def test_all_requests_leave_before_any_reply_is_awaited():
    hand = Hand(asks(TARGETS))
    assert [to for to, _ in hand.sent] == TARGETS
    assert [(m.tag, m.note, int(m.array[0])) for _, m in hand.sent] == [("push", {"i": i}, 10 * i) for i in range(4)]
    assert [m.number for _, m in hand.sent] == [1, 1, 2, 1]
    assert isinstance(hand.waiting, Wanted)


def test_messages_that_answer_nothing_stay_where_they_are():
    hand = Hand(asks(TARGETS))
    hand.deliver(Message(server(0), "push", number=1))
    hand.deliver(Message(server(1), "push", number=9, reply_to=2))
    assert hand.result is None
    for index in range(4):
        hand.answer(index)
    assert told(hand.result) == [0, 1, 2, 3]
    assert len(hand.node.mailbox) == 2


def test_arrays_are_copied_when_they_are_sent():
    array = np.zeros(2)
    hand = Hand(lambda node: node.ask_all("push", [(server(0), array, {}), (server(1), None, {})]))
    array += 1
    (_, first), (_, second) = hand.sent
    assert first.array.tolist() == [0, 0]
    assert not first.array.flags.writeable
    assert second.array is None


def test_a_node_that_left_without_an_answer_is_reported():
    hand = Hand(asks([server(0), server(1)]))
    hand.deliver(Message(server(1), LEAVE))
    with pytest.raises(PeerLost, match="server 1 has left while worker 0 waited for a reply from server 1"):
        hand.answer(0)


def test_a_reply_from_a_node_that_has_left_since_counts():
    hand = Hand(asks([server(0), server(1)]))
    hand.answer(1)
    hand.deliver(Message(server(1), LEAVE))
    hand.answer(0)
    assert told(hand.result) == [0, 1]


def test_one_question_is_one_request():
    hand = Hand(lambda node: node.ask(server(1), "what", note={"x": 1}))
    ((to, request),) = hand.sent
    assert (to, request.tag, request.array, request.note) == (server(1), "what", None, {"x": 1})
    hand.answer(0)
    assert told([hand.result]) == [0]


def test_several_are_answered_with_one_copy():
    hand, array = Hand(), np.zeros(2)
    hand.node.reply_all([Message(1, "push", number=3), Message(2, "push", number=7)], array, {"version": 4})
    array += 1
    (one, first), (other, second) = hand.sent
    assert (one, first.reply_to, other, second.reply_to) == (1, 3, 2, 7)
    assert first.array is second.array
    assert first.array.tolist() == [0, 0]
    assert first.note == second.note == {"version": 4}


@pytest.mark.parametrize("receivers", [[1], [1, 2]])
def test_a_port_that_copies_is_given_the_array_itself_for_a_single_receiver(receivers):
    hand, array = Hand(), np.array([1.0])
    hand.node.port_copies = True
    hand.node.send_all(iter(receivers), "model", array)
    hand.node.reply_all([Message(to, "pull", number=3) for to in receivers], array)
    assert [message.array is array for _, message in hand.sent] == [len(receivers) == 1] * 2 * len(receivers)


def test_a_background_task_stays_in_its_channel_when_a_node_is_lost():
    async def goes_on(node):
        with pytest.raises(PeerLost, match="worker 1 was lost while worker 0 waited for 'first"):
            await node.receive("first", 1)
        node.send(2, "second")

    hand = Hand()
    hand.node.background("side", goes_on(hand.node))
    lose(hand.node, 1)
    assert [(to, message.tag) for to, message in hand.sent] == [(2, "second/side")]


class Pushed(Note, frozen=True):
    version: int


class Held(Note, frozen=True):
    version: int


@pytest.mark.parametrize("note", [None, {"version": 1}, Held(1)])
def test_a_note_that_the_strategy_does_not_declare_is_not_sent(note):
    hand = Hand()
    hand.node.notes = {"push/bucket": Pushed}
    with pytest.raises(TypeError, match=r"'push/bucket' is declared with Pushed in the strategy's `notes`"):
        hand.node.send(1, "push/bucket", None, note)
    with pytest.raises(TypeError, match="'pull' is declared with no Note"):
        hand.node.send(1, "pull", None, Pushed(1))
    assert not hand.sent
    hand.node.send(1, "push/bucket", None, Pushed(1))
    assert hand.sent[0][1].note == Pushed(1)
