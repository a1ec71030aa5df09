"""Finds side effects of a call of a torch module: changes of attributes, of objects that attributes hold, and of
globals.
"""

from __future__ import annotations

import functools
import io
import random
import sys
import sysconfig
import types
from argparse import Namespace
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from flockstep.errors import ConfigurationError

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types whose values are immutable."""
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes that every torch module has, such as `_buffers`."""
_OWN_STATE = {*sys.stdlib_module_names, "flockstep", "numpy", "torch"}
"""Packages whose objects are not searched."""
_RECORDS = (types.SimpleNamespace, Namespace, UserDict, UserList)
"""Classes of Python whose objects hold the data of users."""
_OF_OBJECTS = (types.BuiltinMethodType, types.MethodWrapperType)
"""Types of methods of an object of Python, such as `itertools.count().__next__`."""
_MISSING = object()
"""In place of a value that does not exist."""


@dataclass(frozen=True, eq=False)
class Variable:
    """A variable by which the code of a module reaches a value: an attribute, a global variable or a variable of an
    enclosing function.
    """

    name: str
    title: str
    """Name by which messages refer to the variable."""
    read: Callable[[], Any]
    write: Callable[[Any], None]


@dataclass(frozen=True)
class _Kept:
    """A value as it was when the snapshot was taken."""

    place: Variable
    """Variable from which the value was reached."""
    same: Callable[[], bool]
    """Function that says whether the value is as it was."""
    restore: Callable[[], object]


