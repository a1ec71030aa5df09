"""Prints how large the project is: lines of the wheel by room, of the lab and of the tests, each beside its limit;
functions with many parameters; and modules that one other module alone imports.

    python tools/size.py
    python tools/size.py --names     also the names of the functions and the modules
    python tools/size.py --check     exit code 1 if a part that is held is above its limit

Lines are all lines of all .py files, as `wc -l` counts them. A room is a group of folders that belong together.
Python's standard library suffices.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE, LAB, TESTS = ROOT / "src" / "flockstep", ROOT / "lab" / "src" / "flockstep_lab", ROOT / "tests"
MOST_PARAMETERS = 8
"""Most parameters of a function, without self and cls."""


class Limit(NamedTuple):
    """The most lines that a part of the project may have."""

    name: str
    lines: int
    patterns: tuple[str, ...]
    """Patterns of paths below the folder of the package."""
    held: bool = False
    """Whether `--check` fails above the limit."""


# A file belongs to the first room with a pattern of its path, so the patterns of single files stand before folders.
ROOMS = (
    Limit("core, arrays", 5_500, ("errors.py", "system.py", "registry.py", "expression.py", "messages.py",
                                  "programs.py", "nodes.py", "core/*", "arrays/*"), held=True),
    Limit("the algorithms", 16_500, ("strategies/*", "codecs/*", "feedback/*", "collectives/*", "topologies/*",
                                     "optimizers/*", "schedules/*", "systems/*")),
    Limit("simulation", 1_900, ("simulation/*",)),
    Limit("records, report, trackers", 4_500, ("records/*", "report/*", "trackers/*")),
    Limit("links", 3_000, ("links/*",)),
    Limit("split", 7_000, ("split/*", "partitions/*", "runtime/part*", "runtime/real_part.py", "runtime/real_joint.py",
                           "runtime/shards.py", "runtime/virtual_split.py")),
    Limit("frameworks", 6_000, ("runtime/torch_*", "runtime/jax_*", "torch/*", "jax*", "keras*", "lightning*",
                                "transformers*", "accelerate*", "frameworks/*")),
    Limit("runtime", 6_000, ("runtime/*",)),
    Limit("launch", 5_500, ("launchers/*",)),
    Limit("workloads, testing, communicator", 4_200, ("workloads/*", "testing/*", "communicator/*")),
    Limit("sealed jobs", 1_200, ("sealed/*",)),
    Limit("planning, costs", 5_500, ("planning/*", "costs/*")),
    Limit("api, cli, doctor", 3_500, ("api/*", "cli/*", "doctor.py", "options.py", "experiments/*", "__init__.py",
                                      "__main__.py")),
)  # fmt: skip
WHEEL = Limit("the wheel", 62_000, ("*",))
STARTING = Limit("launchers and runtime", 13_000, ("launchers/*", "runtime/*"))
OTHERS = Limit("lab", 14_000, ("*",), held=True), Limit("tests", 52_000, ("*",))


class Function(NamedTuple):
    """A function with more parameters than `MOST_PARAMETERS`."""

    place: str
    parameters: int


def files(folder: Path) -> dict[str, str]:
    """Return the text of each .py file: path below the folder → text."""
    return {str(path.relative_to(folder)): path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}


def lines_of(texts: dict[str, str], limit: Limit) -> int:
    return sum(text.count("\n") for path, text in texts.items() if any(fnmatch(path, one) for one in limit.patterns))


def room_of(path: str) -> str:
    """Return the name of the room that a file of the package belongs to; a file without a room is named by its path."""
    return next((room.name for room in ROOMS if any(fnmatch(path, one) for one in room.patterns)), path)


def long_signatures(texts: dict[str, str]) -> Iterator[Function]:
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                count = len(names) - (names[:1] in (["self"], ["cls"])) + bool(given.vararg) + bool(given.kwarg)
                if count > MOST_PARAMETERS:
                    yield Function(f"{path}:{node.lineno} {node.name}", count)


def imported_once(texts: dict[str, str]) -> dict[str, str]:
    """Return the modules that exactly one other module imports by name: module → its importer.

    Components of the registry are imported by their names in the table, and are left out.
    """
    modules = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in texts}
    importers = defaultdict[str, set[str]](set)
    for module, path in modules.items():
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flockstep"):
                whole = node.module.removeprefix("flockstep").removeprefix(".")
                for alias in node.names:  # the name of a module stands for the module
                    inner = f"{whole}.{alias.name}".removeprefix(".")
                    importers[inner if inner in modules else whole].add(module)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importers[alias.name.removeprefix("flockstep.")].add(module)
    registered = texts["registry.py"]
    return {
        module: next(iter(others))
        for module, others in sorted(importers.items())
        if module in modules and len(others) == 1 and f"flockstep.{module}:" not in registered
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="also print the names of functions and modules")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a part that is held is above its limit")
    arguments = parser.parse_args()
    product, lab, tests = files(SOURCE), files(LAB), files(TESTS)
    rooms = Counter[str]()
    for path, text in product.items():
        rooms[room_of(path)] += text.count("\n")
    rows = [(room, rooms.pop(room.name, 0)) for room in ROOMS]
    rows += [(limit, lines_of(product, limit)) for limit in (WHEEL, STARTING)]
    rows += [(limit, lines_of(texts, limit)) for limit, texts in zip(OTHERS, (lab, tests), strict=True)]
    print(f"{'lines':34}{'now':>9}{'limit':>9}{'above':>9}")
    for limit, now in rows:
        above = f"{now - limit.lines:9,}" if now > limit.lines else ""
        print(f"{limit.name:34}{now:9,}{limit.lines:9,}{above}")
    for path, count in rooms.items():
        print(f"{path:34}{count:9,}  in no room")

    print("\ntests by folder")
    folders = Counter[str]()
    for path, text in tests.items():
        folders[path.partition("/")[0] if "/" in path else "."] += text.count("\n")
    for folder, count in folders.most_common():
        print(f"{folder:34}{count:9,}")

    wide, once = sorted(long_signatures(product), key=lambda one: -one.parameters), imported_once(product)
    print(f"\nfunctions of src with more than {MOST_PARAMETERS} parameters: {len(wide)}")
    if arguments.names:
        print(*(f"    {one.parameters:3} {one.place}" for one in wide), sep="\n")
    print(f"modules of src that one other module imports: {len(once)} of {len(product)}")
    if arguments.names:
        print(*(f"    {module}  by {importer}" for module, importer in once.items()), sep="\n")
    broken = [limit.name for limit, now in rows if limit.held and now > limit.lines]
    if arguments.check and broken:
        print(
            f"above the limit: {', '.join(broken)}; take lines out, or raise the limit with a reason", file=sys.stderr
        )
    return int(arguments.check and bool(broken))


if __name__ == "__main__":
    sys.exit(main())
