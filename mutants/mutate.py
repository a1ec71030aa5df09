"""Mutation testing: change one operator or number of an algorithm, and see whether its tests notice.

    python mutants/mutate.py --sample 12 --seed 1 strategies/consistency codecs

Draws `--sample` mutants per folder of src/flockstep by the seed, runs the tests that concern the mutated module on
each, and prints how many were noticed. A mutant that no test notices is a survivor: it is listed with its change.
Survivors that argued.toml explains do not count; any other makes the exit code 1. Mutants are made by cosmic-ray's
operators.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "flockstep"
FOLDERS = ("strategies", "strategies/consistency", "strategies/rules", "codecs", "schedules", "topologies", "costs")
LEFT_OUT = ("RemoveDecorator", "ExceptionReplacer", "Variable", "Eq_Is", "NotEq_IsNot")
"""Operators whose mutants fail at import, need names to be chosen, or change nothing where values are interned."""
MOST_FILES = 4
"""Files of tests tried on a mutant, those that concern its module most first."""
LAST = (
    "tests/unit/test_registry.py",
    "tests/unit/test_expression_sum.py",
    "tests/unit/test_docs.py::test_generated_parts_are_up_to_date",
)
"""Tried on a mutant that nothing else noticed: every component is a value that cannot change, sums of components, and
tables in docs/ that hold defaults, bytes and what a strategy promises."""
TIMEOUT = 900
"""Seconds after which a mutant that keeps its tests busy counts as noticed."""


@dataclass(frozen=True)
class Mutant:
    """One changed operator in one module."""

    module: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: `killed`, `survived`, `timeout` or `untested`."""

    mutant: Mutant
    end: str
    tests: tuple[str, ...]


def positions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Operator, occurrence and line of every mutation of a module, annotations and docstrings left out."""
    text = path.read_text("utf-8")
    silent, tree = _silent_lines(text), get_ast(text)
    for name in operator_names():
        if any(part in name for part in LEFT_OUT) or get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        found = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(found):
            if not any(first <= (line, column) < last for first, last in silent):
                yield name, occurrence, line


def _silent_lines(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a change has no effect at run time: annotations, which are never evaluated."""
    nodes = list(ast.walk(ast.parse(text)))
    notes = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in notes if n is not None]


def draw(folder: str, count: int, seed: int) -> list[Mutant]:
    """`count` mutants of the modules of a folder: lines by chance first, then a mutation of each."""
    modules = sorted(path for path in (SOURCE / folder).glob("*.py") if path.name != "__init__.py")
    if folder == "costs":
        modules += sorted((SOURCE / folder / "families").glob("*.py"))
    by_line: dict[tuple[Path, int], list[tuple[str, int]]] = {}
    for path in modules:
        for name, occurrence, line in positions(path):
            by_line.setdefault((path, line), []).append((name, occurrence))
    chance = random.Random(f"{seed} {folder}")  # noqa: S311 - no secret
    lines = chance.sample(sorted(by_line), min(count, len(by_line)))
    return [made(path, line, *chance.choice(by_line[path, line])) for path, line in lines]


def made(path: Path, line: int, operator: str, occurrence: int) -> Mutant:
    """The mutant, with the lines that differ."""
    before = path.read_text("utf-8")
    after = mutate_code(before, get_operator(operator)(), occurrence)
    changed = [one for one in difflib.ndiff(before.splitlines(), after.splitlines()) if one[:2] in ("- ", "+ ")]
    old, new = (" ".join(one[2:].strip() for one in changed if one[0] == sign) for sign in "-+")
    return Mutant(str(path.relative_to(SOURCE)), operator, occurrence, line, old, new)


