"""Disrupts real runs at random, one run after the other, until the time is over."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flockstep import registry
from flockstep.errors import ConfigurationError, RunError
from flockstep.expression import to_text
from flockstep.records.events import LostEvent
from flockstep.records.folder import RunFolder
from flockstep_lab.chaos.base import Disruption, Setting
from flockstep_lab.chaos.invariants import RunHistory, broken
from flockstep_lab.chaos.run import ChaosRun

PILOT = 100
"""Number of steps of the short run that measures the duration of a step."""
LONG, MOST_STEPS = 3.0, 20_000
"""LONG: seconds that training should take without a disruption, long enough for a disruption in the middle. MOST_STEPS:
largest number of steps of each worker in such a run.
"""
PATIENCE = 30.0
"""Factor for the time limit of a disrupted command: this many times the seconds of the baseline run, plus one
minute.
"""


@dataclass(frozen=True)
class BaselineRun:
    """Durations and result of a run without a disruption, with which disrupted runs are compared."""

    seconds: float
    """Seconds that the whole command took."""
    training: float
    """Seconds of training, without starting and ending the processes."""
    steps: int
    result: bytes

    @property
    def rate(self) -> float:
        """Steps of all workers per second of training."""
        return self.steps / self.training

    def useful_seconds(self, seconds: float) -> float:
        """Return the seconds of a disrupted run that count as training: its total minus the seconds for starting and
        ending processes, taken from the baseline run.
        """
        return max(self.training, seconds - (self.seconds - self.training))


@dataclass(frozen=True)
class ChaosTrial:
    """One disrupted run: its disruption, how it ended, and the invariants that it violated."""

    number: int
    setting: Setting
    disruption: Disruption
    fired: bool
    ended: str
    seconds: float
    steps: int
    broken: tuple[str, ...]
    folder: Path

    @property
    def command(self) -> str:
        """The shell command that repeats this disrupted run."""
        words = ["flockstep", "chaos", *self.setting.words, "--disruption", to_text(self.disruption)]
        return shlex.join(words)

    def document(self) -> dict[str, Any]:
        """Return the disrupted run's outcome as a dictionary, for JSON."""
        return {
            "number": self.number,
            "strategy": str(self.setting.strategy),
            "disruption": to_text(self.disruption),
            "fired": self.fired,
            "ended": self.ended,
            "seconds": self.seconds,
            "steps": self.steps,
            "broken": list(self.broken),
            "command": self.command,
        }


@dataclass(frozen=True)
class Goodput:
    """Useful steps per second (goodput) of the disrupted runs of one strategy."""

    strategy: str
    runs: int
    baseline: float
    disturbed: float

    @property
    def share(self) -> float:
        """Useful steps per second with disruptions, divided by steps per second without disruptions."""
        return self.disturbed / self.baseline


def baseline_run(setting: Setting, place: Path) -> BaselineRun:
    """Carry out a run without a disruption, and return its durations and result.

    Raises:
        RunError: the run failed.
    """
    with ChaosRun(setting, place) as run:
        run.begin()
        summary = run.summary
        if run.codes != [0] or summary is None:
            raise RunError(f"{setting.strategy} fails without a disruption: {run.err.strip()[-500:]}")
        result = RunFolder(run.folder).read_result()[0].tobytes()
    shutil.rmtree(place)
    return BaselineRun(run.seconds, summary.seconds, summary.steps, result)


def long_enough(setting: Setting, place: Path) -> Setting:
    """Return the setting with enough steps that training lasts about `LONG` seconds."""
    pilot = baseline_run(dataclasses.replace(setting, steps=PILOT), place)
    steps = min(MOST_STEPS, max(PILOT, int(PILOT * LONG / max(pilot.training, 1e-3))))
    return dataclasses.replace(setting, steps=steps)


def drawn(setting: Setting, number: int) -> Disruption:
    """Draw the disruption with the given number at random.

    The result depends only on the seed and the number, never on the time.

    Raises:
        ConfigurationError: no disruption applies to the run.
    """
    random = np.random.default_rng([setting.seed, number])
    names = registry.names("disruption")
    for place in random.permutation(len(names)):
        kind: type[Disruption] = registry.load("disruption", names[place])
        if (found := kind.drawn(random, setting)) is not None:
            return found
    raise ConfigurationError(f"no disruption applies to {setting.strategy}; choose another strategy")


