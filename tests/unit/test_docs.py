"""README and docs against the code: snippets run, commands parse, tables and links are right."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.exceptions import ClickException

from flockstep.cli.app import app
from flockstep.costs.cluster_file import load_cluster, read_cluster
from flockstep.errors import FlockstepError
from flockstep.experiments.options import SimulateOptions, TrainOptions, configured
from flockstep.options import SEALED, options_of
from flockstep.planning.advice import REQUIREMENTS
from flockstep.planning.job_profile import task_of
from flockstep.runtime.setup import check, load_job
from support.matrix import each
from support.scripts import COMPILER
from support.site import program

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
TUTORIALS: list[Path] = program("tutorials").PAGES
BLOCK = re.compile(r"^```(\w+)(?: title=[^\n]*)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[str]:
    return [body for language, body in BLOCK.findall(path.read_text("utf-8")) if language in languages]


def commands(text: str) -> list[list[str]]:
    """The flockstep commands of a shell block, as words."""
    lines = [line.removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines()]
    return [words[1:] for line in lines if (words := shlex.split(line, comments=True)) and words[0] == "flockstep"]


LOOKED_UP = [path for path in PAGES if path not in TUTORIALS]
COMMANDS = [
    (path, words) for path in LOOKED_UP for block in blocks(path, "console", "sh", "bash") for words in commands(block)
]
SNIPPETS = [path for path in LOOKED_UP if blocks(path, "python")]


def generator() -> ModuleType:
    return script("generate")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def execute(code: str, folder: Path, notebook: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python code in `folder`, from a file or, as a notebook does, from none, warnings being errors."""
    file = folder / "snippets.py"
    file.write_text(code, "utf-8")
    command = [sys.executable, "-W", "error", *(["-c", code] if notebook else [str(file)])]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def flockstep(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from flockstep.cli import main; main()", *words]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def refusal(words: list[str]) -> str | None:
    """Why the command line does not take these words; None if it does."""
    try:
        _parse(words)
    except (FlockstepError, ClickException) as error:
        return str(error) or error.__class__.__name__
    return None


_workload = functools.cache(load_job)


def _parse(words: list[str]) -> None:
    root: Any = app.make_context("flockstep", list(words), resilient_parsing=False)
    name, command, rest = app.resolve_command(root, [*root._protected_args, *root.args])
    assert command is not None
    given = command.make_context(name, rest, parent=root).params
    if "job" in given and not _is_script(given["job"]):
        (load_job if given["job"].endswith(".py") else _workload)(given["job"], 0)
    if "job" in given and {"strategy", "strategies"} & given.keys() and not _is_script(given["job"]):
        kind: Any = "simulate" if name == "simulate" or given.get("simulated") else "train"
        texts = given["strategies"] if "strategies" in given else given["strategy"]
        structure: Any = SimulateOptions if kind == "simulate" else TrainOptions
        chosen = {key: given[key] for key in options_of(structure) if given.get(key) not in (None, ())}
        for text in [texts] if isinstance(texts, str) else texts:
            check(configured(kind, structure(**{**chosen, "strategy": text}), given["job"], text))
    if name == "plan":
        task_of(given["what"])
        load_cluster(given["cluster"] or "laptop")
        assert set(given["require"] or ()) <= set(REQUIREMENTS)
    if "script" in given:
        assert any((folder / given["script"]).is_file() for folder in (Path(), ROOT, ROOT / "examples"))


def _is_script(job: str) -> bool:
    """Whether `compare` launches this file, which pages call train.py, or a command of the page makes it."""
    return job == "train.py" or job.endswith(SEALED)


FEW_PLANNED = """
import functools, flockstep
flockstep.plan = functools.partial(flockstep.plan, strategies=("all_reduce", "local_sgd", "asgd"))
"""


@pytest.mark.full
@pytest.mark.parametrize("path", SNIPPETS, ids=shown)
def test_snippets_run(path: Path, tmp_path: Path) -> None:
    code = "\n\n".join(blocks(path, "python"))
    for extra in ("jax", "flax"):
        if re.search(rf"^(import|from) {extra}\b", code, re.MULTILINE) and importlib.util.find_spec(extra) is None:
            pytest.skip(f"needs {extra}")
    code = COMPILER + code if "torch.distributed" in code else code
    done = execute(code, tmp_path, notebook=path.stem == "notebooks")
    assert done.returncode == 0, done.stderr


def test_snippets_of_the_readme_run(tmp_path: Path) -> None:
    """As above, but what is planned are three strategies: all of them take ten seconds."""
    done = execute("\n\n".join([FEW_PLANNED, *blocks(ROOT / "README.md", "python")]), tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_snippet_that_fails_is_noticed(tmp_path: Path) -> None:
    assert execute("assert 1 == 2", tmp_path).returncode == 1
    assert execute("import warnings; warnings.warn('old')", tmp_path).returncode == 1


def test_cluster_files_are_read() -> None:
    def check(path: Path, text: str) -> None:
        assert read_cluster(text).workers > 1

    each(check, [(path, text) for path in PAGES for text in blocks(path, "toml")])


@pytest.mark.full
@pytest.mark.parametrize("path", TUTORIALS, ids=shown)
def test_a_tutorial_prints_what_its_page_shows(path: Path, tmp_path: Path) -> None:
    tutorials, text = program("tutorials"), path.read_text("utf-8")
    tutorials.write_files(text, tmp_path)
    outputs = list(tutorials.run(text, tmp_path))
    wrong = {output.block.body: output.shortened for output in outputs if not output.agrees}
    assert wrong == {}, "run make tutorials"
    assert len(outputs) == len(re.findall(r"^```console$", text, re.MULTILINE)), (
        "each group of commands shows its output"
    )


@pytest.mark.parametrize("path", TUTORIALS, ids=shown)
def test_commands_of_tutorials_are_understood(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program("tutorials").write_files(path.read_text("utf-8"), tmp_path)
    monkeypatch.chdir(tmp_path)
    given = [words for block in blocks(path, "console") for words in commands(block)]
    made = {"--import", "here.toml"}  # of these, the page's own programs and commands make what is needed
    own = [words for words in given if not made & set(words) and words[0] != "launch"]
    assert {" ".join(words): why for words in own if (why := refusal(words))} == {}


PAGE = """
```python title="say.py"
import sys

print("it took", 3 * 0.5, "s")
sys.exit(int(sys.argv[1]))
```

```console
$ python say.py {code}
```

```text{title}
{shown}
```
"""


@pytest.mark.parametrize(
    ("shown", "agrees"), [("it took 1.5 s", True), ("it took 1.6 s", False), ("…", True), ("it takes 1.5 s", False)]
)
def test_a_tutorial_that_shows_something_else_is_noticed(shown: str, agrees: bool, tmp_path: Path) -> None:
    tutorials, text = program("tutorials"), PAGE.format(code=0, title="", shown=shown)
    tutorials.write_files(text, tmp_path)
    (output,) = tutorials.run(text, tmp_path)
    assert output.agrees is agrees
    assert output._replace(timed=True).agrees is (agrees or "took" in shown), "figures of real runs are not compared"
    assert ("it took 1.5 s" in tutorials.rewritten(text)) is (shown != "…")


def test_an_unexpected_exit_code_of_a_tutorial_is_noticed(tmp_path: Path) -> None:
    tutorials = program("tutorials")
    for code, title in [(1, ""), (0, ' title="exit code 1"'), (2, ' title="exit code 1"')]:
        text = PAGE.format(code=code, title=title, shown="it took 1.5 s")
        tutorials.write_files(text, tmp_path)
        with pytest.raises(AssertionError, match=f"say.py {code} ended with {code}"):
            list(tutorials.run(text, tmp_path))


def test_there_are_commands_and_snippets() -> None:
    assert len(COMMANDS) >= 5
    assert ROOT / "README.md" in SNIPPETS


def test_commands_are_understood() -> None:
    refused = {f"{shown(path)}: {' '.join(words)}": why for path, words in COMMANDS if (why := refusal(words))}
    assert refused == {}


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("train digits -s bsp --wrong", "No such option '--wrong'"),
        ("train digits -s bsb", "no strategy is called 'bsb'"),
        ("train digit -s bsp", "no workload is called 'digit'"),
        ("trian digits", "no command is called 'trian'; did you mean 'train'?"),
        ("train -s bsp", "Missing parameter: job"),
        ("compare digits -s bsp -s ps(shards=0)", "shards must be >= 1, got 0"),
        ("simulate softmax -s bsp --network 1mbut", "no network is called '1mbut'"),
        ("train softmax -s bsp --workers many", "must be a whole number, got 'many'"),
        ("launch -n 4", "Missing parameter: script"),
        ("plan digit", "no workload or reference model is called 'digit'"),
        ("plan digits --cluster lab", "no cluster is called 'lab'"),
    ],
)
def test_a_wrong_command_is_noticed(command: str, why: str) -> None:
    assert why in str(refusal(command.split()))


def test_make_targets_exist() -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {
        target
        for path in PAGES
        for block in blocks(path, "sh", "bash", "console")
        for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)
    }
    assert {"demo", "test", "docs"} <= used <= rules


