"""Layers found in torch modules, against the reference models, against torch's own counts, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flockstep.cli.planning import shape_named
from flockstep.costs.reference import gpt, reference
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.layers import file_shape, job_shape
from flockstep.frameworks.torch_kinds import register_kind
from flockstep.frameworks.torch_layers import WHOLE, shape_of
from flockstep.workloads.base import Workload


def alexnet() -> nn.Module:
    def conv(before: int, after: int, width: int, **more: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, width, **more), nn.ReLU()]

    return nn.Sequential(
        *conv(3, 96, 11, stride=4),
        nn.MaxPool2d(3, 2),
        *conv(96, 256, 5, padding=2, groups=2),
        nn.MaxPool2d(3, 2),
        *conv(256, 384, 3, padding=1),
        *conv(384, 384, 3, padding=1, groups=2),
        *conv(384, 256, 3, padding=1, groups=2),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(9216, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1000),
    )


def vgg_a() -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for widths in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for width in widths:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *head)


@pytest.mark.parametrize(("build", "name", "size"), [(alexnet, "alexnet", 227), (vgg_a, "vgg-a", 224)])
def test_a_torch_model_has_the_layers_of_the_reference(build, name, size):
    with torch.device("meta"):  # shapes only: nothing is computed
        found = shape_of(build(), torch.empty(2, 3, size, size))
    expected = reference(name)
    kept = [layer for layer in found.layers if layer.kind != "reshape"]
    assert len(kept) == len(expected.layers)
    for ours, theirs in zip(kept, expected.layers, strict=True):
        for what in ("kind", "parameters", "forward", "by_weight", "by_input", "reads", "writes", "gradients"):
            assert getattr(ours, what) == getattr(theirs, what), (theirs.name, what)
    assert found.depth(32) == expected.depth(32)
    assert found.split_bytes(kept[0], 32, 16) == expected.split_bytes(expected.layers[0], 32, 16)


class Attend(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.mix, self.causal = nn.Linear(8, 24), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)


def one(module: nn.Module, *shape: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return module, (torch.randn(shape),)


def text(module: nn.Module) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return module, (torch.randint(5, (3, 6)),)


COUNTED = {
    "linear": lambda: one(nn.Linear(5, 7), 3, 5),
    "linear over tokens": lambda: one(nn.Linear(5, 7), 3, 4, 5),
    "conv1d": lambda: one(nn.Conv1d(4, 6, 3, stride=2), 3, 4, 11),
    "conv2d": lambda: one(nn.Sequential(nn.Conv2d(4, 8, (3, 2), padding=1), nn.Conv2d(8, 2, 1)), 2, 4, 5, 6),
    "conv3d": lambda: one(nn.Conv3d(2, 3, 2), 2, 2, 4, 5, 3),
    "transposed": lambda: one(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3)), 2, 3, 6, 7),
    "embedding": lambda: text(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))),
    "attention": lambda: (nn.MultiheadAttention(16, 4, batch_first=True), tuple(torch.randn(3, 2, 5, 16))),
    "attention over others": lambda: (
        nn.MultiheadAttention(16, 4, kdim=6, vdim=10),
        (torch.randn(5, 2, 16), torch.randn(7, 2, 6), torch.randn(7, 2, 10)),
    ),
    "encoder": lambda: one(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False),
        2,
        5,
        16,
    ),
    "gru": lambda: one(nn.GRU(8, 16, 2, batch_first=True), 3, 6, 8),
    "rnn": lambda: one(nn.RNN(8, 16, batch_first=True, bidirectional=True), 3, 6, 8),
    "functional attention": lambda: one(Attend(), 2, 5, 8),
}


@pytest.mark.parametrize("name", COUNTED)
def test_products_are_those_that_torch_counts(name):
    """The number of products, forward and backward, equals torch's."""
    module, inputs = COUNTED[name]()
    batch = inputs[0].shape[1 if name == "attention over others" else 0]
    found = shape_of(module, *inputs, batch=batch)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        outputs = module(*inputs)
        forward = counter.get_total_flops()
        (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()
        backward = counter.get_total_flops() - forward
    assert 2 * batch * found.multiply_adds == forward > 0
    assert 2 * batch * sum(one.by_weight.products + one.by_input.products for one in found.layers) == backward
    assert found.parameters == sum(parameter.numel() for parameter in module.parameters())


def test_an_lstm_whose_kernel_torch_does_not_count():
    layer = shape_of(nn.LSTM(8, 16, batch_first=True), torch.randn(3, 10, 8)).layers[0]
    assert (layer.kind, layer.counted) == ("recurrent", "formula")
    assert layer.multiply_adds == 10 * 4 * 16 * (8 + 16)
    assert layer.parameters == 4 * 16 * (8 + 16 + 2)


def test_a_formula_for_a_module_of_ones_own():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    network = nn.Sequential(Doubled(), nn.Linear(4, 2))
    assert shape_of(network, torch.randn(3, 4)).unknown == ("0",)
    register_kind(Doubled)
    found = shape_of(network, torch.randn(3, 4))
    assert (found.unknown, found.layers[0].reads, found.multiply_adds) == ((), 4, 8)


def test_products_outside_of_known_modules_are_still_counted():
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(x) @ torch.ones(2, 5)

    assert shape_of(Twice(nn.Linear(4, 2)), torch.randn(3, 4)).multiply_adds == 8 + 10


def test_the_digits_network():
    found = job_shape(Workload.parse("digits").job(0))
    assert found.parameters == 38_170
    assert found.multiply_adds == 16 * 9 * 64 + 32 * 16 * 9 * 16 + 128 * 240 + 2400
    assert found.unknown == ()
    assert (found.layers[0].kind, found.layers[0].counted) == ("activation", "formula")
    first = found.layers[1]
    assert not first.by_input.products  # pixels need no gradient


def test_a_transformer_with_weights_used_twice_and_products_of_its_own():
    found = job_shape(Workload.parse("charlm").job(0))
    assert found.parameters == 108_864
    expected = gpt("same", layers=2, width=64, heads=4, context=64, symbols=96)
    assert found.multiply_adds == expected.multiply_adds
    own = [layer.name for layer in found.layers if layer.counted == "torch"]
    assert own == ["blocks.0", "blocks.1", WHOLE]


def test_a_numpy_job():
    found = job_shape(Workload.parse("quadratic").job(0))
    assert (found.parameters, found.unknown) == (100, ("w",))
    assert "Quadratic" in found.note


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.spare = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.middle(self.tokens(x))))


