"""What strategies promise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ResultPolicy = Literal["server", "mean", "rank0", "best", "ensemble"]
Samples = Literal["own", "others", "sent"]
Clips = Literal["own", "combined", "none"]
Memory = Literal["optimizer", "velocity", "own"]
Approximation = Literal["none", "sent later", "lost"]


@dataclass(frozen=True)
class Traits:
    """What a composed strategy promises."""

    completeness: Literal[1, 2, 3, 4]
    """Class on FAST's spectrum of communication completeness: 1 synchronous, 2 complete with bounded delay,
    3 complete with unbounded delay, 4 partial."""
    survives: bool | int
    """Deaths of workers after which the others still go on: a number, False for none, True for any number."""
    results: tuple[ResultPolicy, ...]
    """The policies for choosing the resulting model that make sense; the first is the default."""
    server_optimizer: bool = False
    """Gradients are applied by the servers (or by slices), whose optimiser is rebuilt from the worker's."""
    fixed_steps: bool = True
    """Every worker takes exactly the steps that it was granted; otherwise all together take at most as many."""
    needs_job: bool = False
    """Workers ask for more than their next gradient, which only a declared job can give, not a script's own loop."""
    gathers: int = 0
    """Gradients of different workers, whichever come first, that a step waits for; 0: of all of them or of none, -b: of
    all but b."""
    least: int = 1
    """Workers that must be left for the others to go on."""
    samples: Samples = "own"
    """Whose training samples a worker sees: its own alone; those of `others`, on which it computes gradients; or its
    own, of which messages carry some, as they are (`sent`)."""
    clips: Clips = "own"
    """What `flockstep.clip_grad_norm_` clips: each worker's own gradient, or the combined gradient of a step, on the
    server with `server_optimizer`; none where no node holds the whole combined gradient."""
    memory: Memory = "optimizer"
    """What servers remember of past steps: what the worker's optimizer would; a velocity, as that optimizer's
    `momentum`; or the state of an optimizer of their `own`, which a script cannot save or load."""
    approximation: Approximation = "none"
    """What becomes of the part of an update that the strategy itself, without a codec, leaves out of a step's messages:
    there is none; a later step sends that part; the part is lost."""
    curvature: bool = False
    """Steps follow the curvature, not the job's optimizer, so that steps to a target cannot be compared."""
    matrices: bool = False
    """The strategy sends factors of the gradient's matrices, so that bytes depend on the shapes of tensors."""
    restarts: bool = True
    """A run can be stopped and begun anew from what its nodes remember; otherwise something lies outside of them."""

    @property
    def alike(self) -> bool:
        """Whether every worker's own optimizer steps along the same gradient, so that all replicas stay equal."""
        return self.completeness == 1 and not self.server_optimizer

    def deaths(self, workers: int) -> int:
        """Number of deaths among so many workers after which the others still go on."""
        most = workers - self.least
        return max(0, most if self.survives is True else min(int(self.survives), most))

    def held_up(self, workers: int) -> bool:
        """Whether a step may wait for some other workers, so that those who make no steps hold it up."""
        return 1 < (self.gathers if self.gathers > 0 else workers + self.gathers) < workers
