"""Filters of the parameter server: what is withheld, what travels, and that nothing is lost on the way."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.codecs.half import Half
from flockstep.codecs.identity import Identity
from flockstep.errors import CompositionError, ProtocolError
from flockstep.messages import MASTER
from flockstep.strategies.base import Strategy
from flockstep.strategies.filters.base import Filter
from flockstep.strategies.filters.packet import HASHED, LISTED, Inbox, Outbox, pack, unpack
from flockstep.testing.expressions import check_component
from flockstep.testing.strategies import GradientSource, check_strategy, equal_bits, run_strategy, small_job

SIZE = 50
ALL = ["significantly_modified(3)", "random_skip(0.7)", "support", "kkt(2, 0.5)", "key_caching"]


def parsed(*texts):
    return tuple(Filter.parse(text) for text in texts)


def updates(count=30, seed=0):
    """Random updates of whole numbers, whose sums are exact."""
    return np.random.default_rng(seed).integers(-6, 7, (count, SIZE)).astype("float32")


class Line:
    """A sender and a receiver of filtered updates, with the state of both."""

    def __init__(self, *texts, codec=None):
        self.filters, self.codec = parsed(*texts), codec or Identity()
        self.outbox, self.inbox = Outbox(), Inbox()
        self.random = np.random.default_rng(1)
        self.packets = []

    def send(self, update, params=None, flush=False):
        params = np.ones_like(update) if params is None else params
        data = pack(self.filters, self.codec, update, params, self.outbox, self.random, flush)
        data.flags.writeable = False
        self.packets.append(data)
        return unpack(self.filters, self.codec, data, len(update), update.dtype.name, self.inbox)

    @property
    def pending(self):
        return np.zeros(SIZE, "float32") if self.outbox.pending is None else self.outbox.pending


@pytest.mark.parametrize(
    "texts",
    [
        ["significantly_modified(3)"],
        ["random_skip(0.7)"],
        ["random_skip(0.3)", "significantly_modified(4)", "key_caching"],
        ["support", "key_caching(1)"],
        ["kkt(2, 0.5)"],
    ],
)
def test_sent_and_pending_make_all_updates(texts):
    """Where every parameter is away from zero, the KKT filter drops nothing either."""
    line, sent, total = Line(*texts), np.zeros(SIZE), np.zeros(SIZE)
    for update in updates():
        sent += line.send(update)
        total += update
        assert np.array_equal(sent + line.pending, total)
    sent += line.send(np.zeros(SIZE, "float32"), flush=True)
    assert np.array_equal(sent, total)
    assert not line.pending.any()


@pytest.mark.oracle("filter:significantly_modified")
def test_only_what_changed_by_more_travels():
    line, pending = Line("significantly_modified(3)"), np.zeros(SIZE)
    for update in updates():
        wanted = pending + update
        received = line.send(update)
        assert np.array_equal(received, np.where(np.abs(wanted) > 3, wanted, 0))
        pending = np.where(np.abs(wanted) > 3, 0, wanted)
        assert np.abs(line.pending).max() <= 3
        count = np.count_nonzero(np.abs(wanted) > 3)
        assert len(line.packets[-1]) == min(5 + 4 * count + 4 * count, 4 * SIZE)


@pytest.mark.negative_control("filter:significantly_modified")
def test_without_carry_over_the_sum_does_not_add_up():
    line, sent, total = Line("significantly_modified(3)"), np.zeros(SIZE), np.zeros(SIZE)
    for update in updates():
        line.outbox.pending = None
        sent += line.send(update)
        total += update
    assert np.abs(sent + line.pending - total).max() > 10


@pytest.mark.oracle("filter:random_skip")
def test_skipping_follows_the_senders_own_draws():
    line, random, pending = Line("random_skip(0.7)"), np.random.default_rng(1), np.zeros(SIZE)
    kept = []
    for update in updates(200):
        chosen = random.random(SIZE) >= 0.7
        assert np.array_equal(line.send(update), np.where(chosen, pending + update, 0))
        pending = np.where(chosen, 0, pending + update)
        kept.append(chosen.mean())
    assert abs(np.mean(kept) - 0.3) < 0.02


@pytest.mark.negative_control("filter:random_skip")
def test_other_draws_choose_otherwise():
    one, other = Line("random_skip(0.7)"), Line("random_skip(0.7)")
    other.random = np.random.default_rng(2)
    assert not np.array_equal(one.send(updates()[0]), other.send(updates()[0]))
    assert Line("random_skip(0)").send(updates()[0]).tolist() == updates()[0].tolist()


@pytest.mark.oracle("filter:support")
def test_zeros_do_not_travel():
    line = Line("support")
    for update in updates():
        update[0] = 0
        assert np.array_equal(line.send(update), update)
        assert len(line.packets[-1]) == min(5 + 8 * np.count_nonzero(update), 4 * SIZE)
    line.send(updates()[0] * 0 + 1)
    assert len(line.packets[-1]) == 4 * SIZE


@pytest.mark.parametrize("caching", [(), ("key_caching",)])
@pytest.mark.parametrize("codec", [Identity(), Half()])
def test_no_packet_is_larger_than_the_update_without_filters(caching, codec):
    """Receivers of a process take nothing that is larger than the model."""
    line, random = Line("support", *caching, codec=codec), np.random.default_rng(0)
    for share in (*np.linspace(0, 1, 21), 1, 1):
        update = (random.random(SIZE) < share).astype("float32")
        assert np.array_equal(line.send(update), update)
        assert len(line.packets[-1]) <= codec.wire_bytes(SIZE, "float32")


@pytest.mark.negative_control("filter:support")
def test_a_negative_zero_is_a_zero_and_nan_is_not():
    special = np.array([0.0, -0.0, np.nan, np.inf, 1e-45], "float32")
    assert parsed("support")[0].lets_through(special, special, None).tolist() == [False, False, True, True, True]
    threshold = parsed("significantly_modified(0.5)")[0].lets_through(special, special, None)
    assert threshold.tolist() == [False, False, True, True, False]


@pytest.mark.oracle("filter:kkt")
def test_what_stays_zero_is_dropped():
    line, params = Line("kkt(2, 0.5)"), (np.arange(SIZE) % 2).astype("float32")
    for update in updates():
        stays = (params == 0) & (np.abs(update) <= 1.5)
        assert np.array_equal(line.send(update, params), np.where(stays, 0, update))
        assert line.outbox.pending is None


@pytest.mark.negative_control("filter:kkt")
def test_the_kkt_filter_changes_nothing_under_its_penalty_and_much_without():
    """With one worker, whose gradients decide alone, no slack is needed: the same bits with less traffic."""
    job = small_job("sgd(lr=0.1)")
    text = "downpour(server_update={}, filters=({}))"
    runs = {
        key: run_strategy(text.format(*key), 1, 60, job=job)
        for key in [
            ("proximal(0.15)", ""),
            ("proximal(0.15)", "kkt(0.15),"),
            ("plain", ""),
            ("plain", "kkt(0.15),"),
        ]
    }
    results = {key: run.server for key, run in runs.items()}
    assert np.array_equal(results["proximal(0.15)", ""], results["proximal(0.15)", "kkt(0.15),"])
    assert not np.allclose(results["plain", ""], results["plain", "kkt(0.15),"])
    bare, filtered = (runs["proximal(0.15)", f].totals[0].sent_bytes for f in ("", "kkt(0.15),"))
    values = bare // 4
    assert filtered < 60 * 5 + 8 * values * 0.8


# ---- key caching


@pytest.mark.oracle("filter:key_caching")
def test_a_list_travels_once_and_then_as_its_hash():
    line = Line("support", "key_caching")
    update = (np.arange(SIZE) % 3 == 0).astype("float32")
    count = int(update.sum())
    for i in range(4):
        assert np.array_equal(line.send(update * (i + 1)), update * (i + 1))
    assert [packet[0] for packet in line.packets] == [LISTED, HASHED, HASHED, HASHED]
    assert [len(packet) for packet in line.packets] == [5 + 8 * count, *[9 + 4 * count] * 3]


@pytest.mark.negative_control("filter:key_caching")
def test_another_list_is_sent_and_without_caching_every_one():
    line, bare = Line("support", "key_caching"), Line("support")
    for i in range(4):
        update = (np.arange(SIZE) % (i + 3) == 0).astype("float32")
        line.send(update)
        bare.send(update)
        bare.send(update)
    assert [packet[0] for packet in line.packets] == [LISTED] * 4
    assert [packet[0] for packet in bare.packets] == [LISTED] * 8


@pytest.mark.parametrize("remembered", [1, 2, 3])
def test_both_ends_forget_the_same_lists(remembered):
    line, order = Line("support", f"key_caching({remembered})"), []
    for choice in np.random.default_rng(0).integers(0, 4, 60):
        update = np.roll(np.eye(1, SIZE, dtype="float32")[0], choice)
        hit = choice in order
        order = [*[c for c in order if c != choice], choice][-remembered:]
        assert np.array_equal(line.send(update), update)
        assert line.packets[-1][0] == (HASHED if hit else LISTED)
        assert list(line.outbox.lists) == list(line.inbox.lists)
        assert len(line.inbox.lists) == len(order)


def test_an_empty_list_and_a_value_codec():
    line = Line("support", "key_caching", codec=Half())
    assert not line.send(np.zeros(SIZE, "float32")).any()
    assert not line.send(np.zeros(SIZE, "float32")).any()
    update = np.where(np.arange(SIZE) < 7, np.float32(1 / 3), 0)
    for size in (5 + 7 * 4 + 7 * 2, 9 + 7 * 2):
        assert np.array_equal(line.send(update), update.astype(np.float16).astype("float32"))
        assert len(line.packets[-1]) == size


def test_damage_is_refused():
    line = Line("support", "key_caching")
    update = (np.arange(SIZE) % 3 == 0).astype("float32")
    line.send(update)
    line.send(update)
    listed, hashed = line.packets
    swapped = listed.copy()
    swapped[5:13] = np.array([3, 0], "<u4").view(np.uint8)
    beyond = np.concatenate([listed[:5], np.full(17, SIZE, "<u4").view(np.uint8), listed[-68:]])
    for data, inbox, rule in [
        (hashed, Inbox(), "refers to the list of keys .*, which was never sent"),
        (hashed[:5], line.inbox, "does not say which of 50 elements it contains"),
        (hashed[:-1], line.inbox, "identity needs 68 bytes for 17 elements of float32, got 67"),
        (listed[:-1], Inbox(), "identity needs 68 bytes for 17 elements of float32, got 67"),
        (listed[:20], Inbox(), "of 20 bytes is shorter than its list of keys"),
        (listed[:3], Inbox(), "does not say which of 50 elements it contains"),
        (listed[:0], Inbox(), "does not say which of 50 elements it contains"),
        (np.full(9, 7, np.uint8), Inbox(), "does not say which of 50 elements it contains"),
        (np.zeros(3, np.uint8), Inbox(), "does not say which of 50 elements it contains"),
        (swapped, Inbox(), r"must be in ascending order below 50, got \[3, 0"),
        (beyond, Inbox(), r"must be in ascending order below 50, got \[50, 50"),
    ]:
        with pytest.raises(ProtocolError, match=rule):
            unpack(line.filters, Identity(), data, SIZE, "float32", inbox)


@pytest.mark.parametrize("text", ALL)
def test_every_promise_of_a_strategy(text):
    check_component(Filter.parse(text))
    strategy = Strategy.parse(f"downpour(2, 2, shards=3, filters=({text},))")
    check_strategy(strategy, (2, 4), alone_is_plain=False)


@pytest.mark.parametrize("consistency", ["bsp", "ssp(2)", "asynchronous", "essp(2)"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_parameter_server_with_filters_that_let_everything_through_is_as_without(consistency, shards):
    plain = run_strategy(f"ps({consistency}, {shards})", 3, 12, network="ideal")
    for filters in ("(key_caching,)", "(significantly_modified(0), support)"):
        run = run_strategy(f"ps({consistency}, {shards}, filters={filters})", 3, 12, network="ideal")
        assert equal_bits(run.server, plain.server)


def test_what_a_parameter_servers_filters_withhold_goes_with_the_last_push():
    """A threshold above everything: nobody moves before the end, and then all gradients were those at the start."""
    run = run_strategy("ps(bsp, filters=(significantly_modified(1000),))", 3, 12, job=small_job(dtype="float64"))
    source = GradientSource(3, small_job(dtype="float64"))
    start = source.start()
    total = sum(source.gradient(rank, start) for _ in range(12) for rank in range(3)) / 3
    assert np.allclose(run.server, start - 0.1 * total, rtol=1e-12)
    assert run.totals[MASTER].received_bytes < 0.3 * run.totals[MASTER].sent_bytes


def test_filters_refuse_a_codec_that_warms_up():
    with pytest.raises(CompositionError, match="the same in every step"):
        Strategy.parse("ps(codec=dgc(0.1, warmup=8), filters=(support,))")
    Strategy.parse("ps(codec=dgc(0.1), filters=(support,))")
    Strategy.parse("ps(codec=dgc(0.1, warmup=8))")


def test_filters_do_not_go_with_everything():
    for text in (
        "ps(filters=(support,), codec=half, feedback=residual)",
        "ps(backup(1), filters=(support,))",
        "factor_server(filters=(support,))",
    ):
        with pytest.raises(CompositionError, match="filters"):
            Strategy.parse(text)
    assert Strategy.parse("ps(filters=(support,))").traits.needs_job
    assert not Strategy.parse("ps").traits.needs_job
