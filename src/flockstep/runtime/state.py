"""The state of a program as bytes: arrays, numbers, text and data classes of them, but never code.

Only arrays, numbers, text, and data classes of modules that are already imported can be read back. Values that would
not be restored exactly are refused.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path, PosixPath
from typing import Any

import msgspec
import numpy as np

from flockstep.arrays.kernels import name_of, numpy_dtype
from flockstep.arrays.namespace import is_tensor, to_host, to_tensor
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, ProtocolError

_PLAIN = frozenset({bool, float, str, bytes, type(None)})
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset, "list": list}
_MAPPINGS = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_LARGEST = 1 << 63
_LARGEST_POOL = 64
"""Largest number of words that the seeds of a generator mix; numpy uses 4."""
_UNREADABLE = (
    ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError, OverflowError, AssertionError
)  # fmt: skip
"""Errors of numpy, torch and the classes of data for values that no state has."""
STRUCTURE = "structure"
"""Name of the array that holds the encoding of everything except the arrays."""
NO_ARRAYS: Mapping[str, FlatArray] = {}
Former = Mapping[str, Callable[[dict[str, Any]], Any]]
"""Module and name of a class that no longer exists → function that makes a value from the fields that were saved."""
NO_FORMER: Former = {}


def to_bytes(value: Any, name: str = "state") -> bytes:
    """Encode `value` as bytes; an object that occurs twice is decoded as one object. Error messages call the value
    `name`.

    Raises:
        ConfigurationError: `value` contains something that is not data, such as a coroutine or an open file.
    """
    return msgspec.msgpack.encode(_Writer().plain(value, name))


def to_arrays(value: Any) -> dict[str, FlatArray]:
    """Encode `value` as named arrays, which share no memory with it; `from_arrays` decodes them.

    Raises:
        ConfigurationError: `value` contains something that is not data.
    """
    arrays: dict[str, FlatArray] = {}
    structure = msgspec.msgpack.encode(_Writer(arrays).plain(value, "state"))
    return {STRUCTURE: np.frombuffer(structure, np.uint8), **arrays}


def from_arrays(arrays: Mapping[str, FlatArray], former: Former = NO_FORMER) -> Any:
    """Decode the value that `to_arrays` has encoded; `former` makes the values of classes that no longer exist.

    Raises:
        ProtocolError: the arrays do not come from `to_arrays`.
    """
    if STRUCTURE not in arrays:
        raise ProtocolError(f"the saved state cannot be read: it has no array {STRUCTURE!r}")
    return from_bytes(arrays[STRUCTURE].tobytes(), arrays, former)


def from_bytes(data: bytes, arrays: Mapping[str, FlatArray] = NO_ARRAYS, former: Former = NO_FORMER) -> Any:
    """Decode bytes that `to_bytes` returned; the result is equal bit for bit, and shares no memory with the
    original.

    `arrays` holds the arrays to which the bytes refer, if `to_arrays` encoded the value; `former` is as in
    `from_arrays`.

    Raises:
        ProtocolError: the bytes do not come from `to_bytes`.
    """
    try:
        return _Reader(arrays, former).value(msgspec.msgpack.decode(data))
    except _UNREADABLE as error:
        raise ProtocolError(f"the saved state cannot be read: {type(error).__name__}: {error}") from None


class _Writer:
    """Encodes values other than plain ones as [kind, number, …], and a repeated object as ["again", number]."""

    def __init__(self, arrays: dict[str, FlatArray] | None = None) -> None:
        """`arrays` receives the arrays by name; None: their bytes are part of the encoding."""
        self._written: dict[int, tuple[int, Any]] = {}
        self._arrays = arrays

    def plain(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if -_LARGEST < value < _LARGEST else ["int", str(value)]
        if id(value) in self._written:
            return ["again", self._written[id(value)][0]]
        number = len(self._written)
        self._written[id(value)] = number, value  # kept alive, so that no other object gets its id
        return self._tagged(value, number, where)

    def _tagged(self, value: Any, number: int, where: str) -> list[Any]:
        kind = type(value)
        if kind is np.ndarray and value.dtype.isnative and _plain_dtype(value.dtype):
            data = self._stored(value, f"{number} {where}")
            return ["array", number, value.dtype.name, list(value.shape), value.flags.writeable, data]
        if is_tensor(value):
            if value.requires_grad or value.is_quantized or str(value.layout) != "torch.strided":
                raise ConfigurationError(
                    f"{where} is not a plain tensor, and cannot be saved: store for example tensor.detach() or "
                    "sparse.to_dense()"
                )
            there = to_host(value)
            data = self._stored(there, f"{number} {where}")
            return ["tensor", number, there.dtype.name, list(there.shape), str(value.device), data]
        if isinstance(value, np.generic):
            return ["number", number, value.dtype.name, value.tobytes()]
        if isinstance(value, np.random.Generator):
            seeds = _seeds_of(value, where)
            return ["random", number, self.plain(value.bit_generator.state, where), self.plain(seeds, where)]
        if kind is slice:
            return ["slice", number, value.start, value.stop, value.step]
        if kind is deque:
            return ["deque", number, [self.plain(one, f"{where}[{i}]") for i, one in enumerate(value)], value.maxlen]
        if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
            return [kind.__name__, number, [self.plain(one, f"{where}[{i}]") for i, one in enumerate(value)]]
        if kind.__name__ in _MAPPINGS and kind is _MAPPINGS[kind.__name__]:
            pairs = [
                [self.plain(key, where), one if type(one) in _PLAIN else self.plain(one, f"{where}[{key!r}]")]
                for key, one in value.items()
            ]
            return [kind.__name__, number, pairs]
        if kind is PosixPath:
            return ["path", number, str(value)]
        if kind.__module__ == "torch" and kind.__name__ in ("device", "dtype"):
            return [kind.__name__, number, str(value).removeprefix("torch.")]
        if names := _field_names(kind):
            held = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
            parts = [[name, one if type(one) in _PLAIN else self.plain(one, f"{where}.{name}")] for name, one in held]
            return ["data", number, kind.__module__, kind.__qualname__, parts]
        raise ConfigurationError(
            f"{where} is {kind.__module__}.{kind.__qualname__}, which cannot be saved: store only arrays, numbers, "
            "text and data classes of these"
        )

    def _stored(self, array: FlatArray, name: str) -> bytes | str:
        """The array's bytes, or its name among the arrays."""
        if self._arrays is None:
            return np.ascontiguousarray(array).tobytes()
        self._arrays[name] = np.array(array, order="C", copy=True)
        return name