class StateSnapshot:
    """A snapshot of the values that the code of a module can change when the module is called.

    The snapshot contains the attributes of all modules inside the module and of their classes, the global and enclosing
    variables that the methods of these classes name, also in other Python modules, and everything that these values
    hold. Code of installed packages is not searched for globals.
    """

    def __init__(self, module: nn.Module):
        self.iterators: list[Variable] = []
        """The places that lead to an iterator of Python or torch, whose position cannot be restored. A place is left
        out if it leads to the iterator through an object to which another place leads."""
        self._kept: list[_Kept] = []
        self._classes: list[tuple[type, frozenset[str]]] = []
        """The classes in the snapshot, with the names of their own attributes."""
        self._seen: dict[object, Any] = {id(one): one for one in module.modules()}
        for name, one in module.named_modules():
            self._attributes(one, f"{name}." if name else "")

    @property
    def changed(self) -> list[Variable]:
        """The variables whose values have changed since the snapshot, or which lead to an object that has changed."""
        return list(dict.fromkeys([*(one.place for one in self._kept if not one.same()), *self._added()]))

    def restore(self) -> None:
        """Restore all values that have changed since the snapshot."""
        for one in self._kept:
            if not one.same():
                one.restore()
        for place in self._added():
            place.write(_MISSING)

    def _added(self) -> list[Variable]:
        """The attributes that classes have got since the snapshot, for example in place of an inherited attribute."""
        return [
            _in_class(kind, name)
            for kind, names in self._classes
            for name in sorted(vars(kind).keys() - names)
            if not name.startswith("__")
        ]

    def _attributes(self, one: Any, title: str) -> None:
        """Keep the attributes of an object, each as a place, and what the methods of its class reach."""
        names = vars(one)
        for name in list(names):
            self._place(_in_dict(names, name, f"{title}{name}"))
        self._contents(_in_dict(names, "__dict__", f"{title}__dict__"), names)
        self._visit(_in_dict(names, "__class__", f"{title}__class__"), type(one))

    def _place(self, place: Variable) -> None:
        """Keep the value at a place, and what the value holds."""
        self._visit(place, self._value(place))

    def _value(self, place: Variable) -> Any:
        """Keep the value at a place, but not what the value holds, and return the value."""
        value = place.read()
        self._kept.append(_Kept(place, lambda: _same(place.read(), value), lambda: place.write(value)))
        return value

    def _contents(self, place: Variable, held: Any) -> None:
        """Keep which elements a container has."""
        kept = held.copy()
        elements = _items if isinstance(held, dict) else frozenset if isinstance(held, set) else tuple

        def restore() -> None:
            held.clear()
            (held.update if isinstance(held, dict | set) else held.extend)(kept)

        self._kept.append(_Kept(place, lambda: _same(elements(held), elements(kept)), restore))

    def _visit(self, place: Variable, value: Any) -> None:
        """Keep what a value holds, once."""
        if isinstance(value, (*SCALARS, Hidden)) or value is _MISSING:
            return
        if _is_iterator(value):
            self.iterators.append(place)
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        match value:
            case torch.Tensor():
                self._tensor(place, value)
            case dict() | list() | set() | deque() | bytearray():
                self._contents(place, value)
                self._all(place, value.values() if isinstance(value, dict) else value)
            case tuple() | frozenset():
                self._all(place, value)
            case types.FunctionType():
                self._function(place, value)
            case types.MethodType():
                self._all(place, (value.__func__, value.__self__))
            case _ if isinstance(value, _OF_OBJECTS):
                self._visit(place, value.__self__)
            case functools.partial():
                self._all(place, (value.func, value.args, value.keywords))
            case property():
                self._all(place, (value.fget, value.fset))
            case staticmethod() | classmethod():
                self._visit(place, value.__func__)
            case type():
                self._class(place, value)
            case _:
                self._object(place, value)

    def _all(self, place: Variable, values: Iterable[Any]) -> None:
        for one in list(values):
            self._visit(place, one)

    def _tensor(self, place: Variable, value: torch.Tensor) -> None:
        """Keep a tensor, if it is no parameter: while a module is traced, a proxy is in place of each parameter."""
        if isinstance(value, nn.Parameter):
            return
        version, kept = value._version, value.detach().clone()

        def same() -> bool:
            return value._version == version and _equal(value.detach(), kept)

        def restore() -> None:
            with torch.no_grad():
                if _alike(value, kept):
                    value.copy_(kept)
                else:
                    value.data = kept

        self._kept.append(_Kept(place, same, restore))

    def _function(self, place: Variable, function: types.FunctionType) -> None:
        """Keep a function's attributes and the variables that it names, if it is not a function of an installed
        package.
        """
        self._all(place, (function.__defaults__, function.__kwdefaults__))
        if is_installed(function.__module__):
            return
        self._contents(place, vars(function))
        self._all(place, vars(function).values())
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._place(_in_cell(cell, name))
        names = set(_names(function.__code__))
        spaces = [function.__globals__]
        for space in spaces:  # which grows: functions name variables of other Python modules as attributes
            self._globals(space, names)
            for value in [one for name in names for one in (space.get(name), sys.modules.get(name))]:
                if isinstance(value, types.ModuleType) and not is_installed(value.__name__):
                    spaces += [vars(value)] if all(vars(value) is not one for one in spaces) else []

    def _globals(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            key = id(namespace), name
            if key not in self._seen:
                self._seen[key] = namespace
                self._place(_in_dict(namespace, name, f"global {name}"))

    def _class(self, place: Variable, kind: type) -> None:
        """Keep the attributes of a class and of its bases, if they are not those of an installed package."""
        for one in kind.__mro__:
            if is_installed(one.__module__):
                continue
            self._classes.append((one, frozenset(vars(one))))
            for name, value in list(vars(one).items()):
                method = callable(value) or isinstance(value, property | staticmethod | classmethod)
                if name.startswith("__"):
                    self._all(place, [value] if method else [])
                elif method and not isinstance(value, (Hidden, *_OF_OBJECTS)):
                    self._visit(place, self._value(_in_class(one, name)))
                else:
                    self._place(_in_class(one, name))

    def _object(self, place: Variable, value: Any) -> None:
        """Keep the state of an object."""
        match value:
            case np.ndarray():
                kept = value.copy()
                found = _Kept(place, lambda: value.tobytes() == kept.tobytes(), lambda: np.copyto(value, kept))
            case array():
                items = value[:]
                found = _Kept(
                    place,
                    lambda: value.tobytes() == items.tobytes(),
                    lambda: value.__setitem__(slice(None), items),
                )
            case torch.Generator():
                drawn = value.get_state()
                found = _Kept(place, lambda: torch.equal(value.get_state(), drawn), lambda: value.set_state(drawn))
            case np.random.Generator():
                bits, numbers = value.bit_generator, repr(value.bit_generator.state)
                state = bits.state
                found = _Kept(place, lambda: repr(bits.state) == numbers, lambda: setattr(bits, "state", state))
            case np.random.RandomState():
                words, before = repr(value.get_state()), value.get_state()
                found = _Kept(place, lambda: repr(value.get_state()) == words, lambda: value.set_state(before))
            case random.Random():
                numbers_drawn = value.getstate()
                found = _Kept(place, lambda: value.getstate() == numbers_drawn, lambda: value.setstate(numbers_drawn))
            case nn.Module():
                self._attributes(value, f"{place.title}.")
                return
            case _:
                self._fields(place, value)
                return
        self._kept.append(found)

    def _fields(self, place: Variable, value: Any) -> None:
        """Keep the attributes of an object, unless Python itself or torch has defined it, and it is no record."""
        kind = type(value)
        if _top(kind.__module__) in _OWN_STATE and not isinstance(value, _RECORDS):
            return
        if hasattr(value, "__dict__"):
            self._contents(place, vars(value))
            self._all(place, vars(value).values())
        for name in (name for one in kind.__mro__ for name in vars(one).get("__slots__", ())):
            get, put = functools.partial(getattr, value, name, _MISSING), functools.partial(setattr, value, name)
            self._place(Variable(name, f"{place.title}.{name}", get, put))
        self._visit(place, kind)


def _in_dict(names: dict[str, Any], name: str, title: str) -> Variable:
    """An entry of a dictionary."""

    def write(value: Any) -> None:
        if value is _MISSING:
            names.pop(name, None)
        else:
            names[name] = value

    return Variable(name, title, functools.partial(names.get, name, _MISSING), write)


def _in_class(kind: type, name: str) -> Variable:
    """An attribute of a class."""

    def write(value: Any) -> None:
        if value is _MISSING:
            delattr(kind, name)
        else:
            setattr(kind, name, value)

    return Variable(name, f"{kind.__name__}.{name}", lambda: vars(kind).get(name, _MISSING), write)


def _in_cell(cell: types.CellType, name: str) -> Variable:
    """A variable of an enclosing function."""

    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # it has no value yet
            return _MISSING

    return Variable(name, f"variable {name}", read, functools.partial(setattr, cell, "cell_contents"))


def _names(code: types.CodeType) -> Iterator[str]:
    """Names of globals and attributes in the code of a function and of functions inside it, and texts that may be
    names, as in `globals()["calls"]`.
    """
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)
        elif isinstance(one, str) and one.isidentifier():
            yield one


