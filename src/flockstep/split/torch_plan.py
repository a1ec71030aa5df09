"""How PyTorch divides a job's model over the processes of a replica: what FSDP2 gathers together, and which layers
tensor parallelism splits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- what every user of torch calls it
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Job
from flockstep.frameworks.torch import TorchEngine
from flockstep.partitions.base import JointPartition
from flockstep.partitions.split_facts import SplitFacts
from flockstep.partitions.tensor import TensorParallel
from flockstep.split.torch_chain import ChainLayer
from flockstep.split.torch_held import hooked, is_elementwise_layer, kind_of, opened_chain

TRIALS = 64
"""Largest number of batches of targets with which a loss is compared with the cross entropy. An output layer with more
classes than these batches contain is not split.
"""
CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict


@dataclass(frozen=True)
class DivisionPlan:
    """What `fully_shard` and `parallelize_module` do to a model."""

    gathered: tuple[str, ...] = ()
    """Modules whose parameters FSDP2 gathers together, those inside of others first; the last is the rest."""
    split: Mapping[str, ParallelStyle] | None = None
    """Module → how tensor parallelism splits it."""
    first: str | None = None
    """The module to which each process gives its own samples, if leading modules are divided by samples."""

    def divide(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Divide a module over the processes of `mesh`, in place.

        Raises:
            ConfigurationError: weights that layers share would be separated.
        """
        before = [name for name, _ in module.named_parameters()]
        for name in self.gathered:
            unit: Any = fully_shard(module.get_submodule(name), mesh=mesh, reshard_after_forward=self.split is None)
            unit.set_force_sum_reduction_for_comms(True)  # the loss of each process is its share of the mean
            unit.set_gradient_divide_factor(1.0)
        if self.split:
            parallelize_module(module, mesh, dict(self.split), src_data_rank=None)
        after = [name for name, _ in module.named_parameters()]
        if apart := next((name for name in after if name not in before), None):
            raise ConfigurationError(
                f"layers that share weights must stay together, got {apart!r} apart from the layer that shares it; "
                "leave both out of the parallel_plan, or give each its own weights"
            )
        if self.first is not None:
            rank, size = mesh.get_local_rank(), mesh.size()
            module.get_submodule(self.first).register_forward_pre_hook(lambda _, given: given[0].chunk(size)[rank])


def sharded_plan(module: nn.Module, called: Sequence[str]) -> DivisionPlan:
    """Return the plan of FSDP2: each layer of a chain or a list is gathered on its own, and the rest with the whole.

    Layers that share weights, and those that are not among the `called` modules, belong to the rest.
    """
    names = {one: name for name, one in module.named_modules()}
    uses = Counter(id(p) for one in names for p in one.parameters(recurse=False))
    units = [one for one in _leading(module) if next(one.parameters(), None) is not None]
    return DivisionPlan(
        (*(names[one] for one in units if names[one] in called and all(uses[id(p)] == 1 for p in one.parameters())), "")
    )


def _leading(module: nn.Module) -> list[nn.Module]:
    """The outermost elements of chains and lists of modules."""
    found = []
    for child in module.children():
        listed = isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS)
        found += [child] if listed else _leading(child)
    return found


def tensor_plan(module: nn.Module, partition: TensorParallel, job: Job, classifies: bool) -> DivisionPlan:
    """Return the plan of tensor parallelism that the job gives, or that follows from the layers of its model;
    `classifies`: whether the outputs go into a mean cross entropy.

    Raises:
        ConfigurationError: no layer can be split, or no leading layer can be divided by samples.
    """
    ways, chain = partition.ways, _chain(module)
    given = job.parallel_plan
    split = dict(_named(given, module)) if given else _Layers(module, ways).split(chain, classifies)
    if not split:
        kinds = ", ".join(dict.fromkeys(kind_of(one.module) for one in chain) or [type(module).__name__])
        raise ConfigurationError(
            f"no layer of the model of job {job.name!r} can be split over {ways} ways, got {kinds}; two nn.Linear with "
            "activations between them, an nn.Embedding, an nn.TransformerEncoderLayer(batch_first=True) or an "
            "nn.Linear before a cross entropy can; give the job a parallel_plan, or use fewer ways, a pipeline, "
            "sharded, or partition=none"
        )
    if partition.convolutions == "replicated":
        return DivisionPlan(split=split)
    first = next((at for at, layer in enumerate(chain) if any(_within(name, layer.name) for name in split)), 0)
    leading = [layer.name for layer in chain[:first] if next(layer.module.parameters(), None) is not None]
    style = split.get(chain[first].name) if chain else None
    if not leading or not isinstance(style, ColwiseParallel):
        raise ConfigurationError(
            "convolutions=divided needs layers with parameters before the first split layer, which is an nn.Linear, "
            f"got {', '.join(leading) or 'no layer'}; use convolutions=replicated"
        )
    split[chain[first].name] = ColwiseParallel(input_layouts=Shard(0))
    return DivisionPlan(tuple(leading), split, chain[0].name)