class _Reader:
    def __init__(self, arrays: Mapping[str, FlatArray], former: Former) -> None:
        self._read: dict[int, Any] = {}
        self._arrays = arrays
        self._former = former

    def value(self, plain: Any) -> Any:
        if not isinstance(plain, list):
            return plain
        kind, *rest = plain
        if kind == "int":
            return int(rest[0])
        if kind == "again":
            return self._read[rest[0]]
        number = rest[0]
        found = self._read[number] = self._made(kind, number, rest[1:])
        return found

    def _made(self, kind: str, number: int, rest: list[Any]) -> Any:
        if kind == "array":
            name, shape, writeable, data = rest
            array = self._array(name, shape, data)
            array.flags.writeable = writeable
            return array
        if kind == "tensor":
            name, shape, device, data = rest
            import_module("torch")
            return to_tensor(self._array(name, shape, data), device)
        if kind == "number":
            return np.frombuffer(rest[1], numpy_dtype(rest[0]))[0]
        if kind == "random":
            state, seeds = map(self.value, rest)
            if seeds["pool_size"] > _LARGEST_POOL:
                raise ValueError(
                    f"pool_size of a saved random generator must be <= {_LARGEST_POOL} words, got {seeds['pool_size']}"
                )
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(**seeds)))
            generator.bit_generator.state = state
            return generator
        if kind == "slice":
            return slice(*rest)
        if kind == "deque":
            return deque(map(self.value, rest[0]), rest[1])
        if kind == "path":
            return Path(rest[0])
        if kind in ("device", "dtype"):
            torch: Any = import_module("torch")
            return torch.device(rest[0]) if kind == "device" else getattr(torch, rest[0])
        if kind in _SEQUENCES:
            if kind == "list":  # the list may contain itself
                made: list[Any] = []
                self._read[number] = made
                made.extend(map(self.value, rest[0]))
                return made
            return _SEQUENCES[kind](map(self.value, rest[0]))
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]({self.value(key): self.value(one) for key, one in rest[0]})
        return self._data(number, *rest)

    def _array(self, dtype: str, shape: list[int], data: bytes | str) -> FlatArray:
        """A new array from its bytes, or from its name among the arrays."""
        if isinstance(data, bytes):
            return np.frombuffer(bytearray(data), numpy_dtype(dtype)).reshape(shape)
        found = self._arrays[data]
        if name_of(found) != dtype or found.shape != tuple(shape):
            raise ValueError(f"{data} is an array of {found.dtype} {found.shape}, not of {dtype} {tuple(shape)}")
        return np.array(found)

    def _data(self, number: int, module: str, name: str, parts: list[Any]) -> Any:
        if module.startswith("flockstep.drivers."):  # as the folder was called in earlier versions
            module = module.replace("drivers", "runtime", 1)
        if (former := self._former.get(f"{module}.{name}")) is not None:
            return former({field: self.value(one) for field, one in parts})
        kind: Any = sys.modules[module]
        for part in name.split("."):
            kind = getattr(kind, part)
        names = _field_names(kind) if isinstance(kind, type) else ()
        if not names:
            raise ProtocolError(f"{module}.{name} is not a data class")
        saved = {field for field, _ in parts}
        if wrong := saved.difference(names) | (_required(kind) - saved):
            raise ProtocolError(f"the fields of {module}.{name} differ from those saved: {', '.join(sorted(wrong))}")
        if issubclass(kind, msgspec.Struct):
            return kind(**{field: self.value(one) for field, one in parts})
        if issubclass(kind, tuple):
            return tuple.__new__(kind, [self.value(one) for _, one in parts])
        made: Any = object.__new__(kind)
        self._read[number] = made
        for field, one in parts:
            object.__setattr__(made, field, self.value(one))
        return made


