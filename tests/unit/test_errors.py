"""The error tree: what a caller can decide on, and what a message holds."""

from __future__ import annotations

import dataclasses
import typing

import msgspec
import pytest

from flockstep import errors, registry
from flockstep.cli.app import app
from flockstep.cli.commands import commands_of
from flockstep.cli.listing import plural
from flockstep.codecs.base import Codec
from flockstep.errors import ConfigurationError, FlockstepError, MissingDependency, RunError, UnknownName
from flockstep.records.events import Event
from flockstep.records.summary import Summary, WorkerTotals
from flockstep.strategies.base import Strategy, Traits

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FlockstepError)]


def test_the_docstring_draws_the_tree():
    # Each line of the drawing: the branch signs, a name, two blanks, what it means.
    drawn = {line.split("── ")[1].split()[0] for line in errors.__doc__.splitlines() if "── " in line}
    assert drawn == {kind.__name__ for kind in KINDS} - {"FlockstepError"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_explained_and_carried_by_one_branch(kind):
    assert kind.__doc__
    branches = [branch for branch in (ConfigurationError, RunError) if issubclass(kind, branch)]
    assert len(branches) == (kind is not FlockstepError)
    assert str(kind("because")) == "because"


def test_exit_codes_tell_wrong_input_from_a_failed_run():
    assert {kind.exit_code for kind in KINDS if issubclass(kind, ConfigurationError)} == {2}
    assert {kind.exit_code for kind in KINDS if not issubclass(kind, ConfigurationError)} == {1}


def test_wrong_input_is_a_value_error_too():
    assert issubclass(ConfigurationError, ValueError)
    assert not issubclass(RunError, ValueError)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("rnig", ["star", "ring"], "did you mean 'ring'?"),
        ("Ring", ["star", "ring"], "did you mean 'ring'?"),
        ("RNIG", ["star", "ring"], "did you mean 'ring'?"),
        ("zzz", ["star", "ring"], "known: ring, star"),
        ("fast", ["elastic", "private"], "known: elastic, private"),
        ("zzz", [], "known: none"),
    ],
)
def test_unknown_names_name_the_nearest_or_all(name, known, hint):
    assert str(UnknownName.among("topology", name, known)) == f"no topology is called {name!r}; {hint}"


def test_unknown_names_take_any_iterable_once():
    assert "did you mean 'ring'" in str(UnknownName.among("topology", "rign", (name for name in ["ring"])))


def test_a_command_stands_for_a_long_list_of_known_names():
    with pytest.raises(
        UnknownName, match=r"'one_way_ring'; flockstep list strategy shows all; a custom strategy needs --import FILE, "
    ):
        registry.load("strategy", "one_way_ring")
    with pytest.raises(UnknownName, match=r"'zzz'; known: .*by_label.*iid"):
        registry.load("split", "zzz")


def test_a_long_list_of_known_names_can_be_cut_to_the_kinds():
    assert str(UnknownName.among("kind", "zzz", ["star", "ring"], ["topology"])).endswith("known: topology")


def test_a_former_name_is_refused_with_the_present_one_wherever_that_is_known():
    assert str(UnknownName.among("noun", "rule", ["outer", "server_update"])).endswith("now called 'server_update'")
    assert "now" not in str(UnknownName.among("noun", "rule", ["ruler"]))
    with pytest.raises(UnknownName, match="'sharded_optimizer'; flockstep calls it 'scatter_reduce'"):
        registry.load("strategy", "sharded_optimizer")


def test_every_present_name_in_the_table_of_former_names_exists():
    """A present name that is renamed again must be changed in the table too, or an error names what does not exist."""
    components = [registry.load(noun, name) for noun in registry.nouns() for name in registry.names(noun)]
    options = {option for _, one in commands_of(app) for parameter in one.params for option in parameter.opts}
    kinds = {name for noun in registry.nouns() for name in (noun, plural(noun))}
    known = {name for one in components for name in dir(one)} | kinds | options
    known |= {name for noun in ("strategy", "pipeline_schedule") for name in registry.names(noun)}
    structs = [Summary, WorkerTotals, *typing.get_args(Event)]
    known |= {field.name for kind in structs for field in msgspec.structs.fields(kind)}
    known |= {kind.__struct_config__.tag for kind in structs} | {field.name for field in dataclasses.fields(Traits)}
    assert set(errors.RENAMED.values()) - known == set()


@pytest.mark.parametrize(
    ("text", "present"),
    [
        ("ps(rule=plain)", "server_update"),
        ("local_sgd(outer=nesterov)", "outer_optimizer"),
        ("streaming_diloco(outer=nesterov)", "outer_optimizer"),
        ("demo(beta=0.9)", "decoupled_momentum"),
    ],
)
def test_former_names_in_expressions_are_refused(text, present):
    with pytest.raises(UnknownName, match=f"it is now called '{present}'"):
        Strategy.parse(text)


@pytest.mark.parametrize(
    ("base", "former", "present"), [(Codec, "at", "bind_step"), (Strategy, "cell", "taxonomy_entry")]
)
def test_a_component_with_a_method_of_a_former_name_is_refused(base, former, present):
    with pytest.raises(
        UnknownName, match=f"no method of a {base.noun} is called '{former}'; it is now called '{present}'"
    ):
        type("Own", (base,), {former: lambda self: None})


def test_a_missing_dependency_says_what_to_run():
    message = str(MissingDependency.of("scikit-learn", "workloads", "the workload digits"))
    assert message == (
        "the workload digits needs scikit-learn, which is not installed; "
        "install it with: pip install 'flockstep[workloads]'"
    )
