"""Finds the line numbers of the keys in a TOML document that `tomllib` can parse."""

from __future__ import annotations

import re
import tomllib
from typing import Any

KeyPath = tuple[str | int, ...]

_KEY = r"""(?:"(?:\\.|[^"\\\n])*"|'[^'\n]*'|[A-Za-z0-9_-]+)"""
_KEYS = re.compile(rf"[ \t]*({_KEY}(?:[ \t]*\.[ \t]*{_KEY})*)[ \t]*")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r"""
      \"{3} (?: \\. | [^\\] )*? \"{3,5}
    | '{3} .*? '{3,5}
    | " (?: \\. | [^"\\\n] )* "
    | ' [^'\n]* '
    """,
    re.DOTALL | re.VERBOSE,
)


class Lines:
    """The line numbers of the keys of a TOML document: path of a key, such as ("links", 0, "between") → line number,
    from 1.
    """

    def __init__(self, text: str):
        self._text = text
        self._found: dict[KeyPath, int] = {(): 1}
        self._counts: dict[KeyPath, int] = {}
        self._scan()

    def of(self, path: KeyPath) -> int:
        """Return the line number of the key at `path`, or of the innermost table that contains `path` if the document
        does not have the key.
        """
        while path not in self._found:
            path = path[:-1]
        return self._found[path]

    def _scan(self) -> None:
        table: KeyPath = ()
        at = _skip(self._text, 0)
        while at < len(self._text):
            if self._text[at] == "[":
                table, at = self._header(at)
            else:
                at = self._entry(table, at)
            at = _skip(self._text, at)

    def _header(self, at: int) -> tuple[KeyPath, int]:
        """Parse a [table] or [[array]] header at position `at`; return its path and the position after it."""
        many = self._text.startswith("[[", at)
        found = _KEYS.match(self._text, at + 1 + many)
        assert found is not None
        path = self._placed(_parts(found[1]), of_array=many, at=at)
        return path, found.end() + 1 + many

    def _entry(self, table: KeyPath, at: int) -> int:
        """Parse a key and its value at position `at` of `table`; return the position after them."""
        found = _KEYS.match(self._text, at)
        assert found is not None
        path = table
        for part in _parts(found[1]):
            path = (*path, part)
            self._note(path, at)
        return self._value(path, _skip(self._text, found.end() + 1))

    def _value(self, path: KeyPath, at: int) -> int:
        """Parse a value at position `at`, recording keys of inline tables and indices of arrays.

        Return the position after it.
        """
        if self._text[at] not in "[{":
            found = _STRING.match(self._text, at)
            return found.end() if found else at + len(re.match(r"[^,\]}#\n]*", self._text[at:])[0])  # type: ignore[index]
        inline, number = self._text[at] == "{", 0
        at = _skip(self._text, at + 1)
        while self._text[at] not in "]}":
            if inline:
                at = self._entry(path, at)
            else:
                self._note((*path, number), at)
                at = self._value((*path, number), at)
                number += 1
            at = _skip(self._text, at)
            if self._text[at] == ",":
                at = _skip(self._text, at + 1)
        return at + 1

    def _placed(self, parts: list[str], of_array: bool, at: int) -> KeyPath:
        """The path of a header's table; for an array of tables on the way, the path of its last element."""
        path: KeyPath = ()
        for depth, part in enumerate(parts):
            path = (*path, part)
            self._note(path, at)
            if of_array and depth == len(parts) - 1:
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
                self._note(path, at)
        if path not in self._counts:
            self._found[path] = self._line(at)  # a table's own header is more precise than that of a table inside it
        return path

    def _note(self, path: KeyPath, at: int) -> None:
        self._found.setdefault(path, self._line(at))

    def _line(self, at: int) -> int:
        return self._text.count("\n", 0, at) + 1


def _skip(text: str, at: int) -> int:
    """The position after white space and comments."""
    found = _BLANK.match(text, at)
    assert found is not None
    return found.end()


def _parts(keys: str) -> list[str]:
    """The parts of a dotted key."""
    data: Any = tomllib.loads(f"{keys} = 0")
    parts = []
    while isinstance(data, dict):
        ((part, data),) = data.items()
        parts.append(part)
    return parts