def _plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether the name of a dtype says all of it, as of numbers; not of text, dates, records and Python objects."""
    try:
        return numpy_dtype(dtype.name) == dtype and not dtype.hasobject
    except (TypeError, AttributeError):
        return False


def _seeds_of(generator: np.random.Generator, where: str) -> dict[str, Any]:
    """The seeds of a generator, from which `Generator.spawn` makes others."""
    bits = generator.bit_generator
    seeds = bits.seed_seq
    if type(bits) is not np.random.PCG64 or type(seeds) is not np.random.SeedSequence:
        raise ConfigurationError(
            f"{where} is a generator of {type(bits).__name__}, which cannot be saved: make generators with "
            "numpy.random.default_rng(seed)"
        )
    return {name: getattr(seeds, name) for name in ("entropy", "spawn_key", "pool_size", "n_children_spawned")}


def _field_names(kind: type) -> tuple[str, ...]:
    """Names of the fields of a data class, a struct or a named tuple; empty for any other class."""
    if issubclass(kind, tuple):
        return tuple(getattr(kind, "_fields", ()))
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return ()


def _required(kind: Any) -> frozenset[str]:
    """Names of the fields that every saved value of a class has; a data class can have others that were never set."""
    if not dataclasses.is_dataclass(kind):
        return frozenset(kind._fields) if issubclass(kind, tuple) else frozenset()
    unset = dataclasses.MISSING
    own = (one for one in dataclasses.fields(kind) if one.init)
    return frozenset(one.name for one in own if one.default is unset and one.default_factory is unset)
