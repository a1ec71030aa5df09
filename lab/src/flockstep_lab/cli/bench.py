"""`flockstep bench`: the speed of transports, collectives, codecs and the simulator, compared with alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from flockstep.cli import show
from flockstep.cli.commands import CommandEntry, command_of, group_of
from flockstep.errors import ConfigurationError, Interrupted
from flockstep.options import Arg, Opt
from flockstep.report import formatting

ELEMENTS = 4 << 20
"""Default number of elements of the array that `bench codecs` encodes."""
NOISY = 0.5
"""Distance between the first and third quartiles, as a share of the median, above which a row is marked as noisy."""
LEGEND = (
    "time: median of the rounds. GB/s: size of the array divided by the median time. ~: the quartiles are further "
    "apart than half the median; repeat the measurement on a quieter machine. All implementations took turns in one "
    "run."
)

WORDY = ("encode", "quartiles")
"""Headings of columns that are aligned left, because they hold the reason if a measurement failed."""
RANKS = {
    "quartiles": 1,
    "processes": 3,
    "bits an element": 3,
    "encode + residual": 2,
    "ms to encode": 1,
    "events/s": 3,
    "of the batched": 2,
}
"""Heading → rank of its column; a narrow terminal leaves out the columns of the highest rank first."""

Rounds = Annotated[int, Opt("Number of repetitions; the median of the repetitions is shown.", names=("--rounds", "-r"))]
Sizes = Annotated[str, Opt("Sizes of the array in bytes, such as 4096,1048576.")]
Json = Annotated[bool, Opt("Print one JSON document.", names=("--json",))]
Out = Annotated[Path | None, Opt("Also write a chart to this HTML file.")]


def transport(rounds: Rounds = 20, sizes: Sizes = "16777216", out: Out = None, as_json: Json = False) -> None:
    """Measure one-way pushes of arrays that the receiver adds up: over transports, raw sockets, and a memory copy."""
    from flockstep_lab.bench import plots
    from flockstep_lab.bench.transport import COPY, measure

    with show.status() as say:
        figures = measure(_numbers("sizes", sizes), _at_least_one("rounds", rounds), say)
    _answer(
        "One-way push of an array that the receiver adds to its own array",
        figures,
        out,
        as_json,
        lambda: plots.of_rates(figures),
        COPY,
    )


def collectives(
    workers: Annotated[str, Opt("Numbers of processes.", names=("--workers", "-n"))] = "2,4",
    sizes: Sizes = "4096,1048576,4194304,33554432",
    rounds: Rounds = 20,
    implementation: Annotated[
        tuple[str, ...] | None,
        Opt("Measure only this implementation; repeat the option for several.", names=("--implementation", "-i")),
    ] = None,
    save: Annotated[Path | None, Opt("File to write the table for collective auto(table=…) to.")] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure the time of all-reduces of float32 arrays by flockstep, gloo and OpenMPI."""
    from flockstep.collectives.table import write_table
    from flockstep.errors import UnknownName
    from flockstep_lab.bench import plots
    from flockstep_lab.bench.collectives import IMPLEMENTATIONS, SHOWN, candidates, measure, table_of

    known = [one.name for one in IMPLEMENTATIONS]
    for name in implementation or []:
        if name not in known:
            raise UnknownName.among("implementation", name, known)
    names = list(dict.fromkeys([*(implementation or SHOWN), *(candidates() if save else [])]))
    counts = _numbers("workers", workers)
    with show.status() as say:
        figures = measure(names, counts, _numbers("sizes", sizes), _at_least_one("rounds", rounds), say)
    if save is not None:
        write_table(save, table_of(figures))
    _answer("All-reduce of float32", figures, out, as_json, lambda: plots.of_rates(figures), "openmpi")


