"""A torch job whose replicas are divided over processes by FSDP2 or tensor parallelism: the whole model as the engine
of virtual time, and one process's share of a replica.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import loss_parallel

from flockstep.arrays.namespace import as_tensor
from flockstep.arrays.schema import Entry, FlatArray, slices
from flockstep.errors import ConfigurationError, FlockstepError, in_short
from flockstep.frameworks.base import Indices, Job
from flockstep.frameworks.torch import Tensors, TorchEngine
from flockstep.frameworks.torch_dtensors import aligned, local
from flockstep.partitions.base import JointPartition
from flockstep.partitions.sharded import Sharded
from flockstep.partitions.split_facts import SplitFacts
from flockstep.partitions.tensor import TensorParallel
from flockstep.split.joint import JointModel, Timeline, WayExchange
from flockstep.split.torch_held import (
    Held,
    of_all_samples,
    trained_entries,
)
from flockstep.split.torch_plan import DivisionPlan, called_modules, classifies, plan_of
from flockstep.split.torch_recorder import Recorder, pretended
from flockstep.split.torch_stages import (
    PartsEngine,
    TorchHeldPart,
    WholeTorch,
    check_loss,
    difference_in_shares,
    engine_for,
    engine_of,
    without_dropout,
)


class WholeEngine(PartsEngine):
    """The engine of a model whose replicas are computed whole, with the buffers of the unsplit model."""

    def buffers(self, replica: int) -> FlatArray:
        return self.unsplit.buffers(replica)

    def restore_buffers(self, replica: int, values: FlatArray) -> None:
        """Set a replica's buffers; `values` may have those of all parts, which are equal."""
        self.unsplit.restore_buffers(replica, values[: len(self.buffers(replica))])

    def bring_buffers(self, replica: int) -> None:
        """Do nothing: the unsplit model has its buffers."""


@dataclass(frozen=True, eq=False)
class TorchJointModel(JointModel):
    """A torch job whose model PyTorch divides over the processes of a replica."""

    plan: DivisionPlan
    times: dict[int, Timeline] = field(default_factory=dict)
    """Number of samples → what a process does for such a batch, as far as it is known."""

    @property
    def whole(self) -> TorchEngine:
        """The engine of the unsplit model."""
        return engine_of(self).unsplit

    def require_batch(self, samples: int) -> None:
        self.partition.require_samples(samples)
        if self.plan.first is not None and samples % self.partition.shares:
            raise ConfigurationError(
                f"every batch must be a multiple of the {self.partition.shares} ways of {self.partition}, got "
                f"{samples}; use another batch"
            )

    def timeline(self, samples: int) -> Timeline:
        """Return what a process does for a batch, found by letting one compute it among others that are pretended."""
        if samples not in self.times:
            module = copy.deepcopy(self.whole.module)
            indices = np.arange(samples) % self.whole.train_size
            x, y = self.whole.samples(indices)
            alone, params = Recorder(), self.parts[0].initial()
            with alone, self.whole.stream(0, 0):
                self.whole.loss(module(x), y).backward()
            for parameter in module.parameters():
                parameter.grad = None
            with pretended(len(self.parts)) as mesh:
                replica, recorder = DividedReplica(self, module, mesh), Recorder()
                with recorder:
                    replica.gradient(params, indices, np.zeros_like(params))
            self.times[samples] = recorder.timeline(alone.operations, len(self.parts))
        return self.times[samples]

    def tried(self, obstacle: str) -> TorchJointModel:
        """Return the model with facts for processes that hold parts: loss and gradient of a batch, and the `obstacle`
        to building parts alone.
        """
        whole, params = self.whole, self.engine.initial()
        slope, before = np.empty_like(params), whole.buffers(0)
        with without_dropout(whole.module), torch.random.fork_rng(devices=[]):
            state = torch.get_rng_state()
            whole.module(whole.samples(whole.trial_samples)[0])
            draws = not torch.equal(state, torch.get_rng_state())
            whole.restore_buffers(0, before)
            loss = self.engine.gradient(params, whole.trial_samples, slope)
        whole.restore_buffers(0, before)
        size = float(np.linalg.norm(slope.astype(np.float64)))
        trial = None if draws or not math.isfinite(size) else (loss, size)
        return replace(self, facts=replace(self.facts, trial=trial, obstacle=obstacle))

    def opened(self, params: FlatArray | None, replica: int, mesh: DeviceMesh) -> DividedReplica:
        """Divide the model of this process over those of `mesh`, and compare loss and gradient of one batch with the
        unsplit model's, unless `params` (K,), the initial parameters of this process's part, are None.

        Raises:
            ConfigurationError: the processes together compute something else than the model.
        """
        engine, whole = engine_of(self), engine_of(self).whole
        module = whole.detached() if isinstance(whole, TorchEngine) else whole.module
        divided = DividedReplica(self, module, mesh)
        buffers = engine.buffers_of(replica)
        divided.fill(engine.constants | buffers)
        if self.facts.trial is None or params is None:
            return divided
        before, slope = {name: one.clone() for name, one in buffers.items()}, np.empty_like(params)
        with without_dropout(module):
            own = divided.gradient(params, whole.trial_samples, slope)
        for name, one in before.items():
            buffers[name].copy_(one)
        squares = torch.tensor(float((slope.astype(np.float64) ** 2).sum()), dtype=torch.float64)
        dist.all_reduce(squares, group=mesh.get_group())
        (loss, size), found = self.facts.trial, math.sqrt(squares.item())
        if not (abs(own - loss) <= whole.tolerance * abs(loss) and abs(found - size) <= whole.tolerance * size):
            raise ConfigurationError(
                f"the {mesh.size()} processes of {self.partition} must compute what the model computes, got a loss of "
                f"{own:.6g} instead of {loss:.6g} and a gradient of size {found:.6g} instead of {size:.6g}; change the "
                "job's parallel_plan or what its layers do besides, or use partition=none"
            )
        return divided


