"""Work, depth and bytes of layers, by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from flockstep.cli.planning import layers as show_layers
from flockstep.cli.planning import shape_named
from flockstep.costs import formulas
from flockstep.costs.layers import CONCURRENCY, NOTHING, Layer, ModelShape, Pass, log2_ceil
from flockstep.costs.reference import At, Net, reference
from flockstep.errors import ConfigurationError, UnknownName
from flockstep.report import layers as report


@pytest.mark.parametrize(("count", "rounds"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (4.5, 3), (1024, 10)])
def test_rounds_of_a_sum(count, rounds):
    assert log2_ceil(count) == rounds


def test_fully_connected():
    layer = formulas.linear("fc", 6, 4)
    assert layer.parameters == 28
    assert layer.multiply_adds == 24
    assert layer.work_forward(10) == 2 * 10 * 6 * 4
    assert layer.work_backward(10) == 2 * 2 * 10 * 6 * 4
    assert layer.forward.chain(10) == 3  # log2 of 6 inputs
    assert layer.by_weight.chain(10) == 4  # of 10 samples
    assert layer.by_input.chain(10) == 2  # of 4 outputs
    assert layer.depth(10) == 3 + 4
    assert layer.parallelism(10) == 1440 / 7
    assert layer.activation_bytes(10) == 160
    assert layer.gradient_bytes() == 112


def test_the_first_layer_needs_no_gradient_of_the_data():
    layer = formulas.linear("fc", 6, 4, data=True)
    assert layer.work_backward(1) == 48


def test_direct_convolution():
    """3 → 8 channels, 3 × 2 kernel, 5 × 7 to 3 × 6, with plain loops beside it."""
    layer = formulas.convolution("conv", 3, 8, ((3, 2), (5, 7), (3, 6)))
    products = sum(1 for _ in range(8) for _ in range(3 * 6) for _ in range(3) for _ in range(3 * 2))
    assert layer.multiply_adds == products == 2592
    assert layer.parameters == 3 * 8 * 6 + 8
    assert layer.forward.chain(4) == 2 + 2 + 1
    assert layer.by_weight.chain(4) == log2_ceil(4 * 18)
    assert layer.by_input.chain(4) == 3 + 2 + 1
    assert (layer.reads, layer.writes) == (105, 144)


def test_groups_divide_weights_and_work():
    whole = formulas.convolution("conv", 8, 8, ((3, 3), (4, 4), (4, 4)), bias=False)
    grouped = formulas.convolution("conv", 8, 8, ((3, 3), (4, 4), (4, 4)), groups=4, bias=False)
    assert grouped.parameters * 4 == whole.parameters
    assert grouped.multiply_adds * 4 == whole.multiply_adds
    assert whole.forward.chain(1) - grouped.forward.chain(1) == 2


def test_pooling_activation_and_sum():
    pool = formulas.pooling("pool", 64, 16, (2, 2))
    assert (pool.work_forward(3), pool.work_backward(3), pool.depth(3)) == (3 * 64, 3 * 16, 2 + 1)
    relu = formulas.activation("relu", 10)
    assert (relu.work(3), relu.depth(3), relu.parallelism(3)) == (60, 2, 30)
    added = formulas.total("add", 10, 3)
    assert (added.work(3), added.depth(3)) == (60, 2)


def test_batch_normalization_grows_deeper_with_the_batch():
    norm = formulas.batch_norm("bn", 4, 25)
    assert norm.parameters == 8
    assert norm.work_forward(2) == 7 * 2 * 100
    assert norm.depth(32) - norm.depth(2) == 2 * (log2_ceil(800) - log2_ceil(50)) + log2_ceil(800) - log2_ceil(50)


def test_layer_normalization_does_not():
    norm = formulas.group_norm("ln", 640, 64, 64, 64)
    assert norm.forward.chain(1) == norm.forward.chain(1024) == 5 + 2 * 6


def test_a_recurrent_layer_waits_for_every_step():
    short, long = (formulas.recurrent("lstm", 8, 16, steps, gates=4) for steps in (1, 10))
    assert long.multiply_adds == 10 * short.multiply_adds == 10 * 4 * 16 * (8 + 16)
    assert long.forward.chain(1) - short.forward.chain(1) == 9 * (4 + 3)
    assert short.parameters == 4 * 16 * (8 + 16 + 2)


def test_attention():
    layer = formulas.attention("attention", 2, 5, 7, 4)
    assert layer.multiply_adds == 2 * 2 * 5 * 7 * 4
    assert layer.by_input.products == 2 * layer.multiply_adds
    assert layer.parameters == 0
    assert layer.reads == 2 * (5 * 4 + 7 * 8)


def test_bytes_of_data_parallelism_against_splitting():
    """16 workers, 32 samples each: VGG's first fully connected layer, and its first convolutions."""
    model = reference("vgg-a")
    by_name = {layer.name: layer for layer in model.layers}
    fc = by_name["fc6"]
    assert fc.data_bytes(16) == 2 * 15 / 16 * 4 * 102_764_544
    by_inputs = 2 * 15 / 16 * 32 * 25088 * 4 + 2 * 15 * 32 * 4096 * 4
    assert fc.split_bytes(32, 16) == by_inputs
    assert model.cheaper(fc, 32, 16) == "split"
    assert model.cheaper(by_name["conv2_1"], 32, 16) == "data"
    assert model.split_layers(32, 16) == ("fc6", "fc7", "fc8")
    assert model.cheapest_bytes(32, 16) < model.data_bytes(16) / 8


