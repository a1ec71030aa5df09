"""The values that functions and classes hold in addition to their source: default arguments, attributes, and later
changes.

Evaluating the source again restores only the values in the source. All other values are sent as data, and set after the
evaluation.
"""

from __future__ import annotations

import abc
import ast
import builtins
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from flockstep.drivers.state import to_bytes
from flockstep.errors import ConfigurationError

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class HeldValue:
    """A value that a function or class uses but its source does not contain, such as an attribute or a default, with
    the statement that sets the value.
    """

    path: str
    """Path of the value, such as `Config.lr` or `helper.__defaults__[0]`."""
    value: object
    statement: str
    """Python statement that sets the value, with `{value}` in place of the value."""


def held_values(path: str, value: Any, source: str, namespace: Mapping[str, Any]) -> Iterator[HeldValue]:
    """Yield the values of a function or class that a new evaluation of its `source` in `namespace` would not restore.

    Raises:
        ConfigurationError: such a value cannot be sent to another process.
    """
    yield from _held(path, value, ast.parse(source).body[0], namespace)


def _held(path: str, value: Any, node: ast.stmt, namespace: Mapping[str, Any]) -> Iterator[HeldValue]:
    if isinstance(value, type):
        if isinstance(node, ast.ClassDef):
            yield from _held_by_class(path, value, node, namespace)
        return
    assert isinstance(node, Function)
    yield from _defaults(path, path, value, node, namespace)
    for name, one in getattr(value, "__dict__", {}).items():
        if name != "__wrapped__" and not (node.decorator_list and _data(one, name) is None):
            yield from _attribute(path, name, one, None, namespace)


def _held_by_class(path: str, kind: type, node: ast.ClassDef, namespace: Mapping[str, Any]) -> Iterator[HeldValue]:
    given, defined = dict[str, ast.expr | None](), dict[str, Function | ast.ClassDef]()
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            given[_own(one.target.id, node.name)] = one.value
        elif isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name):
            given[_own(one.targets[0].id, node.name)] = one.value
        elif isinstance(one, Function | ast.ClassDef):
            defined[_own(one.name, node.name)] = one
    free = bool(node.decorator_list or node.keywords) or type(kind) not in (type, abc.ABCMeta)
    for name, value in list(vars(kind).items()):
        where, definition = f"{path}.{name}", defined.get(name)
        if isinstance(definition, ast.ClassDef) and isinstance(value, type):
            yield from _held(where, value, definition, namespace)
        elif isinstance(definition, Function) and _is_method(value, kind, name, definition):
            yield from _defaults(where, f"vars({path})[{name!r}]", value, definition, namespace)
        elif (code := _code(value)) is not None and name not in given and code.co_filename.startswith("<string"):
            yield from _defaults(where, f"vars({path})[{name!r}]", value, None, namespace)
        elif code is None and name.startswith("_") and (name.endswith("__") or isinstance(kind, enum.EnumType)):
            continue  # what Python itself keeps there
        elif not inspect.isdatadescriptor(value):
            foreign = name not in given and (free or (name.startswith("_") and not _of_main(value)))
            if not (foreign and _data(value, where) is None):
                yield from _attribute(path, name, value, given.get(name), namespace)


def _attribute(
    path: str, name: str, value: object, expression: ast.expr | None, namespace: Mapping[str, Any]
) -> Iterator[HeldValue]:
    if not _gives(expression, value, namespace, f"{path}.{name}"):
        yield HeldValue(f"{path}.{name}", value, f"setattr({path}, {name!r}, {{value}})")


def _defaults(
    path: str, access: str, value: Any, node: Function | None, namespace: Mapping[str, Any]
) -> Iterator[HeldValue]:
    """Default arguments that the source does not give; `access` is the expression whose value is the function."""
    function = _function(value)
    if function is None:
        return
    found, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    positional: list[ast.expr | None] = [*node.args.defaults] if node else [None] * len(found)
    by_name = (
        {one.arg: each for one, each in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if each}
        if node
        else {}
    )
    if len(positional) != len(found) or (node and by_name.keys() != named.keys()):
        raise _refused(path, "has other default arguments than its source")
    for key, one, expression in [
        *((number, *pair) for number, pair in enumerate(zip(found, positional, strict=True))),
        *((name, one, by_name.get(name)) for name, one in named.items()),
    ]:
        place = f"{path}.{'__defaults__' if isinstance(key, int) else '__kwdefaults__'}[{key!r}]"
        if node is None and _data(one, place) is None:
            continue  # a mark of the library that wrote this function
        if not _gives(expression, one, namespace, place):
            yield HeldValue(place, one, f"_set_default({access}, {key!r}, {{value}})")


