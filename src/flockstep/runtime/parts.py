"""Creates the program of each kind of part of a split model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flockstep.errors import CompositionError
from flockstep.frameworks.base import Indices
from flockstep.frameworks.grid import GridModel
from flockstep.frameworks.shards import ShardedModel, ShardedPartsModel
from flockstep.frameworks.stages import PipelineModel, SplitModel
from flockstep.frameworks.ways import TensorModel
from flockstep.messages import NO_NOTES, Notes
from flockstep.runtime.grid_way import GridWay
from flockstep.runtime.part_program import PartProgram, PartRun, Send, part_random
from flockstep.runtime.plan import Plan
from flockstep.runtime.sharded_way import PartShard, ShardedWay
from flockstep.runtime.stage import PipelineStage, stage_notes
from flockstep.runtime.tensor_way import TensorWay


def program_of(
    model: SplitModel,
    part: int,
    replica: int,
    plan: Plan,
    batch: Callable[[], Indices],
    send: Send,
    taken: int = 0,
) -> PartProgram:
    """Return the program of part `part` of a replica. `plan` is that of the part's data-parallel group; `batch` returns
    the samples of the replica's next batch; `send(part, message)` sends a message to another part of the replica;
    `taken` is the number of steps that the part took before the run was continued.

    Raises:
        CompositionError: there is no program for the parts of such a model.
    """
    drawing = part - part % model.tensor.ways if isinstance(model, TensorModel) else part
    """The part whose random numbers are used: all ways of a stage encode equal activations as equal bytes."""
    name, random = model.partition.part_name(part), partial(part_random, plan.seed, replica, drawing)
    run = PartRun(replica, part, name, plan.steps, batch, send, random, taken)
    match model:
        case GridModel():
            return GridWay(run, model)
        case PipelineModel():
            return PipelineStage(run, model.parts[part], model.pipeline, model.ties)
        case TensorModel():
            return TensorWay(run, model)
        case ShardedModel():
            return ShardedWay(run, model)
        case ShardedPartsModel():
            ways = model.partition.sharded.ways
            inner, shard = divmod(part, ways)
            as_replica = replica * ways + shard  # of the inner partition, so that shards have their own random numbers
            return PartShard(
                run, model, lambda own, inside: program_of(model.inner, inner, as_replica, plan, own, inside, taken)
            )
    raise CompositionError(f"no program computes the parts of {model.partition}; use partition=none")


def notes_between(model: SplitModel) -> Notes:
    """Return message tag → type of the note, for the messages between the parts of a replica."""
    if isinstance(model, ShardedPartsModel):
        return notes_between(model.inner)
    if isinstance(model, GridModel):
        return stage_notes(len(model.exchanges), len(model.ties))
    if isinstance(model, PipelineModel | TensorModel):
        return stage_notes(model.pipeline.schedule.chunks, len(model.ties) if isinstance(model, PipelineModel) else 0)
    return NO_NOTES