def test_a_layer_that_widens_is_split_by_outputs():
    """4 workers, 8 samples each, 100 inputs and 900 outputs of 4 bytes, by hand.

    Each worker sends its samples' inputs to the 3 others, and of the outputs that it computed 3 quarters to theirs; the
    gradients go the same ways back: of the inputs only where something is before the layer.
    """
    layer = formulas.linear("wide", 100, 900)
    gathered, returned = 3 * 8 * 100 * 4, 3 / 4 * 8 * 900 * 4
    assert layer.split_bytes(8, 4) == 2 * gathered + 2 * returned == 62_400
    first = dataclasses.replace(layer, by_input=NOTHING)
    assert first.split_bytes(8, 4) == gathered + 2 * returned == 52_800


@pytest.mark.parametrize("workers", [2, 16, 1024])
def test_break_even_is_where_both_cost_the_same(workers):
    model = reference("vgg-a")
    fc = next(layer for layer in model.layers if layer.name == "fc7")
    batch = model.break_even_batch(fc, workers)
    assert model.cheaper(fc, math.ceil(batch - 1e-9) - 1, workers) == "split"
    assert model.cheaper(fc, math.ceil(batch + 1e-9), workers) == "data"


def test_one_worker_sends_nothing():
    model = reference("alexnet")
    assert model.data_bytes(1) == model.cheapest_bytes(32, 1) == 0
    assert model.split_layers(32, 1) == ()


def test_shared_weights_are_split_with_all_that_use_them():
    shared = ModelShape(
        "tied",
        (
            formulas.embedding("tokens", 1000, 8, 4),
            Layer("head", "linear", forward=Pass(32000), reads=32, writes=4000, tied="tokens"),
        ),
    )
    first, second = shared.layers
    assert shared.split_bytes(first, 1, 4) == first.split_bytes(1, 4) + second.split_bytes(1, 4)
    assert shared.split_bytes(second, 1, 4) == second.split_bytes(1, 4)


def test_branches_run_side_by_side():
    net, start = Net(), At(2, 4)
    x = net.relu(start, "stem")
    left = net.relu(net.relu(x, "left1"), "left2")
    right = net.relu(x, "right")
    net.total([left, right], "add")
    model = net.shape("branches", "")
    assert model.depth(1) == (1 + 2 + 1) + (0 + 2 + 0)  # the stem reads data; a sum hands its gradient on
    assert model.work(1) == 32 + 3 * 64 + 32


