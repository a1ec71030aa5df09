"""The programs of a sealed JAX job: StableHLO as text from `jax.export`, without names and places of the source.

The file holds no archive of `jax.export`, whose reader asks for trusted bytes and ends the process where they are
damaged. What an archive says beside the program (shapes, trees, platforms, effects) is made here again, by exporting a
function of the same inputs and outputs, in which the program of the file then takes the place of this function's.
"""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax._src.interpreters.mlir import refine_polymorphic_shapes
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters.mlir import make_ir_context
from safetensors.numpy import load, save

from flockstep.errors import CompositionError, ConfigurationError, FlockstepError, in_short
from flockstep.frameworks.jax import JaxEngine, JaxModel
from flockstep.frameworks.jax_tree import FlatTree
from flockstep.sealed.contract import Column
from flockstep.sealed.manifest import JOINTS, MOST_CALLS, TENSORS, SealedManifest, SealedTensor

PLATFORM = "cpu"
MOST_BYTES = 1 << 28
"""Largest size in bytes of the text of one program."""
OPERATION = re.compile(r"builtin\.module|func\.\w+|chlo\.\w+|stablehlo\.\w+")
EXCHANGES = re.compile(
    r"stablehlo\.(all_\w+|collective_\w+|cross\w+|infeed|outfeed|partition_id|recv|reduce_scatter|replica_id|send)"
)
"""Operations that exchange values with the host or with other devices."""
CUSTOM_CALLS = {
    *("shape_assertion", "mhlo.erf", "mhlo.topk"),
    *("stablehlo.dynamic_reduce_window", "stablehlo.dynamic_rng_bit_generator", "stablehlo.dynamic_top_k"),
}
"""Functions beside those of StableHLO that a program may call; all of them belong to XLA, and none calls Python."""
DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "i32": "int32"}
"""Name of a type in a program → dtype of an output."""
MOST_LENGTH = 1 << 31
(SAMPLES,) = jax.export.symbolic_shape("samples")
Specs = tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
Call = Callable[..., Any]


def recorded(
    manifest: SealedManifest, engine: JaxEngine, metric: Call | None, rename: bool
) -> tuple[SealedManifest, dict[str, bytes], dict[str, str]]:
    """Return the manifest of a job with its tensors, the sections of its tensors and programs, and the names that were
    replaced: new name → name. `metric`: function (outputs, targets) → metric; None for accuracy.

    Raises:
        ConfigurationError: JAX cannot export the job.
    """
    tree, views = engine._tree, engine.schema.views(engine.initial())
    names = {name: f"p{number}" if rename else name for number, name in enumerate(views)}
    tensors = tuple(SealedTensor(name, trained=True, parameter=True) for name in names.values())
    values = zip(names.values(), jax.tree.leaves(tree.read(engine.initial())), strict=True)
    held = {name: np.asarray(value) for name, value in values}
    manifest = msgspec.structs.replace(manifest, jax=jax.__version__, tensors=tensors)
    specs = _specs(manifest, held)

    def joint(leaves: list[Any], x: Any, y: Any, key: Any) -> list[Any]:
        def loss(params: Any) -> Any:
            return engine._loss(engine._call(params, x, jax.random.wrap_key_data(key)), y)

        value, slopes = jax.value_and_grad(loss)(jax.tree.unflatten(tree.structure, leaves))
        return [value, *jax.tree.leaves(slopes)]

    def evaluate(leaves: list[Any], x: Any) -> list[Any]:
        return [engine._call(jax.tree.unflatten(tree.structure, leaves), x, None)]

    def score(outputs: Any, y: Any) -> list[Any]:
        return [engine._loss(outputs, y), *([] if metric is None else [metric(outputs, y)])]

    try:
        outputs = jax.eval_shape(evaluate, *specs[:2])[0]
        if outputs.shape[:1] != (SAMPLES,):
            raise ValueError(f"the first axis of the outputs must be that of the samples, got shape {outputs.shape}")
        found = {
            "joint": _text(joint, *specs),
            **{section: _text(jax.vmap(joint), *_many(specs, count)) for count, section in JOINTS.items()},
            "evaluate": _text(evaluate, *specs[:2]),
            "score": _text(score, outputs, specs[2]),
        }
    except Exception as error:
        raise ConfigurationError(
            f"JAX cannot export this job, so that the job cannot be sealed: {in_short(error)}; change the model, the "
            "loss or the metric as JAX says"
        ) from error
    replaced = {new: name for name, new in names.items() if new != name}
    return manifest, {TENSORS: save(held), **found}, replaced


