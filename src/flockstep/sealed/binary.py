"""Compiles the passes of a sealed job to libraries for one platform, and trains with such libraries.

Forward and backward pass are one library, `joint`, which gives loss, gradients and buffers; `evaluate` gives the
outputs of the model, and `score` gives loss and metric of outputs. Compiling needs a C++ compiler, loading none.
"""

from __future__ import annotations

import itertools
import platform
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from flockstep.errors import ConfigurationError, in_short
from flockstep.sealed import archive
from flockstep.sealed.manifest import LIBRARIES, MANIFEST, TENSORS, SealedManifest
from flockstep.sealed.model import SealedPrograms, SealedTensors
from flockstep.sealed.program import quiet

Library = Callable[[list[Tensor]], list[Tensor]]


def this_platform() -> str:
    """Return the platform on which a library that is compiled here can be loaded."""
    return (
        f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"
    )


def compiled(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], others: Sequence[Tensor]) -> bytes:
    """Return the library of a function; `others` are inputs with another number of samples, as for `Exporter.export`.

    Raises:
        ConfigurationError: PyTorch cannot compile the function, or there is no C++ compiler.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor import config as settings
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.fx.experimental.proxy_tensor import make_fx

    from flockstep.sealed.export import free_axes

    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            # The pass and its gradient become one graph, in which random numbers are drawn as without compiling.
            graph = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
            free = free_axes(inputs, others)
            program = torch.export.export(_AsModule(graph), tuple(inputs), dynamic_shapes=(free,))
            with settings.patch(fallback_random=True):
                packed = aoti_compile_and_package(program, package_path=str(Path(folder, "library.pt2")))
        except Exception as error:
            raise ConfigurationError(
                f"PyTorch cannot compile this job to a library: {in_short(error)}; install a C++ compiler such as g++, "
                "or seal it without --binary"
            ) from error
        with zipfile.ZipFile(packed) as files:  # its other files are sources
            (name,) = (one for one in files.namelist() if one.endswith(".so"))
            library = files.read(name)
        for place in (cache_dir(), folder, str(Path(torch.__file__).parent)):  # stand in the library's messages
            library = library.replace(place.encode(), b"-" * len(place.encode()))
        return library


def as_libraries(sections: Mapping[str, bytes], samples: Callable[[int], tuple[Tensor, Tensor]]) -> dict[str, bytes]:
    """Return the sections of a binary job, compiled from those of a job of programs.

    `samples`: function that returns inputs and targets of a number of samples.

    Raises:
        ConfigurationError: PyTorch cannot compile the job, or there is no C++ compiler.
    """
    manifest = archive.decoded(sections[MANIFEST], SealedManifest, "the sealed job")
    programs = SealedPrograms(manifest, sections[TENSORS], "the sealed job")
    module = programs.model().train()
    names, trained = [one.name for one in manifest.tensors], [one.trained for one in manifest.tensors]
    tensors = [one.detach().clone() for one in module.tensors()]
    # Tracing takes axes of equal length for one axis, so that the number of samples must be no other length.
    lengths = {size for one in (*tensors, *samples(1)) for size in one.shape}
    count = next(number for number in itertools.count(17, 2) if not {number, number + 2} & lengths)
    (x, y), (x2, y2) = samples(count), samples(count + 2)

    def evaluated(*values: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            found = torch.func.functional_call(module, dict(zip(names, values[:-1], strict=True)), (values[-1],))
        return (found,) if isinstance(found, Tensor) else tuple(found)

    learning = compiled(_joint(module, programs.loss, names, trained), [*tensors, x, y], [*tensors, x2, y2])
    module.eval()
    outputs, others = evaluated(*tensors, x), evaluated(*tensors, x2)
    libraries = (
        learning,
        compiled(evaluated, [*tensors, x], [*tensors, x2]),
        compiled(programs.scores, [*outputs, y], [*others, y2]),
    )
    binary = msgspec.structs.replace(manifest, programs={}, platform=this_platform())
    values = load(sections[TENSORS])
    return {
        MANIFEST: msgspec.json.encode(binary),
        TENSORS: save({name: values[name] for name in names}),
        **dict(zip(LIBRARIES, libraries, strict=True)),
    }


class _AsModule(torch.nn.Module):
    """Calls a graph with its inputs."""

    def __init__(self, graph: Callable[..., Any]):
        super().__init__()
        self.graph = graph

    def forward(self, *inputs: Tensor) -> Any:
        return self.graph(*inputs)


def _joint(
    module: torch.nn.Module, loss: Callable[[Any, Tensor], Tensor], names: Sequence[str], trained: Sequence[bool]
) -> Callable[..., list[Tensor]]:
    """Return the function (tensors of the model, x, y) → loss, gradients of the trained tensors, and the buffers after
    the pass.

    `names` and `trained` describe the tensors of the model in order; whatever is not trained is given back.
    """

    def function(*values: Tensor) -> list[Tensor]:
        *tensors, x, y = values
        with torch.enable_grad():
            held = [
                one.detach().requires_grad_() if trains else one.clone()
                for one, trains in zip(tensors, trained, strict=True)
            ]
            outputs = torch.func.functional_call(module, dict(zip(names, held, strict=True)), (x,))
            found = loss(outputs, y)
            learned = [one for one, trains in zip(held, trained, strict=True) if trains]
            slopes = torch.autograd.grad(found, learned, allow_unused=True, materialize_grads=True)
        others = [one for one, trains in zip(held, trained, strict=True) if not trains]
        return [found.detach(), *slopes, *others]

    return function


class _PendingOutputs:
    """Stands for the outputs of a pass, which the joint program computes when the targets are known."""

    def __init__(self, model: BinaryModel, x: Tensor):
        self.model, self.x = model, x


class _JointPass(torch.autograd.Function):
    """The loss, whose gradients the same library has computed."""

    @staticmethod
    def forward(ctx: Any, pending: _PendingOutputs, y: Tensor, *trained: Tensor) -> Tensor:
        loss, ctx.slopes = pending.model.computed(pending.x, y)
        return loss

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        factor = slopes[0].item()
        return None, None, *(ctx.slopes if factor == 1.0 else [factor * one for one in ctx.slopes])


class BinaryModel(SealedTensors):
    """A module with the parameters and buffers of a sealed model, whose passes are libraries."""

    def __init__(self, manifest: SealedManifest, values: Mapping[str, Tensor], libraries: Mapping[str, Library]):
        super().__init__(manifest, values)
        self._libraries, self._alone = dict(libraries), manifest.outputs == 0
        self._trained = [one.trained for one in manifest.tensors]

    def forward(self, x: Tensor) -> Any:
        """Return the outputs: a tensor, or a tuple of tensors; in training what stands for them."""
        if self.training:
            return _PendingOutputs(self, x)
        found = self._libraries["evaluate"]([*(one.detach() for one in self.tensors()), x])
        return found[0] if self._alone else tuple(found)

    def loss(self, pending: _PendingOutputs, targets: Tensor) -> Any:
        """Return the loss of a batch with its gradient."""
        trained = [one for one, trains in zip(self.tensors(), self._trained, strict=True) if trains]
        return _JointPass.apply(pending, targets, *trained)  # type: ignore[no-untyped-call]

    def computed(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return loss and gradients of a batch, and change the buffers."""
        tensors = [one.detach() for one in self.tensors()]
        loss, *found = self._libraries["joint"]([*tensors, x, y])
        count = sum(self._trained)
        kept = [one for one, trains in zip(tensors, self._trained, strict=True) if not trains]
        for one, value in zip(kept, found[count:], strict=True):
            one.copy_(value)
        return loss, found[:count]