def join_torch(job: Job, seed: int, partition: JointPartition, known: SplitFacts | None = None) -> TorchJointModel:
    """Build the job's model, and find out how PyTorch divides it over the processes of a replica. With `known`, the
    facts that another process has found, the model is built without values unless the facts name an obstacle.

    Raises:
        ConfigurationError: PyTorch cannot divide the model, or its parts would train another model.
    """
    whole = engine_for(job, seed, known)
    if known is not None:
        return _joined(job, whole, partition, known)
    assert isinstance(whole, TorchEngine)
    called, changing = called_modules(whole), tuple(whole.changing_buffers)
    cross = isinstance(partition, TensorParallel) and classifies(whole)
    facts = SplitFacts((), changing, whole.random, 0, cross, called=called)
    try:
        return _joined(job, whole, partition, facts)
    except ConfigurationError:
        if not cross or job.parallel_plan is not None:
            raise
    # a loss may be the cross entropy, and not compute with outputs of which each process has a part
    return _joined(job, whole, partition, replace(facts, cross_entropy=False))


def _joined(job: Job, whole: WholeTorch, partition: JointPartition, known: SplitFacts) -> TorchJointModel:
    who, ways, first_time = f"job {job.name!r}", partition.parts, isinstance(whole, TorchEngine) and not known.obstacle
    plan = plan_of(whole.module, partition, job, known)
    with dividing(who, ways), pretended(ways) as mesh:
        held = _held(whole, plan, mesh, who)
    engine = (WholeEngine if first_time else PartsEngine)(whole, held, known.changing)
    others = {name: one for name, one in _named(whole.module) if not one.requires_grad}
    parts = tuple(TorchHeldPart(engine, number, others, known.changing) for number in range(ways))
    names = ", ".join(plan.split or [name or "the rest" for name in plan.gathered])
    words = tuple(f"part {way} of {names}" for way in range(ways))
    joint = TorchJointModel(engine, parts, words, known, partition, plan=plan)
    if first_time:
        if partition.shares > 1:
            _require_separate_samples(joint, joint.whole, job.batch, who)
        with dividing(who, ways):
            joint.timeline(job.batch)
    return joint


def with_trial(split: TorchJointModel, job: Job, seed: int) -> TorchJointModel:
    """Return the model with facts for processes that hold parts, one of which is tried here without values."""
    part, ways = split.parts[0], len(split.parts)
    try:
        bare = join_torch(job, seed, split.partition, split.facts)
        params = bare.parts[0].take(part.values())
        with pretended(ways) as mesh:
            replica = bare.opened(None, 0, mesh)
            replica.gradient(params, split.whole.trial_samples, np.empty_like(params))
    except Exception as error:  # noqa: BLE001 - whatever the user's model raises is the reason
        why = f"a part without the whole model raised {in_short(error)}; do not compute with values in constructors"
        return split.tried(str(error) if isinstance(error, ConfigurationError) else why)
    return split.tried("")


