"""Loads a job from a user's file, and creates the engine that computes the job's gradients."""

from __future__ import annotations

import importlib.util
import shlex
import symtable
import sys
import tokenize
import traceback
import weakref
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from flockstep.arrays.memory import release
from flockstep.errors import ConfigurationError, FlockstepError, MissingDependency, in_short
from flockstep.frameworks.base import Engine, Job
from flockstep.frameworks.numpy import Model, NumpyEngine
from flockstep.options import SEALED

_EXTRAS = {"torch": "torch", "jax": "jax", "optax": "jax"}
"""Package that a job may need → the extra that installs it."""
JOB_FILES = (".py", SEALED)
"""Suffixes of the files that hold jobs: Python files, and files that `flockstep seal` wrote."""
WORDS = (tokenize.NAME, tokenize.STRING, tokenize.OP)


def make_engine(job: Job, seed: int) -> Engine:
    """Return the engine for the kind of model that the job builds, which is built once to find its kind; raise
    `ConfigurationError` if the model cannot be built, or there is no engine for its kind.
    """
    model = build_model(job)
    if isinstance(model, Model):
        return NumpyEngine(job, seed, model)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from flockstep.frameworks.torch import TorchEngine

        kept = weakref.ref(model)
        del model  # freed before the engine builds a model with its own seed
        release(collect=kept() is not None)
        return TorchEngine(job, seed)
    jax = sys.modules.get("flockstep.frameworks.jax")
    if jax is not None and isinstance(model, jax.JaxModel):
        return jax.JaxEngine(job, seed, model)  # type: ignore[no-any-return]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise ConfigurationError(
        f"the model of job {job.name!r} must be a torch.nn.Module, a flockstep.jax.JaxModel or a "
        f"flockstep.frameworks.numpy.Model, got {kind}; "
        f"let model() return one of these"
    )


def load_job_file(path: str | Path) -> Job:
    """Return the job that the function `job()` of a Python file returns, whose folder is appended to Python's search
    path, so that the file can import its neighbors. Raise `ConfigurationError` if there is no such file, it has no
    `job()`, or `job()` raises an error or does not return a job.
    """
    file = Path(path)
    if file.suffix != ".py":
        raise ConfigurationError(f"a job file must be a Python file, got {str(path)!r}; give it the ending .py")
    if not file.is_file():
        raise ConfigurationError(f"there is no job file {str(path)!r}; check the path")
    where = f"job file {str(path)!r}"
    lacks = ConfigurationError(
        f"{where} has no function job(); add one that returns a flockstep.Job; {launch_instead(path)}"
    )
    if not may_define(file, "job"):
        raise lacks
    function = getattr(imported(file.resolve(), where), "job", None)
    if not callable(function):
        raise lacks
    try:
        job = function()
    except (Exception, SystemExit) as error:
        raise failure(error, where, file, "job()") from error
    if not isinstance(job, Job):
        raise ConfigurationError(
            f"job() of {where} must return a flockstep.Job, got {type(job).__name__}; end it with "
            "return flockstep.Job(…)"
        )
    return job


def launch_instead(path: str | Path) -> str:
    """Return the clause that says which command runs a training script."""
    return f"to run a training script on workers, write flockstep launch {shlex.quote(str(path))}"


def train_instead(path: str) -> str:
    """Return the clause that says which command trains a job file; an empty text if the file defines no `job()`."""
    if not defines_job(path):
        return ""
    return f"; this file has job(): to train the job, write flockstep train {shlex.quote(path)}"


def defines_job(path: str | Path) -> bool:
    """Return whether a Python file defines, imports or assigns `job` at its top level, without running the file."""
    try:
        return symtable.symtable(Path(path).read_text("utf-8"), str(path), "exec").lookup("job").is_assigned()
    except (KeyError, SyntaxError, ValueError, OSError):
        return False


def may_define(file: Path, name: str) -> bool:
    """Return whether running a Python file may define `name`, as far as the words of the file outside of comments show.

    A file that imports `*`, calls `exec` or `globals`, or defines `__getattr__` may define any name. The result is also
    True for a file that cannot be read or parsed, because running the file shows the error.
    """
    try:
        with tokenize.open(file) as text:
            tokens = [one for one in tokenize.generate_tokens(text.readline) if one.type in WORDS]
    except (SyntaxError, ValueError, OSError, tokenize.TokenError):
        return True
    words = {one.string.strip("'\"") for one in tokens}
    stars = any(one.string == "import" and other.string == "*" for one, other in pairwise(tokens))
    return stars or not words.isdisjoint({name, "exec", "globals", "__getattr__"})


def import_components(files: Iterable[str]) -> None:
    """Run Python files that register custom strategies, codecs or other components, each once per process; raise
    `ConfigurationError` if there is no such file, or the file raises an error.
    """
    for text in files:
        file = Path(text)
        if file.suffix != ".py" or not file.is_file():
            raise ConfigurationError(f"there is no Python file {text!r} to import; check the path")
        done = sys.modules.get(f"flockstep_job_{file.stem}")
        if done is None or done.__file__ != str(file.resolve()):
            imported(file.resolve(), f"file {text!r}")


def imported(file: Path, where: str) -> ModuleType:
    """Return the module of a user's Python file, called `where` in errors; raise `FlockstepError` if it fails."""
    name = f"flockstep_job_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module  # as an import does: dataclasses look their module up
    try:
        code = compile(file.read_bytes(), str(file), "exec")  # not from bytecode, which may be older by a second
        exec(code, module.__dict__)  # noqa: S102 - the user's own file
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise failure(error, where, file, "importing it") from error
    return module


def build_model(job: Job) -> Any:
    """Return the model of a job, with torch's random state unchanged; raise `FlockstepError` if `model()` fails."""
    try:
        torch = sys.modules.get("torch")
        if torch is None:
            return job.model()
        with torch.random.fork_rng(devices=[]):
            return job.model()
    except FlockstepError:
        raise
    except Exception as error:
        raise failure(error, f"the job {job.name!r}", None, "model()") from error


def failure(error: BaseException, where: str, file: Path | None, what: str) -> FlockstepError:
    """Return the error that reports an exception of a user's code, with the last line of `file` in its traceback."""
    if isinstance(error, FlockstepError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return MissingDependency.of(error.name, _EXTRAS[error.name], where)
    place = ""
    if isinstance(error, SyntaxError):
        place = f" at line {error.lineno}"
    elif file is not None:
        inside = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file.resolve()]
        place = f" at line {inside[-1]}" if inside else ""
    return ConfigurationError(f"{where} failed: {what} raised {in_short(error)}{place}; fix the file")