def test_make_demo_is_understood() -> None:
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    text = recipe[1].replace("$(BIN)/", "").replace("\t", "")
    (words,) = commands(text)
    assert refusal(words) is None
    assert words.count("-s") >= 7


def test_the_diff_is_the_difference_of_the_two_examples() -> None:
    (block,) = blocks(ROOT / "README.md", "diff")
    names = [f"examples/{name}.py" for name in ("one_process", "own_loop")]
    command = ["diff", "-u", *(word for name in names for word in ("--label", name)), *names]
    real = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    assert block.splitlines() == real
    new = [line for line in real if line.startswith("+") and line[1:].strip() and not line.startswith("+++")]
    gone = [line for line in real if line.startswith("-") and not line.startswith("---")]
    assert len(gone) <= len(new) <= 4


@pytest.mark.full
def test_the_picture_shows_the_runs_as_they_are_now() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    drawing = script("picture")
    assert drawing.PICTURE.read_text("utf-8") == drawing.picture(), "run python docs/picture.py"


def test_the_page_of_the_architecture_shows_the_rooms_as_they_are_now() -> None:
    drawing, page = script("rooms"), ROOT / "docs" / "explanation" / "architecture.md"
    assert drawing.PICTURE.read_text("utf-8") == drawing.picture(), "run make docs"
    named = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", page.read_text("utf-8"))
    places = (ROOT, ROOT / "src" / "flockstep")
    assert len(named) > 20
    assert [one for one in named if not any((place / one).exists() for place in places)] == []