def codecs(
    codec: Annotated[tuple[str, ...] | None, Arg("Codecs to measure (default: all registered codecs).")] = None,
    elements: Annotated[int, Opt("Number of elements of the array.")] = ELEMENTS,
    rounds: Rounds = 20,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure encoding and decoding rates of codecs, relative to a copy of the same float32 array."""
    from flockstep.codecs.base import Codec
    from flockstep_lab.bench import plots
    from flockstep_lab.bench.codecs import measure

    for text in codec or []:
        Codec.parse(text)
    with show.status() as say:
        figures = measure(codec, _at_least_one("elements", elements, ELEMENTS), _at_least_one("rounds", rounds), say)
    headings = ("codec", "bits an element", "encode", "encode + residual", "decode + add", "ms to encode")
    rows = []
    for one in figures:
        speeds = (one.encode, one.encode_residual, one.add_decoded)
        ms = formatting.number(None if one.seconds is None else one.seconds * 1000)
        cells = [formatting.number(one.bits), *map(formatting.number, speeds), ms]
        rows.append([one.codec, *(["", one.missing, "", "", ""] if one.missing else cells)])
    if out is not None:
        title, caption = "Rates of codecs, relative to copying the array", plots.OF_COPIES
        plots.page(title, caption, plots.of_codecs(figures), headings, rows).write(out)
    legend = (
        f"rates are relative to copying {elements:,} float32 numbers, and higher is faster; medians of {rounds} rounds"
    )
    _print(figures, as_json, headings, rows, legend)


def simulator(
    replicas: Annotated[str, Opt("Numbers of replicas.", names=("--replicas", "-n"))] = "16,64,256",
    rounds: Rounds = 20,
    steps: Annotated[int, Opt("Number of steps of each worker in a simulation.")] = 20,
    workload: Annotated[str, Opt("Workload to train, such as tabular.", names=("--workload", "-w"))] = "softmax",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure simulated worker-steps per second, compared with a plain loop and with batched gradients alone."""
    from flockstep_lab.bench import plots
    from flockstep_lab.bench.simulator import STRATEGIES, measure

    counts, usual = _numbers("replicas", replicas), _at_least_one("rounds", rounds)
    with show.status() as say:
        figures = measure(STRATEGIES, counts, usual, _at_least_one("steps", steps), workload, say)
    headings = ("strategy", "replicas", "worker-steps/s", "of the loop's", "of the batched", "events/s")
    rows = []
    for one in figures:
        events = "" if one.events is None else f"{one.events:,.0f}"
        ratios = f"{one.to_loop:.2f}", f"{one.to_batched:.2f}"
        rows.append([one.strategy, str(one.replicas), f"{one.rate:,.0f}", *ratios, events])
    if out is not None:
        title, caption = "Speed of the simulation compared with a plain training loop", plots.STEPS
        plots.page(title, caption, plots.of_simulator(figures), headings, rows).write(out)
    _print(figures, as_json, headings, rows)


def prediction(
    strategy: Annotated[
        tuple[str, ...] | None,
        Opt("Measure only this strategy; repeat the option for several.", names=("--strategy", "-s")),
    ] = None,
    bandwidths: Annotated[str, Opt("Bandwidths of the links, separated by commas.")] = "20mbit,100mbit,1gbit",
    job: Annotated[str | None, Opt("Job to train (default: a softmax of 200,010 parameters).")] = None,
    workers: Annotated[
        int, Opt("Number of processes; each process runs on its own virtual host.", names=("--workers", "-n"))
    ] = 4,
    draw: Annotated[int, Opt("Number of random combinations of strategy, job, workers and bandwidth to measure.")] = 0,
    seed: Annotated[int, Opt("Seed of the random draw of combinations.")] = 0,
    rounds: Rounds = 1,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare predicted with measured seconds per step on limited links; needs Linux and root, takes minutes."""
    from flockstep_lab.bench import plots
    from flockstep_lab.bench import prediction as bench

    names = [text.strip() for text in bandwidths.split(",")]
    with show.status() as say:
        rounds = _at_least_one("rounds", rounds, 1)
        if draw:
            found = bench.measure_drawn(draw, seed, rounds, say)
        else:
            found = bench.measure(strategy or bench.STRATEGIES, names, rounds, say, job or bench.JOB, workers)
    headings = ("strategy", "bandwidth", "predicted", "measured", "error")
    rows = [
        [
            one.strategy,
            one.bandwidth,
            formatting.seconds(one.predicted),
            formatting.seconds(one.measured),
            f"{one.error:+.1%}",
        ]
        for one in found.pairs
    ]
    if out is not None:
        title = "Predicted and measured seconds per step"
        plots.page(title, plots.PREDICTED, plots.of_prediction(found), headings, rows).write(out)
    if as_json:
        show.json(found.document())
    else:
        _print((), False, headings, rows)
        for line in found.sentences():
            show.page().print(line, highlight=False, markup=False)
    if found.interrupted is not None:
        raise Interrupted(found.interrupted)


def _answer(
    title: str, figures: Sequence[Any], out: Path | None, as_json: bool, draw: Callable[[], Any], beside: str
) -> None:
    """Print the figures, each rate also as a multiple of that of the implementation `beside` it; draw
    them if asked to.
    """
    from flockstep_lab.bench import plots

    headings = ("implementation", "processes", "bytes", "time", "quartiles", "GB/s", f"of {beside}'s rate")
    rows = rows_of(figures, beside)
    if out is not None:
        plots.page(title, f"{plots.RATES} {LEGEND}", draw(), headings, rows).write(out)
    _print(figures, as_json, headings, rows, LEGEND, title)


def rows_of(figures: Sequence[Any], beside: str) -> list[list[str]]:
    """Return the rows of a table of measurements, as texts.

    Each rate is also given as a multiple of the rate of the implementation `beside`; noisy rows are marked with ~.
    """
    known = {(one.workers, one.bytes): one.seconds for one in figures if one.implementation == beside and one.seconds}
    rows = []
    for one in figures:
        start = [one.implementation, str(one.workers), f"{one.bytes:,}"]
        if one.seconds is None:
            rows.append([*start, "not here:", one.missing, "", ""])
            continue
        other = known.get((one.workers, one.bytes))
        noisy = " ~" if one.high - one.low > NOISY * one.seconds else ""
        quartiles = f"{formatting.seconds(one.low)} to {formatting.seconds(one.high)}{noisy}"
        ratio = "" if other is None else f"{other / one.seconds:.2f}"
        rows.append(
            [
                *start,
                formatting.seconds(one.seconds),
                quartiles,
                formatting.number(one.bytes / one.seconds / 1e9),
                ratio,
            ]
        )
    return rows


def _print(
    figures: Sequence[Any],
    as_json: bool,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    legend: str = "",
    title: str | None = None,
) -> None:
    """The figures as one JSON document, or as a table with a legend below."""
    if as_json:
        show.json(list(figures))
        return
    from flockstep.report.terminal import TableColumn, TextTable

    columns = [
        TableColumn(one, text=not place or one in WORDY, rank=RANKS.get(one, 0)) for place, one in enumerate(headings)
    ]
    show.page().print(TextTable(columns, rows, title or "", notes=[legend] if legend else []))


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    for number in numbers:
        least = 4 if name == "sizes" else 2 if name == "workers" else 1
        if number < least:
            raise ConfigurationError(
                f"{name} must be whole numbers >= {least} separated by commas, got {text!r}; write it like 16,64"
            )
    return numbers


def _at_least_one(name: str, value: int, usual: int = 20) -> int:
    if value < 1:
        raise ConfigurationError(f"{name} must be >= 1, got {value}; {usual} is usual")
    return value


def measure() -> None:
    """Measure transports, collectives, codecs and the simulator, and compare each with other implementations."""


app = group_of(
    {
        name: CommandEntry(f"{__name__}:{name}")
        for name in ("transport", "collectives", "codecs", "simulator", "prediction")
    },
    command_of(measure, "bench"),
    no_args_is_help=True,
)
