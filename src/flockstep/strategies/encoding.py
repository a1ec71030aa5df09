"""Functions that encode and decode a strategy's arrays with a codec bound to the tensors and the step, so that sender
and receiver use the codec in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flockstep.arrays.kernels import name_of
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.feedback.base import Feedback
from flockstep.feedback.sender import bound_codec, random_of
from flockstep.messages import Message
from flockstep.nodes import Node, Worker


def codecs_of(part: Any) -> list[Codec]:
    """Return the codecs that a component contains, directly or inside its other components."""
    if part is None:
        return []
    inner = [value for value in vars(part).values() if hasattr(value, "noun")]
    found = [part] if isinstance(part, Codec) else []
    return found + [codec for one in inner for codec in codecs_of(one)]


def codec_for(me: Node, codec: Codec, feedback: Feedback, part: slice | None = None, step: int | None = None) -> Codec:
    """Return `codec` bound to a step, and to the tensors in a slice of the node's array.

    Args:
        part: the slice; None for the whole array.
        step: number of the node's gradients, including the newest; None for the current number. Codecs count the steps
            of a run from 0.
    """
    count = me.before + (me.step if step is None else step)
    return bound_codec(codec, feedback, me.shapes(part), max(0, count - 1))


def encoded(
    me: Node, codec: Codec, feedback: Feedback, array: FlatArray, memory: Any, part: slice | None = None
) -> tuple[Bytes, Any]:
    """Encode `array`, the slice `part` of a gradient; return the encoded bytes and the feedback memory for the next
    gradient.
    """
    chosen = codec_for(me, codec, feedback, part)
    random = random_of(chosen, me.random, me.run_step)
    return feedback.bind_workers(me.cluster.workers).encode(chosen, array, memory, random)


def send_slices(
    me: Worker, codec: Codec, feedback: Feedback, gradient: FlatArray, parts: Sequence[slice], memories: list[Any]
) -> Bytes:
    """Encode the slice `parts[r]` of a gradient for each rank r, and update the slice's feedback memory in `memories`;
    send every other worker its slice, and return this worker's slice.
    """
    ready = []
    for rank, part in enumerate(parts):
        data, memories[rank] = encoded(me, codec, feedback, gradient[part], memories[rank], part)
        ready.append(data)
    for hop in range(1, me.workers):  # each worker begins with a different receiver
        rank = (me.rank + hop) % me.workers
        me.send(rank, "gradient", ready[rank])
    return ready[me.rank]


def decoded(me: Node, codec: Codec, feedback: Feedback, message: Message) -> FlatArray:
    """Return the array (K,) that a message contains. The sender must have encoded the whole array with `encoded`."""
    chosen = codec_for(me, codec, feedback, step=message.step)
    return chosen.decode(message.payload, len(me.params), name_of(me.params))