@contextmanager
def dividing(who: str, ways: int) -> Iterator[None]:
    """Return a context in which PyTorch divides a model; raise `ConfigurationError` for what it raises."""
    try:
        yield
    except FlockstepError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"PyTorch must divide the model of {who} over {ways} processes, and compute a batch, got "
            f"{in_short(error)}; change the model or its parallel_plan, or use partition=none"
        ) from error


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _require_separate_samples(joint: TorchJointModel, whole: TorchEngine, batch: int, who: str) -> None:
    """Raise `ConfigurationError` unless processes may compute shares of a batch."""
    partition, ways = joint.partition, joint.partition.shares
    joint.require_batch(batch)
    first = joint.plan.first
    norms = [one for one in of_all_samples(whole) if first is None or _leads(one, joint.plan)]
    why = next(iter(norms), None)
    if first is None:
        check_loss(engine_of(joint), whole, ways, who, "partition=none")
        why = why or difference_in_shares(joint, ways)
    if why:
        raise ConfigurationError(
            f"the ways of {partition} compute different samples, so that layers must compute each sample on its own, "
            f"got {why} of {who}; use for example nn.GroupNorm, or partition=none"
        )


def _leads(words: str, plan: DivisionPlan) -> bool:
    """Whether a layer, in words as `of_all_samples` returns them, is one that is divided by samples."""
    names = words.split()
    return any(name == one or name.startswith(f"{one}.") for name in names for one in plan.gathered)


def _held(whole: WholeTorch, plan: DivisionPlan, mesh: DeviceMesh, who: str) -> list[list[Held]]:
    """Return what each process trains, of a copy of the model without values that is divided over `mesh`.

    Of the parameters that every process computes with, laid out one after another, each trains an equal span.
    """
    module, entries = _without_values(whole.module), trained_entries(whole.schema)
    plan.divide(module, mesh)
    found = [list[Held]() for _ in range(mesh.size())]
    common = list[Entry]()
    for name, given in module.named_parameters():
        parameter: Any = given
        if name not in entries:
            continue
        if not isinstance(parameter, DTensor) or parameter.placements[0].is_replicate():
            common.append(entries[name])
            continue
        for way, part in enumerate(found):
            place = _place_of(parameter, way)
            shape = tuple(one.stop - one.start for one in place)
            one = Held(f"{name} (part {way})", entries[name], shape, place, tuple(parameter.shape))
            part += [one] if one.size else []
    spans = slices(sum(one.size for one in common), len(found))
    for way, part in enumerate(found):
        part += _within(common, spans[way], way)
        if not part:
            raise ConfigurationError(
                f"every process of a replica must hold parameters, got none for process {way} of {len(found)} in "
                f"{who}, whose tensors have too few rows; use fewer ways, or partition=none"
            )
    return found


def _within(common: Sequence[Entry], span: slice, way: int) -> Iterator[Held]:
    """Return the pieces of parameters, laid out one after another, that lie in a span."""
    begin = 0
    for one in common:
        start, stop = max(span.start - begin, 0), min(span.stop - begin, one.size)
        if start < stop:
            index, view = (slice(start, stop),), (one.size,)
            yield Held(f"{one.name} (part {way})", one, (stop - start,), index, view, start)
        begin += one.size


