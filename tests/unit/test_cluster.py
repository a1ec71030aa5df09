"""Descriptions of clusters: what the files may say, and what comes of it in virtual time."""

import math
import re
from pathlib import Path

import pytest

from flockstep.costs.cluster import ClusterLink, ClusterShape, MachineGroup
from flockstep.costs.cluster_file import load_cluster, read_cluster, to_toml
from flockstep.costs.clusters import names
from flockstep.errors import ConfigurationError, UnknownName
from flockstep.launchers.simulate import simulate
from flockstep.messages import server
from flockstep.nodes import Cluster
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.rehearsal import Conditions, rehearse
from flockstep.records.config import RunConfig
from flockstep.simulation.compute import ComputeModel, ConstantTime, Empirical, SharedCores
from flockstep.simulation.fair import FairLink
from flockstep.simulation.law import mean_of
from flockstep.simulation.network import Fabric, Ideal, Link, Network, TwoTier
from flockstep.simulation.tiers import Tiers
from flockstep.strategies.base import Strategy

GOOD = """
about = "three places"
compute = "lognormal(0.05, sigma=0.3)"
operations = "2G/s"
job = "digits"

[nodes.fast]
count = 2
workers = 2
speed = 2
memory = "8GB"
failures = "0.5/day"
restart = "90s"

[nodes.slow]
count = 2
cores = 4
comes_and_goes = true

[nodes.far]

[[links]]
node = "fast"
bandwidth = "40gbit"
latency = "2us"

[[links]]
inside = ["fast", "slow"]
bandwidth = "1gbit"
latency = "100us"

[[links]]
between = [
    "slow",
    "far",
]
bandwidth = "10mbit"
latency = "20ms"

[rates.encode]
half = "500M/s"
"top(0.01)" = "40M/s"
"""


def small(extra: str = "", links: str = "") -> str:
    return f"""compute = "constant(0.01)"
[nodes.a]
count = 2
{extra}
[[links]]
inside = "a"
bandwidth = "1gbit"
{links}
"""


def test_everything_a_file_may_say() -> None:
    shape = read_cluster(GOOD)
    fast, slow, far = shape.groups
    assert fast == MachineGroup("fast", 2, 2, 2.0, None, 8e9, float(f"{0.5 / 86400:.12g}"), 90.0)
    assert (slow.cores, slow.comes_and_goes, far.size) == (4, True, 1)
    assert shape.wires[1] == ClusterLink("inside", ("fast", "slow"), 1e9 / 8, 1e-4)
    assert shape.tiers == (("fast", "slow"), ("far",))
    assert (shape.workers, shape.nodes, shape.operations, shape.job) == (7, 5, 2e9, "digits")
    assert shape.rates.encode == {"half": 5e8, "top(0.01)": 4e7}
    assert shape.comes_and_goes
    assert shape.memory == 4e9
    assert shape.failures == pytest.approx(2 * fast.failures)


def test_what_is_written_is_read_again() -> None:
    for text in (GOOD, small()):
        shape = read_cluster(text)
        assert read_cluster(to_toml(shape)) == shape
    for name in names():
        assert read_cluster(to_toml(load_cluster(name)), name=name) == load_cluster(name)


