"""Checks of every component: it is an immutable value, and equals itself after conversion to text, JSON and TOML and
back.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from typing import Any

import tomli_w

from flockstep import expression, registry
from flockstep.expression import Component


def check_component(component: Component) -> None:
    """Run every check of this module on one component.

    Raises:
        AssertionError: a check fails; the message names the violated rule.
    """
    check_value(component)
    check_registered(component)
    check_text(component)
    check_json(component)
    check_toml(component)


def check_value(component: Component) -> None:
    """Check that the component is frozen, and that a copy has equal value, hash and text."""
    kind: Any = type(component)
    parameters = getattr(kind, "__dataclass_params__", None)
    assert parameters is not None, f"{kind.__name__} is no dataclass"
    assert parameters.frozen, f"{kind.__name__} is not frozen; write @dataclass(frozen=True)"
    # A subclass without its own decorator inherits one that does not know its fields.
    assert "__dataclass_params__" in vars(kind), (
        f"{kind.__name__} is not a dataclass itself; add @dataclass(frozen=True)"
    )
    hyper_parameters = expression.fields_of(kind)
    copy = kind(**{name: getattr(component, name) for name in hyper_parameters})
    assert copy == component, f"{component!r} does not equal a copy of itself"
    assert hash(copy) == hash(component), f"{component!r} and its copy have different hashes"
    assert repr(copy) == repr(component), f"the repr of {component!r} differs from the repr of its copy, {copy!r}"
    hidden = [f.name for f in dataclasses.fields(kind) if f.init and not (f.compare and f.repr)]
    assert not hidden, f"{kind.__name__} leaves the fields {', '.join(hidden)} out of its equality or its repr"


def check_registered(component: Component) -> None:
    """Check that the registry holds the component's class, with one name, among the components of its kind."""
    noun, kind = component.noun, type(component)
    name = registry.name_of(kind)
    assert name in registry.names(noun), f"{kind.__name__} is not registered as a {noun}; add a line to the registry"
    assert registry.load(noun, name) is kind, (
        f"the {noun} {name!r} is registered with a class other than {kind.__name__}"
    )


def check_text(component: Component) -> None:
    """Check that the component's text is parsed back to an equal component, by its own class as well as by the base
    class of its kind.
    """
    text = str(component)
    base = base_of(component)
    again = expression.parse(text, base)
    assert again == component, f"{component!r} is written as {text!r}, which is parsed as {again!r}"
    assert str(again) == text, f"the component parsed from {text!r} is written as {str(again)!r}"
    assert base.parse(component) is component, (
        f"{base.__name__}.parse must return an object that is already a component unchanged, but returns a new object"
    )


def check_json(component: Component) -> None:
    """Check that the component, written as strict JSON, is read back as an equal component."""
    text = json.dumps(expression.to_data(component), allow_nan=False)
    again = expression.from_data(json.loads(text), base_of(component))
    assert again == component, f"{component!r} is written to JSON as {text}, which is read as {again!r}"


def check_toml(component: Component) -> None:
    """Check that the component, written as TOML, is read back as an equal component."""
    text = tomli_w.dumps({"component": expression.to_data(component)})
    again = expression.from_data(tomllib.loads(text)["component"], base_of(component))
    assert again == component, f"{component!r} is written to TOML as {text}, which is read as {again!r}"


def base_of(component: Component) -> type[Component]:
    """Return the base class of the component's kind: the outermost class that declares `noun`."""
    declare = [kind for kind in type(component).__mro__ if issubclass(kind, Component) and "noun" in vars(kind)]
    return declare[-1]
