"""Reads cluster descriptions from TOML. An error names the file, the key, the value and the way out."""

from __future__ import annotations

import math
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, get_args

from flockstep.costs.cluster import ClusterShape
from flockstep.costs.clusters import FOLDER, names
from flockstep.costs.machines import DAY, MOST, ClusterLink, KeyPath, MachineGroup, Rates, Reach, WrongValue, shown
from flockstep.errors import ConfigurationError, UnknownName
from flockstep.simulation import units
from flockstep.simulation.compute import ComputeModel

HERE = "here"
"""Name by which a user refers to the cluster file that `flockstep calibrate` stores for this machine."""

_QUANTITY = re.compile(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*")
_MEMORY = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_RATE = {"/s": 1.0, "k/s": 1e3, "M/s": 1e6, "G/s": 1e9, "T/s": 1e12, "P/s": 1e15}
_OFTEN = {"/hour": 3600.0, "/day": DAY, "/week": 7 * DAY, "/month": 30 * DAY, "/year": 365 * DAY}


def calibration() -> pathlib.Path:
    """Return the path of the cluster file that `flockstep calibrate` writes for this machine."""
    return pathlib.Path.home() / ".cache" / "flockstep" / f"{HERE}.toml"


def usual_cluster() -> str:
    """Return the name of the cluster that a plan uses by default: "here" if this machine was calibrated, otherwise
    "laptop".
    """
    try:
        return HERE if calibration().is_file() else "laptop"
    except (OSError, RuntimeError):  # no home, or none that can be read
        return "laptop"


def load_cluster(name: str | pathlib.Path) -> ClusterShape:
    """Load a built-in cluster, or a cluster that a TOML file describes.

    Args:
        name: name of a built-in cluster, "here" for this machine's calibration, or path of a TOML file.

    Raises:
        ConfigurationError: there is no such cluster, or the file breaks a rule; the message names the file, the key,
            the value and the way out.
    """
    path = pathlib.Path(name)
    if name == HERE:
        path = calibration()
        if not path.is_file():
            raise ConfigurationError(
                f"cluster {HERE} needs this machine's calibration, got no file {path}; run flockstep calibrate once"
            )
    elif path.suffix != ".toml":
        if str(name) not in names():
            unknown = UnknownName.among("cluster", str(name), [*names(), HERE])
            raise UnknownName(f"{unknown} (or give the path of a .toml file)")
        path = FOLDER / f"{name}.toml"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no file {path}; give the file of a cluster, or one of the names {_or(names())}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path} as text: {error}; give a cluster file in TOML") from None
    return read_cluster(text, str(name) if path.parent == FOLDER else str(path), path.stem)


