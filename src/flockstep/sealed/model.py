"""The model of a sealed job: a module whose passes are programs, and the loss and the metric beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import torch
from safetensors.torch import load
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flockstep.errors import ConfigurationError, FlockstepError, in_short
from flockstep.sealed.manifest import SealedManifest
from flockstep.sealed.program import Call, built, quiet

MOST_STEPS = 1 << 20
"""Largest number of operators that the programs of a sealed job call in one step, those inside operators included."""
CUTS = {torch.ops.aten.unbind.int: 1, torch.ops.aten.split.Tensor: 2, torch.ops.aten.unsafe_split.Tensor: 2}
"""Operators that cut a tensor into as many parts as the length of an axis says → place of the argument `dim`."""


class SealedTensors(torch.nn.Module):
    """A module that has the parameters and buffers of a sealed model."""

    def __init__(self, manifest: SealedManifest, values: Mapping[str, torch.Tensor]):
        super().__init__()
        tables = dict[str, tuple[Mapping[str, Any], str]]()
        for one in manifest.tensors:
            *folders, name = one.name.split(".")
            owner: torch.nn.Module = self
            for folder in folders:
                if folder not in owner._modules:
                    owner.add_module(folder, torch.nn.Module())
                owner = owner.get_submodule(folder)
            value = values[one.name].clone()
            if one.parameter:
                owner.register_parameter(name, torch.nn.Parameter(value, one.trained))
            else:
                owner.register_buffer(name, value)
            tables[one.name] = (owner._parameters if one.parameter else owner._buffers), name
        self._tables = tables

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers in the order of the manifest."""
        return [table[name] for table, name in self._tables.values()]


class SealedModel(SealedTensors):
    """A module with the parameters and buffers of a sealed model, which calls a program in each mode."""

    def __init__(self, manifest: SealedManifest, values: Mapping[str, torch.Tensor], passes: Mapping[str, Call]):
        super().__init__(manifest, values)
        tables = self._tables
        self._passes = {
            mode: (passes[mode], [tables.get(name, (values, name)) for name in manifest.programs[mode].state])
            for mode in ("train", "evaluate")
        }
        self._alone = manifest.outputs == 0

    def forward(self, x: torch.Tensor) -> Any:
        """Return the outputs: a tensor, or a tuple of tensors."""
        function, places = self._passes["train" if self.training else "evaluate"]
        if self.training:  # tried on the first batch before anything starts
            found = function(*[table[name] for table, name in places], x)
        else:
            found = _tried("evaluate", function, *[table[name] for table, name in places], x)
        return found[0] if self._alone else tuple(found)


def _tried(name: str, function: Call, *values: Any) -> Any:
    """Call a program that no trial has called; report its failure in one sentence."""
    try:
        return function(*values)
    except Exception as error:  # noqa: BLE001 - torch raises anything for programs that are damaged
        raise ConfigurationError(
            f"the program {name!r} of the sealed job failed: {in_short(error)}; ask its sender for another"
        ) from None


class _CountedCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses programs that call more than `MOST_STEPS` operators. Those inside `aten::lstm`, whose loop runs over the
    steps of a sequence, count, and so does each part into which a call cuts a tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = MOST_STEPS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if (place := CUTS.get(func)) is not None:
            length = args[0].shape[args[place] if len(args) > place else 0]
            self._left -= length // (args[1] or 1 if place == 2 else 1)
        if self._left < 0:
            raise ConfigurationError(
                f"the programs of a sealed job must call at most {MOST_STEPS} operators in a step, those of each "
                "element of a sequence included; seal the job with shorter sequences"
            )
        return func(*args, **(kwargs or {}))


class SealedPrograms:
    """The programs of a sealed job with its tensors, from which models are built."""

    def __init__(self, manifest: SealedManifest, tensors: bytes, what: object):
        """Read the tensors, and build the programs; refuse what does not fit together."""
        self._manifest = manifest
        damaged = f"{what} is damaged"
        try:
            self._values = load(tensors)
            self._passes = {name: built(program) for name, program in manifest.programs.items()}
            self.model()
            self._require_shapes()
        except FlockstepError:
            raise
        except Exception as error:  # noqa: BLE001 - torch raises anything for programs that are damaged
            raise ConfigurationError(f"{damaged}: {in_short(error)}; ask its sender for the file again") from None

    def _require_shapes(self) -> None:
        """Run the programs on tensors that have shapes only: operators given wrong ones may end the process later.

        The device of these tensors is none on which operators skip their checks to be fast, as `aten::lstm` does on the
        processor. What follows on a shape that depends on values is not checked. The calls are counted, because a
        tensor without values may have an axis over which a loop does not end.
        """
        manifest = self._manifest
        trained = (self._values[one.name].dtype for one in manifest.tensors if one.trained)
        dtypes = {"f": reduce(torch.promote_types, trained), "i": torch.int64, "b": torch.bool}
        # Python's decompositions of operators check indices into lists of tensors, those in C++ do not.
        with quiet(), enable_python_dispatcher(), FakeTensorMode(), torch.device("meta"), _CountedCalls():
            state = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in self._values.items()}
            runs = {
                name: partial(built(program, device="meta"), *(state[one] for one in program.state))
                for name, program in manifest.programs.items()
            }
            x, y = (
                torch.empty((manifest.batch, *one.shape), dtype=dtypes[one.kind])
                for one in (manifest.contract.x, manifest.contract.y)
            )
            with contextlib.suppress(DataDependentOutputException, DynamicOutputShapeException):
                for outputs in (runs.pop("train")(x), runs.pop("evaluate")(x)):
                    for run in runs.values():
                        run(*outputs, y)

    def model(self) -> SealedModel:
        """Return a new model with the initial values."""
        return SealedModel(self._manifest, self._values, self._passes)

    def _applied(self, name: str, outputs: Any, targets: torch.Tensor) -> Any:
        """Call a program with outputs of the model and targets."""
        state = (self._values[one] for one in self._manifest.programs[name].state)
        return self._passes[name](*state, *(outputs if isinstance(outputs, tuple) else (outputs,)), targets)[0]

    def loss(self, outputs: Any, targets: torch.Tensor) -> Any:
        """Return the mean loss of a batch."""
        if torch.is_grad_enabled():
            return self._applied("loss", outputs, targets)
        return _tried("loss", self._applied, "loss", outputs, targets)

    def scores(self, *outputs_and_targets: torch.Tensor) -> list[torch.Tensor]:
        """Return the loss of outputs and targets and, unless that is accuracy, the metric, as tensors."""
        *outputs, targets = outputs_and_targets
        names = ("loss", "metric") if "metric" in self._manifest.programs else ("loss",)
        return [torch.as_tensor(self._applied(name, tuple(outputs), targets)) for name in names]

    @property
    def metric(self) -> str | Callable[[Any, Any], float]:
        """The metric: a function that has the name of the sealed job's metric, or "accuracy"."""
        if "metric" not in self._manifest.programs:
            return self._manifest.metric

        def metric(outputs: Any, targets: torch.Tensor) -> float:
            return float(_tried("metric", self._applied, "metric", outputs, targets))

        metric.__name__ = self._manifest.metric
        return metric
