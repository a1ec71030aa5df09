"""Claim: on a grid of machines, locally connected layers exchange only the inputs at the borders (COTS HPC)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from flockstep.arrays.schema import slices
from flockstep.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep.costs.grid import LocalLayer

LAYERS = (
    ("receptive fields of 20 x 20, stride 2", LocalLayer(64, 60, 3, 20, 2)),
    ("windows of 5 x 5", LocalLayer(90, 90, 8, 5)),
    ("windows of 5 x 5, stride 2", LocalLayer(45, 47, 4, 5, 2)),
)
GRIDS = ((2, 2), (4, 4))
BORDER = 0.5
"""Largest share of a layer's inputs that may be sent between machines if receptive fields are small."""


@dataclass(frozen=True)
class GridHalo(Claim):
    """Claim: a machine that holds a rectangle of every layer fetches only the border of its receptive fields."""

    statement = (
        "If each machine of a grid holds a rectangle of every layer, a layer with local connections sends only the "
        "activations whose receptive fields cross a border, each once to every machine that needs the activation"
    )
    source = "Coates et al. 2013 (COTS HPC), section 4; Dean et al. 2012 (DistBelief), section 3"
    setting = (
        f"{len(LAYERS)} layers on grids of {' and '.join(f'{rows} x {columns}' for rows, columns in GRIDS)} "
        "machines; the formula for rectangles is compared with a count over every connection of every output"
    )
    tolerance = (
        f"numbers of fetched elements equal; at most {BORDER:.0%} of the inputs for windows of 5; control: if every "
        "connection fetched its own element, at least twice as many elements"
    )
    quick: ClassVar[bool] = True

    def check(self, say: Say) -> Verdict:
        rows = []
        for (name, layer), grid in product(LAYERS, GRIDS):
            once, every = _counted(layer, *grid)
            ours = layer.fetched(*grid)
            what = f"{name}, {grid[0]} x {grid[1]} machines"
            rows.append(ClaimRow(f"{what}: elements fetched per sample", sum(once), sum(ours), once == ours))
            share = sum(ours) / (layer.height * layer.width * layer.channels)
            if layer.window == 5:
                rows.append(
                    ClaimRow(
                        f"{what}: share of the inputs that is fetched", f"at most {BORDER}", share, share <= BORDER
                    )
                )
            rows.append(
                ClaimRow(
                    f"control: {what}: elements fetched if every connection fetched its own",
                    f">= {2 * sum(ours)}",
                    every,
                    every >= 2 * sum(ours),
                )
            )
            say(f"{what}: {sum(ours)} elements fetched, {share:.1%} of the inputs")
        return Verdict(tuple(rows))


def _counted(layer: LocalLayer, rows: int, columns: int) -> tuple[list[int], int]:
    """Return the elements that each machine fetches, and the number of connections that cross a border, one by one."""
    crossing, fetched = 0, []
    for row, column in product(range(rows), range(columns)):
        held = slices(layer.height, rows)[row], slices(layer.width, columns)[column]
        needed = set()
        for y, x in _read(layer, rows, columns, row, column):
            if not (held[0].start <= y < held[0].stop and held[1].start <= x < held[1].stop):
                needed.add((y, x))
                crossing += layer.channels
        fetched.append(len(needed) * layer.channels)
    return fetched, crossing


def _read(layer: LocalLayer, rows: int, columns: int, row: int, column: int) -> Iterator[tuple[int, int]]:
    """Yield the place that each connection of a machine's outputs reads."""
    below, across = layer.outputs
    made = slices(below, rows)[row], slices(across, columns)[column]
    for top, left in product(range(made[0].start, made[0].stop), range(made[1].start, made[1].stop)):
        for down, right in product(range(layer.window), range(layer.window)):
            yield top * layer.stride + down, left * layer.stride + right
