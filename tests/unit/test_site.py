"""The site of the documentation: its navigation, and the pages that are made from the registry and the docstrings."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

import flockstep
from flockstep import registry
from flockstep.cli import listing
from flockstep.cli.app import app
from flockstep.cli.commands import commands_of
from support.site import DOCS, program

SETTINGS = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text("utf-8"))


def leaves(nav: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in leaves(entry)]


def heading(page: str, title: str) -> bool:
    return f"\n## {title}\n" in page or f"\n### {title}\n" in page


def test_the_navigation_has_every_page_once() -> None:
    hooks = program("hooks")
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | set(hooks.added())
    found = leaves(hooks.completed(yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text("utf-8"))["nav"]))
    assert sorted(found) == sorted(there)


def test_the_reference_has_every_component() -> None:
    pages = program("hooks").added()
    missing = [
        f"{noun}: {name}"
        for noun in registry.nouns()
        if noun != "claim"
        for name in registry.names(noun)
        if not heading(pages[f"reference/{listing.plural(noun)}.md"], name)
    ]
    assert missing == []


def test_the_reference_has_the_arguments_and_the_docstring_of_a_component() -> None:
    page = program("hooks").added()["reference/codecs.md"]
    section = page.partition("\n## topk\n")[2].partition("\n## ")[0]
    known = listing.described("codec", "topk")
    assert known["write"] in section
    assert known["about"].splitlines()[0].split()[0] in section
    for argument in known["arguments"]:
        assert f"| `{argument['name']}`{{.whole}} | `{argument['type']}` | `{argument['default']}` |" in section


def test_the_reference_has_every_option_of_every_command() -> None:
    page = program("hooks").added()["reference/command-line.md"]
    sections = {part.partition("\n")[0]: part for part in page.split("\n## flockstep ")[1:]}
    commands = dict(commands_of(app))
    assert list(sections) == list(commands)
    missing = [
        f"{name}: {option}"
        for name, command in commands.items()
        for parameter in command.params
        if parameter.param_type_name == "option"
        for option in parameter.opts
        if f"`{option}`" not in sections[name]
    ]
    assert missing == []


def test_the_reference_has_everything_that_flockstep_exports() -> None:
    pages = program("hooks").added()
    exported = [name for name in flockstep.__all__ if not name.startswith("__")]
    missing = [
        n for n in exported if heading(pages["reference/python.md"], n) == heading(pages["reference/classes.md"], n)
    ]
    assert missing == [], "each is on one of the two pages"
    assert heading(pages["reference/classes.md"], "DistributedOptimizer.finish")
    assert heading(pages["reference/testing.md"], "check_codec")


def test_docstrings_become_markdown() -> None:
    docstring = """Return w_i * n <= `a_*b`, see [1].

    A drawing:

        a -> b

    Args:
        x: shape (n,), or
            none.
        y, z: rest.

    Returns:
        The sum.

    Raises:
        ConfigurationError: x < 0.
    """
    expected = """Return w\\_i \\* n &lt;= `a_*b`, see \\[1\\].

A drawing:

```text
a -> b
```

**Arguments**

- `x`: shape (n,), or none.
- `y, z`: rest.

**Returns**: The sum.

**Raises**

- `ConfigurationError`: x &lt; 0."""
    assert (
        program("reference").markdown("\n".join(line.removeprefix("    ") for line in docstring.splitlines()))
        == expected
    )


def test_signatures_stay_as_written() -> None:
    def short(x: int, *, y: str = "a") -> None: ...
    def long(
        self: object, first: dict[str, list[int]], second: dict[str, list[int]] | None = None, *, third: str
    ) -> int: ...

    signature = program("reference").signature
    assert signature("short", short) == "```python\nshort(x: int, *, y: str = 'a') -> None\n```"
    body = (
        "    first: dict[str, list[int]],\n    second: dict[str, list[int]] | None = None,\n    *,\n    third: str,\n"
    )
    assert signature("long", long, leave_out=("self",)) == f"```python\nlong(\n{body}) -> int\n```"


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("README.md", "index.md"),
        ("CHANGELOG.md", "changes.md"),
        ("docs/how-to/loops.md", "how-to/loops.md"),
        ("docs/generate.py", "source/docs/generate.py.txt"),
        ("tests/conftest.py", "source/tests/conftest.py.txt"),
    ],
)
def test_links_that_leave_the_docs_have_a_place_in_the_site(path: str, place: str) -> None:
    assert program("hooks").site_path(DOCS.parent / path) == place


def test_the_site_asks_no_network() -> None:
    fetched = program("hooks").fetched
    assert fetched('<script src="https://cdn.example/x.js"></script>') == ['<script src="https://cdn.example/x.js']
    assert len(fetched('<link rel=stylesheet href="https://fonts.example/a.css"><img src=http://a.example/b.png>')) == 2
    assert fetched('<a href="https://example.org">there</a><script src="assets/x.js"></script>') == []
    assert SETTINGS["theme"]["font"] is False
    for polyfill in SETTINGS["extra"]["polyfills"]:
        assert (DOCS / polyfill).is_file()