def _within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _chain(module: nn.Module) -> list[ChainLayer]:
    try:
        return opened_chain(module, "this job")
    except ConfigurationError:  # neither a chain nor traceable
        return []


class _Layers:
    """Finds the layers of a model that can be split over ways."""

    def __init__(self, module: nn.Module, ways: int):
        self._ways = ways
        self._names = {one: name for name, one in module.named_modules()}
        self._uses = Counter(id(p) for one in module.modules() for p in one.parameters(recurse=False))

    def split(self, chain: Sequence[ChainLayer], classifies: bool) -> dict[str, ParallelStyle]:
        """Return module → style; `classifies`: whether the last layer's outputs go into a mean cross entropy."""
        found: dict[str, ParallelStyle] = {}
        for module, name in self._names.items():
            if isinstance(module, nn.TransformerEncoderLayer) and self._can(module):
                if module.self_attn.batch_first and module.self_attn.num_heads % self._ways == 0:
                    found[f"{name}.self_attn"] = HeadsParallel()
                if module.activation_relu_or_gelu in (1, 2) and module.linear1.out_features % self._ways == 0:
                    found |= self._pair(f"{name}.linear1", [(f"{name}.dropout", module.dropout)], f"{name}.linear2")
            elif isinstance(module, nn.Embedding) and self._can(module) and self._fits(module.num_embeddings):
                found[name] = RowwiseParallel(input_layouts=Replicate())
        at = 0
        while at < len(chain):
            first, end = chain[at], at + 1
            if type(first.module) is nn.Linear and self._can(first.module) and self._fits(first.module.out_features):
                while end < len(chain) and is_elementwise_layer(chain[end].module):
                    end += 1
                second = chain[end].module if end < len(chain) else None
                if type(second) is nn.Linear and self._can(second) and first.module.out_features % self._ways == 0:
                    between = [(one.path, one.module) for one in chain[at + 1 : end]]
                    found |= self._pair(first.path, between, chain[end].path)
                    end += 1
                elif at == len(chain) - 1 and classifies:
                    found[first.path] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            at = end
        return found

    @staticmethod
    def _pair(first: str, between: Sequence[tuple[str, nn.Module]], second: str) -> dict[str, ParallelStyle]:
        draws = {name: DrawsApart() for name, module in between if isinstance(module, nn.Dropout)}
        return {first: ColwiseParallel(), **draws, second: RowwiseParallel()}

    def _can(self, module: nn.Module) -> bool:
        """Whether a module does nothing besides, and its parameters are trained and used once."""
        alone = all(one.requires_grad and self._uses[id(one)] == 1 for one in module.parameters())
        plain = type(module) in (nn.Linear, nn.Embedding, nn.TransformerEncoderLayer)
        free = not isinstance(module, nn.Embedding) or (module.max_norm is None and not module.scale_grad_by_freq)
        padded = getattr(module, "padding_idx", None) is not None
        return plain and alone and free and not padded and not any(map(hooked, module.modules()))

    def _fits(self, size: int) -> bool:
        """Whether each way gets some of `size` features or words, as torch divides them."""
        return -(-size // self._ways) * (self._ways - 1) < size


class HeadsParallel(ParallelStyle):
    """Splits the self-attention of an `nn.MultiheadAttention(batch_first=True)` by heads (Shoeybi et al. 2019,
    section 3).
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        heads, width = module.num_heads, module.head_dim

        def divided(parameter: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
            values = parameter.detach().view(shape)
            return nn.Parameter(distribute_tensor(values, device_mesh, [Shard(1)], src_data_rank=None))

        module.in_proj_weight = divided(module.in_proj_weight, (3, heads, width, -1))
        if module.in_proj_bias is not None:
            module.in_proj_bias = divided(module.in_proj_bias, (3, heads, width))
        module.out_proj.weight = divided(module.out_proj.weight, (-1, heads, width))
        module.forward = partial(_attend, module, device_mesh)
        return module  # type: ignore[no-any-return]


def _attend(
    module: Any,
    mesh: DeviceMesh,
    *inputs: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = False,
    is_causal: bool = False,
) -> tuple[torch.Tensor, None]:
    """Compute self-attention, whose three inputs are equal, with this process's heads, and sum all processes' terms."""
    samples, length, _ = inputs[0].shape
    entering: Any = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
    x = entering.to_local(grad_placements=[Partial()])
    bias = None if module.in_proj_bias is None else module.in_proj_bias.to_local().flatten()
    mixed = F.linear(x, module.in_proj_weight.to_local().flatten(0, 2), bias)
    heads = mixed.view(samples, length, 3, -1, module.head_dim).permute(2, 0, 3, 1, 4)
    mask = attn_mask
    if key_padding_mask is not None:
        hidden = key_padding_mask[:, None, None, :]
        mask = hidden if mask is None else mask + hidden
    with drawing_apart(mesh):
        found = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask, dropout_p=module.dropout)
    term = F.linear(found.transpose(1, 2).reshape(samples, length, -1), module.out_proj.weight.to_local().flatten(1))
    summed: Any = DTensor.from_local(term, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    whole: torch.Tensor = summed.to_local()
    return whole if module.out_proj.bias is None else whole + module.out_proj.bias, None


class DrawsApart(ParallelStyle):
    """Lets a module between split layers draw other random numbers on each process."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward = module.forward

        def apart(*given: Any) -> Any:
            with drawing_apart(device_mesh):
                return forward(*given)

        module.forward = apart
        return module


@contextmanager
def drawing_apart(mesh: DeviceMesh) -> Iterator[None]:
    """Return a context in which each process draws its own random numbers; outside, all draw the same."""
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + mesh.get_local_rank())
        yield


