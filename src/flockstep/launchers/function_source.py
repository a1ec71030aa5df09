"""The Python program that runs a function of a notebook, or of a script, in separate processes.

A notebook's functions are in `__main__`, which no other process can import. The program therefore contains the source
of those functions and classes that the function uses, and imports everything that modules define. Values are encoded as
data by `flockstep.drivers.state`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from flockstep.drivers.state import field_names, to_bytes
from flockstep.errors import ConfigurationError
from flockstep.launchers.function_values import held_values

_ANNOTATIONS = 0x1000000
"""Flag of a code object that was compiled under `from __future__ import annotations`."""
_AT_ONCE = ("listcomp", "setcomp", "dictcomp", "genexpr")
"""Names of scopes that are functions only inside Python."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class FunctionProgram:
    """A program that calls a user's function in another process."""

    text: str
    """Source of the program, which reads the values from its own folder."""
    values: bytes
    """The values that the function uses, and its arguments, encoded by `flockstep.drivers.state`."""


def program_of(function: Callable[..., Any], args: tuple[object, ...]) -> FunctionProgram:
    """Return the program that calls `function(*args)`.

    Raises:
        ConfigurationError: the function, an argument, or something that the function uses cannot be sent to another
            process.
    """
    name = _require_function(function)
    collected = _Collected(name)
    collected.add(name, function)
    given = [_encoded(one, f"args[{number}]", name) for number, one in enumerate(args)]
    collected.require_classes(args)
    return FunctionProgram(collected.text(), to_bytes({"names": collected.values, "args": given}))


def _require_function(function: object) -> str:
    """The name of a function that can be called by its name elsewhere."""
    if not isinstance(function, FunctionType):
        raise ConfigurationError(
            f"launch takes a function, got {type(function).__name__}; write one with def, and give its arguments as "
            "args=(…,)"
        )
    name, within = function.__name__, function.__qualname__
    if name == "<lambda>" or "." in within:
        raise ConfigurationError(
            f"launch takes a function that is defined at the top level of a notebook cell or module, got {within}, "
            "which is nested in a scope that other processes do not have; move the function to the top level, and pass "
            "the values that it uses as args=(…,)"
        )
    return name


def _encoded(value: object, name: str, function: str) -> bytes:
    """The value as bytes.

    Raises:
        ConfigurationError: the value cannot be sent to another process.
    """
    try:
        return to_bytes(value, name)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{function} uses {name}, which cannot be sent to another process ({error}); create it inside {function}"
        ) from None


@dataclass
class _Collected:
    """What a function uses, by name."""

    function: str
    found: dict[str, Any] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    sources: dict[str, str] = field(default_factory=dict)
    """Name of a function or class of `__main__` → its source."""
    values: dict[str, bytes] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    """Statements that set what definitions hold beside their source."""
    before: dict[str, set[str]] = field(default_factory=dict)
    """Name → names that must be defined before."""
    annotations: bool = False
    """Whether a source was compiled under `from __future__ import annotations`."""

    def add(self, name: str, value: object) -> None:
        """Add what `name` stands for, and all that it uses."""
        if name in self.found:
            return
        self.found[name] = value
        if isinstance(value, ModuleType):
            self.imports.add(_import_of(value.__name__, name, self.function))
        elif getattr(value, "__module__", None) == "__main__" and (isinstance(value, type) or _code_of(value)):
            self._add_source(name, value)
        elif (line := _imported(name, value)) is not None:
            self.imports.add(line)
        else:
            self._add_value(name, value)

    def _add_value(self, name: str, value: object) -> None:
        """Let a value travel, or import it from the module that has it under the same name."""
        try:
            self.values[name] = _encoded(value, name, self.function)
        except ConfigurationError:
            if (found := _home(name, value)) is None:
                raise
            self.imports.add(_import_line(*found, name))
        else:
            self.before[name] = self.require_classes(value)

    def require_classes(self, value: object) -> set[str]:
        """Add the classes of the objects in `value` that have fields; return the names of those of `__main__`."""
        main = set[str]()
        for kind in _data_classes(value, set()):
            if kind.__module__ == "__main__":
                main.add(kind.__name__)
                self.add(kind.__name__, kind)
            else:
                self.imports.add(f"import {kind.__module__}")
        return main

    def _add_source(self, name: str, value: Any) -> None:
        namespace = vars(sys.modules["__main__"])
        own = value.__name__
        if own != name:  # another name of a function or class
            self.before[name] = {own}
            self.sources[name] = f"{name} = {own}"
            self.add(own, value)
            return
        source = _source_of(value)
        self.sources[name] = source
        self.annotations |= any(code.co_flags & _ANNOTATIONS for code in _codes_of(value))
        at_once, later = _names_in(source)
        self.before[name] = (at_once - {name}) & namespace.keys()
        for module in _submodules(source, namespace):
            self.imports.add(f"import {module}")
        for used in sorted(at_once | later):
            if used in namespace and not _is_builtin(used, namespace[used]):
                self.add(used, namespace[used])
        for one in held_values(name, value, source, namespace):
            self.values[one.path] = _encoded(one.value, one.path, self.function)
            self.held.append(one.statement.format(value=f"_value({one.path!r})"))
            self.require_classes(one.value)

    def text(self) -> str:
        """The source of the program."""
        main = vars(sys.modules["__main__"])
        order = [*(name for name in main if name in self.found), *self.found]
        parts, done = list[str](), set[str]()

        def write(name: str) -> None:
            if name in done or name not in self.found:
                return
            done.add(name)
            for earlier in sorted(self.before.get(name, ())):
                write(earlier)
            if name in self.values:
                parts.append(f"{name} = _value({name!r})")
            elif name in self.sources:
                parts.append(self.sources[name])

        for name in order:
            write(name)
        return _TEXT.format(
            future="from __future__ import annotations\n\n" if self.annotations else "",
            name=self.function,
            path=sys.path,
            place="".join(f"{key} = {main[key]!r}\n" for key in ("__file__", "__package__") if main.get(key)),
            imports="\n".join(sorted(self.imports)),
            body="\n\n\n".join([*parts, "\n".join(self.held)]),
        )


