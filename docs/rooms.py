"""Draws the rooms of the code, the folders of src/flockstep, with an arrow from each to those that it imports
(docs/images/rooms.svg). An import that others imply, because an imported room imports it too, has no arrow.

python docs/rooms.py               rewrite the picture
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from html import escape
from itertools import pairwise
from pathlib import Path

PICTURE = Path(__file__).parent / "images" / "rooms.svg"
SOURCE = Path(__file__).parents[1] / "src" / "flockstep"
WIDE, HIGH, GAP, BETWEEN, LEVEL = 98, 26, 12, 8, 62
"""Pixels: a room's width and height, the width of a gap for an arrow, the least space between, and a level's height."""
INK, EDGE = "#76797d", "#2f7ed8"
"""Colors with a contrast of at least 4 to 1 on white and on black."""
Rooms = Mapping[str, frozenset[str]]


def rooms() -> Rooms:
    """Room → the rooms that its modules import, wherever in the file."""
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    found: dict[str, set[str]] = {room: set() for room in folders}
    for room in folders:
        for path in (SOURCE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                parts = [name.split(".") for name in names if name.startswith("flockstep.")]
                found[room] |= {part[1] for part in parts if part[1] in folders - {room}}
    return {room: frozenset(imported) for room, imported in found.items()}


def levels(found: Rooms) -> dict[str, int]:
    """Room → length of the longest chain of imports below it; the layers allow no cycle."""
    height: dict[str, int] = {}

    def level(room: str) -> int:
        if room not in height:
            height[room] = 1 + max(map(level, found[room]), default=-1)
        return height[room]

    for room in sorted(found):
        level(room)
    return height


def arrows(found: Rooms) -> Iterator[tuple[str, str]]:
    """The imports that no other import implies, from the room that imports."""
    below: dict[str, frozenset[str]] = {}
    for room, _ in sorted(levels(found).items(), key=lambda one: one[1]):
        below[room] = found[room].union(*(below[one] for one in found[room]))
    for room, imported in sorted(found.items()):
        yield from ((room, one) for one in sorted(imported) if not any(one in below[other] for other in imported))


def chains(found: Rooms) -> list[list[str]]:
    """The points of each arrow: its two rooms, and a gap between rooms in each level on the way."""
    height = levels(found)
    return [
        [room, *(f"{room}/{one}/{level}" for level in range(height[room] - 1, height[one], -1)), one]
        for room, one in arrows(found)
    ]


def places(found: Rooms) -> dict[str, tuple[float, float]]:
    """Middle of the top of each room and each gap: the highest level on top, each point near those that lead to it."""
    height, before = levels(found), defaultdict[str, list[str]](list)
    by_level: dict[int, list[str]] = defaultdict(list)
    for room in sorted(found):
        by_level[height[room]].append(room)
    for chain in chains(found):
        for one, other in pairwise(chain):
            before[other].append(one)
            if other not in height:
                by_level[height[chain[0]] - chain.index(other)].append(other)
    wide = {one: WIDE if one in height else GAP for level in by_level.values() for one in level}
    widest = max(sum(wide[one] + BETWEEN for one in level) for level in by_level.values())
    at: dict[str, tuple[float, float]] = {}
    for row, level in enumerate(sorted(by_level, reverse=True)):
        here = by_level[level]
        here.sort(
            key=lambda one: sum(at[up][0] for up in before[one]) / len(before[one]) if before[one] else widest / 2
        )
        space = (widest - sum(wide[one] for one in here)) / len(here)
        x = space / 2
        for one in here:
            at[one] = (x + wide[one] / 2, 4 + row * LEVEL)
            x += wide[one] + space
    return at


def picture() -> str:
    """Draw the rooms as they are now."""
    found = rooms()
    at = places(found)
    width, high = max(x for x, _ in at.values()) + WIDE, max(y for _, y in at.values()) + HIGH + 8
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {high}" font-family="sans-serif" '
            f'font-size="12" fill="{INK}" role="img">'
        ),
        "<title>The folders of src/flockstep; an arrow leads from a folder to one that it imports</title>",
        (
            '<defs><marker id="end" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
            f'<path fill="{INK}" d="M0 0L6 3L0 6z"/></marker></defs>'
        ),
    ]
    for chain in chains(found):
        (x, y), *others = (at[one] for one in chain)
        path = f"M{x:.0f} {y + HIGH:.0f}"
        y += HIGH
        for end, below in others:
            path += f"C{x:.0f} {(y + below) / 2:.0f} {end:.0f} {(y + below) / 2:.0f} {end:.0f} {below:.0f}"
            if end != others[-1][0] or below != others[-1][1]:
                path += f"v{HIGH}"
            x, y = end, below + HIGH
        lines.append(f'<path fill="none" stroke="{INK}" stroke-opacity=".6" marker-end="url(#end)" d="{path}"/>')
    for room in sorted(found):
        x, y = at[room]
        says = (ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text("utf-8"))) or "").split("\n\n")[0]
        lines.append(f"<g><title>{escape(' '.join(says.split()))}</title>")
        lines.append(
            f'<rect x="{x - WIDE / 2:.0f}" y="{y}" width="{WIDE}" height="{HIGH}" rx="4" fill="none" stroke="{EDGE}"/>'
        )
        lines.append(f'<text x="{x:.0f}" y="{y + 17}" text-anchor="middle">{room}</text></g>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