def _place_of(parameter: Any, way: int) -> tuple[slice, ...]:
    """Return which elements of a DTensor a process holds."""
    where = parameter.shape, parameter.device_mesh.shape, [way], parameter.placements
    shape, offset = _compute_local_shape_and_global_offset(*where)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose tensors have shapes but no memory."""
    memo: dict[int, Any] = {}
    for one in module.parameters():
        memo[id(one)] = nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


class DividedReplica:
    """A replica that several processes compute together, of which this is one."""

    def __init__(self, model: TorchJointModel, module: nn.Module, mesh: DeviceMesh):
        """Divide `module`, a copy of the model, over the processes of `mesh`, in place."""
        model.plan.divide(module, mesh)
        self._module, self._whole, self._group = module.train(), engine_of(model).whole, mesh.get_group()
        self._way, self._ways = mesh.get_local_rank(), mesh.size()
        self._by_samples, self._held = isinstance(model.partition, Sharded), engine_of(model).held
        self._own = self._held[self._way]
        self._parameters: dict[str, torch.Tensor] = dict(module.named_parameters())
        self._spans = [sum(one.size for one in part if one.start is not None) for part in self._held]
        """Number of elements that each process trains of the parameters with which all compute."""
        self._sent: dict[int, float] = {}
        """Number of samples → bytes that a process sends to others of its replica, in a ring."""

    @torch.no_grad()
    def fill(self, values: Tensors) -> None:
        """Give a module that was built without values memory, and `values` to its frozen parameters. Let the tensors of
        `values` be its buffers.
        """
        if any(one.is_meta for _, one in _named(self._module)):
            self._module.to_empty(device="cpu")
        self._parameters = dict(self._module.named_parameters())
        for name, parameter in self._parameters.items():
            if name in values:
                whole = values[name].view(parameter.shape)
                own = whole[_place_of(parameter, self._way)] if isinstance(parameter, DTensor) else whole
                local(parameter).copy_(own)
        for name, _ in list(self._module.named_buffers()):
            if name in values:
                owner, _, key = name.rpartition(".")
                self._module.get_submodule(owner)._buffers[key] = values[name]

    def gradient(self, params: FlatArray, indices: Indices, out: FlatArray, replica: int = 0, step: int = 0) -> float:
        """Write the gradient of this process's part over the samples `indices`, which are the same on all processes,
        into `out` (K,); return the mean loss. All processes of the replica call this at the same point.
        """
        self._place(as_tensor(params))
        own, part = indices, list[int]()
        if self._by_samples:
            own, part = indices[slices(len(indices), self._ways)[self._way]], [self._way]
        x, y = self._whole.samples(own)
        with nullcontext() if self._by_samples else loss_parallel():
            with self._whole.stream(replica, step, *part):
                loss = self._whole.loss(self._module(x), y) * (len(own) / len(indices))
            loss.backward()
        self._take(as_tensor(out))
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        total = value.detach().double()
        if self._by_samples:
            dist.all_reduce(total, group=self._group)
        return float(total)

    def counted(
        self, params: FlatArray, indices: Indices, out: FlatArray, replica: int, step: int
    ) -> tuple[float, float]:
        """Compute `gradient`; return the loss, and the bytes that this process sent to others of its replica, in a
        ring, which are counted the first time for a number of samples.
        """
        samples = len(indices)
        with nullcontext() if samples in self._sent else Recorder() as recorder:
            loss = self.gradient(params, indices, out, replica, step)
        if recorder is not None:
            every = (one.sent(self._ways) for one in recorder.work if isinstance(one, WayExchange))
            self._sent[samples] = sum(every)
        return loss, self._sent[samples]

    @torch.no_grad()
    def _place(self, flat: torch.Tensor) -> None:
        """Give the module the values of this process's part, and of the parameters that other processes train."""
        start = 0
        for one in self._own:
            if one.start is None:
                self._value(one).copy_(flat[start : start + one.size].view(one.shape))
                start += one.size
        if room := max(self._spans):
            padded, every = flat.new_zeros(room), flat.new_empty(room * self._ways)
            padded[: len(flat) - start] = flat[start:]
            dist.all_gather(list(every.chunk(self._ways)), padded, group=self._group)
            for way, part in enumerate(self._held):
                start = way * room
                for one in part:
                    if one.start is not None:
                        self._span(self._value(one), one).copy_(every[start : start + one.size])
                        start += one.size

    def _take(self, out: torch.Tensor) -> None:
        """Move the gradients of this process's part to `out`."""
        start = 0
        for one in self._own:
            place, parameter = out[start : start + one.size].view(one.shape), self._parameters[one.entry.name]
            if parameter.grad is None:
                place.zero_()
            else:
                place.copy_(self._span(local(aligned(parameter.grad, parameter)), one))
            start += one.size
        for parameter in self._parameters.values():
            parameter.grad = None

    @staticmethod
    def _span(tensor: torch.Tensor, one: Held) -> torch.Tensor:
        """Return what a process trains of a tensor that it computes with."""
        return tensor if one.start is None else tensor.view(-1)[one.start : one.start + one.size]

    def _value(self, one: Held) -> torch.Tensor:
        return local(self._parameters[one.entry.name])
