"""The data class of the properties that a strategy guarantees."""

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
    """The properties that a composed strategy, a strategy with all its components, guarantees."""

    delivery: Delivery
    """Which updates of a worker reach the other workers, and when (the communication completeness of FAST):
    `synchronous` if all updates arrive before the next step, `bounded delay` if all arrive within a bound, `unbounded
    delay` if all arrive at some time, `partial` if some never arrive.
    """
    survives: bool | int
    """Number of worker deaths after which the other workers still continue; False for none, True for any number."""
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
    """Whether the program requests more than a worker's next gradient. Only a declared job can answer such requests; a
    script's own training loop cannot.
    """
    gathers: int = 0
    """Number of gradients of different workers, in order of arrival, that a step waits for: 0 if a step waits for all
    workers or for none, -b if a step waits for all workers but b.
    """
    least: int = 1
    """Minimum number of live workers at which the run continues."""
    samples: Samples = "own"
    """The training samples that a worker sees: `own` if only its own samples; `others` if the worker computes gradients
    on samples of other workers; `sent` if messages carry some of its own samples unchanged.
    """
    clips: Clips = "own"
    """The gradient that `flockstep.clip_grad_norm_` clips: `own` for each worker's own gradient; `combined` for the
    combined gradient of a step, on the server if `server_optimizer`; `none` if no node holds the whole combined
    gradient.
    """
    memory: Memory = "optimizer"
    """State that servers keep between steps: `optimizer` for the state of the worker's optimizer; `velocity` for one
    momentum buffer with that optimizer's `momentum`; `own` for the state of another optimizer, which a script cannot
    save or load; `slices` if worker i of n keeps slice i of the state of the worker's optimizer.
    """
    approximation: Approximation = "none"
    """Treatment of the part of an update that the strategy itself, without a codec, leaves out of a step's messages:
    `none` if no part is left out, `sent later` if a later step sends the part, `lost` if the part is never sent.
    """
    curvature: bool = False
    """Whether the strategy computes its steps from curvature, without the job's optimizer. The number of steps to a
    target loss is then not comparable with that of other strategies.
    """
    matrices: bool = False
    """Whether the strategy sends factors of the gradient's matrices, so that the bytes per step depend on the shapes of
    the tensors.
    """
    restarts: bool = True
    """Whether a stopped run can be resumed from the states of its nodes; False if some state lies outside the nodes."""

    checkpoints: bool = True
    """Whether the programs of all nodes reach, every few steps, a point at which the run can be stopped and its state
    saved. False if a program can restart only from its beginning, or from its last inputs.
    """
    own_rates: bool = False
    """Whether every gradient is applied alone, at the learning rate of its worker, so that the workers' learning rates
    may differ.
    """
    equal_steps: bool = False
    """Whether live workers must take the same number of steps although the strategy survives deaths. If the strategy
    survives no deaths, the workers always must.
    """

    served: bool = False
    """Whether the run's progress is that of the servers, because not every worker takes part in every round: workers
    send no parameters to be evaluated.
    """
    plain_gradients: bool = True
    """Whether workers request only gradients of their own next batch at their own parameters, and wait for each
    gradient. A model that is split over several processes can compute no other gradients.
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
        """Whether the run ends when one worker leaves before the other workers."""
        return self.equal_steps or not self.survives

    @property
    def alike(self) -> bool:
        """Whether every worker's own optimizer steps along the same gradient, so that all replicas stay equal."""
        return self.delivery == "synchronous" and not self.server_optimizer

    def deaths(self, workers: int) -> int:
        """Return how many of `workers` workers may die without stopping the others."""
        most = workers - self.least
        return max(0, most if self.survives is True else min(int(self.survives), most))

    def held_up(self, workers: int) -> bool:
        """Return whether a step waits for some but not all of the `workers` workers, so that a worker that has used up
        its steps delays the step.
        """
        return 1 < (self.gathers if self.gathers > 0 else workers + self.gathers) < workers
