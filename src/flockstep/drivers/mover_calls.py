"""How a thread's calls reach a mover's own thread, and the calls in which every rank takes part."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from threading import Lock
from typing import Any, Protocol, TypeVar

import numpy as np

from flockstep.arrays.schema import slices
from flockstep.codecs.base import Codec
from flockstep.collectives.base import Collective
from flockstep.collectives.ring import Ring
from flockstep.drivers import mover_collectives as together
from flockstep.drivers.mover_node import Party
from flockstep.drivers.mover_packets import Packet, checked, codec_of, packed, unpacked
from flockstep.drivers.mover_pump import Pump
from flockstep.errors import ConfigurationError, PeerLost, RunError
from flockstep.feedback.base import Feedback
from flockstep.feedback.sender import check_composition, encode, fitted, random_of
from flockstep.messages import Array, Fields, Message
from flockstep.topologies.base import Topology

T = TypeVar("T")


class Held(Protocol):
    """A named window, which a thread may hold."""

    name: str

    def held_here(self) -> bool:
        """Whether the calling thread holds it."""


class SharedSum(Protocol):
    """An array of every rank, where all can reach it."""

    def all_reduce(self, divisor: int, timeout: float | None) -> None:
        """Replace every rank's array by the sum, divided."""


LONGEST_NAME = 200
"""Characters of a name."""


class Calls:
    """What all calls of a mover are made of."""

    rank: int
    """This process's number, from 0."""
    workers: int
    """How many there are."""
    max_bytes: int
    """The size in bytes of the largest array that travels."""

    def __init__(self, pump: Pump, max_bytes: int):
        """For `Mover`."""
        self.rank, self.workers, self.max_bytes = pump.party.rank, pump.party.workers, max_bytes
        self._pump = pump
        self._lock = Lock()
        self._uses: Counter[str] = Counter()
        self._memories: dict[str, Any] = {}
        self._windows: dict[str, Held] = {}
        self._shared: dict[int, SharedSum] = {}

    def check_rank(self, rank: int) -> None:
        """Raise `ConfigurationError` unless there is such a rank."""
        if not 0 <= rank < self.workers:
            raise ConfigurationError(f"a rank must be one of 0..{self.workers - 1}, got {rank!r}")

    def packet(self, array: Array, codec: str | Codec | None, use: str = "") -> Packet:
        """A copy of the array as it is now, encoded if asked; `use` is what the codec's steps are counted under."""
        chosen = codec_of(codec)
        return packed(array, chosen, 0 if chosen is None else self._count(use), self._random)

    def post(self, to: int, tag: str, array: Array | None, note: Fields, closing: bool = False) -> None:
        """Send a message; `closing` says that a rank which only answers still takes it.

        Raises:
            PeerLost: the rank has left, or is dead.
        """
        self._require_open()
        party = self._pump.party
        if array is not None and array.nbytes and to != self.rank:
            note = {**note, "counted": 1}
            self._pump.flow.take(to, array.nbytes, party.gone, None)
        if to in party.departed or (to in party.leaving and not closing):
            raise PeerLost(f"{party.end_of(to)}; worker {self.rank} has something for it")
        self._pump.ask(lambda: party.send(to, tag, array, note))

    def asked(self, to: int, tag: str, array: Array | None, note: Fields, timeout: float | None, what: str) -> Message:
        """Send a request and wait for the reply.

        Raises:
            RunError: the one who was asked says what went wrong.
        """
        if array is not None and array.nbytes and to != self.rank:
            note = {**note, "counted": 1}
            until = None if timeout is None else time.monotonic() + timeout
            self._pump.flow.take(to, array.nbytes, self._pump.party.gone, until)
        message = self.run(lambda me: me.ask(to, tag, array, note), timeout, what)
        if "error" in message.note:
            raise RunError(str(message.note["error"]))
        return message

    def run(self, program: Callable[[Party], Awaitable[T]], timeout: float | None, what: str) -> T:
        """Run a program on the mover's thread, and wait for its end."""
        self._require_open()
        return self._pump.wait(self._pump.start_call(program), timeout, what)

    def together(self, name: str, what: str, program: Callable[[Party], Awaitable[T]], timeout: float | None) -> T:
        """The same for a program in which every rank takes part; those of one name are told apart by their order."""
        self._require_open()
        with self._lock:
            self._uses[f"call {name}"] += 1
            channel = f"{named(name)}#{self._uses[f'call {name}']}"
            future = self._pump.start_call(program, channel, what)
        return self._pump.wait(future, timeout, what)

    def require_alive(self) -> None:
        """Raise what has ended this mover, or that a window is held here."""
        self._require_open()

    def gone(self) -> set[int]:
        """The ranks that will give nothing more: they have left, are about to, or are dead."""
        return {rank for rank in range(self.workers) if self._pump.party.gone(rank)}

    def require_here(self, rank: int) -> None:
        """Raise `PeerLost` if that rank is dead, or has closed its mover and so have all others."""
        if rank in self._pump.party.departed:
            raise PeerLost(f"{self._pump.party.end_of(rank)}; worker {self.rank} wants to reach its window")

    def end_of(self, rank: int) -> str:
        """How a rank that is gone went."""
        return self._pump.party.end_of(rank)

    def book(self, sent: int, received: int, messages: int) -> None:
        """Put on the record what took the place of so many bytes in so many messages each way."""
        self._pump.ask(lambda: self._pump.account.traffic.moved(sent, received, messages))

    def forget(self, window: Held) -> None:
        """A window's name is free again."""
        with self._lock:
            self._windows.pop(window.name, None)

    def _require_open(self) -> None:
        if self._pump.failure is not None:
            raise self._pump.failure
        self.require_free()

    def require_free(self) -> None:
        """Raise `ConfigurationError` if the calling thread holds a window, for which all that it calls would wait."""
        if any(window.held_here() for window in list(self._windows.values())):
            raise ConfigurationError(
                "a window's local() is held here, for which others wait; leave its with block first"
            )

    def _count(self, use: str) -> int:
        with self._lock:
            self._uses[use] += 1
            return self._uses[use] - 1

    def _random(self) -> np.random.Generator:
        with self._lock:
            return np.random.default_rng(self._pump.party.seeds.spawn(1)[0])


