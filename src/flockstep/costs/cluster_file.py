"""Reads and writes descriptions of clusters in TOML. An error names the file, the key, the value and the way out."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import tomli_w

from flockstep.costs.cluster import (
    DAY,
    MOST,
    ClusterLink,
    ClusterShape,
    KeyPath,
    MachineGroup,
    Rates,
    Reach,
    WrongValue,
    listed,
    shown,
)
from flockstep.costs.clusters import FOLDER, names
from flockstep.errors import ConfigurationError, UnknownName
from flockstep.simulation import units
from flockstep.simulation.compute import ComputeModel

HERE = "here"
"""Name by which a user refers to the cluster file that `flockstep calibrate` stores for this machine."""

_QUANTITY = re.compile(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_MEMORY = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_RATE = {f"{prefix}/s": scale for prefix, scale in _PREFIXES.items()}
_OFTEN = {
    "/hour": 1 / 3600,
    "/day": 1 / DAY,
    "/week": 1 / (7 * DAY),
    "/month": 1 / (30 * DAY),
    "/year": 1 / (365 * DAY),
}


@dataclass(frozen=True)
class _Key:
    """A key of a description: what its value is, and how a quantity is read and written."""

    kind: type = str
    words: str = "text"
    parse: Callable[[str], float] | None = None
    """Function that reads a quantity, which is text with a unit; None for other values."""
    example: str = ""
    write: Callable[[Any], Any] = lambda value: value

    def read(self, key: str, value: Any) -> Any:
        """Return the value of the key in a document.

        Raises:
            WrongValue: the document has a value of another kind.
        """
        if self.parse is None:
            if self.kind is float and type(value) is int and abs(value) < 1e300:
                return float(value)
            if type(value) is not self.kind:
                raise WrongValue(f"{key} must be {self.words}, got {shown(value)}", key)
            return value
        if not isinstance(value, str):
            raise WrongValue(f"{key} must be text with a unit, got {shown(value)}; write {key} = {self.example!r}", key)
        if re.fullmatch(r"\s*[-+]?[0-9.]+(?:[eE][+-]?[0-9]+)?\s*", value):
            raise WrongValue(f"{key} must have a unit, got {shown(value)}; write it like {self.example!r}", key)
        try:
            return float(f"{self.parse(value):.12g}")  # 50us are 0.00005 s, not 0.000049999999999999996
        except ConfigurationError as error:
            raise WrongValue(str(error), key) from None


def memory_bytes(text: str) -> float:
    """Return the number of bytes that a text such as "16GB" or "512MiB" stands for.

    Raises:
        ConfigurationError: the text is not a positive number with a unit of memory.
    """
    return _scaled(text, _MEMORY, f"memory must be > 0 bytes, with a unit ({', '.join(_MEMORY)})", "16GB")


def _rate(text: str) -> float:
    return _scaled(text, _RATE, f"a rate must be > 0 per second, with a unit ({', '.join(_RATE)})", "500M/s")


def _failures(text: str) -> float:
    return _scaled(text, _OFTEN, "failures must be a rate >= 0", "0.01/day", zero=True)


def _scaled(text: str, scales: Mapping[str, float], rule: str, example: str, zero: bool = False) -> float:
    found = _QUANTITY.fullmatch(text)
    value = float(found[1]) * scales.get(found[2], math.nan) if found else math.nan
    if not (0 < value < math.inf or (zero and value == 0)):
        raise ConfigurationError(f"{rule}, got {text!r}; write it like {example!r}")
    return value


def _with_prefix(value: float, unit: str) -> str:
    """The value without loss, with the prefix k, M or G of a unit."""
    prefix = next((one for one in ("G", "M", "k") if value >= _PREFIXES[one]), "")
    return f"{value / _PREFIXES[prefix]:.12g}{prefix}{unit}"


def _duration(key: str, example: str, write: Callable[[Any], str] | None = None) -> _Key:
    written = write or (lambda value: f"{value * 1e6:.12g}us")
    return _Key(parse=lambda text: units.duration(text, key), example=example, write=written)


_YES = _Key(bool, "true or false")
_SPEED = _Key(parse=_rate, example="10G/s", write=lambda value: _with_prefix(value, "/s"))
_CLUSTER = {
    "about": _Key(),
    "compute": _Key(words="a compute model as text, such as 'lognormal(0.05, sigma=0.3)'"),
    "operations": _SPEED,
    "overhead": _duration("overhead", "200us"),
    "message": _duration("message", "20us"),
    "copy": _duration("copy", "2ns"),
    "step": _duration("step", "100us"),
    "job": _Key(),
    "servers_apart": _YES,
}
_GROUP = {
    "count": _Key(int, "a whole number of machines"),
    "workers": _Key(int, "a whole number of workers per machine"),
    "speed": _Key(float, "a number, such as 2 for machines that are twice as fast"),
    "cores": _Key(int, "a whole number of cores per machine"),
    "memory": _Key(parse=memory_bytes, example="16GB", write=lambda value: f"{value / 1e9:.12g}GB"),
    "failures": _Key(parse=_failures, example="0.01/day", write=lambda value: f"{value * DAY:.12g}/day"),
    "restart": _duration("restart", "90s", lambda value: f"{value:.12g}s"),
    "comes_and_goes": _YES,
}
_LINK = {
    "bandwidth": _Key(parse=units.bandwidth, example="1gbit", write=lambda value: _with_prefix(8 * value, "bit")),
    "latency": _duration("latency", "50us"),
    "fair": _YES,
}
_RATES = [field.name for field in dataclasses.fields(Rates)]


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
            f"there is no file {path}; give the file of a cluster, or one of the names {listed(names())}"
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
    try:
        return _cluster(data, name)
    except WrongValue as error:
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.path]
        key = "".join(parts).removeprefix(".")
        raise ConfigurationError(f"{where}, {key}: {error}" if key else f"{where}: {error}") from None


def _cluster(data: dict[str, Any], name: str) -> ClusterShape:
    values = _values(data, _CLUSTER, (), ("nodes", "links", "rates"))
    groups = []
    for one, table in _tables(data, "nodes"):
        read = _values(table, _GROUP, ("nodes", one))
        with _within(("nodes", one)):
            groups.append(MachineGroup(one, **read))
    links = data.get("links", [])
    if not isinstance(links, list):
        raise WrongValue(
            f"links must be an array of tables, got {shown(links)}; write [[links]] above each table", "links"
        )
    wires = tuple(_link(table, ("links", number)) for number, table in enumerate(links))
    rates = {}
    for one, table in _tables(data, "rates"):
        if one not in _RATES:
            raise WrongValue(str(UnknownName.among("table of [rates]", one, _RATES)), "rates", one)
        rates[one] = _values(table, dict.fromkeys(table, _SPEED), ("rates", one))
    if (size := sum(group.size for group in groups)) > MOST:
        raise WrongValue(
            f"a cluster must have <= {MOST} workers, got {size}; describe only a part of the cluster", "nodes"
        )
    if "compute" not in values:
        raise WrongValue("compute is missing; state how long a gradient takes: compute = 'constant(0.01)'", "compute")
    try:
        law = ComputeModel.parse(values.pop("compute"))
    except ConfigurationError as error:
        raise WrongValue(str(error), "compute") from None
    return ClusterShape(name, tuple(groups), wires, law, rates=Rates(**rates), **values)


def _values(data: Any, keys: Mapping[str, _Key], path: KeyPath, further: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of a table, which may also have the keys in `further`."""
    if not isinstance(data, dict):
        raise WrongValue(
            f"{path[-1]} must be a table, got {shown(data)}; write [{'.'.join(map(str, path))}] and its keys on the "
            "lines below",
            *path,
        )
    title = f"[{'.'.join(part for part in path if isinstance(part, str))}]" if path else "a cluster"
    with _within(path):
        for key in data:
            if key not in keys and key not in further:
                raise WrongValue(str(UnknownName.among("key of " + title, key, [*keys, *further])), key)
        return {key: one.read(key, data[key]) for key, one in keys.items() if key in data}


