"""Finds the calls in a strategy's program that lack `await`, and the calls that are awaited although they do not
wait.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from flockstep.errors import ConfigurationError, in_short
from flockstep.nodes import Node, Server, Worker
from flockstep.strategies.base import Strategy

_WAITS = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE
_SIGNS = ("generator", "coroutine", "'await' expression")
"""Words in the message of an exception that a call without `await`, or a needless `await`, causes."""


def check_awaits(strategy: Strategy) -> None:
    """Check that no program of a strategy contains a call that lacks `await` and whose result is dropped; such a call
    does nothing.

    Raises:
        ConfigurationError: a program contains such a call.
    """
    for name, member in inspect.getmembers(type(strategy), inspect.isfunction):
        program = inspect.unwrap(member)
        if not _flags(program) & (_WAITS | inspect.CO_ASYNC_GENERATOR):
            continue
        code, me = program.__code__, Server if name == "master" else Worker
        local = {*code.co_varnames, *code.co_cellvars}
        names = {one: value for one, value in program.__globals__.items() if one not in local}
        names |= dict(zip(code.co_varnames, (strategy, me), strict=False))
        tree, first = _source(code)
        for statement in ast.walk(tree):
            if isinstance(statement, ast.Expr) and (problem := _lacks_await(statement.value, names)):
                raise ConfigurationError(_sentence(problem, code, first + statement.lineno - 1))


def explained(error: Exception) -> ConfigurationError | None:
    """Return the error that names the missing or needless `await` that caused an exception in a strategy's program;
    None if the exception has another cause.
    """
    if not any(sign in str(error) for sign in _SIGNS):
        return None
    trace, found = error.__traceback__, None
    while trace is not None:
        frame = trace.tb_frame
        if isinstance(frame.f_locals.get(next(iter(frame.f_code.co_varnames), "")), Strategy):
            found = _problem(frame.f_code, {**frame.f_globals, **frame.f_locals}, trace.tb_lineno, error) or found
        trace = trace.tb_next
    return None if found is None else ConfigurationError(found)


def _problem(code: CodeType, names: Mapping[str, Any], line: int, error: Exception) -> str | None:
    """The sentence about the last wrong call of a function up to the line that raised the exception; if the source of
    the function is not known, the sentence says what to look for.
    """
    tree, first = _source(code)
    if not any(ast.iter_child_nodes(tree)):
        return _sentence(
            f"{in_short(error)}; look up to this line for a call without await, or a needless await; flockstep names "
            "the call if the class is defined in a file",
            code,
            line,
        )
    awaited = [one for node in ast.walk(tree) for one in _awaited(node, names)]
    kept = {one.id for one in awaited if isinstance(one, ast.Name)}
    right = {id(one) for one in awaited} | {id(one) for node in ast.walk(tree) for one in _kept_as(node, kept)}
    found = [
        (node.lineno, problem)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call | ast.Await)
        and id(node) not in right
        and node.lineno + first - 1 <= line
        and (problem := _lacks_await(node, names) or _wrongly_awaited(node, names))
    ]
    if not found:
        return None
    at, problem = max(found)
    return _sentence(problem, code, at + first - 1)


def _awaited(node: ast.AST, names: Mapping[str, Any]) -> Iterator[ast.AST]:
    """The parts of a syntax node whose values are awaited, or passed on to be awaited."""
    match node:
        case ast.Await(value=value) | ast.AsyncFor(iter=value) | ast.comprehension(is_async=1, iter=value):
            yield value
        case ast.Call(func=function, args=arguments) if _is(function, Node.background, names):
            yield from arguments


def _kept_as(node: ast.AST, names: Collection[str]) -> Iterator[ast.AST]:
    """The value that a syntax node assigns to one of `names`."""
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
        ) if name in names:
            yield value


def _lacks_await(node: ast.AST, names: Mapping[str, Any]) -> str | None:
    """What a call lacks whose value would have to be awaited; None if it lacks nothing."""
    if not isinstance(node, ast.Call):
        return None
    function, called = _resolved(node.func, names), ast.unparse(node.func)
    if _flags(function) & inspect.CO_ASYNC_GENERATOR:
        return f"{called}() must be iterated with async for; write async for … in {called}(…)"
    awaitable = str(getattr(function, "__annotations__", {}).get("return", "")).startswith("Awaitable")
    wrong = awaitable or _flags(function) & _WAITS
    return f"{called}() must be awaited; write await {called}(…)" if wrong else None


def _wrongly_awaited(node: ast.AST, names: Mapping[str, Any]) -> str | None:
    """What is wrong with an `await` of a node's method that does not wait, or must be iterated; None if nothing is."""
    if not isinstance(node, ast.Await) or not isinstance(node.value, ast.Call):
        return None
    function, called = _resolved(node.value.func, names), ast.unparse(node.value.func)
    lacks = _lacks_await(node.value, names)
    if lacks is not None:
        return lacks if _flags(function) & inspect.CO_ASYNC_GENERATOR else None
    if not isinstance(getattr(function, "__self__", None), Node):
        return None
    return f"{called}() does not wait and must not be awaited; remove the await before {called}(…)"


def _flags(function: Any) -> int:
    return int(getattr(getattr(function, "__code__", None), "co_flags", 0))


def _is(expression: ast.expr, method: object, names: Mapping[str, Any]) -> bool:
    function = _resolved(expression, names)
    return getattr(function, "__func__", function) is method


def _resolved(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a name, or of attributes of a name; None if the value is not known."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id)
    if isinstance(expression, ast.Attribute):
        return getattr(_resolved(expression.value, names), expression.attr, None)
    return None


def _source(code: CodeType) -> tuple[ast.AST, int]:
    """The syntax tree of a function and its first line; an empty tree if the source is not known."""
    try:
        lines, first = inspect.getsourcelines(code)
        inside = lines[0][0].isspace()  # of a class; a comment or a text may begin further left
        return ast.parse("".join(["if True:\n" * inside, *lines])), first - inside
    except (OSError, SyntaxError, TypeError):
        return ast.Module([], []), 1


def _sentence(problem: str, code: CodeType, line: int) -> str:
    return f"{code.co_qualname} ({Path(code.co_filename).name}, line {line}): {problem}"