def tests_for(module: str) -> tuple[str, ...]:
    """Files of tests that concern a module: named like it, of its folder, importing it, marked for its names."""
    dotted = "flockstep." + module.removesuffix(".py").replace("/", ".")
    table = (SOURCE / "registry.py").read_text("utf-8")
    names = {line.split('"')[1] for line in table.splitlines() if f'"{dotted}:' in line}
    parts = ast.parse((SOURCE / module).read_text("utf-8")).body
    public = {node.name for node in parts if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_"}
    folder = dotted.split(".")[1]
    users = [path for path in SOURCE.rglob("*.py") if f"from {dotted} import" in path.read_text("utf-8")]
    ranked = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.parent.name in ("end_to_end", "faults", "security", "claims"):
            continue
        text = path.read_text("utf-8")
        score = 8 * (Path(module).stem in path.stem)
        score += 6 * any(f':{name}"' in text for name in names)
        score += 4 * (f"from {dotted} import" in text)
        score += 2 * any(re.search(rf"\b{name}\b", text) is not None for name in public)
        score += 3 * (folder.removesuffix("s") in path.stem) + (f"flockstep.{folder}" in text)
        score += sum(any(word in path.stem for word in (user.stem,)) for user in users)
        if score:
            ranked.append((-score, str(path.relative_to(ROOT))))
    chosen = [path for _, path in sorted(ranked)[:MOST_FILES]]
    return tuple(sorted(chosen, key=lambda path: "conformance" in path))  # those take longest


class Overlay:
    """A copy of the source tree in which one module at a time is mutated, put before the installed one."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="mutants-"))
        shutil.copytree(ROOT / "src", self.path / "src")

    def failing(self, tests: Sequence[str]) -> str | None:
        """The first test that fails on the tree as it is; "" if none does; None: not within the time."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.path / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return None
        if ended.returncode == 0:
            return ""
        named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ended.stdout, re.MULTILINE)
        return named[1] if named else tests[0]

    def tried(self, mutant: Mutant) -> Outcome:
        """Mutate, test, restore; what failed has to pass again then."""
        path, tests = self.path / "src" / "flockstep" / mutant.module, tests_for(mutant.module)
        if not tests:
            return Outcome(mutant, "untested", tests)
        original = path.read_text("utf-8")
        path.write_text(mutate_code(original, get_operator(mutant.operator)(), mutant.occurrence), "utf-8")
        try:
            failed = self.failing((*tests, *LAST))
        finally:
            path.write_text(original, "utf-8")
        if failed and self.failing((failed,)) != "":
            raise SystemExit(f"{failed} fails without a mutation too; mend it first")
        if failed is None:
            return Outcome(mutant, "timeout", tests)
        return Outcome(mutant, "killed", (failed,)) if failed else Outcome(mutant, "survived", tests)

    def close(self) -> None:
        """Remove the copy of the source."""
        shutil.rmtree(self.path, ignore_errors=True)


def argued() -> dict[tuple[str, str, str], str]:
    """(module, line before, line after) → why no test can or need notice it."""
    entries = tomllib.loads((Path(__file__).parent / "argued.toml").read_text("utf-8")).get("survivor", [])
    return {(one["module"], one["before"], one["after"]): one["reason"] for one in entries}


def try_all(mutants: Sequence[Mutant], processes: int) -> Iterator[Outcome]:
    """Try every mutant, several at a time; outcomes in order."""
    overlays = [Overlay() for _ in range(processes)]
    try:
        with ThreadPoolExecutor(processes) as pool:

            def one(mutant: Mutant) -> Outcome:
                overlay = overlays.pop()
                try:
                    return overlay.tried(mutant)
                finally:
                    overlays.append(overlay)

            yield from pool.map(one, mutants)
    finally:
        for overlay in overlays:
            overlay.close()


def main() -> int:
    """Draw mutants, run the tests on each, and print which of them survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="folders of src/flockstep")
    parser.add_argument("--sample", type=int, default=6, help="mutants per folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="append every outcome to this file, as JSON lines")
    options = parser.parse_args()
    known, left = argued(), 0
    for folder in options.folders:
        ends: list[str] = []
        for outcome in try_all(draw(folder, options.sample, options.seed), options.processes):
            mutant = outcome.mutant
            reason = known.get((mutant.module, mutant.before, mutant.after))
            end = "argued" if reason and outcome.end != "killed" else outcome.end
            ends.append(end)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps({**asdict(outcome), "end": end}) + "\n")
            if end in ("survived", "untested"):
                left += 1
                print(f"  {end} {mutant.module}:{mutant.line}\n    - {mutant.before}\n    + {mutant.after}", flush=True)
        kinds = ("killed", "timeout", "argued", "survived", "untested")
        counts = ", ".join(f"{ends.count(kind)} {kind}" for kind in kinds if kind in ends)
        print(f"{folder}: {len(ends)} mutants, {counts}", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
