"""`flockstep bench`: how fast what moves arrays is on this machine, beside what else could move them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from flockstep.cli import show
from flockstep.errors import ConfigurationError

app = typer.Typer(no_args_is_help=True, help="Measure transports, collectives, codecs and the simulator beside others.")
Rounds = Annotated[int, typer.Option("--rounds", "-r", help="Repetitions; medians are shown.")]
Sizes = Annotated[str, typer.Option("--sizes", help="Bytes of the array, such as 4096,1048576.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also draw a picture, as one HTML file.")]


@app.command()
def transport(rounds: Rounds = 20, sizes: Sizes = "16777216", out: Out = None, as_json: Json = False) -> None:
    """One-way push with the receiver adding: ours, raw sockets and a memory copy."""
    from flockstep.bench import pictures
    from flockstep.bench.transport import COPY, measure

    with _progress() as say:
        figures = measure(_numbers("sizes", sizes), _at_least_one("rounds", rounds), say)
    _answer("One-way push, the receiver adding", figures, out, as_json, lambda: pictures.of_rates(figures), COPY)


@app.command()
def collectives(
    workers: Annotated[str, typer.Option("--workers", "-n", help="Numbers of processes.")] = "2,4",
    sizes: Sizes = "4096,1048576,4194304,33554432",
    rounds: Rounds = 20,
    way: Annotated[list[str] | None, typer.Option("--way", "-w", help="Only this one; repeat for each.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the table that collective auto(table=…) reads.")] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """All-reduce of float32: ours, gloo's and OpenMPI's."""
    from flockstep.bench import pictures
    from flockstep.bench.collectives import SHOWN, WAYS, candidates, measure, table_of
    from flockstep.collectives.table import write_table
    from flockstep.errors import UnknownName

    known = [one.name for one in WAYS]
    for name in way or []:
        if name not in known:
            raise UnknownName.among("way", name, known)
    names = list(dict.fromkeys([*(way or SHOWN), *(candidates() if save else [])]))
    counts = _numbers("workers", workers)
    with _progress() as say:
        figures = measure(names, counts, _numbers("sizes", sizes), _at_least_one("rounds", rounds), say)
    if save is not None:
        write_table(save, table_of(figures))
    _answer("All-reduce of float32", figures, out, as_json, lambda: pictures.of_rates(figures), "openmpi")


@app.command()
def codecs(
    codec: Annotated[list[str] | None, typer.Argument(help="Codecs to measure; all that are registered.")] = None,
    elements: Annotated[int, typer.Option(help="Elements of the array.")] = 4 << 20,
    rounds: Rounds = 20,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Encoding and decoding rates, relative to a copy of the same float32 array."""
    from flockstep.bench import pictures
    from flockstep.bench.codecs import measure
    from flockstep.codecs.base import Codec

    for text in codec or []:
        Codec.parse(text)
    with _progress() as say:
        figures = measure(codec, _at_least_one("elements", elements), _at_least_one("rounds", rounds), say)
    if out is not None:
        pictures.write(pictures.of_codecs(figures), out, "Rates of codecs, a copy being 1")
    if as_json:
        show.json([msgspec.to_builtins(figure) for figure in figures])
        return
    table = Table("codec", "bits an element", "encode", "encode + residual", "decode + add", "ms to encode")
    for one in figures:
        speeds = (one.encode, one.encode_residual, one.add_decoded)
        ms = "" if one.seconds is None else f"{one.seconds * 1000:.3g}"
        cells = [_number(one.bits), *map(_number, speeds), ms]
        table.add_row(one.codec, *(["", one.missing, "", "", ""] if one.missing else cells))
    show.page().print(table)
    show.page().print(
        f"rates as shares of a copy's of {elements:,} float32, more is faster; medians of {rounds} rounds"
    )


@app.command()
def simulator(
    replicas: Annotated[str, typer.Option("--replicas", "-n", help="Numbers of replicas.")] = "16,64,256",
    rounds: Rounds = 20,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Worker-steps per second in virtual time, beside a plain loop over the same gradients."""
    from flockstep.bench import pictures
    from flockstep.bench.simulator import STRATEGIES, measure

    with _progress() as say:
        figures = measure(STRATEGIES, _numbers("replicas", replicas), _at_least_one("rounds", rounds), say)
    if out is not None:
        pictures.write(pictures.of_simulator(figures), out, "Simulation beside a plain loop")
    if as_json:
        show.json([msgspec.to_builtins(figure) for figure in figures])
        return
    table = Table("replicas", "strategy", "worker-steps/s", "of the loop's", "events/s")
    for one in figures:
        events = "" if one.events is None else f"{one.events:,.0f}"
        table.add_row(str(one.replicas), one.strategy, f"{one.rate:,.0f}", f"{one.to_loop:.2f}", events)
    show.page().print(table)


def _answer(
    title: str, figures: Sequence[Any], out: Path | None, as_json: bool, draw: Callable[[], Any], beside: str
) -> None:
    """Print the figures, each rate also as a multiple of that of the way `beside` it; draw them if asked to."""
    from flockstep.bench.pictures import write

    if out is not None:
        write(draw(), out, title)
    if as_json:
        show.json([msgspec.to_builtins(figure) for figure in figures])
        return
    table = Table("processes", "bytes", "way", "time", "quartiles", "GB/s", f"of {beside}'s rate", title=title)
    known = {(one.workers, one.bytes): one.seconds for one in figures if one.way == beside and one.seconds}
    for one in figures:
        if one.seconds is None:
            table.add_row(str(one.workers), f"{one.bytes:,}", one.way, "not here:", one.missing)
            continue
        other = known.get((one.workers, one.bytes))
        ratio = "" if other is None else f"{other / one.seconds:.2f}"
        quartiles = f"{_time(one.low)} to {_time(one.high)}"
        rate = f"{one.bytes / one.seconds / 1e9:.3g}"
        table.add_row(str(one.workers), f"{one.bytes:,}", one.way, _time(one.seconds), quartiles, rate, ratio)
    show.page().print(table)
    show.page().print("time: median; GB/s: bytes of the array over that time. All ways took turns in one run.")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says what goes on, where somebody watches."""
    if not show.console.is_terminal:
        yield lambda what: None
        return
    with show.console.status("starting") as status:
        yield status.update


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    for number in numbers:
        least = 4 if name == "sizes" else 2 if name == "workers" else 1
        if number < least:
            raise ConfigurationError(
                f"{name} must be whole numbers >= {least} with commas between them, got {text!r}; write it like 16,64"
            )
    return numbers


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ConfigurationError(f"{name} must be >= 1, got {value}; 20 is usual")
    return value
