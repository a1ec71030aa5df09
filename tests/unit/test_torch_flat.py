"""The flat view of a torch module: frozen, tied, missing, refused."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flockstep.errors import ConfigurationError  # noqa: E402
from flockstep.frameworks.torch_flat import FlatModule  # noqa: E402


class Tied(nn.Module):
    """An encoder and a decoder with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.tanh(self.encode(x)))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def backward(module: nn.Module, inputs: int = 3) -> None:
    torch.manual_seed(1)
    module(torch.randn(6, inputs)).square().sum().backward()


def test_values_and_outputs_are_kept_and_memory_is_shared() -> None:
    module, same = mlp(), mlp()
    flat = FlatModule(module)
    assert [e.name for e in flat.schema.entries] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert flat.schema.size == 32
    expected = torch.cat([p.detach().reshape(-1) for p in same.parameters()]).numpy()
    assert np.array_equal(flat.params, expected)
    assert flat.params.flags.c_contiguous
    flat.params[:] = 0.5
    assert all((p == 0.5).all() for p in module.parameters())
    with torch.no_grad():
        module[2].bias.fill_(7)
    assert flat.params[-2:].tolist() == [7, 7]


def test_backward_writes_into_the_flat_gradient() -> None:
    module, same = mlp(), mlp()
    flat = FlatModule(module)
    backward(module)
    backward(same)
    expected = np.concatenate([p.grad.numpy().reshape(-1) for p in same.parameters()])
    assert np.array_equal(flat.grads, expected)
    assert flat.gather_gradients() is flat.grads
    backward(module)
    np.testing.assert_allclose(flat.grads, 2 * expected, rtol=1e-6)
    flat.zero_grad()
    assert not flat.grads.any()


def test_existing_gradients_are_kept() -> None:
    module, same = mlp(), mlp()
    backward(module)
    backward(same)
    flat = FlatModule(module)
    assert np.array_equal(flat.grads, np.concatenate([p.grad.numpy().reshape(-1) for p in same.parameters()]))


def test_flattening_twice_shares_the_arrays() -> None:
    module = mlp()
    first = FlatModule(module)
    backward(module)
    grads = first.grads.copy()
    second = FlatModule(module)
    assert np.array_equal(second.grads, grads)
    second.params[3] = 42
    second.grads[5] = 43
    assert first.params[3] == 42
    assert first.grads[5] == 43
    assert module[0].weight.flatten()[3] == 42


def test_a_copy_of_a_flat_module_has_arrays_of_its_own() -> None:
    module = mlp()
    flat = FlatModule(module)
    other = FlatModule(copy.deepcopy(module))
    other.params[:] = 0
    assert flat.params.any()


def test_channels_last_parameters_are_laid_out_in_the_order_of_their_shape() -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    expected = module.weight.detach().clone().contiguous().numpy().reshape(-1)
    flat = FlatModule(module)
    assert np.array_equal(flat.params[: len(expected)], expected)


def test_frozen_parameters_stay_out_and_untouched() -> None:
    module = mlp()
    module[0].weight.requires_grad_(False)
    frozen, memory = module[0].weight.clone(), module[0].weight.data_ptr()
    flat = FlatModule(module)
    assert [e.name for e in flat.schema.entries] == ["0.bias", "2.weight", "2.bias"]
    flat.params[:] = 9
    backward(module)
    flat.gather_gradients()
    assert torch.equal(module[0].weight, frozen)
    assert module[0].weight.data_ptr() == memory
    assert module[0].weight.grad is None


def test_tied_parameters_appear_once_and_keep_both_names() -> None:
    module = Tied()
    flat = FlatModule(module)
    assert [e.name for e in flat.schema.entries] == ["encode.weight", "decode.bias"]
    flat.params[:16] = np.arange(16)
    assert module.decode.weight is module.encode.weight
    assert module.decode.weight[3, 3] == 15
    backward(module, 4)
    loose = Tied()
    loose.load_state_dict(module.state_dict())
    backward(loose, 4)
    assert np.array_equal(flat.grads[:16], loose.encode.weight.grad.numpy().reshape(-1))


