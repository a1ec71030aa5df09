"""Names → classes: every line of the table leads somewhere, and your own can be added."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flockstep import registry
from flockstep.errors import ConfigurationError, UnknownName
from flockstep.expression import Component, parse
from flockstep.frameworks.job import import_components
from flockstep.strategies.base import Strategy
from flockstep.testing.expressions import base_of, check_component
from flockstep.topologies.base import Topology
from flockstep.topologies.ring import RingGraph
from support.matrix import each

RECORD = str(Path(__file__).parent / "data" / "record")
EVERY = [(noun, name) for noun in registry.nouns() for name in registry.names(noun)]
WITH_ARGUMENTS = {
    ("fault", "dies"): "dies(1, 0.5)",
    ("fault", "drops"): "drops(0, 1, nth=2)",
    ("fault", "slows"): "slows(2, 10, at='50ms')",
    ("fault", "narrows"): "narrows(2, 10, at='50ms', until=1)",
    ("fault", "flips_sign"): "flips_sign(1)",
    ("fault", "enlarges"): "enlarges(1, factor=100)",
    ("fault", "little_is_enough"): "little_is_enough(1, z=1.5)",
    ("fault", "miscomputes"): "miscomputes(1, begin=2)",
    ("compute", "constant"): "constant(0.1)",
    ("compute", "normal"): "normal(0.1, cv=0.1)",
    ("compute", "exponential"): "exponential(0.1)",
    ("compute", "lognormal"): "lognormal(0.1)",
    ("compute", "pareto"): "pareto(0.1)",
    ("compute", "empirical"): "empirical((0.1, 0.2, 0.4))",
    ("compute", "speeds"): "speeds(base=exponential(0.05), factors=(1, 1, 2.5))",
    ("compute", "slow_spells"): "slow_spells(base=constant(0.05), probability=0.01, factor=5, length=20)",
    ("compute", "longer"): "longer(base=constant(0.05), extra=0.001)",
    ("network", "handled"): "handled(network=link('1gbit', '50us'), message=2e-05)",
    ("compute", "shared_cores"): "shared_cores(base=constant(0.05), cores=2)",
    ("compute", "record"): f"record({RECORD!r})",
    ("network", "record"): f"record({RECORD!r})",
    ("partition", "pipeline"): "pipeline(4, schedule=1f1b, microbatches=8)",
    ("partition", "tensor"): "tensor(2)",
    ("partition", "sharded"): "sharded(2)",
    ("partition", "grid"): "grid(2, 2)",
    ("network", "link"): "link('1gbit')",
    ("network", "fair_link"): "fair_link(bandwidth='1gbit')",
    ("network", "switch"): "switch(bandwidth='1gbit', latency=0.001, backbone='2gbit')",
    ("network", "two_tier"): "two_tier(4, '10gbit', 0.0001, '100mbit', 0.01)",
    ("network", "tiers"): "tiers((2, 2), (0, 1), (link('80gbit'),), (link('10gbit'),), (link('1gbit', '30ms'),))",
}
"""What has hyper-parameters without a default."""
SHORT = [(noun, alias) for noun in registry.nouns() for alias in registry.aliases(noun)]


@pytest.fixture
def table(monkeypatch):
    """The registry, restored after the test."""
    for noun in registry.nouns():
        monkeypatch.setitem(registry._TABLE, noun, dict(registry._TABLE[noun]))
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    monkeypatch.setattr(registry, "_names", dict(registry._names))


def test_every_line_leads_to_a_component_of_its_noun():
    def check(noun, name):
        kind = registry.load(noun, name)
        assert issubclass(kind, Component)
        assert kind.noun == noun
        assert registry.name_of(kind) == name
        assert registry.load(noun, name) is kind
        assert kind.__doc__, f"{kind.__name__} has no docstring"
        assert not kind.__doc__.startswith(f"{kind.__name__}("), (
            f"{kind.__name__} has only the docstring that dataclass makes"
        )

    each(check, EVERY)


def test_every_component_is_a_value():
    def check(noun, name):
        kind = registry.load(noun, name)
        base = next(kind for kind in kind.__mro__[::-1] if "noun" in vars(kind))
        component = parse(WITH_ARGUMENTS.get((noun, name), name), base)
        assert type(component) is kind
        check_component(component)

    each(check, EVERY)


@pytest.mark.parametrize(("text", "full"), [("gosgd(p=0.5)", "gossip"), ("BigDL(1)", "scatter_reduce")])
def test_a_short_name_with_arguments_is_refused_with_what_it_stands_for(text, full):
    with pytest.raises(ConfigurationError, match=rf"stands for {full}.* and takes no arguments"):
        parse(text, Strategy)


def test_every_alias_is_the_expression_it_stands_for():
    def check(noun, alias):
        text = registry.aliases(noun)[alias]
        some = registry.load(noun, registry.names(noun)[0])
        base = next(kind for kind in some.__mro__[::-1] if "noun" in vars(kind))
        component = parse(alias, base)
        assert component == parse(text, base)
        assert base_of(component) is base
        assert alias not in registry.names(noun), "the alias hides a name"

    each(check, SHORT)


def test_what_is_handed_out_can_be_changed_without_harm():
    registry.names("codec").clear()
    registry.nouns().clear()
    registry.aliases("strategy").clear()
    assert registry.names("codec")
    assert registry.alias("strategy", "bsp") == "ps(consistency=bsp)"


def test_unknown_names_come_with_the_nearest():
    with pytest.raises(UnknownName, match="no codec is called 'hlaf'; did you mean 'half'"):
        registry.load("codec", "hlaf")
    with pytest.raises(UnknownName, match="no noun is called 'codecs'; did you mean 'codec'"):
        registry.names("codecs")
    with pytest.raises(UnknownName, match="no strategy is called 'asdg'; did you mean 'asgd'"):
        registry.load("strategy", "asdg")
    assert registry.alias("codec", "half") is None


@dataclass(frozen=True)
class Mine(RingGraph):
    """A custom ring."""

    width: int = 1


@pytest.mark.usefixtures("table")
def test_a_class_of_your_own_is_used_by_name():
    registry.register("topology", "mine", Mine)
    registry.register("topology", "mine", Mine)
    assert registry.names("topology")[-1] == "mine"
    assert parse("mine(3)", Topology) == Mine(3)
    check_component(Mine(3))


def test_an_unregistered_class_goes_by_its_own_name():
    assert registry.name_of(Mine) == "Mine"


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("noun", "name", "message"),
    [
        ("topology", "ring", "'ring' is already used by flockstep.topologies.ring:RingGraph; choose another"),
        ("strategy", "bsp", r"'bsp' is already used by ps\(consistency=bsp\); choose another"),
        ("topology", "my-ring", "must be an identifier, got 'my-ring'"),
        ("topology", "lambda", "must be an identifier, got 'lambda'"),
        ("topology", "", "must be an identifier, got ''"),
        ("topologies", "mine", "no noun is called 'topologies'; did you mean 'topology'"),
    ],
)
def test_names_that_cannot_be_registered(noun, name, message):
    with pytest.raises(ConfigurationError, match=message):
        registry.register(noun, name, Mine)
    assert name == "ring" or noun == "topologies" or name not in registry.names(noun)


CODEC = """
from dataclasses import dataclass
from flockstep import register
from flockstep.codecs.identity import Identity

