"""Parameters that several processes hold, of which one trains them and sends their values to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_dtensors import local

DIFFERENCE = 0.05
"""Largest relative difference between the gradients that two processes compute for the parameters that both hold."""
TINY = 1e-6
"""Largest norm of a difference that may always be rounding."""


@dataclass(frozen=True, eq=False)
class Copied:
    """Parameters of one dtype that a group of processes holds, and that the same process of the group trains."""

    named: Mapping[str, torch.nn.Parameter]
    owner: int
    """Rank of the process that trains the parameters, in the default process group."""
    group: Any
    """The processes that hold the parameters, as a process group."""

    @property
    def here(self) -> bool:
        """Whether this process trains the parameters."""
        return bool(dist.get_rank() == self.owner)

    def sent(self, read: Callable[[torch.nn.Parameter], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Start to send what `read` returns for each parameter from the owner to the others; return this process's
        values as a flat tensor, the one that becomes the owner's values, and the operation in progress.
        """
        own = torch.cat([local(read(one)).detach().reshape(-1) for one in self.named.values()])
        given = own if self.here else torch.empty_like(own)
        return own, given, dist.broadcast(given, self.owner, group=self.group, async_op=True)


class Copies:
    """The parameters of a module that several processes hold, such as layer norms under tensor parallelism.

    One of these processes trains such a parameter in its flat array, as if the others did not hold it, so that the
    copies stay equal also where each process of a replica exchanges its part with other replicas at other times.
    """

    def __init__(self, sets: Sequence[Copied] = ()):
        self._sets, self._compared = sets, False
        self.elsewhere = {name: one for each in sets if not each.here for name, one in each.named.items()}
        """The parameters that another process trains, by name."""

    def send(self) -> None:
        """Send the values of each parameter from its owner to the other processes, all of which call this."""
        started = [(each, each.sent(lambda one: one)) for each in self._sets]
        for each, (_, given, work) in started:
            work.wait()
            if not each.here:
                places = [local(one).detach() for one in each.named.values()]
                for place, values in zip(places, torch.split(given, [one.numel() for one in places]), strict=True):
                    place.copy_(values.view(place.shape))

    def require_equal_gradients(self) -> None:
        """Compare the first gradients of all processes; raise `ConfigurationError` if they differ by more than rounding
        does.
        """
        for each in () if self._compared else self._sets:
            own, given, work = each.sent(_gradient)
            work.wait()
            norm = torch.linalg.vector_norm
            differs = (norm(own - given) > DIFFERENCE * norm(given) + TINY).float()
            dist.all_reduce(differs, dist.ReduceOp.MAX, group=each.group)
            if differs:  # all raise it, so that none waits for another
                raise ConfigurationError(
                    f"{next(iter(each.named))} is held by several processes of a replica, which must compute equal "
                    "gradients for it, got different ones; if the processes read different data, shard all parameters "
                    "or freeze the others, and if they hold different layers, give the layers different names"
                )
        self._compared = True


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter; zeros if it has none."""
    found = parameter.grad
    if found is None:
        return torch.zeros_like(local(parameter))
    return found.to_dense() if found.layout != torch.strided else found
