"""Gradients of a torch module, for one replica at a time, or for many replicas in one call."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flockstep.arrays.factors import FactoredWeight, Packing
from flockstep.arrays.namespace import as_tensor
from flockstep.arrays.schema import FlatArray, Schema, slices
from flockstep.errors import ConfigurationError, in_short
from flockstep.frameworks.base import Data, DistillationTargets, Engine, Evaluation, Indices, Job, JobData, metric_of
from flockstep.frameworks.streams import SampleColumn
from flockstep.frameworks.torch_call import Substituted, called, combined, distance, evaluate
from flockstep.frameworks.torch_flat import FlatBackward, FlatModule
from flockstep.frameworks.torch_optimizers import from_torch
from flockstep.optimizers.base import Optimizer

__all__ = ["TorchEngine", "accuracy", "from_torch"]

LARGEST_CHUNK = 64
"""Maximum number of replicas in one batched call. More replicas would use more memory without being faster."""
CHUNK_BYTES = 128 << 20
"""Approximate limit in bytes of the gradients and saved activations of one batched call."""
TOLERANCE = {"bfloat16": 1e-1, "float16": 2e-2, "float32": 1e-4, "float64": 1e-9}
"""Dtype → largest relative distance between a batched and a plain gradient that is attributed to rounding."""

Tensors = dict[str, torch.Tensor]
Factors = tuple[FlatArray, FlatArray]


class TensorData(JobData):
    """The data of a job as tensors, and the random numbers of torch that its model draws."""

    schema: Schema
    _seed: int
    random = False
    """Whether the model draws random numbers in training."""

    def _use(self, job: Job, data: Data, parameters: Sequence[torch.Tensor]) -> None:
        """Set what an engine knows from the job and its data; `parameters`: those of the `schema`, in its order."""
        self.optimizer, self.higher_is_better = optimizer_of(job, self.schema, parameters), job.higher_is_better
        self._batch_size = job.batch
        self._data = tensors_of(data, reduce(torch.promote_types, (p.dtype for p in parameters)))
        self.train_size, y = len(self._data.train_x), self._data.train_y
        self.classes = y.dtype == torch.int64 and y.dim() == 1
        self.labels = y.numpy() if self.classes else None

    @property
    def trial_samples(self) -> Indices:
        """Training samples of one batch for trials, evenly spaced, because data may be sorted by class."""
        count = min(self._batch_size, self.train_size)
        return np.arange(count) * self.train_size // count

    @property
    def tolerance(self) -> float:
        """Largest relative distance between two gradients of this model that is attributed to rounding."""
        dtypes = {self.schema.dtype, *(entry.dtype for entry in self.schema.entries if entry.dtype)}
        return max(TOLERANCE[dtype] for dtype in dtypes)

    def samples(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of the training samples `indices`."""
        index = as_tensor(indices)
        return self._data.train_x.index_select(0, index), self._data.train_y.index_select(0, index)

    def stream(self, replica: int, step: int, *part: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which torch's random numbers are seeded for one gradient, or for a `part` of the model
        and batch, independently of the process and the time of the computation.
        """
        if not self.random:
            return contextlib.nullcontext()
        words = np.random.SeedSequence([self._seed % 2**64, replica, step, *part]).generate_state(1, np.uint64)
        return seeded(int(words[0]))


class TorchEngine(TensorData, Engine):
    """The engine of a job whose model is a torch module on the CPU.

    Gradients are computed in training mode, evaluations in evaluation mode. Many replicas go through one forward pass
    under `torch.func.vmap` and one backward pass; the bits of a replica's gradient do not depend on which other
    replicas are computed in the same call of `gradients` (`gradient` agrees up to rounding).

    Replicas are computed one by one, with the reason in `batching`, in three cases: the model draws random numbers in
    training (each gradient has its own random stream, from seed, replica and step); its buffers change in training
    (each replica has its own buffers); or batching fails or gives a different gradient in a trial with two replicas,
    made when `batching` is first read. A gradient at `params`, the module's own flat array, needs no copy.
    """

    def __init__(self, job: Job, seed: int):
        """Build the model with torch's random numbers seeded (and restored afterwards), and load the data; raise
        `ConfigurationError` if model, loss, data, optimizer and metric do not fit together.
        """
        self._seed = seed
        with seeded(seed):
            self.module: torch.nn.Module = job.model()
            data = job.data()
        if not isinstance(self.module, torch.nn.Module):
            raise ConfigurationError(f"a torch engine needs a torch.nn.Module, got {type(self.module).__name__}")
        if job.loss is None:
            raise ConfigurationError(
                f"the job {job.name!r} needs a loss for its torch model; pass loss=a function (outputs, targets) → "
                f"scalar"
            )
        self.loss = job.loss
        self.flat = FlatModule(self.module.train(), gradients=False)
        if not self.flat.parameters[0].is_cpu:
            raise ConfigurationError(
                f"the model of a job must be on the CPU, got {self.flat.parameters[0].device}; a model on a GPU needs "
                "a script with flockstep.distribute"
            )
        self.schema = self.flat.schema
        self._names = [entry.name for entry in self.schema.entries]
        self._start: FlatArray | None = None  # None while the module's own parameters are the initial ones
        self._given_away = False
        self._backward = FlatBackward(self.flat)
        self._use(job, data, self.flat.parameters)
        self._metric = metric_of(job, self._data, torch.int64, accuracy)
        self._buffers: dict[int, Tensors] = {}
        self.changing_buffers: Tensors = {}
        """Name → initial value of every buffer that changes in training. Callers must not change the values."""
        self._present = 0
        self._factored: dict[int, tuple[FactoredWeight, ...]] = {}
        self._chunk = LARGEST_CHUNK
        self._kernels: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

        substituted = Substituted(self.module)

        def loss_of(params: Tensors, x: torch.Tensor, y: torch.Tensor) -> Any:
            return self.loss(substituted(params, x), y)

        self._forward: Callable[..., torch.Tensor] = vmap(loss_of, randomness="error")
        self._probe(job)

    @property
    def params(self) -> FlatArray:
        """The module's own parameters, of shape (K,)."""
        self._keep_start()
        return self.flat.params

    def initial(self) -> FlatArray:
        """Return a copy of the parameters with which replicas start; after `home`, of the module's own."""
        return (self.flat.params if self._start is None else self._start).copy()

    def home(self) -> FlatArray:
        """Return the module's own parameters (K,), in their initial state, of which there is no other copy then."""
        self._given_away = True
        return self.flat.params

    def gradient(self, params: FlatArray, indices: Indices, out: FlatArray, replica: int = 0, step: int = 0) -> float:
        """Write the mean gradient at `params` over the samples `indices` into `out`; return the mean loss.

        Parameters other than the module's own are copied into the module.
        """
        return self.distil(params, indices, out, DistillationTargets(self.flat.params[None, :][:0], 0.0), replica, step)

    def distil(
        self, params: FlatArray, indices: Indices, out: FlatArray, targets: DistillationTargets, replica: int, step: int
    ) -> float:
        if params is not self.flat.params:
            self._keep_start()
            np.copyto(self.flat.params, params)
        self.flat.write_parameters()
        self._bring(replica)
        classes = self.classes
        x, y = self.samples(indices)
        with self.stream(replica, step):
            outputs = self.module(x)
            loss = total = self.loss(outputs, y)
        if len(targets.teachers):
            buffers = self._mean_buffers([replica])
            with torch.no_grad():
                taught = [called(self.module, self._state_of(w) | buffers, x) for w in targets.teachers]
            total = loss + targets.weight * distance(outputs, combined(taught, classes), classes)
        self._backward(total, out)
        return float(loss.item())

    def detached(self) -> torch.nn.Module:
        """Return the module, whose parameters then have memory of their own. From now on the engine only gives samples,
        random numbers and buffers.
        """
        fresh: dict[int, torch.nn.Parameter] = {}
        for owner in self.module.modules():
            for name, one in owner._parameters.items():
                if one is not None:
                    own = fresh.setdefault(id(one), torch.nn.Parameter(one.detach().clone(), one.requires_grad))
                    owner._parameters[name] = own
        del self.flat, self._backward
        self._start = None
        return self.module

    @contextlib.contextmanager
    def displaced(self) -> Iterator[None]:
        """Return a context in which the module's own parameters have other values. A pass that wrongly reads the
        module's parameters, instead of the values passed to it, then has other results.
        """
        self._keep_start()
        before = self.flat.params.copy()
        try:
            self.flat.params *= 1.5
            self.flat.params += 0.1
            self.flat.write_parameters()
            yield
        finally:
            np.copyto(self.flat.params, before)
            self.flat.write_parameters()

    def _keep_start(self) -> None:
        """Keep a copy of the initial parameters before the module's own parameters change."""
        if self._start is None and not self._given_away:
            self._start = self.flat.params.copy()

    def gradients(
        self, params: FlatArray, indices: Indices, out: FlatArray, replicas: Sequence[int], steps: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        count = len(params)
        losses = np.empty(count, np.float64)
        if self.batching != "batched":
            for r in range(count):
                losses[r] = self.gradient(params[r], indices[r], out[r], replicas[r], steps[r])
            return losses
        for part in slices(count, -(-count // self._chunk)):
            losses[part] = self._batch(params[part], indices[part], out[part])
        return losses

    def evaluate(self, params: FlatArray, replicas: Sequence[int] = (0,)) -> Evaluation:
        """Return loss and metric on the test set of the model `params` (K,), with the mean of the replicas' buffers."""
        return self._evaluate([self._state_of(params) | self._mean_buffers(replicas)])

    def evaluate_together(self, members: FlatArray, replicas: Sequence[int]) -> Evaluation:
        """Return loss and metric of the mean prediction of `members` (M, K), each with its replica's buffers."""
        pairs = zip(members, replicas, strict=True)
        return self._evaluate([self._state_of(params) | self._mean_buffers([replica]) for params, replica in pairs])

    def _evaluate(self, members: Sequence[Tensors]) -> Evaluation:
        return evaluate(self.module, members, self._data, self.loss, self._metric, self.classes)

    def _state_of(self, params: FlatArray) -> Tensors:
        return dict(zip(self._names, self.flat.values(as_tensor(params)), strict=True))

    def _batch(self, params: FlatArray, indices: Indices, out: FlatArray) -> FlatArray:
        """Compute one batched call; a single replica is computed twice, as some kernels differ for one."""
        count = len(params)
        matrix, index = as_tensor(params), as_tensor(indices)
        if count == 1:
            matrix, index = matrix.repeat(2, 1), index.repeat(2, 1)
        leaves = [value.requires_grad_() for value in self.flat.values(matrix)]
        x, y = (t.index_select(0, index.reshape(-1)) for t in (self._data.train_x, self._data.train_y))
        x, y = (t.view(*index.shape, *t.shape[1:]) for t in (x, y))
        with self._kernels():
            losses = self._forward(dict(zip(self._names, leaves, strict=True)), x, y)
        slopes = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
        for target, slope in zip(self.flat.views(torch.from_numpy(out)), slopes, strict=True):
            target.copy_(slope[:count])
        result: FlatArray = losses.detach()[:count].numpy()
        return result

    def buffers(self, replica: int) -> FlatArray:
        return joined(self._buffers_of(replica).values())

    def restore_buffers(self, replica: int, values: FlatArray) -> None:
        restored = {name: torch.empty_like(buffer) for name, buffer in self._buffers_of(replica).items()}
        fill(restored.values(), values)
        if replica == self._present:
            self._load(restored)
        else:
            self._buffers[replica] = restored

    def _bring(self, replica: int) -> None:
        """Swap the changing buffers in the module for the given replica's."""
        if replica == self._present or not self.changing_buffers:
            return
        self._buffers[self._present] = self._buffers_of(self._present)
        self._load(self._buffers.pop(replica, self.changing_buffers))
        self._present = replica

    def _buffers_of(self, replica: int) -> Tensors:
        if replica == self._present:
            return {name: self.module.get_buffer(name).clone() for name in self.changing_buffers}
        return self._buffers.get(replica, self.changing_buffers)

    def _load(self, buffers: Tensors) -> None:
        with torch.no_grad():
            for name, value in buffers.items():
                self.module.get_buffer(name).copy_(value)

    def mean_buffers(self, replicas: Sequence[int]) -> dict[str, FlatArray]:
        means = self._mean_buffers(replicas)
        return {n: (b.float() if b.dtype == torch.bfloat16 else b).cpu().numpy() for n, b in means.items()}

    def _mean_buffers(self, replicas: Sequence[int]) -> Tensors:
        if not self.changing_buffers:
            return {}
        every = [self._buffers_of(replica) for replica in replicas]
        return {
            name: torch.stack([buffers[name] for buffers in every]).mean(0) if first.is_floating_point() else first
            for name, first in every[0].items()
        }

    def layers(self, batch: int) -> tuple[FactoredWeight, ...]:
        """Return the Linear modules whose weights no other operation uses, as found in a trial."""
        if batch not in self._factored:
            self._factored[batch] = self._find(np.arange(batch, dtype=np.int64) % self.train_size)
        return self._factored[batch]

    def factored(
        self,
        params: FlatArray,
        indices: Indices,
        layers: Sequence[FactoredWeight],
        out: FlatArray,
        replica: int,
        step: int,
    ) -> float:
        """Compute a gradient in which the matrices of `layers`, which autograd computes too, are packed as factors."""
        dense = np.empty(self.schema.size, out.dtype)
        modules = dict(self._linear())
        with captured([modules[layer.offset] for layer in layers]) as factors:
            loss = self.gradient(params, indices, dense, replica, step)
        Packing(len(dense), layers).pack(dense, [factors() for factors in factors], out)
        return loss

    def _linear(self) -> Iterator[tuple[int, torch.nn.Linear]]:
        """Yield offset and module of each Linear with a trainable weight, used once, of the flat dtype."""
        modules = list(self.module.modules())
        uses = Counter(id(p) for module in modules for p in module.parameters(recurse=False))
        pairs = zip(self.schema.entries, self.flat.parameters, strict=True)
        offsets = {id(p): e.offset for e, p in pairs if not e.dtype}
        for module in modules:
            if isinstance(module, torch.nn.Linear) and id(module.weight) in offsets and uses[id(module.weight)] == 1:
                yield offsets[id(module.weight)], module

    def _find(self, indices: Indices) -> tuple[FactoredWeight, ...]:
        buffers, dense = self.buffers(0), np.empty_like(self.flat.params)
        candidates = sorted(self._linear(), key=lambda pair: pair[0])
        with captured([module for _, module in candidates]) as factors:
            self.gradient(self.flat.params, indices, dense)
        self.restore_buffers(0, buffers)
        found = []
        for (offset, _), get in zip(candidates, factors, strict=True):
            u, v = get()
            layer = FactoredWeight(offset, u.shape[1], v.shape[1], len(u))
            slope = dense[offset : offset + layer.dense].reshape(layer.rows, layer.columns)
            distance = np.linalg.norm((u.T @ v - slope).astype(np.float64))
            if len(u) and distance <= TOLERANCE[self.schema.dtype] * np.linalg.norm(slope.astype(np.float64)):
                found.append(layer)
        return tuple(found)

    def _probe(self, job: Job) -> None:
        """Compute one gradient and discard it, to find out whether the job works, is random, and changes buffers."""
        before = {name: buffer.clone() for name, buffer in self.flat.buffers().items()}
        with seeded(0):
            state = torch.get_rng_state()
            try:
                sizes: list[int] = []  # of the tensors that are saved for the backward pass

                def saved(tensor: torch.Tensor) -> torch.Tensor:
                    sizes.append(tensor.nbytes)
                    return tensor

                with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
                    loss = self._first_loss()
                self._backward(loss)
            except ConfigurationError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"the job {job.name!r} must work on its first batch, got {in_short(error)}; fix its model, loss "
                    f"or data"
                ) from error
            self.random = not torch.equal(state, torch.get_rng_state())
        self.changing_buffers = {n: b for n, b in before.items() if not torch.equal(b, self.module.get_buffer(n))}
        self._load(self.changing_buffers)
        self._chunk = max(2, min(LARGEST_CHUNK, CHUNK_BYTES // (2 * self.schema.nbytes + sum(sizes))))

    def _first_loss(self) -> Any:
        index = as_tensor(np.arange(self._batch_size) % self.train_size)
        loss: Any = self.loss(self.module(self._data.train_x[index]), self._data.train_y[index])
        if not isinstance(loss, torch.Tensor) or loss.dim() > 0:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigurationError(
                f"the loss must be a scalar tensor, the mean over a batch, got {what}; use .mean()"
            )
        return loss

    @cached_property
    def batching(self) -> str:
        """Text that says how gradients of several replicas are computed: "batched", or "one by one: …" with the reason,
        found by batching the gradients of two replicas.
        """
        if reason := self._hindrance():
            return f"one by one: {reason}"
        indices = (np.arange(2 * self._batch_size) % self.train_size).reshape(2, self._batch_size)
        params = np.stack([self.initial(), self.initial()])
        noise = np.random.default_rng(0).standard_normal(self.schema.size)
        params[1] += (0.01 * np.abs(params[1]) + 0.001) * noise
        plain, batched, present = np.empty_like(params), np.empty_like(params), self.flat.params.copy()
        for r in range(2):
            self.gradient(params[r], indices[r], plain[r])
        np.copyto(self.flat.params, present)
        reason = self._failure(params, indices, plain, batched)
        if reason:
            # The fused attention kernel has no batching rule on the CPU; choosing takes time, so only where it helps.
            # attention by elementary operations instead of fused kernels
            self._kernels = partial(sdpa_kernel, SDPBackend.MATH)
            reason = self._failure(params, indices, plain, batched)
        return f"one by one: {reason}" if reason else "batched"

    def _hindrance(self) -> str:
        """Return the reason not to try batching; "" if there is none."""
        if self.changing_buffers:
            return f"buffer {next(iter(self.changing_buffers))!r} changes during training"
        if not self.random:
            return ""
        for name, module in self.module.named_modules():
            share = getattr(module, "p", 0)
            if "Dropout" in type(module).__name__ and isinstance(share, (int, float)) and share > 0:
                return f"{type(module).__name__} {name!r} draws random numbers (p={share})"
        return "the model draws random numbers during training"

    def _failure(self, params: FlatArray, indices: Indices, plain: FlatArray, batched: FlatArray) -> str:
        """Try batching, and return the reason why it does not work; "" if it does."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._batch(params, indices, batched)
            except Exception as error:  # noqa: BLE001  whatever a user's model raises is the reason
                return in_short(error)
        for warning in caught:
            if "batching rule" in str(warning.message):
                return str(warning.message).split(". ")[0]
        distance, size = np.linalg.norm((batched - plain).astype("float64")), np.linalg.norm(plain.astype("float64"))
        if distance <= self.tolerance * size:
            return ""
        return (
            "the batched gradient differs from the gradient of one model by "
            f"{distance / size if size else distance:.1g} (relative)"
        )


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Return a context in which torch's random numbers on the CPU are seeded; their state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed % 2**64)
        yield


@contextlib.contextmanager
def captured(modules: Sequence[torch.nn.Linear]) -> Iterator[list[Callable[[], Factors]]]:
    """Return a context that yields, for each module in order, a function that returns its factors of the passes inside:
    U (products, rows) and V (products, columns), without rows if the module was not used.
    """
    inputs: list[list[torch.Tensor]] = [[] for _ in modules]
    slopes: list[dict[int, torch.Tensor]] = [{} for _ in modules]
    """For each module, the number of a use → gradient of the module's outputs."""

    def used(number: int, module: torch.nn.Module, given: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        call = len(inputs[number])
        inputs[number].append(given[0].detach())

        def keep(slope: torch.Tensor) -> None:
            slopes[number][call] = slope.detach()

        if output.requires_grad:
            output.register_hook(keep)  # type: ignore[no-untyped-call]
        return output.clone()  # later operations may work in place; the gradient is that of the value before

    def factors(number: int, module: torch.nn.Linear) -> Factors:
        calls = sorted(slopes[number])
        if not calls:
            return np.empty((0, module.out_features)), np.empty((0, module.in_features))
        u = [slopes[number][call].reshape(-1, module.out_features) for call in calls]
        v = [inputs[number][call].reshape(-1, module.in_features) for call in calls]
        return torch.cat(u).numpy(), torch.cat(v).numpy()

    handles = [module.register_forward_hook(partial(used, number)) for number, module in enumerate(modules)]
    try:
        yield [partial(factors, number, module) for number, module in enumerate(modules)]
    finally:
        for handle in handles:
            handle.remove()


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the fraction of the targets (batch, …) with the largest output; classes on axis -1 or 1 of outputs."""
    if outputs.shape[:-1] == targets.shape:
        guesses = outputs.argmax(-1)
    elif outputs.shape[:1] + outputs.shape[2:] == targets.shape:
        guesses = outputs.argmax(1)
    else:
        raise ConfigurationError(
            f"accuracy needs outputs (batch, …, classes) for targets (batch, …), got {tuple(outputs.shape)} for "
            f"{tuple(targets.shape)}; pass metric=a function (outputs, targets) → float"
        )
    return float((guesses == targets).double().mean())


def optimizer_of(job: Job, schema: Schema, parameters: Sequence[torch.Tensor]) -> Optimizer:
    """Return the job's flockstep optimizer; raise `ConfigurationError` if a torch optimizer has no counterpart."""
    if isinstance(job.optimizer, (Optimizer, str)):
        return Optimizer.parse(job.optimizer)
    theirs = job.optimizer(list(parameters))
    optimizer = from_torch(theirs)
    updated = {id(p) for group in theirs.param_groups for p in group["params"]}
    for entry, parameter in zip(schema.entries, parameters, strict=True):
        if id(parameter) not in updated:
            raise ConfigurationError(
                f"{type(theirs).__name__} must update every trainable parameter, but {entry.name!r} is missing; pass "
                "all parameters, or freeze this parameter with requires_grad_(False)"
            )
    return optimizer


def tensors_of(data: Data, dtype: torch.dtype) -> Data:
    """Return the data as tensors: floating-point values in the model's widest dtype, integers as int64."""

    def convert(values: Any) -> Any:
        if isinstance(values, SampleColumn):
            return values.mapped(convert)
        tensor = as_tensor(values) if isinstance(values, np.ndarray) else torch.as_tensor(values)
        tensor = tensor.detach().cpu().contiguous()
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor if tensor.dtype == torch.bool or tensor.is_complex() else tensor.to(torch.int64)

    return Data(convert(data.train_x), convert(data.train_y), convert(data.test_x), convert(data.test_y))


def joined(buffers: Iterable[torch.Tensor]) -> FlatArray:
    """Return the values of buffers, concatenated in float64."""
    values = [buffer.reshape(-1).to(torch.float64) for buffer in buffers]
    flat: FlatArray = torch.cat(values).numpy() if values else np.empty(0)
    return flat


def fill(buffers: Iterable[torch.Tensor], values: FlatArray) -> None:
    """Copy the values of an array that `joined` returned back into the buffers."""
    start = 0
    for buffer in buffers:
        buffer.copy_(torch.from_numpy(values[start : start + buffer.numel()].copy()).reshape(buffer.shape))
        start += buffer.numel()
