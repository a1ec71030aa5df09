"""The reference models against what is published about them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flockstep.costs.reference import INCEPTIONS, MODELS, gpt, reference, resnet
from flockstep.errors import UnknownName

EXACT = {
    "alexnet": 60_965_224,
    "vgg-a": 132_863_336,
    "googlenet": 6_998_552,
    "resnet-50": 25_557_032,
    "resnet-152": 60_192_808,
    "gpt-2-small": 124_439_808,
}


def test_every_model_has_its_number():
    assert set(EXACT) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_exact(name):
    assert reference(name).parameters == EXACT[name]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "googlenet"])
def test_parameters_are_the_published_ones(name):
    assert reference(name).parameters == pytest.approx(MODELS[name].parameters, rel=0.005)


def test_googlenet_has_some_more_than_the_round_number_that_is_quoted():
    assert reference("googlenet").parameters == pytest.approx(MODELS["googlenet"].parameters, rel=0.03)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("alexnet", 0.7e9),
        ("vgg-a", 7.6e9),
        ("googlenet", 1.55e9),
        ("resnet-50", 4.1e9),
        ("resnet-152", 11.5e9),
        ("gpt-2-small", 291_648_307_200 / 2),
    ],
)
def test_multiply_adds_are_the_published_ones(name, published):
    assert reference(name).multiply_adds == pytest.approx(published, rel=0.035)
    assert reference(name).multiply_adds == pytest.approx(MODELS[name].multiply_adds, rel=0.06)


def test_gpt_is_exact():
    assert 2 * reference("gpt-2-small").multiply_adds == 291_648_307_200


@pytest.mark.parametrize(("blocks", "paper"), [((3, 4, 6, 3), 3.8e9), ((3, 8, 36, 3), 11.3e9)])
def test_residual_networks_as_published(blocks, paper):
    published, usual = (resnet("resnet", blocks, as_published) for as_published in (True, False))
    assert published.multiply_adds == pytest.approx(paper, rel=0.02)
    assert published.parameters == usual.parameters
    assert published.multiply_adds < usual.multiply_adds


def test_an_inception_by_hand():
    """The first block has 192 channels of 28 × 28."""
    part = [one for one in reference("googlenet").layers if one.name.startswith("3a.") and one.multiply_adds]
    weights = 192 * 64 + (192 * 96 + 96 * 128 * 9) + (192 * 16 + 16 * 32 * 25) + 192 * 32
    assert sum(one.parameters for one in part) == weights + 64 + 96 + 128 + 16 + 32 + 32
    assert sum(one.multiply_adds for one in part) == weights * 28**2


def test_inceptions_hand_on_their_channels():
    """Each inception's outputs are the inputs of the next: 256, 480, 512, 512, 512, 528, 832, 832, 1024."""
    sums = [one + three + five + pooled for one, _, three, _, five, pooled in INCEPTIONS.values()]
    assert sums == [256, 480, 512, 512, 512, 528, 832, 832, 1024]


@pytest.mark.parametrize("name", ["alexnet", "vgg-a", "resnet-50", "gpt-2-small"])
def test_backward_is_about_twice_the_forward_pass(name):
    model = reference(name)
    assert model.work_backward(32) == pytest.approx(2 * model.work_forward(32), rel=0.08)


def test_work_grows_with_the_batch_and_depth_with_its_logarithm():
    model = reference("vgg-a")
    assert model.work(64) == 2 * model.work(32)
    weighed = sum(1 for layer in model.layers if layer.parameters)
    assert 0 < model.depth(64) - model.depth(32) <= weighed


def test_a_longer_text_costs_more_attention():
    short, long = gpt("short", context=128), gpt("long", context=256)
    assert long.multiply_adds > 2 * short.multiply_adds
    assert long.parameters - short.parameters == 128 * 768


def test_where_splitting_pays():
    assert set(reference("alexnet").split_layers(32, 16)) == {"fc6", "fc7", "fc8"}
    assert reference("resnet-50").split_layers(32, 16) == ("fc",)
    assert reference("resnet-50").split_layers(256, 16) == ()


def test_unknown_model():
    with pytest.raises(UnknownName, match="did you mean 'resnet-152'"):
        reference("resnet-151")


def test_shapes_need_no_framework():
    code = (
        "import sys; from flockstep.costs.reference import MODELS; [m.build() for m in MODELS.values()]; "
        "print(*{'torch', 'numba', 'plotly'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
