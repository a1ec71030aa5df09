"""Writes a cluster's description as a TOML document that `flockstep.costs.cluster_reading` can read."""

from __future__ import annotations

import dataclasses
from typing import Any

import tomli_w

from flockstep.costs.cluster import ClusterShape
from flockstep.costs.machines import DAY, ClusterLink, MachineGroup


def to_toml(shape: ClusterShape, notes: tuple[str, ...] = ()) -> str:
    """Return the cluster's description as a TOML document without default values. `notes` become comments at the
    top.
    """
    data: dict[str, Any] = {"about": shape.about} if shape.about else {}
    data["compute"] = str(shape.law)
    if shape.operations is not None:
        data["operations"] = _scaled(shape.operations, "/s")
    for key in ("overhead", "message", "copy", "step"):
        if getattr(shape, key):
            data[key] = f"{getattr(shape, key) * 1e6:.12g}us"
    if shape.job is not None:
        data["job"] = shape.job
    if shape.servers_apart:
        data["servers_apart"] = True
    data["nodes"] = {group.name: _group(group) for group in shape.groups}
    rates = dataclasses.asdict(shape.rates)
    written = {name: {key: _scaled(one, "/s") for key, one in table.items()} for name, table in rates.items() if table}
    if written:
        data["rates"] = written
    head = "".join(f"# {line}\n" for note in notes for line in note.splitlines())
    links = "".join(f"\n[[links]]\n{tomli_w.dumps(_wire(wire))}" for wire in shape.wires)
    return head + ("\n" if head else "") + tomli_w.dumps(data) + links


def _group(group: MachineGroup) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for field in dataclasses.fields(MachineGroup):
        value = getattr(group, field.name)
        if field.name != "name" and value != field.default:
            written[field.name] = value
    if "memory" in written:
        written["memory"] = f"{group.memory / 1e9:.12g}GB" if group.memory else ""
    if "failures" in written:
        written["failures"] = f"{group.failures * DAY:.12g}/day"
    if "restart" in written:
        written["restart"] = f"{group.restart:.12g}s"
    return written


def _wire(wire: ClusterLink) -> dict[str, Any]:
    groups = list(wire.groups) if len(wire.groups) > 1 else wire.groups[0]
    written: dict[str, Any] = {wire.reach: groups, "bandwidth": _scaled(wire.bandwidth * 8, "bit")}
    if wire.latency:
        written["latency"] = f"{wire.latency * 1e6:.12g}us"
    if wire.fair:
        written["fair"] = True
    return written


def _scaled(value: float, unit: str) -> str:
    """Format `value` without loss, with the prefix k, M or G of a unit."""
    for prefix, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.12g}{prefix}{unit}"
    return f"{value:.12g}{unit}"
