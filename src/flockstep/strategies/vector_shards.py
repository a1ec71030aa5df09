"""Vectors that are cut into slices on several servers, and L-BFGS by short commands that servers execute on their
slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ProtocolError
from flockstep.messages import Note, server
from flockstep.nodes import Server

ASK = "ask/shard"
"""Tag of the requests to a shard of the vectors. The note's `op` says which operation is requested."""
Operation = Literal["dot", "set", "add", "scale"]


class VectorRequest(Note, frozen=True):
    """Note of a request to a shard: send the trial parameters, add the gradient of a portion, or execute a command on
    vectors.
    """

    op: Literal["fetch", "portion", "dot", "set", "add", "scale"]
    a: str = ""
    b: str = ""
    by: float = 1.0
    evaluation: int = 0
    portion: int = 0


class VectorReply(Note, frozen=True):
    """Note of a shard's answer to a command: the value of a dot product, or 0 for other commands."""

    value: float = 0.0


@dataclass
class VectorShard:
    """One server's slices of the vectors: a mapping from the vector's name to the slice, in float64."""

    vectors: dict[str, FlatArray] = field(default_factory=dict)

    def answer(self, asked: VectorRequest) -> float:
        """Execute one command on the shard's slices; return the value of a dot product, or 0 for other commands.

        Raises:
            ProtocolError: the shard has no vector of the given name.
        """
        try:
            return self._obey(asked)
        except KeyError as name:
            raise ProtocolError(
                f"a shard has no vector {name} for the operation {asked.op}; it has {sorted(self.vectors)}"
            ) from None

    def _obey(self, asked: VectorRequest) -> float:
        """Execute one command; return the value of a dot product, otherwise 0.

        dot a b: aᵀ b. set a b: a ← b. add a b by: a ← a + by b. scale a by: a ← by a.
        """
        a, b, by = asked.a, asked.b, asked.by
        match asked.op:
            case "dot":
                return float(self.vectors[a] @ self.vectors[b])
            case "set":
                self.vectors[a] = copied(self.vectors[b])
            case "add":
                self.vectors[a] = self.vectors[a] + by * self.vectors[b]
            case "scale":
                self.vectors[a] = by * self.vectors[a]
        return 0.0


async def tell(me: Server, op: Operation, a: str, b: str = "", by: float = 1.0) -> float:
    """Send one command to every shard; return the sum of the shards' answers, added in order of shards."""
    asked = VectorRequest(op, a, b, by)
    replies = await me.ask_all(ASK, [(server(i), None, asked) for i in range(me.cluster.servers)])
    return float(sum(reply.note.value for reply in replies))


async def direction(me: Server, pairs: Sequence[int]) -> None:
    """Compute the search direction d ← - H g by the two-loop recursion (Nocedal 1980). Pair k consists of the vectors
    s{k} and y{k}, with the oldest pair first.
    """
    await tell(me, "set", "d", "g")
    alphas: dict[int, float] = {}
    curvature = {k: await tell(me, "dot", f"s{k}", f"y{k}") for k in pairs}
    for k in reversed(pairs):
        alphas[k] = await tell(me, "dot", f"s{k}", "d") / curvature[k]
        await tell(me, "add", "d", f"y{k}", -alphas[k])
    if pairs:
        k = pairs[-1]
        await tell(me, "scale", "d", by=curvature[k] / await tell(me, "dot", f"y{k}", f"y{k}"))
    for k in pairs:
        beta = await tell(me, "dot", f"y{k}", "d") / curvature[k]
        await tell(me, "add", "d", f"s{k}", alphas[k] - beta)
    await tell(me, "scale", "d", by=-1.0)
