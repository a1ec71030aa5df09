"""Checks of every component: it is an immutable value, and survives text, JSON and TOML."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from typing import Any

import tomli_w

from flockstep import expression, registry
from flockstep.expression import Component


def check_component(component: Component) -> None:
    """Check that a component is a frozen value, is registered, and is read back from its text, JSON and TOML.

    Raises:
        AssertionError: a check fails; the message names the violated rule.
    """
    kind: Any = type(component)
    parameters = getattr(kind, "__dataclass_params__", None)
    assert parameters is not None, f"{kind.__name__} is no dataclass"
    assert parameters.frozen, f"{kind.__name__} is not frozen; write @dataclass(frozen=True)"
    # A subclass without its own decorator inherits one that does not know its fields.
    assert "__dataclass_params__" in vars(kind), (
        f"{kind.__name__} is not a dataclass itself; add @dataclass(frozen=True)"
    )
    copy = kind(**{name: getattr(component, name) for name in expression.fields_of(kind)})
    assert copy == component, f"{component!r} does not equal a copy of itself"
    assert hash(copy) == hash(component), f"{component!r} and its copy have different hashes"
    assert repr(copy) == repr(component), f"the repr of {component!r} differs from the repr of its copy, {copy!r}"
    hidden = [f.name for f in dataclasses.fields(kind) if f.init and not (f.compare and f.repr)]
    assert not hidden, f"{kind.__name__} leaves the fields {', '.join(hidden)} out of its equality or its repr"
    noun, name = component.noun, registry.name_of(kind)
    assert name in registry.names(noun), f"{kind.__name__} is not registered as a {noun}; add a line to the registry"
    assert registry.load(noun, name) is kind, (
        f"the {noun} {name!r} is registered with a class other than {kind.__name__}"
    )
    base, data = base_of(component), expression.to_data(component)
    text, strict, toml = str(component), json.dumps(data, allow_nan=False), tomli_w.dumps({"component": data})
    again = expression.parse(text, base)
    assert again == component, f"{component!r} is written as {text!r}, which is parsed as {again!r}"
    assert str(again) == text, f"the component parsed from {text!r} is written as {str(again)!r}"
    assert base.parse(component) is component, (
        f"{base.__name__}.parse must return an object that is already a component unchanged, but returns a new object"
    )
    for form, written, read in (("JSON", strict, json.loads(strict)), ("TOML", toml, tomllib.loads(toml)["component"])):
        again = expression.from_data(read, base)
        assert again == component, f"{component!r} is written to {form} as {written}, which is read as {again!r}"


def base_of(component: Component) -> type[Component]:
    """Return the base class of the component's kind: the outermost class that declares `noun`."""
    declare = [kind for kind in type(component).__mro__ if issubclass(kind, Component) and "noun" in vars(kind)]
    return declare[-1]
