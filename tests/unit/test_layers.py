"""The project's own rules: the order of the layers, and what an import may load."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import flockstep

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "flockstep"
ORDER = """
    errors system options registry expression arrays optimizers schedules topologies codecs feedback messages programs
    nodes links collectives partitions
    strategies systems simulation costs frameworks split workloads records sealed runtime communicator launchers
    report trackers planning experiments testing
    doctor jax lightning accelerate transformers keras cli
"""
LAYERS = ORDER.split()
HEAVY = (
    "torch",
    "jax",
    "optax",
    "flax",
    "keras",
    "numba",
    "plotly",
    "sklearn",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "accelerate",
)
FILES = sorted(SOURCE.rglob("*.py"))
ALL_FILES = [*FILES, *sorted((ROOT / "lab" / "src").rglob("*.py"))]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parsed(source: str) -> ast.Module:
    """The syntax of a file; several tests go over all files."""
    return ast.parse(source)


@cache
def imports_of(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Every import, wherever in the file."""
    return [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_layers(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and layer of every import from flockstep, wherever in the file; "" is the package itself."""
    for node in imports_of(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            parent = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            origin = ".".join([*parent, *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "flockstep":
                layer = rest.split(".")[0]
                if layer == "__version__":
                    continue  # a constant of the package, which loads no layer
                yield node.lineno, layer if layer in LAYERS else ""


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """What `module` imports from a layer below its own in the list, that is from one that may import it."""
    own = module.split(".")[1]
    allowed = LAYERS[: LAYERS.index(own) + 1]
    found = imported_layers(source, module, is_package)
    return [
        f"line {line}: {own} imports {layer or 'flockstep itself'}" for line, layer in found if layer not in allowed
    ]


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


LAYERED = [path for path in FILES if path.parent != SOURCE or path.stem in LAYERS]


def test_every_file_belongs_to_a_layer():
    known = {*LAYERS, "__init__", "__main__"}
    assert FILES
    strangers = [shown(p) for p in FILES if p.relative_to(SOURCE).parts[0].removesuffix(".py") not in known]
    assert strangers == []


def test_no_import_goes_up():
    wrong = {
        shown(path): found
        for path in LAYERED
        if (found := upward_imports(path.read_text(), module_of(path), path.name == "__init__.py"))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "source",
    [
        "import flockstep.strategies.base",
        "from flockstep.strategies import base",
        "from flockstep import strategies",
        "from flockstep import distribute, __version__",
        "import flockstep",
        "from ..strategies.base import Strategy",
        "from .. import cli",
        "def f():\n    from flockstep.cli import main",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flockstep.runtime.virtual import run",
        "try:\n    import flockstep.report as r\nexcept ImportError:\n    pass",
    ],
)
def test_an_import_that_goes_up_is_found(source):
    assert upward_imports(source, "flockstep.codecs.half")


@pytest.mark.parametrize(
    "source",
    [
        "import numpy, torch",
        "from flockstep import errors, registry, __version__",
        "from flockstep.errors import ConfigurationError",
        "from flockstep.codecs.base import Codec",
        "from .base import Codec",
        "from ..arrays import schema",
        "import flockstep.expression as e",
    ],
)
def test_an_import_that_goes_down_is_fine(source):
    assert upward_imports(source, "flockstep.codecs.half") == []


def test_relative_imports_of_a_package_start_at_the_package():
    assert upward_imports("from .base import Codec", "flockstep.codecs", is_package=True) == []
    assert upward_imports("from ..cli import main", "flockstep.codecs", is_package=True)


def imported_modules(source: str, module: str, known: set[str]) -> set[str]:
    """The modules of `known` that an import names, wherever it stands; a name of a module stands for the module."""
    found = set()
    for node in imports_of(source):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names} - {"flockstep.__version__"}
            found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & known) - {module}


def circles(imports: dict[str, set[str]]) -> list[str]:
    """The modules that import themselves by way of others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = imports[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    return sorted(module for module in imports if module in reached(module))


def test_no_module_imports_itself_by_way_of_others():
    known = {module_of(path) for path in FILES}
    assert (
        circles({module_of(path): imported_modules(path.read_text(), module_of(path), known) for path in FILES}) == []
    )


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    within = "def f():\n    from flockstep.b import g\nif TYPE_CHECKING:\n    from flockstep import c"
    assert imported_modules(within, "flockstep.a", {"flockstep.b", "flockstep.c"}) == {"flockstep.b", "flockstep.c"}


def private_imports(source: str) -> list[str]:
    """Names of another module of ours that begin with an underscore."""
    nodes = (node for node in imports_of(source) if isinstance(node, ast.ImportFrom))
    ours = [node for node in nodes if (node.module or "").startswith("flockstep")]
    return [alias.name for node in ours for alias in node.names if alias.name[0] == "_" and alias.name[:2] != "__"]


def test_no_private_name_is_imported():
    assert {shown(path): found for path in ALL_FILES if (found := private_imports(path.read_text()))} == {}


def test_a_private_import_is_found():
    assert private_imports("from flockstep.codecs.base import _hidden, Codec") == ["_hidden"]


def methods_of(kind: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The first definition of every method, which is the one with the docstring of a property or of overloads."""
    found = [node for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: node for node in reversed(found)}


def undescribed(sources: list[str]) -> list[str]:
    """Public methods without a docstring that inherit none from a class of ours either."""
    kinds: dict[str, list[ast.ClassDef]] = {}
    for source in sources:
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef):
                kinds.setdefault(node.name, []).append(node)

    def described(name: str, method: str) -> bool:
        for kind in kinds.get(name, []):
            if method in methods_of(kind) and ast.get_docstring(methods_of(kind)[method]):
                return True
            bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in kind.bases]
            if any(described(base, method) for base in bases if base != name):
                return True
        return False

    public = [(name, method) for name in kinds for kind in kinds[name] for method in methods_of(kind)]
    return [
        f"{name}.{method}" for name, method in public if name[0] != "_" != method[0] and not described(name, method)
    ]


def test_every_public_method_has_or_inherits_a_docstring():
    assert undescribed([path.read_text() for path in ALL_FILES]) == []


def test_a_method_without_a_docstring_is_found():
    base = 'class Base:\n    def said(self):\n        """Say so."""\n    def unsaid(self): ...\n    def _own(self): ...'
    kind = "class Kind(base.Base[int]):\n    def said(self): ...\n    def unsaid(self): ...\n    def new(self): ..."
    assert sorted(undescribed([base, kind])) == ["Base.unsaid", "Kind.new", "Kind.unsaid"]


def summed_up_in_few_words(source: str) -> list[str]:
    """Public functions whose docstring has at most four words: too few to name the subject."""
    found = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    said = {node.name: ast.get_docstring(node) for node in found if node.name[0] != "_" or node.name == "__call__"}
    return [name for name, text in said.items() if text and len(text.split()) <= 4]


def test_every_public_function_has_a_full_summary():
    assert {shown(path): found for path in ALL_FILES if (found := summed_up_in_few_words(path.read_text()))} == {}


def test_a_summary_of_four_words_is_found():
    function = 'def {0}():\n    """{1}"""\n'
    source = function.format("short", "Configuration of the run.") + function.format(
        "full", "Seconds that a run takes."
    )
    assert summed_up_in_few_words(source + function.format("_own", "Start.")) == ["short"]


def repeated_classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Name of a class → the modules that define a class, a type or a value of that name, if there are several."""
    homes: dict[str, list[str]] = {}
    classes = set()
    for module, source in sources.items():
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
                classes.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    homes.setdefault(ast.unparse(target), []).append(module)
    return {name: modules for name, modules in homes.items() if name in classes and len(modules) > 1}


def test_no_other_module_defines_the_name_of_a_class():
    assert repeated_classes({module_of(path): path.read_text() for path in FILES}) == {}


def test_classes_of_equal_name_are_found():
    sources = {"a": "class Link: ...\nclass Own: ...", "b": "@final\nclass Link(Base): ...", "c": "from a import Link"}
    assert repeated_classes(sources) == {"Link": ["a", "b"]}
    assert repeated_classes({"a": "class Link: ...", "b": "Link = tuple[int, int]"}) == {"Link": ["a", "b"]}
    assert repeated_classes({"a": "Size = int", "b": "Size = int\nclass Link:\n    class Size: ..."}) == {}


def loaded(statement: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` are loaded after `statement` in a fresh interpreter."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    return [name for name in names if name in modules]


def test_importing_flockstep_loads_nothing_heavy():
    assert loaded("import flockstep", HEAVY) == []


def test_importing_flockstep_loads_no_other_module_of_ours():
    ours = tuple(module_of(path) for path in FILES)
    assert loaded("import flockstep", ours) == ["flockstep"]
    assert "flockstep.strategies.base" in loaded("from flockstep import Strategy", ours)


@pytest.mark.parametrize("words", [["--help"], ["help", "train"], ["list"], ["version"]], ids=" ".join)
def test_help_and_the_summary_load_neither_kernels_nor_drivers_nor_strategies(words):
    statement = f"from flockstep.cli.app import run; run({words})"
    late = (
        "flockstep_lab.cli",
        "flockstep.strategies",
        "flockstep.runtime",
        "flockstep.launchers",
        "flockstep.records.folder",
        "jinja2",
    )
    assert loaded(statement, (*HEAVY, *late)) == []


def test_a_simulation_loads_no_sockets_and_no_supervisor(tmp_path):
    words = ["simulate", "quadratic", "-s", "all_reduce", "-n", "2", "--steps", "1", "--json", "--out", str(tmp_path)]
    statement = f"from flockstep.cli.app import run; run({words})"
    late = ("asyncio", "multiprocessing", "numba", "torch", "flockstep.launchers.supervisor")
    assert loaded(statement, late) == []


def test_a_worker_loads_no_event_loop():
    assert loaded("import flockstep.launchers.entry", ("asyncio", "torch", "numba")) == []


def test_reading_expressions_loads_nothing_heavy():
    statement = "from flockstep import expression, nodes; from flockstep.strategies.base import Strategy"
    assert loaded(statement, HEAVY) == []


def roots_of_imports(source: str) -> set[str]:
    """First names of all that is imported, wherever in the file."""
    nodes = imports_of(source)
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def test_only_modules_for_jax_import_jax():
    importers = {module_of(path) for path in FILES if {"jax", "optax"} & roots_of_imports(path.read_text())}
    assert importers == {
        "flockstep.runtime.jax_loop",
        "flockstep.frameworks.jax",
        "flockstep.frameworks.jax_layers",
        "flockstep.frameworks.jax_optax",
        "flockstep.frameworks.jax_tree",
        "flockstep.jax",
        "flockstep.keras",
        "flockstep.sealed.jax",
    }


def test_the_product_imports_nothing_of_the_lab():
    assert [shown(path) for path in FILES if "flockstep_lab" in roots_of_imports(path.read_text())] == []


def test_a_loaded_module_is_found():
    assert loaded("import flockstep, json.tool", ("json.tool", "asyncio")) == ["json.tool"]


def test_the_version_is_written_several_times_but_is_one():
    product, lab = (
        tomllib.loads((ROOT / file).read_text())["project"] for file in ("pyproject.toml", "lab/pyproject.toml")
    )
    assert product["version"] == lab["version"] == flockstep.__version__
    assert f"flockstep[fast,torch,workloads]=={flockstep.__version__}" in lab["dependencies"]
