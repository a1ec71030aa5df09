"""What a program does is compared with its tape, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flockstep.messages import LAUNCHER, Message
from flockstep.nodes import Cluster, Node
from flockstep.records.tape import MappedFile, MessageEntry, TapeHeader, TapeWriter
from flockstep.runtime.follower import Agreement, Difference, Follower, MessageSource, TapeEnded
from flockstep.runtime.tape import RecordingTape, checksums

PARAMS = np.arange(40, dtype=np.float32)


class Play(MessageSource):
    """Sends the messages that a test names."""

    def __init__(self) -> None:
        self.coming: list[Message] = []
        self.differences: list[str] = []
        self.found: list[Agreement | None] = []
        self.node = Node(0, Cluster(2), PARAMS.copy(), np.random.default_rng(0))
        self.taken: list[tuple[int, str]] = []

    def message(self, entry: MessageEntry) -> Message:
        return self.coming.pop(0)

    def before_gradient(self, node: Node) -> None:
        """Go on at once."""

    def at_turn(self, node: Node, place: int) -> None:
        """Look at nothing."""

    def differ(self, difference: Difference) -> Exception:
        self.differences.append(difference.what)
        return ValueError(difference.what)

    def agree(self, agreement: Agreement | None) -> None:
        self.found.append(agreement)

    def follower(self, path: Path) -> Follower:
        follower = Follower(self, path, lambda tag, note: note)
        follower.begin(self.node, lambda message: self.taken.append((message.source, message.tag)))
        return follower


def recorded(path: Path, ending: float = 0.5) -> None:
    """A program that gets two messages, reads the clock, uses a gradient and is evaluated."""
    tape = RecordingTape(TapeWriter(MappedFile(path), TapeHeader(0, 0, (0, 1), ((0, 1),), 0, False, False, "{}")))
    tape.heard(Message(1, "a", number=1))
    tape.turn()
    tape.heard(Message(LAUNCHER, "left", note={"address": 1}))
    tape.heard(Message(LAUNCHER, "checkpoint", note={"do": "count", "wave": 1}))
    tape.heard(Message(LAUNCHER, "taken"))
    tape.heard(Message(1, "b", number=3))
    tape.turn()
    assert tape.reading(lambda: 12.5) == 12.5
    tape.gradient(ending, PARAMS)
    tape.snapshot(2, 7, PARAMS)
    tape.turn()
    tape.close()


def at_the_clock(play: Play, path: Path) -> Follower:
    follower = play.follower(path)
    play.coming += [Message(1, "a", number=1), Message(1, "b", number=3)]
    for _ in range(2):
        follower.turn()
    return follower


def test_what_the_run_did_is_repeated(tmp_path: Path) -> None:
    recorded(tmp_path / "tape")
    play = Play()
    follower = at_the_clock(play, tmp_path / "tape")
    assert play.taken == [(1, "a"), (LAUNCHER, "left"), (1, "b")]
    assert follower.reading(lambda: 99.0) == 12.5
    follower.gradient(0.5, PARAMS)
    follower.snapshot(2, 7, PARAMS)
    assert [None if one is None else one.step for one in play.found] == [None, 7]
    assert follower.ended
    with pytest.raises(TapeEnded, match="the tape of worker 0 ends here"):
        follower.gradient(0.5, PARAMS)
    with pytest.raises(TapeEnded, match="the tape of worker 0 ends here"):
        raise follower.wait_in_vain("a message")


def change(array: Any, place: int) -> Any:
    changed = array.copy()
    changed.view(np.uint8)[place] ^= 1
    return changed


@pytest.mark.parametrize(
    ("does", "what"),
    [
        (lambda one: one.gradient(0.5, PARAMS), "it has computed a gradient, where the run had a reading of the clock"),
        (lambda one: (one.reading(float), one.gradient(0.25, PARAMS)), "the loss is 0.25, and was 0.5"),
        (lambda one: (one.reading(float), one.gradient(float("nan"), PARAMS)), "the loss is nan, and was 0.5"),
        (
            lambda one: (one.reading(float), one.gradient(0.5, change(PARAMS, 50))),
            "the gradient differs in elements 12 to 15",
        ),
        (
            lambda one: (one.reading(float), one.gradient(0.5, PARAMS), one.snapshot(2, 7, change(PARAMS, 159))),
            "the parameters differ in elements 36 to 39",
        ),
        (
            lambda one: (one.reading(float), one.gradient(0.5, PARAMS), one.snapshot(3, 7, PARAMS)),
            "evaluation 3 came after step 7, where the run had evaluation 2 after step 7",
        ),
        (
            lambda one: (one.reading(float), one.gradient(0.5, PARAMS), one.snapshot(2, 8, PARAMS)),
            "evaluation 2 came after step 8, where the run had evaluation 2 after step 7",
        ),
        (lambda one: (one.turn(), one.reading(float)), "it reads the clock, where the run had a reading of the clock"),
    ],
)
def test_the_first_difference_is_found(does: Any, what: str, tmp_path: Path) -> None:
    recorded(tmp_path / "tape")
    play = Play()
    follower = at_the_clock(play, tmp_path / "tape")
    with pytest.raises(ValueError, match=what):
        does(follower)
    assert play.differences[-1].startswith(what)


def test_a_failure_before_the_end_of_the_tape_is_a_difference(tmp_path: Path) -> None:
    recorded(tmp_path / "tape")
    play = Play()
    follower = at_the_clock(play, tmp_path / "tape")
    follower.fail("no reason")
    assert play.differences == ["it failed: no reason"]


def test_another_message_than_the_run_s_is_found(tmp_path: Path) -> None:
    recorded(tmp_path / "tape")
    play = Play()
    follower = play.follower(tmp_path / "tape")
    play.coming += [Message(1, "a", number=2)]
    with pytest.raises(ValueError, match="message 2 of worker 1 came where the run had message 1"):
        follower.turn()


def test_checksums_see_words_that_change_places_and_signs() -> None:
    random = np.random.default_rng(0)
    for size in (7, 40, 1000, 4096):
        array = random.normal(size=size).astype(np.float32)
        swapped, negated = array.copy(), -array
        swapped[[0, size // 2]] = swapped[[size // 2, 0]]
        found = {checksums(one).tobytes() for one in (array, swapped, negated, array[::-1].copy())}
        assert len(found) == 4
