"""What a sealed job consists of: programs, tensors, settings, and the demands on the data."""

from __future__ import annotations

from typing import Any

import msgspec

from flockstep.sealed.contract import Contract

MANIFEST, TENSORS = "manifest", "tensors"
LIBRARIES = ("joint", "evaluate", "score")
"""Sections of the libraries of a binary job."""
JOINTS = {count: f"joint {count}" for count in (1, 2, 4, 8, 16, 32, 64)}
"""Number of replicas in a batched call → section of its program in a JAX job, whose other programs have the sections
of libraries."""
SECTIONS = (MANIFEST, TENSORS, *LIBRARIES, *JOINTS.values())
MOST_CALLS = 200_000
"""Largest number of calls of one program, or operations of a JAX program, that is read."""


class OperatorProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function of tensors: calls of operators on values, which are numbered: first `state`, then inputs, then calls.

    An argument is a number, None, a list, or one of {"v": number of a value}, {"t": text}, {"c": name of a constant}
    and {"f": infinite or undefined number}.
    """

    state: tuple[str, ...]
    """Names of the tensors of the job that the program uses."""
    inputs: int
    calls: tuple[tuple[str, list[Any], dict[str, Any]], ...]
    outputs: list[Any]
    inner: tuple[OperatorProgram, ...] = ()


class SealedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter or a buffer of a sealed model."""

    name: str
    trained: bool
    """Whether the tensor is a parameter that requires a gradient."""
    parameter: bool


class SealedManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything of a sealed job but the values of its tensors."""

    flockstep: str
    torch: str
    name: str
    seed: int
    """Seed from which the initial weights were drawn."""
    tensors: tuple[SealedTensor, ...]
    programs: dict[str, OperatorProgram]
    """Programs by name: train, evaluate, loss and, unless the metric is "accuracy", metric; none in a binary job."""
    outputs: int
    """Number of tensors that the model returns; 0 for one tensor that is not in a tuple."""
    metric: str
    higher_is_better: bool
    optimizer: str
    schedule: str | None
    batch: int
    epochs: float
    least_steps: int
    target: float | None
    contract: Contract
    platform: str = ""
    """Platform for which the libraries were compiled; empty for a job of programs."""
    jax: str = ""
    """Version of JAX with which a JAX job was sealed; empty for a job of PyTorch."""