def links(path: Path) -> list[str]:
    prose = BLOCK.sub("", path.read_text("utf-8"))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not link.startswith(("http:", "https:"))]


def anchors(text: str) -> set[str]:
    """The names that headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    built = {ROOT / "docs" / place: text for place, text in program("hooks").added().items()}

    def check(path: Path, link: str) -> None:
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists() or target in built
        assert not anchor or anchor in anchors(built.get(target) or target.read_text("utf-8"))

    each(check, [(path, link) for path in PAGES for link in links(path)])


NAMED = re.compile(r"`((?:tests/)?(?:[\w-]+/)*test_\w+\.py)(?:::(test_\w+))?`|`(test_\w+)`")


def missing_tests(text: str) -> list[str]:
    """The tests that a page names and that are not there; a name alone is of the file that was named last."""
    wrong: list[str] = []
    source = ""
    for file, first, alone in NAMED.findall(text):
        if file:
            path = ROOT / (file if file.startswith("tests/") else f"tests/laws/{file}")
            source = path.read_text() if path.is_file() else ""
            wrong += [] if path.is_file() else [file]
        name = first or alone
        if name and f"def {name}(" not in source:
            wrong.append(name)
    return wrong


def test_tests_that_are_named_exist() -> None:
    texts = {shown(path): path.read_text("utf-8").replace("test_<name>.py", "") for path in PAGES}
    assert {page: missing for page, text in texts.items() if (missing := missing_tests(text))} == {}


def test_a_test_that_is_not_there_is_noticed() -> None:
    assert missing_tests("`tests/unit/test_docs.py::test_snippets_run`, `test_links_lead_somewhere`") == []
    assert missing_tests("`tests/unit/test_docs.py::test_nothing`") == ["test_nothing"]
    assert missing_tests("`test_bread.py`") == ["test_bread.py"]


def test_generated_parts_are_up_to_date() -> None:
    assert [shown(path) for path in generator().outdated()] == [], "run make docs"


def test_generated_parts_that_are_out_of_date_are_noticed(tmp_path: Path) -> None:
    docs = generator()
    page = "before\n<!-- generated: codec -->\nold\n<!-- end -->\nafter\n"
    (tmp_path / "README.md").write_text(page)
    assert docs.outdated(tmp_path) == [tmp_path / "README.md"]
    (tmp_path / "README.md").write_text(docs.rewritten(page))
    assert docs.outdated(tmp_path) == []
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n<!-- generated: codec -->\n| write |")
    assert text.endswith("<!-- end -->\nafter\n")
    with pytest.raises(KeyError, match="weather"):
        docs.rewritten("<!-- generated: weather -->\n<!-- end -->")


def test_every_component_has_a_row_somewhere() -> None:
    tables = "".join(path.read_text("utf-8") for path in generator().pages())
    for noun in ("consistency", "topology", "codec", "feedback", "collective", "compute", "network"):
        assert f"<!-- generated: {noun} -->" in tables


def test_a_real_run_and_a_simulated_one_end_in_the_same_bits(tmp_path: Path) -> None:
    hashes = []
    for kind in ("train", "simulate"):
        words = [kind, "softmax", "-s", "bsp", "-n", "2", "--steps", "20", "--seed", "1", "--json", "--out", kind]
        done = flockstep(words, tmp_path)
        assert done.returncode == 0, done.stderr
        hashes.append(json.loads(done.stdout)["result_hash"])
    assert hashes[0] == hashes[1]
    done = flockstep(["report", "simulate", "--out", "one.html"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "one.html").stat().st_size > 100_000


@pytest.mark.full
def test_the_script_of_the_readme_runs_on_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    done = flockstep(["launch", "-n", "2", "--json", str(ROOT / "examples" / "own_loop.py")], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    scores = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("test accuracy")]
    assert len(scores) == 2, done.stdout
    assert scores[0] == scores[1] > 0.85
    assert json.loads(lines[-1])["status"] == "finished"