class Collectives(Calls):
    """The calls that all ranks make together, in the same order; those in several threads at once need names."""

    def all_reduce(
        self,
        array: Any,
        collective: str | Collective = "ring",
        codec: str | Codec | None = None,
        feedback: str | Feedback = "none",
        average: bool = False,
        out: Array | None = None,
        name: str = "",
        timeout: float | None = None,
    ) -> Array:
        """The sum (or mean) over all ranks, the same in every bit on all of them; a new array, or `out`.

        `out` may be `array` itself; one made by `shared` is then added up where it lies. What a codec leaves out is
        kept by the feedback, for the next call of that name with an array of that shape.

        Raises:
            CompositionError: the feedback would diverge with that codec.
            PeerLost: a rank has left, or is dead.
            TimedOut: the others did not come within `timeout` seconds.
        """
        given, by, chosen = checked(array, self.max_bytes), Collective.parse(collective), codec_of(codec)
        shared = self._shared.get(id(array)) if out is array and chosen is None and by == Ring() else None
        if shared is not None:
            self.require_alive()
            shared.all_reduce(self.workers if average else 1, timeout)
            return given
        if average:
            _require_real(given)
        what = f"all_reduce of {_described(given)} by {by}{_by(chosen)}"
        if chosen is None:
            flat = _scratch(given, out)
            total = self.together(name, what, lambda me: together.all_reduce(me, flat, by), timeout)
        else:
            fit, data = self._kept(given, chosen, Feedback.parse(feedback), name)
            total = self.together(
                name,
                what,
                lambda me: together.sum_encoded(me, data, fit, given.size, given.dtype.name, by),
                timeout,
            )
        if average:
            total /= self.workers
        return _into(total.reshape(given.shape), out)

    def reduce(
        self,
        array: Any,
        to: int = 0,
        collective: str | Collective = "ring",
        codec: str | Codec | None = None,
        name: str = "",
        timeout: float | None = None,
    ) -> Array | None:
        """The sum over all ranks, on rank `to`; None on the others. Raises as `all_reduce`."""
        self.check_rank(to)
        given, by, chosen = checked(array, self.max_bytes), Collective.parse(collective), codec_of(codec)
        what = f"reduce to worker {to} of {_described(given)} by {by}{_by(chosen)}"
        if chosen is None:
            flat = _scratch(given, None)
            total = self.together(name, what, lambda me: together.reduce(me, flat, by, to), timeout)
            return total.reshape(given.shape) if self.rank == to else None
        packet = self.packet(given, chosen, f"reduce {name}")
        messages = self.together(name, what, lambda me: together.gather(me, packet, to), timeout)
        return None if messages is None else self._sum(messages, given)

    def reduce_scatter(
        self, array: Any, codec: str | Codec | None = None, name: str = "", timeout: float | None = None
    ) -> Array:
        """The rank-th of n slices of the flat sum over all ranks, their lengths differing by at most one.

        Every slice goes to the one who adds it up, in order of rank. Raises as `all_reduce`.
        """
        given, chosen = checked(array, self.max_bytes), codec_of(codec)
        flat = given.reshape(-1)
        parts = [flat[part] for part in slices(flat.size, self.workers)]
        packets = [self.packet(part, chosen, f"reduce_scatter {name}") for part in parts]
        what = f"reduce_scatter of {_described(given)}{_by(chosen)}"
        messages = self.together(name, what, lambda me: together.scatter(me, packets), timeout)
        return self._sum(messages, parts[self.rank])

    def broadcast(
        self,
        array: Any = None,
        source: int = 0,
        codec: str | Codec | None = None,
        name: str = "",
        timeout: float | None = None,
    ) -> Array:
        """The array of rank `source`, on every rank as it is or as decoded; the others need not give one.

        Raises as `all_reduce`.
        """
        self.check_rank(source)
        packet = None
        if self.rank == source:
            packet = self.packet(checked(array, self.max_bytes), codec, f"broadcast {name}")
        what = f"broadcast from worker {source}"
        message = self.together(name, what, lambda me: together.broadcast(me, packet, source), timeout)
        return unpacked(message, self.max_bytes)

    def all_gather(
        self, array: Any, codec: str | Codec | None = None, name: str = "", timeout: float | None = None
    ) -> list[Array]:
        """The arrays of all ranks, in order of rank; they may differ in shape and dtype. Raises as `all_reduce`."""
        packet = self.packet(checked(array, self.max_bytes), codec, f"all_gather {name}")
        messages = self.together(name, "all_gather", lambda me: together.all_gather(me, packet), timeout)
        return [unpacked(message, self.max_bytes) for message in messages]

    def neighbour_average(
        self,
        array: Any,
        topology: str | Topology = "ring",
        codec: str | Codec | None = None,
        name: str = "",
        timeout: float | None = None,
    ) -> Array:
        """Row r of W times the arrays of all ranks: the weighted mean over this rank r and those it hears from.

        W is the topology's; of one that changes, the calls of one name go through its period. Only what others
        send is encoded. Raises as `all_reduce`.
        """
        given, graph, rank = checked(array, self.max_bytes), Topology.parse(topology), self.rank
        _require_real(given)
        period = together.mixing(graph, self.workers)
        weights = period[self._count(f"neighbour_average {name}") % len(period)]
        packet = self.packet(given, codec, f"neighbours {name}")
        to = [other for other in range(self.workers) if other != rank and weights[other, rank]]
        of = [other for other in range(self.workers) if other != rank and weights[rank, other]]
        what = f"neighbour_average of {_described(given)} on {graph}"
        messages = self.together(name, what, lambda me: together.exchange(me, packet, to, of), timeout)
        arrays = {message.source: self._like(message, given) for message in messages}
        return together.mixed(given, weights, rank, arrays)

    def barrier(self, name: str = "", timeout: float | None = None) -> None:
        """Return once every rank has come here. Raises as `all_reduce`."""
        self.together(name, "barrier", together.barrier, timeout)

    def agree(self, what: str, timeout: float | None = None) -> None:
        """Return once every rank has come here with the same `what`; raises `ConfigurationError` if one has not."""
        self.together("", what, together.barrier, timeout)

    def _kept(self, array: Array, codec: Codec, feedback: Feedback, name: str) -> tuple[Codec, Array]:
        """The codec as it is for this array and call, and the bytes for the array and what was left out so far."""
        check_composition(codec, feedback)
        step, key = self._count(f"all_reduce {name}"), f"{name} {_described(array)} {codec} {feedback}"
        if array.dtype.kind not in "fV" and array.dtype.name != "bfloat16":
            raise ConfigurationError(f"codec {codec} takes floating-point numbers, got {array.dtype}; leave it out")
        fit = fitted(codec, feedback, (array.shape,), step)
        random, flat = random_of(fit, self._random(), step), array.reshape(-1)
        data, memory = encode(fit, feedback.among(self.workers), flat, self._memories.get(key), random)
        self._memories[key] = memory
        return fit, np.asarray(data)

    def _sum(self, messages: Sequence[Message], like: Array) -> Array:
        """The sum of the arrays that messages stand for, in that order."""
        total = np.zeros_like(like, order="C")
        for message in messages:
            total += self._like(message, like)
        return total

    def _like(self, message: Message, given: Array) -> Array:
        array = unpacked(message, self.max_bytes)
        if array.shape != given.shape or array.dtype != given.dtype:
            raise ConfigurationError(
                f"worker {message.source} gave {_described(array)} where worker {self.rank} gave {_described(given)}; "
                "give arrays of the same shape and dtype"
            )
        return array


def named(name: str) -> str:
    """The name itself.

    Raises:
        ConfigurationError: it is too long.
    """
    if len(name) > LONGEST_NAME:
        raise ConfigurationError(f"a name has at most {LONGEST_NAME} characters, got {len(name)}; use a shorter one")
    return name


def _described(array: Array) -> str:
    return f"{array.dtype.name} {array.shape}"


def _by(codec: Codec | None) -> str:
    return "" if codec is None else f" with {codec}"


def _require_real(array: Array) -> None:
    if array.dtype.kind in "biu":
        raise ConfigurationError(f"a mean needs floating-point numbers, got {array.dtype}; convert the array")


def _scratch(array: Array, out: Array | None) -> Array:
    """A flat array to compute in: the array's own memory if the result goes there anyway, else a copy."""
    if out is array and array.flags.c_contiguous and array.flags.writeable:
        return array.reshape(-1)
    return np.array(array, order="C").reshape(-1)


def _into(result: Array, out: Array | None) -> Array:
    if out is None or np.may_share_memory(result, out):
        return result if out is None else out
    out[...] = result
    return out
