"""Finds the part of this process's script in the checkpoints of its run."""

from __future__ import annotations

from flockstep.errors import ConfigurationError
from flockstep.runtime.node_spec import place_of_script, require_own_process, spec_from_environment
from flockstep.runtime.script_checkpoints import ScriptCheckpoints
from flockstep.runtime.session import sessions_here


def script_checkpoints(name: str) -> ScriptCheckpoints | None:
    """Return the object through which this process's script takes part in checkpoints; None if the script runs alone.

    `name` is the function that the script has called.

    Raises:
        ConfigurationError: the script is not between `distribute` and `finish()`, or has several optimizers, or uses
            another framework than PyTorch.
    """
    require_own_process(name)
    if spec_from_environment() is None and place_of_script()[1] == 1:
        return None
    live = sessions_here()
    if not live:
        raise ConfigurationError(
            f"flockstep.{name} needs a run; call it after flockstep.distribute() and before finish()"
        )
    if len(live) > 1 or live[0].node_spec.call > 1:
        raise ConfigurationError(
            f"flockstep.{name} works in scripts that call flockstep.distribute once, got several calls; save "
            "state_dict()s in this script, as docs/how-to/loops.md shows"
        )
    loop = live[0].loop
    if loop is None or loop.checkpoints is None:
        raise ConfigurationError(
            f"flockstep.{name} works only in a PyTorch script after flockstep.distribute, got a script of another "
            "framework or without distribute; save the state in the script itself"
        )
    return loop.checkpoints
