"""What the site has beyond the files of docs/: the generated reference, and the files that pages link to elsewhere.

mkdocs calls the functions whose names begin with `on_` (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
import reference

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FROM_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Pages of the repository's root → their places in the site."""
PLACES = {"README.md": "index.md", **FROM_ROOT}
SOURCES = "source"
"""Folder of the site for programs that pages link to, as plain text."""
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="?https?:[^\s">]*|<link\b[^>]*\bhref="?https?:[^\s">]*"""
)
"""What a browser fetches by itself from elsewhere."""
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Complete the navigation."""
    config.nav = completed(config.nav)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are not files in docs/."""
    from mkdocs.structure.files import File

    for path, text in added().items():
        files.append(File.generated(config, path, content=text))


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave docs/ lead to a page of the site, or to the file's text in the site."""
    from mkdocs.structure.files import File

    origins = dict.fromkeys(FROM_ROOT.values(), ROOT)
    here = page.file.src_uri
    origin = origins.get(here, (DOCS / here).parent)

    def relinked(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(origin / found[1]))
        if not target.is_file() or not target.is_relative_to(ROOT):
            return found[0]
        place = site_path(target)
        if place.startswith(f"{SOURCES}/") and files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, content=target.read_text("utf-8")))
        return f"]({os.path.relpath(place, Path(here).parent)}{found[2] or ''})"

    return _LINK.sub(relinked, text)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site whose pages fetch anything from a network.

    Raises:
        PluginError: a page would.
    """
    from mkdocs.exceptions import PluginError

    for path in sorted(Path(config.site_dir).rglob("*.html")):
        found = fetched(path.read_text("utf-8"))
        if found:
            raise PluginError(f"{path.name} fetches from a network, got {found[0]}; put the file into docs/assets")


def fetched(page: str) -> list[str]:
    """The tags of an HTML page that fetch from a network."""
    return [tag for tag in _FETCHED.findall(page) if 'rel="canonical"' not in tag]


def site_path(target: Path) -> str:
    """The place in the site of a file of the repository."""
    if target.is_relative_to(DOCS) and target.suffix != ".py":
        return str(target.relative_to(DOCS))
    inside = str(target.relative_to(ROOT))
    return PLACES.get(inside, f"{SOURCES}/{inside}.txt")


@cache
def _reference() -> tuple[reference.Page, ...]:
    return tuple(reference.pages())


def added() -> dict[str, str]:
    """Path in the site → text, of each page that is not a file in docs/."""
    pages = {page.path: page.text for page in _reference()}
    return pages | {place: (ROOT / name).read_text("utf-8") for name, place in FROM_ROOT.items()}


def completed(nav: list[Any]) -> list[Any]:
    """The navigation of mkdocs.yml with the generated pages under Reference, and all decisions under Explanations."""
    sections = {title: entries for entry in nav for title, entries in entry.items() if isinstance(entries, list)}
    pages = sections["Reference"]
    pages[-1:-1] = [{page.title: page.path} for page in _reference() if not page.component]
    (components,) = pages[-1].values()
    components[:0] = [{page.title: page.path} for page in _reference() if page.component]
    decisions = sorted(str(path.relative_to(DOCS)) for path in DOCS.glob("decisions/[0-9]*.md"))
    sections["Explanations"].append({"Decisions": ["decisions/README.md", *decisions]})
    return nav