def _specs(manifest: SealedManifest, values: Mapping[str, Any]) -> Specs:
    """Return the inputs of the joint program: parameters, inputs and targets of a number of samples, and a key."""
    leaves = [jax.ShapeDtypeStruct(values[one.name].shape, values[one.name].dtype) for one in manifest.tensors]
    whole = FlatTree([values[one.name] for one in manifest.tensors]).schema.dtype

    def column(demand: Column) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(np.int64 if demand.kind == "i" else whole)
        return jax.ShapeDtypeStruct((SAMPLES, *demand.shape), dtype)

    return leaves, column(manifest.contract.x), column(manifest.contract.y), jax.ShapeDtypeStruct((2,), np.uint32)


def _many(specs: Any, count: int) -> Any:
    """Return the same inputs for a number of replicas, which is fixed: under `jax.vmap` it is a number of groups of a
    convolution, which no symbol may be.
    """
    return jax.tree.map(lambda one: jax.ShapeDtypeStruct((count, *one.shape), one.dtype), specs)


def _exported(function: Call, *specs: Any) -> jax.export.Exported:
    return jax.export.export(jax.jit(function, keep_unused=True), platforms=[PLATFORM])(*specs)


def _text(function: Call, *specs: Any) -> bytes:
    """Return the text of an exported function, in which inner functions are numbered and places are left out."""
    data = _exported(function, *specs).mlir_module_serialized
    with make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, data)
        for number, inner in enumerate(module.body.operations):
            if (name := ir.StringAttr(inner.attributes["sym_name"]).value) != "main":
                ir.SymbolTable.replace_all_symbol_uses(name, f"f{number}", module.operation)
                ir.SymbolTable.set_symbol_name(inner, f"f{number}")
        module.operation.attributes["sym_name"] = ir.StringAttr.get("sealed")
        text: str = module.operation.get_asm(enable_debug_info=False)
    return text.encode()


def _require_allowed(module: Any) -> None:
    """Refuse a program that calls what lies outside it, or that has too many operations."""
    left = MOST_CALLS

    def visit(operation: Any) -> Any:
        nonlocal left
        left -= 1
        name = operation.name
        if name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            allowed = target in CUSTOM_CALLS
            name = f"{name} of {target}"
        else:
            allowed = OPERATION.fullmatch(name) is not None and not EXCHANGES.fullmatch(name)
        if not allowed or left < 0:
            refused.append(name if left >= 0 else f"more than {MOST_CALLS} operations")
            return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE

    refused: list[str] = []  # an error must not pass through the walk, which is C++
    module.operation.walk(visit)
    if refused:
        raise ConfigurationError(f"a sealed job may not call {refused[0][:80]}; ask its sender for a job without it")


def _program(text: bytes, leading: Sequence[Any], *specs: Any) -> Call:
    """Return the program of a text as a function of inputs like `specs`; refuse one that has other inputs.

    `leading`: first axes of each output, in place of the axes whose length the text leaves open. Nothing is computed,
    but the shapes of all operations are found out for two samples.
    """
    if len(text) > MOST_BYTES:
        raise ConfigurationError(f"a program of a sealed job must have at most {MOST_BYTES} bytes, got {len(text)}")
    with make_ir_context():
        module = ir.Module.parse(text)
        _require_allowed(module)
        signature = str(_signature(module))
        outputs = [_shape(one, leading) for one in _signature(module).results]
        version = stablehlo.get_version_from_compatibility_requirement(
            stablehlo.StablehloCompatibilityRequirement.WEEK_4
        )
        data = stablehlo.serialize_portable_artifact(module, version)
    stub = _exported(lambda *_: [jnp.zeros(one.shape, one.dtype) for one in outputs], *specs)
    with make_ir_context() as context:
        right = str(_signature(stablehlo.deserialize_portable_artifact(context, stub.mlir_module_serialized)))
    if signature != right:
        raise ConfigurationError(f"a program of a sealed job must be a function {right[:200]}, got {signature[:200]}")
    program: Call = dataclasses.replace(stub, mlir_module_serialized=data).call
    two = jax.tree.map(lambda one: jax.ShapeDtypeStruct(_of_two(one.shape), one.dtype), specs)
    refine_polymorphic_shapes(jax.jit(program).lower(*two).compiler_ir("stablehlo"))
    return program


