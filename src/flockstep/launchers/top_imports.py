"""Finds, in a script's text, the imports with which the script begins."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

FORKABLE = frozenset({"flockstep", "numpy", "scipy", "sklearn", "torch"})
"""Packages that a process can import before it forks: their import starts no thread and opens nothing that a fork would
share.
"""
HEAVY = "torch"
"""Package whose import takes so long that it is worth starting a preload process."""


def top_imports(script: Path, path: Sequence[str] = ()) -> list[str]:
    """Return the imports of `FORKABLE` packages with which a script begins.

    Modules of the standard library are skipped. The list ends at the first other statement, or the first import of any
    other module, such as a module in the script's own folder, because what follows may depend on it.

    Args:
        script: path of a Python file.
        path: folders that Python searches before the standard library, besides the script's own.

    Returns:
        For each import the module, and after it the names that are imported from it, separated by spaces; empty if the
        script is not worth a preload or cannot be parsed.
    """
    try:
        statements = ast.parse(script.read_bytes()).body
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return []
    found, folder = list[str](), str(script.resolve().parent)
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        imports = _of(statement)
        for words in imports:
            name = words.split()[0].partition(".")[0]
            if PathFinder.find_spec(name, [folder, *(path if name not in FORKABLE else ())]) is not None:
                return _worth(found)
            if name in FORKABLE:
                found.append(words)
            elif name not in sys.stdlib_module_names:
                return _worth(found)
        if not imports:
            break
    return _worth(found)


def _of(statement: ast.stmt) -> list[str]:
    """The imports of a statement; empty if it is anything else, or a relative import."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        return [" ".join([statement.module, *(alias.name for alias in statement.names)])]
    return []


def _worth(imports: list[str]) -> list[str]:
    return imports if any(words.split()[0].partition(".")[0] == HEAVY for words in imports) else []
