"""What strategies do with a codec: the same at both ends, for the tensors at hand and the step of the run."""

from __future__ import annotations

from typing import Any

from flockstep.arrays.kernels import name_of
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.feedback.base import Feedback
from flockstep.feedback.sender import encode, fitted, random_of
from flockstep.messages import Message
from flockstep.nodes import Node


def codec_for(me: Node, codec: Codec, feedback: Feedback, part: slice | None = None, step: int | None = None) -> Codec:
    """What `codec` comes to for a part of this node's array (None: all of it) at a step (None: now).

    `step` is a node's count of gradients, the newest one included; codecs count the steps of a run from 0.
    """
    count = me.before + (me.step if step is None else step)
    return fitted(codec, feedback, me.shapes(part), max(0, count - 1))


def encoded(
    me: Node, codec: Codec, feedback: Feedback, array: FlatArray, memory: Any, part: slice | None = None
) -> tuple[Bytes, Any]:
    """The bytes for `array`, which is that part of a gradient, and what to keep of it for the next one."""
    chosen = codec_for(me, codec, feedback, part)
    random = random_of(chosen, me.random, me.run_step)
    return encode(chosen, feedback.among(me.cluster.workers), array, memory, random)


def decoded(me: Node, codec: Codec, feedback: Feedback, message: Message) -> FlatArray:
    """What a message stands for, which its sender has `encoded` for the whole of this node's array."""
    chosen = codec_for(me, codec, feedback, step=message.step)
    return chosen.decode(message.payload, len(me.params), name_of(me.params))