def _of_two(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(axis if isinstance(axis, int) else 2 for axis in shape)


def _signature(module: Any) -> Any:
    return ir.FunctionType(ir.TypeAttr(ir.SymbolTable(module.operation)["main"].attributes["function_type"]).value)


def _shape(kind: Any, leading: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of an output, of which the first axes are `leading`."""
    tensor = ir.RankedTensorType(kind)
    dtype = DTYPES.get(str(tensor.element_type))
    rest = tensor.shape[len(leading) :]
    if dtype is None or any(axis < 0 or axis > MOST_LENGTH for axis in rest):
        raise ConfigurationError(
            f"an output of a sealed JAX job must have axes of a fixed length, but for that of the samples, and one of "
            f"{', '.join(DTYPES.values())}, got {str(kind)[:80]}; change the model"
        )
    return jax.ShapeDtypeStruct((*leading, *rest), dtype)


class _JointInputs:
    """Stands for the outputs of a pass in training: what the joint program takes beside the targets."""

    def __init__(self, leaves: list[Any], x: Any, key: Any):
        self.inputs = leaves, x, key

    def __getattr__(self, name: str) -> Any:
        raise CompositionError(
            "a sealed JAX job cannot learn from the predictions of other models, because it has no outputs in "
            "training; use a strategy without distillation"
        )


class SealedJaxPrograms:
    """The programs of a sealed JAX job with its tensors, from which models are built."""

    def __init__(self, manifest: SealedManifest, sections: Mapping[str, bytes], what: object):
        """Read tensors and programs; refuse what does not fit together."""
        self._manifest = manifest
        try:
            values = load(sections[TENSORS])
            self._values = OrderedDict((one.name, values[one.name]) for one in manifest.tensors)
            specs = _specs(manifest, values)
            joint = _program(sections["joint"], (), *specs)
            evaluate = _program(sections["evaluate"], (SAMPLES,), *specs[:2])
            (outputs,) = jax.eval_shape(evaluate, *specs[:2])
            score = _program(sections["score"], (), outputs, specs[2])
        except FlockstepError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{what} is damaged, or of another version than JAX {jax.__version__} (it was sealed with "
                f"{manifest.jax[:20]}): {in_short(error)}; ask its sender for the file again"
            ) from error

        @cache  # read where it is needed: a worker on processes has one replica
        def joints(count: int) -> Call:
            return _program(sections.get(JOINTS[count], b""), (), *_many(specs, count))

        self._learned, self._evaluate, self._score = _learned(joint, joints), jax.jit(evaluate), jax.jit(score)

    def model(self) -> JaxModel:
        """Return a new model with the initial values."""
        return JaxModel(lambda key: OrderedDict(self._values), self._outputs, random=True)

    def _outputs(self, params: Mapping[str, Any], x: Any, key: Any) -> Any:
        leaves = list(params.values())
        return self._evaluate(leaves, x)[0] if key is None else _JointInputs(leaves, x, jax.random.key_data(key))

    def loss(self, outputs: Any, targets: Any) -> Any:
        """Return the mean loss of a batch."""
        if isinstance(outputs, _JointInputs):
            leaves, x, key = outputs.inputs
            return self._learned(leaves, x, targets, key)
        return self._score(outputs, targets)[0]

    @property
    def metric(self) -> str | Callable[[Any, Any], float]:
        """The metric: a function that has the name of the sealed job's metric, or "accuracy"."""
        if self._manifest.metric == "accuracy":
            return "accuracy"

        def metric(outputs: Any, targets: Any) -> float:
            return float(self._score(outputs, targets)[1])

        metric.__name__ = self._manifest.metric
        return metric


def _learned(joint: Call, joints: Callable[[int], Call]) -> Call:
    """Return the loss as a function (leaves, x, y, key) whose gradient the joint program computes; under `jax.vmap`,
    `joints` gives the program for a number of replicas.
    """
    computed = jax.custom_batching.custom_vmap(lambda *inputs: tuple(joint(*inputs)))

    def batched(count: int, _: Any, *inputs: Any) -> Any:
        found = tuple(joints(count)(*inputs))
        return found, (True,) * len(found)

    computed.def_vmap(batched)

    def forward(*inputs: Any) -> Any:
        loss, *slopes = computed(*inputs)
        return loss, slopes

    def backward(slopes: list[Any], factor: Any) -> Any:
        return [factor.astype(one.dtype) * one for one in slopes], None, None, None

    learned = jax.custom_vjp(lambda *inputs: computed(*inputs)[0])
    learned.defvjp(forward, backward)
    found: Call = learned
    return found
