"""Distributed training of neural networks, with every coordination strategy behind one small interface."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn, optim

    from flockstep.communicator.joining import join as join
    from flockstep.errors import ConfigurationError as ConfigurationError
    from flockstep.experiments.clusters import on_ray as on_ray
    from flockstep.experiments.clusters import on_spark as on_spark
    from flockstep.experiments.comparison import Comparison as Comparison
    from flockstep.experiments.comparison import compare as compare
    from flockstep.experiments.function import LaunchResult as LaunchResult
    from flockstep.experiments.function import launch as launch
    from flockstep.experiments.influence import Explanation as Explanation
    from flockstep.experiments.influence import explain as explain
    from flockstep.experiments.planned import PlanResult as PlanResult
    from flockstep.experiments.planned import plan as plan
    from flockstep.experiments.replay import Replay as Replay
    from flockstep.experiments.sealing import seal as seal
    from flockstep.experiments.sealing import unseal as unseal
    from flockstep.experiments.single import RunResult as RunResult
    from flockstep.experiments.single import resume as resume
    from flockstep.experiments.single import run as run
    from flockstep.experiments.single import simulate as simulate
    from flockstep.frameworks.base import Data as Data
    from flockstep.frameworks.base import Job as Job
    from flockstep.frameworks.torch_local import LocallyConnected2d as LocallyConnected2d
    from flockstep.messages import Message as Message
    from flockstep.nodes import Server as Server
    from flockstep.nodes import Worker as Worker
    from flockstep.options import BadGradientAction
    from flockstep.registry import register as register
    from flockstep.runtime.replica import replica as replica
    from flockstep.runtime.shards import shard as shard
    from flockstep.runtime.torch_buffers import Policy
    from flockstep.runtime.torch_clipping import clip_grad_norm_ as clip_grad_norm_
    from flockstep.runtime.torch_export import export_checkpoint as export_checkpoint
    from flockstep.runtime.torch_loop import DistributedOptimizer
    from flockstep.strategies.base import Strategy as Strategy
    from flockstep.strategies.traits import Traits as Traits
    from flockstep.testing.strategies import check_strategy as check_strategy
    from flockstep.trackers.track import track as track

__version__ = "0.1.0"
_HOMES = {
    "experiments.comparison": "Comparison compare",
    "errors": "ConfigurationError",
    "frameworks.base": "Data Job",
    "experiments.function": "LaunchResult launch",
    "frameworks.torch_local": "LocallyConnected2d",
    "messages": "Message",
    "experiments.planned": "PlanResult plan",
    "experiments.sealing": "seal unseal",
    "experiments.replay": "Replay",
    "experiments.influence": "Explanation explain",
    "experiments.single": "RunResult resume run simulate",
    "nodes": "Server Worker",
    "strategies.base": "Strategy",
    "strategies.traits": "Traits",
    "testing.strategies": "check_strategy",
    "runtime.replica": "replica",
    "runtime.torch_clipping": "clip_grad_norm_",
    "runtime.torch_export": "export_checkpoint",
    "communicator.joining": "join",
    "experiments.clusters": "on_ray on_spark",
    "registry": "register",
    "runtime.shards": "shard",
    "trackers.track": "track",
}
"""Module → names that are imported from it at their first use; `import flockstep` itself imports none of them."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = [
    *_HOME_OF,
    "__version__",
    "barrier",
    "checkpoint",
    "distribute",
    "is_main",
    "rank",
    "resumed",
    "seed",
    "workers",
]


def distribute(
    model: nn.Module,
    optimizer: optim.Optimizer,
    strategy: str | Strategy | None = None,
    *,
    buffers: Policy = "mean",
    timeout: float = 600.0,
    on_bad_gradient: BadGradientAction | None = None,
    max_gradient_norm: float | None = None,
) -> DistributedOptimizer:
    """Let `strategy` coordinate the workers that `flockstep launch` started; without it, one worker trains alone.

    All workers start from rank 0's parameters. Call the returned optimizer's `finish()` when training is over: the
    model then holds the result, equal on every worker.

    Args:
        model: the module to train, built in the same way on every worker.
        optimizer: the optimizer of the module's parameters.
        strategy: an expression such as "local_sgd(period=8)", or a strategy object; `flockstep launch --strategy`
            replaces it. There is no default.
        buffers: values that BatchNorm's statistics and other buffers take at `finish()` and at `sync_buffers()`: the
            `mean` over all ranks, the values of rank 0 (`rank0`), or each rank's own values (`local`).
        timeout: seconds within which all processes that torchrun, mpirun or srun started must have called `distribute`,
            > 0; `flockstep launch` has the option --timeout.
        on_bad_gradient: treatment of a gradient of this rank that is too large or not finite: "stop" ends the run,
            "skip" puts zeros in its place, "quarantine" also removes the rank after 3 such gradients; None for the
            value of `flockstep launch --on-bad-gradient`, by default "stop".
        max_gradient_norm: largest Euclidean norm of a gradient of this rank; None for the value of `flockstep launch
            --max-gradient-norm`, by default no limit.

    Returns:
        An optimizer to use in place of `optimizer`.

    Raises:
        ConfigurationError: the model, the optimizer or the strategy cannot be used, or differs between workers, or the
            script of a launched run has started this process.
        MissingDependency: PyTorch is not installed.
    """
    from flockstep.runtime.node_spec import joining_run, strategy_of_run

    with joining_run("distribute", timeout):
        _require_torch("distribute")
        from flockstep.runtime.torch_loop import DistributedOptimizer

        return DistributedOptimizer(
            model, optimizer, strategy_of_run(strategy), buffers, (on_bad_gradient, max_gradient_norm)
        )