_TEXT = '''\
"""The parts of the launching program that {name} needs; written by flockstep.launch."""

{future}import sys

from flockstep.launchers.function_entry import call as _call
from flockstep.launchers.function_entry import value as _value
from flockstep.launchers.function_values import set_default as _set_default

sys.path[:] = {path!r}
{place}
{imports}

{body}


if __name__ == "__main__":
    _call({name})
'''


def _is_builtin(name: str, value: object) -> bool:
    """Whether a name means what it means in every program."""
    return name.startswith("__") or getattr(builtins, name, _is_builtin) is value


def _import_of(module: str, name: str, function: str) -> str:
    """The line that imports a module under a name."""
    try:
        known = find_spec(module) is not None
    except (ImportError, ValueError):
        known = False
    if not known:
        raise ConfigurationError(
            f"{function} uses the module {module}, which other processes cannot import; write it into a file on "
            "Python's search path"
        )
    return f"import {module}" if module == name else f"import {module} as {name}"


def _imported(name: str, value: Any) -> str | None:
    """The line that imports a class or function from the module that defines it; None if there is none."""
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(value, (type, FunctionType, BuiltinFunctionType)) or module in (None, "__main__"):
        return None
    if vars(sys.modules.get(str(module), sys)).get(own) is not value:
        return None
    return _import_line(str(module), own, name)


def _home(name: str, value: object) -> tuple[str, str] | None:
    """The module that has a value, and the value's name there; None if no module other than the program has it."""
    main, found = vars(sys.modules["__main__"]), list[tuple[str, str]]()
    modules: list[object] = list(sys.modules.values())  # a program may put other objects there
    for module in modules:
        if isinstance(module, ModuleType) and vars(module) is not main:
            found += [(module.__name__, key) for key, one in list(vars(module).items()) if one is value]
    return min(found, key=lambda each: (each[1] != name, each[0].count("."), each), default=None)


def _import_line(module: str, own: str, name: str) -> str:
    """The line that imports the value that a module calls `own` as `name`."""
    return f"from {module} import {own}" if own == name else f"from {module} import {own} as {name}"


def _code_of(value: Any) -> CodeType | None:
    """The code of a function, also of one that a decorator has wrapped."""
    return getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None


def _codes_of(value: Any) -> list[CodeType]:
    """The code of a function, or of the methods that a class defines itself."""
    if not isinstance(value, type):
        code = _code_of(value)
        return [] if code is None else [code]
    found = list[CodeType]()
    for method in vars(value).values():
        if isinstance(method, property):
            parts: Iterable[Any] = (method.fget, method.fset)
        elif isinstance(method, functools.cached_property):
            parts = (method.func,)
        else:
            parts = (getattr(method, "__func__", method),)
        codes = [_code_of(part) for part in parts if part is not None]
        within = f"{value.__qualname__}."
        found += [code for code in codes if code is not None and code.co_qualname.startswith(within)]
    return [code for code in found if not code.co_filename.startswith("<string")]


