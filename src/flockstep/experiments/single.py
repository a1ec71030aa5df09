"""One run, on real processes or in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flockstep.experiments.folders import folder
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.records.summary import Summary
from flockstep.simulation import USUAL_COMPUTE, USUAL_NETWORK

if TYPE_CHECKING:
    from flockstep.arrays.schema import FlatArray, Schema
    from flockstep.launchers.standing import Standing
    from flockstep.messages import Address
    from flockstep.records.events import Event
    from flockstep.strategies.base import Strategy

Watch = Callable[[int, int, float], None]
"""Called with the worker-steps done, all worker-steps, and virtual seconds."""


@dataclass(frozen=True)
class RunResult:
    """A run that has ended, and the folder that holds its record."""

    folder: Path
    config: RunConfig
    """Everything that it takes to repeat the run."""
    summary: Summary
    """The run in figures."""

    @classmethod
    def read(cls, folder: Path | str) -> RunResult:
        """The run that is recorded in `folder`.

        Raises:
            ConfigurationError: the folder holds no run.
        """
        record = RunFolder(folder)
        return cls(record.path, record.read_config(), record.read_summary())

    def events(self) -> list[Event]:
        """All events of the run, by time."""
        return RunFolder(self.folder).read_events()

    def parameters(self) -> tuple[FlatArray, Schema]:
        """The resulting model's flat parameters, of shape (K,), or (M, K) of an ensemble, and the table of its tensors.

        Raises:
            ConfigurationError: the run left no result.
        """
        return RunFolder(self.folder).read_result()

    def __str__(self) -> str:
        from flockstep.experiments.texts import ranked_text

        return ranked_text([self.summary])


def simulate(
    job: str | Path,
    strategy: str | Strategy,
    *,
    workers: int = 16,
    network: str = USUAL_NETWORK,
    compute: str = USUAL_COMPUTE,
    faults: Sequence[str] = (),
    seed: int = 0,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    schedule: str | None = None,
    split: str = "iid",
    target: float | None = None,
    until_target: bool = False,
    evaluate_every: int | None = None,
    result: str | None = None,
    threads: int = 1,
    imports: Sequence[str] = (),
    out: Path | str | None = None,
    overwrite: bool = False,
    watch: Watch | None = None,
) -> RunResult:
    """Train in virtual time: gradients are computed, seconds are modelled. The same as `flockstep simulate`.

    `job` is a built-in workload or the path of a Python file with a function `job()`; the other arguments are the
    command's options. `watch`, if given, is called as the simulation goes on.

    Raises:
        ConfigurationError: an argument that no run could work with; nothing was started.
        RunError: the run failed; its record is complete up to then.
    """
    config = RunConfig(
        kind="simulate", job=str(job), strategy=str(strategy), workers=workers, network=network, compute=compute,
        faults=tuple(faults), seed=seed, epochs=epochs, steps=steps, batch=batch, lr=lr, schedule=schedule, split=split,
        target=target, until_target=until_target, evaluate_every=evaluate_every, result=result, threads=threads,
        imports=tuple(imports),
    )  # fmt: skip
    return carry_out(config, folder(out, f"{job}-{strategy}"), overwrite, watch=watch)


def run(
    job: str | Path,
    strategy: str | Strategy,
    *,
    workers: int = 4,
    seed: int = 0,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    schedule: str | None = None,
    split: str = "iid",
    target: float | None = None,
    evaluate_every: int | None = None,
    result: str | None = None,
    transport: str = "shared_memory",
    heartbeat: float = 5.0,
    step_timeout: float | None = None,
    threads: int = 1,
    imports: Sequence[str] = (),
    out: Path | str | None = None,
    overwrite: bool = False,
) -> RunResult:
    """Train for real, on processes of this machine. The same as `flockstep train`, whose options the arguments are.

    A script guards the call with `if __name__ == "__main__":`, since its processes import the script again. From a
    notebook, a strategy of your own stands in a Python file that `imports` names.

    Raises:
        ConfigurationError: an argument that no run could work with; nothing was started.
        RunError: the run failed; its record is complete up to then.
    """
    config = RunConfig(
        kind="train", job=str(job), strategy=str(strategy), workers=workers, seed=seed, epochs=epochs, steps=steps,
        batch=batch, lr=lr, schedule=schedule, split=split, target=target, evaluate_every=evaluate_every,
        result=result, transport=transport, heartbeat=heartbeat, step_timeout=step_timeout, threads=threads,
        imports=tuple(imports),
    )  # fmt: skip
    return carry_out(config, folder(out, f"{job}-{strategy}"), overwrite)


def carry_out(
    config: RunConfig,
    folder: Path,
    overwrite: bool = False,
    watch: Watch | None = None,
    standings: Callable[[dict[Address, Standing]], Any] | None = None,
) -> RunResult:
    """Train or simulate as `config` says; `watch` follows a simulation, `standings` the nodes of a real run.

    Raises:
        ConfigurationError: before anything starts, for input that no run could work with.
        RunError: the run failed; its record is complete up to then.
    """
    if config.kind == "simulate":
        from flockstep.launchers import simulate as virtual

        virtual.simulate(config, folder, watch or (lambda done, every, t: None), overwrite)
    else:
        from flockstep.launchers import train as real

        real.train(config, folder, standings or (lambda nodes: None), overwrite)
    return RunResult.read(folder)
