"""The properties that a strategy guarantees, as a data class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from flockstep.errors import ConfigurationError, UnknownName

Delivery = Literal["synchronous", "bounded delay", "unbounded delay", "partial"]
ResultPolicy = Literal["server", "mean", "rank0", "best", "ensemble"]
Samples = Literal["own", "others", "sent"]
Clips = Literal["own", "combined", "none"]
Memory = Literal["optimizer", "velocity", "own", "slices"]
Approximation = Literal["none", "sent later", "lost"]


@dataclass(frozen=True)
class Traits:
    """The properties that a composed strategy guarantees."""

    delivery: Delivery
    """Which updates of a worker reach the other workers, and when (the communication completeness of FAST):
    `synchronous` if all updates do before the next step, `bounded delay` if all do within a bound, `unbounded delay` if
    all do at some time, `partial` if some never do.
    """
    survives: bool | int
    """Number of worker deaths after which the other workers still continue: False for none, True for any number."""
    results: tuple[ResultPolicy, ...]
    """The policies for choosing the resulting model that the strategy allows; the first is the default. `server` takes
    the servers' parameters, `mean` the mean of the workers' replicas, `rank0` the replica of rank 0, `best` the replica
    with the best evaluation, `ensemble` the mean of all replicas' predictions.
    """
    server_optimizer: bool = False
    """Whether the servers (or the owners of slices) apply the gradients, with an optimizer rebuilt from the worker's
    optimizer.
    """
    fixed_steps: bool = True
    """Whether every worker takes exactly the number of steps granted to it; otherwise the workers together take at most
    the sum of the granted steps.
    """
    needs_job: bool = False
    """Whether workers request more than their next gradient, which only a declared job provides, not a script's own
    loop.
    """
    gathers: int = 0
    """Number of gradients of different workers, in order of arrival, that a step waits for: 0 for all of them or none,
    -b for all but b.
    """
    least: int = 1
    """Minimum number of live workers at which the run continues."""
    samples: Samples = "own"
    """Whose training samples a worker receives: `own` for only its own; `others` if it computes gradients on samples of
    other workers; `sent` if messages carry some of its own samples unchanged.
    """
    clips: Clips = "own"
    """What `flockstep.clip_grad_norm_` clips: `own` for each worker's own gradient; `combined` for the combined
    gradient of a step, on the server if `server_optimizer`; `none` if no node holds the whole combined gradient.
    """
    memory: Memory = "optimizer"
    """What servers remember of past steps: `optimizer` for the state of the worker's optimizer; `velocity` for one
    momentum buffer with that optimizer's `momentum`; `own` for the state of another optimizer, which a script cannot
    save or load. `slices` if worker i of n remembers slice i of the state of the worker's optimizer.
    """
    approximation: Approximation = "none"
    """What happens to the part of an update that the strategy itself, without a codec, leaves out of a step's messages:
    `none` if nothing is left out, `sent later` if a later step sends the part, `lost` if the part is never sent.
    """
    curvature: bool = False
    """Whether steps follow the curvature instead of the job's optimizer, so that step counts to a target are not
    comparable.
    """
    matrices: bool = False
    """Whether the strategy sends factors of the gradient's matrices, so that bytes depend on the shapes of the
    tensors.
    """
    restarts: bool = True
    """Whether a stopped run can be resumed from the states of its nodes; False if some state lies outside the nodes."""

    checkpoints: bool = True
    """Whether the programs of all nodes reach, every few steps, a point at which a run can be stopped with its state;
    False if a program can restart only from its beginning, or from its last inputs.
    """
    own_rates: bool = False
    """Whether every gradient is applied alone, at the learning rate of its worker, so that the workers' learning rates
    may differ.
    """
    equal_steps: bool = False
    """Whether live workers must take equally many steps although the strategy survives deaths; without `survives` they
    always must.
    """

    plain_gradients: bool = True
    """Whether workers request only gradients of their own next batch at their own parameters, and wait for each
    gradient; other requests cannot be computed by the parts of a split model.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.results, tuple):
            raise ConfigurationError(f"results must be a tuple, got {self.results!r}; write it like ('mean', 'rank0')")
        named = [
            ("delivery", self.delivery, Delivery),
            *(("result", result, ResultPolicy) for result in self.results),
            ("samples", self.samples, Samples),
            ("clips", self.clips, Clips),
            ("memory", self.memory, Memory),
            ("approximation", self.approximation, Approximation),
        ]
        for kind, name, values in named:
            if name not in (known := sorted(get_args(values))):
                raise UnknownName(f"no {kind} is called {str(name)!r}; known: {', '.join(known)}")

    @property
    def in_step(self) -> bool:
        """Whether the run ends when a worker leaves before the other workers."""
        return self.equal_steps or not self.survives

    @property
    def alike(self) -> bool:
        """Whether every worker's own optimizer steps along the same gradient, so that all replicas stay equal."""
        return self.delivery == "synchronous" and not self.server_optimizer

    def deaths(self, workers: int) -> int:
        """Return the number of deaths, among `workers` workers, after which the other workers still continue."""
        most = workers - self.least
        return max(0, most if self.survives is True else min(int(self.survives), most))

    def held_up(self, workers: int) -> bool:
        """Return whether a step waits for some but not all of the `workers` workers, so that workers without steps
        delay the step.
        """
        return 1 < (self.gathers if self.gathers > 0 else workers + self.gathers) < workers