def test_parallelism_of_the_whole_is_work_over_the_longest_path():
    model = reference("googlenet")
    assert model.parallelism(8) == model.work(8) / model.depth(8)
    assert model.depth(8) < sum(layer.depth(8) for layer in model.layers)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Pass(products=-1), "products of a pass must be >= 0"),
        (lambda: Pass(other=math.inf), "finite"),
        (lambda: Layer("", "linear"), "needs a name"),
        (lambda: Layer("a", "linear", parameters=-1), "parameters of layer 'a' must be >= 0"),
        (lambda: Layer("a", "linear", parameters=1, trained=2), "must be <= its 1 parameters, got 2"),
        (lambda: ModelShape("m", ()), "at least one layer"),
        (lambda: ModelShape("m", (Layer("a", "x"),), itemsize=0), "itemsize must be >= 1"),
        (lambda: ModelShape("m", (Layer("a", "x"), Layer("a", "x"))), "two layers of 'm' are called 'a'"),
        (lambda: ModelShape("m", (Layer("a", "x", after=("b",)), Layer("b", "x"))), "needs the output of 'b'"),
        (lambda: Net().conv(At(3, 4), "conv", 8, 7), "does not fit into 4"),
        (lambda: report.rows(reference("alexnet"), 0, 1), "batch must be >= 1"),
        (lambda: report.rows(reference("alexnet"), 1, 0), "workers must be >= 1"),
    ],
)
def test_what_cannot_be_is_refused(make, said):
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_the_document_says_what_the_model_says(capsys):
    show_layers("alexnet", 64, 8, as_json=True)
    said = json.loads(capsys.readouterr().out)
    model = reference("alexnet")
    assert said["parameters"] == 60_965_224 == sum(row["parameters"] for row in said["layers"])
    assert said["work_forward"] + said["work_backward"] == model.work(64)
    assert said["split_layers"] == list(model.split_layers(64, 8))


def test_the_printed_table_leaves_out_layers_without_parameters(capsys):
    show_layers("resnet-50")
    short = capsys.readouterr().out
    show_layers("resnet-50", everything=True)
    long = capsys.readouterr().out
    assert "67 layers without parameters" in short
    assert "relu1" not in short
    assert "relu1" in long
    assert "with fc split over the workers" in short


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (17, "17.0"), (999.9, "1,000"), (1000, "1.00 k"), (7.6e9, "7.60 G"), (1e21, "1,000 E")],
)
def test_amounts(value, text):
    assert report.amount(value) == text


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        ("resnet-51", UnknownName, "did you mean 'resnet-50'"),
        ("digit", UnknownName, "did you mean 'digits'"),
        ("nowhere.py", ConfigurationError, "no Python file 'nowhere.py'"),
    ],
)
def test_what_is_not_there(what, error, said):
    with pytest.raises(error, match=said):
        shape_named(what)


def test_bytes_behind_a_layer_of_a_pipeline():
    """Activations of 32 samples of 4,096 elements of 4 bytes, and their gradients."""
    fc = next(layer for layer in reference("vgg-a").layers if layer.name == "fc6")
    assert fc.pipeline_bytes(32) == 2 * 32 * 4096 * 4
    assert (
        next(row for row in report.rows(reference("vgg-a"), 32, 16) if row["layer"] == "fc6")["pipeline_bytes"]
        == 1 << 20
    )


def figures(share):
    return share.work, share.depth, share.parallelism


def test_a_fully_connected_layer_under_data_model_and_pipeline_parallelism():
    """Ben-Nun & Hoefler's row of a fully connected layer by hand: W = N C_out C_in for y, ∇w and ∇x, D = log C_in,
    log N and log C_out; 12 inputs, 6 outputs, 10 samples on each of 3 workers. A multiply-add is two operations.
    """
    layer, products = formulas.linear("fc", 12, 6), 12 * 6
    forward, by_input = 4, 3  # ⌈log2 12⌉, ⌈log2 6⌉
    data, model, pipeline = (figures(share(layer, 10, 3)) for share in CONCURRENCY.values())
    work = 2 * 3 * 10 * products
    assert data == (work, forward + (4 + 2), work / 10)  # ⌈log2 10⌉ samples, then ⌈log2 3⌉ workers; > by_input
    assert model == (2 * 3 * 30 * products / 3, forward + 5, work / 9)  # ⌈log2 30⌉
    assert pipeline == (3 * work, 3 * (forward + 4), work / 8)
    assert by_input < 4