WRONG = [
    (small("cuont = 3"), "did you mean 'count'?"),
    (small() + "[speling]\n", "no key of a cluster is called 'speling'"),
    (small(links='bandwith = "1gbit"'), "did you mean 'bandwidth'?"),
    (small('speed = "fast"'), "speed must be a number"),
    (small("speed = -1.0"), "speed must be > 0"),
    (small("speed = 1e-320"), "speed must be >= 1e-09 and <= 1e+09, got 9.99989e-321"),
    (small("speed = 1" + 400 * "0"), "speed must be a number"),
    (small("workers = 300000000"), "workers must be <= 1000000, got 300000000; describe only a part"),
    (small().replace("count = 2", "count = 1000000000"), "count must be <= 1000000"),
    (small().replace("count = 2", "count = 0x" + "f" * 5000), "count must be <= 1000000, got a very long int"),
    (small("workers = 600000"), "count × workers must be <= 1000000, got 1200000"),
    (small("x = " + 3000 * "[" + 3000 * "]"), "nests brackets too deeply"),
    (small("cores = 1" + 5000 * "0"), "a number with too many digits"),
    (
        small("cores" + 3000 * ".b" + " = 1"),
        "cores must be a whole number of cores per machine, got a very long dict",
    ),
    (small("workers = true"), "workers must be a whole number"),
    (small("workers = 0"), "workers must be >= 1, got 0"),
    (small("workers = 2"), 'add [[links]] node = "a"'),
    (small("memory = 16"), "memory must be text with a unit, got 16"),
    (small('memory = "16"'), "memory must have a unit, got '16'"),
    (small('memory = "16G"'), "memory must be > 0 bytes, with a unit (kB, MB"),
    (small('failures = "0.1"'), "failures must have a unit"),
    (small('failures = "-1/day"'), "failures must be a rate >= 0"),
    (small('restart = "5 parsecs"'), "restart must be a finite number of seconds"),
    (small('comes_and_goes = "yes"'), "comes_and_goes must be true or false"),
    (small(links='latency = "-3ms"'), "latency must be a finite number of seconds >= 0"),
    (small(links="latency = 5"), "latency must be text with a unit"),
    (small(links='[[links]]\ninside = "b"\nbandwidth = "1gbit"'), "add [nodes.b] or name an existing group"),
    (
        small(links='[[links]]\nbetween = ["a", "b"]\nbandwidth = "1gbit"'),
        "must name existing groups of nodes (a), got 'b'",
    ),
    (small(links='[[links]]\nbetween = ["a"]\nbandwidth = "1gbit"'), "between must name two groups"),
    (small(links='[[links]]\nbetween = 3\nbandwidth = "1gbit"'), "between must be the name of a group"),
    (
        small(links='[[links]]\ninside = "a"\nbandwidth = "2gbit"'),
        "at most one link of each kind, got a second inside",
    ),
    (small(links='[[links]]\ninside = []\nbandwidth = "2gbit"'), "inside must name at least one group"),
    (small(links='[[links]]\nbandwidth = "2gbit"'), "exactly one of node, inside and between, got none"),
    (small(links='[[links]]\nnode = "a"'), "bandwidth of a link is missing"),
    (small(links='node = "a"'), "a link must have exactly one of node, inside and between, got node, inside"),
    (small().replace("1gbit", "-1gbit"), "bandwidth must be a number of bytes per second > 0"),
    (small().replace("1gbit", "1e9"), "bandwidth must have a unit, got '1e9'"),
    (small().replace('"1gbit"', "-1e9"), "bandwidth must be text with a unit, got -1000000000.0"),
    (small().replace("1gbit", "1megabit"), "write '100mbit'"),
    (small().replace("constant(0.01)", "constnat(0.01)"), "did you mean 'constant'?"),
    (small().replace('"constant(0.01)"', "0.01"), "compute must be a compute model as text"),
    (small().replace("constant(0.01)", "shared_cores(constant(1), 2)"), "set cores = 2 in [nodes.…] instead"),
    ('operations = "-3G/s"\n' + small(), "a rate must be > 0 per second"),
    (small(links='[[links]]\nnode = "a"\nbandwidth = "2gbit"\nfair = true'), "fair must be false"),
    ("overhead = '-1ms'\n" + small(), "finite number of seconds >= 0"),
    ("overhead = 0.001\n" + small(), "must be text with a unit"),
    ('operations = "3Gflops"\n' + small(), "with a unit (/s, k/s"),
    (small() + '[rates.encoding]\nhalf = "1G/s"', "did you mean 'encode'?"),
    (small() + "[rates.encode]\n\nhalf = 3", "half must be text with a unit"),
    (small() + "[nodes.b]\n", "a and b must be connected by a link"),
    ("about = 3\n" + small(), "about must be text"),
    ('compute = "constant(1)"', "add [nodes.machines]"),
    ("nodes = 4", "nodes must be a table, got 4; write [nodes]"),
    ('compute = "constant(1)"\nnodes.a = 4', "a must be a table"),
    ('compute = "constant(1)"\nnodes.a = {count = 1}\nlinks = 3', "links must be an array of tables"),
    ("compute = ", "not valid TOML"),
    ('compute = "constant(1)"\n\n[nodes.a\n', "not valid TOML"),
    ("[nodes.a]", "compute is missing"),
]