def test_shared_weights_once_and_work_each_time():
    found = shape_of(Tied(), torch.randint(11, (2, 3)))
    by_name = {layer.name: layer for layer in found.layers}
    assert list(by_name) == ["tokens", "middle", "middle (call 2)", "head", "(not used)"]
    assert found.parameters == 44 + 20 + 9
    assert (by_name["middle (call 2)"].parameters, by_name["middle (call 2)"].tied) == (0, "middle")
    assert by_name["middle"].forward == by_name["middle (call 2)"].forward
    assert (by_name["head"].parameters, by_name["head"].tied) == (0, "tokens")
    assert by_name["head"].multiply_adds == 3 * 4 * 11
    assert by_name["(not used)"].parameters == 9


def test_frozen_weights_have_no_gradient_to_send():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))
    model[0].requires_grad_(requires_grad=False)
    first, second = shape_of(model, torch.randn(2, 4)).layers
    assert (first.parameters, first.gradients, first.work_backward(1)) == (25, 0, 0)
    assert (second.gradients, second.by_input.products) == (36, 0)


def test_parametrized_weights_belong_to_their_layer():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)))
    (layer,) = shape_of(model, torch.randn(3, 4)).layers
    assert (layer.kind, layer.multiply_adds, layer.parameters) == ("linear", 24, 24 + 6 + 6)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ torch.eye(self.out_features)


def test_a_class_that_computes_something_else_is_counted_by_torch():
    (layer,) = shape_of(Scaled(4, 6), torch.randn(3, 4)).layers
    assert (layer.kind, layer.counted) == ("Scaled", "torch")
    assert layer.multiply_adds == 24 + 36