class SealedLibraries:
    """The libraries of a sealed job with its tensors, from which models are built."""

    def __init__(self, manifest: SealedManifest, sections: Mapping[str, bytes], what: object):
        """Load the tensors and the libraries; refuse those of another platform, and damaged ones."""
        if manifest.platform != (here := this_platform()):
            raise ConfigurationError(
                f"the binary job was compiled for {manifest.platform}, and this is {here}; ask its sender for a job of "
                "this platform, or for one that is not binary"
            )
        self._manifest = manifest
        try:
            self._values = load(sections[TENSORS])
            self._libraries = {name: _loaded(sections[name]) for name in LIBRARIES}
            self.model()
        except Exception as error:  # noqa: BLE001 - torch raises anything for what is damaged
            raise ConfigurationError(
                f"{what} is damaged: {in_short(error)}; ask its sender for the file again"
            ) from None

    def model(self) -> BinaryModel:
        """Return a new model with the initial values."""
        return BinaryModel(self._manifest, self._values, self._libraries)

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        """Return the mean loss of a batch."""
        if isinstance(outputs, _PendingOutputs):
            return outputs.model.loss(outputs, targets)
        return self._score(outputs, targets)[0]

    @property
    def metric(self) -> str | Callable[[Any, Any], float]:
        """The metric: a function that has the name of the sealed job's metric, or "accuracy"."""
        if self._manifest.metric == "accuracy":
            return "accuracy"

        def metric(outputs: Any, targets: Tensor) -> float:
            return float(self._score(outputs, targets)[1])

        metric.__name__ = self._manifest.metric
        return metric

    def _score(self, outputs: Any, targets: Tensor) -> list[Tensor]:
        return self._libraries["score"]([*(outputs if isinstance(outputs, tuple) else (outputs,)), targets])


def _loaded(data: bytes) -> Library:
    """Load a library by way of a private file, which is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder, "library.so")
        file.write_bytes(data)
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(file), 1)
    run: Library = runner.run
    return run