def rank() -> int:
    """Return the rank, from 0, of this process among the workers of `flockstep launch`; 0 in a script that runs alone.

    The rank is known from a script's first line, for example to give each worker its own random numbers:
    `torch.manual_seed(1337 + flockstep.rank())`. A process that the script starts has the script's rank.

    Raises:
        ConfigurationError: another launcher started several processes, which are not workers of one run of flockstep.
    """
    from flockstep.runtime.node_spec import place_of_script

    return place_of_script()[0]


def workers() -> int:
    """Return the number of workers that `flockstep launch` started; 1 in a script that runs alone.

    Where several processes hold a replica of the model together, each of them is a worker; `replica().count` is the
    number of replicas.

    Raises:
        ConfigurationError: another launcher started several processes, which are not workers of one run of flockstep.
    """
    from flockstep.runtime.node_spec import place_of_script

    return place_of_script()[1]


def seed() -> int:
    """Return the seed of the run, which `flockstep launch --seed` and each run of `flockstep compare --seeds` set; 0 in
    a script that runs alone.

    Strategies and codecs draw from this seed. A script's own model and data follow it only if the script uses it:
    `torch.manual_seed(flockstep.seed())`.

    Raises:
        ConfigurationError: another launcher started several processes, which are not workers of one run of flockstep.
    """
    from flockstep.runtime.node_spec import seed_of_script

    return seed_of_script()


def is_main() -> bool:
    """Return whether this process has rank 0, the rank that prints and writes files; True in a script that runs alone.

    Raises:
        ConfigurationError: another launcher started several processes, which are not workers of one run of flockstep.
    """
    return rank() == 0


def barrier() -> None:
    """Wait until every rank has called `barrier`, for example for a file that rank 0 writes; nothing happens in a
    script that runs alone.

    Every rank calls `barrier` between two steps, after `distribute` and before `finish()`, which also wait for all
    ranks.

    Raises:
        ConfigurationError: this process takes part in no run at this time.
        CompositionError: the strategy steps with the first gradients that arrive, so a rank that waits would delay
            steps of the other ranks.
        PeerLost: another rank died, or has left.
    """
    from flockstep.runtime.session import barrier

    if workers() > 1:
        barrier()


def checkpoint(extra: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
    """Mark the place in a script's loop at which `flockstep launch` may take a checkpoint, and from which `flockstep
    resume` continues.

    Call `checkpoint` once for every step, as the first line of the body of the loop over batches, and `resumed()`
    before the loop. A checkpoint is taken at the interval that `flockstep launch --checkpoint-every` sets, and when
    SIGTERM, SIGHUP or Ctrl-C ends the run; between checkpoints the call costs nothing. The checkpoint holds the model
    and its buffers, the optimizer, the strategy's state on every node, messages that no program has read, the random
    streams of torch, numpy and `random`, and `extra`. The first call in a resumed run restores the random streams. In a
    script that was not started by `flockstep launch`, the call does nothing.

    Args:
        extra: name → value of everything else that the script restores from `resumed()`: the epoch and batch
            numbers, `scheduler.state_dict()`, `scaler.state_dict()`, or a function that returns this dict and is called
            only if a checkpoint is taken. Values are numbers, text, arrays, tensors, generators, and lists, tuples,
            dicts and data classes of these.

    Raises:
        ConfigurationError: the script has not called `resumed()`, or has not restored a value of `extra`; a value
            cannot be stored; two steps were taken without a call to `checkpoint` between them; or the script calls
            `distribute` several times, evaluates closures, uses `join()`, or does not use PyTorch.
    """
    from flockstep.runtime.loop import loop_with_checkpoints

    if (loop := loop_with_checkpoints("checkpoint")) is not None:
        loop.checkpoint(extra)


def resumed() -> dict[str, Any] | None:
    """Return the `extra` of this rank's last checkpoint in a run that `flockstep resume` continues; None at the start
    of a run.

    Call `resumed` after `distribute`, which has restored the model and the optimizer, and before the loop; then restore
    the values in the dict, for example with `scheduler.load_state_dict`.

    Raises:
        ConfigurationError: this process is not between `distribute` and `finish()`, or takes no part in checkpoints.
    """
    from flockstep.runtime.loop import loop_with_checkpoints

    loop = loop_with_checkpoints("resumed")
    return None if loop is None or loop.checkpoints is None else loop.checkpoints.resumed()


def _require_torch(name: str) -> None:
    """Raise `MissingDependency` unless PyTorch is installed; other errors of its import are not hidden."""
    from importlib.util import find_spec

    from flockstep.errors import MissingDependency

    if find_spec("torch") is None:
        raise MissingDependency.of("PyTorch", "torch", f"flockstep.{name}")


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'flockstep' has no attribute {name!r}")
    if "torch" in _HOME_OF[name]:
        _require_torch(name)
    value = globals()[name] = getattr(import_module(f"flockstep.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