def test_gradients_made_anew_are_copied_in_and_bound_again() -> None:
    module, same = mlp(), mlp()
    flat = FlatModule(module)
    flat.grads[:] = 99
    module.zero_grad(set_to_none=True)
    backward(module)
    backward(same)
    assert (flat.grads == 99).all()
    flat.gather_gradients()
    assert np.array_equal(flat.grads, np.concatenate([p.grad.numpy().reshape(-1) for p in same.parameters()]))
    before = flat.grads.copy()
    backward(module)
    np.testing.assert_allclose(flat.grads, 2 * before, rtol=1e-6)


def test_a_missing_gradient_is_zero() -> None:
    module = mlp()
    flat = FlatModule(module)
    flat.grads[:] = 99
    module.zero_grad(set_to_none=True)
    module[0](torch.ones(1, 3)).sum().backward()
    assert [p.grad is None for p in module.parameters()] == [False, False, True, True]
    views = flat.schema.views(flat.gather_gradients())
    assert (views["0.bias"] == 1).all()
    assert not views["2.weight"].any()
    assert not views["2.bias"].any()
    assert all(p.grad is not None for p in module.parameters())
    assert flat.absent == [2, 3]
    assert (flat.grads == 99).sum() == 0


def test_a_parameter_of_one_number_has_its_shape() -> None:
    """Such as the temperature of a contrastive loss."""
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(2.0))
    flat = FlatModule(module)
    (module.scale * 3).backward()
    assert (module.scale.shape, flat.gather_gradients().tolist()) == (torch.Size(()), [3])


def test_gradients_set_to_zero_leave_a_parameter_without_one() -> None:
    module = mlp()
    flat = FlatModule(module)
    module.zero_grad(set_to_none=True)
    module[0](torch.ones(1, 3)).sum().backward()
    flat.zero_grad()
    assert [None if p.grad is None else bool(p.grad.any()) for p in module.parameters()] == [False, False, None, None]


def test_a_last_parameter_without_elements_has_a_gradient_without_a_sign() -> None:
    module = nn.Sequential(nn.Linear(3, 1), nn.Linear(3, 1, bias=False))
    module[1].empty = nn.Parameter(torch.empty(0))
    flat = FlatModule(module)
    flat.signs = True
    module.zero_grad(set_to_none=True)
    module[0](torch.ones(1, 3)).sum().backward()
    flat.gather_gradients()
    flat.drop_absent_everywhere()
    assert [p.grad is None for p in module.parameters()][:3] == [False, False, True]


def test_a_gradient_is_minus_zero_if_there_is_none() -> None:
    module = mlp()
    flat = FlatModule(module)
    flat.signs = True
    module.zero_grad(set_to_none=True)
    (-0.0 * module[0](torch.ones(1, 3)).sum()).backward()
    views = flat.schema.views(flat.gather_gradients())
    assert not flat.grads.any()
    assert [bool(np.signbit(view.reshape(-1)[0])) for view in views.values()] == [False, False, True, True]
    flat.drop_absent_everywhere()
    assert [p.grad is None for p in module.parameters()] == [False, False, True, True]


def test_sparse_gradients_become_dense() -> None:
    module = nn.Embedding(5, 2, sparse=True)
    flat = FlatModule(module)
    module.zero_grad(set_to_none=True)
    module(torch.tensor([1, 1, 4])).sum().backward()
    assert flat.gather_gradients().tolist() == [0, 0, 2, 2, 0, 0, 0, 0, 1, 1]


def test_gradients_of_another_array_are_used_where_they_are_until_the_next_ones() -> None:
    """An optimizer reads and changes the other array itself; the flat array holds what backward passes add to it."""
    module = mlp()
    flat = FlatModule(module)
    flat.gather_in_backward()
    home, other = flat.grads, np.full(len(flat.grads), 2, np.float32)
    with flat.using(other):
        assert flat.grads is other
        nn.utils.clip_grad_value_(module.parameters(), 1.0)
    assert flat.grads is home
    assert (other == 1).all()
    assert not home.any()
    assert all((p.grad == 1).all() for p in module.parameters())
    backward(module)
    same = mlp()
    backward(same)
    expected = 1 + np.concatenate([p.grad.numpy().reshape(-1) for p in same.parameters()])
    np.testing.assert_allclose(flat.gather_gradients(), expected, rtol=1e-6)
    other[:] = 99
    np.testing.assert_allclose(flat.grads, expected, rtol=1e-6)
    with flat.using(other):
        pass
    module[2].weight.grad = None
    flat.return_gradients()
    other[:] = 0
    views = flat.schema.views(flat.grads)
    assert (views["0.weight"] == 99).all()
    assert module[2].weight.grad is None
    with flat.using(other):
        pass
    flat.zero_grad()
    assert all(flat.in_place(index) for index in range(4))


