"""Components as values: `ps(consistency=ssp(3), shards=2)` in text, in Python and in TOML.

A component is a frozen dataclass whose fields are its hyper-parameters. Its class defines the noun that it implements;
the registry defines its name. A component can be converted to text or plain data and back without loss.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import math
import operator
import re
import types
import typing
from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar, Union

from flockstep import registry
from flockstep.errors import RENAMED, ConfigurationError, UnknownName

C = TypeVar("C", bound="Component")
Resolve = Callable[[Any, Any, str], Any]

_WORDS = {"inf": math.inf, "true": True, "false": False, "none": None}
_INFINITIES = {"inf": math.inf, "-inf": -math.inf}
_DIGIT_NAME = re.compile(
    r"""'[^']*'|"[^"]*"|(?<![\w.])(?:0[xXoObB]\w+|\d[\d_]*\.?[\d_]*(?:[eE][+-]?\d+)?(?![\w.])|(?P<name>\d\w*))"""
)
"""Texts in quotes and numbers, which stay as they are, and names that begin with a digit."""


SHOWN = {"shown": True}
"""Metadata of a dataclass field that an expression shows even with its default, because the expression would be
ambiguous without it.
"""
SIZED = {"sized": True}
"""Metadata of a dataclass field in bytes, elements or bytes per second, whose value must be scaled down with the
model.
"""
ELEMENTS = {"counts": "elements"}
"""Metadata of a dataclass field that counts elements, rather than steps."""


class Component(ABC):
    """Base class of components: parts of a run that have a name, can be written as expressions, and can be compared.
    Subclasses are frozen dataclasses.

    Fields may be bool, int, float, str, a `Literal`, another component's base class, a tuple of one of these, or `X |
    None`. Checks of values belong in `__post_init__` and raise `ConfigurationError`.
    """

    noun: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls):
            if RENAMED.get(name) in dir(cls):
                raise UnknownName.among(f"method of a {cls.noun}", name, dir(cls))

    def __str__(self) -> str:
        return to_text(self)

    @classmethod
    def parse(cls, value: str | Self) -> Self:
        """Return the component that the text `value` describes, or `value` itself if it already is a component."""
        return value if isinstance(value, cls) else parse(str(value), cls)


def parse(text: str, base: type[C]) -> C:
    """Return the component that `text` describes; the component implements the noun of the class `base`.

    Raises:
        ConfigurationError: `text` is not an expression, or a value has the wrong type.
        UnknownName: a name or an argument does not exist; the message names the nearest existing name.
    """
    alias = registry.alias(base.noun, text.strip())
    if alias:
        return parse(alias, base)
    if not text.strip().isidentifier() and text.strip() in registry.names(base.noun):  # such as 1f1b
        return typing.cast(C, _build(_class(text.strip(), base), {}, _from_node))
    if re.fullmatch(
        r"\d[\d.]* ?[a-zA-Z][\w./ -]{0,39}", text.strip()
    ):  # a quantity with its unit, such as 10 Gbit/s or 1gbt
        raise registry.unknown(base.noun, text.strip())
    try:
        component = _from_tree(_read(text), base, base.noun)
    except (SyntaxError, RecursionError):
        if re.fullmatch(r"[\w-]{1,40}", text.strip()):  # a misspelled name, such as 1gbit, that is not an identifier
            raise registry.unknown(base.noun, text.strip()) from None
        shown = repr(text if len(text) <= 80 else text[:80] + "…")
        open_ended = text.count("(") != text.count(")")
        why = ", because the parentheses do not match" if open_ended else ""
        raise ConfigurationError(f"cannot read {shown} as {_noun(base)}{why}; write it like {_example(base)}") from None
    return typing.cast(C, component)


def to_text(component: Component) -> str:
    """Return the expression of a component, with the values that differ from their defaults and with fields marked
    `SHOWN`. Parsing the expression gives an equal component.
    """
    arguments = ", ".join(f"{name}={_value_text(value)}" for name, value in _settings(component))
    name = registry.name_of(type(component))
    return f"{name}({arguments})" if arguments else name


def to_data(component: Component) -> dict[str, Any]:
    """Return a component as a mapping for JSON and TOML, with every hyper-parameter."""
    data: dict[str, Any] = {"name": registry.name_of(type(component))}
    for field in _hyper_parameters(type(component)):
        value = getattr(component, field.name)
        if value is not None:
            data[field.name] = _value_data(value)
        elif field.default is not None:
            data[field.name] = {}  # TOML has no null, and omitting the field would restore its default
    return data


def from_data(data: Mapping[str, Any], base: type[C]) -> C:
    """Return the component that a mapping made by `to_data` describes."""
    arguments = dict(data)
    if "name" not in arguments:
        raise ConfigurationError(f"{_noun(base)} needs a name, got {dict(data)!r}; add name = …")
    kind = _class(str(arguments.pop("name")), base)
    return typing.cast(C, _build(kind, arguments, _from_plain))