def _is_iterator(value: object) -> bool:
    """Whether a value is an iterator that Python or torch has defined, and no file."""
    return (
        isinstance(value, Iterator) and not isinstance(value, io.IOBase) and _top(type(value).__module__) in _OWN_STATE
    )


def _items(held: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(held.items())


def _same(found: Any, kept: Any) -> bool:
    """Whether a value is the kept object, or equal to it if it is one that never changes. A Python module that is
    imported for the first time changes nothing.
    """
    if found is kept or (kept is _MISSING and isinstance(found, types.ModuleType)):
        return True
    if type(found) is not type(kept):
        return False
    if isinstance(kept, tuple):
        return len(found) == len(kept) and all(map(_same, found, kept))
    if isinstance(kept, frozenset):
        return bool(found == kept)
    return isinstance(kept, SCALARS) and bool(found == kept or (found != found and kept != kept))


def _equal(found: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether tensors have equal elements; true for tensors whose elements cannot be compared, such as those on the
    device `meta`, which have none.
    """
    if not _alike(found, kept):
        return False
    if found.is_meta or found.is_nested or found.layout != torch.strided:
        return True
    return torch.equal(found, kept) or bool(((found == kept) | (found != found) & (kept != kept)).all())


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors have the same shape and dtype."""
    return one.dtype == other.dtype and (one.is_nested or one.shape == other.shape)


def _top(module: str | None) -> str:
    """Name of the package that holds a module."""
    return (module or "").partition(".")[0]


@functools.cache
def _installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None)
    places = tuple(map(sysconfig.get_path, ("purelib", "platlib")))
    return package in _OWN_STATE or (file is not None and file.startswith(places))


def is_installed(module: str | None) -> bool:
    """Return whether a Python module belongs to Python, to flockstep, or to an installed package."""
    return _installed(_top(module))


class Hidden:
    """Placeholder for a value that code must not use while a module is traced: the code fails."""

    def __init__(self, why: str):
        self.why = why
        self.used = False

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self)


def _refuse(hidden: Hidden, *_: object, **__: object) -> NoReturn:
    hidden.used = True
    raise ConfigurationError(hidden.why)


_OPERATORS = {name for kind in (int, list, dict) for name in vars(kind) if name.startswith("__")} - {*vars(type)}
for _name in (_OPERATORS - {"__class_getitem__", "__getnewargs__"}) | {"__eq__", "__hash__", "__next__", "__call__"}:
    setattr(Hidden, _name, _refuse)


CHANGES = "forward reads {}, which a module inside changes in every call"


@contextmanager
def hidden(places: Iterable[Variable], why: str = CHANGES) -> Iterator[None]:
    """Return a context in which code that uses the values of these variables fails with the sentence `why`, in which
    the variable's title is put in place of `{}`.

    Raises:
        ConfigurationError: at the end, if code has used a value and has caught the error.
    """
    former = [
        (place, place.read(), Hidden(why.format(place.title)))
        for place in dict.fromkeys(places)
        if place.name not in OF_EVERY_MODULE
    ]
    for place, _, placeholder in former:
        place.write(placeholder)
    try:
        yield
    finally:
        for place, value, _ in reversed(former):
            place.write(value)
    for _, _, placeholder in former:
        if placeholder.used:
            _refuse(placeholder)