def test_a_convolution_under_data_model_and_pipeline_parallelism():
    """The row of a direct convolution: W = N C_out H' W' C_in K_y K_x, D = ⌈log2 C_in⌉ + ⌈log2 K_y⌉ + ⌈log2 K_x⌉.

    5 → 8 channels, 3 × 3 kernel, 4 × 4 outputs, 2 samples on each of 4 workers.
    """
    layer = formulas.convolution("conv", 5, 8, ((3, 3), (6, 6), (4, 4)))
    products = 8 * 4 * 4 * 5 * 3 * 3
    forward, by_input = 3 + 2 + 2, 3 + 2 + 2
    work = 2 * 3 * 2 * products
    found = {kind: figures(share(layer, 2, 4)) for kind, share in CONCURRENCY.items()}
    assert found["data"] == (work, forward + max(5 + 2, by_input), work / 14)  # ⌈log2 32⌉ sums, ⌈log2 4⌉ workers
    assert found["model"] == (work, forward + 7, work / 14)  # ⌈log2 128⌉
    assert found["pipeline"] == (4 * work, 4 * (forward + by_input), work / 14)
    assert found["data"] != figures(CONCURRENCY["data"](layer, 2, 8)), "negative control: more workers, more rounds"


@pytest.mark.parametrize("kind", CONCURRENCY)
def test_one_worker_has_the_work_and_the_depth_of_the_layer(kind):
    for layer in reference("alexnet").layers:
        assert figures(CONCURRENCY[kind](layer, 32, 1)) == (layer.work(32), layer.depth(32), layer.parallelism(32))


def test_workers_divide_the_work_of_a_step():
    """P workers with equal shares, or one of P stages, have the work of P·N samples together."""
    for layer in reference("vgg-a").layers:
        data, model, pipeline = (share(layer, 8, 4).work for share in CONCURRENCY.values())
        assert 4 * data == 4 * model == pipeline == layer.work(32)


def test_the_table_has_a_column_for_each_kind_of_parallelism(capsys):
    show_layers("vgg-a", 32, 16, as_json=True)
    row = next(one for one in json.loads(capsys.readouterr().out)["layers"] if one["layer"] == "fc7")
    fc = next(layer for layer in reference("vgg-a").layers if layer.name == "fc7")
    for kind, share in CONCURRENCY.items():
        assert tuple(row["concurrency"][kind].values()) == figures(share(fc, 32, 16))
    found = report.rows(reference("vgg-a"), 32, 16)
    row = next(one for one in found if one["layer"] == "fc7")
    cells = {column.heading: column.cell(row) for column in report.COLUMNS}
    assert cells["data W"] == report.amount(fc.work(32))
    assert cells["pipeline W"] == report.amount(fc.work(16 * 32))
    assert cells["model W/D"] == report.amount(fc.work(32) / fc.depth(16 * 32))


def chain(*work, tied=()):
    """Layers of the given numbers of multiply-adds, with one parameter each; `tied`: index → name of the owner."""
    owners = dict(tied)
    return ModelShape(
        "chain",
        tuple(
            Layer(f"l{i}", "linear", parameters=i not in owners, forward=Pass(w), writes=10 * i, tied=owners.get(i))
            for i, w in enumerate(work)
        ),
    )


def pipeline(model, stages):
    return report.document(model, 8, stages)["pipeline"]


def test_a_network_as_a_pipeline():
    found = pipeline(chain(4, 1, 1, 4), 2)
    assert found["first"] == ["l0", "l2"]
    assert found["shares"] == [0.5, 0.5]
    assert found["link_bytes"] == [2 * 8 * 10 * 4]
    assert found["speedup"] == 2
    assert pipeline(chain(6, 1, 1, 2), 3)["speedup"] == pytest.approx(10 / 6)
    refused = pipeline(chain(1, 1, 1, 1), 5)["impossible"]
    assert re.search("chain can be cut into 1 to 4 stages, .* got 5; use at most 4 workers", refused)


def test_layers_that_share_weights_are_in_one_stage():
    tied = chain(1, 5, 5, 1, tied=[(2, "l0")])
    assert pipeline(tied, 2)["first"] == ["l0", "l3"]
    assert "into 1 to 2 stages" in pipeline(tied, 3)["impossible"]


def test_branches_are_no_pipeline():
    assert "has branches, so its layers do not form a chain" in pipeline(reference("googlenet"), 2)["impossible"]
    assert pipeline(reference("vgg-a"), 4)["speedup"] > 2
    assert "As a pipeline of 4 stages, the slowest stage" in " ".join(report.sentences(reference("vgg-a"), 8, 4))