def _tables(data: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    """The tables in the table `key`, as pairs (name, table); empty if the key is missing."""
    inner = data.get(key, {})
    if not isinstance(inner, dict):
        _values(inner, {}, (key,))
    return list(inner.items())


def _link(table: Any, path: KeyPath) -> ClusterLink:
    values = _values(table, _LINK, path, get_args(Reach))
    kinds: list[Reach] = [kind for kind in get_args(Reach) if kind in table]
    if len(kinds) != 1:
        raise WrongValue(
            f"a link must have exactly one of node, inside and between, got {listed(list(kinds))}; write for example "
            "inside = 'machines'",
            *path,
        )
    groups = table[kinds[0]]
    groups = [groups] if isinstance(groups, str) else groups
    if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
        raise WrongValue(
            f"{kinds[0]} must be the name of a group of nodes or a list of such names, got {shown(groups)}; write for "
            f"example {kinds[0]} = 'machines'",
            *path,
            kinds[0],
        )
    if "bandwidth" not in values:
        raise WrongValue("the bandwidth of a link is missing; write for example bandwidth = '1gbit'", *path)
    with _within(path):
        return ClusterLink(kinds[0], tuple(groups), **values)


@contextmanager
def _within(path: KeyPath) -> Iterator[None]:
    """Context manager that puts `path` in front of the path of a refused value."""
    try:
        yield
    except WrongValue as error:
        raise WrongValue(str(error), *path, *error.path) from None


def to_toml(shape: ClusterShape, notes: tuple[str, ...] = ()) -> str:
    """Return the cluster's description as a TOML document without default values. `notes` become comments at the
    top.
    """
    data = _written(shape, _CLUSTER)
    data["compute"] = str(shape.law)
    data["nodes"] = {group.name: _written(group, _GROUP) for group in shape.groups}
    rates = {name: table for name, table in dataclasses.asdict(shape.rates).items() if table}
    if rates:
        data["rates"] = {name: {key: _SPEED.write(one) for key, one in table.items()} for name, table in rates.items()}
    head = "".join(f"# {line}\n" for note in notes for line in note.splitlines())
    links = ""
    for wire in shape.wires:
        groups = list(wire.groups) if len(wire.groups) > 1 else wire.groups[0]
        links += f"\n[[links]]\n{tomli_w.dumps({wire.reach: groups, **_written(wire, _LINK)})}"
    return head + ("\n" if head else "") + tomli_w.dumps(data) + links


def _written(value: Any, keys: Mapping[str, _Key]) -> dict[str, Any]:
    """The values of a part of a description that differ from its defaults."""
    found = {}
    for field in dataclasses.fields(value):
        if field.name in keys and (one := getattr(value, field.name)) != field.default:
            found[field.name] = keys[field.name].write(one)
    return found
