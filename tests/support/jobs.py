"""Jobs for real runs that a test disrupts: they last until it is done, however busy the machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flockstep
from flockstep.launchers.checkpoints import Checkpointer
from flockstep.launchers.children import Child
from flockstep.launchers.executable import Executable, Show
from flockstep.launchers.host_messages import ServerSpec
from flockstep.launchers.run import RunSegment, SupervisedRun
from flockstep.launchers.supervisor import Supervisor
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.runtime.member import NodeSpec

PACED = """
import dataclasses, time
from pathlib import Path
from flockstep.workloads.softmax import Softmax

GO, AFTER = Path(__file__).with_name("go"), Path(__file__).parent / {after!r}

def job():
    job, waiting = Softmax().job(0), [True]

    class Paced(type(job.model())):
        def gradients(self, *arguments):
            if waiting:
                waiting.append(True)
                time.sleep(0.01 if len(waiting) < {slow_after} else 0.3)
                if GO.exists() or not AFTER.exists():
                    waiting.clear()
            return super().gradients(*arguments)

    def model():
        model = job.model()
        model.__class__ = Paced
        return model

    return dataclasses.replace(job, model=model)
"""


def paced(folder: Path, after: str = ".", slow_after: int = 1 << 30) -> str:
    """A job file for `train`: a gradient takes 10 ms until `go_on` is called, so that few steps last for long.

    After `slow_after` gradients a process takes 300 ms for one: then a process can be started before the run ends. Runs
    that begin before the file `after` exists in the folder are as fast as ever.
    """
    (folder / "paced.py").write_text(PACED.format(after=after, slow_after=slow_after))
    return str(folder / "paced.py")


def paced_train(folder: Path, strategy: str, workers: int, steps: int, slow_after: int = 1 << 30) -> list[str]:
    """Arguments of `flockstep train` with the job of `paced`, evaluated every 30 steps."""
    words = ["train", paced(folder, slow_after=slow_after), "-s", strategy, "-n", str(workers)]
    return [*words, "--steps", str(steps), "--evaluate-every", "30"]


def go_on(folder: Path) -> None:
    """Let gradients take their usual time again."""
    (folder / "go").touch()


def undisturbed(folder: Path, job: str, strategy: str, workers: int, steps: int, **given: Any) -> dict[str, str]:
    """The hash of each node's model at the end of a run in virtual time, and of a synchronous real run."""
    made = flockstep.simulate(job, strategy, workers=workers, steps=steps, out=folder, **given)
    return {str(node): one for node, one in made.summary.hashes.items()}


def run_of(workers: int) -> RunConfig:
    """The configuration of a small run on this machine, for a supervisor without processes."""
    return RunConfig(
        kind="train", job="softmax", strategy="all_reduce", workers=workers, transport="ipc", heartbeat=5.0
    )


class Started(Executable):
    """Workers that a test starts."""

    def __init__(self, start: Callable[[NodeSpec], Child | None], script: bool):
        super().__init__()
        self.script, self._start = script, start

    def start(self, node_spec: NodeSpec) -> Child | None:
        return self._start(node_spec)

    def start_server(self, node_spec: NodeSpec, server: ServerSpec) -> Child | None:
        return self._start(node_spec)


def supervised(
    config: RunConfig,
    folder: Path,
    start: Callable[[NodeSpec], Child | None],
    show: Show = lambda nodes, steps: None,
    checkpoints: Checkpointer | None = None,
    script: bool = False,
) -> Supervisor:
    """The supervisor of a run whose processes `start` starts."""
    run = SupervisedRun(RunFolder(folder), Started(start, script), show)
    return RunSegment(run, config, None, None).supervisor(folder, checkpoints=checkpoints)
