"""A grid of workers that hold rectangles of each layer: the unsplit model up to rounding, exact bytes, refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flockstep
from flockstep import LocallyConnected2d
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, FlockstepError
from flockstep.frameworks.torch import TorchEngine
from flockstep.partitions.grid import SpatialGrid
from flockstep.planning.job_profile import task_of
from flockstep.planning.split_surrogate import split_shape
from flockstep.records.events import NodeEvent
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.split.grid import GridModel, HaloExchange
from flockstep.split.splitting import make_split, without_whole
from flockstep.split.torch_grid import receptive_field_of, split_grid
from flockstep.split.torch_stages import PartsEngine, SkeletonEngine
from flockstep_lab.claims.local_layers import LocalLayer, fetched_elements
from support.grid_jobs import COLORS, HEIGHT, WIDTH, Traced, images_of, local, mixed, normed
from support.split_jobs import BATCH, GRADIENT, check_trains_as_whole, simulated

FULL = pytest.mark.full
MODELS: dict[str, Callable[[], nn.Module]] = {"local": local, "mixed": mixed, "normed": normed, "traced": Traced}
STRATEGIES = ("all_reduce", "local_sgd(period=2)", "ps(bsp, shards=2)")
GRIDS = ("grid(1, 2)", "grid(2, 1)", "grid(2, 2)", "grid(3, 2)")


@pytest.mark.parametrize(
    ("model", "strategy", "partition"),
    [
        ("local", "local_sgd(period=2)", "grid(2, 2)"),
        ("mixed", "ps(bsp, shards=2)", "grid(1, 2)"),
        *(
            pytest.param(model, strategy, partition, marks=FULL)
            for model in MODELS
            for strategy in STRATEGIES
            for partition in (GRIDS if model != "normed" else GRIDS[:2])
        ),
    ],
)
def test_a_grid_computes_the_unsplit_model(model: str, strategy: str, partition: str) -> None:
    """The oracle is the unsplit model in float64: parameters, losses, evaluations, running statistics."""
    check_trains_as_whole(images_of(MODELS[model]), strategy, partition)


def frozen() -> nn.Module:
    """A convolution that is not trained."""
    made = mixed()
    made[0].requires_grad_(requires_grad=False)
    return made


def tied() -> nn.Module:
    """A convolution that is used twice."""
    torch.manual_seed(7)
    again = nn.Conv2d(COLORS, COLORS, 3, padding=1)
    return nn.Sequential(again, nn.Tanh(), again, nn.Flatten(), nn.Linear(COLORS * HEIGHT * WIDTH, 1)).double()


def batch_normed() -> nn.Module:
    """Batch normalization of images behind the last divided layer."""
    torch.manual_seed(8)
    begin = nn.Conv2d(COLORS, 3, 3), nn.Tanh(), nn.BatchNorm2d(3), nn.Tanh()
    return nn.Sequential(*begin, nn.Flatten(), nn.Linear(3 * (HEIGHT - 2) * (WIDTH - 2), 1)).double()


def gathered() -> nn.Module:
    """Locally connected outputs that one worker gathers, as no fully connected layer follows."""
    torch.manual_seed(9)
    begin = LocallyConnected2d((HEIGHT, WIDTH), COLORS, 1, 4, stride=2), nn.Tanh(), nn.Flatten()
    return nn.Sequential(*begin, nn.LayerNorm(12), nn.Linear(12, 1)).double()


def in_place() -> nn.Module:
    """A layer that writes to the sum of all workers' terms."""
    torch.manual_seed(10)
    begin = nn.Conv2d(COLORS, 3, 3), nn.Flatten(), nn.Linear(3 * (HEIGHT - 2) * (WIDTH - 2), 9, bias=False)
    return nn.Sequential(*begin, nn.ReLU(inplace=True), nn.Linear(9, 1)).double()


def pooled() -> nn.Module:
    """A pooling whose sizes are sequences of one number."""
    torch.manual_seed(11)
    begin = nn.Conv2d(COLORS, 3, 3, padding=1), nn.MaxPool2d((3,), stride=(2,), padding=(1,))
    return nn.Sequential(*begin, nn.Flatten(), nn.Linear(3 * 6 * 5, 1)).double()