@dataclass(frozen=True)
class Same(Identity):
    pass

register("codec", "{name}", Same)
"""


@pytest.mark.usefixtures("table")
def test_a_file_may_be_imported_both_as_a_module_and_as_components(tmp_path, monkeypatch):
    """A script imports its strategy, and --import names the same file."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "other").mkdir()
    files = {"components_of_a_user.py": "one", "other/components_of_a_user.py": "two", "taken.py": "one"}
    for file, name in files.items():
        (tmp_path / file).write_text(CODEC.format(name=name))
    one, two, taken = (str(tmp_path / file) for file in files)
    try:
        module = importlib.import_module("components_of_a_user")
        import_components([one, one, two])
        assert registry.load("codec", "one") is not module.Same
        assert registry.load("codec", "two") is not registry.load("codec", "one")
        with pytest.raises(
            ConfigurationError, match="name 'one' is already used by flockstep_job_components_of_a_user"
        ):
            import_components([taken])
    finally:
        for name in ("components_of_a_user", "flockstep_job_components_of_a_user", "flockstep_job_taken"):
            sys.modules.pop(name, None)


@pytest.mark.usefixtures("table")
def test_a_class_that_is_no_component_is_refused_where_it_is_registered():
    class Vague(Topology):
        pass

    for noun, target, message in (
        ("topology", Mine(), "register takes a class, got an object of Mine; write Mine without parentheses"),
        ("codec", Mine, "Mine is a topology, got the noun 'codec'; write 'topology'"),
        ("topology", Vague, "Vague must define graph to be a topology; add what is missing"),
        ("topology", Loose, r"Loose must be a frozen dataclass; write @dataclass\(frozen=True\) above the class"),
        ("topology", Thawed, "Thawed must be a frozen dataclass"),
        ("topology", Inherits, "Inherits must be a frozen dataclass"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            registry.register(noun, "refused", target)
    assert "refused" not in registry.names("topology")


class Loose(Topology):
    def graph(self, n):
        raise NotImplementedError


@dataclass(frozen=True)
class Forgets(Loose):
    note: str = field(default="", compare=False)


@dataclass(frozen=True)
class Halves(Loose):
    rate: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "rate", self.rate / 2)


@dataclass(frozen=True)
class Bare(Loose):
    def __repr__(self):
        return object.__repr__(self)


@dataclass
class Thawed(Loose):
    size: int = 1


class Inherits(Mine):
    pass


@dataclass(frozen=True)
class Tells(Loose):
    size: int = 1

    def __str__(self):
        return "tells"


@dataclass(frozen=True)
class Stranger(Loose):
    pass


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("component", "complaint"),
    [
        (Forgets(note="x"), "leaves the fields note out"),
        (Halves(1.0), "does not equal a copy"),
        (Bare(), "the repr of"),
        (Thawed(), "not frozen"),
        (Inherits(), "add @dataclass"),
        (Loose(), "no dataclass"),
        (Stranger(), "not registered"),
        (Tells(2), "is written as 'tells', which is parsed as"),
    ],
)
def test_a_broken_component_is_caught(component, complaint):
    if type(component) not in (Stranger, Thawed, Inherits, Loose):
        registry.register("topology", type(component).__name__.lower(), type(component))
    with pytest.raises(AssertionError, match=complaint):
        check_component(component)


def test_nothing_is_imported_before_it_is_asked_for():
    source = str(registry.__file__).rsplit("/flockstep/", 1)[0]
    code = (
        f"import sys; sys.path.insert(0, {source!r}); from flockstep import registry; registry.names('codec');"
        "before = [m for m in sys.modules if m.startswith('flockstep.codecs')]; registry.load('codec', 'half');"
        "print(before, 'flockstep.codecs.half' in sys.modules, 'flockstep.codecs.identity' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "True", "False"]
