"""DTensors as flockstep uses them: the part of each that this process holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flockstep.errors import ConfigurationError
from flockstep.frameworks.shard_layout import Box


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this process holds, without a copy; any other tensor itself."""
    own: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if own is None else own


def aligned(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a DTensor with the placements of the parameter; a gradient may be a sum that is due."""
    given: Any = gradient
    wanted = getattr(parameter, "placements", None)
    return gradient if wanted is None or given.placements == wanted else given.detach().redistribute(placements=wanted)


def like(own: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the DTensor with the placements of `parameter` of which this process holds `own`; `own` itself if the
    parameter is no DTensor.
    """
    if local(parameter) is parameter:
        return own
    from torch.distributed.tensor import DTensor

    given: Any = parameter
    shape = {"shape": given.shape, "stride": given.stride()}
    return DTensor.from_local(own, given.device_mesh, given.placements, run_check=False, **shape)


def placed_like(parameter: torch.Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's values for a parameter: tensors with the shape of what this process holds of it as DTensors
    like the parameter, if it is one; others as they are.
    """
    shape = local(parameter).shape
    return {
        name: like(one, parameter) if isinstance(one, torch.Tensor) and one.shape == shape else one
        for name, one in values.items()
    }


def box_of(parameter: torch.Tensor) -> Box:
    """Return where the part of a parameter that this process holds lies in the whole parameter.

    Raises:
        ConfigurationError: the elements are not consecutive along each dimension.
    """
    given: Any = parameter
    if local(parameter) is parameter:
        return Box(tuple(parameter.shape), (0,) * parameter.ndim)
    chunks = given.__create_chunk_list__()  # how torch.distributed.checkpoint asks
    if len(chunks) != 1:
        raise ConfigurationError(
            f"a process must hold one consecutive piece of each parameter, got {len(chunks)} pieces with placements "
            f"{given.placements}; shard the model in another way"
        )
    return Box(tuple(given.shape), tuple(chunks[0].offsets))