def test_buffers_are_named_and_not_flat() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    flat = FlatModule(module)
    assert set(flat.buffers()) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert flat.buffers()["1.running_mean"] is module[1].running_mean
    assert [e.name for e in flat.schema.entries] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_views_of_a_matrix() -> None:
    flat = FlatModule(mlp())
    matrix = torch.arange(64.0).view(2, 32)
    weight, bias, *_ = flat.views(matrix)
    assert weight.shape == (2, 5, 3)
    assert bias[1].tolist() == [47, 48, 49, 50, 51]
    assert weight.data_ptr() == matrix.data_ptr()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    flat = FlatModule(mlp().to(getattr(torch, dtype)))
    assert (flat.schema.dtype, flat.params.dtype, flat.grads.dtype) == (dtype, dtype, dtype)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "complex64"])
def test_unsupported_dtypes_are_refused_by_name(dtype: str) -> None:
    module = nn.ParameterDict({"strange": nn.Parameter(torch.zeros(2, dtype=getattr(torch, dtype)))})
    with pytest.raises(ConfigurationError, match=f"'strange' must be one of .*bfloat16.*, got {dtype}"):
        FlatModule(module)


def test_a_module_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be on one device and have values, got 'weight' on meta"):
        FlatModule(nn.Linear(2, 2, device="meta"))


def test_a_parameter_without_a_shape_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch call lazy modules new
        module = nn.LazyLinear(2)
    with pytest.raises(ConfigurationError, match="'weight' has no shape yet"):
        FlatModule(module)


WRAPPED = """
import torch
from torch import nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from flockstep.runtime.torch_guard import require_unwrapped
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule

def refused(call):
    try:
        call()
    except ConfigurationError as error:
        print(error)
    else:
        print("taken")

init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
net = lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
refused(lambda: FlatModule(fully_shard(net(), mesh=init_device_mesh("cpu", (1,)))))
refused(lambda: FlatModule(FullyShardedDataParallel(net(), device_id=torch.device("cpu"))))
refused(lambda: require_unwrapped(DistributedDataParallel(net()), 2))
refused(lambda: require_unwrapped(DistributedDataParallel(net()), 1))
destroy_process_group()
"""


def test_modules_that_torch_wraps_are_refused() -> None:
    """In a process of its own, because torch.distributed imports the compiler, which tests do without."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", WRAPPED], capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr
    sharded, wrapped, averaged, alone = done.stdout.splitlines()
    assert sharded == "taken"
    assert wrapped.startswith("the module is wrapped in FullyShardedDataParallel, whose parameters are no DTensors")
    assert averaged.startswith("the module is wrapped in DistributedDataParallel, which averages gradients before")
    assert alone == "taken"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_gradients_take_no_memory_before_they_are_written() -> None:
    """The run moves them to memory that workers share before the first backward pass."""
    module = nn.Linear(4096, 4096, bias=False)
    before = resident()
    flat = FlatModule(module)
    assert not flat.grads.any()
    assert resident() - before < flat.grads.nbytes // 2
    flat.grads[:] = 1
    assert resident() - before > flat.grads.nbytes // 2


def resident() -> int:
    """Bytes of memory that this process has written to."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(1024 * int(size) for size in re.findall(r"Anonymous:\s+(\d+) kB", text))


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        FlatModule(mlp().requires_grad_(False))


def test_parameters_that_share_memory_without_being_one_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = nn.Parameter(module[0].weight.data)
    with pytest.raises(ConfigurationError, match=r"'0\.weight' and '1\.weight' must not share memory"):
        FlatModule(module)
    module.requires_grad_(False)
    module[0].bias.requires_grad_(True)
    FlatModule(module)


def test_frozen_neighbors_in_one_buffer_are_left_alone() -> None:
    module = mlp()
    FlatModule(module)
    module[0].weight.requires_grad_(False)
    flat = FlatModule(module)
    kept = module[0].weight.clone()
    flat.params[:] = 1
    assert torch.equal(module[0].weight, kept)
    assert (module[2].weight == 1).all()