@functools.cache
def fields_of(kind: type[Component]) -> dict[str, Any]:
    """Return a mapping from the name of each hyper-parameter of the class `kind` to its type, in order."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in _hyper_parameters(kind)}


def _read(text: str) -> ast.expr:
    """The syntax tree of `text`; any complaint of Python's parser becomes a SyntaxError.

    Names that begin with a digit, such as 1f1b, are read as text.
    """
    text = text.strip()
    try:
        try:
            return ast.parse(text, mode="eval").body
        except SyntaxError:
            quoted = _DIGIT_NAME.sub(lambda found: repr(found["name"]) if found["name"] else found[0], text)
            if quoted in (text, repr(text)):
                raise
            return ast.parse(quoted, mode="eval").body
    except (ValueError, MemoryError) as error:  # null characters and surrogates; deep nesting
        raise SyntaxError(str(error)) from None


def _class(name: str, base: type[Component]) -> type[Component]:
    kind = registry.load(base.noun, name)
    legal = isinstance(kind, type) and issubclass(kind, base) and dataclasses.is_dataclass(kind)
    if not legal:
        raise ConfigurationError(
            f"{name!r} is registered as {_noun(base)} but is not of that kind; make it a dataclass that inherits from "
            f"{base.__name__}"
        )
    return typing.cast(type[Component], kind)


def _from_tree(node: ast.expr, base: type[Component], where: str, wanted: str = "") -> Component:
    """Return the component of a syntax tree; `wanted` describes, in an error, what `where` may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return parse(node.value, base)
    if isinstance(node, ast.Name):
        alias = registry.alias(base.noun, node.id)
        return parse(alias, base) if alias else _build(_class(node.id, base), {}, _from_node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _sum(_from_tree(node.left, base, where), _from_tree(node.right, base, where), where)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        raise ConfigurationError(
            f"{where} must be one {base.noun}, got the product {_code(node)}; use one of its factors, and for a mesh "
            "of several kinds of parallelism a script (docs/how-to/sharded.md)"
        )
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        wanted = wanted or ("given by name" if where == base.noun else _words(base))
        raise ConfigurationError(f"{where} must be {wanted}, got {_code(node)}; write it like {_example(base)}")
    kind = _class(node.func.id, base)
    return _build(kind, _call_arguments(node, kind), _from_node)


def _sum(left: Component, right: Component, where: str) -> Component:
    """Add two components that support it."""
    try:
        return typing.cast(Component, operator.add(left, right))
    except TypeError:
        raise ConfigurationError(
            f"{where} must be a {left.noun}, got {left} + {right}; only a sparse codec can be followed by another "
            "codec, as in topk + qsgd(4)"
        ) from None


def _call_arguments(node: ast.Call, kind: type[Component]) -> dict[str, Any]:
    name, names = registry.name_of(kind), [field.name for field in _hyper_parameters(kind) if not field.kw_only]
    if len(node.args) > len(names):
        raise ConfigurationError(
            f"{name} takes at most {len(names)} arguments ({', '.join(names) or 'none'}), got {len(node.args)}"
        )
    arguments: dict[str, Any] = dict(zip(names, node.args, strict=False))
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ConfigurationError(f"{name} takes named arguments, got **{_code(keyword.value)}")
        if keyword.arg in arguments:
            raise ConfigurationError(f"{name} got the argument {keyword.arg!r} twice; give it once")
        arguments[keyword.arg] = keyword.value
    return arguments


def _build(kind: type[Component], arguments: Mapping[str, Any], resolve: Resolve) -> Component:
    hints, name = fields_of(kind), registry.name_of(kind)
    values = {}
    for key, raw in arguments.items():
        if key not in hints:
            raise _no_argument(kind, key)
        values[key] = resolve(raw, hints[key], f"{key} of {name}")
    required = [field.name for field in _hyper_parameters(kind) if _default(field) is dataclasses.MISSING]
    missing = [field for field in required if field not in values]
    if missing:
        raise ConfigurationError(f"{name} needs {', '.join(missing)}; write {_example_of(kind)}")
    return kind(**values)


def _no_argument(kind: type[Component], key: str) -> UnknownName:
    """The error for an argument that `kind` does not have; it names the classes of the same noun that have it."""
    own, name, others = fields_of(kind), registry.name_of(kind), []
    for other in registry.names(kind.noun):
        with contextlib.suppress(ConfigurationError):  # a dependency of another component may not be installed
            known = registry.load(kind.noun, other)
            if hasattr(known, "__dataclass_fields__") and key in fields_of(known):
                others.append(other)
    if not others:
        return UnknownName.among(f"argument of {name}", key, own)
    return UnknownName(
        f"no argument of {name} is called {key!r}; it takes {', '.join(own) or 'none'}; {key!r} is an argument of "
        f"{', '.join(others)}"
    )


def _from_node(node: Any, hint: Any, where: str) -> Any:
    """The value of a syntax-tree node, with its type checked."""
    base = _component_base(hint)
    unsigned = node.operand if isinstance(node, ast.UnaryOp) else node  # Python reads -1 as a sign and the number 1
    if base is not None and not (isinstance(unsigned, ast.Constant) and _is_plain(unsigned.value, hint)):
        return _part(node, base, hint, where)
    if isinstance(node, ast.Name):
        return _checked(_WORDS.get(node.id, node.id), hint, where)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and ast.unparse(node.operand) == "inf":
        return _checked(-math.inf, hint, where)
    if isinstance(node, (ast.Tuple, ast.List)):
        return _checked(tuple(_from_node(n, _item(hint), where) for n in node.elts), hint, where)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ConfigurationError(f"{where} must be {_words(hint)}, got {_code(node)}") from None
    return _checked(value, hint, where)


def _part(node: ast.expr, base: type[Component], hint: Any, where: str) -> Component:
    """Return the component that a field holds; an error says which other values the field accepts."""
    try:
        return _from_tree(node, base, where, _words(hint))
    except UnknownName as error:
        name = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
        if name is None or "did you mean" in str(error) or _words(hint) == _words(base):
            raise
        known = ", ".join(sorted(registry.names(base.noun)))
        raise UnknownName(f"{where} must be {_words(hint)}, got {name!r}; {_words(base)} is one of {known}") from None


def _from_plain(value: Any, hint: Any, where: str) -> Any:
    """The value of a JSON or TOML item, with its type checked."""
    if isinstance(value, Mapping) and not value:
        return _checked(None, hint, where)
    base = _component_base(hint)
    if base is not None and not _is_plain(value, hint):
        return from_data(value, base) if isinstance(value, Mapping) else base.parse(value)
    if isinstance(value, (list, tuple)):
        return _checked(tuple(_from_plain(v, _item(hint), where) for v in value), hint, where)
    return _checked(value, hint, where)


def _checked(value: Any, hint: Any, where: str) -> Any:
    if type(value) is int and value.bit_length() > 63:
        raise ConfigurationError(
            f"{where} must fit in 64 bits, got a number of {value.bit_length()} bits; write it like 1e30"
        )
    if isinstance(value, str) and float in _options(hint):
        value = _INFINITIES.get(value, value)
    for option in _options(hint):
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif typing.get_origin(option) is tuple:
            if isinstance(value, tuple):
                return value
        elif option is float:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
        elif option is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        elif isinstance(option, type) and isinstance(value, option):
            return value
    if isinstance(value, str) and typing.get_origin(hint) is Literal:
        raise UnknownName.among(where, value, typing.get_args(hint))
    raise ConfigurationError(f"{where} must be {_words(hint)}, got {value!r}")


def _is_plain(value: Any, hint: Any) -> bool:
    """Whether a value is a plain value of a field that accepts components or plain values, such as whole numbers."""
    return value is None or type(value) in _options(hint)


def _options(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _item(hint: Any) -> Any:
    for option in _options(hint):
        if typing.get_origin(option) is tuple:
            return typing.get_args(option)[0]
    return hint


def _component_base(hint: Any) -> type[Component] | None:
    for option in _options(hint):
        if isinstance(option, type) and issubclass(option, Component):
            return option
    return None


def _words(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "none"}
    return " or ".join(names.get(o) or _noun(o) for o in _options(hint))


def _noun(option: Any) -> str:
    """Return a name, with its article, of a type that a field accepts, such as a kind of component."""
    noun = getattr(option, "noun", None)
    if noun is None:
        return str(getattr(option, "__name__", option))
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun.replace('_', ' ')}"


def _settings(component: Component) -> list[tuple[str, Any]]:
    changed = []
    for field in _hyper_parameters(type(component)):
        value = getattr(component, field.name)
        if value != _default(field) or "shown" in field.metadata:
            changed.append((field.name, value))
    return changed


def _hyper_parameters(kind: type[Component]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(typing.cast(Any, kind)) if field.init]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _value_text(value: Any) -> str:
    if isinstance(value, Component):
        return to_text(value)
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_value_text, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def _value_data(value: Any) -> Any:
    if isinstance(value, Component):
        return to_data(value)
    if isinstance(value, float) and math.isinf(value):
        return repr(value)  # as text, because JSON has no infinity
    return [_value_data(v) for v in value] if isinstance(value, tuple) else value


def _code(node: ast.expr) -> str:
    """The source text of `node`, for a message."""
    try:
        text = ast.unparse(node)
    except ValueError:  # a whole number with more digits than Python prints
        return "a number too large to print"
    text = re.sub(r"'(\d\w*)'", r"\1", text)  # `_read` has put names that begin with a digit in quotes
    return text if len(text) <= 80 else text[:80] + "…"


def _example(base: type[Component]) -> str:
    names = registry.names(base.noun)
    return _example_of(_class(names[0], base)) if names else base.noun


def _example_of(kind: type[Component]) -> str:
    return f"{registry.name_of(kind)}({', '.join(f'{n}=…' for n in fields_of(kind))})"