@pytest.mark.parametrize("model", [frozen, tied, batch_normed, gathered, in_place, pooled])
def test_a_grid_computes_models_with_other_layers(model: Callable[[], nn.Module]) -> None:
    check_trains_as_whole(images_of(model, "sgd(lr=0.02, momentum=0.9)"), "all_reduce", "grid(1, 2)")


def test_a_number_for_both_axes_is_a_pair() -> None:
    found = [receptive_field_of(nn.AvgPool2d(*given), {}) for given in (((3,),), (np.int64(3),), (3, (3, 3)))]
    assert found == found[:1] * 3


class Flip(nn.Module):
    """A layer that mirrors a share of the samples in training."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        mirrored = torch.rand(len(x), 1, 1, 1) < self.share
        return torch.where(mirrored, x.flip(-1), x)


@pytest.mark.parametrize("share", [0.5, 0.02])
def test_layers_before_the_first_window_draw_alike_on_all_workers(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is the unsplit model with the workers' stream: all rectangles belong to the same mirrored images."""
    stream = TorchEngine.stream

    def of_workers(self: TorchEngine, replica: int, step: int, *place: int) -> Any:
        return stream(self, replica, step, *(place or (0, 0)))

    def model() -> nn.Module:
        return nn.Sequential(Flip(share), nn.Dropout(share), *local())

    monkeypatch.setattr(TorchEngine, "stream", of_workers)
    check_trains_as_whole(images_of(model), "all_reduce", "grid(2, 2)")
    plain = simulated(images_of(local), "all_reduce")
    assert np.abs(simulated(images_of(model), "all_reduce").result - plain.result).max() > 1e-3