def trial(setting: Setting, disruption: Disruption, number: int, baseline: BaselineRun, place: Path) -> ChaosTrial:
    """Disrupt one run, resume the run if it must continue, and check the invariants.

    The folder is kept if an invariant is violated.
    """
    expected, files = disruption.expected(setting), len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts itself
    with ChaosRun(setting, place, disruption, PATIENCE * baseline.seconds + 60) as run:
        run.begin()
        fired, lost = disruption.fired(run), lost_in(run.folder)
        if expected.resumes and run.codes[0] != 0 and not run.hangs:
            run.resume()
        summary, left = run.summary, run.left()
        record = RunFolder(run.folder)
        events = record.read_events() if summary is not None else []
        result = record.read_result()[0].tobytes() if record.result_file.exists() else None
        history = RunHistory(
            setting, expected, events, summary, run.codes, fired, run.hangs, run.err, result, baseline.result, left,
            run.folder, lost,
        )  # fmt: skip
        found = broken(history)
    if (now := len(os.listdir("/proc/self/fd"))) > files:  # noqa: PTH208
        found.append(f"nothing_left: after the run, {now - files} more files are open in this process than before")
    steps = 0 if summary is None else summary.steps
    ended: str = "no summary" if summary is None else summary.status
    ended += f", {len(lost)} lost" if lost else ""
    ended += (", began again" if run.restarted else ", resumed") if len(run.codes) > 1 else ""
    if summary is not None and any(" continued from step " in note for note in summary.notes):
        ended += ", continued from a checkpoint"
    if not found:
        shutil.rmtree(place)
    return ChaosTrial(number, setting, disruption, fired, ended, run.seconds, steps, tuple(found), place)


def lost_in(folder: Path) -> frozenset[int]:
    """Return the numbers of the nodes that a run has reported as lost so far."""
    try:
        return frozenset(one.node for one in RunFolder(folder).read_events() if isinstance(one, LostEvent))
    except ConfigurationError:
        return frozenset()


def campaign(
    settings: Sequence[Setting],
    minutes: float,
    place: Path,
    steps: int | None = None,
    disruptions: Sequence[Disruption] = (),
    say: Callable[[str], object] = lambda text: None,
) -> Iterator[ChaosTrial | Goodput]:
    """Disrupt runs of each setting in turn until the time is over, and yield each trial, then each setting's goodput.

    Args:
        settings: the runs, one for each strategy.
        minutes: time for all runs together, those without disruptions included; each setting has at least one trial.
        place: a new folder for the runs.
        steps: steps of each worker; None chooses a number with which training lasts some seconds.
        disruptions: disruptions to cause once each, instead of random disruptions.
        say: function that is called with a text about the next measurement.

    Raises:
        RunError: a run fails without a disruption.
        ConfigurationError: a disruption cannot happen in a run.
    """
    until = time.monotonic() + 60 * minutes
    known: list[tuple[Setting, BaselineRun]] = []
    for at, given in enumerate(settings):
        say(f"{given.strategy} without a disruption")
        fixed = None if steps is None else dataclasses.replace(given, steps=steps)
        setting = fixed or long_enough(given, place / f"pilot-{at}")
        for disruption in disruptions:
            disruption.check(setting)
        known.append((setting, baseline_run(setting, place / f"baseline-{at}")))
    done: list[ChaosTrial] = []
    number = 0
    while len(disruptions) > number if disruptions else number == 0 or time.monotonic() < until:
        for at, (setting, baseline) in enumerate(known):
            if number and not disruptions and time.monotonic() >= until:
                break
            disruption = disruptions[number] if disruptions else drawn(setting, number * len(known) + at)
            say(f"{setting.strategy}: {to_text(disruption)}")
            done.append(trial(setting, disruption, number, baseline, place / f"{number}-{at}"))
            yield done[-1]
        number += 1
    for setting, baseline in known:
        own = [one for one in done if one.setting == setting]
        seconds = sum(baseline.useful_seconds(one.seconds) for one in own)
        yield Goodput(str(setting.strategy), len(own), baseline.rate, sum(one.steps for one in own) / seconds)
