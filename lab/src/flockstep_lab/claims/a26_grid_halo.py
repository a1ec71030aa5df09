"""Claim: on a grid of machines, locally connected layers exchange only the inputs at the borders (COTS HPC)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flockstep.arrays.schema import FlatArray, slices
from flockstep.frameworks.base import Data, Engine, Job
from flockstep.partitions.grid import SpatialGrid
from flockstep.simulation.compute import ConstantTime
from flockstep.simulation.network import Ideal
from flockstep.split.stages import SplitModel
from flockstep.strategies.local_sgd import LocalSGD
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, bounded, same
from flockstep_lab.claims.local_layers import LocalLayer, fetched_elements
from flockstep_lab.claims.small_run import SmallRun, ran

if TYPE_CHECKING:
    import torch

LAYERS = (
    ("receptive fields of 20 x 20, stride 2", LocalLayer(64, 60, 3, 20, 2)),
    ("windows of 5 x 5", LocalLayer(90, 90, 8, 5)),
    ("windows of 5 x 5, stride 2", LocalLayer(45, 47, 4, 5, 2)),
)
EXECUTED = (
    ("receptive fields of 8 x 8, stride 2", LocalLayer(20, 18, 3, 8, 2)),
    ("windows of 5 x 5", LocalLayer(16, 15, 3, 5)),
    ("windows of 3 x 3, stride 2", LocalLayer(19, 21, 4, 3, 2)),
)
"""Layers of the networks that are trained, small enough for a quick check."""
GRIDS = ((2, 2), (4, 4))
BORDER = 0.5
"""Largest share of a layer's inputs that may be sent between machines if receptive fields are small."""
BATCH, LR, SEED = 2, 1.0, 0
CLOSE = 1e-10
"""Largest distance of parameters, relative to their change in a step, that rounding explains."""


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
        "machines; the formula for rectangles is compared with a count over every connection of every output. "
        f"{len(EXECUTED)} smaller networks are trained for a step on the grids, in virtual time, float64, {BATCH} "
        "samples: a locally connected layer with windows of 1 x 1 reads the data, the layer follows, and then a fully "
        "connected layer, whose terms the first machine adds"
    )
    tolerance = (
        "numbers of fetched elements, and bytes that cross borders, equal to the formula; distance of the trained "
        f"parameters from the unsplit network at most {CLOSE:g} of their change; at most {BORDER:.0%} of the inputs "
        "for windows of 5; controls: if every connection fetched its own element, at least twice as many elements; "
        "with windows of 1 x 1, no bytes across borders"
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
                bounded(
                    f"control: {what}: elements fetched if every connection fetched its own",
                    f">= {2 * sum(ours)}",
                    every,
                )
            )
            say(f"{what}: {sum(ours)} elements fetched, {share:.1%} of the inputs")
        for (name, layer), grid in product(EXECUTED, GRIDS):
            rows += _executed(f"{name}, {grid[0]} x {grid[1]} machines", layer, SpatialGrid(*grid))
            say(rows[-2].what)
        alone = _trained(replace(EXECUTED[-1][1], window=1, stride=1), SpatialGrid(*GRIDS[0])).border_bytes
        rows.append(same("control: bytes that cross borders with windows of 1 x 1", 0, alone))
        return Verdict(tuple(rows))


def _executed(what: str, layer: LocalLayer, grid: SpatialGrid) -> list[ClaimRow]:
    """Compare a training step on a grid with the formula, and with the step of the unsplit network."""
    ran, (whole, start) = _trained(layer, grid), _unsplit(layer)
    fetched = layer.fetched(grid.rows, grid.columns)
    nbytes = 2 * 8 * BATCH * sum(fetched)
    apart = float(np.linalg.norm(ran.params - whole) / np.linalg.norm(whole - start))
    return [
        ClaimRow(
            f"{what}: elements that each machine of the run is planned to fetch per sample",
            str(fetched),
            str(ran.fetched),
            fetched == ran.fetched,
        ),
        same(
            f"{what}: bytes of activations and gradients that cross borders in a step of the run",
            nbytes,
            ran.border_bytes,
        ),
        ClaimRow(
            f"{what}: distance of the parameters from the unsplit network, relative to their change",
            0.0,
            apart,
            apart < CLOSE,
        ),
    ]


@dataclass(frozen=True)
class GridRun:
    """A training step of a network on a grid."""

    fetched: list[int]
    """Number of activations that each machine is planned to fetch for the layer, for one sample."""
    border_bytes: int
    """Bytes that all machines sent, without those of the last exchange, of the fully connected layer's terms."""
    params: FlatArray
    """Parameters after the step, in the order of the unsplit network."""


def _network(layer: LocalLayer) -> torch.nn.Module:
    import torch

    from flockstep.frameworks.torch_local import LocallyConnected2d

    size = layer.height, layer.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return torch.nn.Sequential(
            LocallyConnected2d(size, 1, layer.channels, 1),
            LocallyConnected2d(size, layer.channels, 1, layer.window, layer.stride),
            torch.nn.Flatten(),
            torch.nn.Linear(layer.outputs[0] * layer.outputs[1], 1),
        ).double()


def _job(layer: LocalLayer) -> Job:
    from flockstep.workloads.models import relative_squared_error, squared_error

    random = np.random.default_rng(SEED)
    x, y = random.standard_normal((2 * BATCH, 1, layer.height, layer.width)), random.standard_normal((2 * BATCH, 1))
    return Job(
        lambda: _network(layer),
        lambda: Data(x, y, x, y),
        f"sgd(lr={LR})",
        squared_error,
        relative_squared_error,
        higher_is_better=False,
        batch=BATCH,
        name="images",
    )


def _ran(model: Engine | SplitModel) -> SmallRun:
    return ran(model, LocalSGD(period=2), BATCH, 1, SEED, ConstantTime(0.01), Ideal())


def _trained(layer: LocalLayer, grid: SpatialGrid) -> GridRun:
    from flockstep.split.torch_grid import split_grid

    model = split_grid(_job(layer), SEED, grid)
    run = _ran(model)
    *border, terms = [[fetched_elements(one, part) for part in range(grid.parts)] for one in model.exchanges]
    sent = sum(one.sent_bytes for one in run.nodes)
    return GridRun(border[0] if border else [], sent - 2 * 8 * BATCH * sum(terms), run.params)


def _unsplit(layer: LocalLayer) -> tuple[FlatArray, FlatArray]:
    """Parameters of the unsplit network after the same step, and before."""
    from flockstep.frameworks.torch import TorchEngine

    engine = TorchEngine(_job(layer), SEED)
    return _ran(engine).params, engine.initial()


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
