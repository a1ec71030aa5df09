"""Costs of collectives: closed forms, the virtual network against them, and the choice that they make."""

from __future__ import annotations

import pytest

from flockstep.collectives import costs, layouts
from flockstep.collectives.auto import CANDIDATES, Auto
from flockstep.collectives.base import Collective
from flockstep.collectives.costs import LinkModel
from flockstep.collectives.double_tree import DoubleTree
from flockstep.collectives.table import Measured, nearest, read_table, write_table
from flockstep.errors import ConfigurationError
from flockstep.messages import HEADER_BYTES
from support.collectives import CASES, arrays, summed

TEN_GBIT = LinkModel(50e-6, 8e-10)
EXACT = ["ring", "recursive_doubling", "rabenseifner", "binomial_tree", "pipelined", "hierarchical", "auto", "sparse"]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("latency", [0.0, 1e-4, 0.1])
def test_virtual_time_is_the_cost(name, n, latency):
    """Headers are charged by the network and, as part of the message, by the formula."""
    collective, size = CASES[name][0], 960
    run, _ = summed(collective, arrays(n, size), compute="constant(0)", network=f"link(1e6, {latency})")
    expected = collective.cost(n, size * 4, LinkModel(latency, 1e-6, HEADER_BYTES))
    assert run.seconds == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert expected >= costs.lower_bound(n, size * 4, LinkModel(latency, 1e-6)) * (1 - 1e-12)


@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "rabenseifner", "hierarchical", "binomial_tree"])
@pytest.mark.parametrize("n", [3, 5, 6, 7, 9])
def test_for_other_numbers_of_workers_it_is_close(name, n):
    collective, size = CASES[name][0], 2520
    run, _ = summed(collective, arrays(n, size), compute="constant(0)", network="link(1e6, 1e-4)")
    assert run.seconds == pytest.approx(collective.cost(n, size * 4, LinkModel(1e-4, 1e-6, HEADER_BYTES)), rel=0.08)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("chunks", [1, 4, 16, 64])
def test_the_double_tree_is_within_a_quarter_of_its_model(n, chunks):
    run, _ = summed(DoubleTree(chunks), arrays(n, 6400), compute="constant(0)", network="link(1e6, 1e-4)")
    expected = DoubleTree(chunks).cost(n, 25600, LinkModel(1e-4, 1e-6, HEADER_BYTES))
    assert 0.74 <= run.seconds / expected <= 1.27


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_rounds_are_what_latency_counts(name, n):
    collective = CASES[name][0]
    run, _ = summed(collective, arrays(n, 10), compute="constant(0)", network="link(1e30, 1)")
    assert run.seconds == pytest.approx(collective.rounds(n))


def test_the_formulas_are_those_of_the_slides():
    link, m = TEN_GBIT, 1e6
    for k, n in ((1, 2), (2, 4), (3, 8), (4, 16), (6, 64)):
        latency, moved = k * 50e-6, 2 * m * 8e-10 * (n - 1) / n
        assert costs.tree(n, m, link) == pytest.approx(2 * latency + 2 * m * 8e-10 * k)
        assert costs.butterfly(n, m, link) == pytest.approx(latency + m * 8e-10 * k)
        assert costs.pipeline(n, m, link) == pytest.approx(2 * 50e-6 * (n - 1) + moved)
        assert costs.halving_doubling(n, m, link) == pytest.approx(2 * latency + moved)
        assert costs.lower_bound(n, m, link) == pytest.approx(latency + moved)


GOLDEN = {
    "VGG-A": (132.9e6, "14.60 4.698 1.942 1.098 7.052 0.859 2.147 1.091"),
    "ResNet-152": (60.2e6, "6.613 2.128 0.880 0.497 3.194 0.389 0.972 0.494"),
    "GoogLeNet": (6.8e6, "0.747 0.240 0.099 0.056 0.361 0.044 0.110 0.056"),
}
"""Network → parameters of four bytes, and the seconds of the eight layouts for 16 workers on 10 GbE, as printed."""


@pytest.mark.parametrize("network", GOLDEN)
def test_figure_14_in_every_printed_digit(network):
    parameters, printed = GOLDEN[network]
    times = layouts.Times.of(4 * parameters)
    for formula, golden in zip(layouts.LAYOUTS.values(), printed.split(), strict=True):
        digits = len(golden.partition(".")[2])
        assert f"{formula(16, times):.{digits}f}" == golden


def test_auto_takes_the_least_cost():
    auto = Auto(50e-6, 1.25e9)
    link = LinkModel(50e-6, 8e-10, HEADER_BYTES)
    for n in range(1, 20):
        for m in (0, 1000, 200_000, 10**8):
            assert auto.cost(n, m, link) == min(candidate.cost(n, m, link) for candidate in CANDIDATES)
    assert str(auto.choose(8, 10_000)) == "recursive_doubling"
    assert str(auto.choose(8, 10**7)) == "rabenseifner"
    assert str(auto.choose(7, 10**8)) == "ring"


ROWS = [
    Measured("ring", 4, 1_000_000, 0.001),
    Measured("double_tree(chunks=4)", 4, 1_000_000, 0.002),
    Measured("ring", 4, 1000, 5e-4),
    Measured("recursive_doubling", 4, 1000, 1e-4),
    Measured("recursive_doubling", 2, 1000, 1e-4),
]


def test_auto_by_a_measured_table(tmp_path):
    write_table(tmp_path / "t.toml", ROWS)
    assert read_table(str(tmp_path / "t.toml")) == tuple(ROWS)
    auto = Auto(table=str(tmp_path / "t.toml"))
    assert str(auto.choose(4, 2000)) == "recursive_doubling"
    assert str(auto.choose(2, 10**9)) == "recursive_doubling"
    assert {row.bytes for row in nearest(ROWS, 5, 30_000)} == {1000, 1_000_000}
    assert [row.bytes for row in nearest(ROWS, 4, 40_000) if row.collective == "ring"] == [1_000_000]
    given = arrays(4, 100)
    _, got = summed(auto, given)
    assert len({array.tobytes() for array in got}) == 1
    assert Collective.parse(str(auto)) == auto


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", r"has no \[\[measured\]\] tables"),
        ("measured = 3", r"has no \[\[measured\]\] tables"),
        ("[[measured]]\ncollective = 'ring'", "missing required field `workers`"),
        ("[[measured]]\ncollective = 'ring'\nworkers = 0\nbytes = 1\nseconds = 1.0", "a missing or wrong value"),
        ("[[measured]]\ncollective = 'rign'\nworkers = 2\nbytes = 1\nseconds = 1.0", "did you mean 'ring'"),
        ("[[measured]]\ncollective = 'ring'\nworkers = 2\nbytes = '1'\nseconds = 1.0", "a missing or wrong value"),
        ("not toml", "cannot read the table of collectives"),
    ],
)
def test_a_bad_table_is_refused(tmp_path, text, rule):
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=rule):
        Auto(table=str(tmp_path / "t.toml"))


@pytest.mark.parametrize("values", [(-1, 1, 0), (0, 0, 0), (0, 1, -1)])
def test_an_impossible_link_is_refused(values):
    with pytest.raises(ConfigurationError, match="got {}, {} and {};".format(*values)):
        LinkModel(*values)