class Scaled(nn.Module):
    """A layer that multiplies by a buffer, which may count the calls."""

    scale: torch.Tensor

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.changes = changes
        self.register_buffer("scale", torch.full((1,), 0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes and self.training:
            self.scale += 1
        return x * self.scale


def test_a_buffer_before_the_first_window_must_stay_as_it_is() -> None:
    job = images_of(lambda: nn.Sequential(Scaled(), *local()))
    check_trains_as_whole(job, "all_reduce", "grid(1, 2)")
    assert without_whole(job, 0, split_grid(job, 0, SpatialGrid(1, 2))).facts.obstacle == ""
    with pytest.raises(
        ConfigurationError, match=r"must compute what the model computes, got a loss of .* state that layers share"
    ):
        split_grid(images_of(lambda: nn.Sequential(Scaled(changes=True), *local())), 0, SpatialGrid(1, 2))


class Counted(nn.Module):
    """A hook, which only the whole model runs, changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.first, self.norm = LocallyConnected2d((HEIGHT, WIDTH), COLORS, 1, 4, stride=2), nn.BatchNorm1d(12)
        self.inner, self.last = nn.Linear(12, 6), nn.Linear(6, 1)
        self.register_forward_hook(lambda *_: self.norm.num_batches_tracked.add_(1) and None)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.inner(self.norm(torch.flatten(self.first(x), 1)))))
        return out


def test_buffers_that_only_the_whole_model_changes_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"must compute what the model computes, got changing buffers .* by 1;"
    ):
        make_split(images_of(Counted), 0, SpatialGrid(1, 2))


class Cast(nn.Module):
    """A layer that converts its inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def test_a_rectangle_without_the_widest_dtype_is_refused() -> None:
    def model() -> nn.Module:
        narrow = Cast(torch.float32), LocallyConnected2d((HEIGHT, WIDTH), COLORS, 1, 4, stride=2)
        return nn.Sequential(*narrow, Cast(torch.float64), nn.Flatten(), nn.Linear(12, 1).double())

    with pytest.raises(ConfigurationError, match="got a part with parameters of float32; divide it elsewhere or less"):
        split_grid(images_of(model), 0, SpatialGrid(1, 2))


@pytest.mark.parametrize("grid", [(2, 2), pytest.param((3, 2), marks=FULL), pytest.param((4, 1), marks=FULL)])
def test_exactly_the_activations_at_the_borders_travel(grid: tuple[int, int]) -> None:
    """Forward what the formula of costs says for the pooling and the second layer, and one term of each worker for the
    output of the last layer; the same number of gradients back; no weights, because no two workers use a weight.
    """
    steps, events = 3, []
    ran = simulated(images_of(local), "local_sgd(period=100)", str(SpatialGrid(*grid)), replicas=1, steps=steps)
    assert isinstance(ran.simulation, SplitSimulation)
    model = ran.simulation.model
    assert isinstance(model, GridModel)
    layers = [LocalLayer(HEIGHT, WIDTH, 3, 3), LocalLayer(HEIGHT - 2, WIDTH - 2, 3, 3, 2)]
    expected = [layer.fetched(*grid) for layer in layers]
    terms = [model.partition.parts - 1, *[0] * (model.partition.parts - 1)]
    found = [[fetched_elements(one, part) for part in range(model.partition.parts)] for one in model.exchanges]
    assert found == [*expected, terms]
    assert model.ties == ()
    events = sorted((e for e in ran.events if isinstance(e, NodeEvent)), key=lambda e: e.node)
    assert sum(e.sent_bytes for e in events) == 2 * steps * BATCH * 8 * sum(map(sum, found))
    for event in events:
        fetches = sum(each[event.node] for each in found)
        gives = sum(one.channels * places.places for one in model.exchanges for places in one.sent(event.node).values())
        assert event.sent_bytes == event.received_bytes == steps * BATCH * 8 * (fetches + gives)
        pairs = sum(len(one.sent(event.node)) + len(one.back.sent(event.node)) for one in model.exchanges)
        assert event.messages_sent == steps * pairs, "one message to each worker that needs any element"


def test_a_convolution_lends_its_weights() -> None:
    """Each of its tensors is trained by one worker; the other three get a copy and return a gradient."""
    model = split_grid(images_of(mixed), 0, SpatialGrid(2, 2))
    owned = {name: sum(e.name == name for part in model.parts for e in part.schema.entries) for name in ("0.weight",)}
    assert owned == {"0.weight": 1}
    assert len(model.ties) == 3 * len(["0.weight", "0.bias", "5.weight"])
    assert sum(model.sizes) == sum(one.numel() for one in mixed().parameters())


def test_the_bytes_of_lent_weights_are_those_of_a_copy_and_a_gradient_for_each_other_worker() -> None:
    steps, others = 3, 4 - 1
    ran = simulated(images_of(mixed), "local_sgd(period=100)", "grid(2, 2)", replicas=1, steps=steps)
    assert isinstance(ran.simulation, SplitSimulation)
    model = ran.simulation.model
    assert isinstance(model, GridModel)
    fetched = sum(fetched_elements(one, part) for one in model.exchanges for part in range(4))
    lent = sum(one.numel() for name, one in mixed().named_parameters() if name in ("0.weight", "0.bias", "5.weight"))
    sent = sum(event.sent_bytes for event in ran.events if isinstance(event, NodeEvent))
    assert sent == steps * 8 * 2 * (BATCH * fetched + others * lent)


def test_the_work_of_all_rectangles_is_the_work_of_the_model() -> None:
    model = split_grid(images_of(local), 0, SpatialGrid(3, 2))
    shares = [share for part in model.parts for share in part.shares]
    assert sum(one.forward + one.backward for one in shares) == pytest.approx(1)
    ran = simulated(images_of(local), "all_reduce", "grid(3, 2)", replicas=1, steps=1)
    assert GRADIENT / 6 < ran.simulation.now < GRADIENT


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_border_that_does_not_arrive_is_noticed(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, of the comparison before a run and of the tests: zeros in place of what other workers send."""
    facts: dict[str, Any] = {"replicas": 1, "steps": 2}
    whole = simulated(images_of(local), "all_reduce", **facts)
    inputs, exchanges = HaloExchange.inputs, split_grid(images_of(local), 0, SpatialGrid(1, 2)).exchanges

    def alone(self: HaloExchange, part: int, own: FlatArray | None, arrived: Mapping[int, FlatArray]) -> Any:
        kept = part == 0 or own is None or (self in exchanges) != (direction == "forward")
        return inputs(self, part, own, arrived if kept else {key: 0 * one for key, one in arrived.items()})

    def left_out(simulation: SplitSimulation) -> None:
        monkeypatch.setattr(HaloExchange, "inputs", alone)

    split = simulated(images_of(local), "all_reduce", "grid(1, 2)", prepare=left_out, **facts)
    assert np.abs(split.result - whole.result).max() > 1e-3
    with pytest.raises(ConfigurationError, match="divided into 1 x 2 rectangles, must compute what the model computes"):
        split_grid(images_of(local), 0, SpatialGrid(1, 2))


@pytest.mark.parametrize("model", ["local", pytest.param("mixed", marks=FULL)])
def test_a_worker_never_holds_the_whole_model(model: str) -> None:
    """Its process builds the model without values, and gets those of its rectangles."""
    job = images_of(MODELS[model])
    known = without_whole(job, 0, make_split(job, 0, SpatialGrid(2, 2)))
    assert known.facts.obstacle == ""
    bare = make_split(job, 0, SpatialGrid(2, 2), known.facts)
    assert isinstance(bare.engine, PartsEngine)
    assert isinstance(bare.engine.whole, SkeletonEngine)
    for ours, theirs in zip(bare.parts, known.parts, strict=True):
        assert ours.take(theirs.values()).tobytes() == theirs.initial().tobytes()
        assert ours.held_bytes == theirs.held_bytes < sum(one.nbytes for one in MODELS[model]().parameters()) / 2
    assert bare.largest_message(BATCH) == known.largest_message(BATCH) > 0


def test_a_plan_of_a_grid_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"predicts pipeline, tensor and sharded, got grid\(rows=1, columns=2\); use one"
    ):
        split_shape(task_of("digits"), SpatialGrid(1, 2))


@pytest.mark.full
def test_dropout_draws_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker and step has a mask of its own, and a run repeats to the bit, whatever the times; without dropout
    another model is trained.
    """
    masks: list[bytes] = []
    forward = nn.Dropout.forward

    def watched(self: nn.Dropout, x: torch.Tensor) -> torch.Tensor:
        found = forward(self, x)
        if self.training and self.p and x.shape[-1] == WIDTH // 3:
            masks.append((found == 0).numpy().tobytes())
        return found

    def model(share: float) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(*list(local())[:2], nn.Dropout(share).double(), *list(local())[2:])

    monkeypatch.setattr(nn.Dropout, "forward", watched)
    facts: dict[str, Any] = {"replicas": 1, "steps": 3}
    ran = [
        simulated(images_of(model(share)), "all_reduce", "grid(1, 3)", network=network, **facts).result
        for share, network in ((0.5, "ideal"), (0.5, "1gbit"), (0.0, "ideal"))
    ]
    assert len(masks) == 2 * 9
    assert sorted(masks[:9]) == sorted(masks[9:])
    assert len(set(masks)) == 9
    assert ran[0].tobytes() == ran[1].tobytes()
    assert np.abs(ran[0] - ran[2]).max() > 1e-3


@pytest.mark.full
def test_a_digits_network_is_saved_as_the_unsplit_model(tmp_path: Path) -> None:
    for job in ("digits(batch=8)", "digits(batch=8, local=true)"):
        saved = [
            flockstep.simulate(job, "ps(bsp)", workers=workers, partition=partition, steps=3, out=tmp_path / str(n))
            for n, (partition, workers) in enumerate((("grid(2, 2)", 8), (None, 2)), start=len(job))
        ]
        split, whole = (one.parameters() for one in saved)
        np.testing.assert_allclose(split[0], whole[0], atol=1e-6)
        assert split[1] == whole[1]
        assert saved[0].summary.replicas_agree


def test_the_record_says_which_layers_a_grid_does_not_divide(tmp_path: Path) -> None:
    ran = flockstep.simulate("digits(batch=8)", "all_reduce", workers=2, partition="grid(1, 2)", steps=1, out=tmp_path)
    every, alone = "every worker computes layer '0'", "only the worker of rectangle (0, 0) computes the 2 layers from"
    assert ran.summary.notes == [f"grid(rows=1, columns=2) does not divide all layers: {every}; {alone} '9' to '10'."]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"partition": "grid(0, 2)"}, "rows of grid must be >= 1, got 0; use for example 2"),
        ({"partition": "grid(1, 1)"}, "a grid must have >= 2 workers, got 1 x 1; use partition=none"),
        ({"workers": 3}, r"must be a multiple of 2 for grid\(rows=1, columns=2\), got 3; use 2, or a multiple of it"),
        ({"job": "softmax"}, "a model that is split must be a torch.nn.Module"),
        (
            {"job": "mnist1d"},
            r"must be a layer over images with at least 1 x 2 outputs that can be divided .*, got Conv1d '0' for ",
        ),
        (
            {"partition": "grid(9, 1)", "workers": 9},
            r"job 'digits' .* at least 9 x 1 outputs .*, got Conv2d '1' for inputs of shape .* a smaller grid",
        ),
        (
            {"partition": "grid(4, 2)", "workers": 8},
            r"must train parameters of .*, got none for rectangle \(2, 1\); use",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    facts: dict[str, Any] = {"job": "digits", "partition": "grid(1, 2)", "workers": 2, **given}
    with pytest.raises(FlockstepError, match=message):
        flockstep.simulate(facts.pop("job"), "all_reduce", steps=1, out=tmp_path, **facts)


@pytest.mark.parametrize(
    "first",
    [
        nn.Conv2d(COLORS, 3, 3, dilation=2),
        nn.Conv2d(COLORS, 3, 3, padding="same"),
        nn.Conv2d(COLORS, 3, 3, padding=1, padding_mode="reflect"),
        nn.MaxPool2d(3, ceil_mode=True),
        nn.AvgPool2d(3, padding=1, count_include_pad=False),
        nn.Conv2d(COLORS, 3, 1, padding=1),
        nn.BatchNorm2d(COLORS),
    ],
)
def test_a_first_layer_that_a_rectangle_does_not_compute_alone_is_refused(first: nn.Module) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(first, nn.Flatten(), nn.LazyLinear(1)).double()

    def built() -> nn.Module:
        whole = model()
        whole(torch.zeros(2, COLORS, HEIGHT, WIDTH, dtype=torch.float64))
        return whole

    with pytest.raises(
        ConfigurationError, match="must be a layer over images with at least 1 x 2 outputs that can be divided"
    ):
        split_grid(images_of(built), 0, SpatialGrid(1, 2))


def test_layers_behind_the_last_that_can_be_divided_are_computed_by_the_first_worker() -> None:
    """A layer with too few outputs, and one whose weights another layer uses, end the divided layers."""
    again = LocallyConnected2d((4, 3), 3, 3, 3, padding=1).double()

    def model() -> nn.Module:
        first = LocallyConnected2d((HEIGHT, WIDTH), COLORS, 3, 3, stride=2).double()
        return nn.Sequential(first, nn.AvgPool2d(2, stride=1), again, again, nn.Flatten(), nn.LazyLinear(1).double())

    def built() -> nn.Module:
        torch.manual_seed(0)
        whole = model()
        whole(torch.zeros(2, COLORS, HEIGHT, WIDTH, dtype=torch.float64))
        return whole

    split = split_grid(images_of(built), 0, SpatialGrid(4, 1))
    assert split.layers[0] == "rectangle (0, 0) of 0, 1, and all of 2, 3, 4, 5"
    assert split.layers[1:] == tuple(f"rectangle ({row}, 0) of 0, 1" for row in (1, 2, 3))
    said = "only the worker of rectangle (0, 0) computes the 4 layers from '2' to '5'"
    assert split.note == f"grid(rows=4, columns=1) does not divide all layers: {said}."