@pytest.mark.parametrize(
    ("module", "shape", "kind", "parameters"),
    [
        (nn.BatchNorm2d(3), (4, 3, 5, 5), "norm", 6),
        (nn.BatchNorm1d(3, affine=False), (4, 3), "norm", 0),
        (nn.LayerNorm(6), (4, 5, 6), "norm", 12),
        (nn.RMSNorm(6), (4, 5, 6), "norm", 6),
        (nn.GroupNorm(2, 4), (4, 4, 3), "norm", 8),
        (nn.InstanceNorm2d(3, affine=True), (4, 3, 5, 5), "norm", 6),
        (nn.MaxPool1d(2), (4, 3, 6), "pooling", 0),
        (nn.AvgPool3d((2, 1, 2)), (4, 3, 6, 2, 2), "pooling", 0),
        (nn.AdaptiveAvgPool2d(1), (4, 3, 6, 5), "pooling", 0),
        (nn.PReLU(), (4, 3), "activation", 1),
        (nn.GELU(), (4, 3), "activation", 0),
        (nn.GLU(), (4, 6), "activation", 0),
        (nn.LogSoftmax(-1), (4, 6), "softmax", 0),
        (nn.Dropout(), (4, 6), "dropout", 0),
        (nn.Flatten(), (4, 6, 2), "reshape", 0),
        (nn.ZeroPad2d(1), (4, 1, 6, 2), "reshape", 0),
        (nn.GRUCell(6, 5), (4, 6), "recurrent", 3 * 5 * 13),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_kinds(module, shape, kind, parameters):
    x = torch.randn(shape)
    (layer,) = shape_of(module, x).layers
    assert (layer.kind, layer.parameters, layer.counted) == (kind, parameters, "formula")
    assert layer.reads == x[0].numel()
    assert layer.writes == module(x)[0].numel()


class Restless(nn.Module):
    """Changes all it can, and fails if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.calls = 0
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(2))
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        self.replaced = self.replaced + torch.rand(2)
        x = self.inner(x)
        self.inner.eval()
        if self.fail:
            raise RuntimeError("no more")
        return x


@pytest.mark.parametrize("fail", [False, True])
def test_nothing_of_the_model_changes(fail):
    model = Restless()
    model.fail = fail
    replaced = model.replaced
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    if fail:
        with pytest.raises(ConfigurationError, match="Restless failed on the sample batch: RuntimeError: no more"):
            shape_of(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    else:
        shape_of(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.replaced is replaced
    assert model.calls == 0
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_the_mode_of_the_model_is_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    assert [layer.kind for layer in shape_of(model, torch.randn(2, 4)).layers] == ["linear", "reshape"]
    assert not model.training


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: shape_of("model", torch.ones(1)), "torch.nn.Module, got str"),
        (lambda: shape_of(nn.LazyLinear(3), torch.ones(1, 2)), "has no shape yet"),
        (lambda: shape_of(nn.Linear(2, 3)), "needs an input tensor with a batch axis"),
        (lambda: shape_of(nn.Linear(2, 3), torch.ones(0, 2)), "batch must be >= 1"),
        (lambda: shape_of(nn.Linear(2, 3), torch.ones(1, 5)), "Linear failed on the sample batch: RuntimeError"),
    ],
)
def test_what_cannot_be_counted(call, said):
    with pytest.raises(ConfigurationError, match=said):
        call()


def test_a_job_of_another_kind():
    data = Data(np.ones((4, 2)), np.ones(4), np.ones((4, 2)), np.ones(4))
    with pytest.raises(ConfigurationError, match="got str; let model"):
        job_shape(Job(model=lambda: "nothing", data=lambda: data, optimizer="sgd(lr=0.1)"))


def test_a_file_with_a_model_and_inputs(tmp_path):
    file = tmp_path / "small_network.py"
    file.write_text(
        "import torch\n\ndef model():\n    return torch.nn.Linear(3, 2)\n\ndef inputs():\n    return torch.ones(5, 3)\n"
    )
    found = shape_named(str(file))
    assert (found.name, found.parameters) == ("small_network", 8)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "must have job"),
        ("def model():\n    pass\n", "or both model"),
        (
            "def model():\n    return 1 / 0\n\ndef inputs():\n    pass\n",
            "ZeroDivisionError: division by zero at line 2",
        ),
        ("def model():\n    return 3\n\ndef inputs():\n    return 3\n", "got int"),
        ("import nowhere_at_all\n\ndef job():\n    pass\n", "ModuleNotFoundError"),
    ],
)
def test_a_file_that_declares_no_model(tmp_path, source, said):
    file = tmp_path / f"wrong_{abs(hash(source))}.py"
    file.write_text(source)
    with pytest.raises(ConfigurationError, match=said):
        file_shape(file)