@pytest.mark.parametrize(("text", "rule"), WRONG, ids=[rule[:40] for _, rule in WRONG])
def test_a_broken_rule_is_told_with_file_value_and_way_out(text: str, rule: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^mine.toml.*{re.escape(rule)}"):
        read_cluster(text, "mine.toml")


def test_an_error_names_the_key() -> None:
    for text, key in [
        (small("workers = 0"), r", nodes\.a\.workers: workers must"),
        (small(links='[[links]]\nbetween = 3\nbandwidth = "1gbit"'), r", links\[1\]\.between: between must"),
        ("about = 3\n" + small(), ", about: about must"),
    ]:
        with pytest.raises(ConfigurationError, match=f"^mine.toml{key}"):
            read_cluster(text, "mine.toml")


def test_clusters_are_found_by_name_and_by_path(tmp_path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    assert load_cluster(file) == load_cluster(str(file)) == read_cluster(GOOD, name="mine")
    file.write_text(GOOD, encoding="utf-8-sig")  # with a byte-order mark, as editors on Windows write
    assert load_cluster(file) == read_cluster(GOOD, name="mine")
    with pytest.raises(UnknownName, match=r"did you mean 'edge'\? \(or give the path of a \.toml file\)"):
        load_cluster("egde")
    with pytest.raises(UnknownName, match=r"did you mean 'here'\?"):
        load_cluster("hree")
    with pytest.raises(ConfigurationError, match="there is no file"):
        load_cluster(tmp_path / "none.toml")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_cluster(file)
    file.write_text("compute = 3")
    with pytest.raises(ConfigurationError, match=rf"{file}, compute: "):
        load_cluster(file)


def test_the_built_in_ones() -> None:
    assert {"laptop", "lab-1gbit", "ethernet-10g", "cloud-25g", "infiniband", "two-sites", "edge"} <= set(names())


@pytest.mark.parametrize("name", names())
def test_a_built_in_cluster_runs_at_any_size(name: str) -> None:
    shape = load_cluster(name)
    assert shape.about
    for workers in (1, 2, 3, min(shape.workers, 9)):
        model, network = shape.compute(0.1, workers), shape.network(workers)
        assert ComputeModel.parse(str(model)) == model
        assert Network.parse(str(network)) == network
        told = rehearse(
            JobProfile("x", 25_000), Strategy.parse("ps(consistency=bsp)"), workers, Conditions(model, network), steps=4
        )
        assert told.seconds_per_step > 0.05
    assert shape.slowest.latency > 0
    assert sum(size for _, size in shape.placed(1024)) == 1024


def test_a_cluster_is_resized_in_proportion() -> None:
    shape = read_cluster(GOOD)
    assert [size for _, size in shape.placed(10)] == [2, 2, 2, 1, 1, 1, 1]
    placed = shape.placed(7)
    assert [group.name for group, size in placed for _ in range(size)] == ["fast"] * 4 + ["slow"] * 2 + ["far"]
    assert len(shape.placed(1)) == 1
    assert load_cluster("laptop").compute(workers=8) == SharedCores(load_cluster("laptop").law, 4, turns=True)
    assert load_cluster("laptop").network(8) == load_cluster("laptop").network()
    with pytest.raises(ConfigurationError, match="workers must be >= 1"):
        shape.placed(0)
    with pytest.raises(ConfigurationError, match="far is one machine with one worker"):
        shape.placed(70)


def test_compute_is_the_law_times_speeds_on_the_cores_there_are() -> None:
    plain = ClusterShape(
        "c", (MachineGroup("a", 2),), (ClusterLink("inside", ("a",), 1e9),), ConstantTime(0.2), operations=1e9
    )
    assert plain.compute() == ConstantTime(0.2)
    assert mean_of(plain.compute(0.5)) == pytest.approx(0.5)
    assert plain.compute(0.0) == ConstantTime(0.0)
    mixed = read_cluster(GOOD).compute()
    assert [next(mixed.stream(0, rank)) / next(read_cluster(GOOD).law.stream(0, rank)) for rank in (0, 6)] == [0.5, 1]
    node = ClusterLink("node", ("a",), 1e9)
    shared = ClusterShape("c", (MachineGroup("a", 1, 4, cores=2),), (node,), ConstantTime(0.2))
    assert shared.compute() == SharedCores(ConstantTime(0.2), 2, turns=True)
    some = ClusterShape(
        "c",
        (MachineGroup("a", 1, 4, cores=2), MachineGroup("b")),
        (node, ClusterLink("inside", ("a", "b"), 1e9)),
        ConstantTime(0.2),
    )
    assert [next(some.compute().stream(0, rank)) for rank in range(5)] == pytest.approx([0.4] * 4 + [0.2])
    with pytest.raises(ConfigurationError, match="seconds per gradient"):
        shared.compute(-1.0)


def arrivals(network: Network, cluster: Cluster, messages: list[tuple[int, int, int]]) -> list[float]:
    """When messages (source, to, bytes), all sent at once, arrive."""
    fabric: Fabric = network.start(cluster)
    waiting = [fabric.depart(source, to, size, 0.0) for source, to, size in messages]
    order = list(waiting)
    while waiting:
        first = min(waiting, key=lambda one: one.time)
        if first.done:
            waiting.remove(first)
        else:
            fabric.advance(first)
    return [one.time for one in order]


EVERYONE = [(a, b, 1000 * (a + 1)) for a in range(4) for b in range(4)]
SLOW, FAST = Link(1e6, 1e-3), Link(1e8, 1e-5)


@pytest.mark.parametrize(
    ("tiers", "same"),
    [
        (Tiers((1,) * 4, (0,) * 4, (FAST,), (SLOW,)), SLOW),
        (Tiers((4,), (0,), (FAST,), (SLOW,)), FAST),
        (Tiers((2, 2), (0, 0), (FAST,), (SLOW,)), TwoTier(2, 1e8, 1e-5, 1e6, 1e-3)),
        (Tiers((1,) * 4, (0, 0, 1, 1), (FAST,), (FAST,), (SLOW,)), TwoTier(2, 1e8, 1e-5, 1e6, 1e-3)),
    ],
)
def test_tiers_are_the_simpler_networks_where_those_can_say_it(tiers: Tiers, same: Network) -> None:
    cluster = Cluster(4, 0)
    assert arrivals(tiers, cluster, EVERYONE) == pytest.approx(arrivals(same, cluster, EVERYONE), rel=1e-12)


def test_tiers_take_the_links_on_the_way() -> None:
    network = read_cluster(GOOD).network()
    assert isinstance(network, Tiers)
    cluster = Cluster(7, 1)
    for source, to, seconds in (
        (0, 1, 2e-6 + 1e6 / 5e9),
        (0, 2, 100e-6 + 2e-6 + 1e6 / 1.25e8),
        (0, 4, 100e-6 + 1e-6 + 1e6 / 1.25e8),
        (4, 5, 100e-6 + 1e6 / 1.25e8),
        (4, 6, 20e-3 + 50e-6 + 1e6 / 1.25e6),
        (server(0), 1, 2e-6 + 1e6 / 5e9),
        (3, 3, 0.0),
    ):
        assert arrivals(network, cluster, [(source, to, 1000000)]) == pytest.approx([seconds], rel=1e-9)


def test_a_network_of_tiers_refuses_what_does_not_fit() -> None:
    for sizes, numbers, rule in (
        ((), (), r"machines must hold >= 1 worker, got \(\)"),
        ((1, 0), (0, 0), r"machines must hold >= 1 worker, got \(1, 0\)"),
        ((1, 1), (0, 2), r"must hold a tier number, counted from 0, for each of the 2 machines, got \(0, 2\)"),
    ):
        with pytest.raises(ConfigurationError, match=rule):
            Tiers(sizes, numbers, (FAST,), (FAST,))
    with pytest.raises(ConfigurationError, match="inside must hold 1 or 3 links, got 2"):
        Tiers((1, 1, 1), (0, 0, 0), (FAST, FAST), (FAST,))
    with pytest.raises(ConfigurationError, match="must hold all 3 workers, got room for 2"):
        Tiers((1, 1), (0, 0), (FAST,), (FAST,)).start(Cluster(3))


def test_the_link_between_two_workers_is_the_slowest_on_their_way() -> None:
    shape = read_cluster(GOOD)
    assert (shape.wire_between(0, 1).latency, shape.wire_between(0, 1).bandwidth) == (2e-6, 5e9)
    assert shape.wire_between(0, 5).bandwidth == 1.25e8
    far = shape.wire_between(0, 6)
    assert (far.bandwidth, far.latency) == (1.25e6, pytest.approx(20e-3 + 50e-6))
    assert shape.slowest == far
    with pytest.raises(ConfigurationError, match="a link needs two different workers"):
        shape.wire_between(2, 2)
    with pytest.raises(ConfigurationError, match="has only one worker"):
        assert ClusterShape("one", (MachineGroup("a"),)).slowest


def test_measured_quantiles_make_a_law() -> None:
    law = Empirical((0.1, 0.2, 0.6))
    draws = [value for _, value in zip(range(20000), law.stream(0, 0), strict=False)]
    assert law.mean == pytest.approx(0.275)
    assert sum(draws) / len(draws) == pytest.approx(law.mean, rel=0.02)
    assert 0.1 <= min(draws) < max(draws) <= 0.6
    assert sum(value < 0.2 for value in draws) / len(draws) == pytest.approx(0.5, abs=0.02)
    for wrong, rule in (
        ((0.1,), "two or more durations in ascending order"),
        ((0.2, 0.1), "two or more durations in ascending order"),
        ((0.0, 0.1), "the least quantile must be > 0 and finite, got 0"),
        ((0.1, math.inf), "the largest quantile must be > 0 and finite, got inf"),
        ((0.1, math.nan), "the largest quantile must be > 0 and finite, got nan"),
    ):
        with pytest.raises(ConfigurationError, match=rule):
            Empirical(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "constant(0.2)",
        "normal(0.1, cv=0.8)",
        "exponential(0.1)",
        "lognormal(0.1, sigma=0.5)",
        "pareto(0.1, shape=4)",
        "empirical((0.1, 0.2, 0.6))",
        "slow_spells(constant(0.1), probability=0.05, factor=5, length=4)",
        "speeds(exponential(0.1), (1, 1))",
        "shared_cores(exponential(0.1), 2)",
    ],
)
def test_the_mean_of_a_law_is_that_of_its_draws(text: str) -> None:
    law = ComputeModel.parse(text)
    draws = [value for _, value in zip(range(100000), law.stream(0, 0), strict=False)]
    assert mean_of(law) == pytest.approx(sum(draws) / len(draws), rel=0.02)


HOSTS = """
compute = "constant(0.01)"
[nodes.a]
count = {count}
workers = {workers}
[[links]]
node = "a"
bandwidth = "80gbit"
latency = "10us"
[[links]]
inside = "a"
bandwidth = "20mbit"
latency = "1ms"
fair = {fair}
"""


@pytest.mark.parametrize("fair", ["true", "false"])
def test_machines_with_several_workers_are_hosts_that_share_a_card(fair: str) -> None:
    """Each machine sends the two messages of its workers one after the other, or both at half the speed."""
    shape = read_cluster(HOSTS.format(count=2, workers=2, fair=fair))
    network = shape.network()
    assert Network.parse(str(network)) == network
    assert network.hosts(4) == ((0, 1), (2, 3))
    assert network.hosts(3) == ((0, 1), (2,))
    inside, *crossing = arrivals(network, Cluster(4), [(0, 1, 10**6), (0, 2, 10**6), (1, 3, 10**6), (2, 0, 10**6)])
    assert inside == pytest.approx(1e-5 + 1e6 / 1e10, rel=1e-2)
    assert max(crossing) == pytest.approx(2e6 / 2.5e6 + 1e-3, rel=0.2 if fair == "true" else 1e-3)
    assert crossing[2] == pytest.approx(1e6 / 2.5e6 + 1e-3, rel=1e-3)
    assert read_cluster(to_toml(shape)).network() == network


def test_fair_links_between_machines_of_several_tiers_are_refused() -> None:
    several = "".join(
        HOSTS.format(count=2, workers=2, fair="true").replace('"a"', f'"{name}"').replace("nodes.a", f"nodes.{name}")
        for name in "ab"
    ).replace('compute = "constant(0.01)"', "")
    joined = '[[links]]\nbetween = ["a", "b"]\nbandwidth = "1mbit"\n'
    with pytest.raises(ConfigurationError, match="fair must be false if there is more than one kind of link"):
        read_cluster(f'compute = "constant(0.01)"\n{several}{joined}')
    card = FairLink(1e6)
    with pytest.raises(ConfigurationError, match="`among` may contain a fair_link only if there is one tier, got 2"):
        Tiers((2, 2), (0, 1), (FAST,), (card,), (SLOW,))
    with pytest.raises(ConfigurationError, match="among must hold links, got"):
        Tiers((2, 2), (0, 0), (FAST,), (Ideal(),))


def test_a_server_shares_the_card_of_its_worker_s_machine() -> None:
    """A server on the first of four machines receives three models over the machine's card; the worker beside it sends
    and receives over the same card.
    """
    network = read_cluster(HOSTS.format(count=4, workers=1, fair="false")).network()
    assert Network.parse(str(network)) == network
    pushes = arrivals(network, Cluster(4, 1), [(rank, server(0), 10**6) for rank in range(4)])
    assert pushes[0] == pytest.approx(1e-5 + 1e6 / 1e10, rel=1e-2)
    assert max(pushes) == pytest.approx(3e6 / 2.5e6 + 1e-3, rel=1e-3)
    *_, beside = arrivals(network, Cluster(4, 1), [(1, server(0), 10**6), (2, 0, 10**6)])
    assert beside == pytest.approx(2e6 / 2.5e6 + 1e-3, rel=1e-3)


def test_servers_apart_have_cards_of_their_own() -> None:
    text = HOSTS.format(count=4, workers=1, fair="false")
    shape = read_cluster(f"servers_apart = true{text}")
    pushes = arrivals(shape.network(), Cluster(4, 1), [(rank, server(0), 10**6) for rank in range(4)])
    assert max(pushes) == pytest.approx(4e6 / 2.5e6 + 1e-3, rel=1e-3)
    assert read_cluster(to_toml(shape)).servers_apart
    with pytest.raises(
        ConfigurationError, match="servers_apart: servers_apart must be false if links differ or a machine has"
    ):
        read_cluster("servers_apart = true" + HOSTS.format(count=2, workers=2, fair="false"))


def test_a_server_beside_a_worker_is_on_the_workers_machine() -> None:
    network = Tiers((2, 2), (0, 0), (FAST,), (SLOW,))
    near, far = arrivals(network, Cluster(4, 3, (0, 0, 2)), [(1, server(1), 1000), (0, server(2), 1000)])
    assert near < 1e-4 < far
    far, near = arrivals(network, Cluster(4, 3), [(1, server(1), 1000), (0, server(2), 1000)])
    assert near < 1e-4 < far


@pytest.mark.parametrize("machines", [(1,) * 4, (4,)])
def test_where_no_two_hosts_have_several_workers_a_run_has_the_bits_of_one_without_hosts(
    machines: tuple[int, ...], tmp_path: Path
) -> None:
    same = SLOW if len(machines) > 1 else FAST
    tiers = Tiers(machines, (0,) * len(machines), (FAST,), (SLOW,))
    found = []
    for number, network in enumerate((tiers, same)):
        config = RunConfig(
            kind="simulate", job="softmax", strategy="all_reduce", workers=4, steps=5, network=str(network)
        )
        found.append(simulate(config, tmp_path / str(number)))
    assert found[0].hashes == found[1].hashes
    assert found[0].seconds == pytest.approx(found[1].seconds, rel=1e-12)


def test_all_reduce_in_virtual_time_sums_by_host() -> None:
    """Each machine sends the model once per step, where a ring of four workers sends it one and a half times."""
    network = read_cluster(HOSTS.format(count=2, workers=2, fair="true")).network()
    took = {}
    for text in ("all_reduce", "all_reduce(ring)"):
        at = Conditions(ConstantTime(0.0), network)
        found = rehearse(JobProfile("x", 10**6), Strategy.parse(text), 4, at, steps=8)
        took[text] = found.seconds_per_step
    assert took["all_reduce"] == pytest.approx(4e6 / 2.5e6, rel=0.1)
    assert took["all_reduce(ring)"] > 1.3 * took["all_reduce"]