def _gives(expression: ast.expr | None, value: Any, namespace: Mapping[str, Any], path: str) -> bool:
    """Whether the expression of the source, evaluated again, gives the value; False: the value travels as data.

    Raises:
        ConfigurationError: neither.
    """
    if isinstance(expression, ast.Name) and _known(expression, namespace) is value:
        return True
    if isinstance(value, enum.Enum) and isinstance(expression, (ast.Constant, ast.Name)):
        if _gives(expression, value.value, namespace, path):
            return True
        raise _refused(path, "is another member than the one in its source")
    data = _data(value, path)
    if data is not None:
        return expression is not None and data == _data_of_literal(expression, path)
    if expression is not None and (_known(expression, namespace) is value or _reads_no_values(expression, namespace)):
        return True
    raise _refused(path, f"holds a {type(value).__name__} that may differ from the value in its source")


def _reads_no_values(expression: ast.expr, namespace: Mapping[str, Any]) -> bool:
    """Whether an expression names only functions, classes and modules, so that it means what it meant before."""
    if isinstance(expression, (ast.Name, ast.Attribute)):
        return False  # what it names today is something else
    names = [one.id for one in ast.walk(expression) if isinstance(one, ast.Name) and one.id in namespace]
    return all(isinstance(namespace[name], ModuleType) or callable(namespace[name]) for name in names)


def _known(expression: ast.expr, namespace: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of a module or class, stands for today; a new object for any other expression."""
    if isinstance(expression, ast.Name):
        return namespace.get(expression.id, getattr(builtins, expression.id, object()))
    if isinstance(expression, ast.Attribute):
        base = _known(expression.value, namespace)
        if isinstance(base, (ModuleType, type)):
            return getattr(base, expression.attr, object())
    return object()


def _data(value: object, path: str) -> bytes | None:
    """The value as bytes; None if it cannot be encoded."""
    try:
        return to_bytes(value, path)
    except ConfigurationError:
        return None


def _data_of_literal(expression: ast.expr, path: str) -> bytes | None:
    try:
        return _data(ast.literal_eval(expression), path)
    except (ValueError, TypeError, SyntaxError):
        return None


def _function(value: Any) -> FunctionType | None:
    """The function within a method, or within a decorated function."""
    found = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) or hasattr(value, "__func__") else None
    return found if isinstance(found, FunctionType) else None


def _code(value: Any) -> CodeType | None:
    function = _function(value)
    return None if function is None else function.__code__


def _is_method(value: Any, kind: type, name: str, node: Function) -> bool:
    """Whether a class still has the method that its source defines; a decorator may give something else."""
    code = _code(value)
    return bool(node.decorator_list) or (code is not None and code.co_qualname == f"{kind.__qualname__}.{node.name}")


def _of_main(value: object) -> bool:
    function = _function(value)
    return function is not None and function.__module__ == "__main__"


def _own(name: str, kind: str) -> str:
    """The name of an attribute, with that of its class if it is private."""
    private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.lstrip('_')}{name}" if private else name


def _refused(path: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path} {what}, and cannot be sent to another process; run the cell or program of its definition again, "
        f"create "
        "it inside the function, or define it in a Python file and import it"
    )


def set_default(function: Callable[..., Any], key: int | str, value: object) -> None:
    """Set a default argument of a function, given by its index among the defaults or by its name."""
    found = _function(function)
    assert found is not None
    if isinstance(key, int):
        old = found.__defaults__ or ()
        found.__defaults__ = (*old[:key], value, *old[key + 1 :])
    else:
        found.__kwdefaults__ = {**(found.__kwdefaults__ or {}), key: value}