def classifies(whole: TorchEngine) -> bool:
    """Whether the loss is the mean cross entropy of the outputs, tried on the outputs of a batch with every class.

    Each trial has class 0 besides others, so that a loss in which classes have different weights is noticed.
    """
    samples, targets = whole.samples(whole.trial_samples)
    if targets.dtype != torch.int64:
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = whole.buffers(0)
        outputs = whole.module(samples)
        whole.restore_buffers(0, before)
        if not isinstance(outputs, torch.Tensor) or outputs.shape[:-1] != targets.shape:
            return False
        others, classes = targets.numel() - 1, outputs.shape[-1]
        if classes > TRIALS * others:
            return False
        for trial in range(-(-classes // others)):
            tried = torch.zeros(targets.numel(), dtype=torch.int64)
            tried[1:] = (torch.arange(others) + trial * others) % classes
            tried = tried.reshape(targets.shape)
            mean = nn.functional.cross_entropy(outputs.flatten(0, -2), tried.flatten())
            if not torch.isclose(whole.loss(outputs, tried), mean, rtol=whole.tolerance, atol=0):
                return False
    return True


def called_modules(whole: TorchEngine) -> tuple[str, ...]:
    """Return the names of the modules that a forward pass over a batch calls."""
    names, found = {one: name for name, one in whole.module.named_modules()}, dict[str, None]()
    handles = [one.register_forward_pre_hook(lambda module, _: found.update({names[module]: None})) for one in names]
    before = whole.buffers(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        whole.module(whole.samples(whole.trial_samples)[0])
    whole.restore_buffers(0, before)
    for handle in handles:
        handle.remove()
    return tuple(found)


def plan_of(module: nn.Module, partition: JointPartition, job: Job, facts: SplitFacts) -> DivisionPlan:
    """Return how a partition divides the model of `job`."""
    if isinstance(partition, TensorParallel):
        return tensor_plan(module, partition, job, facts.cross_entropy)
    return sharded_plan(module, facts.called)


def _named(plan: Mapping[str, ParallelStyle], module: nn.Module) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield the modules that the patterns of a job's plan name, with their styles; raise `ConfigurationError` if a
    pattern names none.
    """
    names = [name for name, _ in module.named_modules()]
    for pattern, style in plan.items():
        words = pattern.split(".")
        found = [
            name for name in names if len(name.split(".")) == len(words) and all(map(fnmatch, name.split("."), words))
        ]
        if not found:
            raise ConfigurationError(
                f"the parallel_plan must name modules of the model, got {pattern!r}; choose among "
                f"{', '.join(names[1:])}"
            )
        yield from ((name, style) for name in found)
