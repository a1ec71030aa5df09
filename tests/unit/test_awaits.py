"""A forgotten `await` in a strategy ends in one sentence that names the call."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flockstep.errors import ConfigurationError
from flockstep.messages import MASTER
from flockstep.nodes import Server, Worker
from flockstep.registry import names
from flockstep.strategies.awaits import check_awaits
from flockstep.strategies.base import Strategy, Traits
from flockstep.testing.strategies import check_strategy, run_strategy


class Mine(Strategy):
    """A strategy of a user; mypy would find most of these mistakes, and the user does not run it."""

    @property
    def traits(self) -> Traits:
        return Traits(delivery="partial", survives=False, results=("mean",))


@dataclass(frozen=True)
class Assigned(Mine):
    async def worker(self, me: Any) -> None:
        while me.training:
            gradient = me.gradient()
            me.optimizer_step(gradient)


@dataclass(frozen=True)
class Inside(Mine):
    async def worker(self, me: Any) -> None:
        while me.training:
            me.send(1 - me.rank, "model", me.params)
            me.params += 0.5 * (me.receive("model", 1 - me.rank).payload - me.params)
            me.optimizer_step(await me.gradient())


@dataclass(frozen=True)
class Helper(Mine):
    async def swapped(self, me: Any) -> np.ndarray[Any, Any]:
        me.send(1 - me.rank, "model", me.params)
        return (await me.receive("model", 1 - me.rank)).payload

    async def worker(self, me: Any) -> None:
        while me.training:
            me.params += 0.5 * (self.swapped(me) - me.params)
            me.optimizer_step(await me.gradient())


@dataclass(frozen=True)
class Parts(Mine):
    async def worker(self, me: Any) -> None:
        while me.training:
            gradient = await me.gradient_parts([slice(0, len(me.params))])
            me.optimizer_step(gradient)


@dataclass(frozen=True)
class Served(Mine):
    servers = 1

    async def worker(self, me: Any) -> None:
        while me.training:
            me.params[:] = await me.request(MASTER, "pull")
            me.send(MASTER, "push", await me.gradient())

    async def master(self, me: Any) -> None:
        for message in me.messages():
            me.reply(message, me.params)


@dataclass(frozen=True)
class Needless(Mine):
    async def worker(self, me: Any) -> None:
        while me.training:
            await me.send(1 - me.rank, "model", me.params)
            me.optimizer_step(await me.gradient())


@dataclass(frozen=True)
class Other(Mine):
    async def worker(self, me: Worker) -> None:
        while me.training:
            me.optimizer_step(await me.gradient() + Path("generator"))


@dataclass(frozen=True)
class Dropped(Mine):
    async def worker(self, me: Worker) -> None:
        while me.training:
            me.receive("model", 1 - me.rank)
            me.optimizer_step(await me.gradient())


@dataclass(frozen=True)
class DroppedByServer(Served):
    async def master(self, me: Server) -> None:
        me.receive("pull")


def logged(program: Any) -> Any:
    @functools.wraps(program)
    def call(*arguments: Any) -> Any:
        return program(*arguments)

    return call


@dataclass(frozen=True)
class AtTheMargin(Mine):
    @logged
    async def worker(self, me: Any) -> None:
        assert """
further left than the program"""
        me.ask(1 - me.rank, "pull")


@dataclass(frozen=True)
class DroppedByHelper(Mine):
    async def models(self, me: Any) -> AsyncIterator[Any]:
        me.ask_all([1 - me.rank], "models")
        yield me.params

    async def worker(self, me: Worker) -> None:
        async for model in self.models(me):
            me.params[:] = model


async def told(me: Worker) -> None:
    await me.receive("told")


@dataclass(frozen=True)
class Right(Mine):
    """Programs that await everything, in ways that are less common."""

    half = functools.partial(told)

    async def worker(self, me: Worker) -> None:
        told = len
        while me.training:
            told(me.params)
            later = me.gradient()
            me.optimizer_step(await later)
            len(one for one in (1, 2))  # type: ignore[arg-type]


def line(text: str) -> int:
    return 1 + next(number for number, one in enumerate(Path(__file__).read_text("utf-8").split("\n")) if text in one)


@pytest.mark.filterwarnings("ignore:coroutine 'Helper.swapped' was never awaited:RuntimeWarning")
@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Assigned(), "Assigned.worker (test_awaits.py, line {gradient = me.grad}): me.gradient() must be awaited"),
        (Inside(), "Inside.worker (test_awaits.py, line {me.params += 0.5 * (me.rec}): me.receive() must be awaited; "),
        (Helper(), "Helper.worker (test_awaits.py, line {(self.swapped}): self.swapped() must be awaited; write await"),
        (
            Parts(),
            "(test_awaits.py, line {= await me.gradient_parts}): me.gradient_parts() must be iterated with async",
        ),
        (
            Served(),
            "line {for message in me.messages}): me.messages() must be iterated with async for; write async for",
        ),
        (Needless(), "line {await me.send(}): me.send() does not wait and must not be awaited; remove the await"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Strategy) else "",
)
def test_the_call_is_named(strategy: Strategy, said: str) -> None:
    before, _, rest = said.partition("{")
    text, _, after = rest.partition("}")
    with pytest.raises(ConfigurationError, match=re.escape(f"{before}{line(text)}{after}")):
        run_strategy(strategy, 2)


def test_errors_of_another_cause_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        run_strategy(Other(), 2)


def test_a_result_that_nobody_takes_is_found_before_the_strategy_runs() -> None:
    for strategy, number in (
        (Dropped(), line('  me.receive("model", 1 - me.rank)')),
        (DroppedByServer(), line('me.receive("pull")')),
        (AtTheMargin(), line('me.ask(1 - me.rank, "pull")')),
        (DroppedByHelper(), line('me.ask_all([1 - me.rank], "models")')),
    ):
        with pytest.raises(AssertionError, match=rf"line {number}\): (me\.\w+)\(\) must be awaited; write await \1"):
            check_strategy(strategy)


def test_a_program_that_awaits_everything_is_not_accused() -> None:
    check_awaits(Right())
    with pytest.raises(TypeError, match="object of type 'generator' has no len"):
        run_strategy(Right(), 2)


def test_no_strategy_of_the_registry_is_accused() -> None:
    assert len(names("strategy")) > 30
    for name in names("strategy"):
        check_awaits(Strategy.parse(name))


def test_a_program_that_is_no_coroutine_is_refused_where_it_is_defined() -> None:
    with pytest.raises(ConfigurationError, match=r"Plain.worker must be a coroutine; write async def worker"):

        class Plain(Mine):
            def worker(self, me: Worker) -> None:
                me.leave()


NO_SOURCE = """
@dataclass(frozen=True)
class Forgotten(Mine):
    async def worker(self, me):
        while me.training:
            gradient = me.gradient()
            me.optimizer_step(gradient)
"""


def test_a_forgotten_await_of_a_class_without_source_ends_in_a_sentence() -> None:
    """As in `python -c`, in an interactive session or with `exec`: there is no file that names the call."""
    names = {"dataclass": dataclass, "Mine": Mine, "__name__": __name__}
    exec(NO_SOURCE, names)
    said = r"Forgotten.worker \(<string>, line 7\): TypeError: .*'generator'; look up to this line for a call"
    with pytest.raises(ConfigurationError, match=said):
        run_strategy(names["Forgotten"](), 2)
