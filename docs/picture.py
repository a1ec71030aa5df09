"""Draws the README's pictures: what workers do under four strategies, from recorded runs (docs/images/timelines.svg),
and the time to accuracy over slow links, from benchmarks/slow_links.json (docs/images/slow_links.svg).

python docs/picture.py             simulate the runs and rewrite the pictures
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import flockstep
from flockstep.records.events import SpanEvent, StepEvent

PICTURE = Path(__file__).parent / "images" / "timelines.svg"
SLOW_PICTURE = PICTURE.with_name("slow_links.svg")
SLOW_ROWS = Path(__file__).parents[1] / "benchmarks" / "slow_links.json"
SIDES = {"flockstep": "#2f7ed8", "ddp": "#9aa0a6"}
DECADES = (-1, 3)
"""Powers of ten in seconds at both ends of the time axis of the picture of slow links, which is logarithmic."""
STRATEGIES = {
    "all_reduce": "every step waits for the slowest worker",
    "local_sgd(period=3)": "every third step waits",
    "ps(consistency=ssp(2))": "no worker may be more than 2 steps ahead",
    "gossip": "no worker waits",
}
NAMES = ("worker 0", "worker 1", "worker 2", "slow worker 3")
"""The last worker takes twice as long for each gradient."""
SECONDS = 0.16
"""The part of each run that is drawn; a record holds what a worker does during its first eight steps only."""
COLORS = {"compute": "#2f7ed8", "comm": "#e08a1e", "wait": "#9aa0a6"}
LABELS = {"compute": "computing a gradient", "comm": "communicating", "wait": "waiting"}
TEXT = "#76797d"
"""A gray with a contrast of at least 4 to 1 on white and on black."""
LEFT, WIDE, ROW, BAR, GAP = 80, 636, 13, 10, 30
"""Pixels: the column of names, the time axis, one worker's row, its bar, and the space above each strategy's rows."""


def picture() -> str:
    """Simulate every strategy, and draw its workers' first 0.16 s below each other."""
    panels = [panel for place, strategy in enumerate(STRATEGIES) for panel in _panel(strategy, place)]
    height = len(STRATEGIES) * (GAP + len(NAMES) * ROW)
    box = f'viewBox="0 0 {LEFT + WIDE + 20} {height + 50}" font-family="sans-serif" font-size="12" fill="{TEXT}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
        "<title>What four workers do under four strategies, worker 3 being half as fast as the others</title>",
        *panels,
        *_axis(height),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _panel(strategy: str, place: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        run = flockstep.simulate(
            "digits",
            strategy,
            workers=len(NAMES),
            network="link('400mbit', 0.0005)",
            compute=f"speeds(lognormal(0.025, 0.2), {(1,) * (len(NAMES) - 1) + (2,)})",
            steps=10,
            seed=1,
            out=Path(folder) / "run",
        )
        events = run.events()
    top = place * (GAP + len(NAMES) * ROW)
    used = sum(isinstance(event, StepEvent) and event.seconds <= SECONDS for event in events)
    yield f'<text x="{LEFT}" y="{top + 18}"><tspan font-weight="bold">{escape(strategy)}</tspan>'
    yield f"<tspan>: {STRATEGIES[strategy]}</tspan></text>"
    yield f'<text x="{LEFT + WIDE}" y="{top + 18}" text-anchor="end">{used} gradients used</text>'
    for rank in range(len(NAMES)):
        y = top + GAP - 4 + rank * ROW
        yield f'<text x="{LEFT - 8}" y="{y + BAR - 1}" font-size="10" text-anchor="end">{NAMES[rank]}</text>'
        spans = [event for event in events if isinstance(event, SpanEvent) and event.node == rank]
        yield from (_bars(spans, kind, y) for kind in COLORS)


def _bars(spans: list[SpanEvent], kind: str, y: int) -> str:
    """One path with a bar for each span of one kind; gradients are a pixel apart, so that they can be counted."""
    bars = []
    for span in spans:
        left, right = _x(span.start), _x(min(span.end, SECONDS)) - (kind == "compute")
        if span.kind == kind and right - left > 0.2:
            bars.append(f"M{left:.1f} {y}h{right - left:.1f}v{BAR}h{left - right:.1f}z")
    return f'<path fill="{COLORS[kind]}" d="{"".join(bars)}"/>'


def _x(seconds: float) -> float:
    return LEFT + WIDE * min(seconds, SECONDS) / SECONDS


def _axis(top: int) -> Iterator[str]:
    y = top + 8
    yield f'<path stroke="{TEXT}" d="M{LEFT} {y}h{WIDE}"/>'
    for tick in range(math.floor(SECONDS / 0.04) + 1):
        x = _x(0.04 * tick)
        yield f'<path stroke="{TEXT}" d="M{x:.0f} {y}v4"/>'
        yield f'<text x="{x:.0f}" y="{y + 16}" font-size="10" text-anchor="middle">{40 * tick} ms</text>'
    x = LEFT
    for kind, color in COLORS.items():
        yield f'<rect x="{x}" y="{y + 26}" width="{BAR}" height="{BAR}" fill="{color}"/>'
        yield f'<text x="{x + BAR + 6}" y="{y + 35}">{LABELS[kind]}</text>'
        x += 60 + 6 * len(LABELS[kind])


def slow_picture() -> str:
    """Draw a pair of bars, flockstep's and DDP's seconds to the target, for each job and link that was measured."""
    rows = json.loads(SLOW_ROWS.read_text("utf-8"))
    pitch = 2 * ROW + GAP
    height = len(rows) * pitch + 40
    box = f'viewBox="0 0 {LEFT + WIDE + 20} {height}" font-family="sans-serif" font-size="12" fill="{TEXT}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
        "<title>Seconds to the target over slow links: the advised strategy, and DistributedDataParallel</title>",
        *(line for place, row in enumerate(rows) for line in _pair(row, place * pitch)),
    ]
    for power in range(DECADES[0], DECADES[1] + 1):
        x = _log_x(10**power)
        lines.append(f'<path stroke="{TEXT}" d="M{x:.0f} {height - 32}v4"/>')
        lines.append(f'<text x="{x:.0f}" y="{height - 14}" font-size="10" text-anchor="middle">{10**power:g} s</text>')
    lines += [f'<path stroke="{TEXT}" d="M{LEFT} {height - 32}h{WIDE}"/>', "</svg>"]
    return "\n".join(lines) + "\n"


def _pair(row: dict[str, Any], top: int) -> Iterator[str]:
    names = {"flockstep": row["advised"], "ddp": "DDP"}
    link = row["link"].replace("mbit", " Mbit/s")
    yield f'<text x="{LEFT}" y="{top + 18}" font-weight="bold">{row["job"]}, {link}</text>'
    for place, (side, color) in enumerate(SIDES.items()):
        y, seconds = top + GAP - 4 + place * ROW, row[side]
        width = (WIDE if seconds is None else _log_x(seconds) - LEFT) or 1
        said = f"{names[side]}: " + ("target not reached" if seconds is None else f"{seconds:.{int(seconds < 10)}f} s")
        yield f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{color}"/>'
        yield f'<text x="{LEFT + width + 6:.1f}" y="{y + BAR - 1}" font-size="10">{escape(said)}</text>'


def _log_x(seconds: float) -> float:
    return LEFT + WIDE * (math.log10(seconds) - DECADES[0]) / (DECADES[1] - DECADES[0])


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
    SLOW_PICTURE.write_text(slow_picture(), "utf-8")
