"""Text and data ⇄ components. A noun of our own, "gadget", holds every kind of hyper-parameter."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from flockstep import registry
from flockstep.errors import ConfigurationError, FlockstepError, UnknownName
from flockstep.expression import SHOWN, Component, from_data, parse, to_data, to_text
from flockstep.strategies.base import Strategy
from flockstep.testing.expressions import check_component


class Gadget(Component):
    noun: ClassVar[str] = "gadget"


@dataclass(frozen=True)
class Plain(Gadget):
    pass


@dataclass(frozen=True)
class Scalars(Gadget):
    count: int = 1
    rate: float = 0.1
    flag: bool = False
    word: str = "a"
    mode: Literal["fast", "slow"] = "fast"
    limit: float | None = None
    cap: int | None = 5
    label: str | None = "x"
    either: float | str = 1.0

    def __post_init__(self):
        if self.count < 0:
            raise ConfigurationError(f"count must be >= 0, got {self.count}; use 0 for none")


@dataclass(frozen=True)
class Tuples(Gadget):
    speeds: tuple[float, ...] = (1.0,)
    words: tuple[str, ...] = ()
    parts: tuple[Gadget, ...] = ()


@dataclass(frozen=True)
class Nested(Gadget):
    inner: Gadget = field(default_factory=Plain)
    other: Gadget | None = Plain()


@dataclass(frozen=True)
class Needy(Gadget):
    size: int
    items: tuple[int, ...] = field(default_factory=tuple)
    hidden: int = field(init=False, default=3)


@dataclass(frozen=True)
class Outspoken(Gadget):
    inner: Gadget = field(default_factory=Plain, metadata=SHOWN)
    size: int = field(default=3, metadata=SHOWN)
    word: str = "a"


class Undecorated(Gadget):
    pass


class NotAGadget:
    pass


@pytest.fixture(scope="module", autouse=True)
def gadgets():
    with pytest.MonkeyPatch.context() as patch:
        here = {
            kind.__name__.lower(): kind
            for kind in (Plain, Scalars, Tuples, Nested, Needy, Outspoken, Undecorated, NotAGadget)
        }
        places = {name: f"{kind.__module__}:{kind.__name__}" for name, kind in here.items()}
        patch.setitem(registry._TABLE, "gadget", places)
        patch.setitem(registry._ALIASES, "gadget", {"10x": "scalars(count=10)", "twice": "nested(inner='10x')"})
        for name, kind in here.items():
            patch.setitem(registry._loaded, ("gadget", name), kind)
        yield


def read(text):
    return parse(text, Gadget)


texts = st.text(st.characters(codec="utf-8"), max_size=8)
finite_or_infinite = st.floats(allow_nan=False)
integers = st.integers(-(2**63) + 1, 2**63 - 1)
scalars = st.builds(
    Scalars,
    count=st.integers(0, 2**63 - 1),
    rate=finite_or_infinite,
    flag=st.booleans(),
    word=texts,
    mode=st.sampled_from(["fast", "slow"]),
    limit=st.none() | finite_or_infinite,
    cap=st.none() | integers,
    label=st.none() | texts,
    either=finite_or_infinite | texts.filter(lambda text: text not in ("inf", "-inf")),
)
components = st.recursive(
    st.builds(Plain) | scalars | st.builds(Needy, integers, st.lists(integers, max_size=3).map(tuple)),
    lambda inner: (
        st.builds(Nested, inner=inner, other=st.none() | inner)
        | st.builds(
            Tuples,
            speeds=st.lists(finite_or_infinite, max_size=3).map(tuple),
            words=st.lists(texts, max_size=3).map(tuple),
            parts=st.lists(inner, max_size=2).map(tuple),
        )
    ),
    max_leaves=4,
)


@given(components)
def test_every_component_comes_back_from_text_json_and_toml(component):
    check_component(component)


@pytest.mark.parametrize(
    ("text", "component"),
    [
        ("plain", Plain()),
        ("plain()", Plain()),
        ("  plain\n", Plain()),
        ("'plain'", Plain()),
        ("scalars(3)", Scalars(count=3)),
        ("scalars(3, 0.5, True)", Scalars(3, 0.5, True)),
        ("scalars(3, flag=true)", Scalars(3, flag=True)),
        ("scalars(rate=1)", Scalars(rate=1.0)),
        ("scalars(rate=inf)", Scalars(rate=math.inf)),
        ("scalars(rate=-inf)", Scalars(rate=-math.inf)),
        ("scalars(rate='inf')", Scalars(rate=math.inf)),
        ("scalars(either=-inf)", Scalars(either=-math.inf)),
        ("scalars(rate=-2.5e-3)", Scalars(rate=-0.0025)),
        ("scalars(rate=1e999)", Scalars(rate=math.inf)),
        ("scalars(word=hello)", Scalars(word="hello")),
        ("scalars(word='10x')", Scalars(word="10x")),
        ("scalars(mode=slow)", Scalars(mode="slow")),
        ("scalars(mode='slow')", Scalars(mode="slow")),
        ("scalars(cap=None)", Scalars(cap=None)),
        ("scalars(cap=none)", Scalars(cap=None)),
        ("scalars(either='fast')", Scalars(either="fast")),
        ("10x", Scalars(count=10)),
        ("twice", Nested(inner=Scalars(count=10))),
        ("nested('10x')", Nested(inner=Scalars(count=10))),
        ("nested(twice)", Nested(inner=Nested(inner=Scalars(count=10)))),
        ("nested(other=None)", Nested(other=None)),
        ("nested(nested(scalars(2)), other=needy(1))", Nested(Nested(Scalars(2)), Needy(1))),
        ("tuples((1, 2, inf))", Tuples((1.0, 2.0, math.inf))),
        ("tuples([1, 2])", Tuples((1.0, 2.0))),
        ("tuples(())", Tuples(())),
        ("tuples(words=(a, 'b c'))", Tuples(words=("a", "b c"))),
        ("tuples(parts=(plain, scalars(2), '10x'))", Tuples(parts=(Plain(), Scalars(2), Scalars(10)))),
        ("needy(size=4, items=(1, 2))", Needy(4, (1, 2))),
    ],
)
def test_reading(text, component):
    assert read(text) == component
    assert read(to_text(component)) == component


def test_the_shortest_text_leaves_defaults_out():
    assert str(Scalars()) == "scalars"
    assert str(Scalars(count=2, word="b")) == "scalars(count=2, word='b')"
    assert str(Nested(inner=Scalars(rate=math.inf))) == "nested(inner=scalars(rate=inf))"
    assert str(Tuples(speeds=(2.0,))) == "tuples(speeds=(2.0,))"
    assert str(Needy(3)) == "needy(size=3)"


@pytest.mark.parametrize(
    ("component", "text"),
    [
        (Outspoken(), "outspoken(inner=plain, size=3)"),
        (Outspoken(size=4, word="b"), "outspoken(inner=plain, size=4, word='b')"),
        (Nested(inner=Outspoken()), "nested(inner=outspoken(inner=plain, size=3))"),
        (Outspoken(inner=Outspoken()), "outspoken(inner=outspoken(inner=plain, size=3), size=3)"),
    ],
)
def test_what_is_marked_is_in_the_text_even_at_its_default(component, text):
    assert str(component) == text
    assert read(text) == component


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scalrs", "no gadget is called 'scalrs'; did you mean 'scalars'?"),
        ("zzz", "no gadget is called 'zzz'; known: 10x, needy, nested, "),
        ("scalars(cuont=1)", "no argument of scalars is called 'cuont'; did you mean 'count'?"),
        ("nested(inner=plian)", "no gadget is called 'plian'; did you mean 'plain'?"),
        ("scalars(mode=fats)", "no mode of scalars is called 'fats'; did you mean 'fast'?"),
        ("needy(1, hidden=2)", "no argument of needy is called 'hidden'"),
    ],
)
def test_unknown_names_come_with_the_nearest(text, message):
    with pytest.raises(UnknownName, match=re.escape(message)):
        read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read '' as a gadget; write it like plain()"),
        ("scalars(", "cannot read 'scalars(' as a gadget, because the parentheses do not match; write it like"),
        ("plain; plain", "cannot read"),
        ("pl\0ain", "cannot read"),
        ("\ud800", "cannot read"),
        ("3", "gadget must be given by name, got 3; write it like plain()"),
        ("-10x", "gadget must be given by name, got -10x; write it like plain()"),
        ("plain + plain", "gadget must be a gadget, got plain + plain"),
        ("scalars(count=1, count=2)", "scalars got the argument 'count' twice; give it once"),
        ("scalars(1, count=2)", "scalars got the argument 'count' twice; give it once"),
        ("plain(1)", "plain takes at most 0 arguments (none), got 1"),
        ("needy(1, (2,), 3)", "needy takes at most 2 arguments (size, items), got 3"),
        ("scalars(**x)", "scalars takes named arguments, got **x"),
        ("scalars(*x)", "count of scalars must be a whole number, got *x"),
        ("scalars(count=1.5)", "count of scalars must be a whole number, got 1.5"),
        ("scalars(count=True)", "count of scalars must be a whole number, got True"),
        ("scalars(count='1')", "count of scalars must be a whole number, got '1'"),
        ("scalars(count=inf)", "count of scalars must be a whole number, got inf"),
        ("scalars(count=plain())", "count of scalars must be a whole number, got plain()"),
        ("scalars(count=(1, 2))", "count of scalars must be a whole number, got (1, 2)"),
        ("scalars(rate=fast)", "rate of scalars must be a number, got 'fast'"),
        ("scalars(rate=1j)", "rate of scalars must be a number, got 1j"),
        ("scalars(rate=nan)", "rate of scalars must be a number, got 'nan'"),
        ("scalars(rate={[]})", "rate of scalars must be a number, got {[]}"),
        ("scalars(flag=1)", "flag of scalars must be true or false, got 1"),
        ("scalars(mode=3)", "mode of scalars must be one of fast, slow, got 3"),
        ("scalars(limit='x')", "limit of scalars must be a number or "),
        ("scalars(count=99999999999999999999)", "count of scalars must fit in 64 bits"),
        (f"scalars(rate=0x{'f' * 5000})", "rate of scalars must fit in 64 bits, got a number of 20000 bits"),
        (f"scalars(rate=f(0x{'f' * 5000}))", "rate of scalars must be a number, got a number too large to print"),
        ("scalars(count=-1)", "count must be >= 0, got -1; use 0 for none"),
        ("tuples(1)", "speeds of tuples must be "),
        ("tuples((1, x))", "speeds of tuples must be a number, got 'x'"),
        ("nested(inner=None)", "inner of nested must be a gadget, got None"),
        ("nested(inner=3)", "inner of nested must be a gadget, got 3"),
        ("needy", "needy needs size; write needy(size=…, items=…)"),
        ("needy(items=(1,))", "needy needs size;"),
        (
            "undecorated",
            "'undecorated' is registered as a gadget but is not of that kind; make it a dataclass",
        ),
        ("notagadget", "'notagadget' is registered as a gadget but is not of that kind"),
        ("a" + ".b" * 3000, "…"),
        ("-" * 3000 + "1", "…"),
        ("scalars(" * 150 + ")" * 150, "count of scalars must be a whole number"),
    ],
)
def test_wrong_input_is_one_sentence(text, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        read(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [("four", "'four'; a"), ("'four'", "'four'; a"), ("2.5", "2.5"), ("-four", "-four"), ("none", "'none'")],
)
def test_a_field_that_is_a_number_or_a_component_says_both(value, shown):
    rule = f"period of local_sgd must be a whole number or a synchronization schedule, got {shown}"
    with pytest.raises(ConfigurationError, match=re.escape(rule)):
        Strategy.parse(f"local_sgd(period={value})")


def test_a_misspelled_component_is_still_corrected():
    with pytest.raises(ConfigurationError, match="did you mean 'fixed'"):
        Strategy.parse("local_sgd(period=fixd)")


words = "plain scalars nested needy tuples count rate inner parts inf None true lambda 10x '10x'"
signs = "( ) , = - 1 2.5 ' [ ] ** * { } : f' /"
grammar = st.lists(st.sampled_from([*words.split(), *signs.split(), " "]), max_size=14).map("".join)


@pytest.mark.filterwarnings("ignore:invalid:DeprecationWarning", "ignore:invalid:SyntaxWarning")
@given(st.text() | grammar)
def test_any_text_is_read_or_refused(text):
    try:
        component = read(text)
    except ConfigurationError:
        return
    assert read(to_text(component)) == component


plain_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "inner", "x"]), inner, max_size=2)
    ),
    max_leaves=5,
)
arguments = st.sampled_from(
    ["count", "rate", "mode", "inner", "other", "parts", "speeds", "size", "flag", "label", "odd"]
)


@given(st.sampled_from(["plain", "scalars", "nested", "tuples", "needy", "no"]), st.dictionaries(arguments, plain_data))
def test_any_data_is_read_or_refused(name, data):
    try:
        component = from_data({"name": name, **data}, Gadget)
    except ConfigurationError:
        return
    assert isinstance(component, Gadget)


def test_data_spells_every_hyper_parameter_out():
    assert to_data(Nested(inner=Scalars(rate=math.inf))) == {
        "name": "nested",
        "inner": {
            "name": "scalars",
            "count": 1,
            "rate": "inf",
            "flag": False,
            "word": "a",
            "mode": "fast",
            "cap": 5,
            "label": "x",
            "either": 1.0,
        },
        "other": {"name": "plain"},
    }
    assert "hidden" not in to_data(Needy(1))


def test_none_survives_where_it_is_not_the_default():
    component = Scalars(cap=None, label=None)
    assert to_data(component)["cap"] == {}
    assert from_data(tomllib.loads(tomli_w.dumps(to_data(component))), Gadget) == component
    assert from_data(json.loads(json.dumps(to_data(component))), Gadget) == component


def test_data_may_hold_text_in_place_of_a_table():
    assert from_data({"name": "nested", "inner": "10x"}, Gadget) == Nested(inner=Scalars(count=10))
    assert from_data({"name": "tuples", "parts": ["plain", {"name": "needy", "size": 2}]}, Gadget).parts[1] == Needy(2)
    assert from_data({"name": "scalars", "rate": math.inf}, Gadget).rate == math.inf


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"size": 3}, "a gadget needs a name"),
        ({"name": "needy", "sise": 3}, "did you mean 'size'?"),
        ({"name": "needy", "size": "3"}, "size of needy must be a whole number, got '3'"),
        ({"name": "needy", "size": 2**70}, "must fit in 64 bits"),
        ({"name": "nested", "inner": {}}, "inner of nested must be a gadget, got None"),
        ({"name": "scalars", "rate": 10**400}, "must fit in 64 bits"),
    ],
)
def test_wrong_data(data, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        from_data(data, Gadget)


def test_parse_takes_objects_too():
    component = Scalars(count=4)
    assert Gadget.parse(component) is component
    assert Gadget.parse("scalars(4)") == component
    with pytest.raises(ConfigurationError, match="got 4"):
        Gadget.parse(4)


def test_a_bug_in_a_component_is_not_called_a_wrong_input(monkeypatch):
    def crash(self):
        raise TypeError("a bug")

    monkeypatch.setattr(Scalars, "__post_init__", crash)
    with pytest.raises(TypeError, match="a bug") as caught:
        read("scalars")
    assert not isinstance(caught.value, FlockstepError)


def test_an_argument_that_others_take_names_them():
    with pytest.raises(UnknownName, match=r"no argument of easgd is called 'codec'; it takes .*, beta, replicas; "):
        Strategy.parse("easgd(codec=half)")
    with pytest.raises(UnknownName, match=r"'codec' is an argument of all_reduce, ps, ") as caught:
        Strategy.parse("gossip(codec=half)")
    assert "easgd" not in str(caught.value)