def _source_of(value: Any) -> str:
    """The source of a function or class of `__main__`, from which the same code is compiled.

    Raises:
        ConfigurationError: the source is not known, or was changed since.
    """
    name, codes = value.__qualname__, _codes_of(value)
    if "." not in name:
        files = {code.co_filename for code in codes} or _files_of_main()
        fitting = {text for file in files for text in _definitions(file, name, codes)}
        if len(fitting) == 1:
            return fitting.pop()
    raise ConfigurationError(
        f"the source of {name} is not known, or was changed since {name} was defined; run its cell or its program "
        "again, or define it in a Python file and import it"
    )


def _files_of_main() -> set[str]:
    """Files that may define a class without methods: the program, or the cells of a notebook."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    return {name for name, entry in linecache.cache.items() if len(entry) > 1} if main is None else {main}


def _definitions(file: str, name: str, codes: Sequence[CodeType]) -> Iterator[str]:
    """The source of each definition of `name` in a file or cell from which `codes` are compiled, with decorators."""
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | (codes[0].co_flags & _ANNOTATIONS if codes else 0)
    try:
        tree = ast.parse("".join(lines))
        # IPython compiles each statement of a cell by itself, which gives other instructions for imported names.
        wholes = [tree, *(ast.Module([one], []) for one in tree.body)]
        compiled = [code for one in wholes for code in _within(compile(one, file, "exec", flags, dont_inherit=True))]
    except (SyntaxError, ValueError):
        return
    if not all(any(_alike(one, code) for one in compiled) for code in codes):
        return
    for node in ast.walk(tree):
        if isinstance(node, Definition) and node.name == name:
            first, last = min([node.lineno, *(one.lineno for one in node.decorator_list)]), node.end_lineno or 0
            text = textwrap.dedent("".join(lines[first - 1 : last])).rstrip()
            if all(first <= code.co_firstlineno <= last for code in codes) and _says(text, node):
                yield text


def _says(text: str, node: ast.AST) -> bool:
    """Whether `text`, whose indentation was removed, is the source of `node` alone."""
    try:
        return [ast.dump(one) for one in ast.parse(text).body] == [ast.dump(node)]
    except SyntaxError:
        return False


def _within(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _within(one)


def _alike(one: object, other: object) -> bool:
    """Whether two code objects do the same, at the same line."""
    if not (isinstance(one, CodeType) and isinstance(other, CodeType)):
        return type(one) is type(other) and (repr(one) == repr(other) or (isinstance(one, frozenset) and one == other))
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_name", "co_firstlineno")
    same = all(getattr(one, name) == getattr(other, name) for name in names)
    pairs = zip(one.co_consts, other.co_consts, strict=False)
    return same and len(one.co_consts) == len(other.co_consts) and all(_alike(a, b) for a, b in pairs)


def _names_in(source: str) -> tuple[set[str], set[str]]:
    """The global names that a definition reads at once, and those that its functions read when they are called."""
    at_once, later = set[str](), set[str]()

    def visit(table: symtable.SymbolTable, called: bool) -> None:
        called = called or (table.get_type() == "function" and table.get_name() not in _AT_ONCE)
        for symbol in table.get_symbols():
            outermost = table.get_type() == "module"
            if symbol.is_referenced() and (outermost or symbol.is_global()):
                (later if called else at_once).add(symbol.get_name())
        for inner in table.get_children():
            visit(inner, called)

    visit(symtable.symtable(source, "<source>", "exec"), called=False)
    return at_once, later


def _submodules(source: str, namespace: dict[str, Any]) -> Iterator[str]:
    """Modules that a source names as attributes of others: `concurrent.futures` after `import concurrent.futures`."""
    for node in ast.walk(ast.parse(source)):
        path, base = list[str](), node
        while isinstance(base, ast.Attribute):
            path.insert(0, base.attr)
            base = base.value
        found = namespace.get(base.id) if isinstance(base, ast.Name) else None
        for part in path:
            found = getattr(found, part, None) if isinstance(found, ModuleType) else None
            if isinstance(found, ModuleType) and found is sys.modules.get(found.__name__):
                yield found.__name__


def _data_classes(value: Any, seen: set[int]) -> Iterator[type]:
    """The classes of the objects in a value that are built of named fields."""
    if id(value) in seen:
        return
    seen.add(id(value))
    kind = type(value)
    if isinstance(value, dict):
        inside: Iterable[Any] = [*value, *value.values()]
    elif kind in (list, tuple, set, frozenset):
        inside = value
    elif names := field_names(kind):
        yield kind
        inside = [getattr(value, name, None) for name in names]
    else:
        return
    for one in inside:
        yield from _data_classes(one, seen)