def read_cluster(text: str, where: str = "cluster.toml", name: str = "cluster") -> ClusterShape:
    """Return the cluster that a TOML document describes. `where` names the document in errors.

    Raises:
        ConfigurationError: the document breaks a rule.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where} is not valid TOML: {error}; correct this place") from None
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        raise ConfigurationError(
            f"{where} nests brackets too deeply, or has a number with too many digits; use fewer"
        ) from None
    document = _Document(where)
    top = _Table(document, (), data)
    with document.telling():
        return _cluster(top, name)


@dataclass(frozen=True)
class _Document:
    """The TOML document, for error messages."""

    where: str

    def wrong(self, message: str, path: KeyPath) -> ConfigurationError:
        """An error for the value at `path`, such as ("links", 0, "between")."""
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        return ConfigurationError(f"{self.where}, {key}: {message}" if key else f"{self.where}: {message}")

    @contextmanager
    def telling(self, path: KeyPath = ()) -> Iterator[None]:
        """Context manager that adds the key to the error of a refused value, whose path begins at `path`."""
        try:
            yield
        except WrongValue as error:
            raise self.wrong(str(error), path + error.path) from None


class _Table:
    """A table of the document. Keys are taken one by one; keys that are never taken are unknown."""

    def __init__(self, document: _Document, path: KeyPath, data: Any):
        self.document, self.path = document, path
        if not isinstance(data, dict):
            raise document.wrong(
                f"{path[-1]} must be a table, got {shown(data)}; write [{'.'.join(map(str, path))}] and its keys on "
                "the lines below",
                path,
            )
        self._data: dict[str, Any] = data
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def wrong(self, key: str, message: str) -> ConfigurationError:
        """An error for the value of a key."""
        return self.document.wrong(message, (*self.path, key))

    def take(self, key: str, kind: type, words: str) -> Any:
        """The value of a key; None if the key is missing."""
        self._known.append(key)
        value = self._data.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            try:
                return float(value)
            except OverflowError:
                raise self.wrong(key, f"{key} must be {words}, got {shown(value)}") from None
        if type(value) is not kind:
            raise self.wrong(key, f"{key} must be {words}, got {shown(value)}")
        return value

    def quantity(self, key: str, parse: Callable[[str], float], example: str) -> Any:
        """The value of a key whose value is text with a unit; None if the key is missing."""
        self._known.append(key)
        value = self._data.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(key, f"{key} must be text with a unit, got {shown(value)}; write {key} = {example!r}")
        if re.fullmatch(r"\s*[-+]?[0-9.]+(?:[eE][+-]?[0-9]+)?\s*", value):
            raise self.wrong(key, f"{key} must have a unit, got {shown(value)}; write it like {example!r}")
        try:
            return float(f"{parse(value):.12g}")  # 50us are 0.00005 s, not 0.000049999999999999996
        except ConfigurationError as error:
            raise self.wrong(key, str(error)) from None

    def words(self, key: str) -> tuple[str, ...]:
        """The value of a key whose value is a word or a list of words."""
        self._known.append(key)
        value = self._data[key]
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.wrong(
                key,
                f"{key} must be the name of a group of nodes or a list of such names, got {shown(value)}; write for "
                f"example {key} = 'machines'",
            )
        return tuple(value)

    def tables(self, key: str) -> list[tuple[str, _Table]]:
        """The tables in the table `key`, as pairs (name, table); empty if the key is missing."""
        self._known.append(key)
        if key not in self._data:
            return []
        inner = _Table(self.document, (*self.path, key), self._data[key])
        return [(name, _Table(self.document, (*inner.path, name), one)) for name, one in inner._data.items()]

    def array(self, key: str) -> list[_Table]:
        """The array of tables `key`; empty if the key is missing."""
        self._known.append(key)
        value = self._data.get(key, [])
        if not isinstance(value, list):
            raise self.wrong(
                key, f"{key} must be an array of tables, got {shown(value)}; write [[{key}]] above each table"
            )
        return [_Table(self.document, (*self.path, key, i), one) for i, one in enumerate(value)]

    def free(self, parse: Callable[[str], float], example: str) -> dict[str, float]:
        """All keys of a table with free keys, each with a quantity."""
        return {key: self.quantity(key, parse, example) for key in self._data}

    def knows(self, keys: Iterable[str]) -> None:
        """Accept keys that are read elsewhere."""
        self._known.extend(keys)

    def finish(self) -> None:
        """Refuse the keys that were never taken."""
        for key in self._data:
            if key not in self._known:
                raise self.wrong(key, str(UnknownName.among("key of " + self._title, key, self._known)))

    @property
    def _title(self) -> str:
        return f"[{'.'.join(str(part) for part in self.path if isinstance(part, str))}]" if self.path else "a cluster"


def _cluster(top: _Table, name: str) -> ClusterShape:
    about = top.take("about", str, "text")
    job = top.take("job", str, "text")
    operations = top.quantity("operations", _rate, "10G/s")
    overhead = top.quantity("overhead", lambda text: units.duration(text, "overhead"), "200us")
    message = top.quantity("message", lambda text: units.duration(text, "message"), "20us")
    copy = top.quantity("copy", lambda text: units.duration(text, "copy"), "2ns")
    step = top.quantity("step", lambda text: units.duration(text, "step"), "100us")
    apart = top.take("servers_apart", bool, "true or false") or False
    text = top.take("compute", str, "a compute model as text, such as 'lognormal(0.05, sigma=0.3)'")
    groups = tuple(_group(*one) for one in top.tables("nodes"))
    wires = tuple(map(_wire, top.array("links")))
    rates = {one: _rates(one, table) for one, table in top.tables("rates")}
    top.finish()
    if (size := sum(group.size for group in groups)) > MOST:
        raise top.wrong(
            "nodes", f"a cluster must have <= {MOST} workers, got {size}; describe only a part of the cluster"
        )
    if text is None:
        raise top.wrong("compute", "compute is missing; state how long a gradient takes: compute = 'constant(0.01)'")
    try:
        law = ComputeModel.parse(text)
    except ConfigurationError as error:
        raise top.wrong("compute", str(error)) from None
    said = about or ""
    costs = (message or 0.0, copy or 0.0, step or 0.0)
    return ClusterShape(name, groups, wires, law, operations, overhead or 0.0, said, job, Rates(**rates), *costs, apart)


def _group(name: str, table: _Table) -> MachineGroup:
    values = {
        "count": table.take("count", int, "a whole number of machines"),
        "workers": table.take("workers", int, "a whole number of workers per machine"),
        "speed": table.take("speed", float, "a number, such as 2 for machines that are twice as fast"),
        "cores": table.take("cores", int, "a whole number of cores per machine"),
        "memory": table.quantity("memory", memory_bytes, "16GB"),
        "failures": table.quantity("failures", _often, "0.01/day"),
        "restart": table.quantity("restart", lambda text: units.duration(text, "restart"), "90s"),
        "comes_and_goes": table.take("comes_and_goes", bool, "true or false"),
    }
    table.finish()
    with table.document.telling(table.path):
        return MachineGroup(name, **{key: value for key, value in values.items() if value is not None})


def _wire(table: _Table) -> ClusterLink:
    kinds = [kind for kind in get_args(Reach) if kind in table]
    bandwidth = table.quantity("bandwidth", units.bandwidth, "1gbit")
    latency = table.quantity("latency", lambda text: units.duration(text, "latency"), "50us")
    fair = table.take("fair", bool, "true or false")
    groups = [table.words(kind) for kind in kinds]
    table.knows(get_args(Reach))
    table.finish()
    if len(kinds) != 1:
        raise table.document.wrong(
            f"a link must have exactly one of node, inside and between, got {_or(kinds)}; write for example inside = "
            "'machines'",
            table.path,
        )
    if bandwidth is None:
        raise table.document.wrong(
            "the bandwidth of a link is missing; write for example bandwidth = '1gbit'", table.path
        )
    with table.document.telling(table.path):
        return ClusterLink(kinds[0], groups[0], bandwidth, latency or 0.0, fair or False)


def _rates(name: str, table: _Table) -> dict[str, float]:
    known = [one.name for one in fields(Rates)]
    if name not in known:
        raise table.document.wrong(str(UnknownName.among("table of [rates]", name, known)), table.path)
    return table.free(_rate, "500M/s")


def _rate(text: str) -> float:
    return _in(text, _RATE, "a rate must be > 0 per second", "500M/s")


def memory_bytes(text: str) -> float:
    """Return the number of bytes that a text such as "16GB" or "512MiB" stands for.

    Raises:
        ConfigurationError: the text is not a positive number with a unit of memory.
    """
    return _in(text, _MEMORY, "memory must be > 0 bytes", "16GB")


def _often(text: str) -> float:
    number, scale = _split(text, _OFTEN)
    if scale is None or not 0 <= number < math.inf:
        raise ConfigurationError(f"failures must be a rate >= 0, got {text!r}; write it like '0.01/day'")
    return number / scale


def _in(text: str, scales: Mapping[str, float], rule: str, example: str) -> float:
    number, scale = _split(text, scales)
    if scale is None or not 0 < number * scale < math.inf:
        raise ConfigurationError(f"{rule}, with a unit ({', '.join(scales)}), got {text!r}; write it like {example!r}")
    return number * scale


def _split(text: str, scales: Mapping[str, float]) -> tuple[float, float | None]:
    found = _QUANTITY.fullmatch(text)
    return (float(found[1]), scales.get(found[2])) if found else (0.0, None)


def _or(words: list[str]) -> str:
    return ", ".join(words) or "none"
